"""Answers that flip between the full cache and a cell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf.report import build
from pipelines.reporting import report
from pipelines.results.flips import FLIP, against_full, flips
from pipelines.results.sweep import Sweep, rows
from pipelines.store.cells import Store


def record(i: int, score: float, draw: int = 0) -> dict[str, Any]:
    return {"task": "t", "id": str(i), "draw": draw, "score": score, "new_tokens": 4, "text": f"{i}"}


def test_by_hand():
    full = [record(0, 1), record(1, 0), record(2, 1), record(3, 0.6), record(4, 0.9)]
    cell = [record(4, 0.5), record(3, 0.1), record(2, 1), record(1, 1), record(0, 0)]
    lost, won = flips(full, cell)
    assert [f.cell["id"] for f in lost] == ["3", "0"]  # in the order of the cell; 0.9 to 0.5 is none
    assert [f.cell["id"] for f in won] == ["1"]
    assert all(f.full["id"] == f.cell["id"] for f in (*lost, *won))


def test_draws_are_told_apart_and_other_examples_refused():
    lost, won = flips([record(0, 1), record(0, 0, 1)], [record(0, 1), record(0, 1, 1)])
    assert not lost and [f.cell["draw"] for f in won] == [1]
    for other in ([record(0, 1)], [record(0, 1), record(1, 1)], [record(0, 1), record(0, 1)]):
        with pytest.raises(ValueError, match="not the same examples"):
            flips([record(0, 1), record(0, 0, 1)], other)


@given(st.lists(st.tuples(st.sampled_from((0.0, 1.0)), st.sampled_from((0.0, 1.0)))))
def test_of_zeros_and_ones_flips_are_the_difference_of_the_sums(scores: list[tuple[float, float]]):
    full = [record(i, a) for i, (a, _) in enumerate(scores)]
    cell = [record(i, b) for i, (_, b) in enumerate(scores)]
    lost, won = flips(full, cell)
    assert len(won) - len(lost) == sum(b - a for a, b in scores)
    assert len(won) + len(lost) == sum(abs(b - a) >= FLIP for a, b in scores)
    assert flips(cell, full)[0] == tuple(type(f)(f.cell, f.full) for f in won)


CELLS = [
    {"method": "full", "budget": None, "benchmark": "text"},
    {"method": "SnapKV", "budget": "0.1r", "benchmark": "text"},
    {"method": "1d", "budget": "0.1r", "benchmark": "text", "state": "run"},
    {"method": "SnapKV", "budget": "0.1r", "benchmark": "alone"},
    {"method": "full", "budget": None, "benchmark": "nats", "lower": True},
    {"method": "SnapKV", "budget": "0.1r", "benchmark": "nats", "lower": True},
]


def edited(store: Store, key: str, change: dict[str, Any]) -> None:
    """Change every record of a cell."""
    path = store.cell(key).folder / "records" / "0-of-1.jsonl"
    lines = [json.loads(x) | change for x in path.read_text(encoding="utf-8").splitlines()]
    path.write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")


def test_only_complete_cells_with_a_full_cache_and_right_answers_stand_beside_it(tmp_path: Path):
    store = Store(tmp_path)
    cells = build(store, CELLS)
    edited(store, cells[1]["key"], {"new_tokens": 11})
    manifest = store.read_manifest("latest")
    (found,) = against_full(Sweep(store, manifest, rows(store, manifest), ()))
    assert (found.row.key, found.full.key, found.answers) == (cells[1]["key"], cells[0]["key"], 20)
    full, cell = ({r["id"]: r["score"] for r in store.cell(c["key"]).records()} for c in (cells[0], cells[1]))
    assert {f.cell["id"] for f in found.lost} == {i for i in full if full[i] > cell[i]}
    assert {f.cell["id"] for f in found.won} == {i for i in full if full[i] < cell[i]}
    assert found.lost and found.length.value == 3 and found.length.low is None


@pytest.mark.usefixtures("undrawn")
def test_the_page_has_the_texts_escaped_and_needs_nothing_else(tmp_path: Path):
    store = Store(tmp_path)
    cells = build(store, CELLS)
    edited(store, cells[1]["key"], {"text": "</pre><script>alert(1)</script>" + "y" * 5000, "gold": ["<b>gold</b>"]})
    pages = report.write(store, "latest", [])
    text = (store.report("made_up") / "answers.html").read_text(encoding="utf-8")
    assert pages[1].name == "answers.html"
    assert "<script" not in text and "&lt;/pre&gt;&lt;script&gt;alert(1)" in text and "&lt;b&gt;gold" in text
    assert "src=" not in text and "url(" not in text and "@import" not in text
    assert "characters left out" in text and "y" * 2000 not in text
    assert "1 of 6 cells are not complete" in text
    (store.cell(cells[0]["key"]).folder / "result.json").unlink()
    report.write(store, "latest", [])
    assert not (store.report("made_up") / "answers.html").exists()  # nothing of an earlier report stays
