"""Runs a plan in this process: calibrations first, then the groups, one prefill per example for all their cells."""

from __future__ import annotations

import contextlib
import errno
import itertools
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from moend.errors import Infeasible, UserError
from pipelines import evaluate, planner, results, terminal
from pipelines.compose import Point, command
from pipelines.planner import Cell, Plan, State
from pipelines.store import Busy, CorruptRecords, Lease, LeaseLost, Shard, write_json
from pipelines.terminal import say

POLL_S = 1.0


def launch(points: Sequence[Point], args: Sequence[str]) -> int:
    """Plan, run, tabulate. Returns the exit code."""
    from pipelines import report, tracking

    console = terminal.console()
    library = evaluate.Library()
    plan = planner.make_plan(points, library)
    config = plan.cells[0].config
    alone = plan.cells[0] if len(plan.cells) == 1 else None
    if alone and alone.state == "infeasible":
        raise UserError(alone.reason)
    planner.show(plan, console, every_cell=config.dry_run)
    if config.dry_run:
        return 0
    plan.store.prepare()
    manifest = plan.store.manifest(plan.name)
    manifest.parent.mkdir(parents=True, exist_ok=True)
    write_json(manifest, planner.manifest(plan, args, "run"))
    fresh = [c for c in plan.cells if c.state == "run"]
    Runner(plan, library, console).run()
    write_json(manifest, planner.manifest(plan, args, "run"))
    if alone and alone.state in ("blocked", "infeasible"):
        raise UserError(alone.reason)
    found = report.show(plan.store, plan.name, console)
    differences = report.compared(plan.store, found)
    report.show_deltas(differences, console)
    report.write(plan.store, plan.name, differences)
    tracking.publish(plan.store, plan.name, config.tracking, [c.key for c in fresh if c.state == "done"])
    _epilogue(plan, args, console)
    if any(c.state == "failed" for c in plan.cells):
        return 1
    return 2 if plan.count("blocked") else 0


class Runner:
    """The execution of a plan. Cells end `done`, `failed`, `blocked` or `infeasible`; one never takes others along."""

    def __init__(self, plan: Plan, library: evaluate.Library, console: Console):
        self.plan, self.library, self.console = plan, library, console
        self.started = time.monotonic()

    def run(self) -> None:
        """Calibrate, then work through the groups until every cell has reached an end."""
        self.calibrate()
        waiting = [[c for c in group if c.state == "run"] for group in self.plan.groups]
        told = False
        with self._progress(sum(len(c.missing) for group in waiting for c in group)) as advance:
            while waiting := [g for g in waiting if g]:
                busy = [self._group(group, advance) for group in waiting]
                if sum(map(len, busy)) == sum(map(len, waiting)):  # all of it is in other hands
                    if not told:
                        n = sum(map(len, busy))
                        say(self.console, f"waiting for another process that is computing {n} of these cells")
                        told = True
                    time.sleep(POLL_S)
                waiting = busy

    def calibrate(self) -> None:
        """Load or compute every artefact; cells whose artefact is refused are blocked, with the reason."""
        for key, (need, cell) in self.plan.calibrations.items():
            users = [c for c in self.plan.cells if c.state == "run" and need in c.facts.calibrations]
            folder = self.plan.store.calibration(key)
            try:
                with _alone(folder, self.console):
                    if not (folder / "artefact.json").exists():
                        say(self.console, f"calibrating: {need.kind} of {cell.facts.model} [{key}]")
                    self.library.calibrate(cell.config, cell.facts, need, folder)
            except UserError as e:
                for user in users:
                    user.state, user.reason = "blocked", _line(e)
                say(self.console, f"blocked: {len(users)} cells: {_line(e)}")
            except OSError as e:
                if _is_storage(e):
                    raise
                self._fail(users, e, f"calibration {need.kind} [{key}]")
            except Exception as e:
                self._fail(users, e, f"calibration {need.kind} [{key}]")

    def _group(self, group: list[Cell], advance: Any) -> list[Cell]:
        """Run the cells of a group that nobody else is writing; returns those that somebody is."""
        busy: list[Cell] = []
        count = group[0].config.cluster.shards
        for index in range(count):
            with contextlib.ExitStack() as stack:
                shards: dict[str, Shard] = {}
                for cell in (c for c in group if c.state == "run" and c not in busy):
                    folder = self.plan.store.cell(cell.key)
                    try:
                        folder.create(cell.payload, cell.info)
                        if folder.result() is not None:  # another process finished it since the plan was made
                            cell.state = "done"
                            continue
                        shards[cell.key] = stack.enter_context(folder.shard(index, count))
                    except Busy:
                        busy.append(cell)
                    except CorruptRecords as e:
                        self._fail([cell], e, cell.label)
                cells = [c for c in group if c.key in shards]
                try:
                    if cells:
                        self._shard(cells, shards, index, count, advance)
                except LeaseLost:  # this process slept for long, and another one went on with its work
                    busy += [c for c in cells if c.state == "run"]
        for cell in (c for c in group if c.state == "run" and c not in busy):
            self._finish(cell)
        return busy

    def _shard(self, cells: list[Cell], shards: dict[str, Shard], index: int, count: int, advance: Any) -> None:
        try:
            done = {c.key: self.plan.store.cell(c.key).done() for c in cells}
            session = None
            for task, id in cells[0].facts.expected[index::count]:
                jobs = [
                    (c, draw)
                    for c in cells
                    for draw in range(c.draws)
                    if c.state == "run" and (task, id, draw) not in done[c.key]
                ]
                if jobs and session is None:
                    session = self._open(cells)
                    jobs = [job for job in jobs if job[0].state == "run"]
                if jobs and session is not None:
                    for cell, record in self._example(session, jobs, task, id):
                        shards[cell.key].append(record)
                        advance()
        except UserError as e:
            for cell in (c for c in cells if c.state == "run"):
                cell.state, cell.reason = "blocked", _line(e)
            say(self.console, f"blocked: {len(cells)} cells: {_line(e)}")
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
        for cell in (c for c in cells if c.state == "run"):
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

    def _refuse(self, cell: Cell, state: State, error: UserError) -> None:
        cell.state, cell.reason = state, _line(error)
        say(self.console, f"{state}: {cell.label}: {cell.reason}")

    def _example(
        self, session: evaluate.Session, jobs: list[tuple[Cell, int]], task: str, id: str
    ) -> Iterator[tuple[Cell, dict[str, Any]]]:
        """One example for all cells together; where that fails, cell by cell, so that only the culprit fails."""
        batches = [jobs]
        while batches:
            batch = batches.pop(0)
            cells = list({c.key: c for c, _ in batch}.values())
            try:
                records = session.run([(c.key, draw) for c, draw in batch], task, id)
            except Exception as e:
                if isinstance(e, UserError) and not isinstance(e, Infeasible):
                    raise
                if len(cells) > 1:
                    batches = [[job for job in batch if job[0] is c] for c in cells] + batches
                elif isinstance(e, Infeasible):
                    self._refuse(cells[0], "infeasible", e)
                else:
                    self._fail(cells, e, f"{cells[0].label} at {task}/{id}")
                continue
            yield from zip((c for c, _ in batch), records, strict=True)

    def _finish(self, cell: Cell) -> None:
        folder = self.plan.store.cell(cell.key)
        try:
            described = {"key": cell.key, "payload": cell.payload, "info": cell.info}
            if folder.finish(cell.expected, lambda records: results.aggregate(described, records)):
                cell.state = "done"
            elif cell.state == "run":
                raise RuntimeError("records are missing although nothing failed")
        except CorruptRecords as e:
            self._fail([cell], e, cell.label)
        except OSError as e:
            if _is_storage(e):
                raise
            self._fail([cell], e, cell.label)
        except Exception as e:
            self._fail([cell], e, cell.label)

    def _fail(self, cells: Sequence[Cell], error: BaseException, what: str) -> None:
        log: Path | None = None
        for cell in (c for c in cells if c.state == "run"):
            cell.state, cell.reason = "failed", _line(error)
            folder = self.plan.store.cell(cell.key)
            folder.create(cell.payload, cell.info)
            log = folder.log("".join(traceback.format_exception(error)))
        where = f" (traceback in {log})" if log else ""
        say(self.console, f"failed: {what}: {_line(error)}{where}")

    @contextlib.contextmanager
    def _progress(self, total: int) -> Iterator[Any]:
        """Counts records, with the time left."""
        with terminal.progress(self.console, "records") as step:
            counter = itertools.count(1)
            yield lambda: step(next(counter), total)


@contextlib.contextmanager
def _alone(folder: Path, console: Console) -> Iterator[None]:
    """Hold a calibration's folder: two processes that need the same artefact compute it once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    told = False
    while True:
        try:
            lease = Lease(folder)
            break
        except Busy:
            if not told:
                say(console, f"waiting for another process that is computing calibration {folder.name}")
                told = True
            time.sleep(POLL_S)
    try:
        yield
    finally:
        lease.release()


def _is_storage(error: OSError) -> bool:
    """A full or unwritable disk stops everything; other operating system errors are one cell's."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


def _epilogue(plan: Plan, args: Sequence[str], console: Console) -> None:
    say(console, f"results: {plan.store.root / 'cells'}   tables and figures: {plan.store.report(plan.name)}")
    if plan.count("failed") or plan.count("blocked"):
        say(console, f"again, for what is missing: {command(args, 'run')}")
    say(console, f"next: python -m pipelines.report sweep={plan.name}{_store_argument(plan)}")
    sys.stdout.flush()


def _store_argument(plan: Plan) -> str:
    store = plan.cells[0].config.paths.store
    return "" if store == "outputs" else " " + shlex.quote(f"paths.store={store}")
