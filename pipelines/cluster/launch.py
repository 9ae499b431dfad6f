"""What `run` does with composed points: plan, then run here or submit, then tabulate."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from moend.errors import UserError
from pipelines.cli import terminal
from pipelines.cli.hydra import Point, command
from pipelines.cli.states import exit_code
from pipelines.cli.terminal import say
from pipelines.cluster import submit
from pipelines.execution import session as evaluate
from pipelines.execution.runner import Runner
from pipelines.planning import planner
from pipelines.planning.planner import Plan, store_argument
from pipelines.reporting import report
from pipelines.store.files import write_json
from pipelines.tracking import items
from pipelines.tracking import wandb as tracking


def launch(points: Sequence[Point], args: Sequence[str]) -> int:
    """Plan, run, tabulate. Returns the exit code."""
    console = terminal.console()
    library = evaluate.Library()
    plan = planner.make_plan(points, library)
    config = plan.cells[0].config
    alone = plan.cells[0] if len(plan.cells) == 1 else None
    if alone and alone.state == "infeasible":
        raise UserError(alone.reason)
    planner.show(plan, console, detail=config.dry_run)
    if config.dry_run:
        return 0
    if config.cluster.name != "inprocess" and plan.groups:
        return submit.submit(plan, args, console)
    plan.store.prepare()
    manifest = plan.store.manifest(plan.name)
    manifest.parent.mkdir(parents=True, exist_ok=True)
    write_json(manifest, planner.manifest(plan, args, "run"))
    fresh = [c for c in plan.cells if c.state == "run"]
    submit.forget(plan, fresh)
    with tracking.Tracker(plan.store, plan.name, config.tracking) as tracker:
        Runner(plan, library, console, done=lambda cell: tracker.add(items.Item("cell", cell.key))).run()
        write_json(manifest, planner.manifest(plan, args, "run"))
        if alone and alone.state in ("blocked", "infeasible"):
            raise UserError(alone.reason)
        found = report.show(plan.store, plan.name, console)
        differences = report.compared(plan.store, found)
        report.show_deltas(differences, console)
        report.write(plan.store, plan.name, differences, again=bool(fresh))
        for item in items.items(plan.store, plan.name):  # also what an earlier run could not publish any more
            tracker.add(item)
        _epilogue(plan, args, console)
    return exit_code(c.state for c in plan.cells)


def _epilogue(plan: Plan, args: Sequence[str], console: Console) -> None:
    page = plan.store.report(plan.name) / "index.html"
    say(console, f"results: {plan.store.root / 'cells'}   tables and figures: {page}")
    if plan.count("failed") or plan.count("blocked"):
        say(console, f"again, for what is missing: {command(args, 'run')}")
    say(console, f"next: python -m pipelines.report sweep={plan.name}{store_argument(plan)}")
    sys.stdout.flush()
