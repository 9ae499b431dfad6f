"""cluster=slurm on a real Slurm: sweeps that nobody watches, and what a cluster does to jobs.

The scenarios run side by side on one node; each is a function, and a test that waits for it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipelines.cluster import slurm
from pipelines.cluster.jobs import Job, Submitted
from pipelines.store.cells import Store
from tests import ROOT

from .conftest import ENDED, MISSING, PATH, Cluster

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (slurm/README.md)"),
]
SMALL = ("model=recall_moe", "benchmark=recall", "benchmark.tasks=[num]", "benchmark.rows=2", "tracking=none")
ON = ("cluster=slurm", "cluster.cpus=1")
PATIENCE_S = 900.0  # a hang, also on a machine that does much else


@dataclasses.dataclass
class Scene:
    """A store of its own on the shared cluster, and the programs as a person would call them."""

    cluster: Cluster
    store: Path
    code: Path = ROOT
    env: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SQUEUE", "PYTHON"))}
        ours = {"PATH": PATH, "SLURM_CONF": str(self.cluster.dir / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        return {**keep, **ours, **self.env}

    def start(self, program: str, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", f"pipelines.{program}", f"paths.store={self.store}", *args],
            cwd=self.code, env=self.environment, stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def call(self, program: str, *args: str) -> tuple[int, str]:
        running = self.start(program, *args)
        out, _ = running.communicate(timeout=PATIENCE_S)
        return running.returncode, out

    def run(self, *args: str, code: int = 0) -> str:
        got, out = self.call("run", *ON, *SMALL, *args)
        assert got == code, out
        return out

    @property
    def sweep(self) -> Submitted:
        (folder,) = (self.store / "sweeps").iterdir()
        return Submitted(folder)

    @property
    def jobs(self) -> list[Job]:
        return self.sweep.jobs()

    def states(self, kind: str | None = None) -> dict[str, str]:
        ids = [j.id for j in self.jobs if kind in (None, j.kind)]
        found = self.cluster.states(*dict.fromkeys(i.partition("_")[0] for i in ids))
        return {i: found[i] for i in ids}

    def until(self, ready: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := ready()):
            assert time.monotonic() < deadline, f"{what}: {self.states()}"
            time.sleep(0.1)
        return found

    def ended(self) -> dict[str, str]:
        self.until(lambda: set(self.states().values()) <= ENDED, "jobs do not end")
        return self.states()

    def lines(self) -> dict[str, list[str]]:
        """Cell -> ids of its records, as they lie in its files."""
        found: dict[str, list[str]] = {}
        for path in sorted(self.store.glob("cells/*/records/*.jsonl")):
            rows = path.read_bytes().split(b"\n")[:-1]
            found.setdefault(path.parents[1].name, []).extend(json.loads(x)["id"] for x in rows)
        return found

    def complete(self, cells: int, records: int) -> None:
        """Every cell has its result, and every record once."""
        manifest = Store(self.store).read_manifest("latest")
        assert len(manifest["cells"]) == cells
        for cell in manifest["cells"]:
            result = Store(self.store).cell(cell["key"]).result()
            assert result is not None and result["n_records"] == records
        for key, ids in self.lines().items():
            assert len(ids) == len(set(ids)) == records, key

    def status(self) -> tuple[int, str]:
        return self.call("status")


# ------------------------------------------------------------------------------------------------------- scenarios


def whole(scene: Scene) -> None:
    """8 cells, two calibration keys, submitted twice at once."""
    axes = (
        "method=2d,2d_hetero", "method.scorer={name: snapkv}", "method.schedule=prompt", "budget=25%",
        "model.dtype=auto,float32", "seed=0,1", "-m",
    )  # fmt: skip
    both = [scene.start("run", *ON, *SMALL, *axes, *more) for more in ((), ("cluster.wait=true",))]
    first, second = (p.communicate(timeout=PATIENCE_S)[0] for p in both)
    assert [p.returncode for p in both] == [0, 0], first + second
    # One of them submitted, the other joined; the one that waits is the last to end and shows the table
    assert first.count("submitted to Slurm: 8 cells in 4 tasks") + second.count("submitted to Slurm") == 1
    assert ("joined, not submitted twice" in first) != ("joined, not submitted twice" in second)
    assert "95 % interval" in second
    jobs = scene.jobs
    assert [j.kind for j in jobs].count("calibrate") == 4  # two tables, and the token agreement of two quantisers
    runs = [j for j in jobs if j.kind == "run"]
    assert len(runs) == 4 and len({j.id.partition("_")[0] for j in runs}) == 2  # an array per calibration key
    assert all("_" in j.id for j in runs)
    for job in runs:
        (depends,) = re.findall(r"--dependency=afterok:([\d:_]+)\n", _script(scene, job))
        assert set(depends.split(":")) == _calibrations_of(scene, job)
    report = next(j for j in jobs if j.kind == "report")
    scene.until(lambda: scene.states()[report.id] in ENDED, "the report")
    assert set(scene.states().values()) == {"COMPLETED"}
    scene.complete(8, 2)
    assert (scene.store / "reports" / scene.sweep.folder.name / "table.csv").exists()
    code, out = scene.status()
    assert code == 0 and "8 done" in out
    again = scene.run(*axes)
    assert "8 done" in again and len(scene.jobs) == len(jobs)  # nothing was submitted
    patch = scene.sweep.folder / "diff.patch"
    commit = json.loads(next((scene.sweep.folder / "submissions").iterdir()).read_text())["commit"]
    assert patch.exists() == str(commit).endswith("-dirty")


def _script(scene: Scene, job: Job) -> str:
    return (scene.sweep.log / f"{job.id.partition('_')[0]}_submission.sh").read_text()


def _calibrations_of(scene: Scene, job: Job) -> set[str]:
    frozen = json.loads(scene.sweep.submission(job.submission).read_text())
    keys = {k for c in frozen["cells"] if c["key"] in job.cells for k in c["payload"]["calibrations"].values()}
    return {j.id for j in scene.jobs if j.calibration in keys}


# Workers wait after each record until a file named after their job is there: no fault comes too late, however busy the
# machine, and none costs a long computation.
GATE = """
import os, pathlib, time

real, gate, env = os.fsync, pathlib.Path(__file__).parent, os.environ
job = gate / f"{env.get('SLURM_ARRAY_JOB_ID')}_{env.get('SLURM_ARRAY_TASK_ID')}"

def fsync(fd):
    real(fd)
    while os.readlink(f"/proc/self/fd/{fd}").endswith(".jsonl") and not job.exists():
        time.sleep(0.05)

if "SLURM_ARRAY_TASK_ID" in env:
    os.fsync = fsync
"""


def unattended(scene: Scene) -> None:
    """What a cluster does to jobs while nobody looks; then the same command again."""
    records = 4
    gate = scene.store.parent / "gate"
    gate.mkdir()
    (gate / "sitecustomize.py").write_text(GATE)
    scene.env = {"PYTHONPATH": str(gate)}
    axes = (f"benchmark.rows={records}", "method=SnapKV", "budget=25%,50%", "seed=0,1,2,3,4,5", "-m")
    limits = ("cluster.requeues=2", "cluster.time=9", "cluster.max_running=3")  # any signal counts as the time limit
    out = scene.run(*limits, *axes)
    assert "submitted to Slurm: 12 cells in 6 tasks" in out
    tasks = [j for j in scene.jobs if j.kind == "run"]
    assert [len([j for j in tasks if j.id.startswith(f"{h}_")]) for h in _heads(tasks)] == [4, 2]  # the cluster's limit
    thrice, requeued, killed, cancelled, once, _ = tasks
    (gate / tasks[-1].id).touch()

    def signalled(job: Job, times: int) -> None:
        """USR2, as Slurm sends it ahead of the time limit, once the worker has new records."""
        for number in range(times):
            scene.until(lambda n=number: _at_work(scene, job, restarts=n), f"start {number} of {job.id}")
            # scancel goes on trying, with a job that is queued again too: it is stopped once the worker has got it
            with subprocess.Popen(["scancel", "--signal=USR2", job.id], env=scene.environment) as sender:
                scene.until(lambda n=number: _has_ended(scene, job, restarts=n), f"end {number} of {job.id}")
                sender.kill()

    def faults(job: Job) -> None:
        if job in (thrice, once):
            signalled(job, 3 if job is thrice else 1)
            (gate / job.id).touch()
            return
        begun = scene.until(lambda: _at_work(scene, job, restarts=0), f"start of {job.id}")
        if job is requeued:
            scene.cluster.run("scontrol", "requeue", job.id)
            scene.until(lambda: scene.sweep.started()[job.id].restarts > 0, f"second start of {job.id}")
            (gate / job.id).touch()
        elif job is killed:
            os.kill(begun.process.pid, signal.SIGKILL)
        else:
            scene.cluster.run("scancel", job.id)

    with ThreadPoolExecutor() as pool:
        list(pool.map(faults, (thrice, requeued, killed, cancelled, once)))
    states = scene.ended()
    assert states[cancelled.id] == "CANCELLED"
    assert (states[thrice.id], states[killed.id], states[once.id]) == ("FAILED", "FAILED", "COMPLETED")
    assert next(s for i, s in states.items() if i == scene.jobs[-1].id) == "COMPLETED"  # the report
    code, out = scene.status()
    assert code == 1
    assert "6 done, 4 failed, 2 stopped" in out
    assert "timed-out too many times" in out and "was cancelled" in out and f"job {killed.id} ended FAILED" in out
    assert "again, for what is missing: python -m pipelines.run" in out
    before = scene.lines()
    for key, ids in before.items():
        assert len(ids) == len(set(ids)), key
    torn = next((scene.store / "cells" / killed.cells[0] / "records").glob("*.jsonl"))
    with torn.open("ab") as f:
        f.write(b'{"task": "num", "id": "torn')
    scene.env = {}
    out = scene.run(*limits, *axes)
    assert "submitted to Slurm: 6 cells in 3 tasks" in out
    scene.ended()
    scene.complete(12, records)
    after = scene.lines()
    assert all(
        after[key][: len(ids)] == ids for key, ids in before.items()
    )  # what was there stayed, and was not redone
    code, out = scene.status()
    assert (code, "12 done" in out) == (0, True)


def _heads(jobs: list[Job]) -> list[str]:
    return list(dict.fromkeys(j.id.partition("_")[0] for j in jobs))


def _has_ended(scene: Scene, job: Job, restarts: int) -> bool:
    started = scene.sweep.started()[job.id]
    return started.restarts > restarts or started.ended is not None


def _at_work(scene: Scene, job: Job, restarts: int) -> Any:
    """The worker, once it has written a record since it began for the n-th time (by times of files: it is quick)."""
    started = scene.sweep.started().get(job.id)
    if started is None or started.restarts != restarts or started.ended is not None:
        return None
    files = [p for k in job.cells for p in (scene.store / "cells" / k / "records").glob("*.jsonl")]
    return started if any((s := p.stat()).st_size and s.st_mtime > started.begun for p in files) else None


def failing(scene: Scene) -> None:
    """A calibration job fails: its dependents are told as blocked, and the report still comes."""
    axes = ("method=2d_hetero,2d", "method.scorer={name: snapkv}", "method.schedule=prompt", "budget=25%", "-m")
    plan = scene.call("run", *ON, *SMALL, *axes, "dry_run=true")[1]
    key = plan.split("calibrations to compute: sensitivity ")[1].split()[0].strip(",;")
    obstacle = scene.store / "calibration" / key
    obstacle.parent.mkdir(parents=True)
    obstacle.write_text("in the way of a folder\n")
    scene.run(*axes)
    states = scene.ended()
    ends = {kind: sorted(states[j.id] for j in scene.jobs if j.kind == kind) for kind in ("calibrate", "run", "report")}
    assert ends["calibrate"].count("FAILED") == 1, ends
    assert set(ends["run"]) == {"CANCELLED"} and ends["report"] == ["COMPLETED"], ends
    code, out = scene.status()
    assert code == 2 and "2 blocked" in out
    assert f"calibration sensitivity [{key}]: cannot write the calibration" in out
    table = (scene.store / "reports" / scene.sweep.folder.name / "table.csv").read_text()
    assert table.count("blocked: calibration sensitivity") == 2
    obstacle.unlink()
    scene.run(*axes)
    scene.ended()
    scene.complete(2, 2)
    assert scene.status()[0] == 0


def edited(scene: Scene) -> None:
    """Code and configuration are those of the submission, whatever is edited while jobs are pending."""
    scene.code = scene.store.parent / "checkout"
    ignore = shutil.ignore_patterns("__pycache__")
    for part in ("moend", "pipelines", "hydra_plugins", "conf", "sweeps"):
        shutil.copytree(ROOT / part, scene.code / part, ignore=ignore)
    axes = ("method=SnapKV", "budget=25%", "cluster.extra={hold: true}")
    scene.run(*axes)
    copy = next((scene.sweep.folder / "code").iterdir())
    release = [j.id for j in scene.jobs]

    # The copy itself is edited: the job notices and stops
    with (copy / "pipelines" / "results" / "aggregate.py").open("a") as f:
        f.write("# edited\n")
    assert "1 pending" in scene.status()[1]
    scene.cluster.run("scontrol", "release", *release)
    states = scene.ended()
    assert states[release[0]] == "FAILED"
    code, out = scene.status()
    assert code == 1 and "was changed after it was submitted" in out

    # The frozen configuration is edited: so does this one
    scene.run(*axes)
    jobs = scene.jobs[-2:]
    path = scene.sweep.submission(jobs[0].submission)
    frozen = json.loads(path.read_text())
    frozen["cells"][0]["config"]["budget"] = "50%"
    path.write_text(json.dumps(frozen))
    scene.cluster.run("scontrol", "release", *(j.id for j in jobs))
    assert scene.ended()[jobs[0].id] == "FAILED"
    out = scene.status()[1]
    assert "is not what was submitted: budget: has '0.25r', needs '0.5r'" in out
    assert not scene.lines()

    # The folder of logs goes: jobs cannot even begin, and that is told
    scene.run(*axes)
    jobs = scene.jobs[-2:]
    shutil.rmtree(scene.sweep.log)
    scene.cluster.run("scontrol", "release", *(j.id for j in jobs))
    assert scene.ended()[jobs[0].id] == "FAILED"
    code, out = scene.status()
    assert code == 1 and "its log is not there" in out

    # The checkout is edited until nothing of it works any more: jobs run what was submitted
    scene.run(*axes)
    jobs = scene.jobs[-2:]
    (scene.code / "pipelines" / "cluster" / "worker.py").write_text("this is no Python\n")
    (scene.code / "conf" / "method" / "SnapKV.yaml").write_text("name: other\n")
    scene.cluster.run("scontrol", "release", *(j.id for j in jobs))
    states = scene.ended()
    assert [states[j.id] for j in jobs] == ["COMPLETED", "COMPLETED"]
    scene.complete(1, 2)


def within(scene: Scene) -> None:
    """Submitted from a task of an array: the new jobs are themselves, not copies of the one they come from."""
    scene.store.mkdir(parents=True)
    line = " ".join(f"'{x}'" for x in (*ON, *SMALL, "method=SnapKV", f"paths.store={scene.store}"))
    outer = scene.cluster.sbatch(
        f"cd {ROOT} && {sys.executable} -m pipelines.run {line} > {scene.store}/submitted 2>&1", "--array=2"
    )
    scene.cluster.wait(outer, seconds=PATIENCE_S)
    text = (scene.store / "submitted").read_text()
    assert "submitted to Slurm: 1 cells" in text, text
    states = scene.ended()
    assert set(states.values()) == {"COMPLETED"} and len(states) == 2
    scene.complete(1, 2)


def refused(scene: Scene) -> None:
    """sbatch fails in the middle: what was submitted before is cancelled, and nothing is said to be queued."""
    scene.store.mkdir(parents=True)
    bin = scene.store.parent / "bin"
    bin.mkdir()
    real = shutil.which("sbatch", path=PATH)
    (bin / "sbatch").write_text(
        f"#!/bin/sh\necho x >> {bin}/calls\n"
        f"[ $(wc -l < {bin}/calls) -lt 2 ] || {{ echo 'sbatch: error: Socket timed out' >&2; exit 1; }}\n"
        f'exec {real} "$@" | tee -a {bin}/said\n'
    )
    (bin / "sbatch").chmod(0o755)
    scene.env = {"PATH": f"{bin}:{PATH}"}
    axes = ("method=SnapKV", "budget=25%", "seed=0,1,2,3,4,5", "cluster.extra={begin: now+1hour}", "-m")
    out = scene.run(*axes, code=1)
    assert "error: Slurm: sbatch: Socket timed out" in out and out.count("Socket timed out") == 1
    assert "submission failed: cancelled what had been submitted" in out
    number = (bin / "said").read_text().split()[-1]
    assert set(scene.cluster.wait(number).values()) == {"CANCELLED"}
    assert scene.jobs == []
    code, out = scene.status()
    assert (code, "6 stopped" in out) == (3, True)

    # Where all goes well, cancel cancels
    scene.env = {}
    scene.run(*axes)
    code, out = scene.status()
    assert (code, "6 pending" in out) == (3, True)
    code, out = scene.call("cancel", "sweep=latest")
    assert code == 0 and "0 of 6 cells are done and stay" in out
    assert set(scene.ended().values()) == {"CANCELLED"}
    code, out = scene.status()
    assert (code, "6 stopped" in out) == (3, True)
    assert "nothing is queued or running" in scene.call("cancel", "sweep=latest")[1]


SCENARIOS = (unattended, whole, edited, failing, within, refused)


@pytest.fixture(scope="module")
def running(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[str, Future[None]]]:
    """All scenarios that the selected tests ask for, at the same time."""
    names = {item.name for item in request.session.items}
    chosen = [s for s in SCENARIOS if any(f"[{s.__name__}]" in n or n == f"test_{s.__name__}" for n in names)]
    with ThreadPoolExecutor(max_workers=len(SCENARIOS)) as pool:
        scenes = {s.__name__: Scene(cluster, tmp_path_factory.mktemp(s.__name__) / "store") for s in chosen}
        yield {s.__name__: pool.submit(s, scenes[s.__name__]) for s in chosen}


@pytest.mark.req(6)
def test_whole(running: dict[str, Future[None]]) -> None:
    running["whole"].result(PATIENCE_S)


@pytest.mark.req(17)
@pytest.mark.req(15)
def test_unattended(running: dict[str, Future[None]]) -> None:
    running["unattended"].result(2 * PATIENCE_S)


@pytest.mark.req(24)
def test_failing(running: dict[str, Future[None]]) -> None:
    running["failing"].result(PATIENCE_S)


@pytest.mark.req(9)
def test_edited(running: dict[str, Future[None]]) -> None:
    running["edited"].result(2 * PATIENCE_S)


def test_within(running: dict[str, Future[None]]) -> None:
    running["within"].result(PATIENCE_S)


def test_refused(running: dict[str, Future[None]]) -> None:
    running["refused"].result(PATIENCE_S)


def test_states_and_limits_are_read_from_slurm(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(cluster.dir / "slurm.conf"))
    monkeypatch.setenv("PATH", PATH)
    assert slurm.array_limit() == 4
    assert slurm.time_limit(None) == slurm.time_limit("debug") == slurm.A_YEAR
    with pytest.raises(slurm.UserError, match=r"unknown cluster.partition 'debgu'. Did you mean 'debug'"):
        slurm.time_limit("debgu")
    job = cluster.sbatch("true", "--array=0-1")
    cluster.wait(job)
    assert slurm.states([f"{job}_0", f"{job}_1", "999999"]) == {
        f"{job}_0": ("COMPLETED", ""), f"{job}_1": ("COMPLETED", ""), "999999": (slurm.GONE, "")
    }  # fmt: skip
    assert slurm.states(["999999"]) == {"999999": (slurm.GONE, "")}
