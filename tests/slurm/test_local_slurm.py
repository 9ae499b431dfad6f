"""The scripts of slurm/: a real Slurm of one node comes up, does what the launcher will need, and goes away."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from .conftest import MISSING, SCRIPTS, Cluster, script

pytestmark = pytest.mark.slurm
needs_slurm = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (slurm/README.md)")

SHOW = 'echo "${CUDA_VISIBLE_DEVICES-none}"'


def listening(pid: int) -> set[str]:
    """The addresses, as the kernel writes them, at which a process accepts connections."""
    sockets = {str(f.readlink()) for f in Path(f"/proc/{pid}/fd").iterdir() if f.is_symlink()}
    tables = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {row[1].split(":")[0] for row in tables if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


@pytest.mark.parametrize(("gpus", "seen"), [(0, "none"), (1, "0"), (2, "0,1")])
def test_a_job_sees_the_gpus_it_asked_for(cluster: Cluster, gpus: int, seen: str) -> None:
    job = cluster.sbatch(SHOW, *([f"--gpus-per-node={gpus}"] if gpus else []))
    assert cluster.wait(job) == {job: "COMPLETED"}
    assert cluster.output(job) == seen


def test_jobs_side_by_side_see_different_gpus(cluster: Cluster, tmp_path: Path) -> None:
    # Each waits for the other, so neither can have had the other's GPU after it.
    meet = f"touch {tmp_path}/$SLURM_JOB_ID; until [ $(ls {tmp_path} | wc -l) = 2 ]; do sleep 0.05; done"
    jobs = [cluster.sbatch(f"{SHOW}; {meet}", "--gpus-per-node=1") for _ in range(2)]
    assert set(cluster.wait(*jobs).values()) == {"COMPLETED"}
    assert {cluster.output(job) for job in jobs} == {"0", "1"}


def test_more_gpus_than_there_are_is_refused_at_once(cluster: Cluster) -> None:
    done = cluster.run("sbatch", "--gpus-per-node=3", "--wrap=true", check=False)
    assert done.returncode != 0
    assert "not available" in done.stderr


def test_an_array_runs_every_task(cluster: Cluster, tmp_path: Path) -> None:
    array = cluster.sbatch(
        f"echo $SLURM_ARRAY_JOB_ID > {tmp_path}/$SLURM_ARRAY_TASK_ID; {SHOW}", "--array=0-3%2", "--gpus-per-node=1"
    )
    assert cluster.wait(array) == {f"{array}_{i}": "COMPLETED" for i in range(4)}
    assert {f.name: f.read_text().strip() for f in tmp_path.iterdir()} == {str(i): array for i in range(4)}


def test_dependents_of_a_failed_job_are_cancelled_and_the_rest_goes_on(cluster: Cluster) -> None:
    good, bad = cluster.sbatch("true"), cluster.sbatch("exit 3")
    kill = "--kill-on-invalid-dep=yes"
    after_good = cluster.sbatch("true", f"--dependency=afterok:{good}", kill)
    after_bad = cluster.sbatch("true", f"--dependency=afterok:{bad}", kill, "--array=0-1")
    report = cluster.sbatch("echo report", f"--dependency=afterany:{after_good}:{after_bad}")
    states = cluster.wait(good, bad, after_good, after_bad, report)
    cancelled = {job: state for job, state in states.items() if state == "CANCELLED"}
    assert {job.split("_")[0] for job in cancelled} == {after_bad}
    assert (states[good], states[bad], states[after_good], states[report]) == (
        "COMPLETED",
        "FAILED",
        "COMPLETED",
        "COMPLETED",
    )
    assert cluster.output(report) == "report"


def test_a_second_start_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.sbatch(f"until [ -e {tmp_path}/go ]; do sleep 0.05; done")
    cluster.wait(job, until={"RUNNING"})
    before, conf = cluster.pids(), (cluster.dir / "slurm.conf").read_text()
    again = script("start_local_slurm.sh", cluster.dir)  # without the options of the first: they are kept
    assert again.returncode == 0, again.stderr
    assert again.stdout == f"export SLURM_CONF={cluster.dir}/slurm.conf\n"
    assert cluster.pids() == before
    assert (cluster.dir / "slurm.conf").read_text() == conf
    (tmp_path / "go").touch()
    assert cluster.wait(job) == {job: "COMPLETED"}


def test_it_listens_on_loopback_only(cluster: Cluster) -> None:
    for pid in cluster.pids().values():
        assert listening(pid) == {"0100007F"}


def test_stop_ends_its_own_jobs_and_daemons_only(cluster: Cluster, tmp_path: Path) -> None:
    theirs = cluster.pids()
    assert script("start_local_slurm.sh", tmp_path).returncode == 0
    other = Cluster(tmp_path)
    try:
        ours = other.pids()
        job = other.sbatch("echo $$; trap '' TERM; while :; do sleep 0.1; done")
        other.wait(job, until={"RUNNING"})
        while not (out := tmp_path / f"{job}.out").exists() or not out.read_text():  # it is written a moment later
            time.sleep(0.05)
        inside = int(other.output(job))
    finally:
        stopped = script("stop_local_slurm.sh", tmp_path)
    assert (stopped.returncode, stopped.stdout) == (0, "stopped\n"), stopped.stderr
    assert not [pid for pid in (*ours.values(), inside) if Path(f"/proc/{pid}").exists()]
    assert cluster.pids() == theirs
    assert cluster.run("sinfo", "--noheader", "--format=%T").stdout.strip() in {"idle", "mixed", "allocated"}
    assert script("stop_local_slurm.sh", tmp_path).stdout == "not running\n"

    # Numbers in left-over pid files that belong to others by now: a bystander, and the other cluster's daemons.
    with subprocess.Popen(["sleep", "60"]) as bystander:
        for pids in ({"slurmctld": bystander.pid, "slurmd": bystander.pid}, theirs):
            for name, pid in pids.items():
                (tmp_path / f"{name}.pid").write_text(f"{pid}\n")
            assert script("stop_local_slurm.sh", tmp_path).stdout == "not running\n"
        assert bystander.poll() is None
        bystander.kill()
    assert all(Path(f"/proc/{pid}").exists() for pid in theirs.values())


@needs_slurm
def test_a_port_that_is_taken_is_named(cluster: Cluster, tmp_path: Path) -> None:
    port = cluster.run("scontrol", "show", "config").stdout.split("SlurmctldPort")[1].split()[1]
    done = script("start_local_slurm.sh", "--ports", f"{port},{int(port) + 1}", tmp_path)
    assert done.returncode == 1
    assert f"port {port} is taken" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "many", "x"], "--gpus takes a whole number from 0 to 9, got 'many'"),
        (["--ports", "80", "x"], "--ports takes two different numbers"),
        (["--cpu", "1", "x"], "unknown option --cpu"),
        (["x", "y"], "one DIR only"),
    ],
)
def test_mistakes_on_the_command_line_take_one_line(arguments: list[str], message: str) -> None:
    done = script("start_local_slurm.sh", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@needs_slurm
def test_a_folder_that_slurm_cannot_write_down_is_refused(tmp_path: Path) -> None:
    done = script("start_local_slurm.sh", tmp_path / "a b")
    assert done.returncode == 2
    assert "a b" in done.stderr


def test_missing_programs_are_named_with_their_packages(tmp_path: Path) -> None:
    done = script("start_local_slurm.sh", tmp_path / "x", env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert "sbatch" in done.stderr
    assert "apt-get install -y --no-install-recommends" in done.stderr
    assert "slurm-client" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_is_content() -> None:
    command = ["shellcheck", *map(str, sorted(SCRIPTS.glob("*.sh")))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
