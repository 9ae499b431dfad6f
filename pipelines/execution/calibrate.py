"""Calibrations and plans of cells, without their examples: computed, shown and written with their figures."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moend import calibration
from moend.budget import Budget
from moend.calibration import Artefact, Report, kind
from moend.errors import UserError
from pipelines.cli import terminal
from pipelines.cli.hydra import Point
from pipelines.cli.states import exit_code
from pipelines.cli.terminal import say, size
from pipelines.execution import session as evaluate
from pipelines.execution.runner import Runner
from pipelines.planning import planner
from pipelines.planning.planner import Cell, Plan
from pipelines.reporting import report
from pipelines.results.sweep import CALIBRATED
from pipelines.store.files import read_json, write_json
from pipelines.tracking import items
from pipelines.tracking import wandb as tracking


def calibrate(points: list[Point], args: Sequence[str]) -> int:
    """Compute or load the artefacts of every cell, solve its plan, show and write it; one never takes others along.

    A sweep that is only calibrated gets a page, too. args: the command's.
    """
    console, library = terminal.console(), evaluate.Library()
    plan = planner.make_plan(points, library)
    for cell in plan.cells:  # records and a benchmark's data are not needed
        cell.state, cell.reason = "run", ""
        if cell.facts.arch is None and cell.facts.blocked:
            cell.state, cell.reason = "blocked", cell.facts.blocked
        elif cell.facts.infeasible:
            cell.state, cell.reason = "infeasible", cell.facts.infeasible
    without = [c for c in plan.cells if c.state != "run"]
    for reason, cells in _by_reason(without).items() if len(plan.cells) > 1 else ():
        say(console, f"{cells[0].state}: {', '.join(c.label for c in cells)}: {reason}")
    plan.groups = [[c for c in plan.cells if c.state == "run"]]
    if plan.cells[0].config.dry_run:
        for need, cell in plan.calibrations.values():
            have = (plan.store.calibration(need.key) / "artefact.json").exists()
            say(console, f"{need.kind} of {cell.facts.model} {need.key}: {'there' if have else 'to be computed'}")
        for line in plan.absent:
            say(console, f"a run fetches first: {line}")
    elif plan.groups[0]:
        plan.store.prepare()
        Runner(plan, library, console).calibrate()
        mine = [c for c in plan.cells if c.state == "run"]
        plans = {cell.key: _one(plan, cell, library, console) for cell in mine}
        _compare(plan, console)
        if mine and (len(plan.cells) > 1 or any(a.startswith("+sweep=") for a in args)):
            _page(plan, plans, args, console)
    ended = {c.state for c in plan.cells}
    if len(plan.cells) == 1 and ended & {"blocked", "infeasible"}:
        raise UserError(plan.cells[0].reason)
    return exit_code(ended - {"run"})


def _by_reason(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.reason, []).append(cell)
    return found


def _compare(plan: Plan, console: Console) -> None:
    """What kinds say of their artefacts beside those of other kinds."""
    folders = {n.kind: plan.store.calibration(n.key) for n, _ in plan.calibrations.values()}
    found = {name: Artefact.load(f) for name, f in folders.items() if (f / "artefact.json").exists()}  # not refused
    for name, artefact in found.items():
        show_report(kind(name).compare(artefact, found), console)


def _page(plan: Plan, plans: Mapping[str, dict[str, Any] | None], args: Sequence[str], console: Console) -> None:
    """The sweep's manifest, report and W&B runs; where `run` has made a manifest, that one stays."""
    path = plan.store.manifest(plan.name)
    if not path.exists() or any(c["state"] == CALIBRATED for c in read_json(path)["cells"]):
        made = planner.manifest(plan, args, "calibrate")
        for cell in made["cells"]:
            if cell["key"] in plans:
                cell |= {"state": CALIBRATED, "plan": plans[cell["key"]]}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, made)
    page = report.write(plan.store, plan.name, report.compared(plan.store, report.rows(plan.store, read_json(path))))[0]
    say(console, f"tables and figures of the sweep: {page}")
    config = plan.cells[0].config.tracking
    tracking.publish(plan.store, plan.name, config, items.items(plan.store, plan.name))


def _one(plan: Plan, cell: Cell, library: evaluate.Library, console: Console) -> dict[str, Any] | None:
    folders = {n.kind: plan.store.calibration(n.key) for n in cell.facts.calibrations}
    routed = library.plan(cell.config, cell.facts, folders)
    if routed is None:
        why = (
            "keeps everything" if cell.facts.is_full else "each sample's scores divide its budget over layers and heads"
        )
        say(console, f"{cell.label}: {why}, there is no plan")
        return None
    show(cell, routed, console)
    for name, source in folders.items():
        show_report(kind(name).report(Artefact.load(source), routed), console)
    folder = plan.store.report(f"plan_{cell.facts.method}_{cell.config.budget}_{cell.key[:6]}")
    for path in write(cell, routed, folders, folder):
        say(console, str(path))
    name, given = cell.facts.method, terminal.budget(cell.config.budget)
    say(console, f"in a script: moend.compress(model, '{name}', '{given}', calibration='{folder}')")
    return routed


def show_report(report: Report | None, console: Console) -> None:
    """A kind's table, and the lines below it."""
    if report is None:
        return
    if report.columns:
        table = Table(*report.columns, title=report.title, box=None)
        for column in table.columns[1:] if report.title else table.columns:
            column.justify = "right"
        for row in report.rows:
            table.add_row(*row)
        console.print(table)
    for line in report.lines:
        say(console, line)


def show(cell: Cell, plan: dict[str, Any], console: Console) -> None:
    """The plan as a table, a line per layer, and what it costs and promises."""
    layers = plan["layers"]
    say(console, f"{cell.label}: {cell.facts.model}, reference {plan['t_ref']} tokens")
    headed = any(x.get("heads") for x in layers)
    table = Table("layer", "kept", "", "tokens", "K bits", "V bits", *["its heads"] * headed, box=None)
    for column in (0, 1, 3, 4, 5):
        table.columns[column].justify = "right"
    for i, x in enumerate(layers):
        share = x["keep"] if x["tokens"] is None else min(x["tokens"] / plan["t_ref"], 1)
        tokens = round(share * plan["t_ref"]) if x["tokens"] is None else x["tokens"]
        bar = "█" * round(share * 20)
        own = ["  ".join(f"{h['keep']:.3g} K{h['k_bits']} V{h['v_bits']}" for h in x.get("heads") or ())] * headed
        table.add_row(str(i), f"{share:.3f}", bar, str(tokens), str(x["k_bits"]), str(x["v_bits"]), *own)
    console.print(table)
    predicted = plan["predicted"]
    peak = f", {size(predicted['peak_bytes'])} at the peak" if "peak_bytes" in predicted else ""  # older plans
    say(
        console,
        f"predicted: {size(predicted['eq1_bytes'])} by eq. 1, {size(predicted['resident_bytes'])} resident{peak}",
    )
    say(console, f"budget: {terminal.budget(str(Budget.parse(plan['budget'])))}, protocol {plan['protocol']}")
    if plan["objective"] is not None:
        gap = ", proven optimal" if plan["gap"] == 0 else f", at most {plan['gap']:.3g} of it above the optimum"
        table = cell.config.method["allocator"].get("table", "S")
        say(console, f"solver {plan['solver']}: summed {table} {plan['objective']:.4f}{gap}")


def write(cell: Cell, plan: dict[str, Any], folders: dict[str, Path], folder: Path) -> list[Path]:
    """plan.json, the artefacts, and what figures draw of them."""
    from pipelines.reporting.figures import pictures_of_plan

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "plan.json", plan)
    made = [folder / "plan.json"]
    for name, source in folders.items():  # the few KiB that a script needs beside the model
        shutil.copytree(source, folder / name, dirs_exist_ok=True)
        made.append(folder / name)
    title = f"{cell.facts.method} at {terminal.budget(cell.config.budget)}, {cell.facts.model}"
    found = {name: calibration.figure(source, name) for name, source in folders.items()}
    drawn = pictures_of_plan(plan, found, title, cell.facts.model)
    return made + [path for p in drawn if p.draw(path := folder / f"{p.name}.png")]
