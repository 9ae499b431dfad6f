"""What RULER's task families share: questions over documents, filler, and the shape of a family."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from moend.benchmarks.base import Sample
from moend.benchmarks.prompts import Prompt

Builder = Callable[[int], Prompt]


@dataclass(frozen=True)
class Question:
    """A question over documents from a file: the documents it needs (by index), and those nearest to it."""

    text: str  # the question
    answers: tuple[str, ...]  # right answers
    needs: tuple[int, ...]
    near: tuple[int, ...] = ()  # indices of documents that resemble those it needs


@dataclass(frozen=True)
class Library:
    """What prompts are filled with: sentences of a text, its distinct words, and read documents by family name."""

    sentences: tuple[str, ...]
    words: tuple[str, ...]
    documents: dict[str, tuple[str, ...]]


class Family(Protocol):
    """One family of tasks with its settings."""

    @property
    def new_tokens(self) -> int:
        """Tokens that an answer may take."""

    @property
    def least(self) -> int:
        """The fewest units of filler for which the answer is well defined."""

    @property
    def match(self) -> str:
        """`all`: the share of the answers that the text holds. `part`: whether it holds any of them."""

    def sample(self, task: str, id: str, length: int, library: Library) -> Sample:
        """The sample of this id: everything in it follows from the id and the length."""

    def builder(self, sample: Sample, length: int, library: Library) -> Builder:
        """The prompt around a number of filler units."""

    def gold(self, sample: Sample) -> str:
        """The answers as the text that continues the answer prefix."""


def joined(items: list[str]) -> str:
    """A, B, and C."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + ", and " + items[-1]


def digits_of(rng: random.Random, digits: int) -> str:
    """A number of so many digits, the first not zero."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def spread_out(units: list[str], placed: list[tuple[float, str]]) -> list[str]:
    """The units with each text at its depth (0 before all of them, 1 after), in the order of depths."""
    out, last = [], 0
    for depth, text in sorted(placed, key=lambda x: x[0]):
        at = math.floor(depth * len(units))
        out += [*units[last:at], text]
        last = at
    return out + units[last:]


def distinct(items: Iterator[str], taken: set[str] | None = None) -> Iterator[str]:
    """The items that were not there before; ends where 1000 in a row were (there are no more of them)."""
    seen, misses = set(taken or ()), 0
    for item in items:
        misses += 1
        if item not in seen:
            seen.add(item)
            misses = 0
            yield item
        elif misses == 1000:
            return


class Growing:
    """The first n items of an iterator, for any n, each made once."""

    def __init__(self, items: Iterator[str]):
        self.items, self.made = items, list[str]()

    def first(self, n: int) -> list[str]:
        """Fewer than n where there are no more."""
        while len(self.made) < n and (item := next(self.items, None)) is not None:
            self.made.append(item)
        return self.made[:n]
