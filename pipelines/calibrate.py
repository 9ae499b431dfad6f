"""python -m pipelines.calibrate method=2d_hetero budget=25%: measure, solve, and show the plan of a cell."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moend.errors import UserError
from moend.plan import Budget
from pipelines import evaluate, planner, terminal
from pipelines.compose import Point, run_hydra
from pipelines.launcher import Runner
from pipelines.planner import Cell, Plan
from pipelines.store import write_json
from pipelines.terminal import say, size


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 all plans are written, 2 a mistake in the command or a budget that cannot be met."""
    return run_hydra(calibrate, argv, "calibrate")


def calibrate(points: list[Point]) -> int:
    """Compute or load the artefacts of every cell, solve its plan, show and write it."""
    console, library = terminal.console(), evaluate.Library()
    plan = planner.make_plan(points, library)
    for cell in plan.cells:
        cell.state = "blocked" if cell.facts.blocked else "infeasible" if cell.facts.infeasible else "run"
        cell.reason = cell.facts.blocked or cell.facts.infeasible or ""
        if cell.reason:
            raise UserError(cell.reason)
    plan.groups = [plan.cells]
    if plan.cells[0].config.dry_run:
        for need, _ in plan.calibrations.values():
            have = (plan.store.calibration(need.key) / "artefact.json").exists()
            say(console, f"{need.kind} {need.key}: {'there' if have else 'to be computed'}")
        return 0
    plan.store.prepare()
    Runner(plan, library, console).calibrate()
    for cell in plan.cells:
        if cell.state == "blocked":
            raise UserError(cell.reason)
        if cell.state == "failed":
            return 1
        _one(plan, cell, library, console)
    _agree(plan, console)
    return 0


def _agree(plan: Plan, console: Console) -> None:
    """Where a sensitivity and a KL table were both made: how well the one ranks what the other measures."""
    found = {need.kind: plan.store.calibration(need.key) for need, _ in plan.calibrations.values()}
    if not {"sensitivity", "kl"} <= set(found):
        return
    both = evaluate.agreement(found["sensitivity"], found["kl"])
    table = Table("configuration", "Pearson over layers", "Spearman", title="sensitivity against KL", box=None)
    for name, r in both["per_config"].items():
        table.add_row(name, *("-" if r[k] is None else f"{r[k]:.2f}" for k in ("pearson", "spearman")))
    console.print(table)
    mean = ", ".join(f"{k} {v:.3f}" for k, v in both["mean"].items() if v is not None)
    say(console, f"within layers, mean: {mean}; Pearson above 0.8 in {both['above_0.8']} of {both['layers']} layers")
    say(console, "published (MoE-nD, appendix B): 0.945 and 0.937, 28 of 28; over layers about 0 for eviction")


def _one(plan: Plan, cell: Cell, library: evaluate.Library, console: Console) -> None:
    folders = {n.kind: plan.store.calibration(n.key) for n in cell.facts.calibrations}
    routed = library.plan(cell.config, cell.facts, folders)
    if routed is None:
        say(console, f"{cell.label}: keeps everything, there is no plan")
        return
    show(cell, routed, console)
    folder = plan.store.report(f"plan_{cell.facts.method}_{cell.config.budget}_{cell.key[:6]}")
    for path in write(cell, routed, folders, folder):
        say(console, str(path))
    name, given = cell.facts.method, terminal.budget(cell.config.budget)
    say(console, f"in a script: moend.compress(model, '{name}', '{given}', calibration='{folder}')")


def show(cell: Cell, plan: dict[str, Any], console: Console) -> None:
    """The plan as a table, a line per layer, and what it costs and promises."""
    layers = plan["layers"]
    say(console, f"{cell.label}: {cell.facts.model}, reference {plan['t_ref']} tokens")
    table = Table("layer", "kept", "", "tokens", "K bits", "V bits", box=None)
    for column in (0, 1, 3, 4, 5):
        table.columns[column].justify = "right"
    for i, x in enumerate(layers):
        share = x["keep"] if x["tokens"] is None else min(x["tokens"] / plan["t_ref"], 1)
        tokens = round(share * plan["t_ref"]) if x["tokens"] is None else x["tokens"]
        bar = "█" * round(share * 20)
        table.add_row(str(i), f"{share:.3f}", bar, str(tokens), str(x["k_bits"]), str(x["v_bits"]))
    console.print(table)
    predicted = plan["predicted"]
    say(console, f"predicted: {size(predicted['eq1_bytes'])} by eq. 1, {size(predicted['resident_bytes'])} resident")
    say(console, f"budget: {terminal.budget(str(Budget.parse(plan['budget'])))}, protocol {plan['protocol']}")
    if plan["objective"] is not None:
        gap = ", proven optimal" if plan["gap"] == 0 else f", at most {plan['gap']:.3g} of it above the optimum"
        say(console, f"solver {plan['solver']}: summed sensitivity {plan['objective']:.4f}{gap}")


def write(cell: Cell, plan: dict[str, Any], folders: dict[str, Path], folder: Path) -> list[Path]:
    """plan.json, the artefacts, the routing map, and the sensitivity landscape where there is one."""
    from pipelines.figures import routing_map, sensitivity

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "plan.json", plan)
    made = [folder / "plan.json"]
    for kind, source in folders.items():  # the few KiB that a script needs beside the model
        shutil.copytree(source, folder / kind, dirs_exist_ok=True)
        made.append(folder / kind)
    title = f"{cell.facts.method} at {terminal.budget(cell.config.budget)}, {cell.facts.model}"
    if routing_map.draw([(title, plan)], folder / "routing_map.png"):
        made.append(folder / "routing_map.png")
    if "sensitivity" in folders:
        values, operations = evaluate.single_operations(folders["sensitivity"])
        if sensitivity.draw(values, operations, f"sensitivity, {cell.facts.model}", folder / "sensitivity.png"):
            made.append(folder / "sensitivity.png")
    return made


if __name__ == "__main__":
    sys.exit(main())
