"""Where a needle is found: score over prompt length and needle depth, one panel per method and budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.reporting.figures import Picture, chunks, safe, style

if TYPE_CHECKING:
    from pipelines.results.sweep import Sweep

ORDER = 35
PANELS = 16
COLOURS = "cividis"  # even in lightness and the same for the colour-blind (Nunez, Anderton and Renslow 2018)
COLUMNS = 4


def pictures(sweep: Sweep) -> Iterator[Picture]:
    """One figure per model, benchmark and question mode, of cells whose benchmark is a grid."""
    grids: dict[tuple[str, str, str], list[tuple[str, list[dict[str, Any]]]]] = {}
    for row in sweep.done:
        if row.result and (grid := row.result.get("grid")):
            benchmark, asked, _, given = row.columns
            title = " ".join(x for x in (row.method, given if given != "-" else "", row.variant) if x)
            grids.setdefault((benchmark, row.info["model"], asked), []).append((title, grid))
    for (benchmark, model, asked), panels in grids.items():
        for i, group in enumerate(chunks(panels, PANELS)):
            yield Picture(
                safe(benchmark, model, asked, str(i + 1) if i else ""),
                f"{benchmark} over length and depth: {model}" + ("" if asked == "-" else f", question {asked}"),
                "Mean score at each prompt length and depth of the needle; grey was not measured.",
                partial(draw, group),
            )


def draw(panels: Sequence[tuple[str, Sequence[dict[str, Any]]]], path: Path) -> bool:
    """Draw (title, cells) pairs; a cell is {length, depth, score, n}. Cells that are not there stay empty."""
    panels = [(title, cells) for title, cells in panels if cells]
    if not panels:
        return False
    lengths = sorted({c["length"] for _, cells in panels for c in cells})
    depths = sorted({c["depth"] for _, cells in panels for c in cells})
    rows = -(-len(panels) // COLUMNS)
    columns = -(-len(panels) // rows)  # rows of about the same length
    width = columns * max(0.52 * len(lengths) + 0.9, 2.1) + 0.9
    height = rows * (0.34 * len(depths) + 0.85) + 0.2
    grid = {"nrows": rows, "ncols": columns, "sharex": True, "sharey": True}
    with style.figure(path, width, height, **grid) as (fig, axes):
        flat = [axis for line in axes for axis in line]
        image = None
        for axis, (title, cells) in zip(flat, panels, strict=False):
            image = _panel(axis, title, cells, lengths, depths)
        for i, axis in enumerate(flat):
            axis.set_visible(i < len(panels))
            below = i + columns < len(panels)
            axis.tick_params(labelbottom=not below, labelleft=i % columns == 0)
            if not below:
                axis.set_xlabel("prompt tokens")
            if i % columns == 0:
                axis.set_ylabel("depth of the needle")
        fig.colorbar(image, ax=flat, label="score", shrink=0.9, pad=0.02, aspect=18).outline.set_visible(False)
    return True


def _panel(
    axis: Any, title: str, cells: Sequence[dict[str, Any]], lengths: Sequence[int], depths: Sequence[float]
) -> Any:
    import numpy as np

    values = np.full((len(depths), len(lengths)), np.nan)
    for c in cells:
        values[depths.index(c["depth"]), lengths.index(c["length"])] = c["score"]
    image = axis.imshow(values, cmap=COLOURS, vmin=0, vmax=1, aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        if not np.isnan(value):
            text = f"{value:g}" if value in (0, 1) else f"{value:.2f}".removeprefix("0")
            axis.text(j, i, text, ha="center", va="center", color="white" if value < 0.5 else "black", fontsize=7.5)
    axis.set_facecolor("#EEEEEE")  # what was not measured
    axis.set_title(title)
    axis.set_xticks(range(len(lengths)), [_short(n) for n in lengths])
    axis.set_yticks(range(len(depths)), [f"{d * 100:g} %" for d in depths])
    axis.set_xticks([x - 0.5 for x in range(1, len(lengths))], minor=True)
    axis.set_yticks([y - 0.5 for y in range(1, len(depths))], minor=True)
    axis.tick_params(which="both", length=0)
    axis.grid(visible=False)
    axis.grid(which="minor", color="white", linewidth=1.2)
    for side in axis.spines.values():
        side.set_visible(False)
    return image


def _short(tokens: int) -> str:
    return f"{tokens / 1024:g}k" if tokens >= 1024 and tokens % 256 == 0 else str(tokens)
