"""Paired differences between the cells of a sweep: same examples, same budget, intervals, Holm over the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from moend.statistics import Difference, Examples, compare, examples, holm

# MoE-nD, section 5.4: each step of the chain adds one routing dimension.
ABLATIONS = {("2d", "2d_uniform"): "quant", ("2d_hetero", "2d"): "evict", ("2d_hetero", "1d"): "all"}
Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Delta:
    """One method minus another, in score and answer NLL; p is of the score, adjusted over all deltas of the table."""

    group: tuple[str, ...]
    method: str
    other: str
    name: str
    score: Difference
    nll: Difference | None
    p: float = 1.0
    unit: str = "fraction"  # of the score


@dataclass(frozen=True)
class Scored:
    """A complete cell. group: what it shares with its peers, the budget (with its protocol) last.

    own: fields that set it apart from cells of the same method, `signal=local`.
    """

    group: tuple[str, ...]
    method: str
    is_full: bool
    records: Callable[[], Records]
    own: str = ""
    unit: str = "fraction"  # of the score

    @property
    def name(self) -> str:
        """The method as a table names it."""
        return f"{self.method} ({self.own})" if self.own else self.method


def deltas(cells: Sequence[Scored]) -> list[Delta]:
    """All pairs of methods that share a group, and each method against `full`, which has no budget.

    Of two methods that were varied only equal variants are a pair; of one method all are.
    """
    found: list[Delta] = []
    kept: dict[int, tuple[Examples, Examples | None]] = {}

    def read(cell: Scored) -> tuple[Examples, Examples | None]:
        """Scores and, where every record has one, answer NLLs: what is compared many times is read once."""
        if id(cell) not in kept:
            records = cell.records()
            nll = all(r["answer_nll"] is not None for r in records)
            kept[id(cell)] = examples(records), examples(records, "answer_nll") if nll else None
        return kept[id(cell)]

    for a, b in _pairs(cells):
        (x, x_nll), (y, y_nll) = read(a), read(b)
        nll = compare(x_nll, y_nll) if x_nll is not None and y_nll is not None else None
        group = b.group if a.is_full else a.group
        named = ABLATIONS.get((a.method, b.method), "") if a.own == b.own else ""
        found.append(Delta(group, a.name, b.name, named, compare(x, y), nll, unit=a.unit))
    adjusted = holm([d.score.p for d in found])
    return [replace(d, p=float(p)) for d, p in zip(found, adjusted, strict=True)]


def _pairs(cells: Sequence[Scored]) -> list[tuple[Scored, Scored]]:
    out = []
    for a, b in combinations(cells, 2):
        same = a.group == b.group or (a.group[:-1] == b.group[:-1] and (a.is_full or b.is_full))
        if not same or a.name == b.name:
            continue
        if a.method != b.method and a.own and b.own and a.own != b.own:
            continue
        backwards = (b.method, a.method) in ABLATIONS or a.is_full
        out.append((b, a) if backwards else (a, b))
    return out
