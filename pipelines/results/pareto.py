"""Score against bytes: which complete cells no other beats, and the smallest cache that surely loses little.

A cell is on the frontier if no other cell of its table holds as few bytes with as good a score, one of them better. The
choice is that of a race (`moend.statistics.sequential`) over the examples that are there: the smallest cache whose mean
loss against the full cache is at most `LOSS`, with 95 % confidence over all cells of the table together. The race takes
the examples in a random order, and contexts that hold several as one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moend.statistics import Examples, Interval, examples
from moend.statistics.sequential import Decision, Race

if TYPE_CHECKING:
    from pipelines.results.sweep import Row, Sweep

LOSS = 0.05
CONFIDENCE = 0.95
NAMED = 3  # cells that a sentence names


@dataclass(frozen=True)
class Spot:
    """One cell of a front. held: bytes when its budget binds. loss: full - cell, with its interval; None for full."""

    row: Row
    held: float
    score: float
    loss: Interval | None
    on_frontier: bool
    chosen: bool


@dataclass(frozen=True)
class Front:
    """The complete cells of one model, benchmark and question mode, the smallest first.

    decision: of the race; None where scores have no bounds, or there is no full cache to lose against.
    """

    model: str
    benchmark: str
    asked: str
    spots: tuple[Spot, ...]
    decision: Decision | None

    @property
    def title(self) -> str:
        """Benchmark, question mode and model."""
        return f"{self.benchmark}{'' if self.asked == '-' else ', question ' + self.asked}, {self.model}"

    @property
    def frontier(self) -> list[Spot]:
        """Its cells, the smallest first."""
        return [s for s in self.spots if s.on_frontier]

    @property
    def answer(self) -> str:
        """The choice in a sentence."""
        points = f"{100 * LOSS:g} points"
        if (d := self.decision) is None:
            unit = self.spots[0].row.info["unit"]
            why = "there is no full cache in the sweep" if unit == "fraction" else f"{unit} have no bounds"
            return f"No cell is chosen: {why}."
        names = {s.row.key: f"{s.row.series} {s.row.columns[3]}" for s in self.spots}
        sure = f"at most {points} ({CONFIDENCE:.0%} confidence)"
        if d.answer is not None:
            return f"Chosen: {names[d.answer]}, the smallest cache that surely loses {sure}."
        if d.decided:
            return f"None of the caches loses {sure}: all surely lose more."
        rivals = ", ".join(names[key] for key in d.rivals[:NAMED])
        rest = f" and {len(d.rivals) - NAMED} more" if len(d.rivals) > NAMED else ""
        more = "" if d.more is None else f"; about {d.more:,} more examples would tell"
        return f"Not decided which is the smallest cache that loses {sure}. Open: {rivals}{rest}{more}."


def held(row: Row) -> float:
    """Bytes that a complete cell's cache holds at the moment at which its budget binds."""
    r = row.result
    assert r is not None
    if row.payload.get("budget_at") != "peak":
        return float(r["resident_bytes"])
    return float(r.get("resident_bytes_peak_mean") or r["resident_bytes_peak"])  # older: the most


def frontier(held: Sequence[float], scores: Sequence[float]) -> list[bool]:
    """Which cells no other beats: fewer bytes and larger scores are better. Cells alike in both stand together."""
    out = [False] * len(held)
    best = float("-inf")
    for size in sorted(set(held)):
        alike = [i for i, h in enumerate(held) if h == size]
        if (top := max(scores[i] for i in alike)) > best:
            for i in alike:
                out[i] = scores[i] == top
            best = top
    return out


def fronts(sweep: Sweep) -> list[Front]:
    """One for each model, benchmark and question mode with at least two complete cells."""
    tables: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in sweep.done:
        tables.setdefault((row.info["model"], *row.columns[:2], row.variant), []).append(row)
    return [_front(place[:3], rows, sweep) for place, rows in tables.items() if len(rows) > 1]


def _front(place: tuple[str, str, str], rows: Sequence[Row], sweep: Sweep) -> Front:
    rows = sorted(rows, key=held)
    sign = 1 if rows[0].info["higher_is_better"] else -1
    full = next((r for r in rows if r.is_full), None)
    sizes, scores = [held(r) for r in rows], [float((r.result or {})["score"]) for r in rows]
    losses, decision = {}, None
    if full is not None:
        costs = {r.key: held(r) for r in rows if not r.is_full}
        found = {(d.group, d.method): d.score for d in sweep.differences if d.other == full.method}
        for r in rows:
            if (d := found.get(((*place, r.variant, r.columns[3]), r.method))) is not None:
                ends = [None if x is None else -sign * x for x in (d.low, d.high)]
                losses[r.key] = Interval(-sign * d.value, *(ends if sign < 0 else ends[::-1]))
        if costs and full.info["unit"] == "fraction":
            cells = {r.key: examples(sweep.records(r)) for r in rows if not r.is_full}
            decision = decide(costs, examples(sweep.records(full)), cells, sign)
    chosen = None if decision is None else decision.answer
    spots = tuple(
        Spot(r, size, score, losses.get(r.key), on, r.key == chosen)
        for r, size, score, on in zip(rows, sizes, scores, frontier(sizes, [sign * s for s in scores]), strict=True)
    )
    return Front(*place, spots, decision)


def decide(
    costs: Mapping[str, float], full: Examples, cells: Mapping[str, Examples], sign: int = 1, seed: int = 0
) -> Decision:
    """Where a race of cells stands on the examples that are there, taken in a random order.

    sign: -1 where a smaller score is better. The loss of a context is the mean over its examples.
    """
    race = Race(costs, LOSS, 1 - CONFIDENCE)
    for name, cell in cells.items():
        theirs = dict(zip(cell.keys, cell.means, strict=True))
        contexts: dict[tuple[str, ...], list[float]] = {}
        for key, context, score in zip(full.keys, full.contexts, full.means, strict=True):
            place = ("example", *key) if context is None else ("context", key[0], context)
            contexts.setdefault(place, []).append(sign * float(score - theirs[key]))
        losses = [float(np.mean(x)) for x in contexts.values()]
        random.Random(seed).shuffle(losses)  # the same order for all: they have the same contexts
        race.add({name: losses})
    return race.decision()
