"""Intervals hold their level; tests and adjustments agree with hand-made cases and with SciPy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, multinomial
from scipy.stats import bootstrap as scipy_bootstrap

from moend import statistics as S


def records(scores: dict[str, list[list[float]]]) -> list[dict]:
    """{task: [[draws of an example], ...]} as records."""
    return [
        {"task": t, "id": f"{t}-{i}", "draw": d, "score": s}
        for t, examples in scores.items()
        for i, draws in enumerate(examples)
        for d, s in enumerate(draws)
    ]


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [(0, 20, 0.0, 0.1611), (10, 20, 0.2993, 0.7007), (20, 20, 0.8389, 1.0), (1, 1, 0.2065, 1)],
)
def test_wilson_known(k, n, low, high):
    got = S.wilson(k, n)
    assert (got.low, got.high) == pytest.approx((low, high), abs=1e-4)


def test_wilson_agrees_with_scipy():
    for k, n in [(3, 17), (199, 200), (0, 5)]:
        ci = binomtest(k, n).proportion_ci(method="wilson")
        got = S.wilson(k, n)
        assert (got.low, got.high) == pytest.approx((ci.low, ci.high), abs=1e-12)


@pytest.mark.parametrize("n", [20, 50, 200])
def test_wilson_coverage(n):
    """Exact coverage, summed over the binomial: mean over p within 0.94 to 0.97, nowhere below 0.90."""
    k = np.arange(n + 1)
    bounds = [S.wilson(int(i), n) for i in k]
    low, high = np.array([b.low for b in bounds]), np.array([b.high for b in bounds])
    shares = np.arange(1, 20) / 20
    cover = [float(binom.pmf(k, n, p)[(low <= p) & (p <= high)].sum()) for p in shares]
    assert 0.94 <= np.mean(cover) <= 0.97
    assert min(cover) >= 0.90


def test_wilson_refuses():
    for k, n in [(-1, 3), (4, 3), (0, 0)]:
        with pytest.raises(ValueError):
            S.wilson(k, n)


def test_bootstrap_agrees_with_scipy():
    x = np.random.default_rng(0).exponential(size=40)
    for ours, theirs in [("percentile", "percentile"), ("bca", "BCa")]:
        got = S.bootstrap(list(x), method=ours, resamples=40_000)
        ci = scipy_bootstrap((x,), np.mean, method=theirs, n_resamples=40_000, rng=np.random.default_rng(1))
        want = ci.confidence_interval
        assert got.value == pytest.approx(x.mean())
        assert (got.low, got.high) == pytest.approx((want.low, want.high), abs=0.02)


def test_bootstrap_coverage():
    """By simulation at n = 200, skewed values: within 0.93 to 0.97."""
    rng = np.random.default_rng(1)
    hits = 0
    for i in range(600):
        x = rng.exponential(size=200)
        got = S.bootstrap(list(x), seed=i, resamples=500)
        hits += got.low <= 1 <= got.high
    assert 0.93 <= hits / 600 <= 0.97


def test_cluster_bootstrap_coverage():
    """Four draws of each of 200 examples whose difficulty varies; treating draws as independent would be too narrow."""
    rng = np.random.default_rng(2)
    hits, naive = 0, 0
    ids = [i for i in range(200) for _ in range(4)]
    for i in range(400):
        x = (rng.random((200, 4)) < rng.beta(0.5, 0.5, size=(200, 1))).astype(float).ravel()
        got, flat = S.bootstrap(list(x), ids, seed=i, resamples=400), S.wilson(int(x.sum()), 800)
        hits += got.low <= 0.5 <= got.high
        naive += flat.low <= 0.5 <= flat.high
    assert 0.93 <= hits / 400 <= 0.97
    assert naive / 400 < 0.85


def test_bootstrap_is_stratified():
    """Two tasks that do not vary inside have no spread at all, though their values differ."""
    got = S.bootstrap([0.2] * 5 + [0.8] * 9, strata=["a"] * 5 + ["b"] * 9)
    assert (got.value, got.low, got.high) == pytest.approx((0.5, 0.5, 0.5))


def test_bootstrap_says_nothing_about_one_example():
    got = S.bootstrap([0.3, 0.5], ids=["x", "x"])
    assert got == S.Interval(0.4, None, None)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30), st.integers(0, 5))
def test_bootstrap_properties(values, seed):
    got = S.bootstrap(values, seed=seed, resamples=200)
    assert got == S.bootstrap(values, seed=seed, resamples=200)
    assert min(values) - 1e-9 <= got.low <= got.high <= max(values) + 1e-9
    assert got.value == pytest.approx(sum(values) / len(values))


def test_bootstrap_refuses():
    for values in ([], [math.nan], [math.inf, 1]):
        with pytest.raises(ValueError):
            S.bootstrap(values)


def test_paired_bootstrap():
    rng = np.random.default_rng(3)
    base = rng.random(60)
    same = S.paired_bootstrap(list(base), list(base))
    assert (same.value, same.low, same.high, same.p) == (0, None, None, 1)  # how others would differ, nobody knows
    # a constant gain on very different examples: pairing sees it, the two intervals alone would overlap
    shifted = list(base + 0.05 + 0.01 * rng.standard_normal(60))
    got = S.paired_bootstrap(shifted, list(base))
    assert 0.04 < got.low < 0.05 < got.high < 0.06
    assert got.p < 0.001
    assert S.bootstrap(shifted).low < S.bootstrap(list(base)).high
    back = S.paired_bootstrap(list(base), shifted)
    assert back.value == pytest.approx(-got.value)
    with pytest.raises(ValueError):
        S.paired_bootstrap([1, 2], [1])


def test_mcnemar_by_hand():
    # 6 wins, 1 loss: 2 * (C(7,0) + C(7,1)) / 2^7
    a = [1] * 6 + [0] + [1, 0, 1]
    b = [0] * 6 + [1] + [1, 0, 1]
    assert S.mcnemar_exact(a, b) == pytest.approx(2 * 8 / 128)
    assert S.mcnemar_exact(b, a) == pytest.approx(2 * 8 / 128)
    assert S.mcnemar_exact([1, 0], [1, 0]) == 1
    with pytest.raises(ValueError):
        S.mcnemar_exact([0.5], [1])


def test_holm_by_hand():
    assert S.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert S.holm([]) == []
    assert S.holm([0.9, 0.8]) == [1, 1]


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_properties(p):
    adjusted = S.holm(p)
    assert all(p[i] <= adjusted[i] <= 1 for i in range(len(p)))
    # the textbook procedure at 5 %: walk up from the smallest, stop at the first that fails
    rejected = set()
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        if p[i] * (len(p) - rank) > 0.05:
            break
        rejected.add(i)
    assert rejected == {i for i in range(len(p)) if adjusted[i] <= 0.05}


def test_summarise_one_task_is_wilson():
    got = S.summarise(records({"niah": [[1]] * 14 + [[0]] * 6}))
    want = S.wilson(14, 20)
    assert got == {
        "score": 0.7,
        "low": want.low,
        "high": want.high,
        "n": 20,
        "n_records": 20,
        "tasks": {"niah": {"score": 0.7, "low": want.low, "high": want.high, "n": 20}},
    }


def test_summarise_macro_mean():
    """Tasks count alike however many rows they have."""
    got = S.summarise(records({"a": [[1]] * 30 + [[0]] * 10, "b": [[0.5]] * 3 + [[0.1]] * 2}))
    assert got["score"] == pytest.approx((0.75 + 0.34) / 2)
    assert got["low"] < got["score"] < got["high"]
    assert got["n"] == 45
    assert got["tasks"]["b"]["score"] == pytest.approx(0.34)


def test_summarise_draws_are_clustered():
    draws = [[1, 1, 1, 1], [0, 0, 0, 0]] * 10
    got = S.summarise(records({"aime24": draws}))
    assert (got["n"], got["n_records"], got["score"]) == (20, 80, 0.5)
    flat = S.wilson(40, 80)
    assert got["high"] - got["low"] > 1.5 * (flat.high - flat.low)


def test_summarise_claims_no_certainty():
    """All right in every task: the interval is still open below."""
    got = S.summarise(records({"num": [[1]] * 20, "col": [[1]] * 20}))
    assert (got["score"], got["high"]) == (1, 1)
    assert 0.85 < got["low"] < 0.95
    with pytest.raises(ValueError):
        S.summarise([])


def test_compare():
    a = records({"niah": [[1]] * 10 + [[0]] * 10})
    b = records({"niah": [[1]] * 2 + [[0]] * 18})
    got = S.compare(a, list(reversed(b)))  # order does not matter
    assert (got.value, got.n, got.test) == (0.4, 20, "mcnemar")
    assert got.p == pytest.approx(2 / 2**8)
    assert got.low > 0
    several = S.compare(records({"x": [[1, 0]] * 9}), records({"x": [[0, 0]] * 9}))
    assert (several.value, several.test) == (0.5, "sign flips")
    with pytest.raises(ValueError, match="share 19 of 20"):
        S.compare(a, b[:-1])


def test_a_few_examples_are_no_evidence() -> None:
    for n, least in ((1, 1.0), (2, 0.5), (5, 0.0625)):  # what a sign test of n examples can show at most
        a, b = records({"t": [[0.5 + i / 100] for i in range(n)]}), records({"t": [[0.0]] * n})
        assert S.compare(a, b).p == least
    assert S.compare(records({"t": [[0.5], [0.6]] * 20}), records({"t": [[0.0]] * 40})).p < 0.001
    assert S.compare(records({"a": [[1.0]], "b": [[1.0]]}), records({"a": [[0.0]], "b": [[0.0]]})).p == 0.5


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_draws_that_all_agree_are_no_certainty(score: float) -> None:
    drawn, once = S.summarise(records({"t": [[score] * 3] * 10})), S.summarise(records({"t": [[score]] * 10}))
    assert (drawn["low"], drawn["high"]) == (once["low"], once["high"])
    assert drawn["high"] - drawn["low"] > 0.2


@pytest.mark.parametrize("score", [0.0, 0.25, 1.0])
def test_alike_scores_of_any_metric_claim_no_certainty(score: float) -> None:
    """A task of partial scores whose examples all score alike gets Wilson's interval, the widest for such a mean."""
    got = S.summarise(records({"qa": [[score]] * 20}))
    want = S.wilson(score * 20, 20)
    assert (got["low"], got["high"]) == (want.low, want.high)
    nats = S.summarise(records({"nll": [[2.5]] * 20}))
    assert (nats["score"], nats["low"], nats["high"]) == (2.5, None, None)


def test_the_macro_mean_keeps_the_doubt_of_a_task_that_does_not_vary() -> None:
    varied = [[x / 20] for x in range(20)]
    both = S.summarise(records({"a": [[0.0]] * 20, "b": varied}))
    a, b = both["tasks"]["a"], both["tasks"]["b"]
    assert both["high"] - both["score"] == pytest.approx(math.hypot(a["high"], b["high"] - b["score"]) / 2)
    assert both["score"] - both["low"] == pytest.approx((b["score"] - b["low"]) / 2)
    mixed = S.summarise(records({"a": [[-3.0]] * 20, "b": varied}))
    assert (mixed["low"], mixed["high"]) == (None, None)


def test_the_combined_interval_covers() -> None:
    """Exact coverage of two tasks of 20, one with a rare success, where one or both may not vary in the sample."""
    n, p, q = 20, 0.02, 0.5
    k = np.arange(n + 1)
    weight = np.outer(binom.pmf(k, n, p), binom.pmf(k, n, q))
    cover = 0.0
    for i, j in itertools.product(range(3), k):
        x, y = [1.0] * i + [0.0] * (n - i), [1.0] * int(j) + [0.0] * (n - int(j))
        got = S.score_interval(x + y, list(range(2 * n)), ["a"] * n + ["b"] * n)
        cover += weight[i, j] * (got.low <= (p + q) / 2 <= got.high)
    assert 0.92 <= cover / weight[:3].sum() <= 0.99


def sign_test(d: list[float]) -> float:
    """All sign patterns, one by one."""
    far = [
        abs(sum(s * x for s, x in zip(signs, d, strict=True))) for signs in itertools.product((1, -1), repeat=len(d))
    ]
    return sum(f >= abs(sum(d)) - 1e-12 for f in far) / len(far)


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=9))
def test_sign_flips_are_all_sign_patterns(d: list[int]) -> None:
    got = S.paired_bootstrap([float(x) for x in d], [0.0] * len(d), resamples=50)
    assert got.p == pytest.approx(sign_test([float(x) for x in d]))
    if set(d) <= {-1, 0, 1}:  # of 0/1 scores it is McNemar's test
        a, b = [float(x == 1) for x in d], [float(x == -1) for x in d]
        assert got.p == pytest.approx(S.mcnemar_exact(a, b))


def test_drawn_sign_patterns_agree_with_all() -> None:
    d = list(np.random.default_rng(5).normal(0.3, 1, size=16))
    assert S.paired_bootstrap(d, [0.0] * 16).p == pytest.approx(sign_test(d), abs=0.015)


@pytest.mark.parametrize("n", [10, 20, 60])
def test_the_paired_test_holds_its_level(n: int) -> None:
    """Under the null, 5 % of the p-values are at most 5 %: heavy-tailed differences, many ties."""
    rng = np.random.default_rng(n)
    base = rng.beta(0.4, 0.4, size=(800, 2, n))
    scores = np.where(rng.random(base.shape) < 0.5, np.round(base), base)
    hits = np.mean([S.paired_bootstrap(x, y, resamples=300).p <= 0.05 for x, y in scores])
    assert 0.03 <= hits <= 0.07


def test_paired_share_by_hand_and_in_its_extremes() -> None:
    got = S.paired_share(6, 1, 20)
    p, q = 7 / 22, 2 / 22
    half = 1.959964 * math.sqrt((p + q - (p - q) ** 2) / 22)
    assert (got.value, got.low, got.high) == pytest.approx((0.25, p - q - half, p - q + half), abs=1e-6)
    none = S.paired_share(0, 0, 20)
    assert none.value == 0
    assert 0.1 < none.high == -none.low < 0.15
    assert S.paired_share(20, 0, 20).high == 1
    for first, second, n in ((-1, 0, 3), (2, 2, 3), (0, 0, 0)):
        with pytest.raises(ValueError):
            S.paired_share(first, second, n)


@pytest.mark.parametrize("n", [20, 50, 200])
def test_paired_share_coverage(n: int) -> None:
    """Exact coverage, summed over the trinomial, from rare to common discordance."""
    first, second = np.array([(i, j) for i in range(n + 1) for j in range(n + 1 - i)]).T
    bounds = [S.paired_share(int(i), int(j), n) for i, j in zip(first, second, strict=True)]
    low, high = np.array([b.low for b in bounds]), np.array([b.high for b in bounds])
    counts = np.stack([first, second, n - first - second], axis=1)
    cover = []
    for p, q in ((0.02, 0.01), (0.05, 0.05), (0.1, 0.02), (0.2, 0.1), (0.3, 0.3), (0.45, 0.05), (0.6, 0.1)):
        inside = (low <= p - q) & (p - q <= high)
        cover.append(float(multinomial.pmf(counts[inside], n, [p, q, 1 - p - q]).sum()))
    assert min(cover) >= 0.93
    assert 0.94 <= np.mean(cover) <= 0.985


def test_no_discordant_pair_is_no_certainty() -> None:
    x = records({"t": [[1]] * 12 + [[0]] * 8})
    got = S.compare(x, x)
    assert (got.value, got.p, got.test) == (0, 1, "mcnemar")
    assert got.low is not None and got.low < -0.1 and got.high == -got.low
    partial = records({"t": [[0.3], [0.6]] * 10})
    same = S.compare(partial, partial)
    assert (same.value, same.low, same.high, same.p) == (0, None, None, 1)
    shifted = S.compare(records({"t": [[0.75]] * 10}), records({"t": [[0.5]] * 10}))
    assert (shifted.value, shifted.low, shifted.high) == (0.25, None, None)
    assert shifted.p == pytest.approx(2 / 2**10)
