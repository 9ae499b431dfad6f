"""Scissorhands: entries that the last queries do not keep finding unimportant."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moend.errors import UserError
from moend.scoring.base import LayerView, Scorer, attention, last_logits


@dataclass(frozen=True)
class Scissorhands(Scorer):
    """How often an entry's attention from the last queries was not below average (arXiv 2305.17118, algorithm 2).

    A query that sees t entries finds those unimportant that receive less than 1/t. Queries before an entry do not
    count against it. Summed over the query heads that share a KV head. The paper counts how often an entry was
    unimportant and drops the highest counts: the same order. Ties go to the newer entry.

    While decoding, attention is over the entries still held.
    """

    window: int = 16  # queries

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UserError(f"scorer scissorhands needs window >= 1, got {self.window}")

    @property
    def last_queries(self) -> int:
        """The window."""
        return self.window

    def __call__(self, view: LayerView) -> Tensor:
        """(H, n) float32: a count, plus a fraction that breaks ties."""
        logits = last_logits(view, self.window)  # (H, G, w, n)
        sees = logits[:, :1] > -torch.inf  # (H, 1, w, n)
        unimportant = (attention(logits, view.rule) < 1.0 / sees.sum(-1, keepdim=True)) & sees
        asked = logits.shape[1] * logits.shape[2]
        newer = (view.at + 1).float() / (view.now + 1)  # in (0, 1)
        return asked - unimportant.sum((1, 2)) + newer


SCORER = Scissorhands
