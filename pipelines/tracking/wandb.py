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
import faulthandler
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

from moend.errors import UserError
from pipelines.planning.identity import key as hash_of
from pipelines.planning.schema import TrackingConfig
from pipelines.planning.schema import sweeps as sweep_files
from pipelines.store.cells import Store, record_key
from pipelines.store.files import read_json, write_json
from pipelines.store.lease import Busy, Lease

FORM = 1  # of what is written; another number publishes every cell again
TAG = 64  # the longest tag W&B takes
LIMIT = 128  # the longest id and artifact name
STEPS = (
    "score",
    "answer_nll",
    "token_accuracy",
    "prompt_tokens",
    "new_tokens",
    "resident_bytes",
    "resident_bytes_peak",
)
Kind = Literal["cell", "report"]


@dataclass(frozen=True)
class Item:
    """What becomes a run: a finished cell, or the tables and figures of a sweep. `name` is the key or the sweep."""

    kind: Kind
    name: str

    @property
    def id(self) -> str:
        """The run's id: the same for the same item, always."""
        if self.kind == "cell":
            return self.name
        plain = re.fullmatch(r"[\w.-]{1,100}", self.name, re.ASCII)
        return f"report-{self.name if plain else hash_of(self.name)}"


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
        job = {"store": str(self.store.root), "sweep": self.sweep, "config": self.config.model_dump()}
        with (self.folder / "publish.log").open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "pipelines.tracking.wandb", json.dumps(job)],
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


def items(store: Store, sweep: str) -> list[Item]:
    """What there is to publish of a sweep: its complete cells, and its report where it has one."""
    keys = dict.fromkeys(c["key"] for c in store.read_manifest(sweep)["cells"])
    cells = [Item("cell", key) for key in keys if (store.cell(key).folder / "result.json").exists()]
    return [*cells, *([Item("report", sweep)] if report_files(store, sweep) else [])]


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


# What follows runs in the child.

HUNG, CRASHED = 1, 3  # exit codes; faulthandler's cannot be chosen


@dataclass(frozen=True)
class Source:
    """What an item is made from, as far as publishing again depends on it."""

    item: Item
    project: str
    entity: str | None
    group: str
    tags: tuple[str, ...]
    digest: str


def source(store: Store, item: Item, sweep: str, project: str, entity: str | None) -> Source | None:
    """What would be published of an item now; None where its files are not there.

    Project and entity count: wandb writes them into artifacts, where its upload program does not replace them.
    """
    if item.kind == "cell":
        path = store.cell(item.name).folder / "result.json"
        files = [path] if path.exists() else []
        sweeps = [s for s, keys in _membership(store).items() if item.name in keys]
    else:
        files, sweeps = report_files(store, item.name), [item.name]
    if not files:
        return None
    have = published(store, item)
    group = have["group"] if have and have["group"] in sweeps else sweep
    names = sorted({sweep, *sweeps})
    tags = tuple(dict.fromkeys(t[:TAG] for t in [*(f"sweep:{s}" for s in names), *(t for s in names for t in _of(s))]))
    contents = [hashlib.sha256(f.read_bytes()).hexdigest() for f in files]
    digest = hash_of([FORM, item.id, project, entity, group, list(tags), contents])
    return Source(item, project, entity, group, tags, digest)


def _of(sweep: str) -> list[str]:
    """The tags of the published table and the paper a sweep belongs to, also with an axis replaced (<name>-<8 hex>)."""
    table = re.sub(r"-[0-9a-f]{6,8}$", "", sweep)
    paper, underscore, _ = table.partition("_")
    return [f"table:{table}", f"paper:{paper}"] if underscore and table in sweep_files() else []


def _membership(store: Store) -> dict[str, frozenset[str]]:
    """The keys of each sweep of the store."""
    found = ((name, store.manifest(name)) for name in store.sweep_names())
    return {name: _keys(path, path.stat().st_mtime_ns) for name, path in found}


@functools.lru_cache(maxsize=1024)
def _keys(manifest: Path, _changed: int) -> frozenset[str]:
    return frozenset(c["key"] for c in read_json(manifest)["cells"])


def report_files(store: Store, sweep: str) -> list[Path]:
    """The tables and pictures of a sweep that are published. Not its pages: they name the command and its paths."""
    folder = store.report(sweep)
    return [*sorted(folder.glob("*.csv")), *sorted(folder.glob("*.png"))]


def published(store: Store, item: Item) -> dict[str, Any] | None:
    """What lies in the tracker's folder for an item; None where nothing whole does."""
    path = store.root / "wandb" / "published" / f"{item.id}.json"
    if not path.exists():
        return None
    have = read_json(path)
    return (
        have if (store.root / "wandb" / "wandb" / have["folder"]).is_dir() and have["root"] == str(store.root) else None
    )


def write(store: Store, made: Source) -> None:
    """Write one run, unless it is there already. Busy where another process is writing the same one."""
    have = published(store, made.item)
    if have and have["digest"] == made.digest:
        return
    root, name = store.root / "wandb", made.item.id
    lease = Lease(root / "published" / name)
    try:
        (root / "published" / f"{name}.json").unlink(missing_ok=True)
        for old in [*(root / "wandb").glob(f"*run-*-{name}"), root / "data" / name]:
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
        os.environ["WANDB_DATA_DIR"] = str(root / "data" / name)  # staged per run, so that a run takes its own along
        label, at = (_cell if made.item.kind == "cell" else _report)(store, made)
        about: dict[str, Any] = {
            "id": name,
            "kind": made.item.kind,
            "name": made.item.name,
            "label": label,
            "digest": made.digest,
        }
        about |= {
            "project": made.project,
            "entity": made.entity,
            "group": made.group,
            "folder": at.name,
            "root": str(store.root),
        }
        write_json(root / "published" / f"{name}.json", about)
    finally:
        lease.release()


@contextlib.contextmanager
def _run(made: Source, name: str, job: str, config: dict[str, Any], tags: Sequence[str]) -> Iterator[Any]:
    """A wandb run that records nothing by itself: no host, command, environment, code, packages or console."""
    import wandb

    run = wandb.init(
        project=made.project,
        entity=made.entity,
        id=made.item.id,
        name=name,
        group=made.group[:LIMIT],
        job_type=job,
        tags=[*made.tags, *(t[:TAG] for t in tags)],
        config=config,
        reinit="finish_previous",
        settings=wandb.Settings(
            console="off",
            silent=True,
            symlink=False,
            host="-",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        ),
    )
    try:
        yield run
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()


def _cell(store: Store, made: Source) -> tuple[str, Path]:
    """The run of a cell: config, a step per record, tables of records and layers, figures, artifacts, the result."""
    import wandb

    cell = store.cell(made.item.name)
    described, result = read_json(cell.folder / "payload.json"), read_json(cell.folder / "result.json")
    info, payload = described["info"], described["payload"]
    records = sorted(cell.records(), key=record_key)  # the same order however the work was shared and resumed
    names = {f"{k}_name": info[k] for k in ("model", "method", "benchmark")}
    config = {
        **payload,
        **names,
        "label": info["label"],
        "sweeps": [t.partition(":")[2] for t in made.tags if t.startswith("sweep:")],
    }
    tags = [f"{k}:{info[k]}" for k in ("model", "method", "benchmark")]
    plan = cell.folder / "plan.json"
    with _run(made, info["label"], "cell", config, tags) as run:
        run.define_metric("record/*", summary="none")
        for step, record in enumerate(records):
            run.log({f"record/{k}": v for k in STEPS if (v := record.get(k)) is not None}, step=step)
        columns, rows = record_table(records)
        wandb.Table.MAX_ROWS = max(wandb.Table.MAX_ROWS, len(rows))
        shown: dict[str, Any] = {"records": wandb.Table(columns=columns, data=rows)}
        columns, rows = layer_table(result)
        shown["layers"] = wandb.Table(columns=columns, data=rows)
        pictures = store.root / "wandb" / "data" / made.item.id / "figures"
        for path in _pictures(info["label"], result, read_json(plan) if plan.exists() else None, pictures):
            shown[f"figures/{path.stem}"] = wandb.Image(str(path))
        run.log(shown, step=len(records))
        run.summary.update(result)
        _artifact(run, "records", f"records-{cell.key}", sorted((cell.folder / "records").glob("*-of-*.jsonl")))
        if plan.exists():
            _artifact(run, "plan", f"plan-{cell.key}", [plan])
        for kind, key in payload["calibrations"].items():
            files = [p for p in sorted(store.calibration(key).glob("*")) if p.suffix in (".safetensors", ".json")]
            _artifact(run, "calibration", f"calibration-{kind}-{key}", files)
        at = Path(run.dir).parent
    return str(info["label"]), at


def record_table(records: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows, one row per record: the fields that are single values; lists per layer are in the artifact."""
    fields = dict.fromkeys(k for r in records for k in r)
    simple = [k for k in fields if all(isinstance(r.get(k), str | int | float | None) for r in records)]
    columns = [*simple, *(["gold"] if "gold" in fields and "gold" not in simple else [])]
    return columns, [
        [r.get(k) if k in simple else json.dumps(r.get(k), ensure_ascii=False) for k in columns] for r in records
    ]


def layer_table(result: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """What every layer was given and held: mean entries and kept share per head, and bits."""
    entries = result["entries_per_head"]
    columns = {**{k: entries[k] for k in ("requested", "held", "effective_keep")}}
    columns |= {"k_bits": result["k_bits"], "v_bits": result["v_bits"]}
    rows = [[i, *(_single(x) for x in line)] for i, line in enumerate(zip(*columns.values(), strict=True))]
    return ["layer", *columns], rows


def _single(value: Any) -> Any:
    return sum(value) / len(value) if isinstance(value, list) and value else value


def _pictures(label: str, result: dict[str, Any], plan: dict[str, Any] | None, folder: Path) -> list[Path]:
    from pipelines.reporting.figures import niah_heatmap, routing_map

    made = []
    if (grid := result.get("grid")) and niah_heatmap.draw([(label, grid)], folder / "niah_heatmap.png"):
        made.append(folder / "niah_heatmap.png")
    if plan and plan["layers"] and routing_map.draw([(label, plan)], folder / "routing_map.png"):
        made.append(folder / "routing_map.png")
    return made


def _report(store: Store, made: Source) -> tuple[str, Path]:
    """The run of a sweep: its tables (also as an artifact) and figures."""
    import wandb

    files = report_files(store, made.item.name)
    label = f"report of {made.item.name}"
    tables = [f for f in files if f.suffix == ".csv"]
    with _run(made, label, "report", {"sweep": made.item.name, "label": label}, []) as run:
        shown: dict[str, Any] = {f"figures/{f.stem}": wandb.Image(str(f)) for f in files if f.suffix == ".png"}
        for path in tables:
            columns, rows = csv_table(path)
            shown[f"tables/{path.stem}"] = wandb.Table(columns=columns, data=rows)
        run.log(shown, step=0)
        data = store.root / "wandb" / "data" / made.item.id / "tables"
        data.mkdir(parents=True)
        copies = [Path(shutil.copy(f, data / f.name)) for f in tables]  # the next report writes its own over them
        _artifact(run, "report", f"tables-{made.item.id}"[:LIMIT], copies)
        at = Path(run.dir).parent
    return label, at


def csv_table(path: Path) -> tuple[list[str], list[list[Any]]]:
    """A CSV file with columns of numbers as numbers; what is empty is None."""
    import csv

    with path.open(newline="", encoding="utf-8") as file:
        columns, *rows = csv.reader(file)
    numeric = [all(_is_number(r[i]) for r in rows if r[i]) and any(r[i] for r in rows) for i in range(len(columns))]
    return columns, [
        [None if x == "" else float(x) if number else x for x, number in zip(row, numeric, strict=True)] for row in rows
    ]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _artifact(run: Any, kind: str, name: str, files: Sequence[Path]) -> None:
    """Files of the store, by reference: they never change once a cell is done, and calibrations can be large."""
    import wandb

    if files:
        artifact = wandb.Artifact(name, type=kind)
        for path in files:
            artifact.add_file(str(path), name=path.name, policy="immutable", skip_cache=True)
        run.log_artifact(artifact)


def main() -> int:
    """Publish the items whose names arrive on standard input until it ends. Says on standard output what failed."""
    job = json.loads(sys.argv[1])
    store, config = Store(Path(job["store"])), TrackingConfig.model_validate(job["config"])
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what wandb prints belongs into the log
    with contextlib.suppress(OSError):
        os.nice(10)  # the evaluation comes first
    online = _uploader(store, config) if config.mode == "online" else None
    tried: set[str] = set()
    for line in _lines(sys.stdin.buffer):
        if line in tried:
            continue
        tried.add(line)
        kind, _, name = line.partition(" ")
        item = Item("cell" if kind == "cell" else "report", name)
        # From a thread of its own that no lock and no library can hold up: a hang ends the process, with its stack.
        faulthandler.dump_traceback_later(config.timeout_s, exit=True)
        try:
            if (made := source(store, item, job["sweep"], config.project, config.entity)) is not None:
                write(store, made)
                if online is not None:
                    online(item)
        except Busy:
            pass  # somebody else is writing it
        except Exception as e:
            print(time.strftime("%Y-%m-%d %H:%M:%S"), traceback.format_exc(), file=sys.stderr, flush=True)
            out.write(f"{item.id}: {' '.join(str(e).split())[:500] or type(e).__name__}\n")
            out.flush()
        finally:
            faulthandler.cancel_dump_traceback_later()
    return 0


def _uploader(store: Store, config: TrackingConfig) -> Callable[[Item], None]:
    """Uploads one item; where there is no key or network, that is found out once and not for every item."""
    from pipelines.tracking import upload as sync

    target = sync.Target.of(config.project, config.entity)
    refused: list[Exception] = []
    asked = False

    def upload(item: Item) -> None:
        nonlocal asked
        if not asked:
            asked = True
            try:
                sync.refuse_unreachable(target)
            except UserError as e:
                refused.append(e)
        if refused:
            raise refused[0]
        sync.upload_one(store, item, target, config.timeout_s)

    return upload


def _lines(stream: IO[bytes]) -> Iterator[str]:
    while line := stream.readline():
        yield line.decode().rstrip("\n")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:
        traceback.print_exc()
        sys.exit(CRASHED)
