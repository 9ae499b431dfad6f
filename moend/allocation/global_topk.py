"""One threshold over the scores of all layers and heads: every head keeps as many entries as score above it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moend.allocation.base import Division, largest_that_fits
from moend.allocation.uniform import Uniform


@dataclass(frozen=True)
class GlobalTopK(Uniform):
    """The best scores of all layers and heads together, at least one entry for every head (KVZip, official)."""

    divides_heads = True
    compares_layers = True
    averages = True

    def divide(self, division: Division) -> list[list[int]]:
        """See `head_tokens`."""
        sizes = [len(s) for s in division.scores]
        rows = ranked(division.scores, division.least)  # sorted once: every number of entries is a prefix

        def counts(entries: int) -> list[Tensor]:
            return list(torch.bincount(rows[:entries], minlength=sum(sizes)).split(sizes))

        def fits(entries: int) -> bool:
            held = enumerate(counts(entries))
            return sum(division.price(i, c.numpy(force=True)) for i, c in held) <= division.total

        return [c.tolist() for c in counts(largest_that_fits(sum(sizes) * division.least, len(rows), fits))]


def head_tokens(scores: list[Tensor], entries: int, floor: int) -> list[list[int]]:
    """How many entries each head of each layer keeps under one threshold over them all (KVZip, official).

    scores: per layer (H, n), -inf where there is nothing to keep. The `entries` highest of all layers and heads
    together are kept, but every head keeps its `floor` best first, so that none is empty. The sum is exactly
    min(entries, all there are); ties go to the lower layer, head and position. ValueError where the floors alone
    exceed `entries`.
    """
    sizes = [s.shape[0] for s in scores]
    rows = ranked(scores, floor)
    if entries < sum(sizes) * min(floor, scores[0].shape[1]):
        raise ValueError(f"{entries} entries cannot give {sum(sizes)} heads {floor} each")
    return [part.tolist() for part in torch.bincount(rows[:entries], minlength=sum(sizes)).split(sizes)]


def ranked(scores: list[Tensor], floor: int) -> Tensor:
    """The head of every entry, counted over all layers: best first, the `floor` best of each head before all."""
    flat = torch.cat([s.float() for s in scores])  # (L * H, n)
    if torch.isnan(flat).any():
        raise ValueError("scores contain NaN")
    n = flat.shape[1]
    first = flat.argsort(dim=-1, descending=True, stable=True)[:, : min(floor, n)]
    flat = flat.scatter(1, first, torch.inf)
    return flat.flatten().argsort(descending=True, stable=True) // n


ALLOCATOR = GlobalTopK
