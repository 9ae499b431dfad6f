"""MoEZip's anchors: how uncertain the routers were, how many entries that reserves, and what they replace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.reporting.figures import Picture, chunks, safe, style

if TYPE_CHECKING:
    from pipelines.results.sweep import Sweep

ORDER = 70


def pictures(sweep: Sweep) -> Iterator[Picture]:
    """One figure per model, of all cells whose records hold anchors."""
    models: dict[str, list[tuple[str, list[Mapping[str, Any]]]]] = {}
    for row in sweep.done:
        if row.info["method"] == "MoEZip":
            found = [d for r in sweep.records(row) if "gamma" in (d := r["diagnostics"])]
            if found:
                benchmark, asked, _, given = row.columns
                name = f"{row.payload['method'].get('mode')}, {given}, {benchmark}, {asked}"
                models.setdefault(row.info["model"], []).append((name, found))
    for model, cells in models.items():
        for i, group in enumerate(chunks(cells, 8)):
            yield Picture(
                safe("anchors", model, str(i + 1) if i else ""),
                f"MoEZip's anchors: {model}",
                "Gamma: share of instruction tokens and layers whose router was uncertain. Anchors: entries kept in "
                "every layer and head for that. Replaced: share of the base method's choice whose place anchors took. "
                "One dot per example, the line is the mean with its 95 % bootstrap interval.",
                partial(draw, group),
            )


PANELS = (("gamma", "Gamma"), ("anchors", "anchors"), ("replaced", "replaced share"))


def draw(cells: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], path: Path) -> bool:
    """Draw (name, diagnostics of the records), a line per cell in three panels."""
    if not cells:
        return False
    rng = np.random.default_rng(0)
    with style.figure(path, 9.6, 0.42 * len(cells) + 1.0, ncols=3, sharey=True) as (_, axes):
        for axis, (name, label) in zip(axes[0], PANELS, strict=True):
            for i, (_, found) in enumerate(cells):
                values = np.array([float(d[name]) for d in found])
                axis.plot(
                    values, i + rng.uniform(-0.25, 0.25, len(values)), ".", color=style.SKY, ms=5, alpha=0.7, mew=0
                )
                means = values[rng.integers(len(values), size=(1000, len(values)))].mean(1)
                low, high = np.quantile(means, [0.025, 0.975])
                axis.plot([low, high], [i, i], color=style.BLACK, lw=2, solid_capstyle="butt")
                axis.plot(values.mean(), i, "|", color=style.BLACK, ms=12, mew=1.6)
            axis.set_xlabel(label)
            axis.set_yticks(range(len(cells)), [name for name, _ in cells])
            axis.set_ylim(len(cells) - 0.5, -0.5)
            axis.grid(axis="y", visible=False)
        axes[0][0].set_xlim(-0.03, 1.03)
        axes[0][1].set_xlim(left=0)
        axes[0][2].set_xlim(left=0)
    return True
