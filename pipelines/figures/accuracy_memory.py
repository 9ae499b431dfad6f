"""Score against the memory really held, one line per method, `full` as the line to reach (MoE-nD, figure 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.figures import style

MIB = 2**20


def draw(results: Sequence[dict[str, Any]], path: Path) -> bool:
    """Draw result.json contents into a PNG, a panel per benchmark and question mode. False where there is nothing."""
    panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for r in results:
        panels.setdefault((r["model"], panel_title(r)), []).append(r)
    if not panels:
        return False
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    methods = list(dict.fromkeys(r["method"] for r in results))
    models = {m for m, _ in panels}
    with style.figure(path, 3.3 * columns + 0.4, 2.9 * rows + 0.5, nrows=rows, ncols=columns) as (fig, axes):
        handles: dict[str, Any] = {}
        for (model, title), axis in zip(panels, axes.flat, strict=False):
            _panel(axis, panels[model, title], methods, handles)
            axis.set_title(title if len(models) == 1 else f"{model}: {title}")
        for axis in list(axes.flat)[len(panels) :]:
            axis.set_visible(False)
        fig.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=min(4 * columns, len(handles))
        )
    return True


def panel_title(result: dict[str, Any]) -> str:
    """Benchmark and question mode."""
    question = {True: ", question visible", False: ", question unseen", None: ""}[result["question_visible"]]
    paper = " (paper protocol)" if result["budget_protocol"] == "paper" else ""
    return f"{result['benchmark']}{question}{paper}"


def _panel(axis: Any, results: Sequence[dict[str, Any]], methods: Sequence[str], handles: dict[str, Any]) -> None:
    for method in methods:
        mine = sorted((r for r in results if r["method"] == method), key=lambda r: r["resident_bytes"])
        if not mine:
            continue
        colour, marker = style.look(method, methods)
        if method == "full":
            best = mine[-1]
            axis.axhspan(_bound(best, "score_low"), _bound(best, "score_high"), color=colour, alpha=0.08, lw=0)
            axis.axhline(best["score"], color=colour, lw=1, ls=(0, (4, 2)))
        x = [r["resident_bytes"] / MIB for r in mine]
        y = [r["score"] for r in mine]
        error = [
            [max(r["score"] - _bound(r, "score_low"), 0) for r in mine],
            [max(_bound(r, "score_high") - r["score"], 0) for r in mine],
        ]
        shift = 1 + 0.018 * (
            methods.index(method) - len(methods) / 2
        )  # matched methods share their bytes: keep bars apart
        handles[method] = axis.errorbar(
            [v * shift for v in x], y, yerr=error, color=colour, marker=marker, capsize=2, elinewidth=0.9,
            markeredgecolor="white", markeredgewidth=0.5,
        )  # fmt: skip
    axis.set_xscale("log")
    bytes_seen = [r["resident_bytes"] / MIB for r in results]
    low, high = min(bytes_seen), max(bytes_seen)
    axis.set_xlim(low / 1.35, high * 1.35)
    ticks = _ticks(low, high)
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axis.minorticks_off()
    axis.set_xlabel("resident cache, MiB (log)")
    first = results[0]
    better = "" if first["higher_is_better"] else " (lower is better)"
    axis.set_ylabel(f"{first['metric'].replace('_', ' ')}, {first['unit']}{better}")
    if first["higher_is_better"] and all(0 <= r["score"] <= 1 for r in results):
        axis.set_ylim(-0.04, 1.04)


def _bound(result: dict[str, Any], name: str) -> float:
    """An interval's end; the score itself where there is no interval."""
    value = result[name]
    return float(result["score"] if value is None else value)


def _ticks(low: float, high: float) -> list[float]:
    """Two to six readable values (1, 2, 5 times powers of ten, or finer) inside a range."""
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 6, 8), tuple(i / 10 for i in range(10, 100, 2))):
        powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
        ticks = [s * 10**p for p in powers for s in steps if low / 1.3 <= s * 10**p <= high * 1.3]
        if len(ticks) >= 3:
            return ticks
    return [low, high]
