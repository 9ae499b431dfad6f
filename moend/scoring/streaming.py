"""StreamingLLM: the most recent entries."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moend.scoring.base import LayerView, Scorer


@dataclass(frozen=True)
class Streaming(Scorer):
    """An entry's position (StreamingLLM, arXiv 2309.17453, section 3.2). Selection protects the sinks.

    Exact up to position 2^24, beyond which float32 cannot tell neighbours apart.
    """

    reindex: bool = False  # positions count inside the cache, as in the original, instead of in the text

    per_head = False

    def __call__(self, view: LayerView) -> Tensor:
        """(1, n) float32, or (H, n) where positions come per KV head."""
        return view.at.float()


SCORER = Streaming
