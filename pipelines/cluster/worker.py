"""What jobs do. Each class is one job: it checks that code and cells are those that were submitted, works, and says so.

Workers judge by files: an artefact that is not there blocks the cells that need it, whatever Slurm thinks of its job.
State is in the store only, so a job that is queued again begins with the next unfinished record.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from moend.errors import UserError
from pipelines.cli import terminal
from pipelines.cli.hydra import Point
from pipelines.cluster import snapshot
from pipelines.cluster.jobs import End, Kind, Started, Submitted
from pipelines.execution import session as evaluate
from pipelines.planning import identity, planner
from pipelines.planning.needs import CalibrationNeed
from pipelines.planning.planner import Plan
from pipelines.store.cells import CorruptRecords, Store
from pipelines.store.files import read_json
from pipelines.store.lease import Process

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission


BARREN = 2  # starts without anything new after which a job is not queued again


class Stopped(BaseException):
    """This job is not queued again. Not an Exception: what is about one cell must not take it for the cell's."""


class Refused(UserError):
    """The code or a cell is not what was submitted."""


@dataclass(frozen=True)
class Work:
    """A job of the submission that is frozen in a file. Picklable by reference; holds no results.

    gpu: the one it is given, where a supervisor and not Slurm hands them out.
    """

    submission: str
    gpu: str | None = field(default=None, kw_only=True)
    kind: ClassVar[Kind]

    def checkpoint(self) -> DelayedSubmission:
        """Asked by submitit when the time limit or a preemption is near: the same again, the store knows how far."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    @property
    def sweep(self) -> Submitted:
        """The sweep's folder."""
        return Submitted(Path(self.submission).parents[1])

    def keys(self, frozen: dict[str, Any]) -> list[str]:
        """The cells that this job is about."""
        return [c["key"] for c in frozen["cells"]]

    def progress(self, frozen: dict[str, Any], store: Store) -> dict[str, int]:
        """What there is of its work: as long as it grows from start to start, the job is queued again."""
        return {k: _count(store, k) for k in self.keys(frozen)}

    def work(self, frozen: dict[str, Any], job: str, log: str) -> bool:
        """Do it. False where something has failed or is blocked."""
        raise NotImplementedError

    def ends(self, frozen: dict[str, Any]) -> list[str]:
        """What stays unfinished when this job cannot go on: the names under which that is told."""
        return []

    def __call__(self) -> None:
        """Run as a job: exit code 0 only if everything this job was for is there."""
        from submitit import JobEnvironment

        if self.gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.gpu
        environment = JobEnvironment()
        job = environment.job_id if environment.cluster == "slurm" else _local_id()
        log, frozen = str(environment.paths.stdout), read_json(Path(self.submission))
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        store = Store(Path(frozen["store"]))
        have = self.progress(frozen, store)
        before = self.sweep.started_of(job) if restarts else None
        saved = sum(store.cell(k).tokens_saved() for k in have)
        grew = before is None or (sum(have.values()), saved) > (sum(before.have.values()), before.saved)
        barren = 0 if before is None or grew else before.barren + 1
        started = Started(
            job, self.kind, Process.of(os.getpid()), time.time(), have, log, restarts, saved=saved, barren=barren
        )
        self.sweep.write_started(started)
        ended = "killed"
        try:
            with _unswallowed():
                if barren >= BARREN:
                    raise Stopped(f"{BARREN} starts in a row ended without anything new; the time limit is too short")
                if frozen["requeues"] is not None and restarts > frozen["requeues"]:
                    raise Stopped(f"queued again {restarts} times, cluster.requeues allows {frozen['requeues']}")
                refuse_other_code(self.submission, frozen)
                ended = "done" if self.work(frozen, job, log) else "incomplete"
        except Refused as e:
            ended = f"refused: {e}"
            self._tell_all(frozen, str(e), job, log)
        except Stopped as e:
            ended = f"stopped: {e}"
            self._tell_all(frozen, str(e), job, log)
        except SystemExit:
            ended = "queued again"  # submitit's: it has asked Slurm to run this job once more
            raise
        except BaseException as e:
            ended = f"{type(e).__name__}: {e}"
            raise
        finally:
            self.sweep.write_started(replace(started, ended=ended))
        if ended != "done":
            print(f"error: {ended}", file=sys.stderr, flush=True)
            raise SystemExit(1)

    def _tell_all(self, frozen: dict[str, Any], reason: str, job: str, log: str) -> None:
        store = Store(Path(frozen["store"]))
        for name in self.ends(frozen):
            if store.cell(name).result() is None:
                self.sweep.write_end(name, End("failed", reason, job, log))

    def plan(self, frozen: dict[str, Any], keys: list[str], library: evaluate.Library) -> Plan:
        """The cells as they are here and now; Refused where they are not what was submitted."""
        chosen = [c for c in frozen["cells"] if c["key"] in set(keys)]
        points = [Point(i, tuple(c["overrides"]), dict(c["choices"]), dict(c["config"])) for i, c in enumerate(chosen)]
        plan = planner.make_plan(points, library)
        found = {c.key for c in plan.cells}
        for cell in plan.cells:
            submitted = chosen[cell.point.index]
            if submitted["key"] in found and identity.key(submitted["payload"]) == submitted["key"]:
                continue
            lines = identity.differences(submitted["payload"], cell.payload) or ["its key is not that of its contents"]
            raise Refused(f"{cell.label} [{submitted['key']}] is not what was submitted: {'; '.join(lines)}")
        if lost := [c["key"] for c in chosen if c["key"] not in found]:
            raise Refused(f"cells {', '.join(lost)} are not what was submitted; submit again")
        plan.name = frozen["name"]
        return plan


@dataclass(frozen=True)
class Calibrate(Work):
    """Computes one artefact."""

    key: str
    kind: ClassVar[Kind] = "calibrate"

    def keys(self, frozen: dict[str, Any]) -> list[str]:
        """A cell whose configuration describes the artefact."""
        return [frozen["calibrations"][self.key]["cell"]]

    def progress(self, frozen: dict[str, Any], store: Store) -> dict[str, int]:
        """Bytes in its folder: what a long calibration saves as it goes."""
        files = (p for p in store.calibration(self.key).rglob("*") if p.is_file())
        return {f"calibration-{self.key}": sum(p.stat().st_size for p in files)}

    def ends(self, frozen: dict[str, Any]) -> list[str]:
        return [f"calibration-{self.key}"]

    def work(self, frozen: dict[str, Any], job: str, log: str) -> bool:
        from pipelines.execution.runner import Runner

        library = evaluate.Library()
        plan = self.plan(frozen, self.keys(frozen), library)
        (cell,) = plan.cells
        Runner(plan, library, terminal.console()).calibrate(self.key)
        if cell.state not in ("failed", "blocked"):
            return True
        self.sweep.write_end(f"calibration-{self.key}", End(cell.state, cell.reason, job, log))
        return False


@dataclass(frozen=True)
class Run(Work):
    """Computes shards of groups. shard: the one to do, None for all. turn: where in the list of units to begin."""

    cells: tuple[str, ...]
    shard: int | None = None
    turn: float = 0.0
    kind: ClassVar[Kind] = "run"

    def keys(self, frozen: dict[str, Any]) -> list[str]:
        return list(self.cells)

    def ends(self, frozen: dict[str, Any]) -> list[str]:
        return list(self.cells)

    def work(self, frozen: dict[str, Any], job: str, log: str) -> bool:
        from pipelines.execution.runner import Runner

        library = evaluate.Library()
        plan = self.plan(frozen, list(self.cells), library)

        def missing(need: CalibrationNeed) -> str:
            end = self.sweep.end(f"calibration-{need.key}")
            why = f": {end.reason} (log: {end.log})" if end else ""
            return f"calibration {need.kind} [{need.key}] is not there{why}"

        def ended(cell: planner.Cell) -> None:
            if cell.state in ("failed", "blocked", "infeasible"):
                trace = Store(Path(frozen["store"])).cell(cell.key).folder / "log.txt"
                told = str(trace) if cell.state == "failed" and trace.exists() else log
                self.sweep.write_end(cell.key, End(cell.state, cell.reason, job, told))

        for cell in plan.cells:
            ended(cell)
        shards = None if self.shard is None else [self.shard]
        Runner(
            plan, library, terminal.console(), shards=shards, turn=self.turn, patient=shards is None,
            missing=missing, ended=ended,
        ).run()  # fmt: skip
        return not any(c.state in ("failed", "blocked") for c in plan.cells)


@dataclass(frozen=True)
class Report(Work):
    """Writes down how every cell ended, and the sweep's tables and figures."""

    kind: ClassVar[Kind] = "report"

    def progress(self, frozen: dict[str, Any], store: Store) -> dict[str, int]:
        """It is short, and made again from the beginning."""
        return {}

    def work(self, frozen: dict[str, Any], job: str, log: str) -> bool:
        from pipelines.cluster import status
        from pipelines.planning.schema import TrackingConfig
        from pipelines.reporting import report
        from pipelines.tracking import items
        from pipelines.tracking import wandb as tracking

        store, name, console = Store(Path(frozen["store"])), str(frozen["name"]), terminal.console()
        status.record(store, name, status.collect(store, name))
        found = report.show(store, name, console)
        differences = report.compared(store, found)
        report.show_deltas(differences, console)
        report.write(store, name, differences)
        config = TrackingConfig.model_validate(frozen["cells"][0]["config"]["tracking"])
        tracking.publish(store, name, config, items.items(store, name))
        return True


def refuse_other_code(submission: str, frozen: dict[str, Any]) -> None:
    """Refused unless the code that runs is the copy that was made at submission, unchanged."""
    expected = Path(submission).parents[1] / "code" / frozen["code"]
    if not expected.is_dir():
        raise Refused(f"the code that was submitted is gone: {expected}; submit again")
    if snapshot.root() != expected.resolve():
        raise Refused(f"this job runs the code in {snapshot.root()}, not the one that was submitted, {expected}")
    if (have := snapshot.digest(expected)) != frozen["code"]:
        raise Refused(f"the code in {expected} was changed after it was submitted (now {have}); submit again")


@contextlib.contextmanager
def _unswallowed() -> Iterator[None]:
    """Submitit's handler raises an ordinary error in whatever line is running, when the last requeue is spent or asking
    for one fails. Make it one that no cell's error handling can take for its own."""
    from submitit import JobEnvironment

    number = getattr(signal, f"SIG{JobEnvironment.USR_SIG}")
    before = signal.getsignal(number)

    def handler(signum: int, frame: Any) -> None:
        assert callable(before)
        try:
            before(signum, frame)
        except Exception as e:
            raise Stopped(" ".join(str(e).split())) from e

    if not callable(before):
        yield
        return
    signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _local_id() -> str:
    return f"{os.environ['MOEND_LOCAL_JOB']}-{os.environ.get('SUBMITIT_LOCAL_JOB_ID', os.getpid())}"


def _count(store: Store, key: str) -> int:
    try:
        return len(store.cell(key).done())
    except CorruptRecords:
        return 0
