"""Competition mathematics: AIME 2024 and 2025 (30 problems each, whole numbers) and MATH-500 (symbolic equality)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Literal

from moend.benchmarks import rows
from moend.benchmarks.answers.extract import grade, integer
from moend.benchmarks.base import Benchmark, Rendered, Sample, log
from moend.benchmarks.hub import HubFile
from moend.benchmarks.prompts import Prompt, render_prompt
from moend.benchmarks.rows import Check, Row
from moend.budget import Arch
from moend.errors import Blocked, UserError

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
NEW_TOKENS = 16_384


@dataclass(frozen=True)
class _Set:
    """One data set: its rows, how it is graded, and its file on the hub with the field that holds the id."""

    rows: int
    kind: Literal["integer", "math"]
    repo: str
    file: str
    id: str = "id"
    id_prefix: str = ""


SETS = {
    "aime24": _Set(30, "integer", "HuggingFaceH4/aime_2024", "data/train-00000-of-00001.parquet", id_prefix="aime24-"),
    "aime25": _Set(30, "integer", "math-ai/aime25", "test.jsonl", id_prefix="aime25-"),
    "math500": _Set(500, "math", "HuggingFaceH4/MATH-500", "test.jsonl", id="unique_id"),
}


@dataclass(frozen=True, kw_only=True)
class Competition(Benchmark):
    """Problems in file order: the first `limit` (or `rows`, or all) of each set; a problem is never cut.

    The prompt is the problem, a line break and INSTRUCTION. The problem is the context, the instruction the question:
    with question_visible=false the cache is compressed after the problem, before the instruction is read.
    length: the most tokens a rendered prompt may have; a longer one is an error.
    data_dir: a folder of `<task>.jsonl`, or (for one task) the file: one object a line with id, problem and answer;
    null reads the hub's file at `revision`.
    """

    data_dir: str | None = None
    revision: str | None = None

    all_tasks: ClassVar[tuple[str, ...]] = tuple(SETS)
    reasoning_factor: ClassVar[int] = 1  # the limit is one for reasoning already
    run_only: ClassVar[tuple[str, ...]] = ("rows", "limit", "data_dir", "revision")
    scorer_version: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split != "test":
            raise UserError(f"{self.name} has no {self.split} split: its problems are for evaluation")
        if self.length is None:
            raise UserError(f"benchmark.length of {self.name} must be a number of tokens")
        if self.data_dir is None and not self.revision:
            raise UserError("benchmark.revision must name the data's commit where benchmark.data_dir is null")
        if self.data_dir is None and len(self.task_names) > 1:
            raise UserError(f"benchmark.revision is of one data set: {self.name} reads one task from the hub at a time")

    def data_sets(self) -> tuple[str, ...]:
        """AIME's or MATH's."""
        return tuple("AIME" if SETS[task].kind == "integer" else "MATH" for task in self.task_names)

    def metric(self, task: str) -> str:
        """Exact integer for AIME, equality of formulas for MATH."""
        return "exact_integer" if SETS[task].kind == "integer" else "math_equal"

    def new_tokens(self, task: str) -> int:
        """16k, for both; MATH's limit is not in the paper."""
        return NEW_TOKENS

    def reference_length(self, arch: Arch) -> int:
        """The longest prompt that is allowed."""
        return self.length or 0

    def check(self, arch: Arch, max_new_tokens: int | None = None) -> None:
        """Refuse output limits that the model has no positions for, and say which would fit."""
        new = max(self.output_tokens(task, max_new_tokens) for task in self.task_names)
        room = arch.max_positions - self.reference_length(arch)
        if new > room:
            hint = f"generation.max_new_tokens={room} fits" if room > 0 else "lower benchmark.length"
            raise UserError(
                f"{self.name}: {new} new tokens after a prompt of up to {self.length} need {new + (self.length or 0)}"
                f" positions; the model has {arch.max_positions}: {hint} (or set benchmark.max_new_tokens)"
            )

    def caution(self, samples: int) -> str | None:
        """One draw of 30 problems moves by whole problems."""
        few = [t for t in self.task_names if SETS[t].kind == "integer"]
        if samples > 1 or not few:
            return None
        return (
            f"{', '.join(few)}: one draw of each of {SETS[few[0]].rows} problems says little;"
            " generation=reasoning generation.samples=8 draws several"
        )

    # Data

    def available(self) -> str | None:
        """What is missing: files of data_dir, or the hub's file where the hub is switched off."""
        if self.hub_file:
            return self.hub_file.unavailable()
        missing = [self._file(t) for t in self.task_names if not self._file(t).is_file()]
        return f"benchmark.data_dir={self.data_dir}: there is no {missing[0]}" if missing else None

    @property
    def hub_file(self) -> HubFile | None:
        """One file at the pinned commit; none where data_dir holds the rows."""
        if self.data_dir is not None:
            return None
        one = SETS[self.task_names[0]]
        return HubFile(one.repo, one.file, str(self.revision), self._cache)

    def _file(self, task: str) -> Path:
        given = Path(self.data_dir or "").expanduser()
        return given if given.is_file() and len(self.task_names) == 1 else given / f"{task}.jsonl"

    def expected(self) -> dict[str, int]:
        """From the hub: the pinned row counts, without the data. From a folder: what it holds."""
        if self.data_dir is not None:
            return super().expected()
        return {t: min(self.limit or self.rows or SETS[t].rows, SETS[t].rows) for t in self.task_names}

    def fingerprint(self) -> str:
        """From the hub: of its name and commit, without the data. From a folder: of the samples."""
        if self.data_dir is not None:
            return super().fingerprint()
        return sha256(f"{SETS[self.task_names[0]].repo}@{self.revision}".encode()).hexdigest()

    def make_samples(self) -> list[Sample]:
        """Problems in file order; fewer than asked for is a warning."""
        if reason := self.available():
            raise Blocked(reason)
        samples: list[Sample] = []
        for task in self.task_names:
            wanted = self.limit or self.rows or SETS[task].rows
            found = [_sample(task, row) for row in self._rows(task)]
            if not found:
                raise UserError(f"{task} has no rows")
            rows.require_count(len(found), SETS[task].rows, f"{task}: the file")
            if len(found) < wanted:
                log.warning("%s: %s has %d of %d rows; all of them are used", self.name, task, len(found), wanted)
            samples += found[:wanted]
        return samples

    def _rows(self, task: str) -> Iterator[Row]:
        one = SETS[task]
        path = self.hub_file.get() if self.hub_file else self._file(task)
        own = one.id if self.hub_file else "id"
        if path.suffix == ".parquet":
            import pyarrow.parquet

            lines = [json.dumps(row).encode() for row in pyarrow.parquet.read_table(path).to_pylist()]
            read = rows.read(lines, row(task, own), unique=(own,), place=str(path))
        else:
            read = rows.read(path, row(task, own), unique=(own,))
        for _, found in read:
            yield {**found, "id": f"{one.id_prefix if self.hub_file else ''}{found[own]}"}

    # Prompts and scores

    def render(
        self, sample: Sample, tokenizer: Any, arch: Arch, *, chat: bool, max_new_tokens: int | None = None
    ) -> Rendered:
        """Problem, line break, instruction; UserError where that is longer than `length`."""
        self.check(arch, max_new_tokens)
        new = self.output_tokens(sample.task, max_new_tokens)
        rendered = render_prompt(
            sample,
            Prompt("", sample.context, "\n" + sample.question),
            tokenizer,
            chat=chat and self.uses_chat(sample.task),
            limit=arch.max_positions - new,
            max_new_tokens=new,
            gold=rf"\boxed{{{sample.gold[0]}}}",
            thinking=self.thinking,
        )
        if rendered.truncated or rendered.prompt_tokens > (self.length or 0):
            tokens = rendered.prompt_tokens + rendered.truncated
            raise UserError(f"{sample.id} takes {tokens} tokens, more than benchmark.length={self.length}")
        return rendered

    def score(self, sample: Sample, text: str, *, finished: bool = True, opened: bool = False) -> dict[str, Any]:
        """1 where the final answer is the gold one; a text that was cut off before its answer is wrong."""
        final = self.final_text(text, opened=opened)
        if final is None:
            return {"score": 0.0, "answer": None}
        right, answer = grade(final, sample.gold[0], SETS[sample.task].kind, finished=finished)
        return {"score": float(right), "answer": answer}


def gold(task: str) -> Check:
    """The schema of an answer: one that a text could equal."""

    def check(value: Any, field: str) -> None:
        rows.named(value, field)
        if SETS[task].kind == "integer" and integer(str(value)) is None:
            raise rows.wrong(field, value, "a whole number from 0 to 999")

    return check


def row(task: str, id: str = "id") -> Check:
    """The schema of a problem. id: the field that names it."""
    return rows.fields(**{id: rows.named}, problem=rows.filled, answer=gold(task))


def _sample(task: str, row: Row) -> Sample:
    meta: dict[str, Any] = {k: row[k] for k in ("subject", "level") if k in row}
    return Sample(task, row["id"], row["problem"].strip(), INSTRUCTION, "", (str(row["answer"]).strip(),), meta)


BENCHMARK = Competition
