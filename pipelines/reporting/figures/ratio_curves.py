"""Score against the budget that was asked for, a line per method, a panel per benchmark (RippleKV, figure 2)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.cli.terminal import budget
from pipelines.reporting.figures import Picture, chunks, style

if TYPE_CHECKING:
    from pipelines.results.sweep import Row, Sweep

ORDER = 20
PANELS = 6
# Published scores: {method: {canonical budget: score}}
Lines = Mapping[str, Mapping[str, float]]


def pictures(sweep: Sweep) -> Iterator[Picture]:
    """Panels of at least two budgets of one kind."""
    from pipelines.reporting.tables import pivots

    panels = []
    for p in pivots(sweep.rows):
        done = [r for r in p.rows if r.result is not None]
        for kind in "rtB":
            used = {r.payload["budget"] for r in done if not r.is_full and r.payload["budget"][-1] == kind}
            if len(used) > 1:
                mine = [r for r in done if r.is_full or r.payload["budget"] in used]
                panels.append((p.title, mine, published(p.model, p.benchmark, p.protocol, used)))
    groups = chunks(panels, PANELS)
    for i, group in enumerate(groups):
        more = " Hollow points on dotted lines are the paper's." if any(lines for *_, lines in group) else ""
        yield Picture(
            "ratio_curves" + (f"_{i + 1}" if len(groups) > 1 else ""),
            "Score against the budget",
            "Budgets as they were asked for, evenly spaced; methods side by side at each. Bars are 95 % intervals; the "
            "dashed line and its band are the full cache." + more,
            partial(draw, group),
        )


def published(model: str, benchmark: str, protocol: str | None, budgets: set[str]) -> Lines:
    """Published average scores at these budgets, between 0 and 1."""
    from pipelines.reporting.published import tables

    out: dict[str, dict[str, float]] = {}
    for fact in (f for t in tables() for f in t.facts()):
        x = fact.fields
        where = (x.get("model"), x.get("benchmark"), x.get("protocol", "matched"))
        whole = x.get("task", "average") == "average" and "category" not in x and "where" not in x and "label" not in x
        if where == (model, benchmark, protocol) and whole and x["quantity"] == "score" and x["budget"] in budgets:
            out.setdefault(x["method"], {})[x["budget"]] = fact.value / 100
    return out


def draw(panels: Sequence[tuple[str, Sequence[Row], Lines]], path: Path) -> bool:
    """Draw (title, complete cells with one kind of budget and `full`, published lines)."""
    if not panels:
        return False
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    methods = list(dict.fromkeys(r.info["method"] for _, mine, _ in panels for r in mine if not r.is_full))
    with style.figure(path, 3.3 * columns + 0.4, 2.9 * rows + 0.5, nrows=rows, ncols=columns) as (fig, axes):
        handles: dict[str, Any] = {}
        for axis, (title, mine, lines) in zip(axes.flat, panels, strict=False):
            _panel(axis, mine, lines, methods, handles)
            axis.set_title(title.replace(", ", "\n", 1) if len(title) > 34 else title, fontsize=8.5)
        for axis in list(axes.flat)[len(panels) :]:
            axis.set_visible(False)
        fig.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=min(4 * columns, len(handles))
        )
    return True


def _panel(axis: Any, cells: Sequence[Row], lines: Lines, methods: Sequence[str], handles: dict[str, Any]) -> None:
    results = [r.result for r in cells if r.result is not None]
    budgets = sorted({r.payload["budget"] for r in cells if not r.is_full}, key=lambda b: float(b[:-1]))
    for row in cells:
        if row.is_full and row.result is not None:
            style.reference(axis, row.result)
    for i, method in enumerate(methods):
        place = 0.5 * ((i + 0.5) / len(methods) - 0.5)  # side by side within a budget
        for name in dict.fromkeys(r.series for r in cells if r.info["method"] == method and not r.is_full):
            mine = sorted((r for r in cells if r.series == name), key=lambda r: float(r.payload["budget"][:-1]))
            x = [budgets.index(r.payload["budget"]) + place for r in mine]
            handles[method] = style.errors(axis, x, [r.result for r in mine if r.result], method, methods)
        if points := lines.get(method):
            at = [b for b in budgets if b in points]
            x = [budgets.index(b) + place for b in at]
            handles[f"{method}, published"] = style.theirs(axis, x, [points[b] for b in at], method, methods)
    axis.set_xticks(range(len(budgets)), [budget(b) for b in budgets])
    axis.set_xlim(-0.5, len(budgets) - 0.5)
    axis.set_xlabel("budget" + (", tokens per layer" if budgets[0].endswith("t") else ", share of the cache"))
    axis.grid(axis="x", visible=False)
    style.score_axis(axis, results)
