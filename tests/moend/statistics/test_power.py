"""Power: the formula against simulation, and its two directions against each other."""

from __future__ import annotations

import numpy as np
import pytest

from moend.statistics import Difference, compare, examples, mcnemar_exact, paired_error
from moend.statistics.power import deviation, examples_needed, least_difference, seen, smallest_difference


def test_a_simulated_comparison_has_the_power_that_was_asked() -> None:
    rng, d, q = np.random.default_rng(0), 0.1, 0.3
    n = examples_needed(d, discordant=q)
    seen = 0
    for _ in range(2000):
        x = rng.choice([1.0, -1.0, 0.0], size=n, p=[(q + d) / 2, (q - d) / 2, 1 - q])
        seen += abs(x.mean()) > 1.96 * x.std(ddof=1) / np.sqrt(n)
    assert seen / 2000 == pytest.approx(0.8, abs=0.04)


@pytest.mark.parametrize("s", [None, 0.3, 0.7])
@pytest.mark.parametrize("d", [0.01, 0.02, 0.05, 0.2])
def test_the_two_directions_agree(s: float | None, d: float) -> None:
    n = examples_needed(d, s)
    if n > 2:
        assert smallest_difference(n, s) <= d + 1e-12 < smallest_difference(n - 1, s) + 1e-9


def test_by_hand() -> None:
    # (1.959964 + 0.841621)^2 = 7.848879; with s = 0.5 and d = 0.05: 7.848879 * 0.25 / 0.0025 = 784.9
    assert examples_needed(0.05, 0.5) == 785
    assert deviation([0.0, 1.0, 0.0, 1.0]) == pytest.approx(0.57735, abs=1e-5)
    assert deviation([0.2]) is None and deviation([0.1, 0.1]) is None
    assert smallest_difference(20) == pytest.approx(np.sqrt(7.848879 / 20 * 0.5 / (1 + 7.848879 / 20)), rel=1e-4)
    with pytest.raises(ValueError):
        examples_needed(0.0)
    with pytest.raises(ValueError):
        smallest_difference(1)


def test_the_best_case_is_one_that_is_never_worse() -> None:
    rng, n = np.random.default_rng(0), 100
    d = least_difference(n)
    assert d == pytest.approx(7.848879 / (n + 7.848879), rel=1e-6)
    assert examples_needed(d, discordant=d) == n and d < smallest_difference(n)
    wins = rng.binomial(n, d, size=2000)
    p = {int(k): mcnemar_exact([1.0] * k + [0.0] * (n - k), [0.0] * n) for k in np.unique(wins)}
    assert float(np.mean([p[int(k)] < 0.05 for k in wins])) == pytest.approx(0.8, abs=0.07)


def naive_error(records: list[dict[str, object]]) -> float:
    """Standard error of the macro mean of tasks by loops: contexts are the units."""
    tasks: dict[object, dict[object, list[float]]] = {}
    for r in records:
        tasks.setdefault(r["task"], {}).setdefault(r["context_id"] or r["id"], []).append(float(r["score"]))  # type: ignore[arg-type]
    variance = 0.0
    for contexts in tasks.values():
        n = sum(len(x) for x in contexts.values())
        mean = sum(sum(x) for x in contexts.values()) / n
        m, squares = len(contexts), 0.0
        for x in contexts.values():
            squares += (sum(x) - mean * len(x)) ** 2
        variance += m / (m - 1) * squares / n**2
    return float(np.sqrt(variance)) / len(tasks)


@pytest.mark.parametrize("shared", [False, True])
def test_standard_errors_by_loops(shared: bool) -> None:
    rng = np.random.default_rng(1)
    a, b, difference = [], [], []
    for task, n in (("x", 12), ("y", 30)):
        for i in range(n):
            context = f"{task}{i // (1 + i % 3)}" if shared else None
            one = {"task": task, "id": f"{task}-{i}", "draw": 0, "context_id": context}
            x, y = rng.random(2)
            a.append({**one, "score": x})
            b.append({**one, "score": y})
            difference.append({**one, "score": x - y})
    assert compare(a, b).se == pytest.approx(naive_error(difference))
    assert paired_error(examples(a), examples(b[::-1])) == pytest.approx(naive_error(difference))


def test_the_error_of_a_comparison_by_hand() -> None:
    """Four examples, one differs: s = 0.5, so 0.25 at n = 4."""

    def cell(scores: list[float]) -> list[dict[str, object]]:
        return [{"task": "t", "id": str(i), "draw": 0, "score": s} for i, s in enumerate(scores)]

    found: Difference = compare(cell([1, 1, 1, 1]), cell([1, 1, 1, 0]))
    assert found.se == pytest.approx(0.25) and found.test == "mcnemar"
    assert seen(0.25) == pytest.approx(2.801585 * 0.25)
    assert compare(cell([1, 0]), cell([1, 0])).se == 0.0
    assert compare(cell([0.5]), cell([0.25])).se is None
