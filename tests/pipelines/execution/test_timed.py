"""Measurements of speed: exactly the tokens asked for, each cell alone and warmed up, no gold text fed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moend.engine import Engine
from pipelines import run
from tests.pipelines.conftest import compose_points

SMALL = ["model=recall_moe", "benchmark=recall", "benchmark.limit=1", "benchmark.tasks=[num]", "tracking=none"]
TIMED = ["engine.timed=true", "engine.fuse=false", "generation.max_new_tokens=9"]


def test_a_timed_answer_has_exactly_the_tokens_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    real = Engine.run_questions

    def seen(self, prompts, jobs, *args, **how):  # type: ignore[no-untyped-def]
        assert all(not p.gold_ids and not p.stop for p in prompts)  # nothing is judged meanwhile
        ran.append(len(jobs))
        return real(self, prompts, jobs, *args, **how)

    monkeypatch.setattr(Engine, "run_questions", seen)
    args = [*SMALL, *TIMED, "method=full,SnapKV", "budget=50%", "benchmark.limit=2", f"paths.store={tmp_path}", "-m"]
    assert run.main(args) == 0
    assert ran == [1] * 6  # a warm-up and two examples, of each cell by itself
    records = [json.loads(x) for p in tmp_path.glob("cells/*/records/*.jsonl") for x in p.read_text().splitlines()]
    assert len(records) == 4
    for r in records:
        assert r["new_tokens"] == 9 and r["finish_reason"] == "length"  # eos comes after two
        assert r["answer_nll"] is None and r["device_peak_bytes"] is None
        assert r["timing"]["fused_rows"] == r["timing"]["prefill_rows"] == 1 or r["timing"]["select_seconds"] > 0
    results = [json.loads(p.read_text()) for p in tmp_path.glob("cells/*/result.json")]
    assert all(x["timed"] and not x["fused"] and x["tokens_per_second"] > 0 for x in results)


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["engine.timed=true"], "set engine.fuse=false"),
        ([*TIMED[:2], "benchmark=continuation", "model=smollm2_135m"], "generates nothing"),
    ],
)
def test_what_cannot_be_timed_is_refused(args: list[str], match: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["dry_run=true", *args]) == 2
    assert match in capsys.readouterr().err


def test_keys_of_cells_that_are_not_timed_do_not_know_of_it() -> None:
    from pipelines.planning import schema
    from pipelines.planning.identity import cell_payload

    payloads = []
    for args in ([], TIMED[:2]):
        (point,) = compose_points(["dry_run=true", *SMALL[:2], *args])
        config = schema.validate(point).model_dump()
        payloads.append(cell_payload(config, {}, {}, is_full=False, is_nll=False)["engine"])
    assert "timed" not in payloads[0] and payloads[1]["timed"]
