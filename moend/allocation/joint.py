"""MoE-nD: every layer its own (kept entries, K bits, V bits), chosen from a lattice under one budget (section 4)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from moend.allocation.cost import CostModel
from moend.allocation.solver import Solution, solve, solve_common
from moend.calibration.artefact import Artefact
from moend.calibration.sensitivity import EXTRA_KEEPS, Config, decode, table
from moend.errors import Infeasible
from moend.plan import LayerPlan

log = logging.getLogger(__name__)


def routed(
    demand: CostModel,
    sensitivity: Artefact,
    *,
    keeps: Sequence[float],
    bits: tuple[Sequence[int], Sequence[int]],
    solver: str,
    common: bool,
    tokens: int | None,
    extend: bool,
) -> tuple[list[LayerPlan], Solution]:
    """Layer plans of least summed S (a `sensitivity`, `kl` or `damage` table) under demand.total, and how found.

    keeps x bits (K choices, V choices) is the lattice. common: one keep value for all layers (`2d`), the best that
    fits. tokens: a fixed number of entries in every layer, bits routed (2d under the paper's protocol). extend: smaller
    keep values join, one after the other, only where the lattice has nothing that fits.
    """
    measured = {c.keep for c in decode(sensitivity.tensors["configs"])}
    extra = [k for k in EXTRA_KEEPS if k < min(keeps) and k in measured] if extend and tokens is None else []
    tried = list(keeps)
    while True:
        try:
            return _solve(demand, sensitivity, tried, bits, solver, common, tokens)
        except Infeasible:
            if not extra:
                raise
            tried.append(extra.pop(0))
            log.info("lattice extended by keep = %s: nothing on it fits %d bytes", tried[-1], demand.total)


def _solve(
    demand: CostModel,
    sensitivity: Artefact,
    keeps: Sequence[float],
    bits: tuple[Sequence[int], Sequence[int]],
    solver: str,
    common: bool,
    tokens: int | None,
) -> tuple[list[LayerPlan], Solution]:
    if tokens is not None:  # S is measured at lattice values: take the nearest to the share that is really kept
        share = min(tokens / demand.reference, 1.0)
        keeps = [min(keeps, key=lambda k: abs(k - share))]
    configs = [Config(k, kb, vb) for k in sorted(set(keeps), reverse=True) for kb in bits[0] for vb in bits[1]]
    if sensitivity.kind != "sensitivity":  # measured at the model's output, a table is dear: a part of the lattice
        measured = {*decode(sensitivity.tensors["configs"]), Config(1.0, 16, 16)}
        configs = [c for c in configs if c in measured]
    caps = [tokens if tokens is not None else max(round(c.keep * demand.reference), demand.least) for c in configs]
    one = [demand.layer_cost(n, c.k_bits, c.v_bits) for n, c in zip(caps, configs, strict=True)]
    cost = np.tile(np.array(one, dtype=np.int64), (demand.arch.layers, 1))
    values = table(sensitivity, configs)
    if common:
        groups = np.unique([c.keep for c in configs], return_inverse=True)[1].astype(np.int64)
        solution = solve_common(values, cost, demand.total, groups, solver)
    else:
        solution = solve(values, cost, demand.total, solver)
    layers = [
        LayerPlan(
            configs[i].keep if tokens is None else min(tokens / demand.reference, 1.0),
            caps[i],
            configs[i].k_bits,
            configs[i].v_bits,
        )
        for i in solution.choice
    ]
    return layers, solution
