"""Published numbers: as the papers print them, beside ours and never mixed with ours."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from moend import statistics
from perf.report import ARCH, build
from pipelines.reporting import match as beside
from pipelines.reporting import report
from pipelines.reporting.match import comparisons
from pipelines.reporting.published import Fact, PublishedTable, categories, tables
from pipelines.results.sweep import Sweep, compared, rows
from pipelines.store.cells import Store

MODEL = "deepseek_r1_distill_qwen_7b"


def table(paper: str, id: str) -> PublishedTable:
    return next(t for t in tables() if (t.paper, t.id) == (paper, id))


def number(paper: str, id: str, **fields: Any) -> float:
    """The one number of a table that has these fields."""
    found = [f for f in table(paper, id).facts() if all(f.fields.get(k) == v for k, v in fields.items())]
    assert len(found) == 1, found
    return found[0].value


@pytest.mark.parametrize(
    ("paper", "id", "fields", "value"),
    [
        *(
            ("MoE-nD", "table2", {"method": m, "budget": "512t", "quantity": "score"}, v)
            for m, v in {"1d": 6.1, "2d_uniform": 4.9, "2d": 5.9, "2d_hetero": 12.0}.items()
        ),
        ("MoE-nD", "table2", {"method": "full", "quantity": "score"}, 11.5),
        ("MoE-nD", "table2", {"method": "2d_hetero", "budget": "512t", "quantity": "memory"}, 136),
        ("MoE-nD", "table5", {"ablation": "evict", "benchmark": "aime24 and aime25"}, 15.0),
        ("MoE-nD", "table5", {"ablation": "quant", "benchmark": "aime24 and aime25"}, -2.1),
        ("MoE-nD", "table5", {"ablation": "evict", "benchmark": "longbench_moend"}, 5.7),
        ("MoE-nD", "table5", {"ablation": "quant", "benchmark": "longbench_moend"}, -0.35),
        ("MoE-nD", "figure2", {"layer": 0, "operation": "keep_50"}, 0.49),
        ("MoE-nD", "figure2", {"layer": 6, "operation": "k4"}, 0.088),
        *(
            (
                "RippleKV", "table2",
                {"model": "llama3.1_8b_instruct", "method": m, "budget": None if m == "full" else "0.1r",
                 "task": "average"}, v,
            )
            for m, v in {
                "StreamingLLM": 29.99, "H2O": 33.29, "SnapKV": 34.24, "PyramidKV": 34.13, "RippleKV": 35.07,
                "full": 46.18,
            }.items()
        ),
        ("RippleKV", "figure3", {"method": "full", "context": 131072}, 45.53),
        ("RippleKV", "figure3", {"method": "RippleKV", "context": 262144}, 47.29),
        ("RippleKV", "table1", {"signal": "output response", "quantity": "mean", "keep": 0.1}, 0.799),
        ("MoEZip", "table1", {"method": "KVZip"}, 19.51),
        ("MoEZip", "table1", {"method": "MoEZip", "question_visible": False}, 41.95),
        ("MoEZip", "table1", {"method": "MoEZip", "question_visible": True}, 44.89),
    ],
)  # fmt: skip
def test_headline_numbers(paper: str, id: str, fields: dict[str, Any], value: float) -> None:
    assert number(paper, id, **fields) == value


def test_what_the_papers_print_twice_agrees() -> None:
    """Averages, differences and ratios follow from other printed numbers: a slip of the pen would show."""
    for budget in ("512t", "1024t", "2048t", "4096t"):
        for method in ("1d", "2d_uniform", "2d", "2d_hetero"):
            tasks = [
                f.value
                for f in table("MoE-nD", "table3").facts()
                if (f.fields["method"], f.fields["budget"]) == (method, budget)
            ]
            assert len(tasks) == 4
            assert fmean(tasks) == pytest.approx(
                number("MoE-nD", "table2", method=method, budget=budget, quantity="score"), abs=0.11
            )
    for benchmark, budget in itertools.product(("aime24", "aime25"), ("64t", "128t", "256t", "512t")):
        for ablation, (a, b) in {"quant": ("2d", "2d_uniform"), "evict": ("2d_hetero", "2d")}.items():
            x, y = (number("MoE-nD", "table4", benchmark=benchmark, budget=budget, method=m) for m in (a, b))
            printed = number("MoE-nD", "table5", benchmark=benchmark, budget=budget, ablation=ablation)
            assert x - y == pytest.approx(printed, abs=0.11)
    for block in table("MoE-nD", "table1").blocks:
        for low, high, ratio in block.values:
            assert high / low == pytest.approx(ratio, rel=0.07)
    for block in table("RippleKV", "table2").blocks:
        for line in block.values:
            assert fmean(line[:-1]) == pytest.approx(line[-1], abs=0.011)


def test_category_means_follow_from_the_tasks() -> None:
    llama = {"model": "llama3.1_8b_instruct", "budget": "0.1r", "method": "RippleKV"}
    for category, tasks in categories().items():
        mean = fmean(number("RippleKV", "table2", task=t, **llama) for t in tasks)
        assert mean == pytest.approx(number("RippleKV", "table4", label="whole", category=category), abs=0.011)
        assert mean == pytest.approx(number("RippleKV", "table5", label="r = 1.5", category=category), abs=0.011)
    assert sum(len(tasks) for tasks in categories().values()) == 16


def test_every_fact_says_what_it_is_of() -> None:
    for t in tables():
        assert t.note and t.title and t.source
        for fact in t.facts():
            assert fact.fields["quantity"] and fact.fields["unit" if "unit" in fact.fields else "quantity"]
            if fact.fields["quantity"] == "score":
                assert {"model", "benchmark", "method", "budget"} <= fact.fields.keys()


def table2(store: Store, **rest: Any) -> Sweep:
    """A made-up run of MoE-nD's table 2 at two of its budgets."""
    wanted: list[dict[str, Any]] = [{"method": "full", "budget": None}]
    wanted += [{"method": m, "budget": b} for m in ("1d", "2d_uniform", "2d", "2d_hetero") for b in ("512t", "1024t")]
    for cell in wanted:
        cell |= {"benchmark": "longbench_moend", "protocol": "paper"}
    wanted[1] |= {"state": "run"}
    tasks = ("narrativeqa", "hotpotqa", "trec", "passage_retrieval_en")
    build(store, wanted, name="t2", tasks=tasks, **{"model": MODEL, **rest})
    return load(store)


def load(store: Store) -> Sweep:
    manifest = store.read_manifest("latest")
    found = rows(store, manifest)
    return Sweep(store, manifest, found, compared(store, found))


def at(sweep: Sweep, id: str, **fields: Any) -> tuple[Fact, beside.Ours | None]:
    """The one published number of a table with these fields, and ours."""
    found = [
        (c.block.fact(i, j), c.ours[i][j])
        for c in comparisons(sweep)
        if c.table.id == id
        for i in range(len(c.block.rows))
        for j in range(len(c.block.columns))
        if all(c.block.fact(i, j).fields.get(k) == v for k, v in fields.items())
    ]
    assert len(found) == 1, found
    return found[0]


def test_ours_stands_beside_theirs(tmp_path: Path) -> None:
    sweep = table2(Store(tmp_path))
    row = next(r for r in sweep.rows if r.info["method"] == "2d_hetero" and r.payload["budget"] == "512t")
    assert row.result is not None
    fact, ours = at(sweep, "table2", method="2d_hetero", budget="512t", quantity="score")
    assert fact.value == 12.0 and ours is not None
    assert ours.value == pytest.approx(100 * row.result["score"]) and ours.n == 80
    assert ours.low is not None and ours.high is not None and ours.low <= ours.value <= ours.high
    _, memory = at(sweep, "table2", method="2d_hetero", budget="512t", quantity="memory")
    assert memory is not None and memory.value == pytest.approx(row.result["eq1_bytes"] / 2**20)
    _, task = at(sweep, "table3", method="2d_hetero", budget="512t", task="trec")
    assert task is not None and task.value == pytest.approx(100 * row.result["tasks"]["trec"]["score"]) and task.n == 20
    _, absent = at(sweep, "table2", method="1d", budget="4096t", quantity="score")
    assert absent is None


def test_memory_is_halved_where_the_paper_counts_twice_the_heads(tmp_path: Path) -> None:
    """8 KV heads in the paper, 4 in the model's configuration: 136 MiB there are 68."""
    (tmp_path / "a").mkdir()
    memory = [c for c in comparisons(table2(Store(tmp_path / "a"))) if c.block.fixed["quantity"] == "memory"]
    assert memory and all(c.halved == 0.5 for c in memory)
    assert report.tables.published(136, 0.5) == "136 (68)"
    same = table2(Store(tmp_path / "b"), arch=ARCH | {"kv_heads": 8})
    assert all(c.halved is None for c in comparisons(same))
    assert report.tables.published(136, None) == "136"
    assert report.tables.published(29.99, None) == "29.99" and report.tables.published(12.0, None) == "12.0"


def test_an_incomplete_cell_has_no_number(tmp_path: Path) -> None:
    sweep = table2(Store(tmp_path))
    _, ours = at(sweep, "table2", method="1d", budget="512t", quantity="score")
    assert ours is not None and ours.value is None and ours.state == "incomplete: 1 of 80 records"


def test_differences_average_budgets_within_examples(tmp_path: Path) -> None:
    """evict over both budgets: the mean over examples of the mean of their two differences."""
    sweep = table2(Store(tmp_path))
    _, ours = at(sweep, "table5", benchmark="longbench_moend", ablation="evict")
    assert ours is not None and ours.value is not None and ours.low is not None
    differences = []
    for b in ("512t", "1024t"):
        x, y = ({r.payload["budget"]: r for r in sweep.rows if r.info["method"] == m}[b] for m in ("2d_hetero", "2d"))
        assert x.result is not None and y.result is not None
        differences.append(x.result["score"] - y.result["score"])
    assert ours.value == pytest.approx(100 * fmean(differences)) and ours.n == 80


def test_categories_are_means_of_tasks(tmp_path: Path) -> None:
    store = Store(tmp_path)
    tasks = [t for ts in categories().values() for t in ts]
    payload = {"method": {"allocator": {"signal": "output", "r": 1.5}}}
    cell = {"method": "RippleKV", "budget": "0.1r", "benchmark": "longbench_en", "payload": payload}
    build(store, [cell], model="llama3.1_8b_instruct", tasks=tasks, examples=5)
    sweep = load(store)
    _, ours = at(sweep, "table5", label="r = 1.5", category="Code")
    records = [r for r in sweep.records(sweep.rows[0]) if r["task"] in ("lcc", "repobench-p")]
    mine = statistics.summarise(records)
    assert ours is not None and ours.value == pytest.approx(100 * mine["score"]) and ours.n == 10
    assert {c.table.id for c in comparisons(sweep)} == {"table2", "table4", "table5"}
    assert all(c.block.fixed.get("label") in (None, "whole", "r = 1.5") for c in comparisons(sweep))


def test_another_model_has_nothing_beside_it_but_a_line(tmp_path: Path) -> None:
    store = Store(tmp_path)
    table2(store, model="smollm2_135m")
    sweep = load(store)
    assert comparisons(sweep) == []
    assert {t.id for t in beside.headlines(sweep, beside.comparisons(sweep))} == {"table2", "table5"}
    assert report.main([f"paths.store={tmp_path}"]) == 3
    folder = store.report("t2")
    text = (folder / "index.html").read_text(encoding="utf-8")
    assert "For orientation" in text and "2d_hetero 12.0" in text and "Italic columns" not in text
    assert not (folder / "published.csv").exists()


def test_files_keep_theirs_in_columns_of_their_own(tmp_path: Path) -> None:
    store = Store(tmp_path)
    table2(store)
    assert report.main([f"paths.store={tmp_path}"]) == 3
    folder = store.report("t2")
    with (folder / "published.csv").open(newline="") as f:
        lines = list(csv.DictReader(f))
    halved = [x for x in lines if "quantity=memory" in x["of"]]
    assert halved and all(float(x["published_at_our_kv_heads"]) == float(x["published"]) / 2 for x in halved)
    assert "published" not in (folder / "table.csv").read_text().splitlines()[0]
    assert "512, published" in (folder / "table.md").read_text()
    assert r"\textit{12.0}" in (folder / "tables.tex").read_text()
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert 'class="num theirs"' in page
    assert json.dumps(136) in page
