"""R-KV: what the newest queries attend to, less what other entries already say."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moend.errors import UserError
from moend.scoring.base import LayerView, Scorer, last_logits, mean_attention, window_first

BLOCK = 2**18  # similarities held at a time


@dataclass(frozen=True)
class RKV(Scorer):
    """mix * importance - (1 - mix) * redundancy (R-KV, arXiv 2505.24133, section 3).

    Importance: of the logits of the last `window` queries the largest among the query heads that share a KV head;
    softmax over the entries before the window (and over nothing else: attention sinks have no share); mean over the
    queries; max-pooled over `kernel` neighbours. Redundancy: see `redundancy`. The window itself always stays.

    Memory is linear in n; time is that of n x n similarities, in blocks.
    """

    window: int = 8  # queries
    kernel: int = 7  # entries that are pooled, odd
    mix: float = 0.1  # share of importance in the score
    threshold: float = 0.5  # cosine similarity above which entries are alike

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
        """(H, n) float32: above 1 in the window, the newest highest; at most 1 before it."""
        strongest = last_logits(view, self.window).amax(1)  # (H, w, n)
        inside = view.at >= view.now - self.window
        mean = mean_attention(strongest.masked_fill_(inside[:, None], -torch.inf)[:, None])[:, 0]  # (H, n)
        importance = F.max_pool1d(mean, self.kernel, stride=1, padding=self.kernel // 2)
        score = self.mix * importance - (1 - self.mix) * redundancy(view.keys.float(), self.threshold)
        return window_first(view, self.window, score)


def redundancy(keys: Tensor, threshold: float) -> Tensor:
    """Softmax over the entries (H, n) of their mean cosine similarity to the keys (H, n, d).

    An entry is not similar to itself, and of the entries that it resembles by more than `threshold` it spares the last:
    so of several alike the newest stays.
    """
    heads, n, _ = keys.shape
    unit = F.normalize(keys, dim=-1, eps=1e-8)
    # The sum over rows of all similarities is one product; only what each row spares needs its similarities.
    total = (unit @ unit.sum(1)[..., None])[..., 0] - unit.square().sum(-1)
    at = torch.arange(n, device=keys.device)
    size = max(BLOCK // (heads * n), 1)
    for start in range(0, n, size):
        alike = unit[:, start : start + size] @ unit.mT  # (H, b, n)
        alike.masked_fill_(at == at[start : start + size, None], 0.0)
        last = torch.where(alike > threshold, at, -1).amax(-1)  # (H, b), -1: it spares none
        spared = alike.gather(-1, last.clamp(min=0)[..., None])[..., 0]
        total.scatter_add_(1, last.clamp(min=0), torch.where(last >= 0, -spared, 0.0))
    return torch.softmax(total / n, dim=-1)


SCORER = RKV
