"""LongBench v1 and LongBench-E (Bai et al. 2024): official rows, prompts, output lengths and metrics."""

from __future__ import annotations

import difflib
import hashlib
import json
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from moend.benchmarks import rows
from moend.benchmarks.answers.extract import first_line
from moend.benchmarks.base import Benchmark, Rendered, Sample, log
from moend.benchmarks.hub import HubFile
from moend.benchmarks.metrics import METRICS, PARAGRAPH, PARAGRAPH_ZH
from moend.benchmarks.prompts import Prompt, render_prompt
from moend.benchmarks.rows import Check, Row
from moend.budget import Arch
from moend.errors import Blocked, UserError

TABLE: dict[str, dict[str, Any]] = json.loads(
    resources.files("moend.benchmarks").joinpath("data/longbench.json").read_text(encoding="utf-8")
)
HUB = "THUDM/LongBench"
BUCKETS = ("0-4k", "4-8k", "8k+")
TASKS_E = tuple(task for task, row in TABLE.items() if "rows_e" in row)


def bucket(length: float) -> str:
    """LongBench-E's bucket of a row's `length`, its words (characters in Chinese) before any truncation."""
    return BUCKETS[(length >= 4000) + (length >= 8000)]


def prediction_score(task: str, prediction: str, answers: Iterable[str], classes: Sequence[str]) -> float:
    """The official score in [0, 1] of a text as it was generated: the largest over the answers.

    Few-shot tasks are scored by the first line after leading newlines. classes: all that trec and lsht know of.
    """
    if TABLE[task]["first_line"]:
        prediction = first_line(prediction)
    metric = METRICS[TABLE[task]["metric"]]
    return max((metric(prediction, answer, classes) for answer in answers), default=0.0)


def answers(task: str) -> Check:
    """The schema of a row's gold: a list of texts that the task's metric can use."""
    metric = TABLE[task]["metric"]
    pattern = {"retrieval": PARAGRAPH, "retrieval_zh": PARAGRAPH_ZH}.get(metric)
    if pattern is None:
        return rows.listed(rows.named)
    return rows.listed(rows.matching(pattern, "'Paragraph N'" if pattern is PARAGRAPH else "'段落N'"))


def classes(task: str) -> Check:
    """The schema of all_classes: a list for classification, null elsewhere."""
    check = rows.listed(rows.filled)
    return check if TABLE[task]["metric"] == "classification" else rows.optional(check)


def row(task: str) -> Check:
    """The schema of an official row."""
    return rows.fields(
        input=rows.text,
        context=rows.filled,
        answers=answers(task),
        all_classes=classes(task),
        _id=rows.named,
        length=rows.optional(rows.number),
        dataset=rows.optional(rows.text),
        language=rows.optional(rows.text),
    )


@dataclass(frozen=True, kw_only=True)
class LongBench(Benchmark):
    """Official rows in file order: the first `limit` (or `rows`, or all) of each task.

    length: the most tokens of rendered prompt plus output, cut in the middle of the context; null, or more than the
        model has, is the model's own limit.
    data_dir: official JSON lines: a folder with `<task>.jsonl`, a zip archive that holds such files in any folder, or
        one file (of the task it is named after, else of the tasks its rows name in `dataset`); null reads the hub's
        archive at `revision`.
    e: LongBench-E: 13 tasks with rows spread evenly over lengths, files `<task>_e.jsonl`.
    """

    data_dir: str | None = None
    revision: str | None = None
    e: bool = False

    all_tasks: ClassVar[tuple[str, ...]] = tuple(TABLE)
    run_only: ClassVar[tuple[str, ...]] = ("rows", "limit", "data_dir", "revision")
    scored_meta: ClassVar[tuple[str, ...]] = ("all_classes",)
    asks_several: ClassVar[bool] = True
    scorer_version: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.e, bool):
            raise UserError(f"benchmark.e={self.e} must be true or false")
        if self.e and (other := [t for t in self.task_names if t not in TASKS_E]):
            raise UserError(f"LongBench-E has no {other[0]}: its tasks are {', '.join(TASKS_E)}")
        if self.split != "test":
            raise UserError(f"{self.name} has no {self.split} split: its rows are for evaluation")
        if self.data_dir is None and not self.revision:
            raise UserError("benchmark.revision must name the data's commit where benchmark.data_dir is null")

    def data_sets(self) -> tuple[str, ...]:
        """The collection, and what each task was made of."""
        return ("LongBench", *self.task_names)

    def metric(self, task: str) -> str:
        """The task's official metric."""
        return str(TABLE[task]["metric"])

    def new_tokens(self, task: str) -> int:
        """The official output length."""
        return int(TABLE[task]["max_new_tokens"])

    def uses_chat(self, task: str) -> bool:
        """Not for the few-shot tasks, unless `chat_template: all`."""
        return self.chat_template == "all" or (self.chat_template == "official" and bool(TABLE[task]["chat"]))

    def stops(self, task: str) -> tuple[str, ...]:
        """samsum ends at a newline."""
        return () if self.reasoning else tuple(TABLE[task]["stop"])

    def reference_length(self, arch: Arch) -> int:
        """The truncation length."""
        return min(self.length or arch.max_positions, arch.max_positions)

    def check(self, arch: Arch, max_new_tokens: int | None = None) -> None:
        """Refuse an output length that leaves no room for a prompt."""
        for task in self.task_names:
            new = self.fed_tokens(max_new_tokens) if self.turns else self.output_tokens(task, max_new_tokens)
            if new >= self.reference_length(arch):
                raise UserError(
                    f"{task}: {new} new tokens leave no room for a prompt in {self.reference_length(arch)} tokens"
                    " (the smaller of benchmark.length and the model's positions)"
                )

    # Data

    def available(self) -> str | None:
        """What is missing: files of data_dir, or the hub's archive where the hub is switched off."""
        if self.hub_file:
            return self.hub_file.unavailable()
        try:
            for task in self.task_names:
                if next(iter(self._rows(task)), None) is None:
                    raise Blocked(f"benchmark.data_dir={self.data_dir} has no rows of {task}")
        except Blocked as e:
            return str(e)
        return None

    @property
    def hub_file(self) -> HubFile | None:
        """One file at the pinned commit; none where data_dir holds the rows."""
        if self.data_dir is not None:
            return None
        return HubFile(HUB, "data.zip", str(self.revision), self._cache)

    def expected(self) -> dict[str, int]:
        """The pinned row counts, without the data; from data_dir, where it is here: what it holds."""
        if self.data_dir is not None and self.available() is None:
            return super().expected()
        rows = {t: int(TABLE[t]["rows_e" if self.e else "rows"]) for t in self.task_names}
        return {t: min(self.limit or self.rows or n, n) for t, n in rows.items()}

    def fingerprint(self) -> str:
        """From the hub: of its name and commit, without the data. From data_dir: of the samples."""
        if self.data_dir is not None and (self.revision is None or self.available() is None):
            return super().fingerprint()
        return hashlib.sha256(f"{HUB}@{self.revision}".encode()).hexdigest()

    def make_samples(self) -> list[Sample]:
        """Rows in file order; fewer than asked for is a warning."""
        if reason := self.available():
            raise Blocked(reason)
        samples: list[Sample] = []
        for task in self.task_names:
            wanted, official = self.limit or self.rows, int(TABLE[task]["rows_e" if self.e else "rows"])
            found = [_sample(task, row) for _, row in self._rows(task)]
            if not found:
                raise UserError(f"{task}.jsonl has no rows")
            rows.require_count(len(found), official, f"{task}{'_e' if self.e else ''}.jsonl")
            if wanted and len(found) < wanted:
                log.warning("%s: %s has %d of %d rows; all of them are used", self.name, task, len(found), wanted)
            samples += found[:wanted]
        return samples

    def _rows(self, task: str) -> Iterator[tuple[str, Row]]:
        """(file:number, row) of every row of a task; Blocked where there is no such file."""
        name = f"{task}_e.jsonl" if self.e else f"{task}.jsonl"
        if self.hub_file:
            return _zipped(self.hub_file.get(), name, task)
        source = Path(str(self.data_dir)).expanduser()
        if source.is_dir():
            if not (source / name).is_file():
                near = difflib.get_close_matches(name, [p.name for p in source.glob("*.jsonl")], n=1, cutoff=0.8)
                hint = f" (is it '{near[0]}'?)" if near and near[0].removesuffix(".jsonl") not in TABLE else ""
                raise Blocked(f"benchmark.data_dir={self.data_dir} has no {name}{hint}")
            return rows.read(source / name, row(task), unique=("_id",))
        if not source.is_file():
            raise Blocked(f"benchmark.data_dir={self.data_dir} is not here")
        if zipfile.is_zipfile(source):
            return _zipped(source, name, task)
        if source.stem.removesuffix("_e") in TABLE:
            return rows.read(source, row(task), unique=("_id",)) if source.name == name else iter(())
        read = rows.read(source, _of_its_task, unique=("dataset", "_id"))
        return ((where, x) for where, x in read if _task(x) == task)

    # Prompts and scores

    def render(
        self, sample: Sample, tokenizer: Any, arch: Arch, *, chat: bool, max_new_tokens: int | None = None
    ) -> Rendered:
        """The official prompt, cut so that it and the output fit; the boundary is the end of {context}."""
        self.check(arch, max_new_tokens)
        row = TABLE[sample.task]
        head, tail = row["prompt"].split("{context}")
        new = self.output_tokens(sample.task, max_new_tokens)
        return render_prompt(
            sample,
            Prompt(head, sample.context, tail.replace("{input}", sample.question)),
            tokenizer,
            chat=chat and self.uses_chat(sample.task),
            limit=self.reference_length(arch) - (self.fed_tokens(max_new_tokens) if self.turns else new),
            max_new_tokens=new,
            gold=sample.gold[0],
            stop=self.stops(sample.task),
            thinking=self.thinking,
        )

    def score(self, sample: Sample, text: str, *, finished: bool = True, opened: bool = False) -> dict[str, Any]:
        """Largest score over the references, of the text after the last thought (few-shot tasks: its first line)."""
        row = TABLE[sample.task]
        answer = self.final_text(text, opened=opened)
        if answer is None:
            return {"score": 0.0, "answer": None}
        if row["first_line"]:
            answer = first_line(answer)
        best = prediction_score(sample.task, answer, sample.gold, sample.meta["all_classes"] or ())
        return {"score": best, "answer": answer if answer.strip() else None}


def _zipped(archive: Path, name: str, task: str) -> Iterator[tuple[str, Row]]:
    with zipfile.ZipFile(archive) as z:
        found = [n for n in z.namelist() if PurePosixPath(n).name == name]
        if not found:
            raise Blocked(f"{archive} has no {name}")
        if len(found) > 1:
            raise UserError(f"{archive} has several files {name}: {', '.join(found)}")
        with z.open(found[0]) as raw:
            yield from rows.read(raw, row(task), unique=("_id",), place=f"{archive}/{found[0]}")


def _task(row: Row) -> str:
    """The task that a row of a file of several tasks names."""
    return str(row["dataset"]).removesuffix("_e")


def _of_its_task(value: Any, field: str) -> None:
    """The schema of a row of a file of several tasks."""
    rows.fields(dataset=rows.one_of([*TABLE, *(f"{t}_e" for t in TASKS_E)]))(value, field)
    row(_task(value))(value, field)


def _sample(task: str, row: Row) -> Sample:
    meta = {k: row.get(k) for k in ("length", "dataset", "language", "all_classes")}
    gold = tuple(str(a) for a in row["answers"])
    return Sample(task, str(row["_id"]), row["context"], row["input"], "", gold, meta)


BENCHMARK = LongBench
