"""Intervals of scores of a few dozen examples; the draws of one example stay together, and so do the examples that
share a context.

All resampling is over contexts, within each task (stratum), and a score over several tasks is their macro mean. An
example that shares its context with no other is a context of its own.
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
BLOCK = 4_000_000  # resampled values held at once
NORMAL = NormalDist()


@dataclass(frozen=True)
class Interval:
    """An estimate with a two-sided interval; low and high are None where the data say nothing about the spread."""

    value: float  # the estimate
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Stratum:
    """The examples of one task by the context that they share: questions of one context rise and fall together."""

    sums: Floats  # (contexts,) of the scores of a context's examples, each the mean of its draws
    sizes: Floats  # (contexts,) examples of each context

    @property
    def mean(self) -> float:
        """Over the examples."""
        return float(self.sums.sum() / self.sizes.sum())

    @property
    def means(self) -> Floats:
        """(contexts,) of each context."""
        return self.sums / self.sizes

    @property
    def examples(self) -> int:
        """How many there are."""
        return int(self.sizes.sum())

    @property
    def shared(self) -> bool:
        """Whether any two examples share a context."""
        return len(self.sizes) < self.examples


def wilson(successes: float, n: int, level: float = 0.95) -> Interval:
    """Wilson's score interval for a share (Wilson 1927): the p with |k/n - p| <= z sqrt(p (1-p) / n).

    successes may be a sum of scores from 0 to 1: of all such scores of one mean, zeros and ones vary most.
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"successes={successes} of n={n}")
    z = NORMAL.inv_cdf((1 + level) / 2)
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
    contexts: Sequence[Hashable] | None = None,
) -> Interval:
    """Bootstrap interval of the mean of per-example means, averaged over strata.

    ids: the example of each value (values of one example are its draws and stay together); strata: its task; contexts:
    what it shares with other examples, None where it shares nothing. Contexts are resampled within their stratum, with
    all of their examples (the cluster bootstrap). bca: bias-corrected and accelerated (Efron 1987), with the stratified
    jackknife acceleration. One context per stratum, or fewer, has no spread: None. Equal values give an interval of
    width zero.
    """
    groups = clusters(values, ids, strata, contexts)
    return resampled(groups, seed, level, method, resamples)


def score_interval(
    scores: Sequence[float],
    ids: Sequence[Hashable] | None = None,
    strata: Sequence[Hashable] | None = None,
    *,
    seed: int = 0,
    level: float = 0.95,
    contexts: Sequence[Hashable] | None = None,
) -> Interval:
    """Wilson for 0/1 scores of one task with one draw per example and no shared context, else the stratified bootstrap.

    Where the contexts of a task all score alike (all 0, say, of any metric) a bootstrap would claim certainty for it.
    Such a task gets Wilson's interval of as many trials as it has contexts, whatever its metric, and the macro mean
    combines the tasks' own intervals: the distances to their bounds add in squares (Zou and Donner 2008). None where
    there is no such bound: outside of 0 to 1, and for a task of one context.
    """
    groups = clusters(scores, ids, strata, contexts)
    examples = sum(g.examples for g in groups)
    if binary(scores) and len(groups) == 1 and examples == len(scores) and not groups[0].shared:
        return wilson(round(sum(scores)), examples, level)
    if all(np.ptp(g.means) > 0 for g in groups):
        return resampled(groups, seed, level, "bca", RESAMPLES)
    parts = [_of_task(g, seed, level) for g in groups]
    value = float(np.mean([p.value for p in parts]))
    if any(p.low is None or p.high is None for p in parts):
        return Interval(value, None, None)
    below = math.hypot(*(p.value - p.low for p in parts if p.low is not None)) / len(parts)
    above = math.hypot(*(p.high - p.value for p in parts if p.high is not None)) / len(parts)
    return Interval(value, value - below, value + above)


def _of_task(group: Stratum, seed: int, level: float) -> Interval:
    if np.ptp(group.means) > 0:
        return resampled([group], seed, level, "bca", RESAMPLES)
    value, n = float(group.means[0]), len(group.sums)
    if n > 1 and 0 <= value <= 1:
        return wilson(value * n, n, level)
    return Interval(value, None, None)


def summarise(records: Iterable[Mapping[str, Any]], *, seed: int = 0, level: float = 0.95) -> dict[str, Any]:
    """Score with interval of a cell and of its tasks.

    records: mappings with task, id and score, one per (example, draw), and context_id where examples share a context.
    Returns {score, low, high, n (examples),
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
        shared = [r.get("context_id") for r in mine]
        interval = score_interval([r["score"] for r in mine], ids, seed=seed, level=level, contexts=shared)
        tasks[task] = _summary(interval, len(set(ids)))
    keys = [(r["task"], r["id"]) for r in rows]
    whole = score_interval(
        [r["score"] for r in rows],
        keys,
        [r["task"] for r in rows],
        seed=seed,
        level=level,
        contexts=[r.get("context_id") for r in rows],
    )
    return {**_summary(whole, len(set(keys))), "n_records": len(rows), "tasks": tasks}


def _summary(interval: Interval, n: int) -> dict[str, Any]:
    return {"score": interval.value, "low": interval.low, "high": interval.high, "n": n}


def binary(values: Sequence[float] | Floats) -> bool:
    """Whether all values are 0 or 1."""
    found = np.asarray(values)
    return bool(((found == 0) | (found == 1)).all())


def clusters(
    values: Sequence[float],
    ids: Sequence[Hashable] | None,
    strata: Sequence[Hashable] | None,
    contexts: Sequence[Hashable] | None = None,
) -> list[Stratum]:
    """Per stratum its examples by context, in order of appearance."""
    if not len(values):
        raise ValueError("no values")
    ids = range(len(values)) if ids is None else ids
    strata = [None] * len(values) if strata is None else strata
    contexts = [None] * len(values) if contexts is None else contexts
    groups: dict[Hashable, dict[Hashable, dict[Hashable, list[float]]]] = {}
    for value, key, stratum, context in zip(values, ids, strata, contexts, strict=True):
        if not math.isfinite(value):
            raise ValueError(f"a score of {value}")
        place = ("example", key) if context is None else ("context", context)
        groups.setdefault(stratum, {}).setdefault(place, {}).setdefault(key, []).append(float(value))
    return [
        Stratum(
            np.array([sum(sum(v) / len(v) for v in examples.values()) for examples in found.values()]),
            np.array([float(len(examples)) for examples in found.values()]),
        )
        for found in groups.values()
    ]


def standard_error(groups: Sequence[Stratum]) -> float | None:
    """Standard error of the macro mean of strata; None where a stratum has one context, which tells no spread.

    A stratum's mean is a ratio of two sums over its m contexts, examples' scores y_c by their numbers n_c. Its variance
    is m / (m - 1) sum_c (y_c - mean n_c)^2 / (sum_c n_c)^2 (Cochran 1977, section 9A): s^2 / n where nothing is shared.
    """
    if any(len(g.sums) < 2 for g in groups):
        return None
    total = 0.0
    for g in groups:
        m = len(g.sums)
        total += m / (m - 1) * float(((g.sums - g.mean * g.sizes) ** 2).sum()) / g.examples**2
    return math.sqrt(total) / len(groups)


def resampled(groups: list[Stratum], seed: int, level: float, method: str, resamples: int) -> Interval:
    """The bootstrap of `bootstrap`, of values that `clusters` made."""
    estimate = float(np.mean([g.mean for g in groups]))
    if all(len(g.sums) == 1 for g in groups):
        return Interval(estimate, None, None)
    draws = np.zeros(resamples)
    sizes = tuple(len(g.sums) for g in groups)
    counts = _kept_counts if resamples * sum(sizes) <= BLOCK else _counts
    for stratum, begin, taken in counts(sizes, seed, resamples):
        group = groups[stratum]
        examples = taken @ group.sizes if group.shared else group.examples
        draws[begin : begin + len(taken)] += taken @ group.sums / (examples * len(groups))
    tail = (1 - level) / 2
    shares = np.array([tail, 1 - tail])
    if method == "bca":
        shares = _bca(groups, draws, estimate, shares)
    low, high = np.quantile(draws, shares)
    return Interval(estimate, float(low), float(high))


def _counts(sizes: Sequence[int], seed: int, resamples: int) -> Iterator[tuple[int, int, Floats]]:
    """How often each resample takes each context: (stratum, the first resample, rows of counts), a block at a time."""
    rng = np.random.default_rng(seed)
    for stratum, n in enumerate(sizes):
        step = max(1, BLOCK // n)
        for begin in range(0, resamples, step):
            rows = min(step, resamples - begin)
            picks = rng.integers(n, size=(rows, n)) + n * np.arange(rows)[:, None]
            yield stratum, begin, np.bincount(picks.ravel(), minlength=rows * n).reshape(rows, n).astype(np.float64)


@functools.lru_cache(maxsize=2)
def _kept_counts(sizes: tuple[int, ...], seed: int, resamples: int) -> list[tuple[int, int, Floats]]:
    """`_counts`, kept: the hundreds of differences of a table are over equally many examples."""
    return list(_counts(sizes, seed, resamples))


def _bca(groups: list[Stratum], draws: Floats, estimate: float, shares: Floats) -> Floats:
    """The percentiles that BCa reads off (Efron 1987, eq. 6.8); the plain ones where the values do not vary."""
    # the influence of leaving one context out of its stratum
    pulls = [
        ((g.sums.sum() - g.sums) / (g.examples - g.sizes) - g.mean) / len(groups) for g in groups if len(g.sums) > 1
    ]
    influence = -np.concatenate(pulls)
    scale = float(np.abs(influence).max())
    # ties with the estimate count half, as for a continuous statistic
    ties = float((np.abs(draws - estimate) <= 1e-9 * scale).mean())
    below = float((draws < estimate - 1e-9 * scale).mean()) + ties / 2
    if scale == 0 or not 0 < below < 1:
        return shares
    influence /= scale
    acceleration = float((influence**3).sum()) / (6 * float((influence**2).sum()) ** 1.5)
    bias = NORMAL.inv_cdf(below)
    z = bias + np.array([NORMAL.inv_cdf(share) for share in shares])
    return np.array([NORMAL.cdf(x) for x in bias + z / (1 - acceleration * z)])
