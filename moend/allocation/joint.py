"""MoE-nD: every layer, or KV head, its own (kept entries, K bits, V bits), chosen from a lattice under one budget.

MoE-nD section 4. `unit: head` is ours: to the solver a head is what a layer is, one item of the knapsack.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from moend.allocation.base import Allocation, Allocator, Task, choices, largest_that_fits
from moend.allocation.cost import CostModel
from moend.allocation.solver import SOLVERS, solve, solve_common
from moend.calibration.artefact import Artefact
from moend.calibration.sensitivity import decode, table
from moend.errors import Infeasible, UserError
from moend.layer_bytes import BITS
from moend.plan import EXTRA_KEEPS, Config, LayerPlan

log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Joint(Allocator):
    """The choice of least summed S that fits the budget, S read from a table that a calibration measured.

    keeps x bits is the lattice of choices. Precision that is not `joint` leaves one choice of bits.
    """

    unit: Literal["layer", "head"] = "layer"  # what gets its own choice: a layer, or each KV head (table: damage)
    table: Literal["sensitivity", "kl", "damage"] = "sensitivity"  # S: L2 of the layer's output, or KL of the model's
    solver: Literal["exact", "greedy", "greedy_paper"] = "exact"  # how the choice is found (`moend.allocation.solver`)
    keeps: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)  # shares of `t_ref` entries that may be kept
    bits: tuple[int, ...] = (16, 8, 4)  # bits that a side with `joint` precision may have
    common_keep: bool = False  # one share for all, the best that fits; only bits differ (MoE-nD's 2d)
    cost: Literal["resident", "eq1"] = "resident"  # what the budget counts: bytes held, or codes alone by eq. (1)
    t_ref: int | str = "auto"  # tokens that shares refer to: auto | sample (each sample's own length) | a number
    extend_lattice: bool = True  # smaller shares join where nothing on the lattice fits

    chooses_bits = True

    def __post_init__(self) -> None:
        for name, allowed in (
            ("unit", ("layer", "head")),
            ("table", ("sensitivity", "kl", "damage")),
            ("solver", SOLVERS),
            ("cost", ("resident", "eq1")),
        ):
            choices(f"method.allocator.{name}", getattr(self, name), allowed)
        if not self.keeps or not all(isinstance(k, int | float) and 0 < k <= 1 for k in self.keeps):
            raise UserError(f"method.allocator.keeps must be shares in (0, 1], got {list(self.keeps)}")
        if not self.bits or not set(self.bits) <= set(BITS):
            raise UserError(f"method.allocator.bits must be among {BITS}, at least one, got {list(self.bits)}")
        if self.t_ref not in ("auto", "sample") and (not isinstance(self.t_ref, int) or self.t_ref < 2):
            raise UserError(f"method.allocator.t_ref must be auto, sample or a number >= 2, got {self.t_ref!r}")
        if self.divides_heads and self.table != "damage":
            raise UserError(
                f"method.allocator.unit=head needs table=damage: {self.table} is measured on the output of a whole "
                "layer, in which the heads are mixed already"
            )

    @property
    def keeps_all(self) -> bool:  # type: ignore[override]
        """Whether the only share is 1: bits alone are chosen (KVTuner)."""
        return set(self.keeps) == {1.0}

    @property
    def chooses_shares(self) -> bool:  # type: ignore[override]
        """Whether layers differ in their share."""
        return not self.common_keep

    @property
    def calibration(self) -> str:  # type: ignore[override]
        """Its table."""
        return self.table

    @property
    def divides_heads(self) -> bool:  # type: ignore[override]
        """Whether a head is an item of the knapsack."""
        return self.unit == "head"

    def plan(self, task: Task) -> Allocation:
        """The solver's choice; shares below the lattice join, one after the other, only where nothing on it fits."""
        measured = task.artefact(self.table)
        fixed = task.fixed if self.common_keep else None
        extra = self._extra(measured) if fixed is None else []
        tried = list(self.keeps)
        while True:
            try:
                return self._solve(task, measured, tried, fixed)
            except Infeasible:
                if not extra:
                    raise
                tried.append(extra.pop(0))
                log.info("lattice extended by keep = %s: nothing on it fits %d bytes", tried[-1], task.cost.total)

    def _extra(self, measured: Artefact) -> list[float]:
        """Shares that may join the lattice, the largest first."""
        known = {c.keep for c in decode(measured.tensors["configs"])}
        extends = self.extend_lattice and not self.keeps_all
        return [k for k in EXTRA_KEEPS if k < min(self.keeps) and k in known] if extends else []

    def _lattice(self, task: Task, measured: Artefact, keeps: Iterable[float]) -> list[Config]:
        """keeps x bits, as far as they are measured: a table of the model's output is dear, and holds only a part."""
        found = [
            Config(k, kb, vb) for k in sorted(set(keeps), reverse=True) for kb in task.bits[0] for vb in task.bits[1]
        ]
        known = {*decode(measured.tensors["configs"]), Config(1.0, 16, 16)}
        return found if measured.kind == "sensitivity" else [c for c in found if c in known]

    def _values(self, measured: Artefact, lattice: Sequence[Config]) -> Floats:
        """S of every item (layer, or head of a layer) and configuration."""
        return _per_head(measured, lattice) if self.divides_heads else table(measured, lattice)

    def _solve(self, task: Task, measured: Artefact, keeps: Sequence[float], fixed: int | None) -> Allocation:
        cost = task.cost
        if fixed is not None:  # S is measured at lattice values: take the nearest to the share that is really kept
            share = min(fixed / cost.reference, 1.0)
            keeps = [min(keeps, key=lambda k: abs(k - share))]
        lattice = self._lattice(task, measured, keeps)
        if not lattice:
            raise UserError(
                f"the {measured.kind} calibration {measured.key} measured none of method.allocator.keeps x bits"
            )
        caps = [fixed if fixed is not None else max(round(c.keep * cost.reference), cost.least) for c in lattice]
        heads, one = (cost.arch.kv_heads, cost.of_one_head) if self.divides_heads else (1, cost)
        values = self._values(measured, lattice)
        prices = [one.layer_cost(n, c.k_bits, c.v_bits) for n, c in zip(caps, lattice, strict=True)]
        prices_of_all = np.tile(np.array(prices, dtype=np.int64), (len(values), 1))
        groups = np.unique([c.keep for c in lattice], return_inverse=True)[1].astype(np.int64)
        fills = fixed is None and cost.cost == "resident"
        found = []
        if not self.common_keep:
            found.append(solve(values, prices_of_all, cost.total, self.solver))
        if self.common_keep or (fills and self.solver == "exact"):
            with contextlib.suppress(*([] if self.common_keep else [Infeasible])):
                found.append(solve_common(values, prices_of_all, cost.total, groups, self.solver))
        kept = [c.keep if fixed is None else min(fixed / cost.reference, 1.0) for c in lattice]
        plans = []
        for i, solution in enumerate(found):
            own = [LayerPlan(kept[c], caps[c], lattice[c].k_bits, lattice[c].v_bits) for c in solution.choice]
            if fills:
                wide = self._lattice(task, measured, {*keeps, *self._extra(measured)})
                curves = Curves(self._values(measured, wide), wide, cost.reference)
                own = fill(own, one, cost.total, curves, common=self.common_keep or i > 0)
                spent = sum(one.layer_cost(x.tokens or 0, x.k_bits, x.v_bits) for x in own)
                solution = replace(solution, objective=curves.total(own), cost=spent)
            plans.append((own, solution))
        own, solution = min(plans, key=lambda p: p[1].objective)
        if self.divides_heads:
            own = [summed(own[at : at + heads]) for at in range(0, len(own), heads)]
        return Allocation(own, solution)


class Curves:
    """S of every item (layer or head) as a function of the entries it keeps, at given bits.

    Linear between the shares that were measured. To keep more never does more harm: where a measured S rises with the
    share, the lower value of the smaller share holds, as a layer may always ignore entries.
    """

    def __init__(self, values: Floats, lattice: Sequence[Config], reference: int):
        self._of: dict[tuple[int, int], tuple[Floats, Floats]] = {}
        for bits in {(c.k_bits, c.v_bits) for c in lattice}:
            columns = sorted((c.keep, i) for i, c in enumerate(lattice) if (c.k_bits, c.v_bits) == bits)
            keeps = np.array([k for k, _ in columns]) * reference
            self._of[bits] = keeps, np.minimum.accumulate(values[:, [i for _, i in columns]], axis=1)

    def points(self, plan: LayerPlan) -> Floats:
        """Entries of the shares that were measured at the bits of a plan."""
        return self._of[plan.k_bits, plan.v_bits][0]

    def at(self, item: int, plan: LayerPlan, entries: float) -> float:
        """S of an item with this many entries at the bits of a plan."""
        points, values = self._of[plan.k_bits, plan.v_bits]
        return float(np.interp(entries, points, values[item]))

    def total(self, plans: Sequence[LayerPlan]) -> float:
        """Summed S."""
        return math.fsum(self.at(i, x, x.tokens or 0) for i, x in enumerate(plans))


def fill(plans: Sequence[LayerPlan], cost: CostModel, total: int, curves: Curves, *, common: bool) -> list[LayerPlan]:
    """Spend what a choice on the lattice leaves of a budget on entries between its shares, at the bits it chose.

    common: every item gets the same number of entries. Otherwise the item goes first whose S falls most per byte up to
    its next measured share. No item passes the largest share that was measured at its bits.
    """

    def price(plan: LayerPlan, entries: int) -> int:
        return cost.layer_cost(entries, plan.k_bits, plan.v_bits)

    def moved(plan: LayerPlan, entries: int) -> LayerPlan:
        return replace(plan, tokens=entries, keep=min(entries / cost.reference, 1.0))

    caps = [x.tokens or 1 for x in plans]
    ends = [round(float(curves.points(x).max())) for x in plans]
    if common:
        kinds = Counter((x.k_bits, x.v_bits) for x in plans)

        def fits(entries: int) -> bool:
            return sum(count * cost.layer_cost(entries, *bits) for bits, count in kinds.items()) <= total

        most = largest_that_fits(caps[0], max(min(ends), caps[0]), fits)
        return [moved(x, most) for x in plans]
    room = total - sum(price(x, n) for x, n in zip(plans, caps, strict=True))
    queue: list[tuple[float, int, int]] = []  # (change of S per byte, item, entries to go to)

    def enqueue(item: int) -> None:
        plan, n = plans[item], caps[item]
        later = [p for p in curves.points(plan).round().astype(int).tolist() if p > n]
        if later:
            gain = curves.at(item, plan, n) - curves.at(item, plan, later[0])
            heapq.heappush(queue, (-gain / max(price(plan, later[0]) - price(plan, n), 1), item, later[0]))

    for item in range(len(plans)):
        enqueue(item)
    while queue:
        _, item, goal = heapq.heappop(queue)
        plan, before = plans[item], price(plans[item], caps[item])

        def affordable(entries: int, plan: LayerPlan = plan, before: int = before, room: int = room) -> bool:
            return price(plan, entries) - before <= room

        caps[item], reached = largest_that_fits(caps[item], goal, affordable), goal
        room -= price(plan, caps[item]) - before
        if caps[item] == reached:
            enqueue(item)
    return [moved(x, n) if n != x.tokens else x for x, n in zip(plans, caps, strict=True)]


def _per_head(measured: Artefact, lattice: Sequence[Config]) -> Floats:
    """Damage (L * H, len(lattice)) of every head alone; to keep all of a head as it is does none."""
    if "heads" not in measured.tensors:
        raise UserError(
            f"the damage calibration {measured.key} was measured for whole layers, and method.allocator.unit=head "
            "divides heads: calibrate again"
        )
    at = {c: i for i, c in enumerate(decode(measured.tensors["configs"]))}
    values = measured.tensors["heads"].double().numpy()
    at.setdefault(Config(1.0, 16, 16), values.shape[2])
    values = np.concatenate([values, np.zeros_like(values[..., :1])], axis=2)
    return np.asarray(values[..., [at[c] for c in lattice]].reshape(-1, len(lattice)), dtype=np.float64)


def summed(heads: Sequence[LayerPlan]) -> LayerPlan:
    """A layer's plan of its heads' plans: mean share and entries, the most bits of any head."""
    tokens = [x.tokens for x in heads if x.tokens is not None]
    return LayerPlan(
        sum(x.keep for x in heads) / len(heads),
        round(sum(tokens) / len(heads)) if len(tokens) == len(heads) else None,
        max(x.k_bits for x in heads),
        max(x.v_bits for x in heads),
        heads=tuple(heads),
    )


ALLOCATOR = Joint
