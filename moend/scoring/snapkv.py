"""SnapKV: what the end of the prompt attends to."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from torch.nn import functional as F

from moend.errors import UserError, unknown
from moend.registry import LATER
from moend.scoring.base import LayerView, Scorer, last_logits, mean_attention, window_first


@dataclass(frozen=True)
class SnapKV(Scorer):
    """Mean attention of the last `window` queries, pooled over neighbouring entries (SnapKV, arXiv 2404.14469, sec. 4).

    Softmax over all entries that a query sees; the mean over the queries and the query heads that share a KV head; then
    pooling over the entries before the window, with zeros beyond both ends. The window itself always stays.

    heads `best` ranks for each query head by itself, as its authors' code does, and an entry enters at the best place
    that a query head of its KV head gives it. (That code then stores a copy of the entries per query head; here the
    query heads of a group share theirs, at the same bytes as with `mean`.) Its published code pools with pool `max` and
    kernel 7.

    While decoding (`schedule: every`) the window is that of the last queries so far.
    """

    window: int = 32  # queries
    pool: str = "avg"  # avg or max
    kernel: int = 5  # entries that are pooled, odd
    heads: str = field(default="mean", metadata=LATER)  # of the query heads that share a KV head: mean or best

    def __post_init__(self) -> None:
        if self.pool not in ("avg", "max"):
            raise unknown("pool of scorer snapkv", str(self.pool), ("avg", "max"))
        if self.heads not in ("mean", "best"):
            raise unknown("heads of scorer snapkv", str(self.heads), ("mean", "best"))
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise UserError(
                f"scorer snapkv needs window >= 1 and an odd kernel >= 1, got {self.window} and {self.kernel}"
            )

    @property
    def last_queries(self) -> int:
        """The window."""
        return self.window

    @property
    def comparable(self) -> bool:
        """A place in a head's own order is not."""
        return self.heads == "mean"

    def __call__(self, view: LayerView) -> Tensor:
        """(H, n) float32: above 1 in the window, the newest highest; at most 1 before it."""
        mean = mean_attention(last_logits(view, self.window), view.rule)  # (H, G, n)
        if self.heads == "mean":
            return window_first(view, self.window, self._pooled(view, mean.mean(1)))
        pooled = self._pooled(view, mean.flatten(0, 1)).view_as(mean)
        n = pooled.shape[-1]
        places = pooled.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        best, shares = places.amin(1), pooled.amax(1)  # of equal places the larger share enters first
        return window_first(view, self.window, (n - 1 - best + shares.clamp(0, 0.999)) / n)

    def _pooled(self, view: LayerView, shares: Tensor) -> Tensor:
        """(R, n) attention before the window, pooled over neighbouring entries."""
        at = view.at.repeat_interleave(len(shares) // len(view.at), 0) if len(view.at) > 1 else view.at
        pool = F.avg_pool1d if self.pool == "avg" else F.max_pool1d
        before = shares.masked_fill(at >= view.now - self.window, 0.0)
        return pool(before, self.kernel, stride=1, padding=self.kernel // 2)


SCORER = SnapKV
