"""A race of cells against the full cache: examples in rounds, and after each round only what can still win goes on.

The statistics are `moend.statistics.sequential`. Here a round of examples is computed by the ordinary runner into the
ordinary cells, whose records are then read as losses: nothing is computed that is in the store already.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console

from moend.errors import UserError
from moend.statistics.sequential import Decision, Race
from pipelines.execution import session as evaluate
from pipelines.execution.runner import Context, Runner
from pipelines.planning.planner import Cell, Plan
from pipelines.store.cells import RecordKey, record_key

FIRST = 10  # units of the first round
GROWTH = 4  # every later round adds a quarter of the units so far
Turns = Literal["all", "first", "last"]
Unit = tuple[Context, ...]  # one context of every task


def units(contexts: Sequence[Context], seed: int) -> list[Unit]:
    """What a race takes in one after the other: a context of each task, drawn at random, so that tasks weigh alike.

    The losses of a unit have the macro mean over tasks as their mean. As many units as the smallest task has contexts.
    """
    by_task: dict[str, list[Context]] = {}
    for context in contexts:
        by_task.setdefault(context[0][0], []).append(context)
    for task, mine in by_task.items():
        random.Random(f"race-{seed}-{task}").shuffle(mine)
    return list(zip(*by_task.values(), strict=False))


def rounds(count: int) -> Iterator[range]:
    """The units of each round: few at first, then a quarter more each time."""
    begin = 0
    while begin < count:
        end = min(count, begin + max(FIRST, begin // GROWTH))
        yield range(begin, end)
        begin = end


def measure(cell: Cell) -> str:
    """The field of a record that is compared: the score, or the next token's accuracy where there is only a likelihood.

    A loss must be bounded for a confidence sequence, and a likelihood has no bound.
    """
    return "token_accuracy" if cell.facts.is_nll else "score"


def value(cell: Cell, records: dict[RecordKey, dict[str, object]], unit: Unit, turns: Turns) -> float:
    """What a cell scores on a unit: the mean over its tasks of the mean over a context's questions and draws."""
    name, tasks = measure(cell), []
    for context in unit:
        asked = {"all": context, "first": context[:1], "last": context[-1:]}[turns]
        scores = [records[(*example, draw)][name] for example in asked for draw in range(cell.draws)]
        for score in scores:
            if not isinstance(score, int | float) or not 0 <= score <= 1:
                raise UserError(
                    f"choose compares scores from 0 to 1, and {cell.facts.benchmark} has {name}={score} at "
                    f"{'/'.join(context[0])}"
                )
        tasks.append(sum(map(float, scores)) / len(scores))  # type: ignore[arg-type]
    return sum(tasks) / len(tasks)


@dataclass
class Contest:
    """Where a race stands.

    losses: of each cell by key, unit by unit, in [-1, 1]: full minus the cell. out: cells that failed or cannot run,
    and why. used: units taken in. there: units there are. computed: records that were not in the store before.
    """

    plan: Plan
    full: Cell
    rivals: list[Cell]
    race: Race
    there: int = 0
    used: int = 0
    computed: int = 0
    losses: dict[str, list[float]] = field(default_factory=dict)
    out: dict[str, str] = field(default_factory=dict)

    @property
    def decision(self) -> Decision:
        """The race's, over the cells that could run."""
        return self.race.decision()

    def cell(self, key: str) -> Cell:
        """A cell by its key."""
        return next(c for c in [self.full, *self.rivals] if c.key == key)


def contest(plan: Plan, limit: float, alpha: float) -> Contest:
    """Set the cells of a plan against each other. UserError where they do not form one race."""
    usable = [c for c in plan.cells if c.state in ("run", "done")]
    fulls = [c for c in usable if c.facts.is_full]
    if blocked := [c for c in plan.cells if c.state == "blocked"]:
        raise UserError(f"{blocked[0].label}: {blocked[0].reason}")
    if len(fulls) != 1 or len({c.group for c in usable}) != 1:
        raise UserError(
            "choose compares methods and budgets on one model, one benchmark and one seed: of these cells "
            f"{len(fulls)} are `full`, and they have {len({c.group for c in usable})} different prompts or settings"
        )
    rivals = [c for c in usable if not c.facts.is_full]
    if not rivals:
        raise UserError("there is nothing to choose from: every cell is infeasible at these budgets")
    race = Race({c.key: float(c.facts.cell_bytes) for c in rivals}, limit, alpha)
    made = Contest(plan, fulls[0], rivals, race, losses={c.key: [] for c in rivals})
    made.out = {c.key: c.reason for c in plan.cells if c.state in ("infeasible", "failed")}
    return made


def run(
    contest: Contest,
    library: evaluate.Library,
    console: Console,
    *,
    seed: int,
    turns: Turns = "all",
    tell: Callable[[Contest], None] = lambda contest: None,
) -> None:
    """Race until nothing is open or no example is left. tell: is told after each round."""
    every = units(contest.full.facts.contexts, seed)
    contest.there = len(every)
    for taken in rounds(len(every)):
        live = [contest.cell(key) for key in contest.race.live]
        if not live:
            return
        chosen = [every[i] for i in taken]
        _compute(contest, [contest.full, *live], chosen, library, console)
        if contest.full.state not in ("run", "done"):
            raise UserError(f"full: {contest.full.reason}")
        for cell in live:
            if cell.state not in ("run", "done"):
                contest.out[cell.key] = f"{cell.state}: {cell.reason}"
                del contest.race.candidates[cell.key]  # the levels stay those of all cells that started
        live = [c for c in live if c.key not in contest.out]
        found = {c.key: _records(contest, c) for c in [contest.full, *live]}
        top = [value(contest.full, found[contest.full.key], unit, turns) for unit in chosen]
        losses = {
            c.key: [a - value(c, found[c.key], unit, turns) for a, unit in zip(top, chosen, strict=True)] for c in live
        }
        for key, more in losses.items():
            contest.losses[key] += more
        contest.race.add(losses)
        contest.used = taken.stop
        tell(contest)


def _records(contest: Contest, cell: Cell) -> dict[RecordKey, dict[str, object]]:
    return {record_key(r): r for r in contest.plan.store.cell(cell.key).records()}


def _compute(
    contest: Contest, cells: Sequence[Cell], chosen: Sequence[Unit], library: evaluate.Library, console: Console
) -> None:
    """Bring the records of a round into the store, all cells on one prefill."""
    contexts = {context for unit in chosen for context in unit}
    wanted = {(*example, draw) for context in contexts for example in context for draw in range(cells[0].draws)}
    before = {c.key: wanted & contest.plan.store.cell(c.key).done() for c in cells}
    running = [c for c in cells if c.state == "run" and len(before[c.key]) < len(wanted)]
    if not running:
        return
    for cell in running:
        cell.missing = tuple(k for k in cell.expected if k in wanted - before[cell.key])
    Runner(dataclasses.replace(contest.plan, groups=[running]), library, console, contexts=contexts).run()
    contest.computed += sum(len(wanted & contest.plan.store.cell(c.key).done()) - len(before[c.key]) for c in running)
