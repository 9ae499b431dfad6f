"""Figures: each module draws what it is given into a PNG and a PDF, with intervals and the line of the full cache."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moend.statistics import Difference
from perf.report import build
from pipelines.reporting import figures
from pipelines.reporting.figures import (
    ablation,
    accuracy_memory,
    anchors,
    kept_tokens,
    ratio_curves,
    sensitivity,
    speed,
    style,
)
from pipelines.results.deltas import Delta
from pipelines.results.sweep import Sweep, compared, rows
from pipelines.store.cells import Store

METHODS = ("1d", "2d_uniform", "2d", "2d_hetero", "SnapKV", "MoEZip")


def load(store: Store) -> Sweep:
    manifest = store.read_manifest("latest")
    found = rows(store, manifest)
    return Sweep(store, manifest, found, compared(store, found))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    store = Store(tmp_path_factory.mktemp("store"))
    wanted: list[dict[str, Any]] = []
    for benchmark in ("text", "likelihood"):
        lower = {"lower": True} if benchmark == "likelihood" else {}
        wanted.append({"method": "full", "budget": None, "benchmark": benchmark, **lower})
        for m in METHODS:
            wanted += [{"method": m, "budget": b, "benchmark": benchmark, **lower} for b in ("0.1r", "0.25r", "0.5r")]
    build(store, wanted, examples=12)
    return load(store)


@pytest.mark.slow
def test_a_sweep_gives_its_figures(sweep: Sweep, tmp_path: Path) -> None:
    made = figures.pictures(sweep)
    names = [p.name for p in made]
    expected = {
        "accuracy_memory",
        "ratio_curves",
        "ablation",
        "ablation_nats",
        "routing_map_a_model",
        "anchors_a_model",
    }
    expected |= {"pareto_text_a_model_visible", "pareto_likelihood_a_model_visible"}
    expected |= {"peak_memory_a_model", "kept_tokens_text_a_model_visible", "kept_tokens_likelihood_a_model_visible"}
    assert set(names) == expected and len(set(names)) == len(names)
    for p in made:
        path = tmp_path / f"{p.name}.png"
        assert p.title and p.caption.endswith(".")
        assert p.draw(path)
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000
        assert path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")


def test_incomplete_cells_are_in_no_figure(tmp_path: Path) -> None:
    store = Store(tmp_path)
    wanted = [{"method": m, "budget": b, "benchmark": "text"} for m in ("1d", "2d") for b in ("0.1r", "0.25r")]
    wanted[0] |= {"state": "run"}
    build(store, wanted, examples=4)
    found = load(store)
    gone = found.rows[0].key
    assert gone not in {r["key"] for r in found.results}
    names = {p.name for p in figures.pictures(found)}
    assert {"accuracy_memory", "ratio_curves"} <= names and not any(n.startswith("ablation") for n in names)


def test_a_module_with_pictures_is_found(sweep: Sweep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = types.ModuleType("pipelines.reporting.figures.zzz")
    picture = figures.Picture("zzz", "a title", "a caption.", lambda path: False)
    module.pictures = lambda sweep: [picture]  # type: ignore[attr-defined]
    module.ORDER = 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pipelines.reporting.figures.zzz", module)
    (tmp_path / "zzz.py").write_text("")
    monkeypatch.setattr(figures, "__path__", [*figures.__path__, str(tmp_path)])
    assert figures.pictures(sweep)[0].title == picture.title
    module.pictures = lambda sweep: [picture, picture]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="figures share a name: zzz"):
        figures.pictures(sweep)


def test_known_methods_are_told_apart_by_more_than_colour() -> None:
    looks = list(style.METHODS.values())
    assert len(set(looks)) == len(looks)
    names = [f"new{i}" for i in range(12)]
    assert len({style.look(n, names) for n in names}) == 12


class Seen:
    """What a figure was asked to draw."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        import matplotlib.axes

        self.lines: list[float] = []
        self.errors: list[tuple[list[float], Any]] = []
        line, bars = matplotlib.axes.Axes.axhline, matplotlib.axes.Axes.errorbar

        def axhline(axis: Any, y: float = 0, *args: Any, **kwargs: Any) -> Any:
            self.lines.append(y)
            return line(axis, y, *args, **kwargs)

        def errorbar(axis: Any, x: Any, y: Any, yerr: Any = None, *args: Any, **kwargs: Any) -> Any:
            self.errors.append((list(np.atleast_1d(y)), yerr))
            return bars(axis, x, y, yerr, *args, **kwargs)

        monkeypatch.setattr(matplotlib.axes.Axes, "axhline", axhline)
        monkeypatch.setattr(matplotlib.axes.Axes, "errorbar", errorbar)


@pytest.mark.parametrize("module", ["accuracy_memory", "ratio_curves"])
def test_scores_have_interval_bars_and_the_full_line(
    sweep: Sweep, module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = Seen(monkeypatch)
    picture = next(p for p in figures.pictures(sweep) if p.name == module)
    assert picture.draw(tmp_path / "x.png")
    for r in sweep.results:
        if r["budget"] is None:
            assert seen.lines.count(r["score"]) == 1
            continue
        at = [(e, i) for scores, e in seen.errors for i, s in enumerate(scores) if s == r["score"]]
        ends = {(round(e[0][i], 9), round(e[1][i], 9)) for e, i in at}
        assert (round(r["score"] - r["score_low"], 9), round(r["score_high"] - r["score"], 9)) in ends


def test_the_axis_holds_the_bytes_of_the_moment_at_which_the_budget_binds(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Cells of both moments stand in two panels, each with the full cache at that moment."""
    rows = []
    for row in sweep.done:
        result = {**(row.result or {}), "resident_bytes": 2**20, "resident_bytes_peak_mean": 3 * 2**20}
        rows.append(replace(row, result=result))
        if not row.is_full:
            rows.append(replace(row, result=result, payload={**row.payload, "budget_at": "peak"}))
    drawn: list[tuple[str, str, list[float]]] = []
    plain = accuracy_memory._panel

    def panel(axis: Any, results: Any, *rest: Any) -> None:
        plain(axis, results, *rest)
        drawn.append((axis.get_title(), axis.get_xlabel(), [accuracy_memory.held(r) for r in results]))
        assert sum(r["budget"] is None for r in results) == 1

    monkeypatch.setattr(accuracy_memory, "_panel", panel)
    (picture, *_) = accuracy_memory.pictures(replace(sweep, rows=rows))
    assert picture.draw(tmp_path / "x.png")
    labels = {label for _, label, _ in drawn}
    assert labels == {"resident cache after the prompt, MiB (log)", "resident cache at its peak, MiB (log)"}
    for _, label, held in drawn:
        assert set(held) == {3.0 if "peak" in label else 1.0}


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    draws: list[Callable[..., bool]] = [
        accuracy_memory.draw,
        ratio_curves.draw,
        ablation.draw,
        speed.draw,
        speed.draw_peaks,
    ]
    for draw in [*draws, kept_tokens.draw, anchors.draw]:
        assert not draw([], path)
    assert not sensitivity.landscape(np.zeros((2, 2)), ["k8", "k4"], path)
    assert not path.exists()


def test_published_points_are_on_the_same_scale(tmp_path: Path) -> None:
    store = Store(tmp_path)
    wanted: list[dict[str, Any]] = [{"method": "2d_hetero", "budget": b} for b in ("512t", "1024t")]
    for cell in wanted:
        cell |= {"benchmark": "longbench_moend", "protocol": "paper"}
    build(store, wanted, model="deepseek_r1_distill_qwen_7b", examples=4)
    found = accuracy_memory.published(load(store))
    points = found["deepseek_r1_distill_qwen_7b", "longbench_moend", "paper"]["2d_hetero"]
    assert points[0] == pytest.approx((68, 0.12))  # 136 MiB at 8 KV heads are 68 at 4; 12.0 points are 0.12
    lines = ratio_curves.published("deepseek_r1_distill_qwen_7b", "longbench_moend", "paper", {"512t", "1024t"})
    assert lines["2d_hetero"] == pytest.approx({"512t": 0.12, "1024t": 0.121})
    assert all(p.draw(tmp_path / f"{p.name}.png") for p in figures.pictures(load(store)))


def test_differences_are_drawn_where_they_are(tmp_path: Path) -> None:
    group = ("m", "b", "visible", "", "10%")
    found = [
        Delta(group, "2d_hetero", "2d", "evict", Difference(0.3, 0.1, 0.5, 0.001, 20, "mcnemar"), None, 0.003),
        Delta(group, "2d", "2d_uniform", "quant", Difference(0.0, None, None, 1.0, 20, "mcnemar"), None, 1.0),
        Delta(group, "2d", "SnapKV", "", Difference(0.1, 0.0, 0.2, 0.5, 20, "mcnemar"), None, 1.0),
    ]
    assert ablation.draw(found, tmp_path / "x.png", theirs={("m", "b", "evict", "10%"): 0.2})
    assert not ablation.draw(found[2:], tmp_path / "y.png")
    assert ablation.published()["deepseek_r1_distill_qwen_7b", "aime25", "evict", "64"] == pytest.approx(0.267)


@pytest.mark.parametrize("lengths", [(1000, 4000, 16000), (1000,)])
def test_speeds_over_lengths_or_cells(lengths: tuple[int, ...], tmp_path: Path) -> None:
    store = Store(tmp_path)
    wanted = [
        {"method": m, "budget": None if m == "full" else "0.1r", "benchmark": "text", "length": n, "alone": True}
        for m in ("full", "SnapKV", "RippleKV")
        for n in lengths
    ]
    build(store, wanted, examples=5)
    found = load(store)
    (picture,) = (p for p in figures.pictures(found) if p.name.startswith("speed"))
    assert picture.name == "speed_text_a_model_visible"
    row = found.rows[0]
    point = speed.point(row, lambda: found.records(row))
    records = found.records(row)
    mean = np.mean([r["timing"]["group_prefill_seconds"] + r["timing"]["decode_seconds_share"] for r in records])
    rate = sum(r["new_tokens"] for r in records) / sum(r["timing"]["decode_seconds_share"] for r in records)
    assert point.latency is not None and point.latency[0] == pytest.approx(mean)
    assert point.latency[1] < mean < point.latency[2]
    assert point.throughput is not None and point.throughput[0] == pytest.approx(rate)
    assert picture.draw(tmp_path / "x.png")


def test_the_landscape_chooses_the_two_layers_that_differ_most(tmp_path: Path) -> None:
    values = np.full((4, 3), 0.1)
    values[1, 0], values[3, 1] = 0.9, 0.8  # layer 1: eviction hurts; layer 3: quantisation hurts
    pairs = sensitivity._preferences(values, ["keep_50", "k4", "v8"], None)
    assert [name for name, _ in pairs] == ["keep_50 - k4 (the paper's pair)"]
    assert pairs[0][1] == pytest.approx([0, 0.8, 0, -0.7])
    equal = {"keep_50": values[:, 0], "k8v8": np.full(4, 0.2)}
    assert sensitivity._preferences(values, ["keep_50", "k4", "v8"], equal)[1][1] == pytest.approx(
        [-0.1, 0.7, -0.1, -0.1]
    )
    assert sensitivity.landscape(values, ["keep_50", "k4", "v8"], tmp_path / "x.png", equal=equal, title="a model")
