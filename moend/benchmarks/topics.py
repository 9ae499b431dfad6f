"""Filler text of our own writing: sentences on eight topics, drawn from patterns. No calibration reads any of it."""

from __future__ import annotations

import random
import re
from functools import cache
from importlib import resources

import yaml

CHOICE = re.compile(r"\[([^\]]+)\]")
PARAGRAPH = (4, 7)  # sentences
TRIES = 20  # draws of a sentence before one that is there already is taken again


@cache
def topics() -> dict[str, tuple[str, ...]]:
    """Sentence patterns by topic; `[a|b]` in a pattern is a choice."""
    text = resources.files("moend.benchmarks").joinpath("data/topics.yaml").read_text(encoding="ascii")
    return {name: tuple(patterns) for name, patterns in yaml.safe_load(text).items()}


def distinct(topic: str) -> int:
    """How many different sentences a topic has."""
    total = 0
    for pattern in topics()[topic]:
        product = 1
        for choices in CHOICE.findall(pattern):
            product *= len(choices.split("|"))
        total += product
    return total


def filler(topic: str, characters: int, rng: random.Random) -> str:
    """Paragraphs on a topic, at least so many characters long.

    Every pattern is used once before any is used again, in a new order each time. A sentence returns only where chance
    offers nothing else.
    """
    patterns, said = topics()[topic], set[str]()
    paragraphs: list[str] = []
    queue: list[str] = []
    written = 0
    while written < characters:
        sentences = []
        for _ in range(rng.randint(*PARAGRAPH)):
            queue = queue or rng.sample(patterns, len(patterns))
            pattern = queue.pop()
            for _ in range(TRIES):
                sentence = CHOICE.sub(lambda m: rng.choice(m[1].split("|")), pattern)
                if sentence not in said:
                    break
            said.add(sentence)
            sentences.append(sentence)
        paragraphs.append(" ".join(sentences))
        written += len(paragraphs[-1]) + 2
    return "\n\n".join(paragraphs)
