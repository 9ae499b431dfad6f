"""Tables: every score and difference with its interval, and nothing averaged that is not whole."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moend.errors import UserError
from pipelines.reporting import report
from pipelines.reporting.tables import diagnosed, remarks
from pipelines.results import aggregate as results
from pipelines.results import sweep
from pipelines.store.cells import Store
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


def test_fields_of_a_method_are_part_of_its_name_and_others_keep_cells_apart(runs: Runs) -> None:
    grid = "hydra.sweeper.grids=[{method:SnapKV},{method:RippleKV,method.allocator.signal:'output,local'}]"
    assert runs(grid, "budget=10%", "seed=0,1", "-m") == 0
    rows, deltas, text = tables(runs, 0)
    assert "| RippleKV (signal=local) | 10% seed=1 |" in text
    assert {r["variant"] for r in rows if r["method"] == "RippleKV"} == {
        f"signal={s}, seed={n}" for s in ("output", "local") for n in (0, 1)
    }
    assert {(d["variant"], d["method"], d["minus"]) for d in deltas} == {
        (f"seed={n}", a, b)
        for n in (0, 1)
        for a, b in [
            ("SnapKV", "RippleKV (signal=output)"),
            ("SnapKV", "RippleKV (signal=local)"),
            ("RippleKV (signal=output)", "RippleKV (signal=local)"),
        ]
    }


def test_what_methods_did_is_averaged_and_shown() -> None:
    said = [
        {"gamma": 0.5, "anchors": 32, "replaced": 0.25, "note": "anchors only"},
        {"gamma": 1.0, "anchors": 31, "replaced": 0.75},
    ]
    assert results._diagnostics([{"diagnostics": d} for d in said]) == {
        "gamma": 0.75,
        "anchors": 31.5,
        "replaced": 0.5,
        "notes": {"anchors only": 1},
    }
    heads = [{"diagnostics": {"head_tokens": x}} for x in ([[1, 2], [3, 4]], [[3, 2], [5, 4]])]
    assert results._diagnostics(heads) == {"head_tokens": [[2, 2], [4, 4]]}
    assert results._diagnostics([{"diagnostics": {}}, {}]) == {}
    result: dict[str, Any] = {
        "n_records": 2,
        "diagnostics": results._diagnostics([{"diagnostics": d} for d in said]),
        "entries_per_head": {"effective_keep": [0.1, 0.1]},
    }

    def of(row: report.Row) -> sweep.Sweep:
        return sweep.Sweep(Store(Path("nowhere")), {"cells": []}, [row], ())

    info, payload = {"benchmark": "recall", "method": "MoEZip"}, {"question_visible": True, "budget": "0.1r"}
    row = report.Row("a", info, payload | {"budget_protocol": "matched"}, "done", result, own="mode=query")
    assert remarks(result) == ["anchors only in 1 of 2"]
    assert remarks(result | {"n_records": 1}) == ["anchors only"]
    shown = ["recall", "visible", "MoEZip (mode=query)", "10%", "0.75", "32", "0.500", "", "", "", ""]
    assert diagnosed(of(row)) == [shown]
    threshold = result | {"diagnostics": {"head_tokens": [[1, 1], [9, 9]]}}
    threshold["entries_per_head"] = {"effective_keep": [0.1, 0.9]}
    (line,) = diagnosed(of(report.Row("a", info, payload | {"budget_protocol": "matched"}, "done", threshold)))
    assert line[-1] == "10% of layer 0 to 90% of layer 1"
    assert diagnosed(of(report.Row("a", {}, {}, "incomplete", None))) == []


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_table_is_whole_at_any_width(runs: Runs, width: int) -> None:
    assert runs("method=full,1d,2d,2d_uniform,2d_hetero", "budget=10%,25%", "benchmark=niah,continuation", "-m") == 0
    to = Console(width=width, file=io.StringIO(), markup=False)
    found = report.show(Store(runs.store), "latest", to)
    report.show_deltas(report.compared(Store(runs.store), found), to)
    assert isinstance(to.file, io.StringIO)
    text = to.file.getvalue()
    assert "…" not in text
    table = [line for line in text.splitlines() if "visible" in line or "niah" in line or "continuation" in line]
    assert all(len(line.rstrip()) <= width for line in table)
    for row in found:
        assert row.result is not None
        assert f"{row.result['score']:.3f} [{row.result['score_low']:.3f}, {row.result['score_high']:.3f}]" in text
    assert ("the terminal has no room for" in text) == (width < 150)
    assert width < 150 or "tokens/s" in text


def test_hashes_name_a_variant_only_where_nothing_else_does() -> None:
    def row(key: str, length: int, data: str, ripple: str) -> report.Row:
        facts = {"benchmark": {"length": length, "data": data}}
        payload = {"budget": "0.1r", "budget_protocol": "matched", "question_visible": True, "facts": facts}
        info = {"model": "m", "benchmark": "recall", "method": "RippleKV"}
        return report.Row(key, info, {**payload, "calibrations": {"ripple": ripple}}, "done", None)

    lengths = sweep._variants([row("a", 512, "d1", "r"), row("b", 1024, "d2", "r")])
    assert [(r.variant, r.own) for r in lengths] == [("benchmark.length=512", ""), ("benchmark.length=1024", "")]
    assert [r.own for r in sweep._variants([row("a", 512, "d", "r1"), row("b", 512, "d", "r2")])] == [
        "calibrations.ripple=r1",
        "calibrations.ripple=r2",
    ]
    mixed = sweep._variants([row("a", 512, "d1", "r1"), row("b", 1024, "d2", "r1"), row("c", 512, "d1", "r2")])
    assert len({(r.variant, r.own) for r in mixed}) == 3
