"""What a scorer sees and what it gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from moend.hf.rope import Rotary


@dataclass(frozen=True)
class LayerView:
    """All that a scorer may see of one layer.

    B rows, H KV heads, Hq = H * G query heads (the G of one KV head are neighbours), n entries of d dimensions.
    """

    layer: int
    keys: Tensor  # (B, H, n, d), roped
    values: Tensor  # (B, H, n, d)
    positions: Tensor  # (B, n) or (B, H, n) int64: original positions, -1 at padding
    now: Tensor  # (B,) int64: position of the next query
    queries: Tensor | None = None  # (B, Hq, w, d), roped: the last w queries, right-aligned
    query_positions: Tensor | None = None  # (B, w) int64, -1 at padding
    scaling: float = 1.0  # what the model multiplies q . k with
    rotary: Rotary | None = None
    statistics: Mapping[str, Tensor] | None = None  # this layer's rows of a calibration
    seed: int = 0  # of the sample
    observed: Mapping[str, Tensor] = field(default_factory=dict)  # what the scorer observes, (B, ..., n) each

    @property
    def valid(self) -> Tensor:
        """(B, 1 or H, n) bool: entries that are not padding."""
        return (self.positions[:, None] if self.positions.dim() == 2 else self.positions) >= 0


class Scorer(Protocol):
    """Ranks the entries of one layer. Holds settings only: never changes what it sees, keeps nothing between calls."""

    @property
    def name(self) -> str: ...

    @property
    def per_head(self) -> bool:
        """False: one score per token, the same for all heads."""

    @property
    def last_queries(self) -> int:
        """How many of the last queries it needs. While decoding they are kept beside the entries, and counted."""

    @property
    def observes(self) -> tuple[str, ...]:
        """What it needs that only the pass over the prompt shows; "accumulated attention" (B, H, n) float32:
        attention received, summed
        over all queries so far and the query heads of a group."""

    @property
    def at_decode(self) -> bool:
        """Whether it can score again while decoding, when nothing of the prompt's pass is at hand."""

    @property
    def statistics(self) -> str | None:
        """The kind of calibration it needs."""

    def __call__(self, view: LayerView) -> Tensor:
        """(B, H, n) float32, or (B, 1, n) where all heads share one; the higher is kept, padding is -inf."""


def grouped_attention(view: LayerView, window: int) -> tuple[Tensor, Tensor]:
    """Attention (B, H, G, w, n) float32 of the last `window` queries over the entries, and which of them count (B, w).

    Softmax over what each query sees: entries that are not padding and not later than itself. Queries that are padding
    do not count; they see everything, so that no softmax is empty. Memory is w x n per query head.
    """
    if view.queries is None or view.query_positions is None:
        raise ValueError("this scorer needs the last queries")
    batch, heads, n, dim = view.keys.shape
    queries = view.queries[:, :, -window:].float()
    at = view.query_positions[:, -window:]
    width, group = queries.shape[2], queries.shape[1] // heads
    positions = view.positions[:, None] if view.positions.dim() == 2 else view.positions  # (B, 1 or H, n)
    now = view.now[:, None]
    counted = (at >= 0) & (at >= now - window)
    flat = (queries * view.scaling).reshape(batch, heads, group * width, dim)
    attention = (flat @ view.keys.float().transpose(-1, -2)).view(batch, heads, group, width, n)
    sees = torch.where(counted, at, now)[:, None, :, None]
    hidden = (positions[:, :, None] > sees) | (positions[:, :, None] < 0)  # (B, 1 or H, w, n)
    attention.masked_fill_(hidden[:, :, None], -torch.inf)
    return torch.softmax(attention, dim=-1), counted
