"""A one-node Slurm of the tests' own, brought up by the scripts of slurm/ in a temporary folder."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import ROOT

SCRIPTS = ROOT / "slurm"
PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
MISSING = [p for p in ("slurmctld", "slurmd", "sbatch") if shutil.which(p, path=PATH) is None]
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}


def script(name: str, *arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """One of the scripts of slurm/, run to its end."""
    command = [shutil.which("bash") or "/bin/bash", str(SCRIPTS / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=env)


@dataclass(frozen=True)
class Cluster:
    """A running cluster: its folder, and Slurm's commands against it."""

    dir: Path

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        # Not the variables of a cluster on which the tests themselves may be running.
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SQUEUE"))}
        env |= {"PATH": PATH, "SLURM_CONF": str(self.dir / "slurm.conf")}
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=env, cwd=self.dir)
        assert done.returncode == 0 or not check, f"{shlex.join(command)}: {done.stderr}"
        return done

    def sbatch(self, command: str, *options: str) -> str:
        """The number of a job that runs one line of shell; what it prints lands in `output(job)`."""
        out = f"--output={self.dir}/%j.out"
        return self.run("sbatch", "--parsable", out, *options, f"--wrap={command}").stdout.strip()

    def output(self, job: str) -> str:
        return (self.dir / f"{job}.out").read_text().strip()

    def states(self, *jobs: str) -> dict[str, str]:
        """The state of each job, or of each task (`12_0`) of an array, from squeue: there is no accounting."""
        out = self.run("squeue", "--noheader", "--array", "--states=all", "--format=%i %T", f"--jobs={','.join(jobs)}")
        return dict(line.split() for line in out.stdout.splitlines())

    def wait(self, *jobs: str, until: set[str] = ENDED, seconds: float = 300) -> dict[str, str]:
        deadline = time.monotonic() + seconds
        while True:
            states = self.states(*jobs)
            if states and all(state in until for state in states.values()):
                return states
            assert time.monotonic() < deadline, f"after {seconds} s: {states}"
            time.sleep(0.05)

    def pids(self) -> dict[str, int]:
        return {name: int((self.dir / f"{name}.pid").read_text()) for name in ("slurmctld", "slurmd")}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)} (slurm/README.md says how)")
    dir = tmp_path_factory.mktemp("slurm")
    started = script("start_local_slurm.sh", "--cpus", 4, "--gpus", 2, "--tasks", 4, dir)
    try:
        assert started.returncode == 0, started.stderr
        yield Cluster(dir)
    finally:
        script("stop_local_slurm.sh", dir)
