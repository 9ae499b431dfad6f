"""Random: the floor that every scorer must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moend.scoring.base import LayerView

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
class Random:
    """A uniform score in [0, 1) that is a hash of (seed, layer, head, original position).

    It depends on nothing else, so the order and company of samples do not matter, and an entry scored again at decode
    gets the same score.
    """

    name = "random"
    per_head = True
    last_queries = 0
    observes = ()
    at_decode = True
    statistics = None

    def __call__(self, view: LayerView) -> Tensor:
        """(B, H, n) float32, -inf at padding."""
        heads, device = view.keys.shape[1], view.keys.device
        positions = view.positions[:, None] if view.positions.dim() == 2 else view.positions
        state = _mix(torch.tensor(_signed(view.seed + _GOLDEN), device=device))
        for part in (torch.tensor(view.layer, device=device), torch.arange(heads, device=device)[:, None], positions):
            state = _mix(state + (part + 1) * _signed(_GOLDEN))
        score = (state >> 40 & 2**24 - 1).float() * 2.0**-24
        return torch.where(positions >= 0, score, -torch.inf)


SCORER = Random
