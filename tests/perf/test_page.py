"""The page of figures, from made-up measurements."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from perf import __main__ as program
from perf import page


def point(value: float) -> dict[str, float]:
    return {"median": value, "low": value - 0.1, "high": value + 0.1}


def measured(folder: Path) -> dict[str, Any]:
    """What decode and report would leave."""
    cells = ("DynamicCache sdpa", "DynamicCache eager", "floor", "full", "SnapKV 10 %", "2d_hetero 1/14", "K8/V4")
    ratio = {"SnapKV 10 %": 2.3, "2d_hetero 1/14": 1.9, "K8/V4": 1.2}
    at = {
        "ms": {c: point(50) for c in cells},
        **{
            k: {c: point(ratio.get(c, 1.0)) for c in cells}
            for k in ("times_dynamic", "times_repeated", "times_eager", "times_own_full")
        },
        "held_of_full": dict.fromkeys(cells, 0.1),
        "held": dict.fromkeys(cells, 100_000_000),
        "skipped": {},
    }
    decode = {"rounds": 3, "steps": 40, "load": 0.5, "bandwidth": 10.0, "float32": {"1000": at, "8000": at}}
    (folder / "decode.json").write_text(json.dumps(decode))
    (folder / "aims.json").write_text(json.dumps(decode))
    report = {"cells": 500, "examples": 50, "compared": 2.0, "write": 40.5, "cpu": 42.0, "files": 9, "page_mib": 3.1}
    (folder / "report.json").write_text(json.dumps(report))
    figures = {"ms_median": 1.5, "ms_max": 3.0, "gap_max": 0.0, "excess_mean": 0.001, "excess_max": 0.02}
    (folder / "solver.json").write_text(json.dumps({"layers": 28, "eq1": {"greedy": figures}}))
    return {"aims": decode, "report": report}


def test_aims_are_judged_and_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "HISTORY", tmp_path / "history.jsonl")
    measured(tmp_path)
    page.write(tmp_path, tmp_path / "performance.md")
    text = (tmp_path / "performance.md").read_text()
    lines = [x for x in text.splitlines() if x.startswith("| float32 |")]
    # 50 ms the floor, 100 MB at 10 GB/s 10 ms
    assert [x.rsplit("|", 2)[1].strip() for x in lines] == [f"{x}; at most 0.83" for x in ("met", "missed", "met")]
    assert "| eq1 | greedy | 1.5 | 3 | 2.00% |" in text
    assert "The report of 500 cells x 50 samples: 42.5 s" in text
    assert "Not measured: fused, memory," in text and "## History" not in text
    assert (tmp_path / "figures" / "decode.png").stat().st_size > 5000


def test_the_history_grows_by_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "HISTORY", tmp_path / "history.jsonl")
    data = measured(tmp_path)
    kept = dict(page.ratios(data))
    assert kept["decode float32 SnapKV 10 %, times DynamicCache"] == 2.3 and kept["report of 500 cells, s"] == 42.5
    page.remember(tmp_path, ["report"])
    page.remember(tmp_path, ["aims", "report"])
    entries = [json.loads(x) for x in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [set(e["ratios"]) for e in entries] == [{"report of 500 cells, s"}, set(kept)]
    page.write(tmp_path, tmp_path / "performance.md")
    text = (tmp_path / "performance.md").read_text()
    assert "| report of 500 cells, s | 42.5 | 42.5 |" in text
    assert "| decode float32 SnapKV 10 %, times DynamicCache |  | 2.3 |" in text


@pytest.mark.slow
def test_trying_out_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    history, published = page.HISTORY.read_bytes(), Path("docs/performance.md").read_bytes()
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["perf", "--only", "solver", "--quick", "--out", str(out)])
    assert program.main() == 0
    assert f"page: {out / 'performance.md'}" in capsys.readouterr().err
    assert "| eq1 | exact |" in (out / "performance.md").read_text()
    assert (page.HISTORY.read_bytes(), Path("docs/performance.md").read_bytes()) == (history, published)
    monkeypatch.setattr(sys, "argv", ["perf", "--quick", "--publish"])
    with pytest.raises(SystemExit):
        program.main()
    assert "it is not published" in capsys.readouterr().err
