"""LongBench v1 (Bai et al. 2024): official rows, prompts, output lengths and metrics."""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from moend.benchmarks.answers import after_thinking, first_line
from moend.benchmarks.base import Benchmark, Prompt, Rendered, Sample, log, render_prompt
from moend.benchmarks.metrics import METRICS
from moend.errors import Blocked, UserError
from moend.plan import Arch

TABLE: dict[str, dict[str, Any]] = json.loads(
    resources.files("moend.benchmarks").joinpath("data/longbench.json").read_text(encoding="utf-8")
)
HUB = "THUDM/LongBench"
FIELDS = ("input", "context", "answers", "all_classes", "_id")


@dataclass(frozen=True, kw_only=True)
class LongBench(Benchmark):
    """Official rows in file order: the first `limit` (or `rows`, or all) of each task.

    length: the most tokens of rendered prompt plus output, cut in the middle of the context; null, or more than the
        model has, is the model's own limit.
    data_dir: a folder of official JSON lines, `<task>.jsonl`; null reads the hub's archive at `revision`.
    """

    data_dir: str | None = None
    revision: str | None = None

    all_tasks: ClassVar[tuple[str, ...]] = tuple(TABLE)
    run_only: ClassVar[tuple[str, ...]] = ("rows", "limit", "data_dir", "revision")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split != "test":
            raise UserError(f"{self.name} has no {self.split} split: its rows are for evaluation")
        if self.data_dir is None and not self.revision:
            raise UserError("benchmark.revision must name the data's commit where benchmark.data_dir is null")

    def metric(self, task: str) -> str:
        """The task's official metric."""
        return str(TABLE[task]["metric"])

    def new_tokens(self, task: str) -> int:
        """The official output length."""
        return int(TABLE[task]["max_new_tokens"])

    def uses_chat(self, task: str) -> bool:
        """Not for the few-shot tasks, unless `chat_template: all`."""
        return self.chat_template == "all" or (self.chat_template == "official" and bool(TABLE[task]["chat"]))

    def reference_length(self, arch: Arch) -> int:
        """The truncation length."""
        return min(self.length or arch.max_positions, arch.max_positions)

    def check(self, arch: Arch, max_new_tokens: int | None = None) -> None:
        """Refuse an output length that leaves no room for a prompt."""
        for task in self.task_names:
            new = self.output_tokens(task, max_new_tokens)
            if new >= self.reference_length(arch):
                raise UserError(
                    f"{task}: {new} new tokens leave no room for a prompt in {self.reference_length(arch)} tokens"
                    " (the smaller of benchmark.length and the model's positions)"
                )

    # Data

    def available(self) -> str | None:
        """What is missing: files of data_dir, or the hub's archive where the hub is switched off."""
        if self.data_dir is not None:
            missing = [t for t in self.task_names if not self._file(t).is_file()]
            return f"benchmark.data_dir={self.data_dir} has no {missing[0]}.jsonl" if missing else None
        from huggingface_hub import constants, try_to_load_from_cache

        cached = try_to_load_from_cache(HUB, "data.zip", repo_type="dataset", revision=self.revision)
        if isinstance(cached, str) or not constants.HF_HUB_OFFLINE:
            return None
        return f"{HUB} is not in the hub cache and the hub is off: set benchmark.data_dir to its JSONL files"

    def _file(self, task: str) -> Path:
        return Path(self.data_dir or "").expanduser() / f"{task}.jsonl"

    def expected(self) -> dict[str, int]:
        """From the hub: the pinned row counts, without the data. From a folder: what it holds."""
        if self.data_dir is not None:
            return super().expected()
        return {t: min(self.limit or self.rows or TABLE[t]["rows"], TABLE[t]["rows"]) for t in self.task_names}

    def fingerprint(self) -> str:
        """From the hub: of its name and commit, without the data. From a folder: of the samples."""
        if self.data_dir is not None:
            return super().fingerprint()
        return hashlib.sha256(f"{HUB}@{self.revision}".encode()).hexdigest()

    def make_samples(self) -> list[Sample]:
        """Rows in file order; fewer than asked for is a warning."""
        if reason := self.available():
            raise Blocked(reason)
        samples: list[Sample] = []
        for task in self.task_names:
            wanted = self.limit or self.rows
            found = list(self._rows(task, wanted))
            if wanted and len(found) < wanted:
                log.warning("%s: %s has %d of %d rows; all of them are used", self.name, task, len(found), wanted)
            if not found:
                raise UserError(f"{task}.jsonl has no rows")
            samples += found
        return samples

    def _rows(self, task: str, wanted: int | None) -> Iterator[Sample]:
        seen: set[str] = set()
        for number, line in enumerate(self._lines(task), 1):
            if wanted and len(seen) == wanted:
                return
            if line.strip():
                sample = _parse(task, line, f"{task}.jsonl:{number}")
                if sample.id in seen:
                    raise UserError(f"{task}.jsonl:{number} repeats _id {sample.id}")
                seen.add(sample.id)
                yield sample

    def _lines(self, task: str) -> Iterable[str]:
        # lines end at "\n" alone: str.splitlines would also break at characters that JSON leaves bare inside strings
        if self.data_dir is not None:
            with self._file(task).open(encoding="utf-8", newline="\n") as file:
                yield from file
            return
        from huggingface_hub import hf_hub_download

        try:
            archive = hf_hub_download(HUB, "data.zip", repo_type="dataset", revision=self.revision)
        except OSError as e:  # every error of the hub's client, and of the disk
            first = str(e).strip().split("\n")[0]
            raise Blocked(f"{HUB} cannot be fetched ({first}): set benchmark.data_dir to its JSONL files") from e
        with zipfile.ZipFile(archive) as z, z.open(f"data/{task}.jsonl") as raw:
            yield from io.TextIOWrapper(raw, encoding="utf-8", newline="\n")

    # Prompts and scores

    def render(
        self, sample: Sample, tokenizer: Any, arch: Arch, *, chat: bool, max_new_tokens: int | None = None
    ) -> Rendered:
        """The official prompt, cut so that it and the output fit; the boundary is the end of {context}."""
        self.check(arch, max_new_tokens)
        row = TABLE[sample.task]
        head, tail = row["prompt"].split("{context}")
        new = self.output_tokens(sample.task, max_new_tokens)
        if not sample.context.strip():
            raise UserError(f"{sample.task} {sample.id}: the context is empty")
        return render_prompt(
            sample,
            Prompt(head, sample.context, tail.replace("{input}", sample.question)),
            tokenizer,
            chat=chat and self.uses_chat(sample.task),
            limit=self.reference_length(arch) - new,
            max_new_tokens=new,
            gold=sample.gold[0],
            stop=tuple(row["stop"]),
        )

    def score(self, sample: Sample, text: str) -> dict[str, Any]:
        """Largest score over the references, of the text after the last thought (few-shot tasks: its first line)."""
        row = TABLE[sample.task]
        answer = after_thinking(text)
        if row["first_line"]:
            answer = first_line(answer)
        metric, classes = METRICS[row["metric"]], sample.meta["all_classes"] or ()
        best = max((metric(answer, gold, classes) for gold in sample.gold), default=0.0)
        return {"score": best, "answer": answer if answer.strip() else None}


def _parse(task: str, line: str, where: str) -> Sample:
    try:
        row = json.loads(line)
        missing = [f for f in FIELDS if f not in row]
        if missing:
            raise UserError(f"{where} has no field '{missing[0]}'")
        gold = tuple(str(a) for a in row["answers"])
        meta = {k: row.get(k) for k in ("length", "dataset", "language", "all_classes")}
        sample = Sample(task, str(row["_id"]), str(row["context"]), str(row["input"]), "", gold, meta)
    except (ValueError, TypeError) as e:
        raise UserError(f"{where} is not a LongBench row: {e}") from None
    if not gold:
        raise UserError(f"{where} has no answers")
    if TABLE[task]["metric"] == "retrieval" and not all(re.search(r"Paragraph \d", a) for a in gold):
        raise UserError(f"{where}: answers must read 'Paragraph N'")
    if TABLE[task]["metric"] == "classification" and not row["all_classes"]:
        raise UserError(f"{where}: all_classes must list the classes")
    return sample


BENCHMARK = LongBench
