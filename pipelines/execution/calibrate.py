"""Calibrations and plans of cells, without their examples: computed, shown and written with their figures."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moend.budget import Budget
from moend.errors import UserError
from pipelines.cli import terminal
from pipelines.cli.hydra import Point
from pipelines.cli.states import exit_code
from pipelines.cli.terminal import say, size
from pipelines.execution import session as evaluate
from pipelines.execution.runner import Runner
from pipelines.planning import planner
from pipelines.planning.planner import Cell, Plan
from pipelines.store.files import write_json


def calibrate(points: list[Point]) -> int:
    """Compute or load the artefacts of every cell, solve its plan, show and write it; one never takes others along."""
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
        for cell in (c for c in plan.cells if c.state == "run"):
            _one(plan, cell, library, console)
        _agree(plan, console)
    ended = {c.state for c in plan.cells}
    if len(plan.cells) == 1 and ended & {"blocked", "infeasible"}:
        raise UserError(plan.cells[0].reason)
    return exit_code(ended - {"run"})


def _by_reason(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.reason, []).append(cell)
    return found


def _agree(plan: Plan, console: Console) -> None:
    """Where a sensitivity and a KL table were both made: how well the one ranks what the other measures."""
    from moend.calibration import readings

    found = {need.kind: plan.store.calibration(need.key) for need, _ in plan.calibrations.values()}
    if not {"sensitivity", "kl"} <= set(found):
        return
    both = readings.agreement(found["sensitivity"], found["kl"])
    table = Table("configuration", "Pearson over layers", "Spearman", title="sensitivity against KL", box=None)
    for name, r in both["per_config"].items():
        table.add_row(name, *("-" if r[k] is None else f"{r[k]:.2f}" for k in ("pearson", "spearman")))
    console.print(table)
    mean = ", ".join(f"{k} {v:.3f}" for k, v in both["mean"].items() if v is not None)
    say(console, f"within layers, mean: {mean}; Pearson above 0.8 in {both['above_0.8']} of {both['layers']} layers")
    say(console, "published (MoE-nD, appendix B): 0.945 and 0.937, 28 of 28; over layers about 0 for eviction")


def _one(plan: Plan, cell: Cell, library: evaluate.Library, console: Console) -> None:
    from moend.calibration import readings
    from pipelines.reporting.figures.ripple_profile import entries

    folders = {n.kind: plan.store.calibration(n.key) for n in cell.facts.calibrations}
    routed = library.plan(cell.config, cell.facts, folders)
    if routed is None:
        why = (
            "keeps everything" if cell.facts.is_full else "each sample's scores divide its budget over layers and heads"
        )
        say(console, f"{cell.label}: {why}, there is no plan")
        return
    show(cell, routed, console)
    if "ripple" in folders:
        show_ripple(readings.ripple_profile(folders["ripple"]), entries(routed), console)
    if "damage" in folders:
        show_damage(readings.damage(folders["damage"]), routed, console)
    folder = plan.store.report(f"plan_{cell.facts.method}_{cell.config.budget}_{cell.key[:6]}")
    for path in write(cell, routed, folders, folder):
        say(console, str(path))
    name, given = cell.facts.method, terminal.budget(cell.config.budget)
    say(console, f"in a script: moend.compress(model, '{name}', '{given}', calibration='{folder}')")


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
    say(console, f"predicted: {size(predicted['eq1_bytes'])} by eq. 1, {size(predicted['resident_bytes'])} resident")
    say(console, f"budget: {terminal.budget(str(Budget.parse(plan['budget'])))}, protocol {plan['protocol']}")
    if plan["objective"] is not None:
        gap = ", proven optimal" if plan["gap"] == 0 else f", at most {plan['gap']:.3g} of it above the optimum"
        table = cell.config.method["allocator"].get("table", "S")
        say(console, f"solver {plan['solver']}: summed {table} {plan['objective']:.4f}{gap}")


def show_ripple(profile: dict[str, Any], tokens: Sequence[int], console: Console) -> None:
    """A ripple profile layer by layer, what it says of the damage, and how steady it is."""
    damage, info = profile["damage"], profile["info"]
    table = Table("layer", "response", "local", *(f"damage at {k:.0%}" for k in damage), "entries", box=None)
    for column in table.columns:
        column.justify = "right"
    columns = [profile["response"].mean(0), profile["local"].mean(0), *(d.mean(0) for d in damage.values())]
    for i, n in enumerate(tokens):
        table.add_row(str(i), *(f"{c[i]:.3g}" for c in columns), str(n))
    console.print(table)
    say(console, f"{len(profile['response'])} examples of {info['text']}; responses and damage in nats")
    for keep, said in info["damage"].items():
        parts = [f"{name} {_interval(said[name])}" for name in ("output", "local", "depth")]
        say(console, f"|Spearman| with the damage at {float(keep):.0%} kept: {', '.join(parts)}")
    if info["damage"]:
        say(console, "published (RippleKV, table 1): output 0.799 (0.723 to 0.857), depth 0.359 (0.218 to 0.480)")
    found = sorted(info["stability"].items(), key=lambda item: [int(x) for x in re.findall(r"\d+", item[0])])
    steady = [f"{name} {r:.2f}" for name, r in found if r is not None]
    if steady:
        say(console, f"Spearman of the profile with itself under: {'; '.join(steady)}")


def show_damage(found: dict[str, Any], plan: dict[str, Any], console: Console) -> None:
    """What the plan's cut of each layer alone does to the output, beside the cheapest cut that was measured."""
    cheapest = found["configs"][-1]
    kinds = found["kinds"]
    table = Table("layer", *(f"{kind}, {what}" for kind in kinds for what in ("planned", cheapest.name)), box=None)
    for column in table.columns:
        column.justify = "right"
    planned = [found["planned"](i, x) for i, x in enumerate(plan["layers"])]
    for i, own in enumerate(planned):
        values = [v for name, kind in kinds.items() for v in (own[name], kind[i, -1])]
        table.add_row(str(i), *(f"{v:.2g}" for v in values))
    console.print(table)
    each = ", ".join(f"{name} {sum(own[name] for own in planned):.4f}" for name in kinds)
    say(console, f"damage in nats, mean of {found['examples']} examples a kind; summed over layers as planned: {each}")


def _interval(r: dict[str, float | None]) -> str:
    if r["value"] is None:
        return "-"
    return f"{r['value']:.2f}" + ("" if r["low"] is None else f" [{r['low']:.2f}, {r['high']:.2f}]")


def write(cell: Cell, plan: dict[str, Any], folders: dict[str, Path], folder: Path) -> list[Path]:
    """plan.json, the artefacts, the routing map, and the sensitivity landscape where there is one."""
    from moend.calibration import readings
    from pipelines.reporting.figures import damage_map, ripple_profile, routing_map, sensitivity

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "plan.json", plan)
    made = [folder / "plan.json"]
    for kind, source in folders.items():  # the few KiB that a script needs beside the model
        shutil.copytree(source, folder / kind, dirs_exist_ok=True)
        made.append(folder / kind)
    title = f"{cell.facts.method} at {terminal.budget(cell.config.budget)}, {cell.facts.model}"
    if routing_map.draw([(title, plan)], folder / "routing_map.png"):
        made.append(folder / "routing_map.png")
    if "ripple" in folders:
        p = readings.ripple_profile(folders["ripple"])
        picture = folder / "ripple_profile.png"
        if ripple_profile.draw(p["response"], p["local"], p["damage"], ripple_profile.entries(plan), title, picture):
            made.append(picture)
    if "sensitivity" in folders:
        values, operations = readings.single_operations(folders["sensitivity"])
        if sensitivity.draw(values, operations, f"sensitivity, {cell.facts.model}", folder / "sensitivity.png"):
            made.append(folder / "sensitivity.png")
    if "damage" in folders:
        found = readings.damage(folders["damage"])
        names, heading = [c.name for c in found["configs"]], f"damage, {cell.facts.model}"
        if sensitivity.draw(found["table"], names, heading, folder / "damage.png", "KL at the output, nats (log)"):
            made.append(folder / "damage.png")
        if damage_map.draw(found["hardest"], plan, names[-1], title, folder / "damage_map.png"):
            made.append(folder / "damage_map.png")
    return made
