"""What each axis of routing adds: paired differences with their intervals, around zero (MoE-nD, table 5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.reporting.figures import Picture, chunks, safe, style
from pipelines.results.deltas import Delta

if TYPE_CHECKING:
    from pipelines.results.sweep import Sweep

ORDER = 30
LOOKS = {"quant": (style.BLUE, "^"), "evict": (style.RED, "D"), "all": (style.GREY, "o")}
LINES = 36  # differences in one figure
# Published differences, as fractions: {(model, benchmark, ablation, budget as shown): value}
Published = Mapping[tuple[str, str, str, str], float]


def pictures(sweep: Sweep) -> Iterator[Picture]:
    """Differences of the ablation chain, where the sweep has any."""
    from pipelines.reporting.tables import named

    chain = named(sweep.differences)
    units = {r["benchmark"]: (r["unit"], r["higher_is_better"]) for r in sweep.results}
    kinds: dict[tuple[str, bool], list[Delta]] = {}
    for d in chain:
        kinds.setdefault(units[d.group[1]], []).append(d)
    theirs = published()
    for (unit, higher), mine in kinds.items():
        groups = chunks(mine, LINES)
        for i, group in enumerate(groups):
            more = " Hollow diamonds are the paper's." if any(_theirs(d, theirs) is not None for d in group) else ""
            yield Picture(
                safe("ablation", "" if unit == "fraction" else unit, str(i + 1) if i else ""),
                "What each axis of routing adds" + ("" if unit == "fraction" else f", {unit}"),
                "quant = 2d - 2d_uniform (bits per layer), evict = 2d_hetero - 2d (tokens per layer), all = "
                f"2d_hetero - 1d; paired over examples, 95 % intervals{'' if higher else '; lower is better'}. Filled: "
                "p < 0.05 after Holm's correction over the table." + more,
                partial(draw, group, unit=unit, higher=higher, theirs=theirs),
            )


def published() -> Published:
    """MoE-nD's table 5."""
    from pipelines.cli.terminal import budget
    from pipelines.reporting.published import tables

    return {
        (f.fields["model"], f.fields["benchmark"], f.fields["ablation"], budget(f.fields["budget"])): f.value / 100
        for t in tables()
        for f in t.facts()
        if f.fields["quantity"] == "difference" and "budget" in f.fields
    }


def _theirs(d: Delta, theirs: Published) -> float | None:
    return theirs.get((d.group[0], d.group[1], d.name, d.group[4].removesuffix(" (paper)")))


def draw(
    found: Sequence[Delta], path: Path, unit: str = "fraction", higher: bool = True, theirs: Published | None = None
) -> bool:
    """Draw named differences as one column of intervals, grouped by benchmark and budget."""
    found = [d for d in found if d.name]
    if not found:
        return False
    models = {d.group[0] for d in found}
    groups = list(dict.fromkeys((*d.group[:-1], d.group[-1]) for d in found))
    y, ticks, labels = 0.0, [], []
    with style.figure(path, 6.4, 0.19 * len(found) + 0.22 * len(groups) + 1.2) as (fig, axes):
        axis, seen = axes[0][0], set()
        for group in groups:
            mine = [d for d in found if d.group == group]
            ticks.append(y + (len(mine) - 1) / 2)
            model, benchmark, asked, variant, given = group
            place = [benchmark, "" if asked == "-" else asked, variant, "" if len(models) == 1 else model]
            labels.append(f"{', '.join(x for x in place if x)}\n{given}")
            for d in mine:
                colour, marker = LOOKS[d.name]
                if d.score.low is not None and d.score.high is not None:
                    axis.plot([d.score.low, d.score.high], [y, y], color=colour, lw=1.4, solid_capstyle="butt")
                sure = d.p < 0.05
                axis.plot(
                    d.score.value, y, marker=marker, ls="", color=colour, mfc=colour if sure else "white", ms=6,
                    label=None if d.name in seen else d.name,
                )  # fmt: skip
                seen.add(d.name)
                if (value := _theirs(d, theirs or {})) is not None:
                    known = "published" in seen
                    axis.plot(
                        value,
                        y,
                        marker="d",
                        ls="",
                        color="black",
                        mfc="none",
                        ms=8,
                        label=None if known else "published",
                    )
                    seen.add("published")
                y += 1
            y += 0.9
            axis.axhline(y - 0.95, color="#E5E5E5", lw=0.6)
        axis.axvline(0, color=style.BLACK, lw=0.9)
        axis.set_yticks(ticks, labels, fontsize=8)
        axis.set_ylim(y - 0.9, -0.9)
        axis.grid(axis="y", visible=False)
        axis.tick_params(axis="y", length=0)
        axis.set_xlabel(f"difference in score, {unit}" + ("" if higher else " (below zero is better)"))
        fig.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return True
