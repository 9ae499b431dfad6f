"""Hands a plan to local workers or to Slurm: frozen configurations, a copy of the code, and jobs that need no shell.

Calibrations first, one job per artefact; then arrays whose tasks are shards of groups; then a report. What a job does
and whether it did it is in files; the states of jobs only tell whether somebody is still at it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from moend.errors import UserError
from moend.version import warn_untested
from pipelines.cli import terminal
from pipelines.cli.hydra import command
from pipelines.cli.terminal import say
from pipelines.cluster import slurm, snapshot
from pipelines.cluster.jobs import Job, Submitted, in_flight, now, others
from pipelines.planning import planner
from pipelines.planning.planner import Cell, Plan, store_argument
from pipelines.planning.schema import ClusterConfig, minutes
from pipelines.store import provenance
from pipelines.store.cells import Store
from pipelines.store.files import make_folder, write_json
from pipelines.store.lease import Process, held

POLL_S = 2.0
REPORT_MINUTES = 60
NO_BOUND = 1_000_000  # requeues: they end when nothing grows any more (`worker.Work`)


@dataclass(frozen=True)
class Unit:
    """Cells that share prefills, and the shard of their examples that one task computes. after: artefacts to come."""

    cells: tuple[Cell, ...]
    shard: int
    after: frozenset[str]
    all_need: bool  # every cell needs all of `after`: without them there is nothing to do


def submit(plan: Plan, args: Sequence[str], console: Console) -> int:
    """Submit what is missing and not yet queued; wait for it where asked to. Returns the exit code."""
    cluster = plan.cells[0].config.cluster
    sweep = Submitted(plan.store.sweep(plan.name))
    try:
        limits = _limits(cluster, plan.store.root)
        plan.store.prepare()
        with held(sweep.lease, lambda: say(console, "waiting for another command that is submitting into this store")):
            code = _submit(plan, sweep, cluster, limits, args, console)
        if code is not None:
            return code
    except slurm.Unreachable as e:
        print(f"error: Slurm: {e}", file=sys.stderr)
        return 1
    finally:
        sys.stdout.flush()
    return wait(plan.store, plan.name, console) if cluster.wait else 0


@dataclass(frozen=True)
class Limits:
    """What the cluster allows: tasks in an array, minutes of a task."""

    array: int = 1
    minutes: int = slurm.A_YEAR


def _limits(cluster: ClusterConfig, store: Path) -> Limits:
    """Also finds out, before anything is written, that there is a cluster and that it has the partition."""
    if cluster.name == "local":
        return Limits()
    if "%" in str(store):
        raise UserError(f"paths.store: Slurm reads % in the names of logs as a pattern; choose another than {store}")
    default = slurm.time_limit(cluster.partition)
    asked = None if cluster.time is None else minutes(cluster.time)
    return Limits(slurm.array_limit(), default if asked is None else asked)


def _submit(
    plan: Plan, sweep: Submitted, cluster: ClusterConfig, limits: Limits, args: Sequence[str], console: Console
) -> int | None:
    """Under the sweep's lease. Returns an exit code where there is nothing to wait for."""
    jobs = sweep.jobs()
    mine = sweep.live(jobs)
    keys = {c.key for group in plan.groups for c in group}
    # Workers on this machine share what there is by leases, whichever sweep they were started for.
    elsewhere = [j for j in in_flight(others(sweep, keys)) if not (j.is_local and cluster.name == "local")]
    live = [*mine, *(j for j in elsewhere if j.kind != "report")]
    count = cluster.shards or (workers(cluster) if cluster.name == "local" else 1)
    units, queued = _units(plan, live, count)
    if queued:
        ids = ", ".join(dict.fromkeys(j.id.partition("_")[0] for j in live if keys & set(j.cells)))
        say(console, f"{len(queued)} cells are queued or running already (jobs {ids}): joined, not submitted twice")
    fresh = list({c.key: c for u in units for c in u.cells}.values())
    manifest = plan.store.manifest(plan.name)
    make_folder(manifest.parent)
    write_json(manifest, planner.manifest(plan, args, "run"))
    told = fresh
    if not fresh and cluster.name == "slurm" and not any(j.kind == "report" for j in mine):
        told = [c for group in plan.groups for c in group if c.key in queued]  # in other sweeps' jobs: a report is due
    if told:
        for line in plan.absent:
            say(console, f"to be fetched by the jobs themselves, where they have internet: {line}")
        calibrations = _calibrations(plan, fresh)
        id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        code = _freeze(plan, sweep, id, cluster, count, told, calibrations, args)
        forget(plan, fresh)
        make_folder(sweep.log)
        if cluster.name == "local":
            _start(sweep, id, code, fresh, jobs, console)
        else:
            _Slurm(sweep, id, cluster, limits, code, jobs, live).submit(units, calibrations, told, console)
    _next(plan, console)
    return None


def forget(plan: Plan, cells: Sequence[Cell]) -> None:
    """Forget why cells had no result, because they are tried again."""
    needed = [f"calibration-{n.key}" for c in cells for n in c.facts.calibrations]
    Submitted(plan.store.sweep(plan.name)).forget_ends([c.key for c in cells] + needed)


def _next(plan: Plan, console: Console) -> None:
    root = store_argument(plan)
    say(console, f"follow: python -m pipelines.status sweep={plan.name}{root} watch=true")
    say(console, f"stop:   python -m pipelines.cancel sweep={plan.name}{root}")
    say(console, f"then:   python -m pipelines.report sweep={plan.name}{root}")


def workers(cluster: ClusterConfig) -> int:
    """How many local workers: as told, or one per GPU, or two."""
    return cluster.workers or len(gpus()) or 2


def gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [x.strip() for x in given.split(",") if x.strip() and x.strip() != "-1"]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def _units(plan: Plan, live: Sequence[Job], count: int) -> tuple[list[Unit], list[str]]:
    """Tasks to submit, and the cells of which some shard is in other jobs' hands already.

    A live job that counts shards differently has the whole cell.
    """
    mine: dict[str, set[int]] = {}
    for job in live:
        if job.kind in ("run", "local"):
            for key in job.cells:
                mine.setdefault(key, set()).update(job.shards if job.count == count else range(count))
    units = []
    for group in plan.groups:
        for shard in range(count):
            cells = [c for c in group if shard not in mine.get(c.key, ()) and _has_work(c, shard, count)]
            if cells:
                needs = [frozenset(n.key for n in _to_come(plan, c)) for c in cells]
                after = frozenset().union(*needs)
                units.append(Unit(tuple(cells), shard, after, all(n == after for n in needs)))
    return units, [c.key for group in plan.groups for c in group if c.key in mine]


def _has_work(cell: Cell, shard: int, count: int) -> bool:
    if not cell.missing:
        return shard == 0  # all records are there, but no result: whoever comes writes it
    missing = {k[:2] for k in cell.missing}
    return any(example in missing for context in cell.facts.contexts[shard::count] for example in context)


def _to_come(plan: Plan, cell: Cell) -> list[Any]:
    return [n for n in cell.facts.calibrations if not (plan.store.calibration(n.key) / "artefact.json").exists()]


def _calibrations(plan: Plan, cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """Artefacts to compute: key -> a cell that describes it, and the artefacts before it, which it may read."""
    found: dict[str, dict[str, Any]] = {}
    for cell in cells:
        needs = _to_come(plan, cell)
        for i, need in enumerate(needs):
            entry = {"kind": need.kind, "cell": cell.key, "after": [n.key for n in needs[:i]]}
            found.setdefault(need.key, entry)
    return found


def _freeze(
    plan: Plan,
    sweep: Submitted,
    id: str,
    cluster: ClusterConfig,
    count: int,
    cells: Sequence[Cell],
    calibrations: dict[str, Any],
    args: Sequence[str],
) -> Path:
    """Write the submission and the copy of the code; returns the copy."""
    code = snapshot.take(sweep.folder / "code", snapshot.plugins(c.point.config for c in cells))
    snapshot.record_difference(sweep.folder / "diff.patch")
    frozen = []
    for cell in cells:
        config = cell.point.config
        paths = {"store": str(cell.config.store), "cache": str(cell.config.cache)}
        config = {
            **config,
            "model": cell.config.model,
            "paths": {**config["paths"], **paths},
            "cluster": {**config["cluster"], "shards": count},
        }
        frozen.append(
            {
                "key": cell.key,
                "payload": cell.payload,
                "overrides": list(cell.point.overrides),
                "choices": cell.point.choices,
                "config": config,
            }
        )
    path = sweep.submission(id)
    make_folder(path.parent)
    write_json(
        path,
        {
            "schema": 1,
            "name": plan.name,
            "created": now(),
            "command": command(args, "run"),
            "store": str(plan.store.root),
            "code": code.name,
            "commit": provenance.commit(),
            "count": count,
            "requeues": cluster.requeues,
            "workers": workers(cluster) if cluster.name == "local" else None,
            "gpus": gpus() if cluster.name == "local" else [],
            "calibrations": calibrations,
            "cells": frozen,
        },
    )
    return code


def _start(sweep: Submitted, id: str, code: Path, cells: Sequence[Cell], jobs: Sequence[Job], console: Console) -> None:
    """A supervisor of its own session: it outlives this process and its terminal."""
    log = sweep.log / f"{id}.log"
    with log.open("ab") as out:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "pipelines.cluster.local", str(sweep.submission(id))],
            env={**os.environ, **snapshot.environment(code)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    keys = tuple(c.key for c in cells)
    job = Job(f"local-{child.pid}", "local", id, keys, process=Process.of(child.pid))
    sweep.write_jobs([*jobs, job])
    say(console, f"started {job.id}: {len(keys)} cells on this machine (log: {log})")


class _Slurm:
    """One submission's jobs. Where one of them is refused, those before it are cancelled."""

    def __init__(
        self,
        sweep: Submitted,
        id: str,
        cluster: ClusterConfig,
        limits: Limits,
        code: Path,
        before: Sequence[Job],
        live: Sequence[Job],
    ):
        self.sweep, self.id, self.cluster, self.limits, self.code = sweep, id, cluster, limits, code
        self.before, self.live, self.made = list(before), live, list[Job]()

    def submit(
        self, units: Sequence[Unit], calibrations: dict[str, Any], cells: Sequence[Cell], console: Console
    ) -> None:
        from submitit.core.utils import FailedJobError

        try:
            with slurm.outside_a_job():
                self._all(units, calibrations, cells)
        except BaseException as e:
            self._undo(console)
            if isinstance(e, FailedJobError):
                raise slurm.failure(str(e), "sbatch") from None
            raise
        lines = [
            f"{kind}: {', '.join(_heads(j for j in self.made if j.kind == kind))}"
            for kind in ("calibrate", "run", "report")
            if any(j.kind == kind for j in self.made)
        ]
        tasks = sum(j.kind == "run" for j in self.made)
        say(console, f"submitted to Slurm: {len(cells)} cells in {tasks} tasks; jobs {'; '.join(lines)}")
        say(console, "nothing here has to stay open")

    def _all(self, units: Sequence[Unit], calibrations: dict[str, Any], cells: Sequence[Cell]) -> None:
        from pipelines.cluster import worker

        at = {j.calibration: j.id for j in self.live if j.kind == "calibrate" and not j.is_local}
        path = str(self.sweep.submission(self.id))
        for key, entry in calibrations.items():  # in an order in which each stands behind what it needs
            if key not in at:
                after = [at[k] for k in entry["after"]]
                (at[key],) = self._jobs(
                    f"calibrate-{entry['kind']}",
                    [worker.Calibrate(path, key)],
                    [Job("", "calibrate", self.id, (entry["cell"],), key)],
                    f"afterok:{':'.join(after)}" if after else None,
                )
        arrays: dict[tuple[frozenset[str], bool], list[Unit]] = {}
        for unit in units:
            arrays.setdefault((unit.after, unit.all_need), []).append(unit)
        for (needed, all_need), members in arrays.items():
            first = ":".join(at[k] for k in sorted(needed))
            # Cells that can do without a calibration are not lost with it: their task then runs in any case.
            depends = None if not needed else f"afterok:{first}" if all_need else f"afterany:{first}"
            for start in range(0, len(members), self.limits.array):
                part = members[start : start + self.limits.array]
                keys = [tuple(c.key for c in u.cells) for u in part]
                count = self.cluster.shards or 1
                self._jobs(
                    "run",
                    [worker.Run(path, k, u.shard) for k, u in zip(keys, part, strict=True)],
                    [Job("", "run", self.id, k, None, (u.shard,), count) for k, u in zip(keys, part, strict=True)],
                    depends,
                )
        everything = tuple(c.key for c in cells)
        shared = (j for j in self.live if j.kind != "report" and not j.is_local and set(everything) & set(j.cells))
        ends = _heads([*self.made, *shared])
        report = [Job("", "report", self.id, everything)]
        self._jobs("report", [worker.Report(path)], report, f"afterany:{':'.join(ends)}", REPORT_MINUTES)

    def _jobs(
        self, name: str, work: Sequence[Any], jobs: Sequence[Job], depends: str | None, minutes: int | None = None
    ) -> list[str]:
        """Submit an array (or a job, where it is one), and write down what it is before the next."""
        executor = self._executor(name, depends, minutes)
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what it also raises
            ids = [j.job_id for j in executor.submit_array(work)]
        self.made += [dataclasses.replace(j, id=id) for j, id in zip(jobs, ids, strict=True)]
        self.sweep.write_jobs([*self.before, *self.made])
        return ids

    def _executor(self, name: str, depends: str | None, minutes: int | None) -> Any:
        import submitit

        warn_untested("submitit")

        c = self.cluster
        # submitit would write its own defaults for what is left out
        bound = NO_BOUND if c.requeues is None else c.requeues
        executor = submitit.SlurmExecutor(self.sweep.log, bound, python=f"{shlex.quote(sys.executable)} -P")
        exports = [f"export {k}={shlex.quote(v)}" for k, v in snapshot.environment(self.code).items()]
        extra: dict[str, Any] = {"requeue": True, **(c.extra or {})}
        if depends and depends.startswith("afterok"):
            extra["kill-on-invalid-dep"] = "yes"  # else those behind a failed job wait for ever
        executor.update_parameters(
            job_name=f"moend-{name}",
            partition=c.partition,
            account=c.account,
            qos=c.qos,
            constraint=c.constraint,
            gpus_per_node=c.gpus or None,
            cpus_per_task=c.cpus,
            mem=c.memory,
            time=min(self.limits.minutes, minutes or self.limits.minutes),
            array_parallelism=c.max_running or 1_000_000,
            signal_delay_s=c.signal_delay,
            setup=[*(c.setup or []), *exports],
            dependency=depends,
            wckey=None,
            stderr_to_stdout=True,
            additional_parameters=extra,
            # Slurm from 22.05 on does not hand a job's number of CPUs on to its steps
            srun_args=["--export=ALL", *([f"--cpus-per-task={c.cpus}"] if c.cpus else [])],
        )
        return executor

    def _undo(self, console: Console) -> None:
        if self.made:
            heads = _heads(self.made)
            slurm.cancel(heads)
            self.sweep.write_jobs(self.before)
            say(console, f"submission failed: cancelled what had been submitted (jobs {', '.join(heads)})")


def _heads(jobs: Any) -> list[str]:
    """Job numbers, an array's once."""
    return list(dict.fromkeys(j.id.partition("_")[0] for j in jobs))


def wait(store: Store, name: str, console: Console) -> int:
    """Stay until nothing is queued or running; then the table. Returns the exit code that a run would."""
    from pipelines.cluster import status
    from pipelines.reporting import report

    try:
        with terminal.progress(console, "records") as step:
            while True:
                view = status.collect(store, name)
                step(sum(c.have for c in view.cells), sum(c.total for c in view.cells))
                if not view.live:
                    break
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        say(console, "stopped waiting; the jobs go on (pipelines.cancel stops them)")
        raise
    found = report.show(store, name, console)
    report.show_deltas(report.compared(store, found), console)
    for line in status.problems(view):
        say(console, line)
    states = {c.state for c in view.cells}
    return 1 if states & {"failed", "stopped", "pending", "running"} else 2 if "blocked" in states else 0
