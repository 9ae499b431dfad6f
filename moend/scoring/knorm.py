"""Knorm: keys of small norm attract attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moend.scoring.base import LayerView, Scorer


@dataclass(frozen=True)
class Knorm(Scorer):
    """The negated L2 norm of an entry's key (Devoto et al., arXiv 2406.11430, section 4).

    RoPE turns keys without changing their norms, so the cached keys give the same scores as those before RoPE.
    """

    def __call__(self, view: LayerView) -> Tensor:
        """(H, n) float32, at most 0."""
        return -view.keys.float().norm(dim=-1)


SCORER = Knorm
