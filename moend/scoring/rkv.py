"""R-KV: what the newest queries attend to, less what other entries already say."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moend.errors import UserError
from moend.scoring.base import LayerView

BLOCK = 2**18  # similarities held at a time


@dataclass(frozen=True)
class RKV:
    """mix * importance - (1 - mix) * redundancy (R-KV, arXiv 2505.24133, section 3).

    Importance: logits of the last `window` queries, the largest of a group; softmax over the entries before the window;
    mean over the queries; max-pooled over `kernel` neighbours. Redundancy: `redundancy` with `threshold`. The window
    itself always stays: its scores are above 1, newest highest.

    Memory is linear in n; time is that of n x n similarities, in blocks.
    """

    window: int = 8
    kernel: int = 7
    mix: float = 0.1
    threshold: float = 0.5

    name = "rkv"
    per_head = True
    observes = ()
    at_decode = True
    statistics = None

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise UserError(f"scorer rkv needs window >= 1 and an odd kernel >= 1, got {self.window} and {self.kernel}")
        if not 0 <= self.mix <= 1:
            raise UserError(f"mix of scorer rkv is a share in [0, 1], got {self.mix}")

    @property
    def last_queries(self) -> int:
        """The window."""
        return self.window

    def __call__(self, view: LayerView) -> Tensor:
        """(B, H, n) float32, -inf at padding."""
        if view.queries is None or view.query_positions is None:
            raise ValueError("scorer rkv needs the last queries")
        batch, heads, n, dim = view.keys.shape
        queries = view.queries[:, :, -self.window :].float()
        width, group = queries.shape[2], queries.shape[1] // heads
        positions = view.positions[:, None] if view.positions.dim() == 2 else view.positions  # (B, 1 or H, n)
        now = view.now[:, None]
        at = view.query_positions[:, -self.window :]
        counted = ((at >= 0) & (at >= now - self.window)).float()
        inside = positions >= now[:, None] - self.window
        old = (view.valid & ~inside)[:, :, None]

        keys = view.keys.float()
        logits = (queries * view.scaling).reshape(batch, heads, group * width, dim) @ keys.transpose(-1, -2)
        strongest = logits.view(batch, heads, group, width, n).amax(2).masked_fill(~old, -torch.inf)
        # where nothing lies before the window there is nothing to share out
        attention = torch.softmax(strongest, dim=-1).nan_to_num(0.0)
        weight = counted / counted.sum(-1, keepdim=True).clamp(min=1)
        mean = (attention * weight[:, None, :, None]).sum(2)
        importance = functional.max_pool1d(mean, self.kernel, stride=1, padding=self.kernel // 2)

        score = self.mix * importance - (1 - self.mix) * redundancy(keys, view.valid, self.threshold)
        newest = 2.0 + (positions - now[:, None] + 1).float() / (self.window + 1)  # in (1, 2] inside the window
        return torch.where(view.valid, torch.where(inside, newest, score), -torch.inf)


def redundancy(keys: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """Softmax over the entries (B, H, n) of their mean cosine similarity to the keys (B, H, n, d); padding gets 0.

    An entry is not similar to itself, and of the entries that it resembles by more than `threshold` it spares the last:
    so of several alike the newest stays. valid (B, 1 or H, n).
    """
    batch, heads, n, _ = keys.shape
    valid = valid.expand(batch, heads, n)
    unit = functional.normalize(keys, dim=-1, eps=1e-8).masked_fill(~valid[..., None], 0.0)
    # The sum over rows of all similarities is one product; only what each row spares needs its similarities.
    total = (unit @ unit.sum(2)[..., None])[..., 0] - unit.square().sum(-1)
    at = torch.arange(n, device=keys.device)
    size = max(BLOCK // (batch * heads * n), 1)
    for start in range(0, n, size):
        rows = unit[:, :, start : start + size]
        alike = rows @ unit.transpose(-1, -2)  # (B, H, b, n)
        alike.masked_fill_(at == at[start : start + size, None], 0.0)
        last = torch.where(alike > threshold, at.to(torch.int32), -1).amax(-1)
        spared = alike.gather(-1, last.clamp(min=0).long()[..., None])[..., 0]
        total.scatter_add_(2, last.clamp(min=0).long(), torch.where(last >= 0, -spared, 0.0))
    mean = total / valid.sum(-1, keepdim=True).clamp(min=1)
    return torch.softmax(mean.masked_fill(~valid, -torch.inf), dim=-1)


SCORER = RKV
