"""Paired differences of two cells on the same examples, their tests, and Holm's correction over many of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from moend.statistics.intervals import (
    BLOCK,
    NORMAL,
    RESAMPLES,
    Floats,
    Interval,
    Stratum,
    binary,
    clusters,
    resampled,
    standard_error,
)

EXACT = 13  # so many differing pairs have fewer sign patterns than we would draw


@dataclass(frozen=True)
class Difference:
    """A paired difference a - b: mean, interval, two-sided p-value, examples, and the test the p-value comes from."""

    value: float
    low: float | None  # lower end of the interval; None: the data say nothing about the spread
    high: float | None  # upper end
    p: float
    n: int  # examples
    test: Literal["sign flips", "mcnemar"]
    se: float | None = None  # standard error of the mean: 0.0 where the two never differ, None where it is not known


def paired_bootstrap(
    a: Sequence[float],
    b: Sequence[float],
    ids: Sequence[Hashable] | None = None,
    strata: Sequence[Hashable] | None = None,
    *,
    seed: int = 0,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    contexts: Sequence[Hashable] | None = None,
) -> Difference:
    """Bootstrap interval of the mean difference a - b over the same examples; arguments as for `bootstrap`.

    The p-value is of the randomisation test (Fisher 1935): if the two are exchangeable on every context, the
    differences of its examples could together as well have had the other sign; p is the share of sign patterns whose
    mean is as far from zero. It is exact for few differing pairs, holds its level at any n, and is the sign test for
    scores of 0 and 1.
    Where all examples of each task differ alike (none at all, say) there is no interval: resampling would claim
    certainty.
    """
    if len(a) != len(b):
        raise ValueError(f"paired values differ in number: {len(a)} and {len(b)}")
    groups = clusters([x - y for x, y in zip(a, b, strict=True)], ids, strata, contexts)
    return _paired(groups, seed, level, resamples)


def _paired(groups: list[Stratum], seed: int, level: float, resamples: int) -> Difference:
    """`paired_bootstrap` of the differences of examples, task by task."""
    p, n = _sign_flips(groups, seed, resamples), sum(g.examples for g in groups)
    se = standard_error(groups)
    if all(np.ptp(g.means) == 0 for g in groups):
        return Difference(float(np.mean([g.mean for g in groups])), None, None, p, n, "sign flips", se)
    interval = resampled(groups, seed, level, "bca", resamples)
    return Difference(interval.value, interval.low, interval.high, p, n, "sign flips", se)


def paired_share(first: int, second: int, n: int, level: float = 0.95) -> Interval:
    """Interval of a difference of two shares on the same n examples (Bonett and Price 2012): adjusted Wald.

    first, second: examples that only the one and only the other has right. One of each is added, and two examples; so
    no discordant pair among few examples does not read as certainty that there is no difference.
    """
    if min(first, second) < 0 or first + second > n or n < 1:
        raise ValueError(f"{first} and {second} of n={n}")
    z = NORMAL.inv_cdf((1 + level) / 2)
    p, q = (first + 1) / (n + 2), (second + 1) / (n + 2)
    half = z * math.sqrt((p + q - (p - q) ** 2) / (n + 2))
    return Interval((first - second) / n, max(p - q - half, -1.0), min(p - q + half, 1.0))


def mcnemar_exact(a: Sequence[float] | Floats, b: Sequence[float] | Floats) -> float:
    """Two-sided exact McNemar test of two 0/1 series on the same examples: a sign test of the discordant pairs."""
    if len(a) != len(b):
        raise ValueError(f"paired values differ in number: {len(a)} and {len(b)}")
    if not binary(a) or not binary(b):
        raise ValueError("McNemar's test is for scores of 0 and 1")
    x, y = np.asarray(a), np.asarray(b)
    first, second = int((x > y).sum()), int((x < y).sum())
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


@dataclass(frozen=True)
class Examples:
    """The examples of a cell: compared with many others, they are read once."""

    keys: tuple[tuple[str, str], ...]  # task and id, in the order of the records
    means: Floats  # over the draws of each example
    records: int  # draws of all examples
    contexts: tuple[str | None, ...]  # what each example shares with others; None: nothing


def examples(records: Iterable[Mapping[str, Any]], field: str = "score") -> Examples:
    """The examples of records as for `summarise`, with the mean of a field over their draws."""
    found: dict[tuple[str, str], list[float]] = {}
    contexts: dict[tuple[str, str], str | None] = {}
    for r in records:
        found.setdefault((r["task"], r["id"]), []).append(float(r[field]))
        contexts[r["task"], r["id"]] = r.get("context_id")
    means = np.array([sum(v) / len(v) for v in found.values()])
    if not np.isfinite(means).all():
        raise ValueError(f"a {field} that is not finite")
    return Examples(tuple(found), means, sum(map(len, found.values())), tuple(contexts.values()))


def compare(
    a: Iterable[Mapping[str, Any]] | Examples,
    b: Iterable[Mapping[str, Any]] | Examples,
    *,
    seed: int = 0,
    level: float = 0.95,
) -> Difference:
    """Paired difference a - b of two cells on the same examples: paired bootstrap with the p-value of sign flips.

    Records as for `summarise`, or their `examples`. Draws of an example are averaged. For 0/1 scores of one task with
    one draw each and no shared context: McNemar's exact test and the interval of `paired_share`.
    ValueError where the two do not hold the same examples.
    """
    x, y = (c if isinstance(c, Examples) else examples(c) for c in (a, b))
    theirs = _aligned(x, y)
    n, tasks = len(x.keys), [task for task, _ in x.keys]
    if not n:
        raise ValueError("no values")
    strata = dict.fromkeys(tasks)
    alone = all(c is None for c in x.contexts)
    if alone and x.records == y.records == n and len(strata) == 1 and binary(x.means) and binary(theirs):
        share = paired_share(int((x.means > theirs).sum()), int((x.means < theirs).sum()), n, level)
        p, se = mcnemar_exact(x.means, theirs), standard_error([Stratum(x.means - theirs, np.ones(n))])
        return Difference(share.value, share.low, share.high, p, n, "mcnemar", se)
    difference = x.means - theirs
    if not alone:
        return _paired(clusters(difference.tolist(), x.keys, tasks, x.contexts), seed, level, RESAMPLES)
    of = np.array(tasks)
    mine = [difference[of == task] for task in strata]
    return _paired([Stratum(d, np.ones(len(d))) for d in mine], seed, level, RESAMPLES)


def _aligned(x: Examples, y: Examples) -> Floats:
    """The means of y in the order of x's examples; ValueError where the two do not hold the same."""
    if x.keys == y.keys:
        return y.means
    place = {k: i for i, k in enumerate(y.keys)}
    if place.keys() != set(x.keys):
        both = len(place.keys() & set(x.keys))
        raise ValueError(f"the cells share {both} of {len(place.keys() | set(x.keys))} examples")
    return y.means[[place[k] for k in x.keys]]


def paired_error(x: Examples, y: Examples) -> float | None:
    """Standard error of the mean difference of two cells on the same examples, as in `compare`, without its tests."""
    difference = x.means - _aligned(x, y)
    return standard_error(clusters(difference.tolist(), x.keys, [task for task, _ in x.keys], x.contexts))


def _sign_flips(groups: list[Stratum], seed: int, resamples: int) -> float:
    """Two-sided p of the macro mean under random signs: all sign patterns of few values, else drawn ones."""
    d = np.concatenate([g.sums / (g.examples * len(groups)) for g in groups])
    d = d[d != 0]
    least = abs(float(d.sum())) - 1e-9 * float(np.abs(d).sum())  # ties up to rounding count
    if len(d) <= EXACT:
        signs = 1 - 2 * (np.arange(2 ** len(d))[:, None] >> np.arange(len(d)) & 1)
        return float((np.abs(signs @ d) >= least).mean())
    blocks = _kept_signs if resamples * len(d) <= BLOCK else _signs
    count = sum(int((np.abs(signs @ d) >= least).sum()) for signs in blocks(len(d), seed, resamples))
    return (count + 1) / (resamples + 1)  # the observed one counted in


def _signs(n: int, seed: int, resamples: int) -> Iterator[Floats]:
    """Drawn signs of n values, rows of +1 and -1, a block at a time."""
    rng, step = np.random.default_rng(seed), max(1, BLOCK // n)
    for i in range(0, resamples, step):
        drawn = rng.integers(2, size=(min(step, resamples - i), n), dtype=np.int8)
        yield (2 * drawn - 1).astype(np.float64)


@functools.lru_cache(maxsize=2)
def _kept_signs(n: int, seed: int, resamples: int) -> list[Floats]:
    """`_signs`, kept like the counts of `bootstrap`."""
    return list(_signs(n, seed, resamples))
