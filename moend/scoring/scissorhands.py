"""Scissorhands: entries that the last queries do not keep finding unimportant."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moend.errors import UserError
from moend.scoring.base import LayerView, grouped_attention


@dataclass(frozen=True)
class Scissorhands:
    """In how many of the last `window` queries an entry's attention was not below 1/t (arXiv 2305.17118, algorithm 2).

    t is how many entries that query saw; queries before an entry did not find it unimportant. Summed over the query
    heads of a group. The paper counts what is below and drops the most: the same order. Ties go to the newer entry.

    Memory is window x n per query head. While decoding, attention is that over the entries still held.
    """

    window: int = 16

    name = "scissorhands"
    per_head = True
    observes = ()
    at_decode = True
    statistics = None

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UserError(f"scorer scissorhands needs window >= 1, got {self.window}")

    @property
    def last_queries(self) -> int:
        """The window."""
        return self.window

    def __call__(self, view: LayerView) -> Tensor:
        """(B, H, n) float32, -inf at padding."""
        attention, counted = grouped_attention(view, self.window)
        assert view.query_positions is not None
        at = view.query_positions[:, None, -self.window :, None]  # (B, 1, w, 1)
        positions = view.positions[:, None] if view.positions.dim() == 2 else view.positions
        seen = (positions[:, :, None] <= at) & view.valid[:, :, None] & counted[:, None, :, None]  # (B, 1 or H, w, n)
        average = 1.0 / seen.sum(-1, keepdim=True).clamp(min=1)
        below = (attention < average[:, :, None]) & seen[:, :, None]
        total = attention.shape[2] * counted.sum(-1)[:, None, None]
        score = (total - below.sum((2, 3))).float()
        newer = (positions + 1).float() / (view.now[:, None, None] + 1).float()  # in (0, 1): breaks ties only
        return torch.where(view.valid, score + newer, -torch.inf)


SCORER = Scissorhands
