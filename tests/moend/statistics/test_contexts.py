"""Questions of one context rise and fall together: intervals and tests resample contexts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moend import statistics as S
from moend.statistics.intervals import clusters


def questions(rng: np.random.Generator, contexts: int, each: int) -> tuple[list[float], list[int]]:
    """0/1 scores of the questions of contexts whose difficulty varies much, and the context of each."""
    scores = rng.random((contexts, each)) < rng.beta(0.4, 0.4, size=(contexts, 1))
    return scores.astype(float).ravel().tolist(), [c for c in range(contexts) for _ in range(each)]


def test_a_toy_by_hand() -> None:
    """A context of four right answers and one of a single wrong one: four of five, not the mean of two contexts."""
    (group,) = clusters([1, 1, 1, 1, 0], None, None, ["a", "a", "a", "a", "b"])
    assert group.sums.tolist() == [4, 0] and group.sizes.tolist() == [4, 1]
    assert group.mean == 0.8 and group.means.tolist() == [1, 0] and group.examples == 5 and group.shared


def test_draws_stay_inside_their_example() -> None:
    (group,) = clusters([1, 0, 1, 1], ["x", "x", "y", "z"], None, ["a", "a", "a", "b"])
    assert group.sums.tolist() == [1.5, 1] and group.sizes.tolist() == [2, 1]


def test_the_percentile_interval_equals_one_written_out() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 6, size=25)
    contexts = [c for c, n in enumerate(sizes) for _ in range(n)]
    scores = rng.random(len(contexts)) + np.array([0.1 * (c % 7) for c in contexts])
    means = []
    for _ in range(4000):
        taken = [c for pick in rng.integers(25, size=25) for c in np.flatnonzero(np.array(contexts) == pick)]
        means.append(float(np.mean(scores[taken])))
    got = S.bootstrap(scores.tolist(), contexts=contexts, method="percentile")
    assert got.value == pytest.approx(scores.mean())
    assert (got.low, got.high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=0.012)


def test_contexts_of_one_size_are_a_bootstrap_of_their_means() -> None:
    scores, contexts = questions(np.random.default_rng(1), 40, 3)
    means = np.reshape(scores, (40, 3)).mean(1).tolist()
    got, plain = S.bootstrap(scores, contexts=contexts), S.bootstrap(means)
    assert (got.value, got.low, got.high) == pytest.approx((plain.value, plain.low, plain.high))


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20))
def test_contexts_of_one_example_change_nothing(values: list[float]) -> None:
    alone = [f"c{i}" for i in range(len(values))]
    assert S.score_interval(values) == S.score_interval(values, contexts=alone)
    assert S.paired_bootstrap(values, values[::-1]) == S.paired_bootstrap(values, values[::-1], contexts=alone)


def test_intervals_cover_where_independent_questions_would_not() -> None:
    rng, hits, naive = np.random.default_rng(2), 0, 0
    for i in range(300):
        scores, contexts = questions(rng, 60, 4)
        got, flat = S.bootstrap(scores, seed=i, resamples=400, contexts=contexts), S.wilson(sum(scores), 240)
        assert got.low is not None and got.high is not None and flat.low is not None and flat.high is not None
        hits += got.low <= 0.5 <= got.high
        naive += flat.low <= 0.5 <= flat.high
    assert 0.91 <= hits / 300 <= 0.98
    assert naive / 300 < 0.85


def test_the_paired_test_holds_its_level_where_one_of_questions_would_not() -> None:
    """Two methods that differ by chance alone, alike on all questions of a context."""
    rng, hits, naive = np.random.default_rng(3), 0, 0
    for i in range(300):
        shift = rng.normal(size=(30, 1)) + 0.3 * rng.normal(size=(30, 4))
        zero, contexts = [0.0] * 120, [c for c in range(30) for _ in range(4)]
        hits += S.paired_bootstrap(shift.ravel().tolist(), zero, seed=i, resamples=200, contexts=contexts).p <= 0.05
        naive += S.paired_bootstrap(shift.ravel().tolist(), zero, seed=i, resamples=200).p <= 0.05
    assert hits / 300 <= 0.085
    assert naive / 300 > 0.2


def records(scores: list[float], contexts: list[int] | None) -> list[dict[str, Any]]:
    return [
        {"task": "t", "id": f"q{i}", "score": s, "context_id": None if contexts is None else f"c{contexts[i]}"}
        for i, s in enumerate(scores)
    ]


def test_cells_and_their_differences_are_by_context() -> None:
    rng = np.random.default_rng(4)
    (a, contexts), (b, _) = questions(rng, 20, 4), questions(rng, 20, 4)
    wide, narrow = S.summarise(records(a, contexts)), S.summarise(records(a, None))
    assert wide["score"] == narrow["score"] and wide["n"] == narrow["n"] == 80
    assert wide["high"] - wide["low"] > 1.3 * (narrow["high"] - narrow["low"])
    assert wide["tasks"]["t"]["low"] == wide["low"]
    got, flat = S.compare(records(a, contexts), records(b, contexts)), S.compare(records(a, None), records(b, None))
    assert (got.test, flat.test) == ("sign flips", "mcnemar") and got.n == flat.n == 80
    assert got.value == pytest.approx(flat.value) and got.p > flat.p
    assert S.compare(records(a, contexts), records(b, contexts)[::-1]).value == pytest.approx(got.value)


def test_contexts_that_all_score_alike_are_as_many_trials() -> None:
    scores, contexts = [1.0] * 40, [i // 4 for i in range(40)]
    assert S.score_interval(scores, contexts=contexts) == S.wilson(10, 10)
