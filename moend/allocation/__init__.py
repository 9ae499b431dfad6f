"""Allocators: how many entries, and at how many bits, each layer gets under a budget. One file each, found by its name.

Only `Allocator` (base.py) is known to the rest of the library. What several allocators share lies in shares.py (real
shares to whole numbers), cost.py (bytes) and solver.py (the knapsack).
"""

from __future__ import annotations

from typing import Any, cast

from moend import registry
from moend.allocation.base import Allocation, Allocator, Division, Task
from moend.allocation.cost import CostModel

__all__ = ["Allocation", "Allocator", "CostModel", "Division", "Task", "allocator", "names"]

GROUP = "moend.allocators"


def names() -> tuple[str, ...]:
    """Names of the allocators that are found."""
    return registry.names(__name__, GROUP, "ALLOCATOR")


def allocator(name: str, **settings: Any) -> Allocator:
    """The allocator of that name with these settings; an unknown name, setting or choice is a UserError."""
    kind = registry.find(__name__, "ALLOCATOR", name, GROUP)
    return cast(Allocator, registry.build(kind, f"allocator {name}", settings))
