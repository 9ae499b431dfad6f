"""Seconds from a command to its plan, cell by cell: `python -m perf.planning` prints one JSON object.

The sweep has 200 cells (5 methods x 4 budgets x 10 seeds on the embedded default) and an empty store. `compose` is
Hydra's part, `imports` the library's modules, `plan` make_plan, `command` the whole `dry_run=true` in a process of its
own; `cpu` is that process's CPU time, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time

from pipelines.cli.hydra import Point, run_hydra

AXES = ["method=1d,2d,2d_uniform,2d_hetero,SnapKV", "budget=5%,10%,20%,40%", "seed=range(10)"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", help="a sweep file instead of the 200 cells")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as store:
        axes = [f"+sweep={args.sweep}"] if args.sweep else AXES
        command = [*axes, "dry_run=true", f"paths.store={store}", "-m"]
        out = {"command": " ".join(axes), **stages(command), **process(command)}
    print(json.dumps(out, indent=1))


def stages(command: list[str]) -> dict[str, float | int]:
    """Seconds of each stage in this process."""
    points: list[Point] = []

    def keep(found: list[Point]) -> int:
        points.extend(found)
        return 0

    clock = [time.perf_counter()]
    assert run_hydra(keep, command) == 0
    clock.append(time.perf_counter())
    from pipelines.execution.session import Library
    from pipelines.planning import planner

    clock.append(time.perf_counter())
    plan = planner.make_plan(points, Library())
    clock.append(time.perf_counter())
    seconds = [round(b - a, 3) for a, b in itertools.pairwise(clock)]
    named = dict(zip(("compose", "imports", "plan"), seconds, strict=True))
    return {"points": len(points), "cells": len(plan.cells), **named}


def process(command: list[str]) -> dict[str, float]:
    """Wall and CPU seconds of the whole command."""
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "pipelines.run", *command], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"command_seconds": round(time.perf_counter() - begin, 2), "command_cpu": round(cpu, 2)}


if __name__ == "__main__":
    main()
