"""LongBench's official metrics (Bai et al. 2024), reproduced to the letter, oddities included.

Each takes (prediction, one reference, classes) and returns a float in [0, 1]; a sample's score is the largest over its
references. None of them raises on any prediction.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from rouge import Rouge

Metric = Callable[[str, str, Sequence[str]], float]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, no ASCII punctuation, no English articles, single blanks: in this order."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over the multiset of tokens; 0 where nothing is shared."""
    same = sum((Counter(prediction) & Counter(reference)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(prediction), same / len(reference)
    return 2 * precision * recall / (precision + recall)


def qa_f1(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Token F1 of the normalised texts."""
    return f1(normalise(prediction).split(), normalise(reference).split())


def rouge_l(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F-score of summary-level ROUGE-L as the package `rouge` computes it; 0 where either text has no sentence."""
    try:
        scores = Rouge(metrics=["rouge-l"]).get_scores([prediction], [reference], avg=True)
    except (ValueError, RecursionError):  # an empty text, or one of full stops only; a longest subsequence too deep
        return 0.0
    return float(scores["rouge-l"]["f"])


def classification(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """1 / (class names found in the prediction) where the reference is among them, else 0.

    Names contained in the reference do not count, except that the official loop removes from the list it walks and so
    skips the name after each one removed: kept, since published scores were made with it.
    """
    found = [name for name in classes if name in prediction]
    for name in found:
        if name in reference and name != reference:
            found.remove(name)
    return 1.0 / len(found) if reference in found else 0.0


def _share(prediction: str, wanted: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return sum(n == wanted for n in numbers) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the prediction that are the reference's paragraph number."""
    return _share(prediction, re.findall(r"Paragraph (\d+)", reference)[0])


def count(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the prediction that are the reference."""
    return _share(prediction, str(reference))


METRICS: dict[str, Metric] = {
    "qa_f1": qa_f1,
    "rouge_l": rouge_l,
    "classification": classification,
    "retrieval": retrieval,
    "count": count,
}
