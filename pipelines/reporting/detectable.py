"""The smallest difference that the examples behind a table show: at 80 % power, two-sided 5 %, one comparison.

Of two cells it is 2.8 times the standard error of their paired difference. Two cells that never differ tell no spread:
there it is the best case, in which one of the two is never worse (`moend.statistics.power`).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from moend.statistics.power import least_difference, seen, smallest_difference
from pipelines.results.deltas import Delta

FRACTION = "fraction"  # the unit of scores between 0 and 1, told in points


def smallest(d: Delta) -> float | None:
    """In the score's unit; None where its examples tell nothing."""
    if d.score.se:
        return seen(d.score.se)
    return least_difference(d.score.n) if d.unit == FRACTION and d.score.n > 1 else None


def shown(value: float | None, unit: str, *, named: bool = False) -> str:
    """A difference as people read it."""
    if value is None:
        return ""
    text = f"{100 * value:.1f}" if unit == FRACTION else f"{value:.3g}"
    return f"{text} {'points' if unit == FRACTION else unit}" if named else text


def sentence(found: Sequence[Delta], n: int, unit: str) -> str:
    """Of a table: by its paired differences, where it has none by its number of examples."""
    values = sorted(x for d in found if (x := smallest(d)) is not None)
    start = "Smallest difference that these examples show at 80 % power"
    if values:
        spread = f", median {shown(median(values), unit)}" if len(values) > 2 else ""
        low, high = shown(values[0], unit), shown(values[-1], unit, named=True)
        return f"{start}: {f'{low} to {high}' if len(values) > 1 else high}{spread}."
    if unit != FRACTION or n < 2:
        return f"{start}: not known from one cell."
    best, worst = shown(least_difference(n), unit), shown(smallest_difference(n), unit, named=True)
    return f"{start}: {best} at best, {worst} at worst (n = {n})."
