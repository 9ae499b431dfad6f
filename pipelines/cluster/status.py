"""python -m pipelines.status [sweep=latest] [watch=true]: where every cell and every job of a sweep stands."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from moend.errors import UserError
from pipelines.cli import terminal
from pipelines.cli.args import parse, program, store_default, store_path
from pipelines.cli.states import State, exit_code
from pipelines.cli.terminal import budget, question, say
from pipelines.cluster import slurm
from pipelines.cluster.jobs import End, Job, Started, Submitted, last_line, others, states
from pipelines.store import provenance
from pipelines.store.cells import CellStore, CorruptRecords, RecordKey, Store, parse_records, record_key
from pipelines.store.files import write_json

ORDER: tuple[State, ...] = ("done", "running", "pending", "failed", "blocked", "stopped", "infeasible")
COLOURS = {"done": "green", "running": "cyan", "failed": "red", "blocked": "magenta", "stopped": "yellow"}
REFRESH_S = 2.0
USAGE = """Where a sweep stands, from its files and, for cluster=slurm, from squeue.

  python -m pipelines.status [sweep=latest] [watch=false] [jobs=true] [paths.store=outputs]

  sweep        name of a sweep, or latest
  watch        true: stay and refresh until nothing is queued or running any more
  jobs         false: cells only
  paths.store  where it was run

Cells are done (the result is there), running (records so far, time left), pending (queued), failed (with the last
line and the log), blocked (something they need is missing), stopped (their jobs were cancelled or are gone; nobody
is working on them) or infeasible (the budget cannot be met). The command that was given computes what is missing.
Exit codes: 0 everything is done (or infeasible), 1 a cell failed, 2 one is blocked, or a mistake in the
command, 3 incomplete, and nothing has failed so far."""


@dataclass(frozen=True)
class CellView:
    """One cell: its state, why, and how far it is."""

    key: str
    info: dict[str, Any]
    payload: dict[str, Any]
    state: State
    detail: str = ""
    log: str = ""
    job: str = ""
    have: int = 0
    total: int = 0
    left: float | None = None  # seconds


@dataclass(frozen=True)
class View:
    """A sweep at one moment."""

    name: str
    command: str
    cells: list[CellView]
    jobs: list[tuple[Job, str, str]] = field(default_factory=list)  # with Slurm's state and reason
    started: dict[str, Started] = field(default_factory=dict)
    warning: str = ""

    @property
    def live(self) -> bool:
        """Whether somebody is, or will be, at work."""
        queued = any(state in slurm.LIVE for _, state, _ in self.jobs)
        return queued or any(c.state in ("running", "pending") for c in self.cells)

    @property
    def code(self) -> int:
        """The exit code that tells it."""
        return exit_code(c.state for c in self.cells)


def collect(store: Store, name: str) -> View:
    """Look at files first, at jobs second: a complete result is done, whatever became of its job."""
    manifest = store.read_manifest(name)
    sweep, warning = Submitted(store.sweep(manifest["name"])), ""
    known = [(sweep, sweep.jobs()), *others(sweep, (c["key"] for c in manifest["cells"]))]
    try:
        found = states(known)
    except (slurm.Unreachable, UserError) as e:
        warning = f"Slurm cannot be asked ({e}): states of jobs are unknown, files tell the rest"
        found = {j.id: ("UNKNOWN", "") for _, of in known for j in of}
    own = known[0][1]
    shared = [j for _, of in known[1:] for j in of if found[j.id][0] in slurm.LIVE]  # other sweeps' jobs, at work
    started = {id: said for other, _ in reversed(known) for id, said in other.started().items()}
    any_held = any(store.cell(c["key"]).is_held() for c in manifest["cells"])
    look = _Look(store, [s for s, _ in known], [*shared, *own], own, found, started, any_held)
    cells = [look.cell(c) for c in manifest["cells"]]
    shown = [(j, *found[j.id]) for j in (*own, *(j for j in shared if j.kind in ("run", "local")))]
    return View(manifest["name"], manifest["command"], cells, shown, started, warning)


@dataclass(frozen=True)
class _Look:
    store: Store
    sweeps: list[Submitted]  # this one first, then others that have submitted some of its cells
    jobs: list[Job]  # of other sweeps as long as they are at work, then those of this one
    own: list[Job]
    states: dict[str, tuple[str, str]]
    started: dict[str, Started]
    any_held: bool

    def cell(self, cell: dict[str, Any]) -> CellView:
        key, total = cell["key"], cell["info"]["n_expected"]
        folder = self.store.cell(key)

        def view(state: State, detail: str = "", **more: Any) -> CellView:
            return CellView(key, cell["info"], cell["payload"], state, detail, total=total, **more)

        if (result := folder.result()) is not None:
            return view("done", "; ".join(provenance.marks(result)), have=total)
        try:
            have = _count(folder)
        except CorruptRecords as e:
            return view("failed", str(e))
        mine = [j for j in self.jobs if j.kind in ("run", "local") and key in j.cells]
        live = [j for j in mine if self.states[j.id][0] in slurm.LIVE or self.states[j.id][0] == "UNKNOWN"]
        if cell["state"] == "infeasible":
            return view("infeasible", cell["reason"], have=have)
        if (end := self._end(key)) is not None:
            return view(end.state, end.reason, log=end.log, job=end.job, have=have)
        if cell["state"] in ("failed", "blocked") and not live:
            log = folder.folder / "log.txt"
            return view(cell["state"], cell["reason"], log=str(log) if log.exists() else "", have=have)
        if (why := self._blocked(cell, told_only=True)) is not None:
            return view("blocked", why[0], log=why[1], have=have)
        if folder.is_held() or any(self._begun(j) for j in live):
            job = next((j for j in live if self._begun(j)), None)
            return view("running", job=job.id if job else "", have=have, left=self._left(key, have, total, live))
        if live:
            return view("pending", self._waits(live[0]), job=live[0].id, have=have)
        if (why := self._blocked(cell)) is not None:
            return view("blocked", why[0], log=why[1], have=have)
        if mine:
            return self._ended(mine[-1], view, have)
        if self.any_held:  # a run in one process comes to this cell later
            return view("pending", have=have)
        return view("stopped", "nobody is working on it", have=have)

    def _end(self, key: str) -> End | None:
        """How a cell ended; as another sweep's jobs told it where this one has left the cell to them."""
        left = any(key in j.cells for j in self.own) and not any(
            key in j.cells and j.kind != "report" for j in self.own
        )
        return next((e for s in self.sweeps[: None if left else 1] if (e := s.end(key)) is not None), None)

    def _begun(self, job: Job) -> bool:
        """Whether its worker is at work. Workers of a supervisor share all cells: there, leases tell."""
        worker = self.started.get(job.id)
        return self.states[job.id][0] == "RUNNING" and worker is not None and worker.ended is None

    def _left(self, key: str, have: int, total: int, live: Sequence[Job]) -> float | None:
        """Seconds until the last record, by the pace since the workers at it began; None before the first."""
        heads = {j.id for j in live}
        workers = [s for s in self.started.values() if s.ended is None and (s.job in heads or _head(s.job) in heads)]
        ours = [s for s in workers if key in s.have]
        if not ours:
            return None
        first = min(ours, key=lambda s: s.begun)
        new = have - first.have[key]
        return (time.time() - first.begun) / new * (total - have) if new > 0 else None

    def _waits(self, job: Job) -> str:
        state, reason = self.states[job.id]
        if reason == "Dependency":
            return "waits for its calibration"
        again = self.started.get(job.id)
        if again is not None and again.ended is not None:
            return f"queued again, {again.restarts + 1} times so far"
        return "queued" + (f" ({reason})" if reason and state == "PENDING" else "")

    def _blocked(self, cell: dict[str, Any], told_only: bool = False) -> tuple[str, str] | None:
        """Why an artefact will not come: its job has said so, or has ended without it."""
        for kind, key in cell["payload"]["calibrations"].items():
            end = self.sweeps[0].end(f"calibration-{key}")
            if end is None and (self.store.calibration(key) / "artefact.json").exists():
                continue
            jobs = [] if told_only else [j for j in self.jobs if j.calibration == key]
            if end is not None:
                return f"calibration {kind} [{key}]: {end.reason}", end.log
            if jobs and self.states[jobs[-1].id][0] not in slurm.LIVE:
                view = self._ended(jobs[-1], lambda state, detail, **more: (detail, more["log"]), 0)
                return f"calibration {kind} [{key}]: {view[0]}", view[1]
        return None

    def _ended(self, job: Job, view: Any, have: int) -> Any:
        """The cell of a job that has ended, without a result and without a word of why."""
        state, worker = self.states[job.id][0], self.started.get(job.id)
        if worker is None and job.is_local:
            told = [s for s in self.started.values() if _head(s.job) == job.id]
            told.sort(key=lambda s: (s.ended in ("done", "incomplete"), s.ended is not None))  # who was killed is first
            worker = told[0] if told else None
        log = worker.log if worker else str(self.sweeps[0].log / f"{job.id}_0_log.out")
        if not Path(log).exists():
            log = ""
        last = last_line(log) if log else "its log is not there"
        if job.cancelled or state in ("CANCELLED", "PREEMPTED", slurm.GONE):
            state = "CANCELLED" if job.cancelled else state
            why = {"CANCELLED": "was cancelled", "PREEMPTED": "was preempted"}.get(state, "is gone from the queue")
            return view("stopped", f"job {job.id} {why}", log=log, job=job.id, have=have)
        if job.is_local:
            cancelled = worker is not None and worker.ended is not None and "KeyboardInterrupt" in worker.ended
            if worker is None or cancelled:
                return view("stopped", f"{job.id} was stopped", log=log, job=job.id, have=have)
            how = "was killed" if worker.ended is None else f"ended ({worker.ended})"
            return view(
                "failed", f"worker {worker.job} {how}" + (f": {last}" if last else ""), log=log, job=job.id, have=have
            )
        ended = "ended COMPLETED without it" if state == "COMPLETED" else f"ended {state}"
        return view("failed", f"job {job.id} {ended}: {last}", log=log, job=job.id, have=have)


def _count(folder: CellStore) -> int:
    return len(frozenset().union(*(_keys(path, path.stat().st_size) for path in folder.files())))


@functools.lru_cache(maxsize=10_000)
def _keys(path: Path, size: int) -> frozenset[RecordKey]:
    """What a file of records holds, read again only when it has grown: a table that refreshes itself stays cheap."""
    return frozenset(record_key(r) for r in parse_records(path.read_bytes(), path))


def _head(worker: str) -> str:
    """The supervisor's id in that of one of its workers: local-12-34 -> local-12."""
    return worker.rpartition("-")[0]


def record(store: Store, name: str, view: View) -> None:
    """Write how cells ended into the manifest, for the report. The sweep's place among the latest stays."""
    manifest = store.read_manifest(name)
    path = store.manifest(name)
    before = path.stat()
    states = {c.key: c for c in view.cells}
    for cell in manifest["cells"]:
        seen = states[cell["key"]]
        if seen.state in ("done", "failed", "blocked", "infeasible"):
            cell["state"], cell["reason"] = seen.state, seen.detail
    write_json(path, manifest)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def tables(view: View, *, jobs: bool) -> Group:
    """Cells, and the jobs that are not finished or that failed."""
    many = len({c.info["model"] for c in view.cells}) > 1
    head = (
        "cell",
        *(("model",) if many else ()),
        "method",
        "budget",
        "benchmark",
        "question",
        "state",
        "records",
        "left",
        "",
    )
    table = Table(*head, box=None, header_style="bold", title=summary(view), title_justify="left")
    for c in view.cells:
        left = "" if c.left is None else str(timedelta(seconds=round(c.left)))
        names = (c.info["method"], budget(c.payload["budget"]), c.info["benchmark"])
        model = (c.info["model"],) if many else ()
        state = Text(c.state, style=COLOURS.get(c.state, ""))
        detail = Text(c.detail, overflow="ellipsis", no_wrap=True)
        asked = question(c.payload["question_visible"])
        table.add_row(c.key[:8], *model, *names, asked, state, f"{c.have} of {c.total}", left, detail)
    parts: list[Any] = [table]
    shown = [(j, s, r) for j, s, r in view.jobs if s not in ("COMPLETED", "ENDED")]
    if jobs and shown:
        listed = Table("job", "kind", "what", "state", "", box=None, header_style="bold")
        for j, s, r in shown:
            listed.add_row(j.id, j.kind, j.what, s, r)
        parts += [Text(), listed]
    workers = [s for s in view.started.values() if s.job.startswith("local-") and s.ended is None]
    if jobs and (alive := [s for s in workers if s.process.alive()]):
        parts += [Text(f"workers at work: {', '.join(str(s.process.pid) for s in alive)}")]
    return Group(*parts)


def summary(view: View) -> str:
    """One line: how many cells are in which state."""
    counts = Counter(c.state for c in view.cells)
    return f"{view.name}: {len(view.cells)} cells: " + ", ".join(f"{counts[s]} {s}" for s in ORDER if counts[s])


def problems(view: View) -> list[str]:
    """What a person has to know and to type where something is missing."""
    lines = [view.warning] if view.warning else []
    ended = [c for c in view.cells if c.state in ("failed", "blocked", "stopped")]
    for c in ended:
        where = f" (log: {c.log})" if c.log else ""
        lines += [f"{c.state}: {c.info['label']} [{c.key}]: {c.detail}{where}"]
    if ended:
        lines.append(f"again, for what is missing: {view.command}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return program(argv, USAGE, _main)


def _main(args: list[str]) -> int:
    try:
        values = parse(args, {"sweep": "latest", "watch": "false", "jobs": "true", **store_default()})
        store, to = Store(store_path(values)), terminal.console()
        name = store.read_manifest(values["sweep"])["name"]
        view = _watch(store, name, to) if values["watch"] == "true" else collect(store, name)
        to.print(tables(view, jobs=values["jobs"] == "true"))
        for line in problems(view):
            say(to, line)
        return view.code
    except KeyboardInterrupt:
        return 130


def _watch(store: Store, name: str, to: Console) -> View:
    """On a terminal a table that refreshes itself; in a log a line where something changed."""
    said = ""
    with Live(console=to, auto_refresh=False, transient=True, screen=False) as screen:
        while True:
            view = collect(store, name)
            if to.is_terminal:
                screen.update(tables(view, jobs=True), refresh=True)
            elif (line := f"{summary(view)}; {sum(c.have for c in view.cells)} records") != said:
                say(to, line)
                said = line
            if not view.live:
                return view
            time.sleep(REFRESH_S)


if __name__ == "__main__":
    sys.exit(main())
