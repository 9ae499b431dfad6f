"""SnapKV: what the end of the prompt attends to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from moend.errors import UserError, unknown
from moend.scoring.base import LayerView, Scorer, attention, last_logits, window_first


@dataclass(frozen=True)
class SnapKV(Scorer):
    """Mean attention of the last `window` queries, pooled over neighbouring entries (SnapKV, arXiv 2404.14469, sec. 4).

    Softmax over all entries that a query sees; the mean over the queries and the query heads that share a KV head; then
    pooling over the entries before the window, with zeros beyond both ends. The window itself always stays.

    While decoding (`schedule: every`) the window is that of the last queries so far.
    """

    window: int = 32  # queries
    pool: str = "avg"  # avg or max
    kernel: int = 5  # entries that are pooled, odd

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
        """(H, n) float32: above 1 in the window, the newest highest; at most 1 before it."""
        mean = attention(last_logits(view, self.window), view.rule).mean((1, 2))  # (H, n)
        before = mean.masked_fill(view.at >= view.now - self.window, 0.0)
        pool = F.avg_pool1d if self.pool == "avg" else F.max_pool1d
        return window_first(view, self.window, pool(before, self.kernel, stride=1, padding=self.kernel // 2))


SCORER = SnapKV
