"""H2O: the heavy hitters, entries that received the most attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moend.hf.attention import AttentionRule
from moend.scoring.base import LayerView, Scorer


@dataclass(frozen=True)
class H2O(Scorer):
    """The attention an entry received from all queries so far, of prompt and output (H2O, arXiv 2306.14048, section 4).

    Summed over the query heads that share a KV head. Selection keeps the recent half of a budget (`recent: 0.5`).
    """

    average: bool = False  # divide by the queries that could see the entry: a sum favours old entries

    observes = ("accumulated",)

    def __call__(self, view: LayerView) -> Tensor:
        """(H, n) float32, at least 0."""
        if "accumulated" not in view.observed:
            raise ValueError("scorer h2o needs the attention that entries received")
        received = view.observed["accumulated"].float()
        if not self.average:
            return received
        rule = AttentionRule(view.scaling) if view.rule is None else view.rule
        return received / rule.seen_by(view.at, view.now).clamp(min=1)


SCORER = H2O
