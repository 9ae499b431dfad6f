"""TOVA: what the newest query attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moend.scoring.base import LayerView, grouped_attention


@dataclass(frozen=True)
class TOVA:
    """Attention of the last query, averaged over all heads of the layer (TOVA, arXiv 2401.06104, section 3.2).

    One score per token: all heads of a layer drop the same one. Nothing is protected, the newest entry included.
    """

    name = "tova"
    per_head = False
    last_queries = 1
    observes = ()
    at_decode = True
    statistics = None

    def __call__(self, view: LayerView) -> Tensor:
        """(B, 1, n) float32 in [0, 1], -inf at padding. Where positions come per head: (B, H, n), those of a group."""
        attention, _ = grouped_attention(view, self.last_queries)  # (B, H, G, 1, n)
        if view.positions.dim() == 2:
            attention = attention.mean(1, keepdim=True)
        return torch.where(view.valid, attention.mean(2)[:, :, 0], -torch.inf)


SCORER = TOVA
