"""Random: the floor that every scorer must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moend.scoring.base import LayerView, Scorer

_GOLDEN, _MUL1, _MUL2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(x: int) -> int:
    """An unsigned 64-bit number as the int64 with the same bits."""
    x &= 2**64 - 1
    return x - 2**64 if x >= 2**63 else x


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014) on int64, whose products wrap as unsigned ones do."""
    for shift, factor in ((30, _MUL1), (27, _MUL2)):
        x = (x ^ (x >> shift & 2 ** (64 - shift) - 1)) * _signed(factor)
    return x ^ (x >> 31 & 2**33 - 1)


@dataclass(frozen=True)
class Random(Scorer):
    """A uniform score that is a hash of (seed, layer, KV head, position).

    It depends on nothing else, so the order and company of samples do not matter, and an entry that is scored again
    while decoding gets the same score.
    """

    def __call__(self, view: LayerView) -> Tensor:
        """(H, n) float32 in [0, 1)."""
        device = view.keys.device
        heads = torch.arange(view.head, view.head + len(view.keys), device=device)[:, None]
        state = _mix(torch.tensor(_signed(view.seed + _GOLDEN), device=device))
        for part in (torch.tensor(view.layer, device=device), heads, view.at):
            state = _mix(state + (part + 1) * _signed(_GOLDEN))
        return (state >> 40 & 2**24 - 1).float() * 2.0**-24


SCORER = Random
