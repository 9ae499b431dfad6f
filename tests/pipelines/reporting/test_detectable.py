"""The smallest difference that a table's examples show, and where it is said."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moend.statistics import Difference
from perf.report import build
from pipelines.reporting import detectable, latex, tables
from pipelines.results.deltas import Delta
from pipelines.results.sweep import Sweep, compared, rows
from pipelines.store.cells import Store


def delta(se: float | None, n: int = 100, unit: str = "fraction") -> Delta:
    score = Difference(0.1, None, None, 1.0, n, "sign flips", se)
    return Delta(("m", "b", "visible", "", "10%"), "1d", "2d", "", score, None, unit=unit)


def test_by_hand() -> None:
    assert detectable.smallest(delta(0.02)) == pytest.approx(2.801585 * 0.02)
    assert detectable.smallest(delta(0.0)) == pytest.approx(7.848879 / 107.848879)  # no pair differs: the best case
    assert detectable.smallest(delta(0.0, unit="nats")) is None
    assert detectable.shown(0.0528, "fraction", named=True) == "5.3 points"
    assert detectable.shown(0.0528, "nats", named=True) == "0.0528 nats"


def test_a_sentence_for_each_kind_of_table() -> None:
    said = "Smallest difference that these examples show at 80 % power: "
    assert detectable.sentence([delta(x) for x in (0.01, 0.03, 0.02)], 100, "fraction") == (
        said + "2.8 to 8.4 points, median 5.6."
    )
    assert detectable.sentence([delta(0.02)], 100, "fraction") == said + "5.6 points."
    assert detectable.sentence([], 100, "fraction") == said + "7.3 at best, 19.1 points at worst (n = 100)."
    assert detectable.sentence([], 100, "nats") == said + "not known from one cell."


def test_every_table_of_scores_and_differences_says_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    wanted: list[dict[str, Any]] = [{"method": "full", "budget": None, "benchmark": "text"}]
    wanted += [{"method": m, "budget": "0.1r", "benchmark": "text"} for m in ("2d", "2d_hetero")]
    build(store, wanted, examples=40)
    manifest = store.read_manifest("latest")
    found = rows(store, manifest)
    sweep = Sweep(store, manifest, found, compared(store, found))
    (pivot,) = tables.pivots(found)
    said = pivot.detectable(sweep.differences)
    assert "points, median" in said
    assert said in tables.markdown(sweep, []) and latex.tex(said) in latex.latex(sweep, [])
    scores = {r.method: np.array([x["score"] for x in sweep.records(r)]) for r in found}
    for line in csv.DictReader(io.StringIO(tables.deltas_csv(sweep.differences))):
        difference = scores[line["method"]] - scores[line["minus"]]
        error = difference.std(ddof=1) / np.sqrt(40)
        assert float(line["se"]) == pytest.approx(error)
        assert float(line["smallest"]) == pytest.approx(2.801585 * error)
