"""From composed points to a plan: duplicates removed, finished cells dropped, the rest grouped by shared prefill.

Needs neither weights nor network: what a cell is follows from the configuration and the hashes of files.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml
from rich.console import Console
from rich.table import Table

from moend import paths
from moend.errors import UserError
from pipelines.cli.hydra import Point
from pipelines.cli.states import State
from pipelines.cli.terminal import budget, question, say, size
from pipelines.planning import identity, power
from pipelines.planning.estimate import estimate
from pipelines.planning.facts import Facts, Planner
from pipelines.planning.needs import CalibrationNeed
from pipelines.planning.schema import RunConfig, validate
from pipelines.store import provenance
from pipelines.store.cells import CorruptRecords, RecordKey, Store

LONG = 1024  # tokens: shorter answers end before a state is saved


@dataclass
class Cell:
    """One row of a table: what it is, where it stands, and what it waits for."""

    point: Point
    config: RunConfig
    facts: Facts
    payload: dict[str, Any]
    key: str
    group: str
    state: State
    reason: str = ""
    missing: tuple[RecordKey, ...] = ()  # records still to be computed
    commit: str | None = None  # of the code that made the result of a cell that is done

    @property
    def expected(self) -> list[RecordKey]:
        """Every record that makes the cell complete, in the order they are computed."""
        return [(task, id, draw) for task, id in self.facts.expected for draw in range(self.draws)]

    @property
    def examples(self) -> int:
        """Contexts of which some record is missing: prompts that must be read for this cell."""
        return len(prompts([self]))

    @property
    def draws(self) -> int:
        """Draws per example; a likelihood has one."""
        return 1 if self.facts.is_nll else self.config.generation.samples

    @property
    def label(self) -> str:
        """How the cell is called in messages."""
        visible = self.payload["question_visible"]
        asked = "" if visible is None else f"question {question(visible)}"
        parts = [self.facts.method, budget(self.payload["budget"]), self.facts.benchmark, asked]
        return " ".join(p for p in parts if p not in ("", "-"))

    @property
    def info(self) -> dict[str, Any]:
        """What the report needs and the key does not hold: names and the meaning of the score."""
        f = self.facts
        return {
            "model": f.model,
            "method": f.method,
            "benchmark": f.benchmark,
            "label": self.label,
            "overrides": list(self.point.overrides),
            "benchmark_config": self.config.benchmark,
            "metrics": f.metrics,
            "unit": f.unit,
            "higher_is_better": f.higher_is_better,
            "n_expected": len(self.expected),
            "samples": self.draws,
        }


@dataclass
class Plan:
    """All cells of a sweep, each once."""

    name: str
    store: Store
    cells: list[Cell]
    duplicates: int = 0
    groups: list[list[Cell]] = field(default_factory=list)  # cells still to run, by shared prefill

    @property
    def calibrations(self) -> dict[str, tuple[CalibrationNeed, Cell]]:
        """Distinct artefacts that cells to run need, and a cell whose configuration describes each."""
        return {need.key: (need, cell) for group in self.groups for cell in group for need in cell.facts.calibrations}

    def count(self, state: State) -> int:
        """Cells in a state."""
        return sum(c.state == state for c in self.cells)

    @property
    def waiting(self) -> list[list[Cell]]:
        """Cells that lack records, by shared prefill: those to run, and those that wait for weights or data."""
        return grouped(c for c in self.cells if c.state in ("run", "blocked"))

    @property
    def prefills(self) -> int:
        """Prompts to be read, for blocked cells too: one per example for all cells of a group together."""
        return sum(len(prompts(group)) for group in self.waiting)

    @property
    def prefills_saved(self) -> int:
        """Prompts that running the cells one by one would read in addition."""
        return sum(c.examples for group in self.waiting for c in group) - self.prefills

    @property
    def absent(self) -> list[str]:
        """Weights and data that a run of this plan fetches first."""
        lines = (line for c in self.cells if c.state == "run" for line in (c.facts.absent, c.facts.absent_data))
        return list(dict.fromkeys(line for line in lines if line))

    def cache_bytes(self) -> int:
        """The most that caches will take at once: an uncompressed prompt and every cell of its group beside it."""
        return max(
            (max(c.facts.full_bytes for c in g) + sum(c.facts.cell_bytes for c in g) for g in self.waiting), default=0
        )

    def state_bytes(self) -> int:
        """The most disk that the states of long answers take at once: those of a group, twice while one is replaced."""
        return max((2 * sum(map(_state_bytes, g)) for g in self.waiting), default=0)


def _state_bytes(cell: Cell) -> int:
    """What the saved state of a cell's answers takes: its draws of one context, grown by all that they generate."""
    if not cell.config.engine.save_every_s or cell.facts.is_nll or cell.facts.new_tokens < LONG:
        return 0
    grown = 0 if cell.facts.arch is None else cell.facts.arch.full_bytes(cell.facts.new_tokens)
    return cell.draws * (cell.facts.cell_bytes + grown)


def make_plan(points: Sequence[Point], library: Planner) -> Plan:
    """Type, identify and place every point. Raises UserError before anything is written."""
    configs = [library.resolve(validate(p)) for p in points]
    for shared in ("paths", "dry_run", "cluster", "tracking"):
        if any(getattr(c, shared) != getattr(configs[0], shared) for c in configs):
            raise UserError(f"{shared} must be the same for all points of a sweep")
    store = Store(configs[0].store)
    cells: dict[str, Cell] = {}
    for point, config in zip(points, configs, strict=True):
        cell = _cell(point, config, library.facts(config, point.choices), store)
        cells.setdefault(cell.key, cell)
    plan = Plan(sweep_name(points, list(cells)), store, list(cells.values()), len(points) - len(cells))
    plan.groups = grouped(c for c in plan.cells if c.state == "run")
    return plan


def grouped(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Cells by shared prefill, in the order of the sweep."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.group, []).append(cell)
    return list(groups.values())


def prompts(group: Iterable[Cell]) -> set[tuple[tuple[str, str], ...]]:
    """The contexts of which some cell of the group lacks a record, by their examples."""
    found: set[tuple[tuple[str, str], ...]] = set()
    for cell in group:
        missing = {k[:2] for k in cell.missing}
        found.update(context for context in cell.facts.contexts if not missing.isdisjoint(context))
    return found


def _cell(point: Point, config: RunConfig, facts: Facts, store: Store) -> Cell:
    payload = identity.cell_payload(
        config.model_dump() | ({"method": facts.settings} if facts.settings else {}),
        facts.identity,
        {need.kind: need.key for need in facts.calibrations},
        is_full=facts.is_full,
        is_nll=facts.is_nll,
    )
    key = identity.key(payload)
    cell = Cell(point, config, facts, payload, key, identity.key(identity.group_payload(payload)), "run")
    folder = store.cell(key)
    if folder.folder.exists() and (have := folder.payload()) is not None:
        identity.refuse_difference(have.get("payload"), payload, str(folder.folder / "payload.json"))
    if (result := folder.result()) is not None or (result := _computed_before(cell, store)) is not None:
        cell.state, cell.commit = "done", result.get("commit")
    elif facts.infeasible:
        cell.state, cell.reason = "infeasible", facts.infeasible
    else:
        if facts.blocked:
            cell.state, cell.reason = "blocked", facts.blocked
        try:
            have_records = folder.done()
            cell.missing = tuple(k for k in cell.expected if k not in have_records)
        except CorruptRecords as e:  # a person has to look at that file; the other cells can go on
            cell.state, cell.reason = "failed", str(e)
    return cell


def _computed_before(cell: Cell, store: Store) -> dict[str, Any] | None:
    """The result of the same cell in an earlier form (`identity.former`), whose key and payload it takes over."""
    if store.cell(cell.key).folder.exists() or not (store.root / "cells").is_dir():
        return None
    for payload in identity.former(cell.payload):
        if (result := store.cell(key := identity.key(payload)).result()) is not None:
            cell.payload, cell.key = payload, key
            return result
    return None


RUN_ONLY_OVERRIDES = (
    *("paths", "cluster", "tracking", "dry_run", "engine.chunk", "engine.max_bytes", "engine.save_every_s", "hydra"),
    *("engine.kept", "model.device", "model.device_map"),
)


def sweep_name(points: Sequence[Point], keys: Sequence[str]) -> str:
    """A sweep file's name while nothing but run-only keys is overridden; else with 8 hex digits of its cells' keys.

    The same cells have the same name on every day.
    """
    digest = identity.key(sorted(keys))[:8]
    named = points[0].choices.get("sweep")
    if not named:
        return digest
    asked = {frozenset(o for o in p.overrides if not _run_only(o)) for p in points}
    return str(named) if asked == _points_of(str(named)) else f"{named}-{digest}"


def _run_only(override: str) -> bool:
    return override.startswith(("+sweep=", *RUN_ONLY_OVERRIDES))


def _points_of(name: str) -> set[frozenset[str]] | None:
    """The points of a sweep file, as Hydra writes them; None where it cannot be read."""
    from omegaconf import OmegaConf

    from pipelines.planning.points import expand

    path = paths.folder("sweeps", "sweep") / f"{name}.yaml"
    if not path.is_file():
        return None
    sweeper: Any = OmegaConf.to_container(OmegaConf.select(OmegaConf.load(path), "hydra.sweeper") or OmegaConf.create())
    return {frozenset(p) for p in expand(sweeper.get("params") or {}, sweeper.get("grids") or [], [])}


def show(plan: Plan, console: Console, *, detail: bool | Literal["full"]) -> None:
    """The plan, before anything runs; detail: also a row for every cell, or (full) all that its key holds."""
    order: tuple[State, ...] = ("run", "done", "blocked", "infeasible", "failed")
    states = ", ".join(f"{plan.count(s)} {s}" for s in order if plan.count(s))
    twice = f" ({plan.duplicates} more points name a cell that is there already)" if plan.duplicates else ""
    say(console, f"{plan.name}: {len(plan.cells)} cells: {states}{twice}")
    if others := sum(c.state == "done" and c.commit != provenance.commit() for c in plan.cells):
        say(
            console,
            f"  {others} of {len(plan.cells)} cells: made by other code",
        )
    for line in dict.fromkeys(c.facts.caution for c in plan.cells if c.facts.caution):
        say(console, f"  caution: {line}")
    for line in plan.absent:
        say(console, f"  a run fetches first: {line}")
    if plan.waiting:
        needs = {n.key: n for group in plan.waiting for c in group for n in c.facts.calibrations}.values()
        absent = [n for n in needs if not (plan.store.calibration(n.key) / "artefact.json").exists()]
        new = [f"{n.kind} {n.key}" for n in absent if paths.calibration(n.key) is None]
        packaged = f" ({len(absent) - len(new)} come with the package)" if len(absent) > len(new) else ""
        blocked = ", blocked cells included" if plan.count("blocked") else ""
        say(console, f"  prefills: {plan.prefills:,} planned, {plan.prefills_saved:,} saved by sharing{blocked}")
        say(console, f"  calibrations to compute: {', '.join(new) or 'none'}{packaged}")
        say(console, f"  caches in memory at once: about {size(plan.cache_bytes())}")
        if needed := plan.state_bytes():
            say(console, f"  disk for the state of long answers while they run: up to {size(needed)}")
        say(console, f"  time: {estimate(plan)}")
        for line in power.lines(plan, detail=bool(detail)):
            say(console, f"  {line}")
    if detail == "full":
        for c in plan.cells:
            console.print(f"\n# {c.key} {c.state}: {c.label}", markup=False, highlight=False, soft_wrap=True)
            resolved = yaml.safe_dump(c.payload, sort_keys=True, allow_unicode=True, width=10**6)
            console.print(resolved.rstrip(), markup=False, highlight=False, soft_wrap=True)
    elif detail:
        table = Table("key", "group", "method", "budget", "benchmark", "question", "state", "records missing", box=None)
        for c in plan.cells:
            asked = question(c.payload["question_visible"])
            row = (c.key, c.group[:6], c.facts.method, budget(c.payload["budget"]), c.facts.benchmark, asked, c.state)
            table.add_row(*row, str(len(c.missing)))
        console.print(table)
    for c in plan.cells:
        if c.reason:
            say(console, f"{c.state}: {c.label} [{c.key}]: {c.reason}")


def manifest(plan: Plan, args: Sequence[str], program: str) -> dict[str, Any]:
    """What `report`, `status` and a reader need to know of a sweep later."""
    return {
        "schema": 1,
        "name": plan.name,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(["python", "-m", f"pipelines.{program}", *args]),
        "cells": [
            {"key": c.key, "group": c.group, "state": c.state, "reason": c.reason, "payload": c.payload, "info": c.info}
            for c in plan.cells
        ],
    }


def store_argument(plan: Plan) -> str:
    """The argument that names the store of a plan to the other programs; empty for the default."""
    store = plan.cells[0].config.paths.store
    return "" if store == "outputs" else " " + shlex.quote(f"paths.store={store}")
