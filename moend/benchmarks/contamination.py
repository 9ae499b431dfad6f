"""Whether a calibration has seen a benchmark's text: shared runs of 13 words (Brown et al. 2020, appendix C).

Ids and hashes find a row that is used twice. They do not find one text that quotes another, or another edition of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from moend.benchmarks.base import Sample
from moend.errors import UserError

WORDS = 13  # in a run; shorter ones are shared by chance
WORD = re.compile(r"\w+")


def grams(text: str, n: int = WORDS) -> set[int]:
    """Hashes of all runs of n words, without regard to case, punctuation and white space."""
    words = WORD.findall(text.lower())
    return {hash(tuple(words[i : i + n])) for i in range(len(words) - n + 1)}


def shared(calibration: Iterable[str], samples: Iterable[Sample], n: int = WORDS) -> dict[str, float]:
    """Samples that share a run of n words with a calibration text: {id: share of the sample's runs}.

    A sample is its context, question, answer prefix and gold answers, each by itself, so that no run crosses from one
    into another.
    """
    seen: set[int] = set()
    for text in calibration:
        seen |= grams(text, n)
    found = {}
    for sample in samples:
        mine: set[int] = set()
        for text in texts(sample):
            mine |= grams(text, n)
        if common := len(mine & seen):
            found[sample.id] = common / len(mine)
    return found


def texts(sample: Sample) -> Sequence[str]:
    """All that a model could have read of a sample."""
    return (sample.context, sample.question, sample.answer_prefix, *sample.gold)


def require_uncontaminated(calibration: Iterable[str], samples: Iterable[Sample], what: str, n: int = WORDS) -> None:
    """UserError where a calibration text shares a run of n words with a sample; `what` names the calibration."""
    if found := shared(calibration, samples, n):
        worst = max(found, key=lambda k: found[k])
        raise UserError(
            f"{what} has read {len(found)} of the benchmark's samples: {found[worst]:.0%} of the runs of {n} words in"
            f" {worst} are in its text: calibrate on another text or split"
        )
