"""Tables: every score and difference with its interval, and nothing averaged that is not whole."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from moend.errors import UserError
from pipelines import report, results
from pipelines.store import Store
from tests.pipelines.conftest import Runs


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def tables(runs: Runs, code: int) -> tuple[list[dict[str, str]], list[dict[str, str]], str]:
    """table.csv, deltas.csv and table.md, made again from the files."""
    assert report.main([f"paths.store={runs.store}", "sweep=latest"]) == code
    (folder,) = (runs.store / "reports").iterdir()
    return read(folder / "table.csv"), read(folder / "deltas.csv"), (folder / "table.md").read_text(encoding="utf-8")


def take_away(runs: Runs, key: str, left: int) -> None:
    """As if the cell had been interrupted after so many records."""
    folder = Store(runs.store).cell(key).folder
    (folder / "result.json").unlink()
    (path,) = (folder / "records").glob("*.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:left]))


def test_every_score_and_difference_has_an_interval(runs: Runs) -> None:
    assert runs("method=full,1d,2d,2d_hetero,SnapKV", "budget=10%", "generation.samples=2", "-m") == 0
    rows, deltas, text = tables(runs, 0)
    assert len(rows) == 5
    for row in rows:
        assert float(row["low"]) <= float(row["score"]) <= float(row["high"])
        assert float(row["low"]) < float(row["high"])
        assert row["samples"] == "2" and 0 <= float(row["extraction_rate"]) <= 1
        assert f"{float(row['score']):.3f} [{float(row['low']):.3f}, {float(row['high']):.3f}]" in text
    assert len(deltas) == 10  # all pairs
    for d in deltas:
        assert d["low"] == d["high"] == "" or float(d["low"]) <= float(d["score"]) <= float(d["high"])
        assert 0 <= float(d["p"]) <= float(d["p_holm"]) <= 1
    assert "no interval" in text or all(d["low"] for d in deltas if d["ablation"])


def test_an_incomplete_cell_is_shown_and_never_averaged(runs: Runs) -> None:
    assert runs("method=1d,2d,2d_hetero", "budget=10%", "-m") == 0
    before, deltas, _ = tables(runs, 0)
    assert len(deltas) == 3
    gone = next(row for row in before if row["method"] == "2d")
    take_away(runs, gone["key"], 4)
    runs.capsys.readouterr()
    rows, deltas, text = tables(runs, 3)
    (row,) = (r for r in rows if r["method"] == "2d")
    assert row["state"] == "incomplete: 4 of 6 records"
    assert all(row[name] == "" for name in ("score", "low", "high", "n", "answer_nll", "resident_bytes"))
    assert [r for r in rows if r["method"] != "2d"] == [r for r in before if r["method"] != "2d"]
    assert {(d["method"], d["minus"]) for d in deltas} == {("2d_hetero", "1d")}
    assert "incomplete: 4 of 6 records" in text
    assert "1 of 3 cells are incomplete" in runs.capsys.readouterr().out


def test_no_result_is_made_of_a_part() -> None:
    cell: dict[str, Any] = {"key": "k", "payload": {}, "info": {"n_expected": 6}}
    with pytest.raises(UserError, match=r"has 0 of 6 records"):
        results.aggregate(cell, [])


def test_a_sweep_that_is_not_whole_is_not_said_to_have_dropped_nothing() -> None:
    uncompressed = {"benchmark": "recall", "compressed": False, "fused": False, "higher_is_better": True}
    done = report.Row("a", {}, {}, "done", uncompressed | {"budget_protocol": "matched"})
    assert "nothing was dropped" in "".join(report.notes([done]))
    assert not report.notes([done, report.Row("b", {}, {}, "incomplete", None)])
