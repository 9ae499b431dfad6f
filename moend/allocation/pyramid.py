"""PyramidKV: budgets that fall linearly with depth (PyramidKV, section 4.2)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from moend.allocation.base import Allocation, Allocator, Task
from moend.allocation.shares import shaped, whole

BETA = 20  # the paper's: the last layer gets a twentieth of the mean beyond its window


@dataclass(frozen=True)
class Pyramid(Allocator):
    """As many entries as `uniform` holds in all, more in the first layers and fewer in the last."""

    def plan(self, task: Task) -> Allocation:
        """See `pyramid`; its window is what selection protects."""
        shape = functools.partial(pyramid, layers=task.cost.arch.layers, window=task.protected)
        return Allocation(shaped(task, shape))


def pyramid(total: int, low: int, high: int, *, layers: int, window: int) -> list[int]:
    """Entries of each layer, of sum `total`, from the mean b = total / layers and a window of w entries.

    min = (b - w) / 20, max = 2 (b - w) - min; where max > high - w: max = high - w, min = 2 (b - w) - max;
    b_l = w + max - l (max - min) / (L - 1). A mean that does not reach beyond the window is spread evenly.
    """
    mean = total / layers
    spare = mean - window
    if spare <= 0 or layers == 1:
        return whole(np.full(layers, mean), total, np.zeros(layers))
    least = spare / BETA
    most = 2 * spare - least
    if most > high - window:
        most = float(high - window)
        least = 2 * spare - most
    depth = np.arange(layers)
    return whole(window + most - depth * (most - least) / (layers - 1), total, -depth.astype(np.float64))


ALLOCATOR = Pyramid
