"""W&B as a view of the files: every finished cell becomes one run, written from its files and never from live state.

A child process does it beside the evaluation, with time limits, and is killed where it hangs. A run's id is the cell's
key and its group the sweep: publishing again replaces the run, so an evaluation that was resumed neither doubles nor
loses a step. Everything lies under <store>/wandb, and nothing leaves the machine (that is `pipelines.sync`):

wandb/offline-run-<time>-<id>/  what wandb writes      data/<id>/   what it stages for upload
published/<id>.json             what lies there now    uploads.jsonl  what was uploaded, and where to
publish.log                     why something failed   cache/, config/, artifacts/  wandb's own folders
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from moend.version import warn_untested
from pipelines.planning.schema import TrackingConfig
from pipelines.store.cells import Store
from pipelines.tracking.items import Item

HUNG = 1  # the exit code of faulthandler, which cannot be chosen


class Tracker:
    """Tells a child process what is finished. `with` it around a run: what fails here is one warning and nothing else.

    `add` never waits. Leaving the block waits until the child has written what it was given, `timeout_s` at the most;
    where the block ends by an error or an interrupt, the child is killed at once.
    """

    def __init__(self, store: Store, sweep: str, config: TrackingConfig):
        self.store, self.sweep, self.config = store, sweep, config
        self.folder = store.root / "wandb"
        self.child: subprocess.Popen[bytes] | None = None
        self.problem, self.left = "", 0
        if self.on:
            try:
                prepare(self.folder)
            except OSError as e:
                self.problem = f"cannot write {e.filename or self.folder}: {e.strerror or e}"
                self._warn()  # before anything is computed: nobody should learn it hours later

    @property
    def on(self) -> bool:
        """Whether there is anything to publish to."""
        return self.config.mode != "none" and not self.problem

    def add(self, item: Item) -> None:
        """Have an item published, soon. Returns at once whatever the child does."""
        if not self.on:
            return
        try:
            self.child = self.child or self._start()
            assert self.child.stdin is not None
            line = f"{item.kind} {item.name}\n".encode()
            os.write(self.child.stdin.fileno(), line)  # one write: all of it or nothing
        except BlockingIOError:
            self.left += 1  # thousands wait already
        except OSError as e:
            self._fail(self._last_words() or str(e))

    def _start(self) -> subprocess.Popen[bytes]:
        warn_untested("wandb")
        job = {"store": str(self.store.root), "sweep": self.sweep, "config": self.config.model_dump()}
        with (self.folder / "publish.log").open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "pipelines.tracking.runs", json.dumps(job)],
                cwd=self.store.root,
                env=environment(self.folder, "offline", key=self.config.mode == "online"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # interrupts are ours to handle, and all of it can be killed
            )
        assert child.stdin is not None
        os.set_blocking(child.stdin.fileno(), False)
        return child

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.child is None:
            return
        if error is not None:
            self._kill()
            return
        try:
            said, _ = self.child.communicate(timeout=self.config.timeout_s)
            lines = said.decode(errors="replace").splitlines()
            if self.child.returncode:
                self._fail(self._last_words())
            elif lines:
                more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
                self._fail(f"failed: {lines[0]}{more}")
            elif self.left:
                self._fail(f"left {self.left} runs out: too many at once")
        except subprocess.TimeoutExpired:
            self._fail(f"took longer than {self.config.timeout_s:g} s")
        except OSError as e:
            self._fail(str(e))
        except BaseException:  # an interrupt while waiting
            self._kill()
            raise

    def _last_words(self) -> str:
        code = None if self.child is None else self.child.poll()
        if code is None:
            return ""
        return f"was stopped after {self.config.timeout_s:g} s without an end" if code == HUNG else f"ended with {code}"

    def _fail(self, why: str) -> None:
        """The first problem ends the tracking of this run; the next run or `pipelines.sync` publishes the rest."""
        self._kill()
        if not self.problem:
            self.problem = why
            self._warn()

    def _kill(self) -> None:
        if self.child is not None:
            with contextlib.suppress(OSError):
                os.killpg(self.child.pid, signal.SIGKILL)
            for pipe in (self.child.stdin, self.child.stdout):
                with contextlib.suppress(OSError):
                    pipe and pipe.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(5)
            self.child = None

    def _warn(self) -> None:
        from rich.console import Console

        Console(stderr=True).print(
            f"warning: the tracker {self.problem}; results are not touched by that, and python -m pipelines.sync can "
            f"publish them later (log: {self.folder / 'publish.log'})",
            markup=False, emoji=False, highlight=False, soft_wrap=True,
        )  # fmt: skip


def publish(store: Store, sweep: str, config: TrackingConfig, items: Iterable[Item]) -> bool:
    """Publish what is not published yet, and wait. A tracker that fails or hangs costs one warning. True: all well."""
    with Tracker(store, sweep, config) as tracker:
        for item in items:
            tracker.add(item)
    return not tracker.problem


def prepare(folder: Path) -> None:
    """Make the tracker's folder and prove that it can be written; wandb would move elsewhere and say little of it."""
    for name in ("published", "wandb", "data"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        probe = folder / name / f".probe-{secrets.token_hex(6)}"
        probe.touch()
        probe.unlink()
    (folder / "publish.log").open("ab").close()


def environment(folder: Path, mode: str, *, key: bool = False) -> dict[str, str]:
    """A tracker's environment: its paths in `folder`; of the shell's wandb variables none but, where asked, the key."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    if key:
        kept |= {k: os.environ[k] for k in ("WANDB_API_KEY", "WANDB_BASE_URL") if k in os.environ}
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (root, kept.get("PYTHONPATH", "")) if p)
    return {
        **kept,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "MPLCONFIGDIR": str(folder / "cache" / "matplotlib"),  # its folder in a home that cannot be written is noise
        "WANDB_MODE": mode,
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_SILENT": "true",
        "WANDB_DIR": str(folder),
        "WANDB_DATA_DIR": str(folder / "data"),
        "WANDB_CACHE_DIR": str(folder / "cache"),
        "WANDB_CONFIG_DIR": str(folder / "config"),
        "WANDB_ARTIFACT_DIR": str(folder / "artifacts"),
    }
