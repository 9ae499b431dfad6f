"""Decisions while examples still arrive: tests that stay honest however often one looks, and a race built from them.

A gambler bets that a mean is not what the null hypothesis says. Under the null the wealth is a supermartingale that
starts at one, so the chance that it ever reaches 1/alpha is at most alpha (Ville 1939). A rejection may therefore be
read off after every example. Betting on bounded means: Waudby-Smith and Ramdas, "Estimating means of bounded random
variables by betting", JRSS B 86 (2024), section 4. Several gamblers share the starting capital, and their joint wealth
is a supermartingale too: one stakes all it may, which is best where scores never differ; one adapts its stake to what
it saw (their "aGRAPA"); the others keep one stake each, from small to large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Verdict = Literal["open", "good", "bad"]

# Stakes as shares of the one that a single loss would ruin; the last gambler's stake adapts.
STAKES: Floats = np.concatenate([[0.999], np.geomspace(0.005, 0.7, 8), [0.0]])
CAPITAL: Floats = np.concatenate([[0.5], np.full(8, 0.25 / 8), [0.25]])  # what each gambler starts with
ACCEPT = 0.8  # share of the error rate that is spent on calling a cell good; the rest on calling a good cell bad


class MeanTest:
    """Is the mean of values in [low, high] above `mean`? One-sided, valid at every look.

    The null hypothesis is mean <= `mean` for side "above", and mean >= `mean` for side "below". `log_wealth` is the
    natural logarithm of the evidence against it: reject at level alpha once it reaches log(1 / alpha).
    """

    def __init__(self, mean: float, side: Literal["above", "below"], low: float = -1.0, high: float = 1.0):
        if not low < mean < high:
            raise ValueError(f"the mean must lie inside ({low}, {high}), got {mean}")
        self.mean, self.low, self.high, self.n = mean, low, high, 0
        self._sign = 1.0 if side == "above" else -1.0
        self._worst = mean - low if side == "above" else high - mean  # the most that one value can lose
        self._logs = np.log(CAPITAL)
        self._sum, self._squares = 0.0, 0.0  # of the gains so far
        self.best = 0.0  # the largest log wealth so far

    def _adaptive(self) -> float:
        """The stake of the adaptive gambler, from the gains before this one: mean / (variance + mean^2), shrunk."""
        span = (self.high - self.low) ** 2
        mean = self._sum / (self.n + 1)
        variance = (0.25 * span + self._squares - self.n * (self._sum / max(self.n, 1)) ** 2) / (self.n + 1)
        return min(max(mean / (variance + mean * mean), 0.0) * self._worst, 0.9)

    def add(self, values: Sequence[float] | Floats) -> None:
        """Take in more values, in any number of calls."""
        for x in np.asarray(values, dtype=np.float64).reshape(-1):
            if not self.low - 1e-12 <= x <= self.high + 1e-12:
                raise ValueError(f"{x} lies outside of [{self.low}, {self.high}]")
            gain = self._sign * (float(x) - self.mean)
            stakes = STAKES.copy()
            stakes[-1] = self._adaptive()
            self._logs += np.log1p(stakes / self._worst * gain)
            self._sum, self._squares, self.n = self._sum + gain, self._squares + gain * gain, self.n + 1
            self.best = max(self.best, self.log_wealth)

    @property
    def log_wealth(self) -> float:
        """Log of the joint wealth of all gamblers."""
        top = float(self._logs.max())
        return top + math.log(float(np.exp(self._logs - top).sum()))

    def rejects(self, alpha: float) -> bool:
        """Whether the null hypothesis was rejected at level alpha at some look."""
        return self.best >= math.log(1 / alpha)


def confidence_sequence(
    values: Sequence[float], alpha: float, low: float = -1.0, high: float = 1.0
) -> tuple[float, float]:
    """Bounds of the mean that hold at all looks together with probability 1 - alpha: the means that no bet rejects.

    Each side spends alpha / 2. A bound is found by bisection, to a thousandth of the range, and rounded outwards.
    """

    def rejected(mean: float, side: Literal["above", "below"]) -> bool:
        test = MeanTest(mean, side, low, high)
        test.add(values)
        return test.rejects(alpha / 2)

    bounds: list[float] = []
    for side, inside in (("above", low), ("below", high)):
        outside = high if side == "above" else low  # a mean that is not rejected; `inside` counts as rejected
        while abs(outside - inside) > (high - low) / 1000:
            middle = (inside + outside) / 2
            if rejected(middle, side):  # type: ignore[arg-type]
                inside = middle
            else:
                outside = middle
        bounds.append(inside)
    return bounds[0], bounds[1]


@dataclass
class Candidate:
    """One cell of a race: what it costs, and the evidence about its loss against full so far."""

    name: str  # what tables call it
    cost: float  # bytes: the cheaper good cell wins
    good: MeanTest  # rejects "the loss is at least the limit"
    bad: MeanTest  # rejects "the loss is at most the limit"
    total: float = 0.0  # sum of the losses seen
    verdict: Verdict = "open"  # open until the evidence decides

    @property
    def n(self) -> int:
        """Examples seen."""
        return self.good.n

    @property
    def loss(self) -> float | None:
        """Mean loss so far, None before the first example."""
        return self.total / self.n if self.n else None


@dataclass(frozen=True)
class Decision:
    """Where a race stands.

    answer: the cheapest cell that surely loses at most the limit, once no cheaper one is open; None where all were
    ruled out, or where it is open. decided: whether more examples can change nothing. rivals: open cells that no
    example so far tells apart from the answer's side of the limit. ruled_out: cell -> examples it took. more: about how
    many more examples the open cells need if their losses stay what they are (None: decided, or no end in sight).
    """

    answer: str | None
    decided: bool
    rivals: tuple[str, ...]
    ruled_out: Mapping[str, int]
    more: int | None


@dataclass
class Race:
    """The cheapest cell whose mean loss against full is at most `limit`, at confidence 1 - alpha over the whole race.

    Losses are score(full) - score(cell) on the same example, in [-span, span]. Every cell gets two one-sided tests at
    the limit. The levels are split over all cells that ever start (Bonferroni), 80 % to calling a cell good, the rest
    to ruling it out; so with probability 1 - alpha every verdict of the race is right, however often one looks and
    however the cells hang together. A cell that costs more than one already found good leaves the race: it cannot win.
    """

    costs: Mapping[str, float]
    limit: float
    alpha: float = 0.05
    span: float = 1.0
    candidates: dict[str, Candidate] = field(init=False)  # those that race, by name

    def __post_init__(self) -> None:
        if not 0 < self.limit < self.span:
            raise ValueError(f"the limit must lie in (0, {self.span}), got {self.limit}")
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha must lie in (0, 1), got {self.alpha}")
        if not self.costs:
            raise ValueError("a race needs at least one cell")
        low, high = -self.span, self.span
        self.candidates = {
            name: Candidate(
                name, cost, MeanTest(self.limit, "below", low, high), MeanTest(self.limit, "above", low, high)
            )
            for name, cost in self.costs.items()
        }

    @property
    def levels(self) -> tuple[float, float]:
        """(level of calling one cell good, level of ruling one out)."""
        share = self.alpha / len(self.costs)
        return ACCEPT * share, (1 - ACCEPT) * share

    @property
    def live(self) -> list[str]:
        """Cells that the next examples must be computed for, cheapest first."""
        best = min((c.cost for c in self.candidates.values() if c.verdict == "good"), default=math.inf)
        open_ = [c for c in self.candidates.values() if c.verdict == "open" and c.cost < best]
        return [c.name for c in sorted(open_, key=lambda c: (c.cost, c.name))]

    def add(self, losses: Mapping[str, Sequence[float]]) -> None:
        """Take in the losses of a round, cell by cell; verdicts are read off after every example."""
        good, bad = self.levels
        for name, values in losses.items():
            cell = self.candidates[name]
            for x in values:
                if cell.verdict != "open":
                    break  # what is sure stays: later values cannot take it back
                cell.good.add([x])
                cell.bad.add([x])
                cell.total += float(x)
                if cell.good.rejects(good):
                    cell.verdict = "good"
                elif cell.bad.rejects(bad):
                    cell.verdict = "bad"

    def decision(self) -> Decision:
        """Where the race stands now."""
        live = self.live
        good = [c for c in self.candidates.values() if c.verdict == "good"]
        best = min(good, key=lambda c: (c.cost, c.name), default=None)
        ruled = {c.name: c.n for c in self.candidates.values() if c.verdict == "bad"}
        answer = best.name if best is not None and not live else None
        return Decision(answer, not live, tuple(live), ruled, self._more(live) if live else None)

    def _more(self, live: Sequence[str]) -> int | None:
        """Examples until every live cell has a verdict, if wealth goes on growing as fast as it did on average."""
        needs = []
        for name in live:
            cell = self.candidates[name]
            if not cell.n:
                return None
            rates = [
                (math.log(1 / level) - test.best, test.log_wealth / cell.n)
                for test, level in zip((cell.good, cell.bad), self.levels, strict=True)
            ]
            left = [gap / rate for gap, rate in rates if rate > 1e-6]
            if not left:
                return None
            needs.append(math.ceil(min(left)))
        return max(needs)
