"""What every benchmark shares: samples, rendering a prompt to token ids, limits, identity, and the overlap check."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from moend.benchmarks import terms
from moend.benchmarks.answers.extract import THINK_END, after_thinking
from moend.benchmarks.hub import HubFile
from moend.benchmarks.terms import Terms
from moend.budget import Arch
from moend.errors import Blocked, UserError, unknown

log = logging.getLogger(__name__)

CHAT_TEMPLATE = ("official", "all", "none")
SPLITS = ("test", "calibration")


@dataclass(frozen=True)
class Sample:
    """One example, before any tokenizer: `context` is what can be compressed without knowing `question`."""

    task: str  # task within the benchmark
    id: str  # the same for the same example, whatever is drawn beside it
    context: str
    question: str
    answer_prefix: str  # what the answer begins with: a part of the prompt
    gold: tuple[str, ...]  # right answers
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)  # what a metric or a report needs besides


@dataclass(frozen=True)
class Rendered:
    """A prompt as fed to the model.

    ids: the whole prompt, with at most one BOS.
    context_tokens: the first so many ids are compressed when the question is unseen. A token that straddles the end of
        the context belongs to the question. It equals len(ids) where there is no question (kind "nll").
    context_start: the ids before it are no part of the context (BOS, a system prompt, words of the task).
    truncated: tokens cut out of the middle of the context.
    gold_ids: teacher-forced continuation of ids for answer_nll and token_accuracy, empty if there is none.
    stop: the generation ends at the first of these strings, but never before its second token.
    thinking: whether the prompt opens a thought or asks for one, so that an answer comes after `</think>` only.
    chat: whether it stands in the model's chat template. asked: the words after the context, the start of the answer.
    told: what the template was told of thinking (auto, on, off).
    """

    sample: Sample  # what the prompt is made of
    ids: tuple[int, ...]
    context_tokens: int
    max_new_tokens: int  # tokens to generate at most
    truncated: int = 0
    gold_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    thinking: bool = False
    context_start: int = 0
    chat: bool = False
    asked: tuple[str, str] = ("", "")
    told: str = "auto"

    @property
    def prompt_tokens(self) -> int:
        """Tokens fed, after truncation; before it there were prompt_tokens + truncated."""
        return len(self.ids)


@dataclass(frozen=True, kw_only=True)
class Benchmark(ABC):
    """A benchmark is its YAML's fields; samples and scores need no tokenizer, rendering needs one.

    name: the config's name. type: the module of moend.benchmarks that implements it.
    tasks: one name or several; null is all. rows: default samples per task (null: all there are); limit overrides it.
    length: prompt tokens (each benchmark says what is counted). max_new_tokens: null is the benchmark's own.
    split: "calibration" draws other rows, from other seeds and another part of the text, than "test".
    chat_template: "official" follows the benchmark's rule, "all" and "none" overrule it.
    reasoning: the protocol of models that think first (`generation=reasoning` sets it): the benchmark's own output
        limits times `reasoning_factor`, no stop strings, and a thought that was opened but never closed is no answer.
    thinking: what the chat template is told (`generation.thinking` sets it): auto leaves its own default; on and off
        are refused where it has no switch and does otherwise.
    questions_per_context: how many questions share a context, its prefill and its compression (where a benchmark
        `asks_several`). turns: they follow each other in one chat, each with what was asked and answered before.
    """

    name: str
    type: str
    tasks: tuple[str, ...] | None = None
    length: int | None = None
    rows: int | None = None
    limit: int | None = None
    seed: int = 0  # of the rows that are drawn
    split: str = "test"
    max_new_tokens: int | None = None
    chat_template: str = "official"
    reasoning: bool = False
    thinking: str = "auto"
    questions_per_context: int = 1
    turns: bool = False

    all_tasks: ClassVar[tuple[str, ...]]
    kind: ClassVar[Literal["generate", "nll"]] = "generate"
    begins_answer: ClassVar[bool] = False  # whether its prompts hold the answer's first words, so that no thought comes
    asks_several: ClassVar[bool] = False  # whether several questions of one context are built
    turn_tokens: ClassVar[int] = 64  # of a later question with the words between two turns, at most: for plans
    unit: ClassVar[str] = "fraction"
    higher_is_better: ClassVar[bool] = True
    prompt_version: ClassVar[int] = 1
    scorer_version: ClassVar[int] = 1
    scored_meta: ClassVar[tuple[str, ...]] = ()  # of a sample's meta, what `score` reads: records keep it
    reasoning_factor: ClassVar[int] = 16  # PROTOCOLS: LongBench's 32, 64, 128 become 512, 1024, 2048
    # Fields that say where data lies or how much of it is used: `identity` replaces them with what they stand for.
    run_only: ClassVar[tuple[str, ...]] = ("rows", "limit")
    endless: ClassVar[bool] = False  # whether a larger limit makes more examples: they are generated
    _cache: ClassVar[Path | None] = None  # of an instance: `at`

    def __post_init__(self) -> None:
        tasks = self.all_tasks if self.tasks is None else (self.tasks,) if isinstance(self.tasks, str) else self.tasks
        for task in tasks:
            if task not in self.all_tasks:
                raise unknown(f"{self.type} task", str(task), self.all_tasks)
        if not tasks or len(set(tasks)) != len(tasks):
            raise UserError(f"benchmark.tasks {list(tasks)} must name at least one task, each once")
        self._set("tasks", tuple(tasks))
        for field in ("length", "rows", "limit", "max_new_tokens"):
            self._set(field, whole(f"benchmark.{field}", getattr(self, field), least=1, optional=True))
        self._set("seed", whole("benchmark.seed", self.seed, least=0))
        several = whole("benchmark.questions_per_context", self.questions_per_context, least=1) or 1
        self._set("questions_per_context", several)
        if several > 1 and not self.asks_several:
            raise UserError(f"benchmark.questions_per_context={several}: {self.type} asks one question of each context")
        if not isinstance(self.turns, bool):
            raise UserError(f"benchmark.turns={self.turns} must be true or false")
        if self.turns and several == 1:
            raise UserError("benchmark.turns=true needs benchmark.questions_per_context of at least 2")
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.type == "str | None" and not isinstance(value, str | None):  # a folder called 2024 is typed '2024'
                raise UserError(f"benchmark.{f.name}={value} must be text, in quotes of its own, or null")
        choice("benchmark.split", self.split, SPLITS)
        choice("benchmark.chat_template", self.chat_template, CHAT_TEMPLATE)
        choice("generation.thinking", self.thinking, ("auto", "on", "off"))
        self._set("reasoning", self.reasoning and self.kind == "generate")  # a likelihood thinks nothing

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)

    # What a benchmark supplies

    @abstractmethod
    def metric(self, task: str) -> str:
        """Name of the task's metric."""

    @abstractmethod
    def make_samples(self) -> list[Sample]:
        """All samples, task by task, in a fixed order; a larger limit only appends within a task."""

    @abstractmethod
    def score(self, sample: Sample, text: str, *, finished: bool = True, opened: bool = False) -> dict[str, Any]:
        """{"score": float, "answer": the extracted answer or None} of a generated text; never raises on any text.

        finished: the model ended by itself, not at the output limit. opened: `Rendered.thinking` of its prompt.
        """

    @abstractmethod
    def new_tokens(self, task: str) -> int:
        """Output tokens of a task; `max_new_tokens` and an argument of `render` override them."""

    @abstractmethod
    def reference_length(self, arch: Arch) -> int:
        """The longest prompt there can be, in tokens: what `t_ref: auto` stands for."""

    @abstractmethod
    def render(
        self, sample: Sample, tokenizer: Any, arch: Arch, *, chat: bool, max_new_tokens: int | None = None
    ) -> Rendered:
        """The prompt of a sample as ids. chat: whether the model has a chat template to use where the rule says so."""

    def check(self, arch: Arch, max_new_tokens: int | None = None) -> None:
        """Refuse, while composing, lengths that cannot fit the model; needs no tokenizer and no data."""
        new = self.fed_tokens(max_new_tokens)
        needed = self.reference_length(arch) + new
        if needed > arch.max_positions:
            raise UserError(
                f"benchmark.length={self.length} with {new} new tokens needs {needed} positions;"
                f" the model has {arch.max_positions}"
            )

    def available(self) -> str | None:
        """None where the data is here or can be fetched or generated, else the one line that says what is missing."""
        return None

    @property
    def hub_file(self) -> HubFile | None:
        """What is fetched from the hub, where the data come from there."""
        return None

    def absent(self) -> str | None:
        """The one line that says what `samples` would fetch first; None where the data is here or made. No network."""
        reason = self.hub_file.absent() if self.hub_file else None
        return f"data '{self.name}': {reason}" if reason else None

    def fetch(self) -> None:
        """Bring data that is absent to this machine, for later without network; Blocked where it is not to be had."""
        if reason := self.available():
            raise Blocked(reason)
        if self.hub_file:
            self.hub_file.get()

    # What all share

    def at(self, cache: Path) -> Self:
        """This benchmark, with the folder that fetched data lies in (null: Hugging Face's own)."""
        self._set("_cache", cache)
        return self

    @property
    def task_names(self) -> tuple[str, ...]:
        """The tasks, never null."""
        return self.tasks or self.all_tasks

    def samples(self) -> list[Sample]:
        """All samples (made once)."""
        return list(self._samples)

    @cached_property
    def _samples(self) -> tuple[Sample, ...]:
        from moend.benchmarks.questions import numbered

        made, several = self.make_samples(), self.questions_per_context
        return tuple(numbered(made, several) if several > 1 else made)

    def contexts(self) -> list[list[Sample]]:
        """The samples by shared context, in the order of their questions; lists of one where there is one question."""
        found: dict[str, list[Sample]] = {}
        for sample in self._samples:
            name = sample.meta["context_id"] if self.questions_per_context > 1 else f"{sample.task}/{sample.id}"
            found.setdefault(name, []).append(sample)
        return list(found.values())

    def expected(self) -> dict[str, int]:
        """Samples per task, known without the data where the config pins the row count."""
        counts = dict.fromkeys(self.task_names, 0)
        for sample in self._samples:
            counts[sample.task] += 1
        return counts

    def output_tokens(self, task: str, override: int | None = None) -> int:
        """New tokens of a task: the argument, else benchmark.max_new_tokens, else its own (see reasoning)."""
        own = self.new_tokens(task) * (self.reasoning_factor if self.reasoning else 1)
        return override or self.max_new_tokens or own

    def fed_tokens(self, override: int | None = None) -> int:
        """The most tokens that follow a compressed prompt: an answer, or all turns with their questions."""
        answer = max(self.output_tokens(task, override) for task in self.task_names)
        if not self.turns:
            return answer
        return self.questions_per_context * answer + (self.questions_per_context - 1) * self.turn_tokens

    def stops(self, task: str) -> tuple[str, ...]:
        """Strings that end a task's output; none while a model thinks, or a thought would end at its first newline."""
        return ()

    def final_text(self, text: str, *, opened: bool = False) -> str | None:
        """What is scored: the text after the last `</think>`. None, no answer, where a reasoning model never wrote one
        although its prompt opened a thought or asked for it."""
        if self.reasoning and opened and THINK_END not in text:
            return None
        return after_thinking(text)

    def data_sets(self) -> tuple[str, ...]:
        """Names of the data sets that the samples are made of, as the table of `moend.benchmarks.terms` has them."""
        return ()

    def terms(self) -> tuple[Terms, ...]:
        """Licence and terms of those data sets."""
        return terms.of(*self.data_sets())

    def unseen(self) -> str | None:
        """Why question_visible=false means nothing for its prompts, in one line; None: questions can be hidden."""
        return None

    def aggregated(self, records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
        """What the benchmark's own code makes of all records of a cell, metrics by task: for one whose `score` gives
        `metrics`."""
        return {}

    def caution(self, samples: int) -> str | None:
        """What a person should know who draws so many answers per example, in one line; None: nothing."""
        return None

    def uses_chat(self, task: str) -> bool:
        """Whether a task's prompt goes into the model's chat template, if it has one."""
        return self.chat_template != "none"

    def fingerprint(self) -> str:
        """SHA-256 of the samples' canonical JSON."""
        text = json.dumps([dataclasses.asdict(s) for s in self._samples], sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def identity(self) -> dict[str, Any]:
        """Every field that can change a result, for a cell's key (how many samples, not the limit asked for).

        `thinking` is not among them: it is in the key with the generation that sets it.
        """
        fields = {k: v for k, v in dataclasses.asdict(self).items() if k not in (*self.run_only, "thinking")}
        return {
            **fields,
            "tasks": list(self.task_names),
            "expected": self.expected(),
            "prompt_version": self.prompt_version,
            "scorer_version": self.scorer_version,
            "data": self.fingerprint(),
        }


def whole(key: str, value: Any, *, least: int, optional: bool = False) -> int | None:
    """A whole number from a config, or a UserError that names the key."""
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < least:
        null = " or null" if optional else ""
        raise UserError(f"{key}={value} must be a whole number of at least {least}{null}")
    return int(value)


def choice(key: str, value: Any, allowed: Iterable[str]) -> None:
    """Refuse a value that is not among the allowed ones."""
    if value not in tuple(allowed):
        raise unknown(key, str(value), allowed)


def text_key(text: str) -> str:
    """Hash of a text up to white space."""
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()


def overlap(calibration: Iterable[Sample | str], evaluation: Iterable[Sample]) -> list[str]:
    """Ids of evaluation samples that the calibration data holds too: the same id or text, or one text in the other."""
    ids, keys, texts = set(), set(), []
    for item in calibration:
        context = item if isinstance(item, str) else item.context
        if isinstance(item, Sample):
            ids.add(item.id)
        keys.add(text_key(context))
        texts.append(" ".join(context.split()))
    found = []
    for sample in evaluation:
        mine = " ".join(sample.context.split())
        if sample.id in ids or text_key(mine) in keys or any(mine in t or (t and t in mine) for t in texts):
            found.append(sample.id)
    return found


def require_disjoint(calibration: Iterable[Sample | str], evaluation: Iterable[Sample]) -> None:
    """UserError where calibration and evaluation share a sample."""
    if shared := overlap(calibration, evaluation):
        raise UserError(f"calibration and evaluation share {len(shared)} samples, the first is {shared[0]}")


def only_fields(cls: type[Benchmark], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as keyword arguments; one the benchmark does not have is refused with the nearest."""
    known = [f.name for f in dataclasses.fields(cls)]
    for key in fields:
        if key not in known:
            raise unknown(f"field of benchmark {fields.get('name', cls.__name__)}", key, known)
    return dict(fields)
