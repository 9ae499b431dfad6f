"""Sample files of lm-evaluation-harness (`--log_samples`): its own values, with our intervals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from moend.benchmarks import rows
from moend.errors import UserError
from pipelines.results.predictions import Scored, Scores

NAME = re.compile(r"samples_(?P<task>.+)_\d{4}-\d{2}-\d{2}T[\d.-]+\.jsonl")
ROW = rows.fields(doc_id=rows.whole, filter=rows.filled, metrics=rows.listed(rows.filled))


def score_lm_eval(source: Path, version: int) -> Scored:
    """Every metric after every filter of the tasks in a folder of `samples_<task>_<date>.jsonl`, or of one such file.

    Of several files of a task the newest counts; the others are listed. A metric that is no share of right answers
    (a perplexity, the parts of a corpus metric) is listed too: it has no interval here.
    """
    found = sorted(source.glob("*.jsonl")) if source.is_dir() else [source]
    files: dict[str, Path] = {}
    other: list[str] = []
    for path in found:
        match = NAME.fullmatch(path.name)
        if match is None:
            other.append(path.name)
            continue
        if (older := files.get(match["task"])) is not None:
            other.append(older.name)
        files[match["task"]] = path
    if not files:
        raise UserError(f"predictions={source} holds no samples_<task>_<date>.jsonl as `lm_eval --log_samples` writes")
    tasks: list[Scores] = []
    for task, path in files.items():
        scored, odd = _task(task, path)
        tasks += scored
        other += odd
    if not tasks:
        raise UserError(f"predictions={source}: no metric is a share between 0 and 1: {', '.join(other)}")
    return Scored("lm_eval", tasks, [], other, version)


def _task(task: str, path: Path) -> tuple[list[Scores], list[str]]:
    """The scores of a file, and its metrics that are none."""
    values: dict[str, list[Any]] = {}
    ids: dict[str, list[str]] = {}
    for where, row in rows.read(path, ROW, unique=("doc_id", "filter")):
        for metric in row["metrics"]:
            if metric not in row:
                raise UserError(f"{where} has no field '{metric}' although its 'metrics' name it")
            name = f"{metric},{row['filter']}"
            values.setdefault(name, []).append(row[metric])
            ids.setdefault(name, []).append(str(row["doc_id"]))
    if not values:
        raise UserError(f"{path} is empty")
    shares = {k for k, each in values.items() if all(isinstance(v, int | float) and 0 <= v <= 1 for v in each)}
    scored = [Scores(f"{task} {k}", k.partition(",")[0], [float(v) for v in values[k]], ids[k]) for k in sorted(shares)]
    return scored, [f"{task} {k}" for k in sorted(values.keys() - shares)]
