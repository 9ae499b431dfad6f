"""TOVA: what the newest query attends to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moend.scoring.base import LayerView, Scorer, last_logits, mean_attention


@dataclass(frozen=True)
class TOVA(Scorer):
    """Attention of the last query, averaged over all heads of the layer (TOVA, arXiv 2401.06104, section 3.2).

    All heads of a layer drop the same token. Nothing is protected, the newest entry included.
    """

    per_head = False
    last_queries = 1

    def __call__(self, view: LayerView) -> Tensor:
        """(1, n) float32 in [0, 1]; where positions come per KV head (H, n), each averaged over its query heads."""
        mean = mean_attention(last_logits(view, 1), view.rule).mean(1)  # (H, n)
        return mean if view.positions.dim() == 2 else mean.mean(0, keepdim=True)


SCORER = TOVA
