"""RULER's five task families (Hsieh et al. 2024, arXiv 2404.06654, section 3 and appendix B), generated.

A sample says what is asked and what the answer is; how much filler stands around it is found when a prompt is rendered,
so that samples need no tokenizer. A family makes samples, and for each a function from a number of filler units
(sentences, words, documents) to a prompt: more units are always a longer prompt, and the answer stays the same.
The shape, counts, frequencies and output limits are the paper's; sentences and word lists are our own.
"""

from __future__ import annotations

import math
import random
import string
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count as counting
from typing import Any, Protocol

from moend.benchmarks.base import Prompt, Sample
from moend.benchmarks.niah import NOISE, WORDS

VERSION = 2
DEPTHS = 40  # places between start and end at which needles may stand

_ADJECTIVES = """
agile amber ample azure bashful blunt bold brave brief bright brisk broad bronze calm careful cheerful chilly civil
clever coarse cosy crimson crisp curious curly damp daring deep dense distant dizzy drowsy dusty eager early earnest
elder even faint fair famous fancy fierce fluffy fond formal frail frank fresh frosty frugal gentle giant glad gleaming
golden graceful grand green hardy hasty hazy heavy hollow honest humble idle jolly keen kind lavish lazy level little
lively lofty lonely loud loyal lucky mellow merry mighty mild misty modest muddy narrow neat nimble noble noisy novel
old orderly pale patient placid plain plucky polite prim prompt proud quick quiet rapid rare restless rosy rough round
royal rugged rustic scarlet secret serene shiny shy silent simple sleepy slender smooth sober soft solemn spare steady
stern stout sturdy subtle sunny swift tall tame tender thrifty tidy timid tiny tranquil upright vague vast velvety
vivid warm wary weary wide wild windy wise witty young zealous
"""
_NOUNS = """
acorn almond apron atlas bakery balcony bamboo beetle bishop boulder bramble bugle cactus camel canary cavern cello
chimney cider cliff clock cottage cradle crown cushion dagger donkey dragon easel elbow envelope fiddler fountain
gallery garnet gazelle goblet granite hamlet harp heron hinge iceberg insect jackal kennel ladder lagoon lobster
mandolin marmot meteor monsoon nectar nugget orchard otter panther pelican pigeon plateau pulley quiver raven rooster
saffron sequoia shepherd skylark sparrowhawk stirrup tapestry thistle trumpet urchin vineyard walrus weasel wharf
"""
ADJECTIVES = _ADJECTIVES.split()
NOUNS = sorted({*WORDS, *_NOUNS.split()})

Builder = Callable[[int], Prompt]


@dataclass(frozen=True)
class Question:
    """A question over documents from a file: the documents it needs (by index), and those nearest to it."""

    text: str
    answers: tuple[str, ...]
    needs: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Library:
    """What prompts are filled with: sentences of a text, its distinct words, and read documents by family name."""

    sentences: tuple[str, ...]
    words: tuple[str, ...]
    documents: dict[str, tuple[str, ...]]


class Family(Protocol):
    """One family of tasks with its settings. least: the fewest units of filler for which the answer is well defined."""

    @property
    def new_tokens(self) -> int: ...

    @property
    def least(self) -> int: ...

    @property
    def match(self) -> str:
        """`all`: the share of the answers that the text holds. `part`: whether it holds any of them."""

    def sample(self, task: str, id: str, length: int, library: Library) -> Sample:
        """The sample of this id: everything in it follows from the id and the length."""

    def builder(self, sample: Sample, length: int, library: Library) -> Builder:
        """The prompt around a number of filler units."""

    def gold(self, sample: Sample) -> str:
        """The answers as the text that continues the answer prefix."""


def _listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + ", and " + items[-1]


def _number(rng: random.Random, digits: int) -> str:
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def _spread(units: list[str], placed: list[tuple[float, str]]) -> list[str]:
    """The units with each text at its depth (0 before all of them, 1 after), in the order of depths."""
    out, last = [], 0
    for depth, text in sorted(placed, key=lambda x: x[0]):
        at = math.floor(depth * len(units))
        out += [*units[last:at], text]
        last = at
    return out + units[last:]


# Retrieval


@dataclass(frozen=True)
class Needles:
    """Needles of `values` values for each of `keys` keys, of which `queries` are asked for, in a haystack.

    haystack: noise | text | needles (others of the same form). key: word | uuid. value: number | uuid.
    """

    haystack: str
    key: str = "word"
    value: str = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1
    new_tokens: int = 128
    least: int = 1
    match: str = "all"

    @property
    def one(self) -> bool:
        return self.values * self.queries == 1

    def _kind(self, many: bool) -> str:
        return ("numbers" if many else "number") if self.value == "number" else ("codes" if many else "code")

    def _key(self, rng: random.Random) -> str:
        return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}" if self.key == "word" else _uuid(rng)

    def _value(self, rng: random.Random) -> str:
        return _number(rng, 7) if self.value == "number" else _uuid(rng)

    def _needle(self, key: str, value: str) -> str:
        return f"A secret {self._kind(False)} of {key} is: {value}."

    def sample(self, task: str, id: str, length: int, library: Library) -> Sample:
        """Keys and values, where their needles stand, and which keys are asked for."""
        rng = random.Random(id)
        keys = _distinct(self._key(rng) for _ in counting())
        values = _distinct(self._value(rng) for _ in counting())
        facts = [(k, [next(values) for _ in range(self.values)]) for k in (next(keys) for _ in range(self.keys))]
        placed = [(k, v) for k, vs in facts for v in vs]
        depths = [d / (DEPTHS - 1) for d in rng.sample(range(DEPTHS), len(placed))]
        needles = [[k, v, d] for (k, v), d in zip(placed, depths, strict=True)]
        asked = rng.sample(facts, self.queries)
        query = _listed([k for k, _ in asked])
        start = rng.randrange(len(library.sentences)) if self.haystack == "text" else 0
        if self.one:
            question = f"Which secret {self._kind(False)} of {query} does the text above give?"
            prefix = f"The secret {self._kind(False)} of {query} given in the text is"
        else:
            question = f"Which secret {self._kind(True)} of {query} does the text above give? Name all of them."
            prefix = f"The secret {self._kind(True)} of {query} given in the text are"
        return Sample(
            task,
            id,
            "\n".join(self._needle(k, v) for k, v in placed),
            question,
            prefix,
            tuple(v for _, vs in asked for v in vs),
            {"needles": needles, "start": start},
        )

    def builder(self, sample: Sample, length: int, library: Library) -> Builder:
        """Units are sentences of the text, blocks of noise, or other needles."""
        placed = [(float(d), self._needle(k, v)) for k, v, d in sample.meta["needles"]]
        units = _Growing(self._fill(sample, library))
        glue, space = ("", " ") if self.haystack == "text" else ("\n", "")
        head = (
            f"A secret {self._kind(False)} is hidden in the text below. Remember it: you will be asked for it"
            if self.one
            else f"Secret {self._kind(True)} are hidden in the text below. Remember them: you will be asked for them"
        )
        needles = [(depth, text + space) for depth, text in placed]

        def build(count: int) -> Prompt:
            context = glue.join(_spread(units.first(count), needles)).strip()
            return Prompt(f"{head} afterwards.\n", context, "\n" + sample.question, sample.answer_prefix)

        return build

    def _fill(self, sample: Sample, library: Library) -> Iterator[str]:
        if self.haystack == "needles":
            return self._others(sample)
        if self.haystack == "noise":
            return (NOISE.strip() for _ in counting())
        start, n = sample.meta["start"], len(library.sentences)
        return (library.sentences[(start + i) % n] for i in counting())

    def _others(self, sample: Sample) -> Iterator[str]:
        """Needles of keys and values that no needle of the sample has."""
        rng, mine = random.Random(f"{sample.id}-haystack"), {x for k, v, _ in sample.meta["needles"] for x in (k, v)}
        keys = _distinct((self._key(rng) for _ in counting()), mine)
        values = _distinct((self._value(rng) for _ in counting()), mine)
        return (self._needle(k, v) for k, v in zip(keys, values, strict=False))

    def gold(self, sample: Sample) -> str:
        """The values, in the order asked for."""
        return _listed(list(sample.gold))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _distinct(items: Iterator[str], taken: set[str] | None = None) -> Iterator[str]:
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


class _Growing:
    """The first n items of an iterator, for any n, each made once."""

    def __init__(self, items: Iterator[str]):
        self.items, self.made = items, list[str]()

    def first(self, n: int) -> list[str]:
        """Fewer than n where there are no more."""
        while len(self.made) < n and (item := next(self.items, None)) is not None:
            self.made.append(item)
        return self.made[:n]


# Multi-hop tracing


@dataclass(frozen=True)
class Chain:
    """Variables that take their value from one another over `hops` assignments, among noise; all of them are asked for.

    One worked example stands before the task, as in the paper's generator.
    """

    hops: int = 4
    new_tokens: int = 30
    least: int = 1
    match: str = "all"

    def sample(self, task: str, id: str, length: int, library: Library) -> Sample:
        """The chain, where its statements stand, and the example."""
        rng = random.Random(id)
        names = _distinct("".join(rng.choices(string.ascii_uppercase, k=5)) for _ in counting())
        short = _distinct("".join(rng.choices(string.ascii_uppercase, k=3)) for _ in counting())
        values = _distinct(_number(rng, 5) for _ in counting())
        chain, value = [next(names) for _ in range(self.hops + 1)], next(values)
        example, other = [next(short) for _ in range(self.hops + 1)], next(values)
        depths = [d / (DEPTHS - 1) for d in sorted(rng.sample(range(DEPTHS), len(chain)))]
        return Sample(
            task,
            id,
            "\n".join(_statements(chain, value)),
            self._question(value),
            self._prefix(value),
            tuple(chain),
            {"value": value, "depths": depths, "example": [example, other]},
        )

    def _question(self, value: str) -> str:
        return f"Question: Which variables have the value {value} in the text above?"

    def _prefix(self, value: str) -> str:
        return f"Answer: By the assignments in the text above, {self.hops + 1} variables have the value {value}:"

    def builder(self, sample: Sample, length: int, library: Library) -> Builder:
        """Units are blocks of noise, one a line."""
        task = "The text below hides assignments of variables. Follow the chain from one variable to the next.\n\n"
        noise = NOISE.strip()

        def lines(statements: list[str], depths: list[float], count: int) -> str:
            return "\n".join(_spread([noise] * count, list(zip(depths, statements, strict=True))))

        names, value = sample.meta["example"]
        spread = [(i + 1) / (len(names) + 1) for i in range(len(names))]
        shown = lines(_statements(names, value), spread, len(names))
        example = f"{task}{shown}\n{self._question(value)}\n{self._prefix(value)} {' '.join(names)}\n\n"
        statements = _statements(list(sample.gold), sample.meta["value"])

        def build(count: int) -> Prompt:
            context = lines(statements, sample.meta["depths"], count)
            return Prompt(example + task, context, "\n" + sample.question, sample.answer_prefix)

        return build

    def gold(self, sample: Sample) -> str:
        """The variables in the order of the chain."""
        return " ".join(sample.gold)


def _statements(names: list[str], value: str) -> list[str]:
    return [f"VAR {a} = {b}" for a, b in zip(names, [value, *(f"VAR {n}" for n in names)], strict=False)]


# Aggregation


@dataclass(frozen=True)
class CommonWords:
    """The ten words that stand 30 times in a numbered list whose other words stand three times.

    Below 4,096 tokens 6 and 1, and a smaller worked example, as in the paper's generator.
    """

    common: int = 10
    new_tokens: int = 120
    least: int = 1
    match: str = "all"

    def sample(self, task: str, id: str, length: int, library: Library) -> Sample:
        """The common words: none that the question or the answer prefix holds, whose echo would count as an answer."""
        question = f"Question: Which {self.common} words are the most common in the list above?"
        prefix = f"Answer: The {self.common} words that are most common in the list are:"
        asked = f"{question} {prefix}".lower()
        words = random.Random(id).sample([w for w in library.words if w not in asked], self.common)
        return Sample(task, id, " ".join(words), question, prefix, tuple(words))

    def builder(self, sample: Sample, length: int, library: Library) -> Builder:
        """Units are uncommon words."""
        often, seldom = (30, 3) if length >= 4096 else (6, 1)
        few, example_often, example_seldom = (40, 10, 3) if length >= 4096 else (20, 3, 1)
        rng = random.Random(f"{sample.id}-words")
        rest = sorted({*library.words} - {*sample.gold})
        rng.shuffle(rest)
        shown, rest = rest[:few], rest[few:]
        # beyond the words of the text: two of them joined
        pairs = _distinct(f"{rng.choice(rest)}-{rng.choice(rest)}" for _ in counting())
        units = _Growing(word for words in (iter(rest), pairs) for word in words)
        task = "The numbered list below holds some words more often than others. Remember the most common ones.\n"
        example, ours = shown[: self.common], shown[self.common :]
        head = (
            f"{task}{_numbered(example, ours, example_often, example_seldom, f'{sample.id}-example')}\n"
            f"{sample.question}\n{sample.answer_prefix} {_numbers(example)}\n\n{task}"
        )

        def build(count: int) -> Prompt:
            listed = _numbered(list(sample.gold), units.first(count), often, seldom, f"{sample.id}-order")
            return Prompt(head, listed, "\n" + sample.question, sample.answer_prefix)

        return build

    def gold(self, sample: Sample) -> str:
        """A numbered list, as in the example."""
        return _numbers(list(sample.gold))


def _numbers(words: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def _numbered(common: list[str], others: list[str], often: int, seldom: int, seed: str) -> str:
    words = common * often + others * seldom
    random.Random(seed).shuffle(words)
    return _numbers(words)


@dataclass(frozen=True)
class FrequentWords:
    """The three most frequent made-up words of a text with a zeta distribution; rank one is dots, to be ignored.

    The word of rank k stands n k^-alpha / zeta(alpha) times, rounded down, of a vocabulary of (length - output) / 50.
    """

    new_tokens: int = 50
    least: int = 150  # from here on, ranks 2 to 5 differ
    match: str = "all"

    def sample(self, task: str, id: str, length: int, library: Library) -> Sample:
        """The three words that follow the dots."""
        words = self._vocabulary(id, length)[:3]
        question = "Question: Which three words are the most frequent in the coded text above? Ignore the dots '...'."
        prefix = "Answer: The three words that are most frequent in the coded text above are:"
        return Sample(task, id, " ".join(words), question, prefix, tuple(words))

    def _vocabulary(self, id: str, length: int) -> list[str]:
        rng = random.Random(id)
        words = _distinct("".join(rng.choices(string.ascii_lowercase, k=6)) for _ in counting())
        return [next(words) for _ in range(max((length - self.new_tokens) // 50, 5))]

    def builder(self, sample: Sample, length: int, library: Library) -> Builder:
        """Units are words drawn, before rounding down."""
        vocabulary = ["...", *self._vocabulary(sample.id, length)]
        head = "The text below is coded. Count how often each coded word stands in it and find the three most frequent."

        def build(count: int) -> Prompt:
            times = [int(count / (k * k) / (math.pi**2 / 6)) for k in range(1, len(vocabulary) + 1)]
            words = [w for word, n in zip(vocabulary, times, strict=True) for w in [word] * n]
            random.Random(f"{sample.id}-order").shuffle(words)
            return Prompt(f"{head}\n", " ".join(words), "\n" + sample.question, sample.answer_prefix)

        return build

    def gold(self, sample: Sample) -> str:
        """The words, the most frequent first."""
        return _listed(list(sample.gold))


# Question answering

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
    new_tokens: int = 32
    least: int = 0
    match: str = "part"

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
        units = _Growing(self._others(sample, library))
        placed = [(float(d), str(text)) for d, text in sample.meta["documents"]]
        task = "Answer the question from the documents. Give the answer alone, in no other words.\n\n"

        def build(count: int) -> Prompt:
            documents = _spread(units.first(count), placed)
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

    for full in _distinct(name() for _ in counting()):
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


TASKS: dict[str, Family] = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("text"),
    "niah_single_3": Needles("text", value="uuid"),
    "niah_multikey_1": Needles("text", keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", key="uuid", value="uuid"),
    "niah_multivalue": Needles("text", values=4),
    "niah_multiquery": Needles("text", keys=4, queries=4),
    "vt": Chain(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
    "qa_1": Documents("squad", hops=1),
    "qa_2": Documents("hotpotqa", hops=2),
}
