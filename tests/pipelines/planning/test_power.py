"""What a plan says of power: earlier differences by loops, the worst case where there are none, cautions."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from moend.statistics.power import examples_needed, smallest_difference
from perf.report import build
from pipelines.planning import power
from pipelines.planning.power import Power
from pipelines.store.cells import Store
from tests.pipelines.conftest import Runs


def made(cells: int = 2, n: int = 100, design: float = 1.0, unit: str = "fraction", s: float | None = None) -> Power:
    return Power("b, m", cells, n, design, unit, unit == "fraction", s, 0 if s is None else 3)


def test_without_earlier_cells_the_worst_case_is_told() -> None:
    line = made().line
    assert line.startswith(
        "b, m: 100 examples show a difference of 19.1 points at 80 %; 1, 2 and 5 points need 39,237, 9,804"
    )
    assert line.endswith("and 1,562 examples (worst case: half of the pairs differ)")


def test_earlier_differences_are_used_where_there_are_any() -> None:
    found = made(s=0.2)
    assert found.smallest == smallest_difference(100, 0.2)
    assert f"5 points need {examples_needed(0.01, 0.2):,}, " in found.line
    assert "as in 3 pairs of finished cells" in found.line


def test_examples_of_one_context_count_as_one_in_the_worst_case() -> None:
    four = made(design=4.0)
    assert four.smallest == smallest_difference(25)
    assert four.needed(0.05) == 4 * examples_needed(0.05)


def test_a_likelihood_has_no_worst_case() -> None:
    assert "not known before cells are there: nats per token have no worst case" in made(unit="nats per token").line
    known = made(unit="nats per token", s=0.1)
    assert "0.01, 0.02 and 0.05 nats per token need 785, 197 and 32 examples" in known.line
    assert known.caution is None


def test_a_caution_says_what_no_luck_can_change() -> None:
    assert "cannot show a difference of 5 points" in str(made(n=100).caution)
    assert str(made(n=100).caution).endswith("even if one cell is never worse; that takes 150")
    assert made(n=150).caution is None
    assert made(n=100, s=0.1).caution is None  # earlier cells say that it is enough
    assert "as earlier cells differ" in str(made(n=1000, s=0.6).caution)
    assert made(cells=1).caution is None  # nothing is compared


@pytest.mark.parametrize("counts", [(10,), (10, 10), (5, 40, 15)])
def test_the_macro_mean_of_unequal_tasks_by_loops(counts: tuple[int, ...]) -> None:
    tasks = [f"t{k}" for k, n in enumerate(counts) for _ in range(n)]
    variance = sum(1.0 / n for n in counts) / len(counts) ** 2  # of the macro mean, at s = 1
    assert power.design(tasks, 3) == pytest.approx(3 * len(tasks) * variance)


def test_earlier_pairs_by_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    wanted = [{"method": m, "budget": b, "benchmark": "text"} for m in ("1d", "2d") for b in ("0.1r", "0.5r")]
    build(store, [*wanted, {"method": "1d", "budget": "0.2r", "benchmark": "other"}], examples=30)
    build(store, wanted, examples=power.ENOUGH - 1, name="small")
    monkeypatch.setattr(power, "_asks_the_same", lambda described, like: described["info"]["benchmark"] == "text")
    cells = [c for c in store.read_manifest("made_up")["cells"] if c["info"]["benchmark"] == "text"]
    scores = [[r["score"] for r in store.cell(c["key"]).records()] for c in cells]
    naive = []
    for a, b in itertools.combinations(scores, 2):
        d = [x - y for x, y in zip(a, b, strict=True)]
        mean = sum(d) / len(d)
        naive.append(sum((x - mean) ** 2 for x in d) / (len(d) - 1))
    assert np.mean(power.earlier(store, None)) == pytest.approx(np.mean(naive))  # type: ignore[arg-type]


def test_a_plan_tells_it(runs: Runs) -> None:
    command = ("benchmark=recall", "method=SnapKV,H2O", "budget=10%,60%", "-m")
    assert runs(*command, "dry_run=true") == 0
    assert runs.out.count("power of recall, question visible, smollm2_135m: ") == 1
    assert "worst case" in runs.out and "caution: recall, question visible" in runs.out
    runs.monkeypatch.setattr(power, "ENOUGH", 2)
    assert runs(*command) == 0
    assert "power of" not in runs.out and "caution: recall" in runs.out
    assert runs("benchmark=recall", "method=1d,H2O", "budget=20%", "-m", "dry_run=true") == 0
    (told,) = [line for line in runs.out.splitlines() if "power of" in line]
    assert "pairs of finished cells of this store" in told
    assert runs("benchmark=niah", "method=1d,H2O", "budget=20%", "-m", "dry_run=true") == 0
    assert "worst case" in runs.out  # of another benchmark nothing is known
