"""Long exact answers that a small model can give: recite, count on, transform a list, copy with edits.

The answer follows from the prompt word by word and its beginning is given, so that what is measured is how far a cache
carries a long generation, not whether the task is understood. No model is needed to make or to score a sample.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, ClassVar

from moend.benchmarks.base import Benchmark, Rendered, Sample, whole
from moend.benchmarks.niah import WORDS
from moend.benchmarks.prompts import Prompt, render_prompt
from moend.benchmarks.topics import filler, topics
from moend.budget import Arch
from moend.errors import UserError

ROUNDS = 5  # times that a prompt says the list to recite: with fewer a small model loses the thread
GIVEN = 4  # words, numbers or lines of the answer that the prompt begins
END = 2  # tokens after the gold answer in which a model may end
# Tokens of a word of the answer at most, its separator included: for plans, before a tokenizer is known
TOKENS = {"recite": 3, "count": 5, "transform": 4, "edit": 3}
OLD, NEW = "the", "this"  # the word that copies write in place of another


@dataclass(frozen=True)
class Made:
    """One sample's texts; the gold answer goes on where `begun` ends; a list without end stops after a comma."""

    context: str  # what the answer follows from
    question: str  # what to do
    begun: str  # the answer's beginning, a part of the prompt
    gold: str  # the rest of the answer


def recite(rng: random.Random, words: int, period: int) -> Made:
    """A list of `period` words, said five times: say it again and again, for `words` more words."""
    names = rng.sample(WORDS, period)
    said = list(islice(cycle(names), GIVEN + words))
    begun, rest = said[:GIVEN], said[GIVEN:]
    return Made(
        ", ".join(names * ROUNDS), "Say the list again and again.", ", ".join(begun) + ",", ", ".join(rest) + ","
    )


def count(rng: random.Random, words: int, period: int) -> Made:
    """Count on by one from a number of three digits."""
    first = rng.randrange(100, max(101, 900 - words))
    numbers = [str(first + i) for i in range(period + GIVEN + words)]
    context, begun, rest = numbers[:period], numbers[period:][:GIVEN], numbers[period + GIVEN :]
    return Made(", ".join(context), "Count on.", ", ".join(begun) + ",", ", ".join(rest) + ",")


def transform(rng: random.Random, words: int, period: int) -> Made:
    """A list of words, one a line: number the lines; a line of the answer has two words."""
    names = [w for _ in range(words) for w in rng.sample(WORDS, len(WORDS))][: GIVEN + -(-words // 2)]
    lines = [f"{i}. {name}" for i, name in enumerate(names, 1)]
    gold = "\n".join(lines[GIVEN:])
    return Made("\n".join(names), "Number the lines of the list.", "\n".join(lines[:GIVEN]) + "\n", gold)


def edit(rng: random.Random, words: int, period: int) -> Made:
    """A text of `words` words and a beginning: copy it with one word in place of another."""
    text = filler(rng.choice(sorted(topics())), 12 * (words + GIVEN), rng).lower().split()[: words + GIVEN]
    copied = [NEW if w == OLD else w for w in text]
    question = f'Copy the text, but write "{NEW}" in place of "{OLD}".'
    return Made(" ".join(text), question, " ".join(copied[:GIVEN]), " ".join(copied[GIVEN:]))


TASKS: dict[str, Callable[[random.Random, int, int], Made]] = {
    "recite": recite,
    "count": count,
    "transform": transform,
    "edit": edit,
}


@dataclass(frozen=True, kw_only=True)
class LongOutput(Benchmark):
    """Right prefix: the words of the answer before the first wrong one, as a share of the gold answer's words.

    Words are what white space separates, punctuation and case included; what follows the gold answer does not count.
    words: of the gold answer. period: of the list that `recite` repeats, and how far `count` has come before.
    A sample may generate as many tokens as its gold answer takes, and two in which to end.
    """

    rows: int | None = 25  # examples per task
    words: int = 200
    period: int = 16

    begins_answer: ClassVar[bool] = True
    all_tasks: ClassVar[tuple[str, ...]] = tuple(TASKS)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("words", whole("benchmark.words", self.words, least=8))
        self._set("period", whole("benchmark.period", self.period, least=GIVEN))
        if self.period > len(WORDS):
            raise UserError(f"benchmark.period={self.period} is more than the {len(WORDS)} words there are")
        if self.length is not None:
            raise UserError(f"benchmark.length={self.length}: {self.name} is sized by benchmark.words")

    def data_sets(self) -> tuple[str, ...]:
        """Lists made here, and sentences of our own."""
        return ("generated", "topics")

    def metric(self, task: str) -> str:
        """How far the answer is right."""
        return "right_prefix"

    def new_tokens(self, task: str) -> int:
        """At most; a sample's own limit follows from its gold answer."""
        return TOKENS[task] * self.words + END

    def reference_length(self, arch: Arch) -> int:
        """At most: the longest context, its question and the beginning of the answer."""
        words = {"recite": ROUNDS * self.period, "count": self.period, "transform": self.words, "edit": self.words}
        return max(TOKENS[t] * (words[t] + 2 * GIVEN) for t in self.task_names) + 64

    def make_samples(self) -> list[Sample]:
        """`limit` or `rows` of each task, each from its own seed."""
        samples = []
        for task in self.task_names:
            for i in range(self.limit or self.rows or 25):
                name = f"long-{self.split}-{task}-{self.words}-{self.period}-s{self.seed}-{i}"
                made = TASKS[task](random.Random(name), self.words, self.period)
                samples.append(Sample(task, name, made.context, made.question, made.begun, (made.gold,)))
        return samples

    def render(
        self, sample: Sample, tokenizer: Any, arch: Arch, *, chat: bool, max_new_tokens: int | None = None
    ) -> Rendered:
        """Context, question, the beginning of the answer; the limit is the gold answer's own length."""
        self.check(arch, max_new_tokens)
        most = self.output_tokens(sample.task, max_new_tokens)
        rendered = render_prompt(
            sample,
            Prompt("", sample.context, f"\n\n{sample.question}\n", sample.answer_prefix),
            tokenizer,
            chat=chat and self.uses_chat(sample.task),
            thinking=self.thinking,
            limit=arch.max_positions - most,
            max_new_tokens=most,
            gold=sample.gold[0],
        )
        if rendered.truncated:
            raise UserError(
                f"sample {sample.id} does not fit the model's {arch.max_positions} positions: lower benchmark.words"
            )
        return dataclasses.replace(rendered, max_new_tokens=min(most, len(rendered.gold_ids) + END))

    def score(self, sample: Sample, text: str, *, finished: bool = True, opened: bool = False) -> dict[str, Any]:
        """The share of the gold words that the text has right before its first error, and the text so far."""
        answer = self.final_text(text, opened=opened) or ""
        said, gold = answer.split(), sample.gold[0].split()
        right = next((i for i, (a, b) in enumerate(zip(said, gold, strict=False)) if a != b), min(len(said), len(gold)))
        return {"score": right / len(gold), "answer": " ".join(said[:right]) or None}


BENCHMARK = LongOutput
