"""KVZip and MoEZip as commands: what works, and what says why it does not while the other cells go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines import run


def records(store: Path) -> dict[tuple[str, str | None], list[dict[str, Any]]]:
    found = {}
    for path in store.glob("cells/*/result.json"):
        method = json.loads((path.parent / "payload.json").read_text())["payload"]["method"]
        lines = (line for file in (path.parent / "records").glob("*.jsonl") for line in file.read_text().splitlines())
        found[method["name"], method["mode"]] = [json.loads(line) for line in lines]
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


@pytest.mark.req(5)
def test_a_hidden_question_blocks_mode_query_and_nothing_else(tmp_path, capsys):
    code = start(tmp_path, "method=MoEZip,KVZip", "budget=20%", "question_visible=false")
    out = capsys.readouterr().out
    assert "blocked: MoEZip 20% recall" in out
    assert "which question_visible=false hides: set method.mode=recon" in out
    assert set(records(tmp_path)) == {("KVZip", None)}
    assert code == 2
    assert start(tmp_path, "method=MoEZip", "method.mode=recon", "budget=20%", "question_visible=false") == 0
    assert ("MoEZip", "recon") in records(tmp_path)


@pytest.mark.req(5)
@pytest.mark.slow
def test_a_dense_model_blocks_moezip_and_nothing_else(tmp_path, capsys):
    point = ["benchmark.limit=1", "benchmark.length=512", "tracking=none", f"paths.store={tmp_path}"]
    code = run.main([*point, "method=MoEZip,KVZip", "budget=20%", "-m"])
    assert "blocked: MoEZip 20% niah question visible: LlamaForCausalLM has no router" in capsys.readouterr().out
    assert code == 2
    assert set(records(tmp_path)) == {("KVZip", None)}
