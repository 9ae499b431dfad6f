"""Choosing: the race over ordinary cells, its answers, its exit codes, and what it leaves in the store."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moend.errors import UserError
from pipelines import choose, report, run
from pipelines.cli.states import exit_code
from pipelines.execution import choice, racing
from pipelines.store.cells import Store
from tests.pipelines import stub
from tests.pipelines.conftest import Runs

# The chance that an answer is lost, by method and budget: SnapKV is good at 40 %, 1d nowhere.
LOST = {("SnapKV", "0.2r"): 0.4, ("SnapKV", "0.4r"): 0.0, ("1d", "0.2r"): 0.5, ("1d", "0.4r"): 0.3}
AXES = ("method=SnapKV,1d", "budget=20%,40%")


@pytest.fixture
def race(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """`runs`, with 150 examples whose answers are lost by the chances above, and bytes that follow the budget."""
    plain, facts = stub.record, stub.Library.facts

    def record(f: Any, key: str, budget: str, task: str, id: str, draw: int = 0, rows: int = 1) -> dict[str, Any]:
        chance = 0.0 if f.is_full else LOST[f.method, budget]
        lost = random.Random(f"{f.method} {budget} {id}").random() < chance
        return {**plain(f, key, budget, task, id, draw, rows), "score": float(not lost), "token_accuracy": 1.0 - lost}

    def sized(self: stub.Library, config: Any, choices: dict[str, str]) -> Any:
        found = facts(self, config, choices)
        held = 10_000 if found.is_full else int(10_000 * float(config.budget.removesuffix("r")))
        return dataclasses.replace(found, cell_bytes=held, prompt_tokens=1000)

    monkeypatch.setattr(stub, "record", record)
    monkeypatch.setattr(stub.Library, "facts", sized)
    runs.library.n = 150
    return runs


def answer(store: Path) -> dict[str, Any]:
    (path,) = store.glob("choices/*/choice.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_the_smallest_good_cell_is_found_with_a_part_of_the_records(race: Runs) -> None:
    assert race(*AXES, "loss=10", main=choose.main) == 0
    found = answer(race.store)
    assert found["decided"] and found["answer"]["label"] == "SnapKV at 40%" and found["answer"]["plan"]
    verdicts = {c["label"]: c["verdict"] for c in found["cells"]}
    assert verdicts["SnapKV at 20%"] == verdicts["1d at 20%"] == "bad" and verdicts["1d at 40%"] != "good"
    assert found["records_computed"] < found["records_of_the_sweep"] / 2
    assert "SnapKV at 40%" in race.out and "ruled out" in race.out
    page = next(race.store.glob("choices/*/choice.md")).read_text()
    assert "| * | SnapKV | 40% |" in page


def test_a_tighter_loss_computes_the_difference_only(race: Runs) -> None:
    assert race(*AXES, "loss=20", main=choose.main) == 0
    first = race.library.prefills
    assert race(*AXES, "loss=20", main=choose.main) == 0 and race.library.prefills == first  # all of it is there
    assert race(*AXES, "loss=8", main=choose.main) == 0
    again = [json.loads(p.read_text()) for p in race.store.glob("choices/*/choice.json")]
    tighter = next(a for a in again if a["loss"] == 0.08)
    assert race.library.prefills - first < tighter["examples"]
    assert tighter["answer"]["label"] == "SnapKV at 40%"


def test_its_records_are_those_of_a_run(race: Runs) -> None:
    assert race(*AXES, "loss=10", main=choose.main) == 0
    spent = race.library.prefills
    assert race("method=full,SnapKV,1d", "budget=20%,40%", "benchmark.limit=400", "-m", main=run.main) == 0
    assert 0 < spent < 150 <= race.library.prefills < spent + 150  # what all cells had was not read again
    for cell in Store(race.store).read_manifest("latest")["cells"]:
        assert len(Store(race.store).cell(cell["key"]).records()) == 150
    assert race("sweep=latest", main=lambda args: report.main([args[0], args[-1]])) == 0


def test_none_of_them_is_an_answer(race: Runs) -> None:
    assert race("method=1d", "budget=20%,40%", "loss=5", main=choose.main) == 0
    found = answer(race.store)
    assert found["decided"] and found["answer"] is None and "none of them" in race.out


def test_not_decided_says_about_how_many_more(race: Runs) -> None:
    race.library.n = 20
    assert race("method=SnapKV", "budget=40%", "loss=2", main=choose.main) == 3
    found = answer(race.store)
    assert not found["decided"] and found["answer"] is None and found["more"] > 50
    assert f"about {found['more']} more" in race.out and "again with more examples" in race.out


def test_a_cell_that_fails_leaves_the_race_and_is_told(race: Runs) -> None:
    race.library.fail_method = "1d"
    assert race(*AXES, "loss=10", main=choose.main) == 1
    found = answer(race.store)
    assert found["answer"]["label"] == "SnapKV at 40%" and set(found["out"]) == {"1d at 20%", "1d at 40%"}
    assert "not compared: 1d at 20%: failed" in race.out


def test_a_likelihood_is_compared_by_the_next_tokens_accuracy(race: Runs) -> None:
    assert race(*AXES, "benchmark=continuation", "loss=10", main=choose.main) == 0
    assert answer(race.store)["measure"] == "accuracy of the next token"


def test_a_dry_run_computes_nothing(race: Runs) -> None:
    assert race(*AXES, "dry_run=true", main=choose.main) == 0
    assert race.library.prefills == 0 and not race.store.exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("loss=0",), "loss=0: points of 100"),
        (("loss=much",), "loss=much is not a number"),
        (("confidence=99.9%", "confidence=100%"), "confidence=100%"),
        (("turns=odd",), "unknown choice of turns 'odd'"),
        (("batch=0",), "batch=0 must be a whole number"),
        (("cluster=local",), "choose races in this process"),
        (("benchmark=niah,recall",), "one model, one benchmark and one seed"),
        (("seed=0,1",), "one model, one benchmark and one seed"),
        (("loss=5", "losss=5"), "losss"),
    ],
)
def test_mistakes_are_one_line(race: Runs, args: tuple[str, ...], said: str) -> None:
    assert race(*AXES, *args, main=choose.main) == 2
    assert said in race.err and race.err.count("\n") == 1


def test_what_is_not_typed_is_filled_in() -> None:
    own, rest = choice.split(["loss=2", "method=KVZip"])
    assert own["loss"] == "2" and own["confidence"] == "95%"
    assert rest == ["method=full,KVZip", f"budget={choice.BUDGETS}", f"benchmark.limit={choice.LIMIT}", "-m"]
    assert choice.split(["benchmark=longbench_en", "budget=5%", "method=full,1d", "-m"])[1] == [
        *("benchmark=longbench_en", "budget=5%", "method=full,1d", "-m")
    ]
    assert choice.split(["+sweep=demo"])[1] == ["+sweep=demo"]
    assert exit_code(["run"]) == 3


# Units and rounds


@given(st.integers(1, 500))
def test_rounds_take_every_unit_once(count: int) -> None:
    taken = [i for r in racing.rounds(count) for i in r]
    assert taken == list(range(count))


def test_units_have_one_context_of_every_task() -> None:
    contexts = [((task, f"{task}{i}"),) for task, n in (("a", 5), ("b", 3)) for i in range(n)]
    made = racing.units(contexts, 0)
    assert len(made) == 3 and all([c[0][0] for c in unit] == ["a", "b"] for unit in made)
    assert len({c for unit in made for c in unit}) == 6
    assert made == racing.units(contexts, 0) != racing.units(contexts, 1)


def test_a_units_value_by_hand() -> None:
    """Two tasks, the first with a context of two questions and two draws of each."""
    cell: Any = SimpleNamespace(draws=2, facts=SimpleNamespace(is_nll=False, benchmark="b"))
    unit = ((("a", "1"), ("a", "2")), (("b", "1"),))
    scores = {("a", "1"): (1, 0), ("a", "2"): (0, 0), ("b", "1"): (1, 1)}
    records: Any = {(*k, d): {"score": s} for k, v in scores.items() for d, s in enumerate(v)}
    assert racing.value(cell, records, unit, "all") == (0.25 + 1) / 2
    assert racing.value(cell, records, unit, "first") == (0.5 + 1) / 2
    assert racing.value(cell, records, unit, "last") == (0 + 1) / 2
    records["b", "1", 0] = {"score": 42}
    with pytest.raises(UserError, match="scores from 0 to 1"):
        racing.value(cell, records, unit, "all")
