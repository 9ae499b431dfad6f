"""Knorm: keys of small norm are those that attract attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moend.scoring.base import LayerView


@dataclass(frozen=True)
class Knorm:
    """An entry's score is the negated L2 norm of its key (Devoto et al., arXiv 2406.11430, section 4).

    RoPE turns keys without changing their norms, so it does not matter that they are scored as they lie in the cache.
    """

    name = "knorm"
    per_head = True
    last_queries = 0
    observes = ()
    at_decode = True
    statistics = None

    def __call__(self, view: LayerView) -> Tensor:
        """(B, H, n) float32, at most 0, -inf at padding."""
        return torch.where(view.valid, -view.keys.float().norm(dim=-1), -torch.inf)


SCORER = Knorm
