"""Status and cancel: files decide what is done, jobs only whether somebody is still at it."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from pipelines import run
from pipelines.cluster import cancel, status
from pipelines.cluster.jobs import End, Job, Started, Submitted, last_line
from pipelines.store.cells import Store
from pipelines.store.files import read_json, write_json
from pipelines.store.lease import Process
from tests.pipelines import stub
from tests.pipelines.cluster.test_submit import programs
from tests.pipelines.conftest import Runs


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, no_figures: Any) -> Path:
    """The store of a finished sweep of three cells (1d, SnapKV, 2d)."""
    store = tmp_path_factory.mktemp("finished") / "store"
    with pytest.MonkeyPatch.context() as patch, no_figures():
        stub.install(patch)
        assert run.main([f"paths.store={store}", "tracking=none", "method=1d,SnapKV,2d", "budget=10%", "-m"]) == 0
    return store


class Sweep:
    """A copy of that sweep, with Slurm's answers as told."""

    def __init__(self, runs: Runs, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        self.runs, self.bin = runs, tmp_path / "bin"
        shutil.copytree(finished, runs.store)
        self.store = Store(runs.store)
        self.name = self.store.sweep_names()[-1]
        self.submitted = Submitted(self.store.sweep(self.name))
        self.manifest = read_json(self.store.manifest(self.name))
        self.keys = {c["info"]["method"]: c["key"] for c in self.manifest["cells"]}
        (self.calibration,) = self.manifest["cells"][2]["payload"]["calibrations"].values()
        monkeypatch.setenv("PATH", f"{self.bin}:{os.environ['PATH']}")
        self.slurm()

    def slurm(self, **states: str) -> None:
        """`squeue` knows these jobs: j7="FAILED", j7_1="PENDING|Dependency"."""
        lines = "\n".join(f"echo '{k[1:]}|{v}{'' if '|' in v else '|None'}'" for k, v in states.items())
        programs(self.bin, squeue=lines or "true", scancel=f'echo "$@" >> {self.bin}/cancelled')

    def lose(self, *methods: str, records: int = 2, state: str = "run") -> None:
        """As if a cell had come no further than so many records."""
        for method in methods:
            folder = self.store.cell(self.keys[method]).folder
            (folder / "result.json").unlink(missing_ok=True)
            path = folder / "records" / "0-of-1.jsonl"
            path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:records]))
            cell = next(c for c in self.manifest["cells"] if c["key"] == self.keys[method])
            cell["state"] = state
        write_json(self.store.manifest(self.name), self.manifest)

    def jobs(self, *jobs: Job) -> None:
        self.submitted.write_jobs(jobs)

    def run_job(self, id: str, *methods: str) -> Job:
        return Job(id, "run", "s", tuple(self.keys[m] for m in methods))

    def view(self) -> dict[str, status.CellView]:
        return {c.info["method"]: c for c in status.collect(self.store, self.name).cells}

    def call(self, *args: str, main: Any = status.main) -> tuple[int, str, str]:
        self.runs.capsys.readouterr()
        code = main([f"paths.store={self.runs.store}", *args])
        return (code, *self.runs.capsys.readouterr())


@pytest.fixture
def sweep(runs: Runs, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    return Sweep(runs, finished, tmp_path, monkeypatch)


def test_all_done_is_0_and_names_are_checked(sweep: Sweep) -> None:
    code, out, _ = sweep.call()
    assert code == 0 and "3 cells: 3 done" in out
    assert sweep.call("sweep=latest", "watch=true")[0] == 0
    assert sweep.call("sweep=lates")[0] == 2
    assert sweep.call("watch=maybe")[2] == "error: watch is true or false, got 'maybe'\n"
    assert sweep.call("--help")[1].startswith("Where a sweep stands")


@pytest.mark.req(6)
@pytest.mark.parametrize("slurm", ["FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "COMPLETED", "RUNNING"])
def test_a_complete_result_is_done_whatever_slurm_says(sweep: Sweep, slurm: str) -> None:
    sweep.jobs(sweep.run_job("7", "1d", "SnapKV", "2d"))
    sweep.slurm(j7=slurm)
    assert {c.state for c in sweep.view().values()} == {"done"}


@pytest.mark.req(6)
@pytest.mark.parametrize(
    ("slurm", "state", "detail"),
    [
        ("COMPLETED", "failed", "job 7 ended COMPLETED without it: error: a bad day"),
        ("FAILED", "failed", "job 7 ended FAILED: error: a bad day"),
        ("OUT_OF_MEMORY", "failed", "job 7 ended OUT_OF_MEMORY: error: a bad day"),
        ("CANCELLED", "stopped", "job 7 was cancelled"),
        (None, "stopped", "job 7 is gone from the queue"),
        ("PENDING|Priority", "pending", "queued (Priority)"),
        ("PENDING|Dependency", "pending", "waits for its calibration"),
    ],
)
def test_an_incomplete_cell_is_what_became_of_its_job(sweep: Sweep, slurm: str | None, state: str, detail: str) -> None:
    sweep.lose("1d")
    sweep.jobs(sweep.run_job("7", "1d"))
    sweep.submitted.log.mkdir()
    log = sweep.submitted.log / "7_0_log.out"
    log.write_text("starting\nerror: a bad day\nsrun: it is over\n")
    sweep.slurm(**({} if slurm is None else {"j7": slurm}))
    found = sweep.view()["1d"]
    assert (found.state, found.detail, found.have, found.total) == (state, detail, 2, 6)
    code, out, _ = sweep.call()
    assert code == (1 if state == "failed" else 3)
    if state != "pending":
        assert f"(log: {log})" in out
        assert f"again, for what is missing: {sweep.manifest['command']}" in out


@pytest.mark.parametrize("content", ['{"job":', '{"job": "x"}', '{"process": 3}', '{"jobs": [3]}'])
@pytest.mark.parametrize("name", ["started/7.json", "ends/{}.json", "jobs.json"])
def test_a_damaged_file_is_named_in_one_line(sweep: Sweep, name: str, content: str) -> None:
    sweep.lose("1d")
    path = sweep.submitted.folder / name.format(sweep.keys["1d"])
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    code, _, told = sweep.call()
    assert (code, told.count("\n")) == (2, 1) and f"{path} is damaged" in told
    path.unlink()
    assert sweep.call()[0] != 2


def test_a_running_cell_tells_how_far_it_is_and_how_long_it_takes(sweep: Sweep) -> None:
    sweep.lose("1d", records=4)
    sweep.jobs(sweep.run_job("7_0", "1d"))
    sweep.slurm(j7_0="RUNNING")
    assert sweep.view()["1d"].state == "pending"  # its worker has not begun
    me = Process.of(os.getpid())
    sweep.submitted.write_started(Started("7_0", "run", me, time.time() - 30, {sweep.keys["1d"]: 1}, "x"))
    found = sweep.view()["1d"]
    assert (found.state, found.have, found.job) == ("running", 4, "7_0")
    assert found.left == pytest.approx(20, abs=1)  # three records in 30 s, two to go
    code, out, _ = sweep.call()
    assert code == 3 and "4 of 6" in out and "0:00:20" in out
    sweep.submitted.write_started(Started("7_0", "run", me, time.time(), {sweep.keys["1d"]: 1}, "x", 1, "queued again"))
    sweep.slurm(j7_0="PENDING|BeginTime")
    assert sweep.view()["1d"].detail == "queued again, 2 times so far"


@pytest.mark.req(24)
def test_a_cell_without_its_calibration_is_blocked_with_the_reason(sweep: Sweep) -> None:
    sweep.lose("2d", records=0)
    (sweep.store.calibration(sweep.calibration) / "artefact.json").unlink()
    cal = Job("5", "calibrate", "s", (sweep.keys["2d"],), sweep.calibration)
    sweep.jobs(cal, sweep.run_job("7", "2d"))
    sweep.slurm(j5="RUNNING", j7="PENDING|Dependency")
    assert sweep.view()["2d"].state == "pending"
    sweep.slurm(j5="FAILED", j7="CANCELLED")
    found = sweep.view()["2d"]
    assert (
        found.state == "blocked"
        and f"calibration sensitivity [{sweep.calibration}]: job 5 ended FAILED" in found.detail
    )
    sweep.submitted.write_end(f"calibration-{sweep.calibration}", End("failed", "ValueError: no", "5", "a.log"))
    found = sweep.view()["2d"]
    assert (found.state, found.log) == ("blocked", "a.log") and "ValueError: no" in found.detail
    code, out, _ = sweep.call()
    assert code == 2 and "1 blocked" in out
    before = sweep.store.manifest(sweep.name).stat().st_mtime_ns
    status.record(sweep.store, sweep.name, status.collect(sweep.store, sweep.name))
    cells = read_json(sweep.store.manifest(sweep.name))["cells"]
    assert [c["state"] for c in cells] == ["done", "done", "blocked"] and "ValueError: no" in cells[2]["reason"]
    assert sweep.store.manifest(sweep.name).stat().st_mtime_ns == before  # `latest` stays the latest
    sweep.submitted.forget_ends([f"calibration-{sweep.calibration}"])
    assert sweep.submitted.end(f"calibration-{sweep.calibration}") is None


def test_what_a_worker_said_of_a_cell_stands(sweep: Sweep) -> None:
    sweep.lose("1d", "SnapKV")
    sweep.jobs(sweep.run_job("7", "1d", "SnapKV"))
    sweep.slurm(j7="RUNNING")
    sweep.submitted.write_end(sweep.keys["1d"], End("failed", "RuntimeError: at s3", "7", "cell.log"))
    sweep.submitted.write_end(sweep.keys["SnapKV"], End("infeasible", "the smallest is 4t", "7", "x"))
    assert {m: c.state for m, c in sweep.view().items()} == {"1d": "failed", "SnapKV": "infeasible", "2d": "done"}
    code, out, _ = sweep.call()
    assert code == 1 and "RuntimeError: at s3 (log: cell.log)" in out


def test_a_run_in_one_process_is_seen_by_its_leases(sweep: Sweep) -> None:
    sweep.lose("1d", "SnapKV")
    assert {sweep.view()[m].state for m in ("1d", "SnapKV")} == {"stopped"}
    assert sweep.call()[0] == 3
    with sweep.store.cell(sweep.keys["1d"]).shard():
        assert {m: c.state for m, c in sweep.view().items()} == {"1d": "running", "SnapKV": "pending", "2d": "done"}


def test_a_slurm_that_is_silent_leaves_what_files_tell(sweep: Sweep) -> None:
    sweep.lose("1d")
    sweep.jobs(sweep.run_job("7", "1d", "SnapKV"))
    programs(sweep.bin, squeue="echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1")
    code, out, _ = sweep.call()
    assert code == 3 and "2 done" in out
    assert "Slurm cannot be asked (squeue: Unable to contact slurm controller)" in out


def test_damaged_records_are_a_failure_with_file_and_line(sweep: Sweep) -> None:
    sweep.lose("1d")
    path = sweep.store.cell(sweep.keys["1d"]).folder / "records" / "0-of-1.jsonl"
    path.write_text("nonsense\n" + path.read_text())
    assert f"{path}, line 1, is not a record" in sweep.view()["1d"].detail
    assert sweep.call()[0] == 1


def test_cancel_cancels_what_is_live_and_says_what_stays(sweep: Sweep) -> None:
    sweep.lose("1d", "SnapKV")
    sweep.jobs(sweep.run_job("7_0", "1d"), sweep.run_job("7_1", "SnapKV"), Job("9", "report", "s"))
    sweep.slurm(j7_0="COMPLETED", j7_1="RUNNING", j9="PENDING|Dependency")
    code, out, _ = sweep.call("sweep=latest", main=cancel.main)
    assert code == 0
    assert f"{sweep.name}: cancelled 7_1, 9" in out
    assert f"1 of 3 cells are done and stay; to go on: {sweep.manifest['command']}" in out
    assert (sweep.bin / "cancelled").read_text() == "--quiet 7 9\n"
    sweep.slurm(j7_0="COMPLETED", j7_1="CANCELLED", j9="CANCELLED")
    assert "nothing is queued or running" in sweep.call("sweep=latest", main=cancel.main)[1]
    assert (sweep.bin / "cancelled").read_text() == "--quiet 7 9\n"


def test_cancel_asks_which_sweep(sweep: Sweep) -> None:
    assert sweep.call(main=cancel.main)[2] == "error: which sweep? sweep=<name>, or sweep=latest for the newest\n"
    assert sweep.call("--help", main=cancel.main)[1].startswith("Stop the jobs of a sweep")
    sweep.jobs(sweep.run_job("7", "1d"))
    programs(sweep.bin, squeue="echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1")
    assert sweep.call("sweep=latest", main=cancel.main)[0] == 1


def test_the_last_line_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) == ""
    log.write_text("")
    assert last_line(log) == ""
    log.write_text("a\nValueError: x\nb\n\n")
    assert last_line(log) == "ValueError: x"
    log.write_text("x" * 20_000 + "\nend\n")
    assert last_line(log) == "end"


@pytest.mark.req(7)
def test_cells_in_another_sweeps_jobs_are_theirs(sweep: Sweep) -> None:
    sweep.lose("1d", "SnapKV")
    other = Submitted(sweep.store.sweep("other"))
    other.folder.mkdir()
    other.write_jobs([sweep.run_job("8", "1d")])
    sweep.slurm(j8="PENDING|Priority")
    assert {m: c.state for m, c in sweep.view().items()} == {"1d": "pending", "SnapKV": "stopped", "2d": "done"}
    assert sweep.call()[0] == 3 and "queued (Priority)" in sweep.call()[1]
    # This sweep left the cell to them, and has submitted a report of its own: what they say of it is told here
    sweep.jobs(Job("9", "report", "s", (sweep.keys["1d"],)))
    other.write_end(sweep.keys["1d"], End("failed", "RuntimeError: at s3", "8", "cell.log"))
    sweep.slurm(j8="FAILED", j9="COMPLETED")
    found = sweep.view()["1d"]
    assert (found.state, found.detail) == ("failed", "RuntimeError: at s3")
