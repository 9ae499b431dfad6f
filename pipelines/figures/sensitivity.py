"""The sensitivity landscape: how much each operation disturbs each layer's attention output (MoE-nD, figure 2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.figures import style


def draw(
    singles: npt.NDArray[Any], operations: Sequence[str], title: str, path: Path, unit: str = "relative L2 error (log)"
) -> bool:
    """Heatmap of singles (layers, operations) on a log colour scale, with each operation's max/min ratio beside it."""
    from matplotlib.colors import LogNorm

    values = np.asarray(singles, dtype=float)
    positive = values[values > 0]
    if not positive.size:
        return False
    layers, n = values.shape
    floor = float(positive.min())
    shown = np.maximum(values, floor)
    width, ratios = max(5.5, 0.25 * layers + 2.6), [max(layers, 8), 7]
    with style.figure(path, width, 0.33 * n + 1.5, ncols=2, width_ratios=ratios) as (fig, axes):
        heat, strip = axes[0]
        norm = LogNorm(floor, max(positive.max(), floor * 1.01))
        image = heat.imshow(shown.T, aspect="auto", cmap="cividis", norm=norm)
        heat.set_yticks(range(n), operations)
        heat.set_xticks(range(0, layers, 1 if layers <= 12 else 5))
        heat.set_xlabel("layer")
        heat.set_title(title)
        heat.grid(visible=False)
        bar = fig.colorbar(image, ax=heat, pad=0.01, fraction=0.04)
        bar.set_label(unit)
        spread = shown.max(axis=0) / shown.min(axis=0)
        strip.barh(range(n), spread, color=style.SKY, height=0.7)
        for i, ratio in enumerate(spread):
            strip.text(ratio * 1.08, i, f"{ratio:.0f}×" if ratio >= 10 else f"{ratio:.1f}×", va="center", fontsize=7.5)
        strip.set_xscale("log")
        strip.set_xlim(1, spread.max() * 4)
        strip.set_ylim(n - 0.5, -0.5)
        strip.set_yticks([])
        strip.minorticks_off()
        strip.set_xlabel("max / min over layers")
        strip.grid(axis="y", visible=False)
    return True
