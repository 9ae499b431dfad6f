"""Runs a plan: calibrations first, then the groups, one prefill per example for all their cells.

In this process, or handed to local workers or a cluster (pipelines.cluster.submit), whose workers use this `Runner`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from moend.errors import Blocked, Infeasible, UserError
from pipelines.cli import terminal
from pipelines.cli.states import State
from pipelines.cli.terminal import say
from pipelines.execution import session as evaluate
from pipelines.planning.needs import CalibrationNeed
from pipelines.planning.planner import Cell, Plan
from pipelines.results import aggregate as results
from pipelines.store.cells import CorruptRecords, RecordKey, Shard, record_key, state_name
from pipelines.store.files import write_json
from pipelines.store.lease import Busy, LeaseLost, forget, held

POLL_S = 1.0


Context = tuple[tuple[str, str], ...]  # (task, id) of the examples that share one
Unit = tuple[list[Cell], int]  # cells of a group, and the shard of its examples


class Runner:
    """The execution of a plan. Cells end `done`, `failed`, `blocked` or `infeasible`; one never takes others along.

    shards: do these only, others do the rest (None: all of them). contexts: do these only, and leave cells that lack
    others unfinished (None: all of them). turn: begin there in the list of units, so that
    workers that share one list meet late. patient: wait for cells that are in other hands; else leave them to those.
    missing: says why an artefact is not there where this process is not the
    one to compute it. ended: told of every cell that ends without a result. done: told of every cell that has one now.
    """

    def __init__(
        self,
        plan: Plan,
        library: evaluate.Library,
        console: Console,
        *,
        shards: Sequence[int] | None = None,
        contexts: Collection[Context] | None = None,
        turn: float = 0.0,
        patient: bool = True,
        missing: Callable[[CalibrationNeed], str] | None = None,
        ended: Callable[[Cell], None] = lambda cell: None,
        done: Callable[[Cell], None] = lambda cell: None,
    ):
        self.plan, self.library, self.console = plan, library, console
        self.patient = patient
        self.shards, self.turn, self.missing, self.ended, self.done = shards, turn, missing, ended, done
        self.contexts = contexts

    def run(self) -> None:
        """Calibrate, then work through the units until every cell has reached an end, as far as it is ours."""
        self.calibrate()
        waiting = self._units()
        told = False
        with self._progress(sum(len(self._ours(cell, index)) for group, index in waiting for cell in group)) as advance:
            while waiting := [u for u in ((_running(group), index) for group, index in waiting) if u[0]]:
                busy = [(self._take(group, index, advance), index) for group, index in waiting]
                if (n := sum(len(group) for group, _ in busy)) == sum(len(group) for group, _ in waiting):
                    if not self.patient:
                        say(self.console, f"{n} of these cells are in another process's hands: left to it")
                        break
                    if not told:  # all of it is in other hands
                        say(self.console, f"waiting for another process that is computing {n} of these cells")
                        told = True
                    time.sleep(POLL_S)
                waiting = busy
        if self.shards is None and self.contexts is None:
            lost = [c for group in self.plan.groups for c in _running(group)]
            self._fail(lost, RuntimeError("records are missing although nothing failed"), self.plan.name)

    def _units(self) -> list[Unit]:
        units = []
        for group in self.plan.groups:
            count = _count(group)
            units += [(_running(group), i) for i in (range(count) if self.shards is None else self.shards)]
        begin = int(self.turn * len(units))
        return units[begin:] + units[:begin]

    def _ours(self, cell: Cell, index: int) -> list[RecordKey]:
        """The records of a shard that the plan found missing."""
        examples = {x for context in self._contexts(cell, index) for x in context}
        return [k for k in cell.missing if k[:2] in examples]

    def _contexts(self, cell: Cell, index: int) -> list[Context]:
        """The contexts of a shard that are to be done."""
        mine = cell.facts.contexts[index :: _count([cell])]
        return [context for context in mine if self.contexts is None or context in self.contexts]

    def calibrate(self, only: str | None = None) -> None:
        """Load or compute every artefact, or one; cells whose artefact is refused are blocked, with the reason."""
        for key, (need, cell) in self.plan.calibrations.items():
            if only not in (None, key):
                continue
            users = [c for c in self.plan.cells if c.state == "run" and need in c.facts.calibrations]
            if not users:  # another of their artefacts was refused
                continue
            folder = self.plan.store.calibration(key)
            try:
                there = (folder / "artefact.json").exists()
                if self.missing is not None and not there:
                    raise Blocked(self.missing(need))
                with contextlib.nullcontext() if there else _alone(folder, self.console):
                    if not (folder / "artefact.json").exists():
                        say(self.console, f"calibrating: {need.kind} of {cell.facts.model} [{key}]")
                    self.library.calibrate(cell.config, cell.facts, need, folder)
                forget(folder)
            except UserError as e:
                self._block(users, e)
            except OSError as e:
                if _is_storage(e):
                    raise
                self._fail(users, e, f"calibration {need.kind} [{key}]")
            except Exception as e:
                self._fail(users, e, f"calibration {need.kind} [{key}]")

    def _take(self, group: list[Cell], index: int, advance: Any) -> list[Cell]:
        """One shard of the cells of a group that nobody else is writing; returns those that somebody is."""
        busy: list[Cell] = []
        with contextlib.ExitStack() as stack:
            shards: dict[str, Shard] = {}
            for cell in _running(group):
                folder = self.plan.store.cell(cell.key)
                try:
                    folder.create(cell.payload, cell.info)
                    if folder.result() is not None:  # another process finished it since the plan was made
                        cell.state = "done"
                        continue
                    shards[cell.key] = stack.enter_context(folder.shard(index, _count(group)))
                except Busy:
                    busy.append(cell)
                except CorruptRecords as e:
                    self._fail([cell], e, cell.label)
            cells = [c for c in group if c.key in shards]
            try:
                if cells:
                    self._shard(cells, shards, index, advance)
            except LeaseLost:  # this process slept for long, and another one went on with its work
                busy += _running(cells)
        for cell in (c for c in _running(group) if c not in busy):
            self._finish(cell)
        return busy

    def _shard(self, cells: list[Cell], shards: dict[str, Shard], index: int, advance: Any) -> None:
        try:
            done = {c.key: self.plan.store.cell(c.key).done() for c in cells}
            session = None
            for examples in self._contexts(cells[0], index):
                jobs = [
                    (c, draw)
                    for c in cells
                    for draw in range(c.draws)
                    if c.state == "run" and any((*example, draw) not in done[c.key] for example in examples)
                ]
                if jobs and session is None:
                    session = self._open(cells)
                    jobs = [job for job in jobs if job[0].state == "run"]
                if jobs and session is not None:
                    for cell, record in self._context(session, jobs, examples):
                        if record_key(record) not in done[cell.key]:  # a question that an earlier process answered
                            shards[cell.key].append(record)
                            advance()
                    for cell in {c.key: c for c, _ in jobs}.values():
                        self.plan.store.cell(cell.key).forget(state_name(examples))
        except UserError as e:
            self._block(cells, e)
        except OSError as e:
            if _is_storage(e):
                raise
            self._fail(cells, e, cells[0].label)
        except LeaseLost:
            raise
        except Exception as e:
            self._fail(cells, e, cells[0].label)

    def _open(self, cells: list[Cell]) -> evaluate.Session:
        """The model, with every cell's method fitted to it; a cell whose method does not fit ends here."""
        session = self.library.session(cells[0].config)
        for cell in _running(cells):
            try:
                folders = {n.kind: self.plan.store.calibration(n.key) for n in cell.facts.calibrations}
                plan = session.bind(cell.key, cell.config, cell.facts, folders)
                if plan is not None:
                    write_json(self.plan.store.cell(cell.key).folder / "plan.json", plan)
            except Infeasible as e:
                self._refuse(cell, "infeasible", e)
            except UserError as e:
                self._refuse(cell, "blocked", e)
        return session

    def _end(self, cell: Cell, state: State, error: BaseException) -> None:
        cell.state, cell.reason = state, _line(error)
        self.ended(cell)

    def _block(self, cells: list[Cell], error: UserError) -> None:
        for cell in _running(cells):
            self._end(cell, "blocked", error)
        if len(self.plan.cells) > 1:  # a cell alone has it as its command's error
            say(self.console, f"blocked: {len(cells)} cells: {_line(error)}")

    def _refuse(self, cell: Cell, state: State, error: UserError) -> None:
        self._end(cell, state, error)
        say(self.console, f"{state}: {cell.label}: {cell.reason}")

    def _context(
        self, session: evaluate.Session, jobs: list[tuple[Cell, int]], examples: Sequence[tuple[str, str]]
    ) -> Iterator[tuple[Cell, dict[str, Any]]]:
        """The examples of one context for all cells together; where that fails, cell by cell."""
        batches = [jobs]
        while batches:
            batch = batches.pop(0)
            cells = list({c.key: c for c, _ in batch}.values())
            try:
                records = session.run([(c.key, draw) for c, draw in batch], examples, lambda x: say(self.console, x))
            except Exception as e:
                if isinstance(e, UserError) and not isinstance(e, Infeasible):
                    raise
                if isinstance(e, OSError) and _is_storage(e):
                    raise
                if len(cells) > 1:
                    batches = [[job for job in batch if job[0] is c] for c in cells] + batches
                elif isinstance(e, Infeasible):
                    self._refuse(cells[0], "infeasible", e)
                else:
                    self._fail(cells, e, f"{cells[0].label} at {'/'.join(examples[0])}")
                continue
            yield from zip((c for _ in examples for c, _ in batch), records, strict=True)

    def _finish(self, cell: Cell) -> None:
        """Write the result where all records are there now; the other shards may still be in other hands."""
        folder = self.plan.store.cell(cell.key)
        try:
            described = {"key": cell.key, "payload": cell.payload, "info": cell.info}
            if folder.finish(cell.expected, lambda records: results.aggregate(described, records)):
                cell.state = "done"
                self.done(cell)
        except OSError as e:
            if _is_storage(e):
                raise
            self._fail([cell], e, cell.label)
        except Exception as e:
            self._fail([cell], e, cell.label)

    def _fail(self, cells: Sequence[Cell], error: BaseException, what: str) -> None:
        log: Path | None = None
        if not (running := _running(cells)):
            return
        for cell in running:
            folder = self.plan.store.cell(cell.key)
            folder.create(cell.payload, cell.info)
            log = folder.log("".join(traceback.format_exception(error)))
            self._end(cell, "failed", error)
        where = f" (traceback in {log})" if log else ""
        say(self.console, f"failed: {what}: {_line(error)}{where}")

    @contextlib.contextmanager
    def _progress(self, total: int) -> Iterator[Any]:
        """Counts records, with the time left."""
        with terminal.progress(self.console, "records") as step:
            counter = itertools.count(1)
            yield lambda: step(next(counter), total)


def _running(cells: Sequence[Cell]) -> list[Cell]:
    return [c for c in cells if c.state == "run"]


def _count(group: Sequence[Cell]) -> int:
    return group[0].config.cluster.shards or 1


def _alone(folder: Path, console: Console) -> contextlib.AbstractContextManager[None]:
    """Hold a calibration's folder: two processes that need the same artefact compute it once."""
    waiting = f"waiting for another process that is computing calibration {folder.name}"
    return held(folder, lambda: say(console, waiting), POLL_S)


def _is_storage(error: OSError) -> bool:
    """A full or unwritable disk stops everything; other operating system errors are one cell's."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
