"""Facts that the papers state outside their tables, beside ours: layers that keep all, ratios, what routing costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perf.report import build
from pipelines.reporting import tables
from pipelines.reporting.equal_memory import equal_memory
from pipelines.reporting.match import _is_among
from pipelines.store.cells import Store
from pipelines.store.files import write_json
from tests.pipelines.reporting.test_published import MODEL, at, load, number, table2


def test_megabytes_beside_published_ones_are_those_of_eq_1(tmp_path: Path) -> None:
    sweep = table2(Store(tmp_path))
    row = next(r for r in sweep.rows if r.info["method"] == "2d_hetero" and r.payload["budget"] == "512t")
    assert row.result is not None
    row.result["eq1_bytes"] *= 0.9  # scales and positions are no part of eq. (1)
    _, memory = at(sweep, "table2", method="2d_hetero", budget="512t", quantity="memory")
    assert memory is not None and memory.value == pytest.approx(row.result["eq1_bytes"] / 2**20)
    fact, ratio = at(sweep, "table2", method="2d_hetero", budget="512t", quantity="compression")
    assert fact.value == 14 and ratio is not None
    assert ratio.value == pytest.approx(row.result["full_bytes"] / row.result["eq1_bytes"])


def test_layers_that_keep_all_by_plan_and_by_record(tmp_path: Path) -> None:
    store = Store(tmp_path)
    build(store, [{"method": "2d_hetero", "budget": "512t", "benchmark": "math500", "protocol": "paper"}], model=MODEL)
    sweep = load(store)
    (row,) = sweep.rows
    layers = [{"keep": 1.0 if i else 0.5, "tokens": 10, "k_bits": 16, "v_bits": 16} for i in range(4)]
    plan = {"layers": layers, "t_ref": 20, "solver": "greedy_paper"}
    write_json(store.cell(row.key).folder / "plan.json", plan)
    found = sweep.whole_layers(row)
    assert found is not None and found[0] == 0.75
    line = tables.diagnosed(sweep)[0]
    assert line[tables.DIAGNOSED_TITLES.index("keep all: plan, record")].startswith("75%, ")
    fact, ours = at(sweep, "table6", quantity="layers that keep all")
    assert fact.value == 75 and ours is not None and ours.value == pytest.approx(100 * min(found))
    write_json(store.cell(row.key).folder / "plan.json", plan | {"solver": "none"})  # nobody chose shares
    assert sweep.whole_layers(row) is None


def test_the_time_of_routing_is_compared_at_equal_bytes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    cells: list[dict[str, Any]] = [
        {"method": m, "budget": b, "benchmark": "niah", "protocol": p}
        for m in ("2d_uniform", "2d_hetero")
        for b, p in (("512t", "matched"), ("512t", "paper"))
    ]
    build(store, cells, model=MODEL)
    sweep = load(store)
    fused = any(r.result and r.result["fused"] for r in sweep.rows)
    found = [] if fused else [at(sweep, "inference", quantity="decode time ratio")]
    for fact, ours in found:
        speeds = {r.info["method"]: r.result for r in sweep.rows if r.payload["budget_protocol"] == "matched"}
        a, b = (speeds[m] for m in ("2d_uniform", "2d_hetero"))
        assert a is not None and b is not None and ours is not None and fact.value == 1.0
        assert ours.value == pytest.approx(a["tokens_per_second"] / b["tokens_per_second"])


def test_configurations_that_only_evict_or_only_round_v() -> None:
    names = ["keep_10", "keep_90", "keep_25_k8v4", "v8", "v4", "k8", "k8v4", "k4"]
    assert [n for n in names if _is_among(n, "eviction")] == ["keep_10", "keep_90"]
    assert [n for n in names if _is_among(n, "V only")] == ["v8", "v4"]
    assert number("MoE-nD", "appendixB", among="V only", quantity="lowest Pearson") == 0.01
    assert number("MoE-nD", "appendixB", among="V only", quantity="highest Pearson") == 0.41
    assert number("MoE-nD", "appendixB", among="eviction") == 0.0
    assert [number("MoE-nD", "table2", quantity="compression", budget=f"{b}t") for b in (512, 1024, 2048, 4096)] == [
        14, 6.6, 3.2, 1.6,
    ]  # fmt: skip
    assert number("MoE-nD", "inference", quantity="solve time") == 50


def test_scores_at_equal_memory_are_interpolated_or_the_nearest(tmp_path: Path) -> None:
    sweep = table2(Store(tmp_path))
    held = {"1d": (1.0, 4.0), "2d": (2.0, 8.0), "2d_hetero": (2.0, 16.0), "2d_uniform": (1.0, 4.0)}
    for row in sweep.done:
        if row.info["method"] in held and row.result is not None:
            second = row.payload["budget"] == "1024t"
            row.result.update(
                {"resident_bytes": held[row.info["method"]][second] * 2**20, "score": 0.8 if second else 0.2}
            )
    lines = {(x.row.columns[2], x.row.payload["budget"], x.other): x for x in equal_memory(sweep)}
    one = lines["2d_hetero", "512t", "2d_uniform"]  # 2 MiB lies half way between 1 and 4 on a logarithmic axis
    assert one.value == pytest.approx(0.5) and one.how == "interpolated between 512 and 1024"
    far = lines["2d_hetero", "1024t", "2d_uniform"]
    assert far.value == 0.8 and far.how == "nearest cell: 1024 at 4.0 MiB"
    assert lines["2d_hetero", "512t", "2d"].value == 0.2  # the very same bytes
    assert not any(x.other == "2d_hetero" for x in lines.values())
    text = tables.markdown(sweep, [])
    assert "## At equal measured memory" in text and "2d_hetero - 2d_uniform" in text
    assert not equal_memory(table2_matched(tmp_path / "other"))


def table2_matched(folder: Path) -> Any:
    store = Store(folder)
    cells = [{"method": m, "budget": "512t", "benchmark": "longbench_moend"} for m in ("2d", "2d_hetero")]
    build(store, cells, model=MODEL)
    return load(store)
