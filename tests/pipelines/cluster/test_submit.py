"""What is submitted, before any cluster is involved: typed settings, units, frozen files, errors in one line."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from moend.errors import UserError
from pipelines.cluster import slurm, snapshot, submit
from pipelines.cluster.jobs import Job, Submitted
from pipelines.planning import planner
from pipelines.planning.planner import Plan
from pipelines.planning.schema import ClusterConfig, minutes, validate
from pipelines.store.lease import Process
from tests import ROOT
from tests.pipelines import stub
from tests.pipelines.conftest import Runs, compose_points

EXAMPLES = sorted((ROOT / "slurm" / "examples" / "cluster").glob("*.yaml"))


def cluster(*args: str) -> ClusterConfig:
    (point,) = compose_points([*args, "method=1d"])
    return validate(point).cluster


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        (90, 90), ("90", 90), ("90:30", 91), ("8:00:00", 480), ("0:00:01", 1), ("1-00", 1440), ("2-12", 3600),
        ("1-00:30", 1470), ("1-00:00:30", 1441), ("soon", None), ("", None), (0, None), ("0:00", None),
        ("1:2:3:4", None),
    ],
)  # fmt: skip
def test_time_limits_are_slurms(time: int | str, expected: int | None) -> None:
    assert minutes(time) == expected


def test_every_setting_may_be_null() -> None:
    assert cluster("cluster=slurm").partition is None
    for key in ("gpus", "cpus", "memory", "time", "max_running", "shards", "setup", "extra"):
        assert getattr(cluster("cluster=slurm", f"cluster.{key}=null"), key) is None
    given = cluster(
        "cluster=slurm", "cluster.partition='a,b'", "cluster.memory=64G", "cluster.time='1-12:00:00'",
        "cluster.setup=['module load cuda']", "cluster.extra={gres: 'gpu:a100:1'}",
    )  # fmt: skip
    assert given.extra == {"gres": "gpu:a100:1"}
    assert given.setup == ["module load cuda"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["cluster=slurm", "cluster.memory=lots"], "cluster.memory: string should match"),
        (["cluster=slurm", "cluster.time=soon"], "got 'soon'"),
        (["cluster=slurm", "cluster.gpus=-1"], "cluster.gpus: input should be greater than or equal to 0"),
        (["cluster=slurm", "cluster.extra={array: 0-3}"], "'array' is set by this program"),
        (["cluster=local", "cluster.workers=0"], "cluster.workers: input should be greater"),
    ],
)
def test_wrong_settings_are_one_line(runs: Runs, args: list[str], message: str) -> None:
    assert runs("method=1d", *args) == 2
    assert message in runs.err and runs.err.count("\n") == 1


def test_settings_of_another_cluster_are_no_settings(runs: Runs) -> None:
    assert runs("method=1d", "cluster.partition=gpu") == 2
    assert "there is no configuration key 'cluster.partition'" in runs.err
    assert runs("method=1d", "cluster=slrum") == 2
    assert "Did you mean 'slurm'?" in runs.err


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_of_sites_compose(path: Path) -> None:
    found = cluster("--config-dir", str(ROOT / "slurm" / "examples"), f"cluster={path.stem}")
    assert found.name == "slurm" and found.time is not None


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 3


# ---------------------------------------------------------------------------------------------------------- units


def make_plan(tmp_path: Path, *args: str) -> Plan:
    points = compose_points([f"paths.store={tmp_path}", "tracking=none", *args])
    return planner.make_plan(points, stub.Library())  # type: ignore[arg-type]


def test_units_are_shards_of_groups_with_the_calibrations_to_come(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "method=1d,2d", "budget=10%", "seed=0,1", "-m")
    units, queued = submit._units(plan, [], 3)
    assert len(units) == 2 * 3 and not queued
    assert {u.shard for u in units} == {0, 1, 2}
    assert all(len(u.cells) == 2 and len(u.after) == 1 and not u.all_need for u in units)  # 1d needs none of it
    alike = make_plan(tmp_path, "method=2d,2d_hetero", "budget=10%", "-m")
    (unit,) = submit._units(alike, [], 1)[0]
    assert unit.all_need
    folder = plan.store.calibration(next(iter(unit.after)))
    folder.mkdir(parents=True)
    (folder / "artefact.json").write_text("{}")
    (unit,) = submit._units(alike, [], 1)[0]
    assert not unit.after


@pytest.mark.req(7)
def test_what_is_queued_is_not_submitted_twice(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "method=1d,SnapKV", "budget=10%", "-m")
    first, second = (c.key for c in plan.cells)

    def shards(*jobs: Job, count: int = 2) -> dict[int, set[str]]:
        units, _ = submit._units(plan, jobs, count)
        return {u.shard: {c.key for c in u.cells} for u in units}

    assert shards() == {0: {first, second}, 1: {first, second}}
    one = Job("7_0", "run", "s", (first, second), None, (0,), 2)
    assert shards(one) == {1: {first, second}}
    alone = Job("8", "run", "s", (first,), None, (1,), 2)
    assert shards(alone) == {0: {first, second}, 1: {second}}
    other = Job("9", "run", "s", (second,), None, (0,), 5)  # counts shards differently: the cell is in its hands
    assert shards(other) == {0: {first}, 1: {first}}
    assert shards(one, Job("7_1", "run", "s", (first, second), None, (1,), 2)) == {}
    assert shards(Job("10", "report", "s", (first, second)), Job("11", "calibrate", "s", (first,), "k")) == shards()


def test_shards_without_work_are_left_out(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "method=1d", "budget=10%")
    (cell,) = plan.cells
    cell.missing = cell.missing[1::2]  # shard 0 of 2 has all of its records
    assert [u.shard for u in submit._units(plan, [], 2)[0]] == [1]
    cell.missing = ()  # every record, but no result yet
    assert [u.shard for u in submit._units(plan, [], 2)[0]] == [0]


def test_calibrations_come_in_an_order_in_which_each_finds_what_it_reads(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "method=2d,2d_hetero", "budget=10%", "-m")
    from pipelines.planning.needs import CalibrationNeed

    needs = tuple(CalibrationNeed(kind, f"key-{kind}", {}) for kind in ("queries", "sensitivity"))
    for cell, n in zip(plan.cells, (1, 2), strict=True):
        cell.facts = type(cell.facts)(**{**cell.facts.__dict__, "calibrations": needs[:n]})
    found = submit._calibrations(plan, plan.cells)
    assert {k: v["after"] for k, v in found.items()} == {"key-queries": [], "key-sensitivity": ["key-queries"]}


# ----------------------------------------------------------------------------------------------------- frozen code


@pytest.mark.req(9)
def test_the_copy_is_the_code_and_is_made_once(tmp_path: Path) -> None:
    made = snapshot.take(tmp_path)
    assert made.name == snapshot.digest(made) == snapshot.digest(snapshot.root())
    assert (made / "moend" / "fixtures" / "recall_moe" / "model.safetensors").exists()
    assert not [p for p in made.rglob("*") if p.name == "__pycache__"]
    inode = made.stat().st_ino
    assert snapshot.take(tmp_path).stat().st_ino == inode
    assert [p.name for p in tmp_path.iterdir()] == [made.name]
    edited = made / "conf" / "run.yaml"
    edited.write_text(edited.read_text() + "# edited\n")
    assert snapshot.digest(made) != made.name
    assert snapshot.take(tmp_path) == made and snapshot.digest(made) == made.name
    assert [p.name for p in tmp_path.iterdir()] == [made.name]
    (made / "moend" / "new.py").write_text("")
    assert snapshot.digest(made) != made.name


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("said", "expected", "is_mistake"),
    [
        ("sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: Invalid partition "
         "name specified\n", "invalid partition specified: x", True),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available\n",
         "Requested node configuration is not available", True),
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified\n",
         "Invalid account", True),
        ("sbatch: fatal: Could not establish a configuration source\n", "SLURM_CONF", True),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n",
         "Unable to contact slurm controller", False),
        ("sbatch: error: Slurm temporarily unable to accept job\n", "temporarily unable", False),
        ("", "without a word", False),
    ],
)  # fmt: skip
def test_what_slurm_says_is_the_users_or_the_clusters(said: str, expected: str, is_mistake: bool) -> None:
    error = slurm.failure(said, "sbatch")
    assert isinstance(error, UserError if is_mistake else slurm.Unreachable)
    assert expected in str(error) and "\n" not in str(error)


def programs(folder: Path, **scripts: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in scripts.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_machine_without_slurm_is_one_line(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert runs("method=1d", "cluster=slurm") == 2
    assert runs.err == ("error: cluster=slurm needs Slurm, but there is no scontrol on PATH; cluster=local runs here\n")
    assert not runs.store.exists()  # found out before anything was written


def test_slurm_that_does_not_answer_is_not_the_users_mistake(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    fatal = "scontrol: fatal: Could not establish a configuration source"
    programs(tmp_path / "bin", scontrol=f"echo '{fatal}' >&2; exit 1")
    assert runs("method=1d", "cluster=slurm") == 2
    assert "SLURM_CONF is not set" in runs.err and runs.err.count("\n") == 1
    programs(tmp_path / "bin", scontrol="echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1")
    assert runs("method=1d", "cluster=slurm") == 1
    assert runs.err == "error: Slurm: scontrol: Unable to contact slurm controller (connect failure)\n"


def test_the_environment_of_a_job_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID", "SLURM_CONF", "SBATCH_ACCOUNT", "SUBMITIT_FOLDER"):
        monkeypatch.setenv(name, "x")
    with slurm.outside_a_job():
        left = {k for k in os.environ if k.startswith(("SLURM", "SBATCH", "SUBMITIT"))}
    assert left == {"SLURM_CONF", "SBATCH_ACCOUNT"}
    assert os.environ["SLURM_JOB_ID"] == "x"


def test_jobs_are_written_and_read(tmp_path: Path) -> None:
    jobs = [
        Job("1", "calibrate", "s", ("a",), "k"),
        Job("2_0", "run", "s", ("a", "b"), None, (1,), 4),
        Job("local-5", "local", "s", ("a",), process=Process.of(os.getpid())),
    ]
    sweep = Submitted(tmp_path)
    assert sweep.jobs() == []
    sweep.write_jobs(jobs)
    assert sweep.jobs() == jobs
    (tmp_path / "jobs.json").write_text(json.dumps({"jobs": [{"id": 1}]}))
    with pytest.raises(UserError, match="is damaged"):
        sweep.jobs()


def test_arrays_leave_out_what_was_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    programs(tmp_path / "bin", srun="", sbatch='cp "$1" "$(dirname "$0")/last"; echo Submitted batch job 12')

    def script(*args: str) -> str:
        settings = cluster("cluster=slurm", *args)
        sweep = Submitted(tmp_path)
        limits = submit.Limits(1000, 60)
        one = submit._Slurm(sweep, "s", settings, limits, tmp_path / "code", [], [])
        work: list[Any] = [print, print]
        one._jobs("run", work, [Job("", "run", "s"), Job("", "run", "s")], "afterok:1:2")
        assert [j.id for j in sweep.jobs()] == ["12_0", "12_1"]
        return (tmp_path / "bin" / "last").read_text()

    text = script()
    asked = {line.split("--")[1].split("=")[0] for line in text.splitlines() if line.startswith("#SBATCH")}
    assert asked == {
        "array", "dependency", "job-name", "kill-on-invalid-dep", "nodes", "open-mode", "output", "requeue", "signal",
        "time",
    }  # fmt: skip
    assert "--array=0-1%2\n" in text and "export PYTHONSAFEPATH=1" in text
    text = script("cluster.partition=gpu", "cluster.cpus=8", "cluster.max_running=1", "cluster.extra={gres: 'gpu:1'}",
                  "cluster.setup=['module load x']", "cluster.signal_delay=7")  # fmt: skip
    for line in ("--partition=gpu", "--cpus-per-task=8", "--array=0-1%1", "--gres=gpu:1", "--signal=USR2@7"):
        assert f"#SBATCH {line}\n" in text
    assert "srun --unbuffered" in text and text.count("--cpus-per-task=8") == 2  # the step asks for its CPUs itself
    assert text.index("module load x") < text.index("export PYTHONPATH=")
