"""Several questions per context through the programs: one prefill for all cells, each question a record of its own."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from moend.engine import Engine
from pipelines import run
from pipelines.planning import planner
from pipelines.planning.estimate import Speed, seconds
from pipelines.planning.facts import Planner
from pipelines.results import load
from pipelines.store.cells import Store
from tests.forked import Forked
from tests.pipelines.conftest import compose_points

COMMAND = [
    *("model=recall_moe", "benchmark=recall", "benchmark.tasks=[num,col]", "benchmark.length=96", "benchmark.limit=3"),
    *("benchmark.questions_per_context=2", "budget=50%", "tracking=none", "method=full,SnapKV", "-m"),
]


def plan(store: Path, *args: str) -> planner.Plan:
    return planner.make_plan(compose_points([f"paths.store={store}", *COMMAND, *args]), Planner())


def records(store: Path, *args: str) -> dict[str, list[dict[str, Any]]]:
    cells = plan(store, *args).cells
    assert [c.state for c in cells] == ["done"] * len(cells)
    return {c.facts.method: Store(store).cell(c.key).records() for c in cells}


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each prompt that is read."""
    found: list[int] = []
    plain = Engine._prefill
    monkeypatch.setattr(Engine, "_prefill", lambda self, *args: found.append(1) or plain(self, *args))
    return found


def outcome(record: dict[str, Any]) -> dict[str, Any]:
    """A record without times and places, which differ from run to run."""
    return {k: v for k, v in record.items() if k not in ("timing", "provenance", "peak_bytes")}


@pytest.mark.parametrize("visible", [False, True])
def test_questions_share_prefills_and_are_answered_as_if_alone(
    visible: bool, tmp_path: Path, prefills: list[int], undrawn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = f"question_visible={str(visible).lower()}"
    assert run.main([f"paths.store={tmp_path / 'a'}", *COMMAND, asked]) == 0
    assert len(prefills) == 3  # six questions of three contexts, for both cells
    together = records(tmp_path / "a", asked)
    assert all(len(found) == 6 for found in together.values())
    plain = Engine.run_questions

    def alone(self: Engine, prompts: Any, *args: Any, **how: Any) -> Any:
        """Each question on a fork of its own, after the same compression."""
        return [plain(self, [prompts[0], p], *args, **how)[1] if i else plain(self, [p], *args, **how)[0]
                for i, p in enumerate(prompts)]  # fmt: skip

    monkeypatch.setattr(Engine, "run_questions", alone)
    assert run.main([f"paths.store={tmp_path / 'b'}", *COMMAND, asked]) == 0
    for method, found in records(tmp_path / "b", asked).items():
        assert [outcome(r) for r in found] == [outcome(r) for r in together[method]]


def test_turns_are_scored_by_turn(tmp_path: Path, prefills: list[int], undrawn: None) -> None:
    assert run.main([f"paths.store={tmp_path}", *COMMAND, "benchmark.turns=true"]) == 0
    assert len(prefills) == 3
    for found in records(tmp_path, "benchmark.turns=true").values():
        assert [r["turn"] for r in found] == [1, 2] * 3 == [r["question"] for r in found]
        assert len({r["context_id"] for r in found}) == 3
        assert all(b["prompt_tokens"] > a["prompt_tokens"] for a, b in zip(found[::2], found[1::2], strict=True))
    cells = load(tmp_path).cells
    assert len(cells) == 2
    for key in cells.index:
        result = Store(tmp_path).cell(key).result()
        assert result is not None
        scores = Store(tmp_path).cell(key).records()
        assert [t["turn"] for t in result["turns"]] == [1, 2]
        for t in result["turns"]:
            mine = [r["score"] for r in scores if r["turn"] == t["turn"]]
            assert t["n"] == len(mine) == 3
    table = next(tmp_path.glob("reports/*/tasks.csv")).read_text().splitlines()
    assert sum(",turn 2,exact_match," in line for line in table) == 2


def test_turns_are_other_cells_than_single_questions(tmp_path: Path) -> None:
    keys = {c.key for args in ((), ("benchmark.turns=true",)) for c in plan(tmp_path, *args).cells}
    assert len(keys) == 4
    assert plan(tmp_path).prefills == 3 and plan(tmp_path).prefills_saved == 3


KILLED = """
import os, signal, sys
from pipelines import run
from pipelines.store.cells import Shard
plain, count = Shard.append, [0]
def append(self, record):
    if count[0] == int(os.environ["KILL_AFTER"]):
        os.kill(os.getpid(), signal.SIGKILL)
    count[0] += 1
    plain(self, record)
Shard.append = append
run.main(sys.argv[1:])
"""


@pytest.mark.process
def test_a_killed_run_neither_loses_nor_doubles_a_question(tmp_path: Path, prefills: list[int], undrawn: None) -> None:
    """Killed between the records of one context: its questions are asked again, and only the missing ones written."""
    args = [f"paths.store={tmp_path}", *COMMAND, "benchmark.turns=true"]
    killed = Forked(KILLED, args, {"KILL_AFTER": "5"})
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    before = {c.key: Store(tmp_path).cell(c.key).records() for c in plan(tmp_path, "benchmark.turns=true").cells}
    assert sorted(map(len, before.values())) == [2, 3]
    assert run.main(args) == 0
    assert len(prefills) == 2  # the first context was whole
    for key, found in before.items():
        lines = [line for p in Store(tmp_path).cell(key).files() for line in p.read_bytes().splitlines()]
        after = Store(tmp_path).cell(key).records()
        assert len(lines) == len(after) == 6 and after[: len(found)] == found


def test_the_estimate_counts_a_prompt_per_context_and_an_answer_per_question(tmp_path: Path) -> None:
    speed = Speed(prompt=1.0, step=0.0, token=1000.0, source="")
    alone, turns = plan(tmp_path).groups[0], plan(tmp_path, "benchmark.turns=true").groups[0]
    prompts = 3 * alone[0].facts.prompt_tokens
    assert seconds(alone, speed) == prompts + 2 * 6 * alone[0].facts.new_tokens * 1000
    each = turns[0].facts.new_tokens // 2  # two answers with the words of a turn between them
    assert each >= alone[0].facts.new_tokens and seconds(turns, speed) == prompts + 2 * 6 * each * 1000
