"""RULER's official prompts, word for word: the random draws of its generators (Hsieh et al. 2024) in their order.

An official generator is one stream of random numbers for a task, a length, a tokenizer and a seed: it first grows a
prompt until it no longer fits, then draws one sample after the other. So a sample follows from all draws before it, and
this module draws in the same order. The texts come from the official package (`ruler_texts`).
"""

from __future__ import annotations

import itertools
import random
import string
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np

from moend.benchmarks.ruler_texts import Texts
from moend.benchmarks.ruler_wordings import CWE, FWE, NIAH, QA, VT, Piece, Template, filled
from moend.errors import UserError

TRIES = 200  # draws of one sample that may be too long; the official generators go on without end
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."
Counted = Callable[[str], int]


class Stream(ABC):
    """The samples of one task: an iterator of pieces, each of which costs the draws of all before it.

    length: tokens of prompt and answer together. count: tokens of a text. seed: the official `random_seed`.
    """

    template: ClassVar[Template]
    step = 10  # units by which a prompt grows
    overshoots: ClassVar[bool] = False  # whether it grows once beyond what there is

    def __init__(self, texts: Texts, length: int, count: Counted, seed: int):
        self.texts, self.length, self.count, self.seed = texts, length, count, seed
        self.rng = random.Random(seed)

    @property
    def new(self) -> int:
        """Tokens left for the answer."""
        return self.template.new_tokens

    @abstractmethod
    def draw(self, units: int, index: int) -> Piece:
        """A prompt of so many units of filler. index: the sample's number."""

    @abstractmethod
    def with_answer(self, piece: Piece) -> str:
        """The text that is measured while the prompt grows."""

    def most(self) -> int | None:
        """Units there are at most, None without a limit."""
        return None

    def units(self) -> int:
        """The units of the first sample: grown by steps until one more step is too long."""
        units, total = self.step, 0
        while total + self.new < self.length:
            total = self.count(self.with_answer(self.draw(units, 0)))
            if total + self.new > self.length:
                return units - self.step
            most = self.most()
            if most is not None and units + (0 if self.overshoots else self.step) > most:
                return most
            units += self.step
        return units

    def samples(self) -> Iterator[Piece]:
        """Endless, where the task is."""
        units = self.units()
        for index in itertools.count():
            used = units
            for _ in range(TRIES):
                try:
                    piece = self.draw(used, index)
                except ValueError:  # fewer places than what is to be placed, or a name that came twice
                    piece = None
                if piece is not None and self.count(piece.text) + self.new <= self.length:
                    break
                used = self.less(used)
            else:
                raise UserError(
                    f"benchmark.length={self.length} is too short for the official generator of sample {index}"
                )
            yield piece

    def less(self, units: int) -> int:
        """One step less, but never none."""
        return units - self.step if units > self.step else units


class Needles(Stream):
    """Needle in a haystack: keys with values in essays, in five repeated sentences, or among other needles."""

    template = NIAH
    overshoots = True

    def __init__(
        self,
        texts: Texts,
        length: int,
        count: Counted,
        seed: int,
        *,
        haystack: str,
        key: str = "words",
        value: str = "numbers",
        keys: int = 1,
        values: int = 1,
        queries: int = 1,
    ):
        super().__init__(texts, length, count, seed)
        self.haystack, self.key, self.value = haystack, key, value
        self.keys, self.values, self.queries = max(keys, queries), values, queries
        self.step = 500 if haystack == "essay" else 5 if length < 4096 else 25
        self.depths = [int(d) for d in np.round(np.linspace(0, 100, num=40, endpoint=True))]

    def random(self, kind: str) -> str:
        """A number of seven digits, a word, or a UUID."""
        if kind == "numbers":
            return str(self.rng.randint(10**6, 10**7 - 1))
        if kind == "words":
            return self.texts.pairs[self.rng.choice(range(len(self.texts.pairs)))]
        return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))

    def needle(self) -> str:
        """One of the haystack's own."""
        return NEEDLE.format(type_needle_v=self.value, key=self.random(self.key), value=self.random(self.value))

    def draw(self, units: int, index: int) -> Piece:
        """Units are words of the essays, sentences or needles."""
        keys, values, needles = [], [], []
        for _ in range(self.keys):
            keys.append(self.random(self.key))
            values.append([self.random(self.value) for _ in range(self.values)])
            needles += [NEEDLE.format(type_needle_v=self.value, key=keys[-1], value=v) for v in values[-1]]
        random.Random(self.seed).shuffle(needles)
        context = self.among(needles, units)
        asked = self.rng.sample(range(self.keys), self.queries)
        names = [keys[i] for i in asked]
        query = ", ".join(names[:-1]) + ", and " + names[-1] if len(names) > 1 else names[0]
        template, kind = self.template, self.value
        if self.queries * self.values == 1:
            template, kind = Template(_one(template.text), _one(template.answer), template.new_tokens), kind[:-1]
        return filled(template, context, [v for i in asked for v in values[i]], type_needle_v=kind, query=query)

    def among(self, needles: list[str], units: int) -> str:
        """The haystack with the needles in it."""
        if self.haystack == "essay":
            sentences = self.texts.sentences(units)
            depths = self.rng.sample(self.depths, len(needles))
            places = [0, *sorted(int(len(sentences) * (d / 100)) for d in depths), len(sentences)]
            parts = []
            for i, (last, at) in enumerate(itertools.pairwise(places)):
                parts += [" ".join(sentences[last:at]), *needles[i : i + 1]]
            return " ".join(parts)
        lines = [NOISE] * units if self.haystack == "repeat" else [self.needle() for _ in range(units)]
        places = sorted(self.rng.sample(range(units), len(needles)), reverse=True)
        for at, needle in zip(places, needles, strict=False):
            lines.insert(at, needle)
        return "\n".join(lines)

    def with_answer(self, piece: Piece) -> str:
        """The prompt and its answers."""
        return piece.text + " ".join(piece.gold)

    def most(self) -> int | None:
        """The essays' words."""
        return None if self.haystack != "essay" else len(self.texts.essays)


def _one(wording: str) -> str:
    """A wording about one needle."""
    for old, new in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
        wording = wording.replace(old, new)
    return wording


class Chain(Stream):
    """Variable tracking: a chain of assignments in repeated sentences, after a worked example."""

    template = VT
    hops = 4

    def __init__(
        self, texts: Texts, length: int, count: Counted, seed: int, numbers: np.random.RandomState | None = None
    ):
        super().__init__(texts, length, count, seed)
        self.numbers = numbers or np.random.RandomState(seed)
        self.example: str | None = None  # None while the example itself is made
        self.taken = 0  # the example's tokens

    @property
    def new(self) -> int:
        """Tokens left for the answer, and for the example."""
        return self.template.new_tokens + self.taken

    def prepared(self) -> Chain:
        """This stream after the worked example was drawn from it."""
        length, self.length, self.step = self.length, 500, 5
        piece = next(super().samples())
        self.example = f"{piece.text} {' '.join(piece.gold)}\n\n"
        self.length, self.step, self.taken = length, 10, self.count(self.example)
        return self

    def samples(self) -> Iterator[Piece]:
        """Each with the example before it, whose names are drawn anew."""
        self.prepared()
        for piece in super().samples():
            yield Piece(f" {self._renamed()}\n\n{piece.head}", piece.context, piece.tail, piece.answer, piece.gold)

    def _renamed(self) -> str:
        example = self.example or ""
        end = VT.answer[-10:]
        for name in example[example.index(end) + 10 :].strip().split():
            example = example.replace(name, self._name(len(name)))
        return example

    def _name(self, letters: int) -> str:
        return "".join(self.rng.choices(string.ascii_uppercase, k=letters))

    def draw(self, units: int, index: int) -> Piece:
        """Units are the five sentences."""
        letters = 3 if self.example is None else 5
        names = [self._name(letters) for _ in range(self.hops + 1)]
        while len(set(names)) < self.hops + 1:
            names.append(self._name(letters))
        chains = []
        for i in range(0, len(names), self.hops + 1):
            mine = names[i : i + self.hops + 1]
            number = self.numbers.randint(10000, 99999)
            if len(mine) <= self.hops:
                raise ValueError("a name came twice")
            chains.append([f"VAR {mine[0]} = {number}", *(f"VAR {b} = VAR {a} " for a, b in itertools.pairwise(mine))])
        sentences = [NOISE + "\n"] * units
        if len(sentences) <= len(chains[0]):
            sentences = [s + "." if s.strip() else s for s in (x for noise in sentences for x in noise.split("."))]
            if len(sentences) <= len(chains[0]):
                chains = [chain[: len(sentences) - 1] for chain in chains]
        for chain in chains:
            places = sorted(self.rng.sample(range(len(sentences)), len(chain)))
            for i, (place, line) in enumerate(zip(places, chain, strict=True)):
                sentences.insert(place + i, line)
        context = " ".join(sentences).replace(". \n", ".\n")
        value = chains[0][0].split("=")[-1].strip()
        return filled(self.template, context, names[: self.hops + 1], query=value, num_v=self.hops + 1)

    def with_answer(self, piece: Piece) -> str:
        """The prompt and the list of its answers as Python writes it."""
        return f"{piece.text} {list(piece.gold)}"

    def less(self, units: int) -> int:
        """As many again: the official generator draws once more."""
        return units


class CommonWords(Stream):
    """Common words extraction: ten words that stand more often than the others in a numbered list."""

    template = CWE

    @cached_property
    def words(self) -> list[str]:
        """Nouns, adjectives and verbs in one order for a seed."""
        words = sorted({*self.texts.nouns, *self.texts.adjectives, *self.texts.verbs})
        random.Random(self.seed).shuffle(words)
        return words

    def _list(self, words: int, often: int, seldom: int) -> tuple[str, list[str]]:
        drawn = self.rng.sample(self.words, words)
        common, rest = drawn[:10], drawn[10:]
        lines = common * often + rest * seldom
        random.Random(self.seed).shuffle(lines)
        return _numbered(lines), common

    def draw(self, units: int, index: int) -> Piece:
        """Units are different words."""
        example, main = ((20, 3, 1), (6, 1)) if self.length < 4096 else ((40, 10, 3), (30, 3))
        shown, answer = self._list(*example)
        context, common = self._list(units, *main)
        piece = filled(self.template, context, common)
        before = filled(self.template, shown, answer).text + _numbered(answer)
        return Piece(f"{before}\n{piece.head}", piece.context, piece.tail, piece.answer, piece.gold)

    def with_answer(self, piece: Piece) -> str:
        """The prompt and its numbered answer."""
        return f"{piece.text} {_numbered(piece.gold)}"

    def most(self) -> int | None:
        """All words."""
        return len(self.words)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


class FrequentWords(Stream):
    """Frequent words extraction: the three most frequent of a zeta distribution; no room is left for the answer."""

    template = FWE

    def samples(self) -> Iterator[Piece]:
        """All with the number of words with which the first text fits, or fewer."""
        few = self.length // 32
        words = self.length // 6
        vocabulary = self._vocabulary()
        while self.count(self._text(words, vocabulary).text) < self.length:
            words += few
        words -= few
        while True:
            now, vocabulary = words, self._vocabulary()
            while self.count((piece := self._text(now, vocabulary)).text) > self.length:
                now -= few
            yield piece

    def _vocabulary(self) -> list[str]:
        size = self.length // 50
        made = ["".join(self.rng.choices(string.ascii_lowercase, k=6)) for _ in range(size)]
        while len(set(made)) < size:
            made.append("".join(self.rng.choices(string.ascii_lowercase, k=6)))
        made = sorted(set(made))
        random.Random(self.seed).shuffle(made)
        return ["...", *made[1:]]

    def _text(self, words: int, vocabulary: list[str]) -> Piece:
        from scipy.special import zeta

        ranks = np.arange(1, len(vocabulary) + 1)
        counts = (words * (ranks**-2.0) / zeta(2.0)).astype(int)
        drawn = [w for w, n in zip(vocabulary, counts, strict=True) for w in [w] * n]
        random.Random(self.seed).shuffle(drawn)
        return filled(self.template, " ".join(drawn), vocabulary[1:4])

    def draw(self, units: int, index: int) -> Piece:
        """Units are words drawn, before rounding down."""
        return self._text(units, self._vocabulary())

    def with_answer(self, piece: Piece) -> str:
        """The prompt alone."""
        return piece.text


class Documents(Stream):
    """Questions over documents of SQuAD or HotpotQA among others of the same data set."""

    template = QA

    def __init__(self, texts: Texts, length: int, count: Counted, seed: int, *, name: str):
        super().__init__(texts, length, count, seed)
        self.questions, documents = texts.questions(name)
        self.documents = list(documents)  # all of them are shuffled in place, where a prompt takes all

    def draw(self, units: int, index: int) -> Piece:
        """Units are documents."""
        if index >= len(self.questions):
            raise UserError(f"benchmark.limit: the official file has {len(self.questions)} questions")
        asked = self.questions[index]
        own, near = list(asked.needs), list(asked.near)
        if units >= len(self.documents):
            shown = self.documents
        else:
            if units - len(own) > len(near):
                taken = {*own, *near}
                others = [i for i in range(len(self.documents)) if i not in taken]
                ids = own + near + self.rng.sample(others, max(0, units - len(own) - len(near)))
            else:
                ids = own + self.rng.sample(near, units - len(own))
            shown = [self.documents[i] for i in ids]
        random.Random(self.seed).shuffle(shown)
        context = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(shown, 1))
        return filled(self.template, context, asked.answers, query=asked.text)

    def with_answer(self, piece: Piece) -> str:
        """The prompt and the list of its answers as Python writes it."""
        return f"{piece.text} {list(piece.gold)}"

    def most(self) -> int | None:
        """All documents."""
        return len(self.documents)
