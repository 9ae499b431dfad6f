"""RULER's question answering: one or two of many documents hold the answer; the documents are read or invented."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count as counting
from typing import Any

from moend.benchmarks.base import Sample
from moend.benchmarks.prompts import Prompt
from moend.benchmarks.ruler_base import Builder, Growing, Library, Question, distinct, spread_out

_GIVEN = """
Ada Alda Anselm Arno Berta Bruno Cecil Clara Cosima Dora Edgar Elin Emil Enid Ferdinand Flora Frida Gerda Gustav Hedda
Henrik Hilda Ida Igor Jonas Judith Karel Lena Leopold Livia Ludwig Magda Marius Milena Nora Oskar Otto Paula Ramon
Rosa Rupert Selma Silas Stella Tilda Ursula Viktor Wanda Yvo Zelda
"""
_TRADES = """
baker blacksmith bookbinder carpenter clockmaker cobbler cooper dyer gardener glazier goldsmith mason miller painter
potter printer saddler sailmaker tailor tanner tinker weaver wheelwright
"""
_INSTRUMENTS = """
bassoon cello clarinet cornet dulcimer fiddle flute guitar harp horn mandolin oboe organ piano viola zither
"""
_ONSETS = """
b br c d dr f g gr h k kl l m n p r s st t tr v w
"""
_RIMES = """
ad al an ar aun ed el en er es ib il in ir od ol on or osk und ul um ur us
"""
_TOWNS = """
bach berg bridge dale field ford gate ham haven holm mere mouth stead ton well wick
"""
GIVEN, TRADES, INSTRUMENTS = _GIVEN.split(), _TRADES.split(), _INSTRUMENTS.split()
ONSETS, RIMES, TOWNS = _ONSETS.split(), _RIMES.split(), _TOWNS.split()


@dataclass(frozen=True)
class Documents:
    """A question over documents, `hops` of which are needed for the answer.

    file: a data set's documents and questions, where it is given. Else both are generated: invented people, each with
    a document; over two hops the question names one person and asks about that person's teacher.
    """

    file: str
    hops: int
    new_tokens: int = 32  # see `Family`
    least: int = 0  # see `Family`
    match: str = "part"  # see `Family`

    def sample(self, task: str, id: str, length: int, library: Library) -> Sample:
        """A generated question and the documents it needs."""
        rng = random.Random(id)
        people = _people(rng)
        first, teacher = next(people), next(people)
        subject = teacher if self.hops == 2 else first
        said = "the person who taught " + first["name"] if self.hops == 2 else first["name"]
        field, wording = rng.choice(
            [
                ("town", "In which town was {} born?"),
                ("trade", "What was the trade of {}?"),
                ("instrument", "Which instrument did {} play?"),
                ("year", "In which year did {} open a workshop?"),
            ]
        )
        needs = [_document(first, teacher["name"])]
        if self.hops == 2:
            needs.append(_document(teacher, next(people)["name"]))
        return self.asked(rng, task, id, wording.format(said), (subject[field],), needs, {"source": "generated"})

    def read(self, task: str, id: str, question: Question, documents: tuple[str, ...]) -> Sample:
        """A question of a file."""
        needs = [documents[i] for i in question.needs]
        meta = {"source": self.file, "needs": list(question.needs), "near": list(question.near)}
        return self.asked(random.Random(id), task, id, question.text, question.answers, needs, meta)

    def asked(
        self,
        rng: random.Random,
        task: str,
        id: str,
        question: str,
        gold: tuple[str, ...],
        needs: list[str],
        meta: dict[str, Any],
    ) -> Sample:
        """A sample, its documents at random depths."""
        placed = [[rng.random(), text] for text in needs]
        rng.shuffle(placed)
        return Sample(task, id, "\n\n".join(needs), question, "Answer:", gold, {**meta, "documents": placed})

    def builder(self, sample: Sample, length: int, library: Library) -> Builder:
        """Units are documents that are not needed."""
        units = Growing(self._others(sample, library))
        placed = [(float(d), str(text)) for d, text in sample.meta["documents"]]
        task = "Answer the question from the documents. Give the answer alone, in no other words.\n\n"

        def build(count: int) -> Prompt:
            documents = spread_out(units.first(count), placed)
            context = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(documents, 1))
            return Prompt(task, context, f"\n\n{task}Question: {sample.question}", sample.answer_prefix)

        return build

    def _others(self, sample: Sample, library: Library) -> Iterator[str]:
        rng = random.Random(f"{sample.id}-documents")
        if sample.meta["source"] == "generated":
            return _strangers(rng, sample.context)
        documents = library.documents[self.file]
        near = list(sample.meta["near"])
        rest = sorted({*range(len(documents))} - {*near, *sample.meta["needs"]})
        rng.shuffle(near)
        rng.shuffle(rest)
        return (documents[i] for i in [*near, *rest])

    def gold(self, sample: Sample) -> str:
        """The first of the accepted answers."""
        return sample.gold[0]


def _people(rng: random.Random) -> Iterator[dict[str, str]]:
    """Invented people, no two of one name."""

    def name() -> str:
        return f"{rng.choice(GIVEN)} {_invented(rng, rng.choice((2, 2, 3)))}"

    for full in distinct(name() for _ in counting()):
        yield {
            "name": full,
            "town": _invented(rng, 1) + rng.choice(TOWNS),
            "trade": rng.choice(TRADES),
            "instrument": rng.choice(INSTRUMENTS),
            "year": str(rng.randrange(1700, 1950)),
        }


def _invented(rng: random.Random, syllables: int) -> str:
    return "".join(rng.choice(ONSETS) + rng.choice(RIMES) for _ in range(syllables)).capitalize()


def _document(person: dict[str, str], teacher: str) -> str:
    """What is known of a person: a title and three sentences."""
    name = person["name"]
    return (
        f"{name}\n{name} was born in {person['town']} and was taught by {teacher}. In {person['year']}, after some"
        f" years of travel, {name} opened a workshop as a {person['trade']}. In the evenings {name} played the"
        f" {person['instrument']} for friends and neighbours."
    )


def _strangers(rng: random.Random, known: str) -> Iterator[str]:
    """Documents of people who have nothing to do with the question."""
    people = (p for p in _people(rng) if p["name"] not in known)
    while (person := next(people, None)) is not None and (teacher := next(people, None)) is not None:
        yield _document(person, teacher["name"])
