"""Where the kept entries of one example lie: layers down, the prompt across, the share of heads that keep as shade."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.reporting.figures import Picture, safe, style
from pipelines.results.kept import by_layer

if TYPE_CHECKING:
    from pipelines.results.sweep import Sweep

ORDER = 45
PANELS = 8
COLUMNS = 2


def pictures(sweep: Sweep) -> Iterator[Picture]:
    """One figure per model, benchmark and question mode, at its smallest budget: that of the first example."""
    from pipelines.reporting.tables import pivots

    for p in pivots(sweep.rows):
        found: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
        for name, line in p.lines:
            for given, row in zip(p.budgets, line, strict=True):
                if row is None or row.result is None:
                    continue
                if (kept := sweep.kept(row)) is not None:
                    found.setdefault(given, []).append((f"{name}, {row.columns[3]}", kept))
        for panels in [panels for panels in found.values() if panels][:1]:
            asked = "" if p.asked == "-" else p.asked
            yield Picture(
                safe("kept_tokens", p.benchmark, p.model, asked, "paper" if p.protocol == "paper" else ""),
                f"Kept entries of one example: {p.title}",
                f"The first example, {panels[0][1]['tokens']} entries before compression. Dark: all heads of a layer "
                "keep the entries at that place of the prompt; white: none does. A triangle marks where the answer "
                "stands, if it stands there once.",
                partial(draw, panels[:PANELS]),
            )


def draw(panels: Sequence[tuple[str, Mapping[str, Any]]], path: Path) -> bool:
    """Draw (title, a record's `kept`) pairs."""
    if not panels:
        return False
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    values_of = [by_layer(kept) for _, kept in panels]
    layers = max(map(len, values_of))
    height = rows * (0.55 + max(0.7, min(0.055 * layers, 2.2))) + 0.5
    with style.figure(path, 4.9 * columns + 0.5, height, nrows=rows, ncols=columns, sharex=True, sharey=True) as (
        fig,
        axes,
    ):
        image = None
        for i, (axis, (title, kept)) in enumerate(zip(axes.flat, panels, strict=False)):
            values, tokens = values_of[i], kept["tokens"]
            n = len(values)
            image = axis.imshow(
                values,
                aspect="auto",
                cmap="Greys",
                vmin=0,
                vmax=1,
                extent=(0, tokens, n - 0.5, -0.5),
                interpolation="nearest",
            )
            axis.set_title(f"{title}: {100 * values.mean():.0f} % kept")
            axis.grid(visible=False)
            axis.set_yticks(range(0, n, 1 if n <= 8 else 5 if n <= 32 else 10))
            if kept.get("answer") is not None:
                axis.plot(kept["answer"] * tokens, -0.5, marker="v", color=style.RED, ms=7, clip_on=False, zorder=5)
            if i % columns == 0:
                axis.set_ylabel("layer")
            if i + columns >= len(panels):
                axis.set_xlabel("position in the prompt")
                axis.tick_params(labelbottom=True)
        for axis in list(axes.flat)[len(panels) :]:
            axis.set_visible(False)
        fig.colorbar(
            image, ax=list(axes.flat), label="share of heads and entries kept", shrink=0.85, pad=0.015, aspect=28
        )
    return True
