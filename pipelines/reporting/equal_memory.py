"""Differences at equal measured memory, where methods of one nominal budget hold different bytes (MoE-nD section 5.1).

A method's score at another's bytes is read off its own cells: linear in log bytes between the two around them, or the
nearest cell's where there is none on one side. Each line says which. These are differences of means without intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.cli.terminal import budget, size
from pipelines.results.sweep import Row, Sweep

TITLES = ("benchmark", "question", "difference", "at", "bytes", "score", "other's score", "difference of means", "how")


@dataclass(frozen=True)
class Equal:
    """One cell beside another method at the same bytes."""

    row: Row
    other: str  # the other method
    value: float  # the other's score at the bytes of `row`
    how: str  # interpolated between two budgets, or the nearest cell and its bytes

    @property
    def score(self) -> float:
        """The cell's own score."""
        assert self.row.result is not None
        return float(self.row.result["score"])

    @property
    def line(self) -> list[str]:
        """As people read it."""
        assert self.row.result is not None
        benchmark, asked, method, given = self.row.columns
        held = size(self.row.result["resident_bytes"])
        values = [f"{self.score:.3f}", f"{self.value:.3f}", f"{self.score - self.value:+.3f}"]
        return [benchmark, asked, f"{method} - {self.other}", given, held, *values, self.how]


def equal_memory(sweep: Sweep) -> list[Equal]:
    """Every cell of 2d_hetero and 2d beside the other methods, in the papers' protocol, whose bytes differ."""
    series: dict[tuple[str, str, str, str], dict[str, list[Row]]] = {}
    for row in sweep.done:
        if row.payload["budget_protocol"] == "paper":
            place = (row.info["model"], row.columns[0], row.columns[1], row.variant)
            series.setdefault(place, {}).setdefault(row.method, []).append(row)
    found = []
    for methods in series.values():
        for name, rows in methods.items():
            for other, theirs in methods.items() if rows[0].info["method"] in ("2d_hetero", "2d") else ():
                if other != name and theirs[0].info["method"] != "2d_hetero":
                    found += [Equal(row, other, *at(row, theirs)) for row in rows]
    return found


def at(row: Row, theirs: Sequence[Row]) -> tuple[float, str]:
    """The score of another method's cells at the resident bytes of `row`, and how it was read."""
    assert row.result is not None
    wanted = row.result["resident_bytes"]
    cells = sorted(
        ((r.result["resident_bytes"], r.result["score"], budget(r.payload["budget"])) for r in theirs if r.result),
        key=lambda cell: float(cell[0]),
    )
    below = [c for c in cells if c[0] <= wanted]
    above = [c for c in cells if c[0] >= wanted]
    if below and above and below[-1][0] < above[0][0]:
        (x, a, first), (y, b, last) = below[-1], above[0]
        share = math.log(wanted / x) / math.log(y / x)
        return a + share * (b - a), f"interpolated between {first} and {last}"
    held, score, name = min(cells, key=lambda c: abs(math.log(c[0] / wanted)))
    return score, f"nearest cell: {name} at {size(held)}"
