"""SnapKV: what the end of the prompt attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moend.errors import UserError, unknown
from moend.scoring.base import LayerView


@dataclass(frozen=True)
class SnapKV:
    """Mean attention of the last `window` prompt queries, pooled over neighbouring entries (SnapKV, section 4).

    Softmax over all visible keys in float32, then the window's own columns are cut, then the mean over the queries and
    the query heads of a group, then `pool` ("avg" or "max") with an odd `kernel` over the entries, with zeros beyond
    both ends. The window itself always stays: its scores are above 1, newest highest, all others are at most 1.

    Memory is window x n per query head. While decoding (`schedule: every`) the window is of the last queries so far.
    """

    window: int = 32
    pool: str = "avg"
    kernel: int = 5

    name = "snapkv"
    per_head = True
    observes = ()
    at_decode = True
    statistics = None

    def __post_init__(self) -> None:
        if self.pool not in ("avg", "max"):
            raise unknown("pool of scorer snapkv", str(self.pool), ("avg", "max"))
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise UserError(
                f"scorer snapkv needs window >= 1 and an odd kernel >= 1, got {self.window} and {self.kernel}"
            )

    @property
    def last_queries(self) -> int:
        """The window."""
        return self.window

    def __call__(self, view: LayerView) -> Tensor:
        """(B, H, n) float32, -inf at padding."""
        if view.queries is None or view.query_positions is None:
            raise ValueError("scorer snapkv needs the prompt's last queries")
        batch, heads, n, dim = view.keys.shape
        queries = view.queries[:, :, -self.window :].float()
        at = view.query_positions[:, -self.window :]
        width = queries.shape[2]
        group = queries.shape[1] // heads
        positions = view.positions[:, None] if view.positions.dim() == 2 else view.positions  # (B, 1 or H, n)
        now = view.now[:, None]
        counted = (at >= 0) & (at >= now - self.window)

        keys = view.keys.float()
        attention = (queries * view.scaling).reshape(batch, heads, group * width, dim) @ keys.transpose(-1, -2)
        # Queries that are padding see everything, so that no softmax is empty, and count for nothing below.
        sees = torch.where(counted, at, now)[:, None, :, None]
        hidden = (positions[:, :, None] > sees) | (positions[:, :, None] < 0)  # (B, 1 or H, w, n)
        attention.view(batch, heads, group, width, n).masked_fill_(hidden[:, :, None], -torch.inf)
        attention.sub_(attention.amax(-1, keepdim=True)).exp_()
        # Normalising and both means are one weight per row, so the mean attention is a vector times this matrix.
        weight = counted.float() / (counted.sum(-1, keepdim=True).clamp(min=1) * group)
        weight = weight[:, None, None].expand(-1, heads, group, -1).reshape(batch, heads, 1, group * width)
        mean = ((weight / attention.sum(-1)[:, :, None]) @ attention)[:, :, 0]

        inside = positions >= now[:, None] - self.window
        mean = mean.masked_fill_(inside | (positions < 0), 0.0)
        pool = functional.avg_pool1d if self.pool == "avg" else functional.max_pool1d
        score = pool(mean, self.kernel, stride=1, padding=self.kernel // 2)
        newest = 2.0 + (positions - now[:, None] + 1).float() / (self.window + 1)  # in (1, 2] inside the window
        score = torch.where(inside, newest, score)
        return torch.where(positions >= 0, score, -torch.inf)


SCORER = SnapKV
