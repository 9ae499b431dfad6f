"""StreamingLLM: the most recent entries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moend.scoring.base import LayerView


@dataclass(frozen=True)
class Streaming:
    """An entry's score is its position (StreamingLLM, section 3.2); selection protects the sinks.

    Exact up to position 2^24, where float32 ends to tell neighbours apart.
    """

    name = "streaming"
    per_head = False
    last_queries = 0
    observes = ()
    at_decode = True
    statistics = None

    def __call__(self, view: LayerView) -> Tensor:
        """(B, 1, n) float32, -inf at padding ((B, H, n) where positions come per head)."""
        positions = view.positions[:, None] if view.positions.dim() == 2 else view.positions
        return torch.where(positions >= 0, positions.float(), -torch.inf)


SCORER = Streaming
