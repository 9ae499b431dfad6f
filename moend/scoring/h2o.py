"""H2O: the heavy hitters, entries that received the most attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moend.scoring.base import LayerView


@dataclass(frozen=True)
class H2O:
    """An entry's score is the attention it received from all queries so far, prompt and output (H2O, section 4).

    Summed over the query heads of a group. The recent half of a budget is selection's business (`recent: 0.5`).
    average: not the sum, which favours old entries, but the mean over the queries that could see the entry, itself
    included (what others call observed attention).
    """

    average: bool = False

    name = "h2o"
    per_head = True
    last_queries = 0
    observes = ("accumulated",)
    at_decode = True
    statistics = None

    def __call__(self, view: LayerView) -> Tensor:
        """(B, H, n) float32, -inf at padding."""
        if "accumulated" not in view.observed:
            raise ValueError("scorer h2o needs the attention that entries received")
        accumulated = view.observed["accumulated"].float()
        if self.average:
            positions = view.positions[:, None] if view.positions.dim() == 2 else view.positions
            accumulated = accumulated / (view.now[:, None, None] - positions).clamp(min=1)
        return torch.where(view.valid, accumulated, -torch.inf)


SCORER = H2O
