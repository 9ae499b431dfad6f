"""python -m pipelines.sync: upload to W&B what lies in the store, as often as needed and never twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import ValidationError
from rich.console import Console

from moend.errors import UserError
from pipelines.cli import terminal
from pipelines.cli.args import parse, program, store_default, store_path
from pipelines.cli.hydra import Terminated, termination
from pipelines.cli.terminal import say
from pipelines.planning.schema import TrackingConfig, mistake
from pipelines.store.cells import Store
from pipelines.store.lease import Busy, Lease
from pipelines.tracking import items
from pipelines.tracking import wandb as tracking
from pipelines.tracking.items import Item

SERVER = "https://api.wandb.ai"
PROJECT = "moend"  # of a cell that was run without a tracker
REACH_S = 15  # seconds to wait for the server's first answer
USAGE = """Upload finished cells and reports to W&B. Needs neither model nor data; runs where the network is.

  python -m pipelines.sync [sweep=all] [dry_run=false] [project=] [entity=] [parallel=4] [timeout_s=600]
                           [paths.store=outputs]

  sweep        name of a sweep, latest, or all sweeps of the store
  dry_run      true: list what would be uploaded, and stop
  project      of W&B; empty: what the run said (tracking.project), else moend
  entity       user or team of W&B; empty: what the run said, else your default
  parallel     uploads at once
  timeout_s    for one upload
  paths.store  where the sweeps were run, with any tracking=

The key is WANDB_API_KEY, or what `wandb login` wrote; the server $WANDB_BASE_URL, or W&B's own. Every cell is one run
with the cell's key as its id and the sweep as its group. What has no W&B files yet (tracking=none), or old ones
(scores were computed again), gets them first. <store>/wandb/uploads.jsonl is the ledger: the same command again, also
after a kill, uploads what is missing or has changed and nothing else.
Exit codes: 0 all is uploaded, 1 some uploads failed, 2 a mistake in the command, or no key or network, 3 something is
left to upload (dry run), 130 interrupted."""


@dataclass(frozen=True)
class Target:
    """Where uploads go. A run that is at one target is still to be uploaded to another."""

    server: str
    entity: str
    project: str

    @classmethod
    def of(cls, project: str, entity: str | None) -> Target:
        """The server that wandb's own variable names, or W&B's."""
        return cls((os.environ.get("WANDB_BASE_URL") or SERVER).rstrip("/"), entity or "", project)

    def __str__(self) -> str:
        return "/".join(x for x in (self.server, self.entity, self.project) if x)


@dataclass(frozen=True)
class Todo:
    """One item of a sweep, where it goes, and what of it is there."""

    item: Item
    target: Target
    sweep: str
    label: str
    state: str  # uploaded, or why not


class Ledger:
    """What was uploaded: one line per upload, appended and synced. A torn last line is an upload to do again."""

    def __init__(self, store: Store):
        self.path = store.root / "wandb" / "uploads.jsonl"
        self.lock = threading.Lock()

    def entries(self) -> set[tuple[str, str, Target]]:
        """(id, digest, target) of every upload that ended well."""
        found = set()
        lines = self.path.read_bytes().splitlines() if self.path.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
                found.add((entry["id"], entry["digest"], Target(entry["server"], entry["entity"], entry["project"])))
            except (ValueError, KeyError, TypeError):
                continue  # torn by a kill; at worst a run is uploaded once more, over itself
        return found

    def add(self, id: str, digest: str, target: Target) -> None:
        """Write down an upload that ended well."""
        entry = {"id": id, "digest": digest, **target.__dict__, "when": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        with self.lock, self.path.open("a+b") as file:
            if file.tell() and self.path.read_bytes()[-1:] != b"\n":
                file.write(b"\n")  # a torn line must not take this one along
            file.write((json.dumps(entry) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return program(argv, USAGE, _main)


def _main(args: list[str]) -> int:
    defaults = {"sweep": "all", "dry_run": "false", "project": "", "entity": "", "parallel": "4"}
    values = parse(args, {**defaults, "timeout_s": "600", **store_default()})
    parallel, timeout = _positive("parallel", values), _positive("timeout_s", values)
    project, entity = values["project"] or None, values["entity"] or None
    store, to = Store(store_path(values)), terminal.console()
    found = todo(store, values["sweep"], project, entity)
    left = [t for t in found if t.state != "uploaded"]
    if values["dry_run"] == "true":
        for t in found:
            say(to, f"{t.state}: {t.label} [{t.item.id}] of {t.sweep}")
        say(to, f"{len(left)} of {len(found)} runs to upload to {_places(found)}")
        return 3 if left else 0
    if not left:
        say(to, f"all {len(found)} runs are at {_places(found)}" if found else "there is no finished cell to upload")
        return 0
    refuse_unreachable(left[0].target)
    try:
        tracking.prepare(store.root / "wandb")
        lease = Lease(store.root / "wandb" / "uploads.jsonl")
    except Busy:
        raise UserError(f"another sync of {store.root} is running") from None
    try:
        with termination():
            return _upload(store, left, timeout, parallel, to)
    except KeyboardInterrupt as e:
        say(to, "interrupted; the same command again uploads the rest")
        return 143 if isinstance(e, Terminated) else 130
    finally:
        lease.release()


def _places(found: list[Todo]) -> str:
    return ", ".join(sorted({str(t.target) for t in found})) or SERVER


def _positive(name: str, values: dict[str, str]) -> int:
    if not values[name].isdecimal() or int(values[name]) < 1:
        raise UserError(f"{name} is a whole number above zero, got '{values[name]}'")
    return int(values[name])


def todo(store: Store, sweep: str, project: str | None, entity: str | None) -> list[Todo]:
    """Every item of the sweeps, once, and whether it is uploaded, written and waiting, old, or not written yet."""
    wanted = _config("offline", project or PROJECT, entity, 1)  # refuses a name that is none
    sweeps = store.sweep_names() if sweep == "all" else [store.read_manifest(sweep)["name"]]
    if not sweeps:
        raise UserError(f"no sweep was run into {store.root} yet")
    entries, found = Ledger(store).entries(), dict[Item, Todo]()
    for name in sweeps:
        labels = {c["key"]: c["info"]["label"] for c in store.read_manifest(name)["cells"]}
        for item in items.items(store, name):
            have = items.published(store, item)
            target = Target.of(
                project or (have or {}).get("project") or wanted.project, entity or (have or {}).get("entity")
            )
            made = items.source(store, item, name, target.project, target.entity or None)
            if item in found or made is None:
                continue
            if (item.id, made.digest, target) in entries:
                state = "uploaded"
            elif have is None:
                state = "to be written and uploaded"
            else:
                state = "to be uploaded" if have["digest"] == made.digest else "to be written again and uploaded"
            found[item] = Todo(item, target, name, labels.get(item.name, f"report of {item.name}"), state)
    return list(found.values())


def refuse_unreachable(target: Target) -> None:
    """UserError in one line where there is no key, or no server answers."""
    import urllib.error
    import urllib.request

    if not has_key(target.server):
        raise UserError(f"no key for {target.server}: set WANDB_API_KEY or run `wandb login`; nothing was uploaded")
    try:
        urllib.request.urlopen(target.server, timeout=REACH_S).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except (OSError, ValueError) as e:
        why = getattr(e, "reason", None) or e
        raise UserError(f"{target.server} cannot be reached ({why}); nothing was uploaded") from None


def has_key(server: str) -> bool:
    """Whether wandb will find a key; where, it knows itself."""
    import netrc

    if os.environ.get("WANDB_API_KEY"):
        return True
    paths = [os.environ.get("NETRC", ""), "~/.netrc", "~/_netrc"]
    for path in (Path(p).expanduser() for p in paths if p):
        try:
            if netrc.netrc(path).authenticators(urlsplit(server).hostname or ""):
                return True
        except (OSError, netrc.NetrcParseError, RuntimeError):
            continue
    return False


def _config(mode: Literal["offline", "online"], project: str, entity: str | None, timeout_s: float) -> TrackingConfig:
    try:
        return TrackingConfig(mode=mode, project=project, entity=entity, timeout_s=timeout_s)
    except ValidationError as e:
        raise mistake(e) from None


def _upload(store: Store, left: list[Todo], timeout_s: int, parallel: int, to: Console) -> int:
    for sweep, target in dict.fromkeys((t.sweep, t.target) for t in left):
        stale = [t.item for t in left if (t.sweep, t.target) == (sweep, target) and t.state != "to be uploaded"]
        config = _config("offline", target.project, target.entity or None, timeout_s)
        if stale and not tracking.publish(store, sweep, config, stale):
            say(to, f"not all runs of {sweep} could be written")
    failed = 0
    with ThreadPoolExecutor(parallel) as pool:
        jobs = {pool.submit(upload_one, store, t.item, t.target, timeout_s): t for t in left}
        try:
            for i, job in enumerate(as_completed(jobs), 1):
                label = f"{jobs[job].label} [{jobs[job].item.id}]"
                if (error := job.exception()) is None:
                    say(to, f"uploaded {i} of {len(left)}: {label}")
                elif isinstance(error, UserError):
                    failed += 1
                    say(to, f"failed {i} of {len(left)}: {label}: {error}")
                else:
                    raise error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            _stop_all()
            raise
    say(
        to,
        f"{len(left) - failed} of {len(left)} runs uploaded to {_places(left)}" + "; again for the rest" * bool(failed),
    )
    return 1 if failed else 0


_running: set[subprocess.Popen[str]] = set()


def _stop_all() -> None:
    for child in list(_running):
        child.kill()


def upload_one(store: Store, item: Item, target: Target, timeout_s: float) -> None:
    """Upload what is written of an item, by wandb's own program, and write it into the ledger. UserError: it failed."""
    have = items.published(store, item)
    if have is None or (have["project"], have["entity"] or "") != (target.project, target.entity):
        raise UserError("its W&B files could not be written")
    ledger = Ledger(store)
    if (item.id, have["digest"], target) in ledger.entries():
        return
    root = store.root / "wandb"
    run = root / "wandb" / have["folder"]
    for mark in [*run.glob("*.synced"), *run.glob("*.syncstate")]:
        mark.unlink()  # of another target: wandb knows only whether a run was uploaded, not where to
    command = [sys.executable, "-m", "wandb", "sync", "--yes", str(run)]
    environment = tracking.environment(root, "online", key=True)
    environment |= {"WANDB_BASE_URL": target.server, "WANDB_DATA_DIR": str(root / "data" / item.id)}
    environment.pop("WANDB_SILENT")  # its last line says what went wrong
    child = subprocess.Popen(
        command, cwd=root, env=environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    _running.add(child)
    try:
        said, _ = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise UserError(f"took longer than {timeout_s:g} s") from None
    finally:
        child.kill()
        child.wait()
        _running.discard(child)
    # It ends with 0 also where the server refused the key; its mark and its words tell.
    if child.returncode or not list(run.glob("*.wandb.synced")) or "wandb: ERROR" in said:
        raise UserError(_reason(said, child.returncode))
    ledger.add(item.id, have["digest"], target)


def _reason(said: str, code: int) -> str:
    """wandb's line about what went wrong."""
    lines = [line.removeprefix("wandb:").strip() for line in said.splitlines()]
    telling = [x for x in lines if x.startswith(("ERROR", "Error", "WARNING")) or "rror:" in x or "failed" in x.lower()]
    return " ".join((telling or lines or [""])[-1].split())[:300] or f"wandb ended with {code}"


if __name__ == "__main__":
    sys.exit(main())
