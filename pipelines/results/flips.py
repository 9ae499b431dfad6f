"""Which answers compression changes: the examples that a cell loses or wins against the full cache, and its lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moend.statistics import Difference, compare, examples
from pipelines.results.sweep import Row, Sweep

FLIP = 0.5  # in score: a change of at least so much is a flip; of scores of 0 and 1, every change is

Record = dict[str, Any]


@dataclass(frozen=True)
class Flip:
    """One answer of the full cache beside a cell's answer to the same prompt."""

    full: Record
    cell: Record


@dataclass(frozen=True)
class Against:
    """A cell beside the full cache, on the same examples.

    answers: all pairs that were compared. lost: full is right, the cell is not. won: the other way round.
    length: generated tokens, cell minus full, mean over examples with its 95 % interval.
    """

    row: Row
    full: Row
    answers: int
    lost: tuple[Flip, ...]
    won: tuple[Flip, ...]
    length: Difference


def flips(full: Sequence[Record], cell: Sequence[Record]) -> tuple[tuple[Flip, ...], tuple[Flip, ...]]:
    """(lost, won): the records whose score falls or rises by at least `FLIP`, in the order of the cell.

    Records are paired by task, example and draw; ValueError where the two do not hold the same.
    """
    theirs = {_who(r): r for r in full}
    if len(theirs) != len(full) or set(theirs) != {_who(r) for r in cell} or len(cell) != len(full):
        raise ValueError(f"not the same examples: {len(full)} and {len(cell)} records")
    pairs = [Flip(theirs[_who(r)], r) for r in cell]
    lost = tuple(p for p in pairs if p.full["score"] - p.cell["score"] >= FLIP)
    won = tuple(p for p in pairs if p.cell["score"] - p.full["score"] >= FLIP)
    return lost, won


def against_full(sweep: Sweep) -> Iterator[Against]:
    """Every complete cell whose scores are shares of right answers, beside its full cache.

    That is the complete cell without a budget on the same model and benchmark; a cell that has none is left out.
    """
    read: dict[str, list[Record]] = {}
    full = {_place(row): row for row in sweep.done if row.is_full}
    for row in sweep.done:
        reference = full.get(_place(row))
        if row.is_full or reference is None or row.info["unit"] != "fraction" or not row.info["higher_is_better"]:
            continue
        if reference.key not in read:
            read = {reference.key: sweep.records(reference)}  # cells of a benchmark follow each other
        theirs, mine = read[reference.key], sweep.records(row)
        if not any(r["new_tokens"] for r in theirs):
            continue
        length = compare(examples(mine, "new_tokens"), examples(theirs, "new_tokens"))
        yield Against(row, reference, len(mine), *flips(theirs, mine), length)


def _who(record: Record) -> tuple[str, str, int]:
    return record["task"], record["id"], record["draw"]


def _place(row: Row) -> tuple[str, ...]:
    return row.info["model"], *row.columns[:2], row.variant
