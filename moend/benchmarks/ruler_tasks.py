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
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count as counting

from moend.benchmarks.base import Sample
from moend.benchmarks.niah import NOISE, WORDS
from moend.benchmarks.prompts import Prompt
from moend.benchmarks.ruler_base import Builder, Family, Growing, Library, digits_of, distinct, joined, spread_out
from moend.benchmarks.ruler_documents import Documents

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
    new_tokens: int = 128  # see `Family`
    least: int = 1  # see `Family`
    match: str = "all"  # see `Family`

    @property
    def one(self) -> bool:
        """Whether a single value is asked for."""
        return self.values * self.queries == 1

    def _kind(self, many: bool) -> str:
        return ("numbers" if many else "number") if self.value == "number" else ("codes" if many else "code")

    def _key(self, rng: random.Random) -> str:
        return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}" if self.key == "word" else _uuid(rng)

    def _value(self, rng: random.Random) -> str:
        return digits_of(rng, 7) if self.value == "number" else _uuid(rng)

    def _needle(self, key: str, value: str) -> str:
        return f"A secret {self._kind(False)} of {key} is: {value}."

    def sample(self, task: str, id: str, length: int, library: Library) -> Sample:
        """Keys and values, where their needles stand, and which keys are asked for."""
        rng = random.Random(id)
        keys = distinct(self._key(rng) for _ in counting())
        values = distinct(self._value(rng) for _ in counting())
        facts = [(k, [next(values) for _ in range(self.values)]) for k in (next(keys) for _ in range(self.keys))]
        placed = [(k, v) for k, vs in facts for v in vs]
        depths = [d / (DEPTHS - 1) for d in rng.sample(range(DEPTHS), len(placed))]
        needles = [[k, v, d] for (k, v), d in zip(placed, depths, strict=True)]
        asked = rng.sample(facts, self.queries)
        query = joined([k for k, _ in asked])
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
        units = Growing(self._fill(sample, library))
        glue, space = ("", " ") if self.haystack == "text" else ("\n", "")
        head = (
            f"A secret {self._kind(False)} is hidden in the text below. Remember it: you will be asked for it"
            if self.one
            else f"Secret {self._kind(True)} are hidden in the text below. Remember them: you will be asked for them"
        )
        needles = [(depth, text + space) for depth, text in placed]

        def build(count: int) -> Prompt:
            context = glue.join(spread_out(units.first(count), needles)).strip()
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
        keys = distinct((self._key(rng) for _ in counting()), mine)
        values = distinct((self._value(rng) for _ in counting()), mine)
        return (self._needle(k, v) for k, v in zip(keys, values, strict=False))

    def gold(self, sample: Sample) -> str:
        """The values, in the order asked for."""
        return joined(list(sample.gold))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


# Multi-hop tracing


@dataclass(frozen=True)
class Chain:
    """Variables that take their value from one another over `hops` assignments, among noise; all of them are asked for.

    One worked example stands before the task, as in the paper's generator.
    """

    hops: int = 4
    new_tokens: int = 30  # see `Family`
    least: int = 1  # see `Family`
    match: str = "all"  # see `Family`

    def sample(self, task: str, id: str, length: int, library: Library) -> Sample:
        """The chain, where its statements stand, and the example."""
        rng = random.Random(id)
        names = distinct("".join(rng.choices(string.ascii_uppercase, k=5)) for _ in counting())
        short = distinct("".join(rng.choices(string.ascii_uppercase, k=3)) for _ in counting())
        values = distinct(digits_of(rng, 5) for _ in counting())
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
            return "\n".join(spread_out([noise] * count, list(zip(depths, statements, strict=True))))

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

    common: int = 10  # how many words are asked for
    new_tokens: int = 120  # see `Family`
    least: int = 1  # see `Family`
    match: str = "all"  # see `Family`

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
        pairs = distinct(f"{rng.choice(rest)}-{rng.choice(rest)}" for _ in counting())
        units = Growing(word for words in (iter(rest), pairs) for word in words)
        task = "The numbered list below holds some words more often than others. Remember the most common ones.\n"
        example, ours = shown[: self.common], shown[self.common :]
        head = (
            f"{task}{_numbered(example, ours, example_often, example_seldom, f'{sample.id}-example')}\n"
            f"{sample.question}\n{sample.answer_prefix} {_numbers(example)}\n\n{task}"
        )

        def build(count: int) -> Prompt:
            words = _numbered(list(sample.gold), units.first(count), often, seldom, f"{sample.id}-order")
            return Prompt(head, words, "\n" + sample.question, sample.answer_prefix)

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

    new_tokens: int = 50  # see `Family`
    least: int = 150  # from here on, ranks 2 to 5 differ
    match: str = "all"  # see `Family`

    def sample(self, task: str, id: str, length: int, library: Library) -> Sample:
        """The three words that follow the dots."""
        words = self._vocabulary(id, length)[:3]
        question = "Question: Which three words are the most frequent in the coded text above? Ignore the dots '...'."
        prefix = "Answer: The three words that are most frequent in the coded text above are:"
        return Sample(task, id, " ".join(words), question, prefix, tuple(words))

    def _vocabulary(self, id: str, length: int) -> list[str]:
        rng = random.Random(id)
        words = distinct("".join(rng.choices(string.ascii_lowercase, k=6)) for _ in counting())
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
        return joined(list(sample.gold))


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
