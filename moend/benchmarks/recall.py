"""Retrieval of random facts in the 140-word vocabulary of the test model `recall_moe`; the generator it was trained on.

A context of entries scattered among filler words, then one question:

    num   entry  K07 4 1       question  ? num K07        answer  4 1
    col   entry  K07 red teal  question  ? col K07        answer  red teal
    hop   entry  K07 K31 the   question  ? hop K07        answer  K31 9 0        (link, then its number)
    both                       question  ? both K07 K31   answer  K07 4 1 K31 9 0
    pass  entry  pass 5 2 8 0  question  ? pass           answer  5 2 8 0
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from moend.benchmarks import rows
from moend.benchmarks.base import Benchmark, Rendered, Sample, log
from moend.benchmarks.prompts import Prompt, render_prompt
from moend.budget import Arch
from moend.errors import Blocked, UserError

KEYS = [f"K{i:02d}" for i in range(64)]
DIGITS = [str(i) for i in range(10)]
_COLOURS = """
red teal blue pink gold grey lime navy plum rust sand jade onyx ruby wine mint
"""
COLOURS = _COLOURS.split()
_FILLER = """
the a of to and in is was it for on with as by at from this that but not or one all her his they we you so up out if
when into then some time like over only
"""
FILLER = _FILLER.split()
PASS_LENGTH = 4

Facts = dict[str, dict[str, list[str]]]


def make_context(rng: random.Random, length: int) -> tuple[list[str], Facts]:
    """Exactly `length` words with about one filler word an entry, and the facts in them (by kind, then key)."""
    facts: Facts = {"num": {}, "col": {}, "hop": {}, "pass": {"": rng.sample(DIGITS, PASS_LENGTH)}}
    entries, used = [["pass", *facts["pass"][""]]], PASS_LENGTH + 1
    for _ in range(10 * length):
        kind = rng.choices(["num", "col", "hop"], [0.5, 0.3, 0.2])[0]
        numbered = list(facts["num"])
        # often a key that has a number already, so that the instruction word must decide which fact is meant
        pool = KEYS if kind == "num" or not numbered or rng.random() < 0.5 else numbered
        key = rng.choice(pool)
        if key in facts[kind] or (kind == "hop" and not set(numbered) - {key}):
            continue
        if kind == "hop":
            value = [rng.choice([k for k in numbered if k != key])]
            entry = [key, *value, rng.choice(FILLER)]  # a filler word ends a link, else the next key would chain
        else:
            value = rng.choices(DIGITS, k=2) if kind == "num" else rng.sample(COLOURS, 2)
            entry = [key, *value]
        if used + len(entry) > length * 3 / 4:
            break
        facts[kind][key] = value
        entries.append(entry)
        used += len(entry)
    rng.shuffle(entries)
    gaps = [0] * (len(entries) + 1)
    for _ in range(length - used):
        gaps[rng.randrange(len(gaps))] += 1
    words: list[str] = []
    for gap, entry in zip(gaps, [*entries, []], strict=True):
        words += rng.choices(FILLER, k=gap) + entry
    return words, facts


def make_question(rng: random.Random, facts: Facts, task: str) -> tuple[list[str], list[str]] | None:
    """Question and answer words, or None where the context has too few facts of that kind."""
    if task == "pass":
        return ["?", "pass"], facts["pass"][""]
    wanted = 2 if task == "both" else 1
    pool = facts["num" if task == "both" else task]
    if len(pool) < wanted:
        return None
    keys = rng.sample(list(pool), wanted)
    if task == "hop":
        target = pool[keys[0]][0]
        answer = [target, *facts["num"][target]]
    elif task == "both":
        answer = [w for k in keys for w in [k, *pool[k]]]
    else:
        answer = pool[keys[0]]
    return ["?", task, *keys], answer


def calibration_texts(count: int, prefix: int, window: int) -> list[str]:
    """Contexts of `prefix` tokens, the BOS included, then `window` words of questions with their answers.

    Of seeds of their own: no row of either split.
    """
    texts = []
    for i in range(count):
        rng = random.Random(f"recall-calibration-text-{prefix}-{window}-{i}")
        words, facts = make_context(rng, prefix - 1)
        asked: list[str] = []
        while len(asked) < window:
            made = make_question(rng, facts, rng.choice(Recall.all_tasks))
            if made is None:
                continue
            question, answer = made
            asked += [*question, *answer, "<eos>"]
        texts.append(" ".join([*words, *asked[:window]]))
    return texts


@dataclass(frozen=True, kw_only=True)
class Recall(Benchmark):
    """Exact match of the answer's words. `length` counts context words (= tokens), BOS and question not included.

    data_dir: a folder with JSON lines of {task, length, context, question, answer} instead of the generator.
    """

    length: int | None = 256
    rows: int | None = 20  # examples per task
    data_dir: str | None = None

    all_tasks: ClassVar[tuple[str, ...]] = ("num", "col", "hop", "both", "pass")
    endless: ClassVar[bool] = True
    run_only: ClassVar[tuple[str, ...]] = ("rows", "limit", "data_dir")
    asks_several: ClassVar[bool] = True
    turn_tokens: ClassVar[int] = 5
    QUESTION: ClassVar[int] = 5  # the most words a question has, with the BOS before it all

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length is None or self.length < 32:
            raise UserError(f"benchmark.length={self.length} must be at least 32 for {self.name}")
        if self.data_dir is not None and self.split != "test":
            raise UserError("benchmark.data_dir holds evaluation rows: benchmark.split=calibration needs the generator")
        if "pass" in self.task_names and self.data_dir is None and self.questions_per_context > len(self.task_names):
            raise UserError(
                f"benchmark.questions_per_context={self.questions_per_context}: a context has one pass to ask for; ask"
                f" at most {len(self.task_names)} questions or leave pass out of benchmark.tasks"
            )

    def data_sets(self) -> tuple[str, ...]:
        """None but the generator, or files of the user's own."""
        return ("own" if self.data_dir else "generated",)

    def metric(self, task: str) -> str:
        """Exact match."""
        return "exact_match"

    def uses_chat(self, task: str) -> bool:
        """Never: the vocabulary has no chat turn."""
        return False

    def new_tokens(self, task: str) -> int:
        """The longest answer has six words and an end."""
        return 8

    def reference_length(self, arch: Arch) -> int:
        """Context, BOS and the longest question."""
        return (self.length or 0) + self.QUESTION

    def available(self) -> str | None:
        """Missing only where a folder was named that is not there."""
        if self.data_dir is not None and not Path(self.data_dir).expanduser().is_dir():
            return f"benchmark.data_dir={self.data_dir} is not a folder"
        return None

    def make_samples(self) -> list[Sample]:
        """Generated rows (one random generator each, so that rows never depend on the limit) or those of data_dir."""
        if self.data_dir is not None:
            return self._read(Path(self.data_dir).expanduser())
        each = self.limit or self.rows or 20
        if self.questions_per_context == 1:
            return [self._make(task, i) for task in self.task_names for i in range(each)]
        several, total = self.questions_per_context, each * len(self.task_names)
        return [s for begin in range(0, total, several) for s in self._several(begin, min(several, total - begin))]

    def _several(self, begin: int, count: int) -> list[Sample]:
        """Questions `begin`, `begin + 1` ... of all, of one context: task follows task, and no question comes twice."""
        tasks = [self.task_names[i % len(self.task_names)] for i in range(begin, begin + count)]
        name = f"recall-{self.split}-{self.length}-s{self.seed}-q{self.questions_per_context}-{begin}"
        rng = random.Random(name)
        for _ in range(1000):
            words, facts = make_context(rng, self.length or 0)
            asked: dict[str, tuple[str, str]] = {}  # by question, its task and answer
            for task in tasks:
                for _ in range(100):
                    made = make_question(rng, facts, task)
                    if made is not None and (question := " ".join(made[0])) not in asked:
                        asked[question] = task, " ".join(made[1])
                        break
            if len(asked) == count:
                meta = {"context_id": name}
                return [
                    Sample(task, f"{name}-{j}", " ".join(words), question, "", (answer,), meta)
                    for j, (question, (task, answer)) in enumerate(asked.items(), 1)
                ]
        raise UserError(
            f"benchmark.length={self.length} is too short for benchmark.questions_per_context={count} of {self.name}"
        )

    def _make(self, task: str, index: int) -> Sample:
        name = f"recall-{self.split}-{self.length}-s{self.seed}-{task}-{index}"
        rng = random.Random(name)
        for _ in range(10_000):
            words, facts = make_context(rng, self.length or 0)
            if made := make_question(rng, facts, task):
                question, answer = made
                return Sample(task, name, " ".join(words), " ".join(question), "", (" ".join(answer),))
        raise UserError(f"benchmark.length={self.length} is too short for a {task} question")

    def _read(self, folder: Path) -> list[Sample]:
        if reason := self.available():
            raise Blocked(reason)
        found: dict[str, list[Sample]] = {task: [] for task in self.task_names}
        schema = rows.fields(
            task=rows.one_of(self.all_tasks),
            length=rows.whole,
            context=rows.filled,
            question=rows.filled,
            answer=rows.filled,
        )
        seen: dict[str, str] = {}  # a row may not be there twice in two files either
        for path in sorted(folder.glob("*.jsonl")):
            for where, row in rows.read(path, schema, unique=("task", "context", "question")):
                task = row["task"]
                if task not in found or row["length"] != self.length:
                    continue
                texts = [row[k] for k in ("context", "question", "answer")]
                id = f"recall-{task}-{hashlib.sha256(' '.join(texts).encode()).hexdigest()[:12]}"
                if (before := seen.setdefault(id, where)) != where:
                    raise UserError(f"{where} repeats the row of {before}: each row must be there once")
                found[task].append(Sample(task, id, texts[0], texts[1], "", (texts[2],)))
        if not any(found.values()):
            raise Blocked(f"{folder} has no .jsonl rows of length {self.length} for {', '.join(self.task_names)}")
        wanted = self.limit or self.rows
        for task, samples in found.items():
            if wanted and len(samples) < wanted:
                log.warning("%s: %s has %d of %d rows in %s", self.name, task, len(samples), wanted, folder)
        return [s for samples in found.values() for s in samples[:wanted]]

    def render(
        self, sample: Sample, tokenizer: Any, arch: Arch, *, chat: bool, max_new_tokens: int | None = None
    ) -> Rendered:
        """BOS, context, question; the gold answer ends with EOS, as in training."""
        self.check(arch, max_new_tokens)
        new = self.output_tokens(sample.task, max_new_tokens)
        rendered = render_prompt(
            sample,
            Prompt("", sample.context, " " + sample.question),
            tokenizer,
            chat=False,
            thinking=self.thinking,
            limit=arch.max_positions - new,
            max_new_tokens=new,
            gold=sample.gold[0],
            gold_eos=True,
        )
        if rendered.truncated:
            raise UserError(f"sample {sample.id} does not fit the model's {arch.max_positions} positions")
        return rendered

    def score(self, sample: Sample, text: str, *, finished: bool = True, opened: bool = False) -> dict[str, Any]:
        """1 where the words are exactly the answer's."""
        words = text.split()
        return {"score": float(words == sample.gold[0].split()), "answer": " ".join(words) or None}


BENCHMARK = Recall
