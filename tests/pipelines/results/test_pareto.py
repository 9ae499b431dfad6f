"""Fronts of score and bytes: against loops, and the choice against the race it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moend.statistics import examples
from perf.report import build
from pipelines.reporting import pareto as tables
from pipelines.reporting.figures import pareto as figure
from pipelines.results import pareto
from pipelines.results.sweep import Sweep, compared, rows
from pipelines.store.cells import Store


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=12))
def test_the_frontier_by_loops(cells: list[tuple[int, int]]) -> None:
    naive = []
    for held, score in cells:
        beaten = False
        for h, s in cells:
            if h <= held and s >= score and (h < held or s > score):
                beaten = True
        naive.append(not beaten)
    assert pareto.frontier([float(h) for h, _ in cells], [float(s) for _, s in cells]) == naive


def cell(scores: list[float], contexts: list[str] | None = None, task: str = "t") -> Any:
    return examples(
        {"task": task, "id": str(i), "draw": 0, "score": s, "context_id": contexts[i] if contexts else None}
        for i, s in enumerate(scores)
    )


def test_the_smallest_cache_that_surely_loses_little_is_chosen() -> None:
    n = 400
    full, same, worse = cell([1.0] * n), cell([1.0] * n), cell([float(i % 3 > 0) for i in range(n)])
    found = pareto.decide({"large": 3, "good": 2, "bad": 1}, full, {"large": same, "good": same, "bad": worse})
    assert found.answer == "good" and set(found.ruled_out) == {"bad"}
    few = pareto.decide({"good": 2}, cell([1.0] * 20), {"good": cell([1.0] * 20)})
    assert few.answer is None and not few.decided and few.more is not None and 20 < 20 + few.more < 200


def test_losses_have_the_sign_of_the_metric() -> None:
    n = 300
    zeros, ones = cell([0.0] * n), cell([1.0] * n)
    assert pareto.decide({"a": 1}, zeros, {"a": ones}).answer == "a"
    assert pareto.decide({"a": 1}, zeros, {"a": ones}, sign=-1).ruled_out


def test_examples_of_one_context_are_one_example() -> None:
    """A thousand questions of ten contexts are ten."""
    contexts = [str(i % 10) for i in range(1000)]
    alike = cell([1.0] * 1000, contexts)
    assert pareto.decide({"a": 1}, alike, {"a": alike}).answer is None
    assert pareto.decide({"a": 1}, cell([1.0] * 1000), {"a": cell([1.0] * 1000)}).answer == "a"


def sweep(folder: Path, **extra: Any) -> Sweep:
    store = Store(folder)
    wanted: list[dict[str, Any]] = [{"method": "full", "budget": None, "benchmark": "text", "chance": 1.0, **extra}]
    for method, chance in (("1d", 0.5), ("2d", 1.0)):
        wanted += [
            {"method": method, "budget": b, "benchmark": "text", "chance": chance, **extra} for b in ("0.1r", "0.5r")
        ]
    build(store, wanted, examples=250)
    manifest = store.read_manifest("latest")
    found = rows(store, manifest)
    return Sweep(store, manifest, found, compared(store, found))


def test_a_sweep_has_its_front_its_table_and_its_figure(tmp_path: Path) -> None:
    found = sweep(tmp_path, alone=True)
    (front,) = found.fronts
    assert [s.held for s in front.spots] == sorted(s.held for s in front.spots) and len(front.spots) == 5
    assert [(s.row.method, s.row.columns[3]) for s in front.spots if s.chosen] == [("2d", "10%")]
    for s in front.spots:
        if s.loss is not None:
            scores = [np.mean([r["score"] for r in found.records(row)]) for row in (front.spots[-1].row, s.row)]
            assert s.loss.value == pytest.approx(scores[0] - scores[1])
            assert s.loss.low is None or (s.loss.high is not None and s.loss.low <= s.loss.value <= s.loss.high)
    assert "Chosen: 2d 10%, the smallest cache that surely loses at most 5 points" in front.answer
    text = tables.markdown([front])
    assert front.answer in text and "| 2d | 10% |" in text and text.count("chosen") == 1
    (picture,) = figure.pictures(found)
    assert picture.draw(tmp_path / "x.png") and (tmp_path / "x.png").stat().st_size > 5000
    assert len(figure.speeds(front, found.records)) == 5


def test_a_likelihood_is_not_chosen_for(tmp_path: Path) -> None:
    (front,) = sweep(tmp_path, lower=True).fronts
    assert front.decision is None and "nats have no bounds" in front.answer
    best = min(s.score for s in front.spots)
    assert front.frontier[-1].score == best
