"""A quantiser that does not work gets no place in a table."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from moend.cache import layer_kv as row
from pipelines import run
from pipelines.reporting import report

SMALL = [
    "model=recall_moe", "benchmark=recall", "benchmark.limit=2", "benchmark.tasks=[num]", "tracking=none", "budget=30%",
    "calibration.agreement.examples=2",
]  # fmt: skip


def table(folder: Path) -> dict[str, dict[str, str]]:
    (path,) = folder.glob("reports/*/table.csv")
    with path.open() as file:
        return {r["method"]: r for r in csv.DictReader(file)}


@pytest.mark.req(20)
@pytest.mark.req(22)
@pytest.mark.usefixtures("undrawn")
def test_agreement_is_measured_recorded_and_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [*SMALL, "method=full,SnapKV,MiniKV", f"paths.store={tmp_path}", "-m"]
    assert run.main([*args, "dry_run=true"]) == 0
    assert "calibrations to compute: agreement" in capsys.readouterr().out
    assert run.main(args) == 0
    rows = table(tmp_path)
    assert {r["state"] for r in rows.values()} == {"done"}
    results = [json.loads(p.read_text()) for p in tmp_path.glob("cells/*/result.json")]
    said = next(r["settings"] for r in results if r["method"] == "SnapKV")
    assert said["scorer"] == {"name": "snapkv", "window": 32, "pool": "avg", "kernel": 5}
    assert (said["n_sink"], said["recent"], said["schedule"]) == (0, 32, "prompt")
    (path,) = (tmp_path / "calibration").glob("*/artefact.json")  # full and SnapKV quantise nothing
    info = json.loads(path.read_text())["info"]
    assert info["tokens"] == 2 * 64 and set(info["agreement"]) == {"16", "8"}
    assert min(info["agreement"].values()) >= 0.98

    # Where the same command runs on a quantiser that is wrong, the cell's records stand, but no table shows its score.
    broken = tmp_path / "broken"
    quantise = row.quantise_k

    def wrong(*given: Any) -> Any:
        packed = quantise(*given)
        packed.step.mul_(3)
        return packed

    monkeypatch.setattr(row, "quantise_k", wrong)
    capsys.readouterr()
    assert run.main([*args[:-2], f"paths.store={broken}", "-m"]) == 0
    rows = table(broken)
    assert rows["SnapKV"]["state"] == rows["full"]["state"] == "done"
    assert rows["MiniKV"]["score"] == ""
    assert rows["MiniKV"]["state"].startswith("not tabled: with every token kept at 8 bit, 0.")
    assert rows["MiniKV"]["state"].endswith("less than 0.98: its quantiser does not work on this model")
    assert "not tabled" in capsys.readouterr().out
    (deltas,) = broken.glob("reports/*/deltas.csv")
    assert "MiniKV" not in deltas.read_text()

    # An artefact that is gone cannot vouch for anybody.
    path.unlink()
    assert report.main([f"paths.store={tmp_path}"]) == 0
    rows = table(tmp_path)
    assert rows["MiniKV"]["state"].startswith("not tabled: its agreement calibration is not in the store")
