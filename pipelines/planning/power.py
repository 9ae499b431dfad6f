"""What the examples of a plan can show: how many a difference needs, and the smallest that is seen, at 80 % power.

The spread of paired differences is that of earlier cells of the same model and benchmark in the store. Where there are
none, the worst case stands in for scores between 0 and 1 (`moend.statistics.power`); a likelihood has no worst case.
Examples that share a context count as one in the worst case, and as what their differences say otherwise.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moend.statistics import examples, paired_error
from moend.statistics.power import examples_needed, least_difference, smallest_difference
from pipelines.cli.terminal import question
from pipelines.planning import identity
from pipelines.planning.estimate import newest
from pipelines.store.cells import CellStore, CorruptRecords, Store

if TYPE_CHECKING:
    from pipelines.planning.planner import Cell, Plan

POINTS = (0.01, 0.02, 0.05)  # differences that the plan speaks of
AIM = POINTS[-1]  # a comparison that cannot show even this gets a caution
ENOUGH = 20  # examples from which on earlier differences say something of their spread
USED = 8  # finished cells of one group, the newest first
SHOWN = 6  # lines of a plan
_ELSEWHERE = ("limit", "seed", "folder")  # fields of a benchmark that say which examples, not what is asked


@dataclass(frozen=True)
class Power:
    """The examples of one model and benchmark.

    cells: that are compared on them. n: examples. design: so many examples count as one in the worst case. unit: of the
    score; bounded: whether it lies in [0, 1]. s: standard deviation of earlier paired differences, per example; None:
    there are none. pairs: how many cells' pairs it comes from.
    """

    name: str
    cells: int
    n: int
    design: float
    unit: str
    bounded: bool
    s: float | None
    pairs: int

    def needed(self, difference: float) -> int | None:
        """Examples that show a difference; None where nothing is known of the spread."""
        if self.s is not None:
            return examples_needed(difference, self.s)
        return math.ceil(examples_needed(difference) * self.design) if self.bounded else None

    @property
    def smallest(self) -> float | None:
        """The smallest difference that the examples show; None where nothing is known of the spread."""
        if self.s is not None:
            return smallest_difference(max(self.n, 2), self.s)
        return smallest_difference(max(self.n / self.design, 2)) if self.bounded else None

    @property
    def line(self) -> str:
        """As a plan says it."""
        if (smallest := self.smallest) is None:
            return f"{self.name}: not known before cells are there: {self.unit} have no worst case"
        scale, unit = (100, "points") if self.bounded else (1, self.unit)
        *firsts, last = (f"{self.needed(d):,}" for d in POINTS)
        *few, most = (f"{scale * d:g}" for d in POINTS)
        source = f"as in {self.pairs} pair{'s' * (self.pairs != 1)} of finished cells of this store"
        return (
            f"{self.name}: {self.n:,} examples show a difference of {_rounded(scale * smallest)} {unit} at 80 %; "
            f"{', '.join(few)} and {most} {unit} need {', '.join(firsts)} and {last} examples "
            f"({'worst case: half of the pairs differ' if self.s is None else source})"
        )

    @property
    def caution(self) -> str | None:
        """Said with the plan of cells that are compared, where their examples cannot show `AIM`, whatever comes."""
        if self.cells < 2 or not self.bounded:
            return None
        if self.s is not None:
            least = smallest_difference(max(self.n, 2), self.s)
        else:  # not the worst case: one method is never worse, and all examples of a context count
            least = least_difference(max(self.n, 2))
        if least <= AIM:
            return None
        needed = self.needed(AIM) if self.s is not None else examples_needed(AIM, discordant=AIM)
        how = "as earlier cells differ" if self.s is not None else "even if one cell is never worse"
        return (
            f"{self.name}: {self.n:,} examples cannot show a difference of {100 * AIM:g} points at 80 % power, {how}; "
            f"that takes {needed:,}"
        )


def _rounded(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def powers(plan: Plan) -> list[Power]:
    """One for each model, benchmark and question mode of the cells that are still to be computed.

    A benchmark whose data are not here, so that nobody knows its examples, has none.
    """
    found: dict[str, list[Cell]] = {}
    for cell in (c for group in plan.waiting for c in group):
        if cell.facts.expected:
            found.setdefault(cell.group, []).append(cell)
    made: dict[str, Power] = {}
    for cells in found.values():
        power = _power(plan.store, cells)
        made.setdefault(power.name, power)
    return list(made.values())


def _power(store: Store, cells: Sequence[Cell]) -> Power:
    first, facts = cells[0], cells[0].facts
    asked = first.payload["question_visible"]
    where = "" if asked is None else f", question {question(asked)}"
    variances = earlier(store, first)
    return Power(
        name=f"{facts.benchmark}{where}, {facts.model}",
        cells=len(cells),
        n=len(facts.expected),
        design=design([task for task, _ in facts.expected], max(map(len, facts.contexts))),
        unit=facts.unit,
        bounded=not facts.is_nll,
        s=math.sqrt(sum(variances) / len(variances)) if variances else None,
        pairs=len(variances),
    )


def design(tasks: Sequence[str], shared: int) -> float:
    """How many examples count as one in the worst case: those of a context, more where tasks differ in size.

    With n_k of n examples in each of K tasks the macro mean has the variance s^2 sum_k 1 / n_k / K^2, which is s^2 / n
    times n / K^2 sum_k 1 / n_k.
    """
    counts = Counter(tasks).values()
    return shared * len(tasks) / len(counts) ** 2 * sum(1 / n for n in counts)


def earlier(store: Store, like: Cell) -> list[float]:
    """Variances per example of the paired differences of finished cells of the same model, benchmark and question.

    Pairs that never differ say nothing of a spread. The cells are the newest of the store.
    """
    groups: dict[str, list[CellStore]] = {}
    for path in newest(store):
        folder = CellStore(path)
        try:
            described = json.loads((path / "payload.json").read_text(encoding="utf-8"))
            if _asks_the_same(described, like):
                groups.setdefault(identity.key(identity.group_payload(described["payload"])), []).append(folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # damaged: its own plan tells
            continue
    return [v for folders in groups.values() for v in _variances(folders[:USED])]


def _asks_the_same(described: dict[str, Any], like: Cell) -> bool:
    """Whether a finished cell asked the questions of a planned one, of whatever examples."""
    info, payload = described["info"], described["payload"]

    def config(benchmark: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in benchmark.items() if k not in _ELSEWHERE}

    return (
        info["benchmark"] == like.facts.benchmark
        and config(info["benchmark_config"]) == config(like.config.benchmark)
        and payload["facts"]["model"] == like.facts.identity["model"]
        and payload["question_visible"] == like.payload["question_visible"]
    )


def _variances(folders: Iterable[CellStore]) -> list[float]:
    read = []
    for folder in folders:
        try:
            read.append(examples(folder.records()))
        except (OSError, CorruptRecords, KeyError, TypeError, ValueError):  # damaged: its own plan tells
            continue
    out = []
    for a, b in itertools.combinations([x for x in read if len(x.keys) >= ENOUGH], 2):
        if set(a.keys) == set(b.keys) and (se := paired_error(a, b)):
            out.append(se * se * len(a.keys))
    return out


def lines(plan: Plan, *, detail: bool) -> list[str]:
    """What the plan says: with detail a line for each benchmark, always the cautions."""
    found = powers(plan)
    told = [f"power of {p.line}" for p in found[:SHOWN]] if detail else []
    if detail and len(found) > SHOWN:
        told.append(f"power: {len(found) - SHOWN} more benchmarks or models are not listed")
    cautions = [c for p in found if (c := p.caution)]
    if len(cautions) > SHOWN:
        cautions = [*cautions[:SHOWN], f"{len(cautions) - SHOWN} more comparisons have as few examples"]
    return told + [f"caution: {c}" for c in cautions]
