"""What `choose` asks, answers and writes: the smallest cache that loses little enough, and why it is that one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import yaml
from rich.console import Console
from rich.table import Table

from moend import paths
from moend.budget import Arch, Budget
from moend.errors import UserError, unknown
from moend.statistics.sequential import confidence_sequence
from pipelines.cli import terminal
from pipelines.cli.hydra import Point
from pipelines.cli.terminal import budget, say, size
from pipelines.execution import racing
from pipelines.execution import session as evaluate
from pipelines.execution.racing import Contest, Turns
from pipelines.planning import planner
from pipelines.planning.planner import Cell, Plan
from pipelines.store.files import write_atomic, write_json
from pipelines.store.payload import key

OWN = {"loss": "5", "confidence": "95%", "batch": "1", "length": "", "turns": "all"}
METHODS = "StreamingLLM,SnapKV,AdaKV,KVZip,2d_uniform,2d_hetero,RippleKV,ripple_2d_head"
BUDGETS = "5%,10%,20%,40%"
LIMIT = 400  # examples of a generated benchmark, where nobody says how many


@dataclass(frozen=True)
class Wish:
    """What is asked for."""

    loss: float  # share of the score that may be lost, 0.05 for 5 points
    confidence: float  # that the answer is right, in (0, 1)
    batch: int  # sequences that the memory is stated for
    length: int | None  # tokens of each of them; None: the benchmark's longest prompt
    turns: Turns  # which questions of a context count

    @classmethod
    def parse(cls, values: dict[str, str]) -> Wish:
        """From the arguments as typed; a UserError names what is not understood."""
        loss = _number("loss", values["loss"]) / 100
        said = values["confidence"]
        confidence = _number("confidence", said.removesuffix("%")) / (100 if said.endswith("%") else 1)
        if not 0 < loss < 1:
            raise UserError(f"loss={values['loss']}: points of 100 that the score may fall, more than 0, less than 100")
        if not 0.5 <= confidence < 1:
            raise UserError(f"confidence={said}: use a share such as 95% or 0.95, from 50 % to less than 100 %")
        if values["turns"] not in get_args(Turns):
            raise unknown("choice of turns", values["turns"], get_args(Turns))
        counts = {name: values[name] or "1" for name in ("batch", "length")}
        for name, count in counts.items():
            if not count.isdecimal() or int(count) < 1:
                raise UserError(f"{name}={count} must be a whole number of at least 1")
        length = int(values["length"]) if values["length"] else None
        return cls(loss, confidence, int(counts["batch"]), length, values["turns"])  # type: ignore[arg-type]


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{name}={text} is not a number") from None


def split(args: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The arguments of `choose` itself, and those of the cells it compares, completed: methods, budgets, `full`.

    A sweep (`+sweep=`) brings methods and budgets of its own.
    """
    own, rest = dict(OWN), []
    for arg in args:
        name, equals, text = arg.partition("=")
        if name in OWN and equals:
            own[name] = text
        elif name == "method" and equals and "full" not in text.split(","):
            rest.append(f"method=full,{text}")
        else:
            rest.append(arg)
    if any(a.partition("=")[0] == "+sweep" or a in ("-h", "--help") for a in rest):
        return own, rest
    given = {a.lstrip("+").partition("=")[0]: a.partition("=")[2] for a in rest}
    rest += [f"method=full,{METHODS}"] * ("method" not in given) + [f"budget={BUDGETS}"] * ("budget" not in given)
    if not {"benchmark.limit", "benchmark.rows"} & given.keys() and _endless(given.get("benchmark", "niah")):
        rest.append(f"benchmark.limit={LIMIT}")
    return own, [*rest, *(["-m"] if not {"-m", "--multirun"} & set(rest) else [])]


def _endless(name: str) -> bool:
    """Whether a benchmark's examples are generated, as many as are asked for."""
    from moend.benchmarks import implementation

    path = paths.folder("conf", "benchmark") / f"{name}.yaml"
    return path.is_file() and implementation(yaml.safe_load(path.read_text(encoding="utf-8"))["type"]).endless


def choose(points: Sequence[Point], args: Sequence[str], own: dict[str, str]) -> int:
    """Plan, race, answer. Returns the exit code."""
    wish, console, library = Wish.parse(own), terminal.console(), evaluate.Library()
    plan = planner.make_plan(points, library)
    config = plan.cells[0].config
    if config.cluster.name != "inprocess":
        raise UserError(
            "choose races in this process (cluster=inprocess), as each round waits for the one before: submit the "
            "command itself as one job; records that other runs bring into the same store are used"
        )
    asked = [wish.loss, wish.confidence, wish.turns, sorted(c.key for c in plan.cells)]
    plan.name = f"choice-{key(asked)[:8]}"
    planner.show(plan, console, detail=config.dry_run)
    contest = racing.contest(plan, wish.loss, 1 - wish.confidence)
    if config.dry_run:
        return 0
    plan.store.prepare()
    write_json(_manifest(plan), planner.manifest(plan, args, "choose"))
    racing.run(
        contest, library, console, seed=config.seed, turns=wish.turns, tell=lambda c: say(console, "  " + standing(c))
    )
    write_json(_manifest(plan), planner.manifest(plan, args, "choose"))
    answer = describe(contest, wish)
    show(answer, console)
    folder = plan.store.root / "choices" / plan.name
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "choice.json", answer)
    write_atomic(folder / "choice.md", markdown(answer))
    say(console, f"written: {folder / 'choice.md'} and choice.json")
    command = shlex.join(["python", "-m", "pipelines.choose", *args])
    if not answer["decided"]:
        more = answer["more"]
        hint = f" benchmark.limit={contest.there + more}" if more else ""
        say(console, f"again with more examples: {command}{hint}")
    if any(reason.startswith("failed") for reason in contest.out.values()):
        return 1
    return 0 if answer["decided"] else 3


def _manifest(plan: Plan) -> Any:
    path = plan.store.manifest(plan.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def standing(contest: Contest) -> str:
    """A round in one line."""
    cells = contest.race.candidates.values()
    good, bad = (sum(c.verdict == v for c in cells) for v in ("good", "bad"))
    return (
        f"{contest.used} of {contest.there} examples: {good} cells surely lose little enough, {bad} surely too much, "
        f"{len(contest.race.live)} open"
    )


def describe(contest: Contest, wish: Wish) -> dict[str, Any]:
    """The answer as JSON: what was chosen, what cannot be told apart, what was ruled out, and every cell's loss."""
    decision, facts = contest.decision, contest.full.facts
    length = wish.length or facts.prompt_tokens
    cells = [_line(contest, c, wish, length) for c in contest.rivals]
    cells.sort(key=lambda c: (c["bytes"], c["loss"] if c["loss"] is not None else 2.0))
    good = [c for c in cells if c["verdict"] == "good"]
    answer = good[0] if decision.answer else None  # of those of one size the one that lost least
    if answer is not None:
        answer["chosen"] = True
    return {
        "schema": 1,
        "name": contest.plan.name,
        "model": facts.model,
        "benchmark": facts.benchmark,
        "measure": "accuracy of the next token" if facts.is_nll else next(iter(facts.metrics.values())),
        "loss": wish.loss,
        "confidence": wish.confidence,
        "turns": wish.turns,
        "batch": wish.batch,
        "length": length,
        "decided": decision.decided,
        "answer": answer,
        "equal": [
            c["label"]
            for c in cells
            if answer and c is not answer and c["verdict"] in ("good", "open") and c["bytes"] <= answer["bytes"]
        ],
        "more": decision.more,
        "examples": contest.used,
        "examples_there": contest.there,
        "records_computed": contest.computed,
        "records_of_the_sweep": (len(contest.rivals) + 1) * len(contest.full.expected),
        "full_bytes": facts.full_bytes,
        "full_memory": None if facts.arch is None else wish.batch * facts.arch.full_bytes(length),
        "cells": cells,
        "out": {contest_label(contest, k): reason for k, reason in contest.out.items()},
    }


def contest_label(contest: Contest, key: str) -> str:
    """A cell's name in the answer."""
    return next(name(c) for c in contest.plan.cells if c.key == key)


def name(cell: Cell) -> str:
    """Method and budget."""
    return f"{cell.facts.method} at {budget(cell.payload['budget'])}"


def _line(contest: Contest, cell: Cell, wish: Wish, length: int) -> dict[str, Any]:
    losses = contest.losses[cell.key]
    low, high = confidence_sequence(losses, 1 - wish.confidence) if losses else (None, None)
    candidate = contest.race.candidates.get(cell.key)
    plan = contest.plan.store.cell(cell.key).folder / "plan.json"
    return {
        "key": cell.key,
        "label": name(cell),
        "method": cell.facts.method,
        "budget": cell.payload["budget"],
        "bytes": cell.facts.cell_bytes,
        "memory": _memory(cell, cell.facts.arch, wish.batch, length),
        "plan": str(plan) if plan.exists() else None,
        "loss": sum(losses) / len(losses) if losses else None,
        "low": low,
        "high": high,
        "examples": len(losses),
        "verdict": "out" if candidate is None else candidate.verdict,
        "chosen": False,
    }


def _memory(cell: Cell, arch: Arch | None, batch: int, length: int) -> int | None:
    """Bytes that the caches of a batch may hold at the moment the budget binds."""
    if arch is None:
        return None
    return batch * min(Budget.parse(cell.config.budget).to_bytes(arch, length), arch.full_bytes(length))


def verdict(answer: dict[str, Any]) -> list[str]:
    """The answer in sentences."""
    points, sure = f"{100 * answer['loss']:g} points", f"{100 * answer['confidence']:g} %"
    of = f"{answer['measure'].replace('_', ' ')} on {answer['benchmark']} by {answer['model']}"
    asked = f"at most {points} of {of} lost against the full cache, {sure} confidence"
    if (found := answer["answer"]) is not None:
        lines = [f"{asked}: {found['label']}"]
        if found["memory"] is not None:
            lines.append(
                f"  cache: {size(found['memory'])} for {answer['batch']} x {answer['length']:,} tokens at the moment "
                f"the budget binds, full {size(answer['full_memory'])}; weights and the prefill's own come on top"
            )
        if found["plan"]:
            lines.append(f"  plan: {found['plan']}")
        if answer["equal"]:
            lines.append(f"  of the same size, not told apart: {', '.join(answer['equal'])}")
    elif answer["decided"]:
        lines = [f"{asked}: none of them; keep the full cache, or allow more bytes or a larger loss"]
    else:
        more = answer["more"]
        ahead = f"about {more} more" if more else "no number can be told, as losses lie at the limit"
        lines = [f"{asked}: not decided with {answer['examples']} examples; needed: {ahead}"]
    ruled = [f"{c['label']} ({c['examples']})" for c in answer["cells"] if c["verdict"] == "bad"]
    if ruled:
        lines.append(f"  ruled out, with the examples it took: {', '.join(ruled)}")
    lines += [f"  not compared: {label}: {reason}" for label, reason in answer["out"].items()]
    share = answer["records_computed"] / answer["records_of_the_sweep"]
    lines.append(f"  {answer['records_computed']:,} records computed, {share:.0%} of the full sweep's")
    return lines


WORDS = {"good": "loses little enough", "bad": "loses too much", "open": "open", "out": "not compared"}
TITLES = ("", "method", "budget", "cache", "loss, points", "interval", "examples", "verdict")


def _rows(answer: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for c in answer["cells"]:
        known = c["loss"] is not None
        loss = f"{100 * c['loss']:.1f}" if known else "-"
        interval = f"[{100 * c['low']:.1f}, {100 * c['high']:.1f}]" if known else "-"
        held = size(c["bytes"])
        mark = "*" if c["chosen"] else ""
        count = str(c["examples"])
        rows.append((mark, c["method"], budget(c["budget"]), held, loss, interval, count, WORDS[c["verdict"]]))
    return rows


def show(answer: dict[str, Any], console: Console) -> None:
    """Print the table, then the answer."""
    table = Table(*TITLES, box=None, title="loss against the full cache", title_justify="left", header_style="bold")
    for row in _rows(answer):
        table.add_row(*row)
    console.print(table)
    for line in verdict(answer):
        say(console, line)


def markdown(answer: dict[str, Any]) -> str:
    """The answer and its table, to paste."""
    lines = [f"# {answer['name']}", "", *(line.strip() + "  " for line in verdict(answer)), ""]
    lines += [f"| {' | '.join(TITLES)} |", "|" + "---|" * len(TITLES)]
    lines += [f"| {' | '.join(row)} |" for row in _rows(answer)]
    said = f"Intervals hold at {100 * answer['confidence']:g} % for each cell at all looks together."
    return "\n".join([*lines, "", said, ""])
