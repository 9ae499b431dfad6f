"""As `routed`, where each KV head of each layer has its own number of entries and its own bits.

To the solver a head is what a layer is to `routed`: one item of the knapsack, of a layer with a single head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moend.allocation.cost import CostModel
from moend.allocation.solver import Solution, solve
from moend.calibration.artefact import Artefact
from moend.calibration.sensitivity import Config, decode
from moend.errors import UserError
from moend.plan import LayerPlan


def headed(
    demand: CostModel,
    damage: Artefact,
    *,
    keeps: Sequence[float],
    bits: tuple[Sequence[int], Sequence[int]],
    solver: str,
) -> tuple[list[LayerPlan], Solution]:
    """Layer plans, with a plan for every head, of least summed damage under demand.total, and how found.

    damage: measured per head, `heads` (L, H, C) over `configs`. keeps x bits (K choices, V choices), as far as they
    were measured, are what a head chooses from; to keep all of it as it is does no damage. Raises Infeasible where
    nothing fits.
    """
    if "heads" not in damage.tensors:
        raise UserError(
            f"the damage calibration {damage.key} was measured for whole layers, the method routes heads:"
            " calibrate again"
        )
    measured = {c: i for i, c in enumerate(decode(damage.tensors["configs"]))}
    table = damage.tensors["heads"].double().numpy()
    measured.setdefault(Config(1.0, 16, 16), table.shape[2])
    table = np.concatenate([table, np.zeros_like(table[..., :1])], axis=2)
    wanted = (Config(k, kb, vb) for k in sorted(set(keeps), reverse=True) for kb in bits[0] for vb in bits[1])
    configs = [c for c in wanted if c in measured]
    if not configs:
        raise UserError(f"the damage calibration {damage.key} measured none of method.keeps x method.bits")
    caps = [max(round(c.keep * demand.reference), demand.least) for c in configs]
    one = replace(demand, arch=replace(demand.arch, kv_heads=1))
    cost = [one.layer_cost(n, c.k_bits, c.v_bits) for n, c in zip(caps, configs, strict=True)]
    layers, heads, _ = table.shape
    values = table[..., [measured[c] for c in configs]].reshape(layers * heads, -1)
    solution = solve(values, np.tile(np.array(cost, dtype=np.int64), (len(values), 1)), demand.total, solver)
    own = [LayerPlan(configs[i].keep, caps[i], configs[i].k_bits, configs[i].v_bits) for i in solution.choice]
    return [summed(own[at : at + heads]) for at in range(0, len(own), heads)], solution


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
