"""Layers of unequal size at fixed bits: real-valued shares become whole numbers of entries with an exact sum."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from moend.allocation.base import Task
from moend.allocation.uniform import largest
from moend.plan import LayerPlan

Floats = npt.NDArray[np.float64]
# (entries of all layers together, fewest and most entries of one) -> entries of each, of that sum
Shape = Callable[[int, int, int], list[int]]


def shaped(task: Task, shape: Shape) -> list[LayerPlan]:
    """As many entries as fit, about those of `uniform`, divided by `shape`; Infeasible where `uniform` is.

    No layer gets fewer than its protected entries (or, where a budget does not reach them, the uniform number), and
    none more than a layer can use. Where an entry's price depends on how many there are (groups, windows), the sum
    gives way or grows until the bytes fit.
    """
    cost, top, layers = task.cost, task.cost.top, task.cost.arch.layers
    bits = task.fixed_bits
    n = min(largest(cost, *bits), top)
    low = min(task.protected, n)

    def caps(total: int) -> list[int]:
        return [max(c, cost.least) for c in shape(total, min(low, total // layers), top)]

    def fits(total: int) -> bool:
        return sum(cost.layer_cost(c, *bits) for c in caps(total)) <= cost.total

    least, most = layers * cost.least, layers * top
    total = layers * n
    while total > least and not fits(total):  # an entry's price depends on how many there are: groups, windows
        total = max(total - layers, least)
    if total < layers * n:
        while fits(total + 1):
            total += 1
    while bits != (16, 16) and total < most and fits(min(total + layers, most)):
        total = min(total + layers, most)
    return [LayerPlan(min(c / cost.reference, 1.0), c, *bits) for c in caps(total)]


def within(weights: Floats, total: float, low: int, high: int) -> Floats:
    """(L,) x = clip(c * weights, low, high) with the c that makes sum x = total: in proportion, but for the bounds.

    weights > 0; low * L <= total <= high * L.
    """
    if not low * len(weights) <= total <= high * len(weights):
        raise ValueError(f"{len(weights)} layers of {low} to {high} entries cannot hold {total}")
    # The sum grows with c and bends only where a layer meets a bound: find the piece that total lies on.
    bends = np.sort(np.concatenate([low / weights, high / weights]))
    sums = np.clip(bends[:, None] * weights, low, high).sum(1)
    at = int(np.searchsorted(sums, total))
    if at == 0:
        return np.full(len(weights), float(low))
    if at == len(bends):
        return np.full(len(weights), float(high))
    below, above = bends[at - 1], bends[at]
    rise = sums[at] - sums[at - 1]
    c = above if rise <= 0 else below + (above - below) * (total - sums[at - 1]) / rise
    return np.asarray(np.clip(c * weights, low, high), dtype=np.float64)


def whole(shares: Floats, total: int, rank: Floats) -> list[int]:
    """Shares (L,), of sum `total` but for rounding errors, as whole numbers of exactly that sum: largest remainder.

    Equal remainders are rounded up in falling order of `rank` (L,), then of depth.
    """
    exact = np.round(shares, 9)
    out = np.floor(exact).astype(np.int64)
    order = np.lexsort((np.arange(len(out)), -rank, -(exact - out)))
    out[order[: total - int(out.sum())]] += 1
    return [int(x) for x in out]
