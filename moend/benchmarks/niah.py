"""Needle in a haystack (after RULER, Hsieh et al. 2024): a seven-digit number hidden in long text and asked for.

One needle (`keys: 1`) or several of which one is asked for. The wording of needle and question and the topic of the
text change from sample to sample (`phrasing: mix`), so that no method is judged by one sentence. Depths follow the
golden-ratio sequence, which is even for any number of samples, so a larger limit only appends.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar

from moend.benchmarks.answers.extract import number_of_digits
from moend.benchmarks.base import Benchmark, Rendered, Sample, choice, log, whole
from moend.benchmarks.phrasings import MIX, PHRASINGS
from moend.benchmarks.prompts import Prompt, assemble, encode, render_prompt
from moend.benchmarks.text import CHARS_PER_TOKEN, part
from moend.benchmarks.topics import filler, topics
from moend.budget import Arch
from moend.errors import UserError, unknown

HAYSTACKS = ("topics", "text", "noise")
NOISE = "The road is long. The hills are low. The rain has stopped. A cart goes by. Nothing else is new here. "
_WORDS = """
anchor apple arrow badge banjo barrel basket beacon blanket bottle branch bridge brush bucket button cabin candle
canoe canvas carpet castle cedar chalk cherry clover cobalt comet copper coral cotton cradle cricket crystal daisy
desert dolphin drum eagle ember engine falcon feather fiddle flute forest fossil garden ginger glacier glove grape
guitar hammer harbor hazel helmet honey island ivory jacket jasmine kettle lantern lemon linen lizard magnet maple
marble meadow mirror mitten needle nutmeg oyster paddle parrot pebble pepper piano pillow pocket prairie pumpkin
quartz rabbit ribbon river saddle salmon sandal satin shovel silver sparrow spider squash stable summit sunset
teapot temple thimble tiger timber tulip turtle valley velvet violet walnut willow window winter yarrow zipper
"""
WORDS = _WORDS.split()
UNIT = re.compile(r"\S.*?(?:[.!?][\"')]*(?=\s)|\Z)\s*", re.DOTALL)
GOLDEN = 0.6180339887498949
DIGITS = 7
LEAST = 64  # tokens that no tokenizer can say the task in


@dataclass(frozen=True, kw_only=True)
class Niah(Benchmark):
    """Exact match of the number. The rendered prompt, chat template included, fits `length` tokens to one sentence.

    keys: needles in the text, all in one wording. phrasing: "mix" or the number of one wording (`phrasings.py`); 0 is
        the one of the earlier results.
    haystack: "topics" (eight, mixed as the wordings are), "text" (which begins again, with a warning, where it is too
        short) or "noise"; null: topics, but text with phrasing 0 or a haystack_file, a UTF-8 text of the user's own.
    The wordings and topics belong to the split "test" alone.
    """

    length: int | None = 1024
    rows: int | None = 20  # examples per task
    keys: int = 1
    haystack: str | None = None
    haystack_file: str | None = None
    phrasing: int | str = MIX

    all_tasks: ClassVar[tuple[str, ...]] = ("niah",)
    begins_answer: ClassVar[bool] = True
    asks_several: ClassVar[bool] = True
    endless: ClassVar[bool] = True
    run_only: ClassVar[tuple[str, ...]] = ("rows", "limit", "haystack_file")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length is None:
            raise UserError(f"benchmark.length of {self.name} must be a number of tokens")
        if self.length < LEAST:
            raise UserError(f"benchmark.length={self.length} is too short for {self.name}: at least {LEAST} tokens")
        if (self.phrasing != MIX and self.phrasing not in range(len(PHRASINGS))) or isinstance(self.phrasing, bool):
            raise unknown("benchmark.phrasing", str(self.phrasing), [MIX, *map(str, range(len(PHRASINGS)))])
        mine = self.phrasing == 0 or self.haystack_file is not None
        self._set("haystack", self.haystack or ("text" if mine else "topics"))
        choice("benchmark.haystack", self.haystack, HAYSTACKS)
        if self.split != "test" and (self.phrasing != 0 or self.haystack == "topics"):
            raise UserError(
                f"benchmark.split={self.split}: wordings and topics are for tests only, so that no calibration sees"
                " them: set benchmark.phrasing=0"
            )
        self._set("keys", whole("benchmark.keys", self.keys, least=1))
        if self.keys > len(WORDS):
            raise UserError(f"benchmark.keys={self.keys} is more than the {len(WORDS)} key words")
        if self.questions_per_context > self.keys:
            raise UserError(
                f"benchmark.questions_per_context={self.questions_per_context} asks for more needles than"
                f" benchmark.keys={self.keys} hides: raise benchmark.keys"
            )
        if self.haystack_file is not None and self.haystack != "text":
            raise UserError("benchmark.haystack_file needs benchmark.haystack=text")

    def data_sets(self) -> tuple[str, ...]:
        """The haystack's."""
        known = {"text": "own" if self.haystack_file else "jargon", "topics": "topics"}
        return (known.get(str(self.haystack), "generated"),)

    def metric(self, task: str) -> str:
        """Exact match."""
        return "exact_match"

    def new_tokens(self, task: str) -> int:
        """Seven digits, one token each at worst, and room for a few words."""
        return 16

    def reference_length(self, arch: Arch) -> int:
        """All prompts have the same length."""
        return self.length or 0

    def make_samples(self) -> list[Sample]:
        """A window of text, the needles with their depths, and which of them is asked for: the first, or one after the
        other of as many as share a context.
        """
        start, haystack = random.Random(f"niah-depth-{self.seed}").random(), self._haystack(self.length or 0)
        samples: list[Sample] = []
        total, several = self.limit or self.rows or 20, self.questions_per_context
        for i in range(-(-total // several)):
            name = f"niah-{self.split}-{self.haystack}-{self.length}-k{self.keys}-s{self.seed}-{i}"
            sample = self._sample("niah", name, haystack, ((i + 0.5) * GOLDEN + start) % 1.0, i)
            samples += [sample] if several == 1 else [self._asking(sample, j) for j in range(several)]
        return samples[:total]

    def _asking(self, sample: Sample, which: int) -> Sample:
        """The same context, asked for its needle of this number."""
        word, number, depth = sample.meta["needles"][which]
        question, prefix = self._words(sample, word)
        meta = {**sample.meta, "depth": depth, "context_id": sample.id}
        id = f"{sample.id}-{which + 1}"
        return replace(sample, id=id, question=question, answer_prefix=prefix, gold=(number,), meta=meta)

    def _words(self, sample: Sample, word: str) -> tuple[str, str]:
        """Question and start of the answer that ask for a needle."""
        said = PHRASINGS[sample.meta.get("phrasing", 0)]
        return said.question.format(key=word), said.prefix.format(key=word)

    def _variant(self, i: int) -> tuple[int, str]:
        """Wording and topic of the i-th sample: every wording once, then every wording again with another topic."""
        words, subjects = list(range(len(PHRASINGS))), sorted(topics())
        rng = random.Random(f"niah-mix-{self.seed}")
        rng.shuffle(words)
        rng.shuffle(subjects)
        wording = words[i % len(words)] if isinstance(self.phrasing, str) else self.phrasing
        return wording, subjects[(i + i // len(words)) % len(subjects)]

    def _haystack(self, length: int) -> tuple[str, int]:
        """A text and how many of its characters make a window that holds enough tokens."""
        size = int(length * CHARS_PER_TOKEN) + 200
        if self.haystack == "topics":  # every sample has a text of its own
            return "", size
        if self.haystack == "noise":
            return (NOISE * (size // len(NOISE) + 1)).strip(), size
        text = part(self.split, self.haystack_file)
        if len(text) < size:
            log.warning("%s: a window of %d characters: the text has %d and repeats", self.name, size, len(text))
            text = "\n\n".join([text] * (size // max(len(text), 1) + 1))
        return text, size

    def _sample(self, task: str, name: str, haystack: tuple[str, int], depth: float, i: int) -> Sample:
        """The i-th sample of a task: all but the depth follows from its name, which says wording and topic if mixed."""
        wording, topic = self._variant(i)
        if self.phrasing != 0:
            name += f"-p{wording}"
        if self.haystack == "topics":
            name += f"-{topic}"
        (text, size), rng = haystack, random.Random(name)
        if self.haystack == "text":
            at = text.rfind("\n", 0, rng.randrange(len(text) - size + 1) + 1) + 1
            text = text[at : at + size].strip()
        elif self.haystack == "topics":
            text = filler(topic, size, rng)
        words = rng.sample(WORDS, self.keys)
        numbers = rng.sample(range(10 ** (DIGITS - 1), 10**DIGITS), self.keys)
        depths = [depth, *(rng.random() for _ in range(self.keys - 1))]
        needles = [[w, str(n), d] for w, n, d in zip(words, numbers, depths, strict=True)]
        said = PHRASINGS[wording]
        return Sample(
            task,
            name,
            text,
            said.question.format(key=words[0]),
            said.prefix.format(key=words[0]),
            (str(numbers[0]),),
            {"needles": needles, "depth": depth} | ({"phrasing": wording} if wording else {}),
        )

    def prompt_length(self, sample: Sample) -> int:
        """The length that the sample's prompt is fitted to."""
        return self.length or 0

    def _longest(self, sample: Sample, units: list[str], length: Callable[[Prompt], int]) -> int:
        """The length of the sample's prompt, or of the longest that asks its context: their contexts must be equal."""
        several = self.questions_per_context
        words = [n[0] for n in sample.meta["needles"][:several]] if several > 1 else []
        others = [self._words(sample, word) for word in words]
        asking = [replace(sample, question=q, answer_prefix=p) for q, p in others] or [sample]
        return max(length(self._prompt(one, units)) for one in asking)

    def _prompt(self, sample: Sample, units: list[str]) -> Prompt:
        said = PHRASINGS[sample.meta.get("phrasing", 0)]
        ends = [0, *accumulate(map(len, units))]
        context = list(units)
        for word, number, depth in sorted(sample.meta["needles"], key=lambda n: -float(n[2])):
            at = min(range(len(ends)), key=lambda i: abs(ends[i] - depth * ends[-1]))
            context.insert(at, said.needle.format(key=word, number=number) + " ")
        opening = (said.one if self.keys == 1 else said.several) + "\n\n"
        return Prompt(opening, "".join(context).rstrip(), "\n\n" + sample.question, sample.answer_prefix)

    def render(
        self, sample: Sample, tokenizer: Any, arch: Arch, *, chat: bool, max_new_tokens: int | None = None
    ) -> Rendered:
        """As many sentences of the haystack as fit `length` tokens, the needles between them."""
        self.check(arch, max_new_tokens)
        chat = chat and self.uses_chat(sample.task)
        limit, units = self.prompt_length(sample), UNIT.findall(sample.context)

        def measured(prompt: Prompt) -> int:
            text, _ = assemble(prompt, tokenizer, chat=chat, thinking=self.thinking)
            return len(encode(tokenizer, text)[0]) + 1  # with room for a BOS

        def tokens(count: int) -> int:
            return self._longest(sample, units[:count], measured)

        frame = tokens(0)
        if frame >= limit:
            raise UserError(
                f"benchmark.length={limit} is too short for {self.name}: the prompt alone takes {frame} tokens"
            )
        sizes = [len(encode(tokenizer, unit)[0]) for unit in units]
        count, total = 0, frame
        while count < len(units) and total + sizes[count] <= limit:
            total += sizes[count]
            count += 1
        while count > 0 and tokens(count) > limit:
            count -= 1
        while count < len(units) and tokens(count + 1) <= limit:
            count += 1
        if count == len(units):
            raise UserError(f"sample {sample.id}: its {len(units)} sentences are fewer than {limit} tokens")
        new = self.output_tokens(sample.task, max_new_tokens)
        return render_prompt(
            sample,
            self._prompt(sample, units[:count]),
            tokenizer,
            chat=chat,
            limit=limit,
            max_new_tokens=new,
            gold=sample.gold[0],
            thinking=self.thinking,
        )

    def score(self, sample: Sample, text: str, *, finished: bool = True, opened: bool = False) -> dict[str, Any]:
        """1 where the first seven-digit number of the answer is the one asked for."""
        answer = number_of_digits(self.final_text(text, opened=opened) or "", DIGITS)
        return {"score": float(answer == sample.gold[0]), "answer": answer}


BENCHMARK = Niah
