"""Every entry of every layer, at the bits of the method."""

from __future__ import annotations

from dataclasses import dataclass

from moend.allocation.base import Allocation, Allocator, Task
from moend.allocation.uniform import uniform


@dataclass(frozen=True)
class All(Allocator):
    """Nothing is evicted: only the bits say what a cache costs."""

    keeps_all = True

    def plan(self, task: Task) -> Allocation:
        """The same LayerPlan for every layer; Infeasible where all entries do not fit."""
        return Allocation(uniform(task.cost, task.fixed_bits, task.cost.reference))


ALLOCATOR = All
