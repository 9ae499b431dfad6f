"""A sweep over tasks of lm-evaluation-harness: its own results at full budget, resumed, scored again from records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval.models.huggingface import HFLM

from moend.models import load as models
from pipelines import run
from pipelines.reporting import report
from tests.harness import answer_tasks, evaluate

NAMES = ["recall_gen", "recall_shots", "recall_bleu"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, no_figures: Any) -> tuple[Path, Path, list[str]]:
    """Two cells of three tasks on the small trained model, and the command that made them."""
    tasks, store = tmp_path_factory.mktemp("tasks"), tmp_path_factory.mktemp("store")
    answer_tasks(tasks)
    command = [
        *("model=recall_moe", "model.store_dtype=model", "model.dtype=float32", "benchmark=lm_eval", "tracking=none"),
        *(f"benchmark.tasks=[{','.join(NAMES)}]", f"benchmark.include_path={tasks}", f"paths.store={store}"),
        *("method=full,StreamingLLM", "budget=25%", "-m"),
    ]
    with no_figures():
        assert run.main(command) == 0
    return tasks, store, command


def results(store: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(p.read_text()) for p in (store / "cells").glob("*/result.json")]
    return {r["method"]: r for r in found}


def records(store: Path, key: str) -> list[dict[str, Any]]:
    files = sorted((store / "cells" / key / "records").glob("*.jsonl"))
    return [json.loads(line) for p in files for line in p.read_text().splitlines()]


def test_a_full_cache_gives_the_harness_own_results(ran: tuple[Path, Path, list[str]]) -> None:
    tasks, store, _ = ran
    loaded = models.load(models.spec("recall_moe"), store)
    theirs = evaluate(HFLM(loaded.model, tokenizer=loaded.tokenizer), tasks, NAMES)
    mine = results(store)["full"]
    for name in NAMES:
        expected = {k: v for k, v in theirs["results"][name].items() if "," in k and "stderr" not in k}
        assert mine["official"][name] == pytest.approx(expected)
    assert mine["official"]["recall_gen"]["exact_match,first"] > 0.5, "the model can do the task"
    assert mine["tasks"]["recall_gen"]["score"] == mine["official"]["recall_gen"]["exact_match,first"]
    answers = {(r["task"], int(r["id"])): r["text"] for r in records(store, mine["key"])}
    for name in NAMES:
        rows = theirs["samples"][name]
        assert {(name, s["doc_id"]): s["resps"][0][0] for s in rows}.items() <= answers.items()


def test_compression_is_seen_and_the_cells_shared_their_prefills(ran: tuple[Path, Path, list[str]]) -> None:
    found = results(ran[1])
    assert found["StreamingLLM"]["compressed"] == 12 and found["StreamingLLM"]["fused"]
    assert found["StreamingLLM"]["score"] < found["full"]["score"]


def test_a_killed_run_goes_on_and_a_finished_one_is_not_run_again(
    ran: tuple[Path, Path, list[str]], undrawn: None, capsys: pytest.CaptureFixture[str]
) -> None:
    store, command = ran[1], ran[2]
    before = results(store)["full"]
    cell = store / "cells" / before["key"]
    (cell / "result.json").unlink()
    file = sorted((cell / "records").glob("*.jsonl"))[0]
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:5]))
    assert run.main(command) == 0
    after = results(store)["full"]
    assert (after["official"], after["score"]) == (before["official"], before["score"])
    assert file.read_text().splitlines(keepends=True)[:5] == lines[:5]
    capsys.readouterr()
    assert run.main(command) == 0
    assert "2 done" in capsys.readouterr().out


def test_scores_come_again_from_records(ran: tuple[Path, Path, list[str]], undrawn: None) -> None:
    store = ran[1]
    before = results(store)["full"]
    path = store / "cells" / before["key"] / "result.json"
    path.write_text(json.dumps({**before, "score": 0.0, "official": {}}))
    assert report.main([f"paths.store={store}", "rescore=true"]) == 0
    after = results(store)["full"]
    assert (after["score"], after["official"]) == (before["score"], before["official"])


def test_an_unseen_question_needs_a_boundary(ran: tuple[Path, Path, list[str]], capsys: Any, tmp_path: Path) -> None:
    arguments = [a for a in ran[2] if not a.startswith("paths.store")]
    assert run.main([*arguments, f"paths.store={tmp_path}", "question_visible=false", "dry_run=true"]) == 2
    assert "recall_gen does not say where its question begins" in capsys.readouterr().err
