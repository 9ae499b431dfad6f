"""Where the model looks back: what a hard cut of each layer or KV head alone does to its output, above what is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.reporting.figures import Picture, style


def of_plan(
    plan: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]], title: str, model: str
) -> Iterator[Picture]:
    """The damage table that a plan comes from, above what the plan keeps."""
    if (d := found.get("damage")) is not None:
        show = partial(draw, d["hardest"], plan, d["configs"][-1].name, title)
        yield Picture("damage_map", f"damage, {model}", "", show)


def draw(kinds: Mapping[str, npt.NDArray[Any]], plan: Mapping[str, Any], cut: str, title: str, path: Path) -> bool:
    """kinds: a panel each, damage (L, H) in nats of the measured `cut` on one log scale, H = 1 for whole layers.

    Below, the share of entries that the plan keeps, in the same cells; a dot marks more than 4 bits in K.
    """
    from matplotlib.colors import LogNorm

    shown = np.stack([np.asarray(x, dtype=float) for x in kinds.values()])
    positive = shown[shown > 0]
    if not positive.size:
        return False
    floor = max(positive.min(), positive.max() / 1e4)
    norm = LogNorm(floor, positive.max() * 1.01)
    layers = [x.get("heads") or [x] * shown.shape[2] for x in plan["layers"]]
    kept = np.array([[h["keep"] for h in heads] for heads in layers])
    high = [(i, h) for i, heads in enumerate(layers) for h, x in enumerate(heads) if x["k_bits"] > 4]
    rows, height = len(kinds) + 1, 0.3 * shown.shape[2] + 0.55
    width = max(5.2, 0.21 * len(kept) + 1.8)
    with style.figure(path, width, height * rows + 0.5, nrows=rows, sharex=True) as (fig, axes):
        for (name, _), values, axis in zip(kinds.items(), shown, axes[:, 0], strict=False):
            image = _cells(axis, np.maximum(values, floor).T, f"{cut}, {name}", norm=norm, cmap="cividis")
        fig.colorbar(image, ax=axes[:-1, 0].tolist(), pad=0.01, label="KL, nats (log)")
        last = axes[-1, 0]
        image = _cells(last, kept.T, title, vmin=0, vmax=1, cmap="Blues")
        fig.colorbar(image, ax=last, pad=0.01, label="kept")
        if high:
            last.plot(*zip(*high, strict=True), ".", color=style.RED, ms=4)
        last.set_xticks(range(0, len(kept), 1 if len(kept) <= 12 else 5))
        last.set_xlabel("layer")
    return True


def _cells(axis: Any, values: npt.NDArray[Any], title: str, **look: Any) -> Any:
    image = axis.imshow(values, aspect="auto", **look)
    axis.set_title(title)
    axis.set_yticks(range(len(values)) if len(values) <= 8 else [])
    axis.set_ylabel("KV head" if len(values) > 1 else "")
    axis.grid(visible=False)
    return image
