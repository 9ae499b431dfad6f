"""Faults on running processes: whatever happens to them, no record is lost, none counts twice, none has a wrong key."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.cluster import snapshot, status, worker
from pipelines.cluster.jobs import Submitted
from pipelines.reporting import report
from pipelines.store.cells import Store
from tests import ROOT
from tests.forked import Forked
from tests.pipelines.cluster.test_worker import frozen
from tests.pipelines.conftest import Runs
from tests.pipelines.execution.test_run import STUB_MAIN, cells

PATIENCE_S = 120.0
IDS = [f"s{i}" for i in range(6)]
QUICK = "from pipelines.store import lease; lease.HEARTBEAT_S, lease.EXPIRY_S = 0.1, 1.5"  # as 10 s and 60 s
WAIT = "from pipelines.execution import runner; runner.POLL_S = 0.1"


def start(store: Path, *args: str, fault: str = "", **env: str) -> Forked:
    """The run program on a stub library, in a process of its own that begins with some lines of Python."""
    return Forked(f"{fault}\n{STUB_MAIN}", [f"paths.store={store}", "tracking=none", *args], env)


# The second and later examples wait until the file that GATE names is there.
GATED = """
import os, pathlib, time
from tests.pipelines import stub
plain = stub.Session.run
def run(self, jobs, examples, tell):
    while examples[0][1] != "s0" and not pathlib.Path(os.environ["GATE"]).exists():
        time.sleep(0.02)
    return plain(self, jobs, examples, tell)
stub.Session.run = run
"""


def waits(running: Forked) -> None:
    """Return once a process says that it waits for another one."""
    assert any("waiting for another process" in line for line in running.stdout)


def ended(*running: Forked, code: int = 0) -> list[str]:
    out = [p.communicate(timeout=PATIENCE_S)[0] for p in running]
    assert [p.returncode for p in running] == [code] * len(running), out
    return out


def until(ready: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := ready()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def files(store: Path) -> dict[str, list[str]]:
    """Names of files of records, and the ids of their lines."""
    found = sorted(store.glob("cells/*/records/*.jsonl"))
    return {
        f"{p.parents[1].name[:4]}/{p.name}": [json.loads(x)["id"] for x in p.read_text().splitlines()] for p in found
    }


def whole(store: Path, n: int) -> None:
    """Every cell has its result of every record, each once."""
    results = cells(store)
    assert len(results) == n
    for key, result in results.items():
        assert sorted(r["id"] for r in Store(store).cell(key).records()) == IDS
        assert result["n"] == result["n_records"] == 6


@pytest.mark.process
@pytest.mark.req(15)
def test_a_holder_that_stands_still_and_comes_back_harms_nobody(tmp_path: Path) -> None:
    first = start(tmp_path, "method=1d", fault=f"{QUICK}; {WAIT}", STUB_DELAY="0.3")
    until(lambda: any(files(tmp_path).values()))
    first.send_signal(signal.SIGSTOP)
    try:
        ended(start(tmp_path, "method=1d", fault=f"{QUICK}; {WAIT}"))
        before = files(tmp_path)
    finally:
        first.send_signal(signal.SIGCONT)
    ended(first)
    one, other = sorted(before)  # the file of the first, and that of who took over
    assert one.endswith("0-of-1.g2.jsonl") and other.endswith("0-of-1.jsonl")
    after = files(tmp_path)
    assert after[one] == before[one] and after[other][: len(before[other])] == before[other]
    whole(tmp_path, 1)


@pytest.mark.process
@pytest.mark.parametrize("seconds", [120, -120])
def test_a_clock_that_is_wrong_takes_nothing_over(tmp_path: Path, seconds: int) -> None:
    wrong = f"import time; real = time.time; time.time = lambda: real() + {seconds}"
    first = start(tmp_path, "method=1d", fault=GATED, GATE=str(tmp_path / "gate"))
    until(lambda: any(files(tmp_path).values()))
    second = start(tmp_path, "method=1d", fault=f"{wrong}; {WAIT}")
    waits(second)
    time.sleep(0.5)  # it looks again and again
    (tmp_path / "gate").touch()
    ended(first, second)
    assert [(name[5:], ids) for name, ids in files(tmp_path).items()] == [("0-of-1.jsonl", IDS)]
    whole(tmp_path, 1)


FAILING_BEAT = """
import os
real, failed = os.utime, []
def utime(path, *args):
    if ".lease." in str(path) and len(failed) < 2:
        failed.append(path)
        raise OSError(5, "the server is away")
    real(path, *args)
os.utime = utime
"""


@pytest.mark.process
def test_a_beat_that_fails_loses_no_lease(tmp_path: Path) -> None:
    first = start(tmp_path, "method=1d", fault=f"{FAILING_BEAT}\n{QUICK}\n{GATED}", GATE=str(tmp_path / "gate"))
    until(lambda: any(files(tmp_path).values()))
    second = start(tmp_path, "method=1d", fault=f"{QUICK}; {WAIT}")
    waits(second)
    time.sleep(3)  # twice as long as a heart may be silent
    (tmp_path / "gate").touch()
    ended(first, second)
    assert [(name[5:], ids) for name, ids in files(tmp_path).items()] == [("0-of-1.jsonl", IDS)]


@pytest.mark.process
@pytest.mark.req(7)
def test_overlapping_sweeps_at_once_compute_no_cell_twice(tmp_path: Path) -> None:
    both = [start(tmp_path, f"method={m}", "-m", fault=WAIT, STUB_DELAY="0.05") for m in ("full,1d,2d", "1d,2d,SnapKV")]
    ended(*both)
    assert len(list((tmp_path / "sweeps").glob("*/manifest.json"))) == 2
    assert all(ids == IDS for ids in files(tmp_path).values()) and len(files(tmp_path)) == 4
    whole(tmp_path, 4)


@pytest.mark.process
@pytest.mark.req(7)
def test_the_same_command_before_and_after_midnight_is_the_same_sweep(tmp_path: Path) -> None:
    for moment in ("2026-03-01 23:59:59", "2026-03-02 00:00:01"):
        clock = (
            f"import time; at = time.strptime('{moment}', '%Y-%m-%d %H:%M:%S'); format = time.strftime; "
            "time.strftime = lambda f, t=None: format(f, t or at); time.time = lambda: time.mktime(at)"
        )
        ended(start(tmp_path, "method=1d,2d", "-m", fault=clock))
    (name,) = Store(tmp_path).sweep_names()
    assert len(name) == 8
    assert [p.name for p in (tmp_path / "reports").iterdir()] == [name]
    whole(tmp_path, 2)


@pytest.mark.process
@pytest.mark.req(15)
def test_a_store_that_was_moved_goes_on_where_it_is(tmp_path: Path, runs: Runs) -> None:
    ended(start(tmp_path / "old", "method=1d,2d", "-m", STUB_KILL_AFTER="3"), code=-signal.SIGKILL)
    (tmp_path / "old").rename(runs.store)
    assert runs("method=1d,2d", "-m") == 0
    assert runs.library.prefills == 3
    assert not (tmp_path / "old").exists()
    whole(runs.store, 2)
    assert status.main([f"paths.store={runs.store}"]) == 0
    runs.store.rename(tmp_path / "new")
    assert status.main([f"paths.store={tmp_path / 'new'}"]) == 0


@pytest.mark.process
def test_another_dtype_is_another_cell(tmp_path: Path, runs: Runs) -> None:
    ended(start(runs.store, "method=1d", "model.dtype=float32", STUB_KILL_AFTER="3"), code=-signal.SIGKILL)
    (key,) = Store(runs.store).root.glob("cells/*")
    before = files(runs.store)
    assert runs("method=1d", "model.dtype=bfloat16") == 0
    assert runs.library.prefills == 6  # none of the records of the other was taken
    assert len(list(runs.store.glob("cells/*"))) == 2 and not (key / "result.json").exists()
    assert before.items() <= files(runs.store).items()
    assert runs("method=1d", "model.dtype=float32") == 0
    whole(runs.store, 2)


MADE_ON = """
import os
from tests.pipelines import stub
plain = stub.record
def record(*args, **kwargs):
    made = {"device": os.environ["DEVICE"], "dtype": "float32", "kernel": "torch", "commit": os.environ["COMMIT"]}
    return {**plain(*args, **kwargs), "provenance": made}
stub.record = record
"""


@pytest.mark.process
def test_a_cell_made_on_two_devices_by_two_commits_is_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = {"DEVICE": "cpu", "COMMIT": "a" * 40, "STUB_KILL_AFTER": "2"}
    ended(start(tmp_path, "method=1d,2d", "-m", fault=MADE_ON, **first), code=-signal.SIGKILL)
    ended(start(tmp_path, "method=1d,2d,full", "-m", fault=MADE_ON, DEVICE="NVIDIA H200", COMMIT="b" * 40))
    whole(tmp_path, 3)
    marks = ["device: NVIDIA H200 (4), cpu (2)", f"commit: {'b' * 12} (4), {'a' * 12} (2)"]
    assert sorted(r["mixed"] for r in cells(tmp_path).values()) == [[], marks, marks]  # the same key for both devices
    assert status.main([f"paths.store={tmp_path}"]) == 0
    assert capsys.readouterr().out.count("; ".join(marks)[:40]) == 2


def _full_from(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the n-th write on the disk is full."""
    real, asked = os.fsync, [0]

    def fsync(fd: int) -> None:
        asked[0] += 1
        if asked[0] > n:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.slow
@pytest.mark.req(15)
def test_a_disk_that_is_full_at_any_write(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    write = report.write
    monkeypatch.setattr(report, "write", lambda *args, **kwargs: [])
    runs.library.n, n, code = 1, -1, 1
    while code:
        n += 1
        if n % 3:  # now and then what is left is gone on with
            shutil.rmtree(runs.store, ignore_errors=True)
        with monkeypatch.context() as patch:
            _full_from(n, patch)
            code = runs("method=2d", "budget=10%")
        if code:
            assert code == 1 and runs.err.count("\n") == 1 and "No space left on device" in runs.err, (n, runs.err)
        for path in runs.store.rglob("*.json"):
            json.loads(path.read_text())  # whole, or not there
        for path in runs.store.glob("cells/*/result.json"):
            assert len(Store(runs.store).cell(path.parent.name).records()) == 1
        assert not list(runs.store.rglob("*.tmp"))
    assert n >= 10 and [r["n"] for r in cells(runs.store).values()] == [1]
    monkeypatch.setattr(report, "write", write)
    with monkeypatch.context() as patch:  # the report, which comes last
        _full_from(2, patch)
        assert runs("method=2d", "budget=25%") == 1 and runs.err.count("\n") == 1
    assert runs("method=2d", "budget=25%") == 0


# Work of a cluster


SCORER = """
from dataclasses import dataclass
from helper_of_mine import sign
from moend.scoring.base import LayerView, Scorer

@dataclass(frozen=True)
class Mine(Scorer):
    def __call__(self, view):
        return sign() * view.keys.float().norm(dim=-1)

SCORER = Mine
"""


def plugin(folder: Path) -> None:
    """A scorer in a working folder, made of two modules."""
    folder.mkdir(exist_ok=True)
    (folder / "scorer_of_mine.py").write_text(SCORER)
    (folder / "helper_of_mine.py").write_text("def sign():\n    return -1.0\n")


@pytest.mark.process
@pytest.mark.req(9)
def test_a_plugin_in_the_working_folder_is_there_on_local_workers(tmp_path: Path) -> None:
    plugin(tmp_path / "work")
    args = (
        "cluster=local", "cluster.workers=1", "model=recall_moe", "benchmark=recall", "benchmark.tasks=[num]",
        "benchmark.rows=2", "method=SnapKV", "method.scorer={name: scorer_of_mine}", "budget=25%", "tracking=none",
    )  # fmt: skip
    args = tuple(a.replace("scorer_of_mine", "scorer_of_mine.part") if "scorer" in a else a for a in args)
    (tmp_path / "work" / "scorer_of_mine").mkdir()
    (tmp_path / "work" / "scorer_of_mine.py").rename(tmp_path / "work" / "scorer_of_mine" / "part.py")
    (tmp_path / "work" / "scorer_of_mine" / "__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.run", f"paths.store={tmp_path / 'store'}", *args], cwd=tmp_path / "work",
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = cells(tmp_path / "store").values()
    assert result["n"] == 2
    (copy,) = (tmp_path / "store").glob("sweeps/*/code/*")
    copied = sorted(str(p.relative_to(copy / snapshot.PLUGINS)) for p in (copy / snapshot.PLUGINS).rglob("*.py"))
    assert copied == ["helper_of_mine.py", "scorer_of_mine/__init__.py", "scorer_of_mine/part.py"]
    assert snapshot.digest(copy) == copy.name


@pytest.mark.req(17)
def test_a_calibration_longer_than_the_time_limit_goes_on_while_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, submission, plan = frozen(tmp_path)
    (key,) = submission["calibrations"]
    for name, value in {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "5", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SUBMITIT_FOLDER", str(tmp_path))
    monkeypatch.setattr(worker, "refuse_other_code", lambda *args: None)
    folder, done, grows = plan.store.calibration(key), list[int](), [True]
    folder.mkdir(parents=True)

    def limited(self: worker.Calibrate, *args: Any) -> bool:
        """As much as the time limit lets through; then submitit asks Slurm for another start."""
        done.append(len(done))
        if grows[0]:
            (folder / f"part-{len(done)}").write_text("x" * 10)
        raise SystemExit(0)

    monkeypatch.setattr(worker.Calibrate, "work", limited)
    sweep, work = Submitted(path.parents[1]), worker.Calibrate(str(path), key)
    for restarts in range(30):  # many times, as long as something is added
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts if restarts <= 20 else 20))
        with pytest.raises(SystemExit) as how:
            work()
        assert how.value.code == 0 and sweep.started()["5"].barren == 0
    grows[0] = False
    with pytest.raises(SystemExit):
        work()  # what it began with is more than the start before had
    assert sweep.started()["5"].barren == 0
    with pytest.raises(SystemExit):
        work()
    assert (sweep.started()["5"].barren, len(done)) == (1, 32)
    with pytest.raises(SystemExit) as how:
        work()
    assert how.value.code == 1 and len(done) == 32
    assert "2 starts in a row ended without anything new" in capsys.readouterr().err
    end = sweep.end(f"calibration-{key}")
    assert end is not None and "2 starts in a row" in end.reason
