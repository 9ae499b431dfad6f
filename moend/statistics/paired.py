"""Intervals and paired tests for scores of a few dozen examples; examples are the unit, draws of one are clustered.

All resampling is over examples, within each task (stratum), and a score over several tasks is their macro mean.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
RESAMPLES = 10_000
EXACT = 13  # so many differing pairs have fewer sign patterns than we would draw
_BLOCK = 4_000_000  # resampled values held at once
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Interval:
    """An estimate with a two-sided interval; low and high are None where the data say nothing about the spread."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Difference:
    """A paired difference a - b: mean, interval, two-sided p-value, examples, and the test the p-value comes from."""

    value: float
    low: float | None
    high: float | None
    p: float
    n: int
    test: Literal["sign flips", "mcnemar"]


def wilson(successes: float, n: int, level: float = 0.95) -> Interval:
    """Wilson's score interval for a share (Wilson 1927): the p with |k/n - p| <= z sqrt(p (1-p) / n).

    successes may be a sum of scores from 0 to 1: of all such scores of one mean, zeros and ones vary most.
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"successes={successes} of n={n}")
    z = _NORMAL.inv_cdf((1 + level) / 2)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else centre - half  # exactly, not up to rounding
    high = 1.0 if successes == n else centre + half
    return Interval(share, low, high)


def bootstrap(
    values: Sequence[float],
    ids: Sequence[Hashable] | None = None,
    strata: Sequence[Hashable] | None = None,
    *,
    seed: int = 0,
    level: float = 0.95,
    method: Literal["bca", "percentile"] = "bca",
    resamples: int = RESAMPLES,
) -> Interval:
    """Bootstrap interval of the mean of per-example means, averaged over strata.

    ids: the example of each value (values of one example are its draws and stay together); strata: its task. Examples
    are resampled within their stratum. bca: bias-corrected and accelerated (Efron 1987), with the stratified jackknife
    acceleration. One example per stratum, or fewer, has no spread: None. Equal values give an interval of width zero.
    """
    groups = _clusters(values, ids, strata)
    return _interval(groups, seed, level, method, resamples)


def paired_bootstrap(
    a: Sequence[float],
    b: Sequence[float],
    ids: Sequence[Hashable] | None = None,
    strata: Sequence[Hashable] | None = None,
    *,
    seed: int = 0,
    level: float = 0.95,
    resamples: int = RESAMPLES,
) -> Difference:
    """Bootstrap interval of the mean difference a - b over the same examples; arguments as for `bootstrap`.

    The p-value is of the randomisation test (Fisher 1935): if the two are exchangeable on every example, each
    difference could as well have had the other sign; p is the share of sign patterns whose mean is as far from zero.
    It is exact for few differing pairs, holds its level at any n, and is the sign test for scores of 0 and 1.
    Where all examples of each task differ alike (none at all, say) there is no interval: resampling would claim
    certainty.
    """
    if len(a) != len(b):
        raise ValueError(f"paired values differ in number: {len(a)} and {len(b)}")
    groups = _clusters([x - y for x, y in zip(a, b, strict=True)], ids, strata)
    p, n = _sign_flips(groups, seed, resamples), sum(map(len, groups))
    if all(np.ptp(g) == 0 for g in groups):
        return Difference(float(np.mean([g.mean() for g in groups])), None, None, p, n, "sign flips")
    interval = _interval(groups, seed, level, "bca", resamples)
    return Difference(interval.value, interval.low, interval.high, p, n, "sign flips")


def paired_share(first: int, second: int, n: int, level: float = 0.95) -> Interval:
    """Interval of a difference of two shares on the same n examples (Bonett and Price 2012): adjusted Wald.

    first, second: examples that only the one and only the other has right. One of each is added, and two examples; so
    no discordant pair among few examples does not read as certainty that there is no difference.
    """
    if min(first, second) < 0 or first + second > n or n < 1:
        raise ValueError(f"{first} and {second} of n={n}")
    z = _NORMAL.inv_cdf((1 + level) / 2)
    p, q = (first + 1) / (n + 2), (second + 1) / (n + 2)
    half = z * math.sqrt((p + q - (p - q) ** 2) / (n + 2))
    return Interval((first - second) / n, max(p - q - half, -1.0), min(p - q + half, 1.0))


def mcnemar_exact(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided exact McNemar test of two 0/1 series on the same examples: a sign test of the discordant pairs."""
    if len(a) != len(b):
        raise ValueError(f"paired values differ in number: {len(a)} and {len(b)}")
    if not _binary(a) or not _binary(b):
        raise ValueError("McNemar's test is for scores of 0 and 1")
    first = sum(x > y for x, y in zip(a, b, strict=True))
    second = sum(x < y for x, y in zip(a, b, strict=True))
    n, few = first + second, min(first, second)
    tail = sum(math.comb(n, i) for i in range(few + 1))
    return min(1.0, 2 * tail / 2**n)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment (Holm 1979): reject where the result is at most alpha; family-wise error <= alpha."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def score_interval(
    scores: Sequence[float],
    ids: Sequence[Hashable] | None = None,
    strata: Sequence[Hashable] | None = None,
    *,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Wilson for 0/1 scores of one task with one draw per example, else the stratified bootstrap.

    Where the examples of a task all score alike (all 0, say, of any metric) a bootstrap would claim certainty for it.
    Such a task gets Wilson's interval, whatever its metric, and the macro mean combines the tasks' own intervals:
    the distances to their bounds add in squares (Zou and Donner 2008). None where there is no such bound: outside of 0
    to 1, and for a task of one example.
    """
    groups = _clusters(scores, ids, strata)
    examples = sum(map(len, groups))
    if _binary(scores) and len(groups) == 1 and examples == len(scores):
        return wilson(round(sum(scores)), examples, level)
    if all(np.ptp(g) > 0 for g in groups):
        return _interval(groups, seed, level, "bca", RESAMPLES)
    parts = [_of_task(g, seed, level) for g in groups]
    value = float(np.mean([p.value for p in parts]))
    if any(p.low is None or p.high is None for p in parts):
        return Interval(value, None, None)
    below = math.hypot(*(p.value - p.low for p in parts if p.low is not None)) / len(parts)
    above = math.hypot(*(p.high - p.value for p in parts if p.high is not None)) / len(parts)
    return Interval(value, value - below, value + above)


def _of_task(means: Floats, seed: int, level: float) -> Interval:
    if np.ptp(means) > 0:
        return _interval([means], seed, level, "bca", RESAMPLES)
    value = float(means[0])
    if len(means) > 1 and 0 <= value <= 1:
        return wilson(value * len(means), len(means), level)
    return Interval(value, None, None)


def summarise(records: Iterable[Mapping[str, Any]], *, seed: int = 0, level: float = 0.95) -> dict[str, Any]:
    """Score with interval of a cell and of its tasks.

    records: mappings with task, id and score, one per (example, draw). Returns {score, low, high, n (examples),
    n_records, tasks: {task: {score, low, high, n}}}; the score is the macro mean of the tasks, with a stratified
    bootstrap over examples. ValueError where there are no records: nothing is not a score.
    """
    rows = list(records)
    if not rows:
        raise ValueError("no records to summarise")
    tasks: dict[str, dict[str, Any]] = {}
    for task in dict.fromkeys(r["task"] for r in rows):
        mine = [r for r in rows if r["task"] == task]
        ids = [r["id"] for r in mine]
        tasks[task] = _summary(score_interval([r["score"] for r in mine], ids, seed=seed, level=level), len(set(ids)))
    keys = [(r["task"], r["id"]) for r in rows]
    whole = score_interval([r["score"] for r in rows], keys, [r["task"] for r in rows], seed=seed, level=level)
    return {**_summary(whole, len(set(keys))), "n_records": len(rows), "tasks": tasks}


def compare(
    a: Iterable[Mapping[str, Any]], b: Iterable[Mapping[str, Any]], *, seed: int = 0, level: float = 0.95
) -> Difference:
    """Paired difference a - b of two cells on the same examples: paired bootstrap with the p-value of sign flips.

    records as for `summarise`. Draws of an example are averaged. For 0/1 scores of one task with one draw each:
    McNemar's exact test and the interval of `paired_share`.
    ValueError where the two do not hold the same examples.
    """
    left, n_left = _means(a)
    right, n_right = _means(b)
    if left.keys() != right.keys():
        raise ValueError(
            f"the cells share {len(left.keys() & right.keys())} of {len(left.keys() | right.keys())} examples"
        )
    keys = list(left)
    x, y = [left[k] for k in keys], [right[k] for k in keys]
    strata = [task for task, _ in keys]
    one_draw = n_left == n_right == len(keys)
    if one_draw and len(set(strata)) == 1 and _binary(x) and _binary(y):
        only_x, only_y = (sum(p > q for p, q in pairs) for pairs in (zip(x, y, strict=True), zip(y, x, strict=True)))
        share = paired_share(only_x, only_y, len(keys), level)
        return Difference(share.value, share.low, share.high, mcnemar_exact(x, y), len(keys), "mcnemar")
    return paired_bootstrap(x, y, keys, strata, seed=seed, level=level)


def _means(records: Iterable[Mapping[str, Any]]) -> tuple[dict[tuple[str, str], float], int]:
    sums: dict[tuple[str, str], list[float]] = {}
    for r in records:
        sums.setdefault((r["task"], r["id"]), []).append(float(r["score"]))
    return {k: sum(v) / len(v) for k, v in sums.items()}, sum(map(len, sums.values()))


def _summary(interval: Interval, n: int) -> dict[str, Any]:
    return {"score": interval.value, "low": interval.low, "high": interval.high, "n": n}


def _binary(values: Sequence[float]) -> bool:
    return all(v in (0, 1) for v in values)


def _clusters(
    values: Sequence[float], ids: Sequence[Hashable] | None, strata: Sequence[Hashable] | None
) -> list[Floats]:
    """Per stratum the means of its examples, in order of appearance."""
    if not len(values):
        raise ValueError("no values")
    ids = range(len(values)) if ids is None else ids
    strata = [None] * len(values) if strata is None else strata
    groups: dict[Hashable, dict[Hashable, list[float]]] = {}
    for value, key, stratum in zip(values, ids, strata, strict=True):
        if not math.isfinite(value):
            raise ValueError(f"a score of {value}")
        groups.setdefault(stratum, {}).setdefault(key, []).append(float(value))
    return [np.array([sum(v) / len(v) for v in examples.values()]) for examples in groups.values()]


def _sign_flips(groups: list[Floats], seed: int, resamples: int) -> float:
    """Two-sided p of the macro mean under random signs: all sign patterns of few values, else drawn ones."""
    d = np.concatenate([g / (len(g) * len(groups)) for g in groups])
    d = d[d != 0]
    least = abs(float(d.sum())) - 1e-9 * float(np.abs(d).sum())  # ties up to rounding count
    if len(d) <= EXACT:
        signs = 1 - 2 * (np.arange(2 ** len(d))[:, None] >> np.arange(len(d)) & 1)
        return float((np.abs(signs @ d) >= least).mean())
    blocks = _kept_signs if resamples * len(d) <= _BLOCK else _signs
    count = sum(int((np.abs(signs @ d) >= least).sum()) for signs in blocks(len(d), seed, resamples))
    return (count + 1) / (resamples + 1)  # the observed one counted in


def _signs(n: int, seed: int, resamples: int) -> Iterator[Floats]:
    """Drawn signs of n values, rows of +1 and -1, a block at a time."""
    rng, step = np.random.default_rng(seed), max(1, _BLOCK // n)
    for i in range(0, resamples, step):
        drawn = rng.integers(2, size=(min(step, resamples - i), n), dtype=np.int8)
        yield (2 * drawn - 1).astype(np.float64)


@functools.lru_cache(maxsize=2)
def _kept_signs(n: int, seed: int, resamples: int) -> list[Floats]:
    """`_signs`, kept like `_kept_picks`."""
    return list(_signs(n, seed, resamples))


def _interval(groups: list[Floats], seed: int, level: float, method: str, resamples: int) -> Interval:
    estimate = float(np.mean([g.mean() for g in groups]))
    if all(len(g) == 1 for g in groups):
        return Interval(estimate, None, None)
    draws = np.zeros(resamples)
    sizes = tuple(len(g) for g in groups)
    picks = _kept_picks if resamples * sum(sizes) <= _BLOCK else _picks
    for stratum, begin, rows in picks(sizes, seed, resamples):
        draws[begin : begin + len(rows)] += groups[stratum][rows].mean(axis=1) / len(groups)
    tail = (1 - level) / 2
    shares = np.array([tail, 1 - tail])
    if method == "bca":
        shares = _bca(groups, draws, estimate, shares)
    low, high = np.quantile(draws, shares)
    return Interval(estimate, float(low), float(high))


def _picks(sizes: Sequence[int], seed: int, resamples: int) -> Iterator[tuple[int, int, npt.NDArray[np.int64]]]:
    """Which examples each resample takes: (stratum, the first resample, rows of indices), a block at a time."""
    rng = np.random.default_rng(seed)
    for stratum, n in enumerate(sizes):
        step = max(1, _BLOCK // n)
        for begin in range(0, resamples, step):
            yield stratum, begin, rng.integers(n, size=(min(step, resamples - begin), n))


@functools.lru_cache(maxsize=2)
def _kept_picks(sizes: tuple[int, ...], seed: int, resamples: int) -> list[tuple[int, int, npt.NDArray[np.int64]]]:
    """`_picks`, kept: the hundreds of differences of a table are over equally many examples."""
    return list(_picks(sizes, seed, resamples))


def _bca(groups: list[Floats], draws: Floats, estimate: float, shares: Floats) -> Floats:
    """The percentiles that BCa reads off (Efron 1987, eq. 6.8); the plain ones where the values do not vary."""
    # the influence of leaving one example out of its stratum
    pulls = [(g.mean() - g) / ((len(g) - 1) * len(groups)) for g in groups if len(g) > 1]
    influence = -np.concatenate(pulls)
    scale = float(np.abs(influence).max())
    # ties with the estimate count half, as for a continuous statistic
    ties = float((np.abs(draws - estimate) <= 1e-9 * scale).mean())
    below = float((draws < estimate - 1e-9 * scale).mean()) + ties / 2
    if scale == 0 or not 0 < below < 1:
        return shares
    influence /= scale
    acceleration = float((influence**3).sum()) / (6 * float((influence**2).sum()) ** 1.5)
    bias = _NORMAL.inv_cdf(below)
    z = bias + np.array([_NORMAL.inv_cdf(share) for share in shares])
    return np.array([_NORMAL.cdf(x) for x in bias + z / (1 - acceleration * z)])
