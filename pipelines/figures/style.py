"""One look for all figures: Okabe-Ito colours and a marker per method, readable in print and for the colour-blind."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Okabe & Ito (2008); yellow is left out: it vanishes on white paper.
BLACK, ORANGE, SKY, GREEN, BLUE, RED, PURPLE, GREY = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#777777",
)  # fmt: skip
METHODS = {
    "full": (BLACK, "s"),
    "1d": (GREY, "o"),
    "2d_uniform": (SKY, "v"),
    "2d": (BLUE, "^"),
    "2d_hetero": (RED, "D"),
    "SnapKV": (GREEN, "P"),
    "StreamingLLM": (ORANGE, "X"),
    "Random": (PURPLE, "*"),
}
_OTHERS = [(c, m) for m in "hp<>dH" for c in (BLUE, ORANGE, GREEN, PURPLE, RED, SKY)]
SETTINGS: dict[str, Any] = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "legend.frameon": False,
    "figure.dpi": 110,
    "savefig.dpi": 200,
    "savefig.bbox": "tight",
    "image.interpolation": "nearest",
}


def look(method: str, among: Sequence[str]) -> tuple[str, str]:
    """Colour and marker of a method: always the same for the known ones, distinct for the rest of `among`."""
    if method in METHODS:
        return METHODS[method]
    rest = [m for m in among if m not in METHODS]
    return _OTHERS[rest.index(method) % len(_OTHERS)]


@contextlib.contextmanager
def figure(path: Path, width: float, height: float, **grid: Any) -> Iterator[tuple[Any, Any]]:
    """`with figure(path, w, h, nrows=.., ncols=..) as (fig, axes)`: styled, saved as PNG at the end, closed."""
    with plt.rc_context(SETTINGS):
        fig, axes = plt.subplots(figsize=(width, height), squeeze=False, layout="constrained", **grid)
        try:
            yield fig, axes
            path.parent.mkdir(parents=True, exist_ok=True)
            temp = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp.png")  # two processes may draw the same
            try:
                fig.savefig(temp)
                temp.replace(path)
            finally:
                temp.unlink(missing_ok=True)
        finally:
            plt.close(fig)
