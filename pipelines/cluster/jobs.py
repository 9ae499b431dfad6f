"""What was submitted of a sweep, as files in its folder: submissions, jobs, and what workers say of themselves.

<store>/sweeps/<name>/manifest.json            the cells
                      submissions/<id>.json    frozen: the resolved configuration and key of every cell, the code
                      code/<digest>/           the code, as it was then
                      diff.patch               what the checkout had beyond its commit
                      jobs.json                every job: what it is to do, and where
                      started/<job>.json       written by a worker when it begins and when it ends
                      ends/<key>.json          cells and calibrations that ended without a result, and why
                      log/                     what jobs printed
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moend.errors import UserError
from pipelines.cluster import slurm
from pipelines.store.files import make_folder, read_json, write_json
from pipelines.store.lease import Process

Kind = Literal["calibrate", "run", "report", "local"]  # local: a supervisor and its workers, which do all of it


@dataclass(frozen=True)
class Job:
    """One job, or one task of an array. cells: the keys it computes or reports. shards: which of `count`."""

    id: str
    kind: Kind
    submission: str
    cells: tuple[str, ...] = ()
    calibration: str | None = None
    shards: tuple[int, ...] = (0,)
    count: int = 1
    process: Process | None = None
    cancelled: bool = False  # by pipelines.cancel

    @property
    def is_local(self) -> bool:
        """Whether it runs on the machine where it was submitted, without Slurm."""
        return self.process is not None

    @property
    def what(self) -> str:
        """What it does, for people."""
        if self.kind == "calibrate":
            return f"calibration {self.calibration}"
        shard = f", shard {self.shards[0] + 1} of {self.count}" if self.kind == "run" and self.count > 1 else ""
        return f"{len(self.cells)} cells{shard}"


@dataclass(frozen=True)
class Started:
    """What a worker wrote of itself. have: records that its cells had when it began. ended: how it ended, or None."""

    job: str
    kind: str
    process: Process
    begun: float
    have: dict[str, int]
    log: str
    restarts: int = 0
    ended: str | None = None
    saved: int = 0  # tokens that states of its unfinished answers held when it began
    barren: int = 0  # starts in a row, up to this one, that ended with no more than they began with


@dataclass(frozen=True)
class End:
    """Why a cell or a calibration has no result."""

    state: Literal["failed", "blocked", "infeasible"]
    reason: str
    job: str
    log: str


@dataclass(frozen=True)
class Submitted:
    """The part of a sweep's folder that belongs to submitted work."""

    folder: Path

    @property
    def lease(self) -> Path:
        """The store's, held while jobs are submitted or cancelled: commands at once do it one after the other."""
        return self.folder.parents[1] / "submit"

    @property
    def log(self) -> Path:
        """Where jobs print."""
        return self.folder / "log"

    def submission(self, id: str) -> Path:
        """The frozen configuration of one submission."""
        return self.folder / "submissions" / f"{id}.json"

    def jobs(self) -> list[Job]:
        """Every job that was submitted, the oldest first."""
        path = self.folder / "jobs.json"
        if not path.exists():
            return []
        with _damage(path):
            return [_job(x) for x in read_json(path)["jobs"]]

    def write_jobs(self, jobs: Iterable[Job]) -> None:
        """Replace the list of jobs."""
        write_json(self.folder / "jobs.json", {"schema": 1, "jobs": [dataclasses.asdict(j) for j in jobs]})

    def write_started(self, started: Started) -> None:
        """A worker's word of itself."""
        make_folder(self.folder / "started")
        write_json(self.folder / "started" / f"{started.job}.json", dataclasses.asdict(started))

    def started(self) -> dict[str, Started]:
        """Job -> what its worker said last."""
        names = sorted(p.stem for p in (self.folder / "started").glob("*.json"))
        return {name: said for name in names if (said := self.started_of(name)) is not None}

    def started_of(self, job: str) -> Started | None:
        """What the worker of one job said last."""
        path = self.folder / "started" / f"{job}.json"
        with contextlib.suppress(FileNotFoundError), _damage(path):
            fields = read_json(path)
            return Started(**{**fields, "process": Process(**fields["process"])})
        return None

    def write_end(self, key: str, end: End) -> None:
        """Say why a cell or a calibration has no result."""
        make_folder(self.folder / "ends")
        write_json(self.folder / "ends" / f"{key}.json", dataclasses.asdict(end))

    def end(self, key: str) -> End | None:
        """Why a cell or a calibration ended without a result, if it did."""
        path = self.folder / "ends" / f"{key}.json"
        try:
            with _damage(path):
                return End(**read_json(path))
        except FileNotFoundError:
            return None

    def forget_ends(self, keys: Iterable[str]) -> None:
        """Before the cells are tried again."""
        for key in keys:
            (self.folder / "ends" / f"{key}.json").unlink(missing_ok=True)

    def states(self, jobs: Iterable[Job]) -> dict[str, tuple[str, str]]:
        """Job -> (state in Slurm's words, reason). slurm.Unreachable where Slurm is silent."""
        return states([(self, list(jobs))])

    def live(self, jobs: Iterable[Job]) -> list[Job]:
        """Those that are queued or running."""
        return in_flight([(self, list(jobs))])


Jobs = list[tuple[Submitted, list[Job]]]  # sweeps with jobs of theirs


def states(jobs: Jobs) -> dict[str, tuple[str, str]]:
    """`Submitted.states` of the jobs of several sweeps, with one question to Slurm."""
    found = slurm.states(j.id for _, of in jobs for j in of if not j.is_local)
    for sweep, of in jobs:
        started = sweep.started() if any(j.is_local for j in of) else {}
        for job in (j for j in of if j.process is not None):
            assert job.process is not None
            workers = [s for s in started.values() if s.job.startswith(f"{job.id}-")]
            alive = job.process.alive() or any(s.process.alive() for s in workers)
            there = job.process.here()
            found[job.id] = ("RUNNING", "") if alive else ("ENDED", "") if there else (slurm.GONE, "other machine")
    return found


def in_flight(jobs: Jobs) -> list[Job]:
    """Those that are queued or running."""
    known = states(jobs)
    return [j for _, of in jobs for j in of if known[j.id][0] in slurm.LIVE]


def others(sweep: Submitted, cells: Iterable[str]) -> Jobs:
    """What other sweeps of the store submitted for some of these cells, or for calibrations."""
    wanted, found = set(cells), []
    for path in sorted(sweep.folder.parent.glob("*/jobs.json")):
        if path.parent != sweep.folder:
            other = Submitted(path.parent)
            found.append((other, [j for j in other.jobs() if wanted & set(j.cells) or j.calibration]))
    return [(other, of) for other, of in found if of]


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """What is JSON and yet not what was written there: one line that names the file."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{path} is damaged ({type(e).__name__}: {e}); remove it") from None


def _job(fields: dict[str, Any]) -> Job:
    process = None if fields["process"] is None else Process(**fields["process"])
    lists = {k: tuple(fields[k]) for k in ("cells", "shards")}
    return Job(**{**fields, **lists, "process": process})


def now() -> str:
    """The time, as files of a sweep hold it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def last_line(log: str | Path, errors: bool = True) -> str:
    """The last line of a log, empty where there is none: what a job said before it ended."""
    try:
        with Path(log).open("rb") as f:
            f.seek(max(0, f.seek(0, 2) - 8192))
            lines = [x.strip() for x in f.read().decode(errors="replace").splitlines() if x.strip()]
        lines = [x for x in lines if not x.startswith("submitit INFO")]
    except OSError:
        return ""
    told = [x for x in lines if errors and ("rror" in x or "Killed" in x or "killed" in x)]
    return (told or lines or [""])[-1]
