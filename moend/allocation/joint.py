"""MoE-nD: every layer, or KV head, its own (kept entries, K bits, V bits), chosen from a lattice under one budget.

MoE-nD section 4. `unit: head` is ours: to the solver a head is what a layer is, one item of the knapsack.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from moend.allocation.base import Allocation, Allocator, Task, choices
from moend.allocation.cost import CostModel
from moend.allocation.solver import SOLVERS, Solution, solve, solve_common
from moend.budget import BITS
from moend.calibration.artefact import Artefact
from moend.calibration.sensitivity import EXTRA_KEEPS, Config, decode, table
from moend.errors import Infeasible, UserError
from moend.plan import LayerPlan

log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Joint(Allocator):
    """The choice of least summed S that fits the budget, S read from a table that a calibration measured.

    keeps x bits is the lattice of choices. Precision that is not `joint` leaves one choice of bits.
    """

    unit: Literal["layer", "head"] = "layer"  # what gets its own choice: a layer, or each KV head (table: damage)
    table: Literal["sensitivity", "kl", "damage"] = "sensitivity"  # S: L2 of the layer's output, or KL of the model's
    solver: Literal["exact", "greedy", "greedy_paper"] = "exact"
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
        known = {c.keep for c in decode(measured.tensors["configs"])}
        extends = self.extend_lattice and fixed is None and not self.keeps_all
        extra = [k for k in EXTRA_KEEPS if k < min(self.keeps) and k in known] if extends else []
        tried = list(self.keeps)
        while True:
            try:
                return self._solve(task, measured, tried, fixed)
            except Infeasible:
                if not extra:
                    raise
                tried.append(extra.pop(0))
                log.info("lattice extended by keep = %s: nothing on it fits %d bytes", tried[-1], task.cost.total)

    def _solve(self, task: Task, measured: Artefact, keeps: Sequence[float], fixed: int | None) -> Allocation:
        cost = task.cost
        if fixed is not None:  # S is measured at lattice values: take the nearest to the share that is really kept
            share = min(fixed / cost.reference, 1.0)
            keeps = [min(keeps, key=lambda k: abs(k - share))]
        lattice = [
            Config(k, kb, vb) for k in sorted(set(keeps), reverse=True) for kb in task.bits[0] for vb in task.bits[1]
        ]
        if measured.kind != "sensitivity":  # a table of the model's output is dear: only a part of the lattice is in it
            known = {*decode(measured.tensors["configs"]), Config(1.0, 16, 16)}
            lattice = [c for c in lattice if c in known]
        if not lattice:
            raise UserError(
                f"the {measured.kind} calibration {measured.key} measured none of method.allocator.keeps x bits"
            )
        caps = [fixed if fixed is not None else max(round(c.keep * cost.reference), cost.least) for c in lattice]
        if self.divides_heads:
            values, heads, one = _per_head(measured, lattice), cost.arch.kv_heads, cost.of_one_head
        else:
            values, heads, one = table(measured, lattice), 1, cost
        prices = [one.layer_cost(n, c.k_bits, c.v_bits) for n, c in zip(caps, lattice, strict=True)]
        solution = self._choose(values, np.tile(np.array(prices, dtype=np.int64), (len(values), 1)), lattice, cost)
        kept = [c.keep if fixed is None else min(fixed / cost.reference, 1.0) for c in lattice]
        own = [LayerPlan(kept[i], caps[i], lattice[i].k_bits, lattice[i].v_bits) for i in solution.choice]
        if self.divides_heads:
            own = [summed(own[at : at + heads]) for at in range(0, len(own), heads)]
        return Allocation(own, solution)

    def _choose(
        self, values: Floats, prices: npt.NDArray[np.int64], lattice: Sequence[Config], cost: CostModel
    ) -> Solution:
        if not self.common_keep:
            return solve(values, prices, cost.total, self.solver)
        groups = np.unique([c.keep for c in lattice], return_inverse=True)[1].astype(np.int64)
        return solve_common(values, prices, cost.total, groups, self.solver)


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
