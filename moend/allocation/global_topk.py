"""One threshold over the scores of all layers and heads: every head keeps as many entries as score above it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moend.allocation.base import Division
from moend.allocation.uniform import Uniform


@dataclass(frozen=True)
class GlobalTopK(Uniform):
    """The best scores of all layers and heads together, at least one entry for every head (KVZip, official)."""

    divides_heads = True
    compares_layers = True
    averages = True

    def divide(self, division: Division) -> list[list[int]]:
        """See `head_tokens`."""
        one = division.price(0, np.array([1]))
        return head_tokens(division.scores, division.total // one, 1)


def head_tokens(scores: list[Tensor], entries: int, floor: int) -> list[list[int]]:
    """How many entries each head of each layer keeps under one threshold over them all (KVZip, official).

    scores: per layer (H, n), -inf where there is nothing to keep. The `entries` highest of all layers and heads
    together are kept, but every head keeps its `floor` best first, so that none is empty. The sum is exactly
    min(entries, all there are); ties go to the lower layer, head and position. ValueError where the floors alone
    exceed `entries`.
    """
    flat = torch.cat([s.float() for s in scores])  # (L * H, n)
    if torch.isnan(flat).any():
        raise ValueError("scores contain NaN")
    rows, n = flat.shape
    floor = min(floor, n)
    if entries < rows * floor:
        raise ValueError(f"{entries} entries cannot give {rows} heads {floor} each")
    first = flat.argsort(dim=-1, descending=True, stable=True)[:, :floor]
    flat = flat.scatter(1, first, torch.inf)
    kept = flat.flatten().argsort(descending=True, stable=True)[: min(entries, rows * n)]
    counts = torch.bincount(kept // n, minlength=rows)
    sizes = [s.shape[0] for s in scores]
    return [part.tolist() for part in counts.split(sizes)]


ALLOCATOR = GlobalTopK
