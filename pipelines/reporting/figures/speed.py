"""What a method costs: seconds per answer, tokens per second, and the most bytes its cache held (RippleKV, table 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pipelines.cli.terminal import budget
from pipelines.reporting.figures import Picture, safe, style

if TYPE_CHECKING:
    from pipelines.results.sweep import Row, Sweep

ORDER = 60
RESAMPLES = 1000
MIB = 2**20
Spread = tuple[float, float, float]  # a value and its bounds


@dataclass(frozen=True)
class Point:
    """One cell: (value, low, high) of latency in s and throughput in tokens/s (None where it has none), peak in MiB."""

    method: str
    budget: str | None
    tokens: int
    latency: Spread | None
    throughput: Spread | None
    peak: float

    @property
    def name(self) -> str:
        """Method and budget."""
        return self.method + ("" if self.budget is None else f", {budget(self.budget)}")


def pictures(sweep: Sweep) -> Iterator[Picture]:
    """One figure per model: over prompt lengths where there are several, else a line per cell."""
    models: dict[str, list[tuple[Row, Point]]] = {}
    for row in sweep.done:
        models.setdefault(row.info["model"], []).append((row, point(row, partial(sweep.records, row))))
    for model, found in models.items():
        alone = [(row, p) for row, p in found if p.latency is not None]
        # cells of other benchmarks have other lengths of answers: only one benchmark's are drawn together
        names = {(row.info["benchmark_config"]["name"], row.columns[1]) for row, _ in alone}
        for name, asked in sorted(names):
            points = [p for row, p in alone if (row.info["benchmark_config"]["name"], row.columns[1]) == (name, asked)]
            if len(points) > 1:
                yield Picture(
                    safe("speed", name, model, asked.strip("-")),
                    f"Latency, throughput and peak memory: {name}, {model}",
                    "Each cell decoded by itself. Latency: prefill and decoding of an answer; throughput: decoding "
                    "only; 95 % bootstrap intervals over examples. Memory: the most that the compressed cache held, "
                    "weights and the prefill's own cache not counted.",
                    partial(draw, points),
                )
        fused = [(row, p) for row, p in found if p.latency is None]
        panels = list(dict.fromkeys((row.info["benchmark"], row.columns[1]) for row, _ in fused))
        if fused:
            groups = [[p for row, p in fused if (row.info["benchmark"], row.columns[1]) == panel] for panel in panels]
            titles = [f"{b}{'' if a == '-' else ', question ' + a}" for b, a in panels]
            both = [(t, g) for t, g in zip(titles, groups, strict=True) if len(g) > 1][:6]
            if both:
                yield Picture(
                    safe("peak_memory", model),
                    f"Peak memory: {model}",
                    "The most bytes that each cell's cache held until the end of the answer. These cells were decoded "
                    "together, none has a speed of its own: engine.fuse=false measures latency and throughput.",
                    partial(draw_peaks, both),
                )


def point(row: Row, read: Callable[[], Sequence[Mapping[str, Any]]]) -> Point:
    """A complete cell's costs; its records are read only where it has speeds of its own."""
    assert row.result is not None
    tokens, speeds = 0, cast(tuple[Spread | None, Spread | None], (None, None))
    if not row.result["fused"] and row.result["tokens_per_second"]:
        records = read()
        tokens = round(float(np.median([r["prompt_tokens"] for r in records])))
        prefill = np.array([r["timing"]["group_prefill_seconds"] for r in records])
        decode = np.array([r["timing"]["decode_seconds_share"] for r in records])
        new = np.array([r["new_tokens"] for r in records])
        speeds = (
            _spread(lambda i: (prefill + decode)[i].mean(-1), len(records)),
            _spread(lambda i: new[i].sum(-1) / decode[i].sum(-1), len(records)),
        )
    return Point(row.info["method"], row.payload["budget"], tokens, *speeds, row.result["resident_bytes_peak"] / MIB)


def _spread(of: Callable[[Any], Any], n: int) -> Spread:
    """A statistic of all examples and its 95 % bootstrap bounds."""
    picks = np.random.default_rng(0).integers(n, size=(RESAMPLES, n))
    low, high = np.quantile(of(picks), [0.025, 0.975])
    return float(of(np.arange(n))), float(low), float(high)


PANELS = (("latency", "seconds per answer"), ("throughput", "tokens per second"), ("peak", "peak cache, MiB"))


def draw(points: Sequence[Point], path: Path) -> bool:
    """Three panels: over prompt lengths, or where all have the same, a line per cell."""
    if not points:
        return False
    lengths = sorted({p.tokens for p in points})
    many = len(lengths) > 1 and max(lengths) > 1.5 * min(lengths)
    height = 3.1 if many else 0.24 * len(points) + 1.1
    with style.figure(path, 9.6, height, ncols=3, sharey=not many) as (fig, axes):
        for axis, (name, label) in zip(axes[0], PANELS, strict=True):
            (_over_lengths if many else _lines)(axis, points, name, label)
        if many:
            fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return True


def _over_lengths(axis: Any, points: Sequence[Point], name: str, label: str) -> None:
    methods = list(dict.fromkeys(p.method for p in points))
    for series in dict.fromkeys(p.name for p in points):
        mine = sorted((p for p in points if p.name == series), key=lambda p: p.tokens)
        colour, marker = style.look(mine[0].method, methods)
        x, y, errors = [p.tokens for p in mine], *_values(mine, name)
        axis.errorbar(
            x, y, yerr=errors, color=colour, marker=marker, ls=style.line(mine[0].method), capsize=2, label=series
        )
    axis.set_xscale("log", base=2)
    lengths = sorted({p.tokens for p in points})
    axis.set_xticks(lengths, [f"{n / 1024:.0f}k" if n >= 2048 else str(n) for n in lengths])
    axis.minorticks_off()
    axis.set_xlabel("prompt tokens")
    axis.set_ylabel(label)
    axis.set_yscale("log" if name == "peak" else "linear")
    if name != "peak":
        axis.set_ylim(bottom=0)


def _lines(axis: Any, points: Sequence[Point], name: str, label: str) -> None:
    methods = list(dict.fromkeys(p.method for p in points))
    ys, errors = _values(points, name)
    for i, (p, y) in enumerate(zip(points, ys, strict=True)):
        colour, marker = style.look(p.method, methods)
        xerr = None if errors is None else [[errors[0][i]], [errors[1][i]]]
        axis.errorbar(y, i, xerr=xerr, color=colour, marker=marker, capsize=2, ls="")
    axis.set_yticks(range(len(points)), [p.name for p in points])
    axis.set_ylim(len(points) - 0.5, -0.5)
    axis.set_xlim(left=0)
    axis.set_xlabel(label)


def _values(points: Sequence[Point], name: str) -> tuple[list[float], Any]:
    if name == "peak":
        return [p.peak for p in points], None
    triples = [t for p in points if (t := getattr(p, name)) is not None]
    return [v for v, _, _ in triples], [[v - low for v, low, _ in triples], [high - v for v, _, high in triples]]


def draw_peaks(panels: Sequence[tuple[str, Sequence[Point]]], path: Path) -> bool:
    """Peaks only, a panel per benchmark, for cells that were decoded together."""
    if not panels:
        return False
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    most = max(len(points) for _, points in panels)
    same = len({tuple(p.name for p in points) for _, points in panels}) == 1  # then one row of panels names them once
    size = (3.3 * columns + 0.6, rows * (0.21 * most + 0.8) + 0.2)
    with style.figure(path, *size, nrows=rows, ncols=columns, sharey="row" if same else False) as (_, axes):
        for i, (axis, (title, points)) in enumerate(zip(axes.flat, panels, strict=False)):
            methods = list(dict.fromkeys(p.method for p in points))
            for method in methods:  # a few artists in place of hundreds
                colour, marker = style.look(method, methods)
                at, peaks = zip(*((i, p.peak) for i, p in enumerate(points) if p.method == method), strict=True)
                axis.hlines(at, 0, peaks, color=colour, lw=1.2)
                axis.plot(peaks, at, color=colour, marker=marker, ls="")
            if not same or i % columns == 0:
                axis.set_yticks(range(len(points)), [p.name for p in points], fontsize=8)
            axis.set_ylim(len(points) - 0.5, -0.5)
            axis.set_xlim(left=0)
            axis.grid(axis="y", visible=False)
            axis.set_xlabel("peak cache, MiB")
            axis.set_title(title)
        for axis in list(axes.flat)[len(panels) :]:
            axis.set_visible(False)
    return True
