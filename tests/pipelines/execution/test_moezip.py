"""KVZip and MoEZip as commands: what works, and what says why it does not while the other cells go on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipelines import calibrate, run

pytestmark = pytest.mark.usefixtures("undrawn")


def records(store: Path) -> dict[tuple[str, str | None], list[dict[str, Any]]]:
    found = {}
    for path in store.glob("cells/*/result.json"):
        method = json.loads((path.parent / "payload.json").read_text())["payload"]["method"]
        lines = (line for file in (path.parent / "records").glob("*.jsonl") for line in file.read_text().splitlines())
        found[method["name"], method["scorer"].get("mode")] = [json.loads(line) for line in lines]
    return found


def start(store: Path, *args: str) -> int:
    point = ["model=recall_moe", "benchmark=recall", "benchmark.tasks=[both]", "benchmark.limit=1", "tracking=none"]
    return run.main([f"paths.store={store}", *point, *args, "-m"])


@pytest.mark.req(5)
def test_every_sample_records_what_moezip_did(tmp_path, capsys):
    code = start(tmp_path, "method=MoEZip,KVZip,KVZip_uniform,SnapKV", "budget=20%", "engine.routing_flips=true")
    assert code == 0, capsys.readouterr()
    found = records(tmp_path)
    (moezip,) = found["MoEZip", "query"]
    assert set(moezip["diagnostics"]) == {"gamma", "anchors", "replaced", "routing_flips"}
    (kvzip,) = found["KVZip", None]
    assert len(kvzip["diagnostics"]["head_tokens"]) == 4
    assert kvzip["resident_bytes"] <= 0.2 * kvzip["full_bytes"]
    assert set(found["SnapKV", None][0]["diagnostics"]) == {"routing_flips"}
    out = capsys.readouterr().out
    assert "what methods did" in out
    cells = {json.loads(p.read_text())["method"]: p.parent for p in tmp_path.glob("cells/*/result.json")}
    held = json.loads((cells["KVZip"] / "result.json").read_text())["diagnostics"]["head_tokens"]
    assert held == [[float(n) for n in heads] for heads in kvzip["diagnostics"]["head_tokens"]]  # one record
    assert not (cells["KVZip"] / "plan.json").exists()  # its sample's scores decide
    assert (cells["KVZip_uniform"] / "plan.json").exists()


@pytest.mark.req(5)
def test_a_cell_of_nothing_but_anchors_says_so(tmp_path, capsys):
    assert start(tmp_path, "method=MoEZip", "budget=10%") == 0
    assert re.search(r"MoEZip +10% .* anchors only ", capsys.readouterr().out)
    (table,) = tmp_path.glob("reports/*/table.md")
    assert "] anchors only |" in table.read_text()


def test_calibrate_says_where_there_is_no_plan(tmp_path, capsys):
    point = [f"paths.store={tmp_path}", "model=recall_moe", "benchmark=recall", "budget=20%", "tracking=none"]
    assert calibrate.main([*point, "method=KVZip"]) == 0
    assert "KVZip 20% recall question visible: each sample's scores divide its budget" in capsys.readouterr().out
    assert calibrate.main([*point, "method=full"]) == 0
    assert "keeps everything, there is no plan" in capsys.readouterr().out


@pytest.mark.req(5)
def test_a_hidden_question_blocks_mode_query_and_nothing_else(tmp_path, capsys):
    code = start(tmp_path, "method=MoEZip,KVZip", "budget=20%", "question_visible=false")
    out = capsys.readouterr().out
    assert "blocked: MoEZip 20% recall" in out
    assert "which question_visible=false hides: set method.scorer.mode=recon" in out
    assert set(records(tmp_path)) == {("KVZip", None)}
    assert code == 2
    assert start(tmp_path, "method=MoEZip", "method.scorer.mode=recon", "budget=20%", "question_visible=false") == 0
    assert ("MoEZip", "recon") in records(tmp_path)


@pytest.mark.req(5)
@pytest.mark.slow
def test_a_dense_model_blocks_moezip_and_nothing_else(tmp_path, capsys):
    point = ["benchmark.limit=1", "benchmark.length=512", "tracking=none", f"paths.store={tmp_path}"]
    code = run.main([*point, "method=MoEZip,KVZip", "budget=20%", "-m"])
    assert "blocked: MoEZip 20% niah question visible: LlamaForCausalLM has no router" in capsys.readouterr().out
    assert code == 2
    assert set(records(tmp_path)) == {("KVZip", None)}
