"""The verb export: from the files of a calibration to the files of other tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moend import paths
from moend.interop.export import read_kvpress, read_triattention
from moend.plan import LayerPlan, RoutingPlan
from pipelines.results import export

PLAN = RoutingPlan("m", "r", 8, "25%", "matched", "none", None, None, (LayerPlan(0.25, 2), LayerPlan(1.0, 8)))


@pytest.fixture
def plan(tmp_path: Path) -> str:
    (tmp_path / "plan.json").write_text(PLAN.to_json())
    return str(tmp_path / "plan.json")


def test_a_plan_is_shown_or_written(plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main(["plan", plan, "to=kvpress"]) == 0
    shown = capsys.readouterr().out
    assert export.main(["plan", plan, "to=kvpress", f"out={tmp_path / 'k.json'}"]) == 0
    assert (tmp_path / "k.json").read_text() == shown and read_kvpress(shown) == (0.75, 0.0)
    assert export.main(["plan", plan, "to=kvpress", "tokens=4"]) == 0
    assert json.loads(capsys.readouterr().out.partition("\n")[2])["compression_ratios"] == [0.5, 0.0]
    assert export.main(["plan", plan, "to=vllm", "lossy=true"]) == 0
    assert capsys.readouterr().out == "--kv-cache-dtype auto\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "say what"),
        (["plan", "to=kvpress"], "say what"),
        (["plan", "nowhere.json", "to=kvpress"], "nowhere.json cannot be read"),
        (["plan", "PLAN", "to=kvpres"], "Did you mean 'kvpress'?"),
        (["plan", "PLAN", "to=kvpress", "tokens=many"], "got 'many'"),
        (["plan", "PLAN", "to=trtllm"], "layers 0 keep a part of their tokens. lossy=true"),
        (["plan", "PLAN", "pickle=true"], "unknown argument 'pickle'"),
        (["statistics", "FOLDER", "to=vllm", "out=x"], "Choices: triattention"),
        (["statistics", "FOLDER"], "out=FILE is missing"),
        (["statistics", "FOLDER", "out=x"], "there is no calibration in"),
    ],
)
def test_a_mistake_is_one_line(
    args: list[str], said: str, plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = {"PLAN": plan, "FOLDER": str(tmp_path)}
    assert export.main([named.get(a, a) for a in args]) == 2
    line = capsys.readouterr().err
    assert said in line and line.count("\n") == 1


def test_the_shipped_statistics_go_out_and_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shipped = Path(paths.__file__).parent / "calibration" / "shipped"
    (folder,) = [p.parent for p in shipped.rglob("artefact.json") if json.loads(p.read_text())["kind"] == "queries"]
    out = tmp_path / "stats.pt"
    assert export.main(["statistics", str(folder), f"out={out}"]) == 2
    assert "pickle=true" in capsys.readouterr().err and not out.exists()
    assert export.main(["statistics", str(folder), f"out={out}", "pickle=true"]) == 0
    assert read_triattention(out).mean_abs.shape == (30, 9, 32)
    assert torch.load(out, weights_only=True)["metadata"]["inv_freq"].shape == (32,)
