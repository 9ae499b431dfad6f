"""python -m pipelines.cancel sweep=<name|latest>: stop what is queued or running of a sweep; results stay."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Sequence

from moend.errors import UserError
from pipelines.cli import terminal
from pipelines.cli.args import parse, program, store_default, store_path
from pipelines.cli.terminal import say
from pipelines.cluster import slurm
from pipelines.cluster.jobs import Job, Submitted
from pipelines.store.cells import Store
from pipelines.store.lease import Process, held

PATIENCE_S = 5.0
USAGE = """Stop the jobs of a sweep. What is finished stays, and the command that was given goes on from there.

  python -m pipelines.cancel sweep=<name|latest> [paths.store=outputs]

Cancels queued and running jobs of Slurm, and ends local workers of this machine.
Exit codes: 0 cancelled, or nothing was queued or running; 1 Slurm does not answer, 2 a mistake in the command."""


def cancel(store: Store, name: str) -> list[str]:
    """Cancel everything that is live; returns the ids."""
    sweep = Submitted(store.sweep(name))
    with held(sweep.lease, lambda: None):
        known = sweep.jobs()
        jobs = sweep.live(known)
        ids = [j.id for j in jobs if not j.is_local]
        whole = {i.partition("_")[0] for i in ids}
        slurm.cancel(sorted(whole))  # an array by its number: its finished tasks are no longer there to be cancelled
        for job in jobs:
            if job.is_local:
                _end(sweep, job)
        if jobs:
            sweep.write_jobs(dataclasses.replace(j, cancelled=True) if j in jobs else j for j in known)
    return [j.id for j in jobs]


def _end(sweep: Submitted, job: Job) -> None:
    """Interrupt a supervisor's session, so that leases are given back; then kill what is left of it."""
    assert job.process is not None
    found = [job.process, *(s.process for s in sweep.started().values() if s.job.startswith(f"{job.id}-"))]
    for number in (signal.SIGINT, signal.SIGKILL):
        for process in (p for p in found if p.alive()):
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(process.pid) == job.process.pid:  # the session that was made for it
                    os.killpg(job.process.pid, number)
                    break
        deadline = time.monotonic() + PATIENCE_S
        while (alive := [p for p in found if p.alive()]) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not alive:
            return
    raise UserError(f"{job.id} does not end: {', '.join(_name(p) for p in alive)}")


def _name(process: Process) -> str:
    return f"process {process.pid}"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return program(argv, USAGE, _main)


def _main(args: list[str]) -> int:
    try:
        values = parse(args, {"sweep": "", **store_default()})
        if not values["sweep"]:
            raise UserError("which sweep? sweep=<name>, or sweep=latest for the newest")
        store, to = Store(store_path(values)), terminal.console()
        manifest = store.read_manifest(values["sweep"])
        name, command = manifest["name"], manifest["command"]
        gone = cancel(store, name)
        done = sum(store.cell(c["key"]).result() is not None for c in manifest["cells"])
        say(to, f"{name}: cancelled {', '.join(gone)}" if gone else f"{name}: nothing is queued or running")
        if held := sum(store.cell(c["key"]).is_held() for c in manifest["cells"]):
            say(to, f"{held} cells are in other hands (a run in a terminal, or on another machine): not stopped")
        say(to, f"{done} of {len(manifest['cells'])} cells are done and stay; to go on: {command}")
        return 0
    except slurm.Unreachable as e:
        print(f"error: Slurm: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
