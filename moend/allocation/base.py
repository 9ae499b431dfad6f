"""What an allocator is asked for, and what it answers.

An allocator's module assigns its class to ALLOCATOR: a frozen dataclass of its settings that inherits `Allocator`. It
may also lie outside this package (entry point group "moend.allocators", or a dotted path).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moend.allocation.cost import CostModel
from moend.allocation.solver import Solution
from moend.calibration.artefact import Artefact
from moend.errors import UserError
from moend.plan import LayerPlan

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Task:
    """A budget to divide among the layers of a model."""

    cost: CostModel  # what a layer with a given cap costs, and how many bytes all layers may cost together
    bits: tuple[Sequence[int], Sequence[int]]  # bits that K and V may have; one each where the precision is fixed
    protected: int  # entries per KV head that selection keeps whatever their scores: sinks and the recent window
    fixed: int | None  # entries per KV head that the budget protocol gives every layer; None: as many as fit
    artefact: Callable[[str], Artefact]  # the calibration of a kind; Blocked where there is none

    @property
    def fixed_bits(self) -> tuple[int, int]:
        """K and V bits of every layer, where the precision is fixed."""
        (k_bits,), (v_bits,) = self.bits
        return k_bits, v_bits


@dataclass(frozen=True)
class Allocation:
    """What every layer gets."""

    layers: list[LayerPlan]  # from the first layer to the last
    solution: Solution | None = None  # how the layers were chosen, where a solver chose them


@dataclass(frozen=True)
class Division:
    """Entries of a sample to divide among KV heads, by the sample's own scores."""

    scores: list[Tensor]  # (H, n) per layer, -inf where there is nothing to keep
    entries: list[int]  # per layer: entries per head of the plan, at most n
    rooms: list[int]  # per layer: bytes of those entries
    total: int  # bytes for all layers together
    price: Callable[[int, Ints], int]  # (layer, entries (H,) of its heads) -> bytes
    least: int = 1  # entries that every head gets


class Allocator:
    """Divides a budget among layers. A subclass overrides `plan` and those of the attributes that differ for it."""

    keeps_all: bool = False  # whether every token stays, so that there is nothing for a scorer to rank
    calibration: str | None = None  # the kind of calibration it reads
    chooses_bits: bool = False  # whether it can choose bits per layer (`precision: joint`)
    chooses_shares: bool = False  # whether it chooses each layer's share of entries from a lattice
    divides_heads: bool = False  # whether the KV heads of a layer may hold different numbers of entries
    compares_layers: bool = False  # whether it compares scores of different layers
    averages: bool = False  # whether its plan is only an average over samples, whose scores decide
    cost: str = "resident"  # what the budget counts: bytes held, or eq. (1)
    t_ref: int | str = "auto"  # tokens that keep ratios refer to

    @property
    def name(self) -> str:
        """Its name in configurations and messages: that of its file."""
        return type(self).__module__.rpartition(".")[2]

    def plan(self, task: Task) -> Allocation:
        """A LayerPlan for every layer whose summed costs stay within the budget; the same answer every time.

        Raises Infeasible, with the smallest budget that suffices, where nothing fits.
        """
        raise NotImplementedError

    def divide(self, division: Division) -> list[list[int]] | None:
        """How many entries every KV head of every layer keeps of one sample; None: the plan's number, all alike.

        The bytes of all heads together stay within `division.total`. Every head keeps at least `division.least`.
        """
        return None


def largest_that_fits(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest whole number in [low, high] that fits, where all below one that fits do, or nearly; else `low`."""
    if fits(high):
        return high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def choices(name: str, value: object, allowed: Sequence[str]) -> None:
    """UserError where a setting of an allocator is none of its choices."""
    from moend.errors import unknown

    if value not in allowed:
        raise unknown(name, str(value), allowed)


def at_least(name: str, value: object, low: float) -> None:
    """UserError where a setting of an allocator is not a number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= low:
        raise UserError(f"{name} must be a number >= {low:g}, got {value!r}")
