"""python -m pipelines.score benchmark=longbench predictions=DIR: official scores of anyone's prediction files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from moend import paths
from moend.errors import UserError, unknown
from pipelines.cli.args import parse, program
from pipelines.cli.terminal import console, say
from pipelines.store.files import write_json

if TYPE_CHECKING:
    from rich.console import Console

    from moend.benchmarks import Benchmark
    from moend.benchmarks.longbench import LongBench
    from moend.statistics import Interval

USAGE = """Scores prediction files: LongBench's exactly as its own evaluation does, and answers to math problems.

  python -m pipelines.score benchmark=longbench predictions=DIR [out=DIR] [e=true]
  python -m pipelines.score benchmark=math500 predictions=DIR [out=DIR]
  python -m pipelines.score benchmark=lm_eval predictions=DIR [out=DIR]

  benchmark    longbench (all 21 tasks), longbench_moend, longbench_en, longbench_all, longbench_e;
               math500, aime24, aime25; lm_eval
  predictions  LongBench: a folder of <task>.jsonl (or one such file), one JSON object a line with
               pred, answers, all_classes, length.
               Math: <benchmark>.jsonl, in a folder or itself, with answer, text; lines that share an `id` are draws
               for one problem, and a text whose `finish_reason` is "length" was cut off
               lm_eval: samples_<task>_<date>.jsonl as `lm_eval --log_samples` leaves them. Its own values count
  e            true: LongBench-E's length buckets 0-4k, 4-8k, 8k+ too (always with longbench_e)
  out          where result.json goes; default: the folder of the predictions. A result.json of another program that
               lies there is kept as result.published.json, and its scores are shown beside ours

LongBench's texts are scored as they stand: thoughts are not cut off, since the official evaluation does not.
Intervals are for 95 %: Wilson for scores of 0 and 1, else a bootstrap over examples.
Exit codes: 0 scored (missing and unknown tasks are listed), 2 a mistake in the command or in a file."""

MATH = ("math500", "aime24", "aime25")
PUBLISHED = "result.published.json"


@dataclass
class Scores:
    """The scores of one task, each in [0, 1], and what they are of."""

    task: str
    metric: str
    values: list[float]
    ids: list[str]
    official_rows: int | None = None
    buckets: dict[str, list[float]] = field(default_factory=dict)
    answered: int | None = None

    @property
    def value(self) -> float:
        """The official score: 100 times the mean, rounded to two decimals."""
        total = 0.0
        for value in self.values:  # plain addition: `sum` is more exact than the official loop from Python 3.12 on
            total += value
        return round(100 * total / len(self.values), 2)

    @property
    def n(self) -> int:
        """Examples."""
        return len(set(self.ids))

    @cached_property
    def interval(self) -> Interval:
        """Of the mean, in [0, 1]; read it when all values are there."""
        from moend.statistics import score_interval

        return score_interval(self.values, self.ids)


@dataclass(frozen=True)
class Scored:
    """All that was found in a folder. missing: tasks of the benchmark without a file; unknown: files that are none."""

    benchmark: str
    tasks: list[Scores]
    missing: list[str]
    unknown: list[str]
    scorer_version: int

    @property
    def average(self) -> float:
        """The mean of the tasks' scores as they are shown, rounded as they are."""
        return round(sum(t.value for t in self.tasks) / len(self.tasks), 2)

    @cached_property
    def interval(self) -> Interval:
        """Of the average, in [0, 1], by a bootstrap within each task."""
        from moend.statistics import score_interval

        values = [v for t in self.tasks for v in t.values]
        keys = [(t.task, i) for t in self.tasks for i in t.ids]
        return score_interval(values, keys, [t.task for t in self.tasks for _ in t.values])

    def result(self) -> dict[str, Any]:
        """What result.json holds. n: examples; buckets and extraction_rate only where there are such."""
        out: dict[str, Any] = {
            "benchmark": self.benchmark,
            "tasks": {t.task: t.value for t in self.tasks},
            "average": self.average,
            "n": sum(t.n for t in self.tasks),
            "rows": {t.task: len(t.values) for t in self.tasks},
            "intervals": {t.task: _bounds(t.interval) for t in self.tasks},
            "average_interval": _bounds(self.interval),
            "missing": self.missing,
            "unknown": self.unknown,
            "scorer_version": self.scorer_version,
        }
        if any(t.buckets for t in self.tasks):
            out["buckets"] = {
                t.task: {b: {"score": bucket_score(v), "n": len(v)} for b, v in t.buckets.items()} for t in self.tasks
            }
        rates = {t.task: t.answered / len(t.values) for t in self.tasks if t.answered is not None}
        return out | ({"extraction_rate": rates} if rates else {})


def bucket_score(values: Sequence[float]) -> float | None:
    """LongBench-E's score of a bucket, rounded as there; None for an empty one."""
    import numpy as np

    return round(float(100 * np.mean(values)), 2) if values else None


# LongBench


def score_longbench(bench: LongBench, source: Path, e: bool) -> Scored:
    """Every file of a folder that is named after a task of the benchmark, or one such file."""
    from moend.benchmarks.longbench import TABLE, TASKS_E

    if not source.exists():
        raise UserError(f"predictions={source} is not a folder, nor a file: there is nothing of that name")
    named = list(TASKS_E if e else TABLE) if bench.name == "longbench" else list(bench.task_names)
    wanted = list(TABLE) if bench.name == "longbench" else named
    found = sorted(source.glob("*.jsonl")) if source.is_dir() else [source]
    files = {p.name.removesuffix(".jsonl"): p for p in found}
    tasks = [_task(files[t], t, e) for t in wanted if t in files]
    if not tasks:
        below = sorted(p.parent for p in source.rglob("*.jsonl") if p.stem in wanted) if source.is_dir() else []
        hint = f". predictions={below[0]} holds some" if below else ""
        raise UserError(
            f"predictions={source} holds no task of {bench.name}: files are <task>.jsonl ({wanted[0]}.jsonl){hint}"
        )
    return Scored(
        bench.name,
        tasks,
        [t for t in named if t not in files],
        [p.name for t, p in files.items() if t not in wanted],
        bench.scorer_version,
    )


def _task(path: Path, task: str, e: bool) -> Scores:
    from moend.benchmarks import longbench, rows
    from moend.benchmarks.longbench import BUCKETS, TABLE

    length: dict[str, Any] = {"length": rows.number} if e else {}
    schema = rows.fields(pred=rows.text, answers=longbench.answers(task), **length)
    found = list(rows.read(path, schema, unique=("_id",)))
    if not found:
        raise UserError(f"{path} is empty")
    official = int(TABLE[task]["rows_e" if e and "rows_e" in TABLE[task] else "rows"])
    rows.require_count(len(found), official, str(path))
    where, last = found[-1]  # as there: the classes of the file's last line, for all lines
    rows.check(last, rows.fields(all_classes=longbench.classes(task)), where)
    classes = last.get("all_classes")
    out = Scores(task, TABLE[task]["metric"], [], [], official)
    if e:
        out.buckets = {b: [] for b in BUCKETS}
    for where, row in found:
        value = longbench.prediction_score(task, row["pred"], [str(a) for a in row["answers"]], classes or ())
        out.values.append(value)
        out.ids.append(where)
        if e:
            out.buckets[longbench.bucket(row["length"])].append(value)
    return out


# Math


def score_math(bench: Benchmark, source: Path) -> Scored:
    """A file of answers, or the one in a folder that is named after the benchmark (or is alone there and not named
    after another one)."""
    from moend.benchmarks import Sample, rows
    from moend.benchmarks.competition import SETS, gold
    from moend.benchmarks.longbench import TABLE

    path = source
    if source.is_dir():
        path, alone = source / f"{bench.name}.jsonl", sorted(source.glob("*.jsonl"))
        path = alone[0] if not path.is_file() and len(alone) == 1 and alone[0].stem not in {*MATH, *TABLE} else path
    if not path.is_file():
        raise UserError(f"predictions={source} holds no {bench.name}.jsonl")
    task = bench.task_names[0]
    found = Scores(task, bench.metric(task), [], [], answered=0)
    schema = rows.fields(answer=gold(task), text=rows.text, id=rows.optional(rows.named))
    for where, row in rows.read(path, schema, unique=("id", "draw")):
        cut_off: dict[str, Any] = {"finished": False} if row.get("finish_reason") == "length" else {}
        scored = bench.score(Sample(task, where, "", "", "", (str(row["answer"]),)), row["text"], **cut_off)
        found.values.append(scored["score"])
        found.ids.append(str(row.get("id", where)))
        found.answered = (found.answered or 0) + (scored["answer"] is not None)
    if not found.values:
        raise UserError(f"{path} is empty")
    rows.require_count(found.n, SETS[task].rows, f"{path}: it")
    return Scored(bench.name, [found], [], [], bench.scorer_version)


# Files


def _published(folder: Path) -> dict[str, Any] | None:
    """Task scores of a result.json that another program left in a folder (or of one put aside before), if any."""
    for path in (folder / PUBLISHED, folder / "result.json"):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict) and "scorer_version" not in found:
            return found
    return None


def write(scored: Scored, out: Path) -> Path:
    """Write result.json; another program's is put aside first, never overwritten."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "result.json"
    if path.is_file() and not (out / PUBLISHED).exists() and not _ours(path):
        path.rename(out / PUBLISHED)
    write_json(path, scored.result())
    return path


def _ours(path: Path) -> bool:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(found, dict) and "scorer_version" in found


# Output


def _bounds(interval: Interval) -> list[float | None]:
    return [None if x is None else round(100 * x, 2) for x in (interval.low, interval.high)]


def show(scored: Scored, published: dict[str, Any] | None, to: Console) -> None:
    """The official table: a task a line, the average of several last."""
    buckets = list(scored.tasks[0].buckets)
    shown = {t.task: theirs for t in scored.tasks if isinstance(theirs := (published or {}).get(t.task), int | float)}
    heads = ["task", "metric", "score", "95 %", *buckets, "n", *(["published"] if shown else [])]
    table = Table(box=None)
    for head in heads:
        table.add_column(head, justify="left" if head in ("task", "metric") else "right")
    for t in scored.tasks:
        short = (
            f"{len(t.values)} of {t.official_rows}" if (t.official_rows or 0) > len(t.values) else str(len(t.values))
        )
        cells = [_number(bucket_score(t.buckets[b])) for b in buckets]
        theirs = [_number(shown.get(t.task))] if shown else []
        table.add_row(t.task, t.metric, _number(t.value), _range(t.interval), *cells, short, *theirs)
    if len(scored.tasks) > 1:
        means = [[s for t in scored.tasks if (s := bucket_score(t.buckets[b])) is not None] for b in buckets]
        cells = [_number(sum(m) / len(m) if m else None) for m in means]
        total = str(sum(len(t.values) for t in scored.tasks))
        last = [
            "average",
            f"{len(scored.tasks)} tasks",
            _number(scored.average),
            _range(scored.interval),
            *cells,
            total,
        ]
        table.add_row(*last, *([""] if shown else []))
    to.print(table)
    if shown:
        same = sum(t.value == shown.get(t.task) for t in scored.tasks)
        say(to, f"equal to the published result.json: {same} of {len(shown)} tasks")
    if scored.missing:
        say(to, f"missing ({len(scored.missing)}): {', '.join(scored.missing)}")
    if scored.unknown:
        say(to, f"not a task of {scored.benchmark}, not scored: {', '.join(scored.unknown)}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _range(interval: Interval) -> str:
    low, high = _bounds(interval)
    return "-" if low is None or high is None else f"[{low:.2f}, {high:.2f}]"


def names() -> dict[str, str]:
    """The benchmarks that can be scored from files, by name, with their type."""
    import yaml

    found = {}
    for path in paths.folder("conf", "benchmark").glob("*.yaml"):
        kind = yaml.safe_load(path.read_text(encoding="utf-8"))["type"]
        if kind in ("longbench", "lm_eval") or path.stem in MATH:
            found[path.stem] = kind
    return found


def _scorer(name: str, e: str) -> Callable[[Path], Scored]:
    known = names()
    if name not in known:
        raise unknown("benchmark to score", name, known)
    if e not in ("true", "false", ""):
        raise UserError(f"e is true or false, got '{e}'")
    from moend.benchmarks import benchmark
    from moend.benchmarks.longbench import LongBench

    bench = benchmark(name)
    if not isinstance(bench, LongBench):
        if e:
            raise UserError(f"e={e} is for LongBench, not for {name}")
        if known[name] == "lm_eval":
            from pipelines.results.harness_files import score_lm_eval

            return lambda source: score_lm_eval(source, bench.scorer_version)
        return lambda source: score_math(bench, source)
    return lambda source: score_longbench(bench, source, bench.e or e == "true")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return program(argv, USAGE, _main)


def _main(args: list[str]) -> int:
    values = parse(args, {"benchmark": "", "predictions": "", "out": "", "e": ""})
    for name in ("benchmark", "predictions"):
        if not values[name]:
            raise UserError(f"{name}= is missing: python -m pipelines.score benchmark=longbench predictions=DIR")
    source = Path(values["predictions"]).expanduser()
    scored = _scorer(values["benchmark"], values["e"])(source)
    folder = source if source.is_dir() else source.parent
    out, to = Path(values["out"]).expanduser() if values["out"] else folder, console()
    show(scored, _published(folder), to)
    say(to, str(write(scored, out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
