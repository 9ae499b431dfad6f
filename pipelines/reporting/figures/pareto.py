"""Score against bytes and against tokens per second: the frontier, the intervals, and the cell that is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.cli.terminal import budget
from pipelines.reporting.figures import Picture, safe, speed, style
from pipelines.reporting.figures.accuracy_memory import ticks_of
from pipelines.results.pareto import Front, Spot, frontier

if TYPE_CHECKING:
    from pipelines.results.sweep import Row, Sweep

ORDER = 12
MIB = 2**20
NAMED = 8  # frontier cells that are named in the figure
Speeds = Mapping[str, speed.Spread]  # tokens per second of cells that were decoded alone, by key


def pictures(sweep: Sweep) -> Iterator[Picture]:
    """A figure for each model, benchmark and question mode."""
    names: dict[str, int] = {}
    for front in sweep.fronts:
        name = safe("pareto", front.benchmark, front.model, front.asked.strip("-"))
        names[name] = names.get(name, 0) + 1
        yield Picture(
            name if names[name] == 1 else f"{name}_{names[name]}",
            f"Score against bytes: {front.title}",
            "Each point is a cell with its 95 % interval. The line is the frontier: no cell holds fewer bytes with a "
            f"better score. The dashed line and its band are the full cache. {front.answer}",
            partial(draw, front, sweep.records),
        )


def speeds(front: Front, read: Callable[[Row], Sequence[Mapping[str, Any]]]) -> Speeds:
    """Tokens per second with their intervals, of the cells that were decoded alone."""
    found = {s.row.key: speed.point(s.row, partial(read, s.row)).throughput for s in front.spots}
    return {key: spread for key, spread in found.items() if spread is not None}


def draw(front: Front, read: Callable[[Row], Sequence[Mapping[str, Any]]], path: Path) -> bool:
    """Score against bytes and, where at least two cells were decoded alone, against tokens per second."""
    if len(front.spots) < 2:
        return False
    fast = speeds(front, read)
    columns = 2 if len(fast) > 1 else 1
    methods = list(dict.fromkeys(s.row.method for s in front.spots))
    with style.figure(path, 4.6 * columns + 0.6, 3.9, ncols=columns, sharey=True) as (fig, axes):
        handles: dict[str, Any] = {}
        _panel(axes[0][0], front, [(s, s.held / MIB, None) for s in front.spots], methods, handles)
        axes[0][0].set_xscale("log")
        ticks = ticks_of(front.spots[0].held / MIB, front.spots[-1].held / MIB)
        axes[0][0].set_xticks(ticks, [f"{t:g}" for t in ticks])
        axes[0][0].minorticks_off()
        axes[0][0].set_xlabel("resident cache, MiB (log)")
        axes[0][0].step(
            [s.held / MIB for s in front.frontier],
            [s.score for s in front.frontier],
            where="post", color=style.BLACK, lw=1, zorder=1.5,
        )  # fmt: skip
        _name(axes[0][0], front)
        style.score_axis(axes[0][0], [s.row.result or {} for s in front.spots])
        if columns == 2:
            placed = [(s, fast[s.row.key][0], fast[s.row.key]) for s in front.spots if s.row.key in fast]
            _panel(axes[0][1], front, placed, methods, handles)
            axes[0][1].set_xlabel("tokens per second, decoded alone")
            first = front.spots[0].row.result or {}
            sign = 1 if first["higher_is_better"] else -1
            on = frontier([-x for _, x, _ in placed], [sign * s.score for s, _, _ in placed])
            line = sorted((x, s.score) for (s, x, _), best in zip(placed, on, strict=True) if best)
            axes[0][1].step(*zip(*line, strict=True), where="pre", color=style.BLACK, lw=1, zorder=1.5)
        fig.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=min(4 * columns, 6))
    return True


def _panel(
    axis: Any,
    front: Front,
    placed: Sequence[tuple[Spot, float, speed.Spread | None]],
    methods: Sequence[str],
    handles: dict[str, Any],
) -> None:
    for spot, x, spread in placed:
        r = spot.row.result
        assert r is not None
        if spot.row.is_full:
            style.reference(axis, r)
        colour, marker = style.look(spot.row.method, methods)
        low, high = style.bound(r, "score_low"), style.bound(r, "score_high")
        handle = axis.errorbar(
            [x], [spot.score], yerr=[[max(spot.score - low, 0)], [max(high - spot.score, 0)]],
            xerr=None if spread is None else [[x - spread[1]], [spread[2] - x]],
            color=colour, marker=marker, ls="", capsize=2, elinewidth=0.9, markeredgecolor="white",
            markeredgewidth=0.5, alpha=1.0 if spot.on_frontier or spread is not None else 0.6,
        )  # fmt: skip
        if spot.on_frontier or spot.row.method not in handles:
            handles[spot.row.method] = handle
        if spot.chosen:
            (ring,) = axis.plot([x], [spot.score], "o", ms=13, mfc="none", mec=style.BLACK, mew=1.4, zorder=4, ls="")
            handles["chosen"] = ring


def _name(axis: Any, front: Front) -> None:
    """Budgets beside the first cells of the frontier, the chosen one always."""
    shown = [s for s in front.frontier if not s.row.is_full]
    for spot in [*shown[:NAMED], *(s for s in front.spots if s.chosen and s not in shown[:NAMED])]:
        given = budget(spot.row.payload["budget"])
        axis.annotate(given, (spot.held / MIB, spot.score), xytext=(5, -11), textcoords="offset points", fontsize=7.5)
