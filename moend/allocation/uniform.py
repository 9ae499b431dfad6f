"""The same number of entries and the same bits in every layer."""

from __future__ import annotations

from dataclasses import dataclass

from moend.allocation.base import Allocation, Allocator, Task
from moend.allocation.cost import CostModel
from moend.errors import Infeasible
from moend.plan import LayerPlan


@dataclass(frozen=True)
class Uniform(Allocator):
    """Every layer the largest number of entries that fits, or the number that the budget protocol fixes."""

    def plan(self, task: Task) -> Allocation:
        """The same LayerPlan for every layer."""
        return Allocation(uniform(task.cost, task.fixed_bits, task.fixed))


def uniform(demand: CostModel, bits: tuple[int, int], tokens: int | None = None) -> list[LayerPlan]:
    """`tokens` entries in every layer (Infeasible where they do not fit), or (None) the largest number that fits."""
    k_bits, v_bits = bits
    n = largest(demand, k_bits, v_bits) if tokens is None else tokens
    needed = demand.arch.layers * demand.layer_cost(n, k_bits, v_bits)
    if needed > demand.total:
        raise Infeasible(f"{n} entries per head at {k_bits}/{v_bits} bit do not fit", f"{needed}B")
    keep = min(n / demand.reference, 1.0)
    return [LayerPlan(keep, n, k_bits, v_bits)] * demand.arch.layers


def largest(demand: CostModel, k_bits: int, v_bits: int) -> int:
    """The largest common cap that fits, at most what a layer can use; Infeasible where not even one entry does."""
    layers, heads, dim = demand.arch.layers, demand.arch.kv_heads, demand.arch.head_dim
    # No cap costs less than its codes, and giving up one entry frees at most a 16-bit entry, its position, its
    # accumulated attention and the scales of a group:
    # so both the start and the steps below are safe, and the first cap that fits is the largest.
    codes = heads * dim * (k_bits + v_bits) // 8
    freed = heads * (8 * dim + 8 * dim + 8)
    least = demand.least
    if layers * demand.layer_cost(demand.top, k_bits, v_bits) <= demand.total:  # may be cheaper: no positions
        return demand.top
    n = max(min(demand.top, demand.total // (layers * codes)), least)
    while True:
        over = layers * demand.layer_cost(n, k_bits, v_bits) - demand.total
        if over <= 0:
            return n
        if n == least:
            what = "one entry per head fits" if least == 1 else f"{least} entries per head fit"
            raise Infeasible(f"not even {what}", f"{over + demand.total}B")
        # Groups and window change at 256 entries, positions and growth at the reference: one entry may free more there.
        step = 1 if n in (256, demand.top) else max(-(-over // (layers * freed)), 1)
        n = max(n - step, 256 if n > 256 else least)


ALLOCATOR = Uniform
