"""AdaKV: a layer's entries go to the heads that need them (Ada-KV, arXiv 2407.11550, algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moend.allocation.base import Division, largest_that_fits
from moend.allocation.uniform import Uniform
from moend.errors import UserError

FLOOR = 0.2  # the paper's: a fifth of the average budget is every head's


@dataclass(frozen=True)
class Adaptive(Uniform):
    """Every layer the same number of entries (`uniform`), divided among its heads by each sample's scores (AdaKV)."""

    floor: float = FLOOR  # share of a layer's average that every head gets whatever its scores

    divides_heads = True

    def __post_init__(self) -> None:
        if isinstance(self.floor, bool) or not isinstance(self.floor, int | float) or not 0 <= self.floor <= 1:
            raise UserError(f"method.allocator.floor must be a share in [0, 1], got {self.floor!r}")

    def divide(self, division: Division) -> list[list[int]]:
        """See `adaptive`."""
        found = []
        for layer, scores in enumerate(division.scores):

            def fits(keep: int, layer: int = layer, scores: Tensor = scores) -> bool:
                counts = np.array(adaptive(scores, keep, self.floor, division.least))
                return division.price(layer, counts) <= division.rooms[layer]

            # below 16 bit a head's price has steps
            keep = largest_that_fits(division.least, division.entries[layer], fits)
            found.append(adaptive(scores, keep, self.floor, division.least))
        return found


def adaptive(scores: Tensor, keep: int, floor: float = FLOOR, least: int = 1) -> list[int]:
    """How many entries each head keeps, of sum H * keep: (1 - floor) * count_h + floor * keep.

    scores (H, n), -inf where there is nothing to keep; keep <= n: entries per head on average. count_h is how many of
    the layer's H * keep best scores are head h's; ties go to the lower head and position. The paper rounds each head
    by itself, which can pass the sum; here the largest remainders are rounded up. Every head keeps at least `least`,
    which is at most keep.
    """
    heads, n = scores.shape
    if torch.isnan(scores).any():
        raise ValueError("scores contain NaN")
    if not 1 <= keep <= n:
        raise ValueError(f"cannot keep {keep} of {n} entries")
    if not 0 <= floor <= 1:
        raise UserError(f"the adaptive allocator's floor is a share in [0, 1], got {floor}")
    best = scores.float().flatten().argsort(descending=True, stable=True)[: heads * keep]
    count = torch.bincount(best // n, minlength=heads).double()
    exact = ((1 - floor) * count + floor * keep).clamp(min=float(least))
    exact = least + (exact - least) * (heads * (keep - least) / max(float((exact - least).sum()), 1e-300))
    whole = (exact + 1e-9).floor()
    rest = heads * keep - int(whole.sum())
    whole[(whole - exact).argsort(stable=True)[:rest]] += 1
    return [int(x) for x in whole]


ALLOCATOR = Adaptive
