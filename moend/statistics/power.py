"""How many examples a comparison needs, and how small a difference so many examples can show.

The comparison is the paired test of two means over the same examples, in its normal approximation: with n paired
differences of standard deviation s, a true difference d is seen at level alpha with power 1 - beta once
n >= (z(1 - alpha/2) + z(1 - beta))^2 s^2 / d^2 (Lachin 1981). Without earlier differences the worst case is assumed:
for scores in [0, 1] whose pairs differ in a share q of the examples s^2 = q - d^2, and q is taken to be `discordant`.
The best case is q = d: one of the two is never worse. What it cannot show, nothing can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

WORST = 0.5  # share of 0/1 pairs that differ where nothing is known: two methods that answer by chance
_NORMAL = NormalDist()


def _quantiles(level: float, power: float) -> float:
    if not 0 < level < 1 or not 0 < power < 1:
        raise ValueError(f"level and power lie in (0, 1), got {level} and {power}")
    return _NORMAL.inv_cdf((1 + level) / 2) + _NORMAL.inv_cdf(power)


def deviation(differences: Sequence[float]) -> float | None:
    """Standard deviation of earlier paired differences; None where they say nothing (fewer than two, or all equal)."""
    if len(differences) < 2:
        return None
    s = float(np.std(np.asarray(differences, dtype=np.float64), ddof=1))
    return s if s > 0 else None


def examples_needed(
    difference: float, s: float | None = None, *, level: float = 0.95, power: float = 0.8, discordant: float = WORST
) -> int:
    """Examples that show a true difference with the power asked; s None: the worst case for scores in [0, 1]."""
    if not 0 < abs(difference) <= 1:
        raise ValueError(f"a difference of scores lies in (0, 1], got {difference}")
    variance = max(discordant - difference**2, 0.0) if s is None else s * s
    return max(math.ceil(_quantiles(level, power) ** 2 * variance / difference**2), 2)


def smallest_difference(
    n: float, s: float | None = None, *, level: float = 0.95, power: float = 0.8, discordant: float = WORST
) -> float:
    """The smallest true difference that n examples show with the power asked; s as for `examples_needed`.

    n is no whole number where examples share contexts and count as fewer.
    """
    if n < 2:
        raise ValueError(f"a comparison needs at least two examples, got {n}")
    k = _quantiles(level, power) ** 2 / n
    if s is not None:
        return min(math.sqrt(k) * s, 1.0)
    return min(math.sqrt(k * discordant / (1 + k)), 1.0)  # d^2 = k (q - d^2)


def least_difference(n: float, *, level: float = 0.95, power: float = 0.8) -> float:
    """The smallest difference of scores in [0, 1] that n examples show in the best case: d^2 = k (d - d^2)."""
    if n < 2:
        raise ValueError(f"a comparison needs at least two examples, got {n}")
    k = _quantiles(level, power) ** 2 / n
    return k / (1 + k)


def seen(se: float, *, level: float = 0.95, power: float = 0.8) -> float:
    """The smallest true difference that a comparison of this standard error shows with the power asked."""
    return _quantiles(level, power) * se
