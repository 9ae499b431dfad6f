"""Score against the memory really held at the moment at which the budget binds, one line per method, `full` as the line
to reach (MoE-nD, figure 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.reporting.figures import Picture, chunks, style

if TYPE_CHECKING:
    from pipelines.results.sweep import Sweep

ORDER = 10
MIB = 2**20
PANELS = 6  # in one figure
# Published scores and memory: {(model, benchmark, protocol): {method: [(MiB, score), ...]}}
Published = Mapping[tuple[str, str, str], Mapping[str, Sequence[tuple[float, float]]]]


def pictures(sweep: Sweep) -> Iterator[Picture]:
    """A panel per benchmark and question mode."""
    theirs = published(sweep)
    by_panel: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    full: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in sweep.done:
        r = (row.result or {}) | {"method": row.method, "budget_at": row.payload.get("budget_at") or "prompt"}
        where = (r["model"], r["benchmark"], r["question_visible"])
        (full if row.is_full else by_panel).setdefault(where if row.is_full else (*where, r["budget_at"]), []).append(r)
    for where, only in full.items():
        moments = [at for at in ("prompt", "peak") if (*where, at) in by_panel] or ["prompt"]
        for at in moments:
            by_panel.setdefault((*where, at), []).extend(r | {"budget_at": at} for r in only)
    groups = chunks((rs for rs in by_panel.values() if len(rs) > 1), PANELS)
    for i, group in enumerate(groups):
        results = [r for rs in group for r in rs]
        more = " Hollow points on dotted lines are the paper's." if _has(theirs, results) else ""
        yield Picture(
            "accuracy_memory" + (f"_{i + 1}" if len(groups) > 1 else ""),
            "Score against resident memory",
            "Bytes of every tensor the cache holds after the prompt, or at its peak (mean over the examples) where the "
            "budget binds there; logarithmic. Bars are 95 % intervals; the dashed "
            "line and its band are the full cache. Points of methods that hold the same bytes are moved apart a little."
            + more,
            partial(draw, results, theirs=theirs),
        )


def published(sweep: Sweep) -> Published:
    """What MoE-nD prints for the benchmarks of a sweep, its memory at the model's own number of KV heads."""
    from pipelines.reporting.published import tables
    from pipelines.results.sweep import lookup

    heads = {row.info["model"]: lookup(row.payload, "model.arch.kv_heads") for row in sweep.rows}
    points: dict[tuple[str, str, str], dict[str, dict[Any, dict[str, float]]]] = {}
    for fact in (f for t in tables() for f in t.facts()):
        x = fact.fields
        if {"model", "benchmark", "method", "budget"} <= x.keys() and "task" not in x and heads.get(x["model"]):
            scale = heads[x["model"]] / x["kv_heads"] if x["quantity"] == "memory" else 0.01
            where = (x["model"], x["benchmark"], x.get("protocol", "matched"))
            line = points.setdefault(where, {}).setdefault(x["method"], {})
            line.setdefault(x["budget"], {})[x["quantity"]] = fact.value * scale
    return {
        where: {
            m: [(p["memory"], p["score"]) for p in line.values() if {"memory", "score"} <= p.keys()]
            for m, line in methods.items()
        }
        for where, methods in points.items()
    }


def _has(theirs: Published, results: Sequence[Mapping[str, Any]]) -> bool:
    return any(theirs.get((r["model"], r["benchmark"], r["budget_protocol"] or "")) for r in results)


def draw(results: Sequence[dict[str, Any]], path: Path, theirs: Published | None = None) -> bool:
    """Draw result.json contents, a panel per benchmark and question mode. False where there is nothing."""
    panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    full: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in results:
        if r["budget"] is None:
            full.setdefault(_place(r), []).append(r)
        else:
            panels.setdefault((r["model"], _title(r)), []).append(r)
    for mine in panels.values():
        mine += full.get(_place(mine[0]), [])
    for where, only in full.items():
        if not any(_place(rs[0]) == where for rs in panels.values()):
            panels[where[0], _title(only[0])] = list(only)
    if not panels:
        return False
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    order = list(style.METHODS)
    methods = sorted({r["method"] for r in results}, key=lambda m: (order.index(m) if m in order else len(order), m))
    models = {m for m, _ in panels}
    with style.figure(path, 3.3 * columns + 0.4, 2.9 * rows + 0.5, nrows=rows, ncols=columns) as (fig, axes):
        handles: dict[str, Any] = {}
        for (model, title), axis in zip(panels, axes.flat, strict=False):
            mine = panels[model, title]
            _panel(
                axis,
                mine,
                methods,
                handles,
                None  # the papers' memory is that after the prompt
                if _at_peak(mine[0])
                else (theirs or {}).get((model, mine[0]["benchmark"], mine[0]["budget_protocol"] or "")),
            )
            axis.set_title(title if len(models) == 1 else f"{model}: {title}")
        for axis in list(axes.flat)[len(panels) :]:
            axis.set_visible(False)
        fig.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=min(4 * columns, len(handles))
        )
    return True


def _at_peak(result: Mapping[str, Any]) -> bool:
    return result.get("budget_at") == "peak"


def _place(result: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the cells of a panel and the full cache beside them have in common."""
    return (result["model"], result["benchmark"], result["question_visible"], _at_peak(result))


def _title(result: Mapping[str, Any]) -> str:
    return style.panel_title(result) + (", budget at the peak" if _at_peak(result) else "")


def held(result: Mapping[str, Any]) -> float:
    """MiB that the cache holds at the moment at which its budget binds."""
    if not _at_peak(result):
        return float(result["resident_bytes"]) / MIB
    return float(result.get("resident_bytes_peak_mean") or result["resident_bytes_peak"]) / MIB  # older: the most


def _panel(
    axis: Any,
    results: Sequence[dict[str, Any]],
    methods: Sequence[str],
    handles: dict[str, Any],
    theirs: Mapping[str, Sequence[tuple[float, float]]] | None,
) -> None:
    for method in methods:
        mine = sorted((r for r in results if r["method"] == method), key=held)
        if not mine:
            continue
        if method == "full":
            style.reference(axis, mine[-1])
        shift = 1 + 0.018 * (methods.index(method) - len(methods) / 2)  # matched methods share their bytes
        handles[method] = style.errors(axis, [held(r) * shift for r in mine], mine, method, methods)
    bytes_seen = [held(r) for r in results]
    for method, points in (theirs or {}).items():
        if method in methods and points:
            x, y = zip(*points, strict=True)
            handle = style.theirs(axis, x, y, method, methods)
            bytes_seen += x
            handles[f"{method}, published"] = handle
    axis.set_xscale("log")
    low, high = min(bytes_seen), max(bytes_seen)
    axis.set_xlim(low / 1.35, high * 1.35)
    ticks = ticks_of(low, high)
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axis.minorticks_off()
    axis.set_xlabel(f"resident cache {'at its peak' if _at_peak(results[0]) else 'after the prompt'}, MiB (log)")
    style.score_axis(axis, results)


def ticks_of(low: float, high: float) -> list[float]:
    """Two to six readable values (1, 2, 5 times powers of ten, or finer) inside a range."""
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 6, 8), tuple(i / 10 for i in range(10, 100, 2))):
        powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
        ticks = [s * 10**p for p in powers for s in steps if low / 1.3 <= s * 10**p <= high * 1.3]
        if len(ticks) >= 3:
            return ticks
    return [low, high]
