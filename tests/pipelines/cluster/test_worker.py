"""Workers: what they refuse, what they leave to others, and what no cell's error handling may swallow."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pipelines.cli import terminal
from pipelines.cluster import snapshot, submit, worker
from pipelines.cluster.jobs import Submitted
from pipelines.execution.runner import Runner
from pipelines.planning import planner
from pipelines.planning.planner import Plan
from pipelines.store.cells import Store
from pipelines.store.files import read_json
from tests.pipelines import stub
from tests.pipelines.conftest import compose_points


def make_plan(store: Path, library: stub.Library, *args: str) -> Plan:
    points = compose_points([f"paths.store={store}", "tracking=none", *args])
    return planner.make_plan(points, library)  # type: ignore[arg-type]


def runner(plan: Plan, library: stub.Library, **more: Any) -> Runner:
    return Runner(plan, library, terminal.console(), **more)  # type: ignore[arg-type]


def ids(store: Path, key: str) -> list[str]:
    return sorted(r["id"] for r in Store(store).cell(key).records())


def test_shards_of_two_workers_make_one_result(tmp_path: Path) -> None:
    args = ("method=1d,SnapKV", "budget=10%", "cluster.shards=2", "-m")
    first, second = stub.Library(), stub.Library()
    plan = make_plan(tmp_path, first, *args)
    runner(plan, first, shards=[0]).run()
    assert {c.state for c in plan.cells} == {"run"}  # nothing failed, and somebody else has the rest
    assert all(ids(tmp_path, c.key) == ["s0", "s2", "s4"] for c in plan.cells)
    plan = make_plan(tmp_path, second, *args)
    runner(plan, second, shards=[1]).run()
    assert {c.state for c in plan.cells} == {"done"}
    assert (first.prefills, second.prefills) == (3, 3)
    assert all(len(ids(tmp_path, c.key)) == 6 for c in plan.cells)


def test_workers_that_share_all_units_begin_apart(tmp_path: Path) -> None:
    library = stub.Library()
    plan = make_plan(tmp_path, library, "method=1d", "seed=0,1,2", "cluster.shards=2", "-m")
    starts = [runner(plan, library, turn=i / 3)._units()[0] for i in range(3)]
    assert [(group[0].config.seed, index) for group, index in starts] == [(0, 0), (1, 0), (2, 0)]
    assert len(runner(plan, library, turn=0.9)._units()) == 6


@pytest.mark.req(24)
def test_a_calibration_that_is_not_there_blocks_only_those_that_need_it(tmp_path: Path) -> None:
    library, told = stub.Library(), list[tuple[str, str, str]]()
    plan = make_plan(tmp_path, library, "method=1d,2d", "budget=10%", "-m")
    one = runner(
        plan, library, missing=lambda need: f"{need.kind} failed",
        ended=lambda c: told.append((c.facts.method, c.state, c.reason)),
    )  # fmt: skip
    one.run()
    assert {c.facts.method: c.state for c in plan.cells} == {"1d": "done", "2d": "blocked"}
    assert told == [("2d", "blocked", "sensitivity failed")]
    assert not library.calibrated


def test_every_cell_that_ends_without_a_result_is_told_once(tmp_path: Path) -> None:
    library, told = stub.Library(), list[str]()
    library.fail_method = "SnapKV"
    plan = make_plan(tmp_path, library, "method=1d,SnapKV,2d", "budget=10%,1MiB", "-m")
    runner(plan, library, ended=lambda c: told.append(c.key)).run()
    assert sorted(told) == sorted(c.key for c in plan.cells if c.state in ("failed", "infeasible", "blocked"))
    assert {c.state for c in plan.cells} == {"done", "failed", "infeasible"}


@pytest.mark.req(17)
def test_the_end_of_the_requeues_is_no_cells_failure(tmp_path: Path) -> None:
    from submitit.core.utils import UncompletedJobError

    def spent(signum: int, frame: Any) -> None:
        raise UncompletedJobError("Job not requeued because: timed-out too many times.")

    class Library(stub.Library):
        def session(self, config: Any) -> Any:
            found = super().session(config)
            real = found.run

            def run(jobs: list[tuple[str, int]], examples: Any, *more: Any) -> list[dict[str, Any]]:
                if examples[0][1] == "s2":
                    os.kill(os.getpid(), signal.SIGUSR2)
                return real(jobs, examples, *more)

            found.run = run  # type: ignore[method-assign]
            return found

    library = Library()
    plan = make_plan(tmp_path, library, "method=1d,SnapKV", "budget=10%", "-m")
    before = signal.signal(signal.SIGUSR2, spent)
    try:
        with pytest.raises(worker.Stopped, match="timed-out too many times"), worker._unswallowed():
            runner(plan, library).run()
        assert signal.getsignal(signal.SIGUSR2) is spent
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert {c.state for c in plan.cells} == {"run"}
    assert all(ids(tmp_path, c.key) == ["s0", "s1"] for c in plan.cells)
    again = make_plan(tmp_path, stub.Library(), "method=1d,SnapKV", "budget=10%", "-m")
    runner(again, stub.Library()).run()  # the leases were given back
    assert all(ids(tmp_path, c.key) == [f"s{i}" for i in range(6)] for c in again.cells)


def frozen(tmp_path: Path) -> tuple[Path, dict[str, Any], Plan]:
    """A submission as `submit` writes it, with a copy of this code."""
    from pipelines.planning.schema import ClusterConfig

    plan = make_plan(tmp_path, stub.Library(), "method=1d,2d", "budget=10%", "cluster=local", "-m")
    sweep = Submitted(plan.store.sweep(plan.name))
    cluster = ClusterConfig(name="local", wait=True, shards=2, workers=2, requeues=20)
    submit._freeze(plan, sweep, "one", cluster, 2, plan.cells, submit._calibrations(plan, plan.cells), ["a", "b c"])
    path = sweep.submission("one")
    return path, read_json(path), plan


@pytest.mark.req(9)
def test_a_worker_refuses_what_was_not_submitted(tmp_path: Path) -> None:
    path, submission, plan = frozen(tmp_path)
    keys = [c.key for c in plan.cells]
    work = worker.Run(str(path), tuple(keys), 0)
    again = work.plan(submission, keys, stub.Library())  # type: ignore[arg-type]
    assert [c.key for c in again.cells] == keys and again.name == plan.name
    assert {c.config.cluster.shards for c in again.cells} == {2}
    assert all(Path(c["config"]["paths"]["store"]).is_absolute() for c in submission["cells"])
    assert submission["command"] == "python -m pipelines.run a 'b c'"
    submission["cells"][0]["config"]["budget"] = "50%"
    with pytest.raises(worker.Refused, match=r"is not what was submitted: budget: has '0.1r', needs '0.5r'"):
        work.plan(submission, keys, stub.Library())  # type: ignore[arg-type]
    submission["cells"][0]["config"]["budget"] = "10%"
    submission["cells"][1]["payload"]["seed"] = 9
    with pytest.raises(worker.Refused, match="seed: has 9, needs 0"):
        work.plan(submission, keys, stub.Library())  # type: ignore[arg-type]


@pytest.mark.req(9)
def test_a_worker_refuses_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, submission, _ = frozen(tmp_path)
    copy = path.parents[1] / "code" / submission["code"]
    with pytest.raises(worker.Refused, match="not the one that was submitted"):
        worker.refuse_other_code(str(path), submission)  # this process runs the checkout
    monkeypatch.setattr(snapshot, "root", lambda: copy)
    worker.refuse_other_code(str(path), submission)
    (copy / "moend" / "plan.py").write_text("")
    with pytest.raises(worker.Refused, match="was changed after it was submitted"):
        worker.refuse_other_code(str(path), submission)
    monkeypatch.undo()
    copy.rename(tmp_path / "gone")
    with pytest.raises(worker.Refused, match="is gone"):
        worker.refuse_other_code(str(path), submission)


@pytest.mark.slow
@pytest.mark.req(17)
@pytest.mark.parametrize(("restarts", "why"), [("21", "cluster.requeues allows 20"), ("20", "not the one that was")])
def test_requeues_are_bounded_whoever_asks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], restarts: str, why: str
) -> None:
    path, submission, _ = frozen(tmp_path)
    names = {
        "SLURM_RESTART_COUNT": restarts, "SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "77", "SLURM_PROCID": "0",
        "SUBMITIT_FOLDER": str(tmp_path),
    }  # fmt: skip
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    keys = tuple(c["key"] for c in submission["cells"])
    with pytest.raises(SystemExit) as ended:
        worker.Run(str(path), keys, 0)()
    assert ended.value.code == 1
    assert why in capsys.readouterr().err
    sweep = Submitted(path.parents[1])
    assert all(why in sweep.end(k).reason for k in keys)  # type: ignore[union-attr]
    assert sweep.started()["77"].restarts == int(restarts)
    assert json.loads((path.parents[1] / "started" / "77.json").read_text())["ended"].startswith(("stopped", "refused"))
