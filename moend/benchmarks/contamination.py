"""Whether a calibration has seen a benchmark's text: shared runs of 13 words (Brown et al. 2020, appendix C).

Ids and hashes find a row that is used twice. They do not find one text that quotes another, or another edition of it.
A text of 8 to 12 words counts where the other side holds all of it; a shorter one is shared by chance.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from moend.benchmarks.base import Sample
from moend.errors import UserError

WORDS = 13  # in a run; shorter ones are shared by chance
LEAST = 8  # words of a text that counts as a whole
WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    """The words of a text, without regard to case, punctuation and white space."""
    return WORD.findall(text.lower())


def grams(text: str, n: int = WORDS) -> set[int]:
    """Hashes of all runs of n words."""
    words = words_of(text)
    return {hash(tuple(words[i : i + n])) for i in range(len(words) - n + 1)}


def shared(calibration: Iterable[str], samples: Iterable[Sample], n: int = WORDS) -> dict[str, float]:
    """Samples that share a run of n words with a calibration text: {id: share of the sample's runs}.

    A sample is its context, question, answer prefix and gold answers, each by itself, so that no run crosses from one
    into another. A text of LEAST to n - 1 words, on either side, is one run. Each text is looked at once, and only
    where n words in a row are known to the calibration: its cost is one look-up a word.
    """
    read = [words for text in calibration if (words := words_of(text))]
    known = {word for words in read for word in words}
    seen = {hash(tuple(words[i : i + n])) for words in read for i in range(len(words) - n + 1)}
    whole = [f" {' '.join(words)} " for words in read]
    brief = [line for line, words in zip(whole, read, strict=True) if LEAST <= len(words) < n]
    memo: dict[str, tuple[int, int]] = {}
    found = {}
    for sample in samples:
        common = total = 0
        for text in texts(sample):
            if text not in memo:
                memo[text] = _count(words_of(text), known, seen, whole, brief, n)
            common, total = common + memo[text][0], total + memo[text][1]
        if common:
            found[sample.id] = min(common / total, 1.0)
    return found


def _count(
    words: list[str], known: set[str], seen: set[int], whole: Sequence[str], brief: Sequence[str], n: int
) -> tuple[int, int]:
    """Different runs of a text that the calibration holds, and how many runs it has."""
    if len(words) < n:
        line = f" {' '.join(words)} "
        counts = len(words) >= LEAST
        return int(counts and any(line in text for text in whole)), int(counts)
    hits = {h for stretch in _stretches(words, known, n) for h in _hashes(stretch, n) if h in seen}
    line = f" {' '.join(words)} " if brief else ""
    return len(hits) + sum(text in line for text in brief), len(words) - n + 1


def _stretches(words: list[str], known: set[str], n: int) -> Iterator[list[str]]:
    """The parts of a text of at least n words in a row that are all known."""
    start = 0
    for i, word in enumerate([*words, ""]):
        if word not in known:
            if i - start >= n:
                yield words[start:i]
            start = i + 1


def _hashes(words: list[str], n: int) -> Iterator[int]:
    return (hash(tuple(words[i : i + n])) for i in range(len(words) - n + 1))


def texts(sample: Sample) -> Sequence[str]:
    """All that a model could have read of a sample."""
    return (sample.context, sample.question, sample.answer_prefix, *sample.gold)


def contamination(calibration: Iterable[str], samples: Iterable[Sample], what: str, n: int = WORDS) -> str | None:
    """One line that says what a calibration has read of a benchmark; None: nothing. what: names the calibration."""
    found = shared(calibration, samples, n)
    if not found:
        return None
    worst = max(found, key=lambda k: found[k])
    share = f"{found[worst]:.0%}" if found[worst] >= 0.01 else "some"
    return (
        f"{what} has read {len(found)} of the benchmark's samples: {share} of the runs of {n} words in {worst} are in"
        " its text: calibrate on another text or split"
    )


def require_uncontaminated(calibration: Iterable[str], samples: Iterable[Sample], what: str, n: int = WORDS) -> None:
    """UserError where a calibration text shares a run of n words with a sample; `what` names the calibration."""
    if line := contamination(calibration, samples, what, n):
        raise UserError(line)
