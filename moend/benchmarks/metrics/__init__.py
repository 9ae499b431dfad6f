"""LongBench's official metrics (Bai et al. 2024), reproduced to the letter, oddities included.

Each takes (prediction, one reference, classes) and returns a float in [0, 1]; a sample's score is the largest over its
references. None of them raises on any prediction. Chinese texts are segmented by jieba's default dictionary.
"""

from __future__ import annotations

import difflib
import logging
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from moend.benchmarks.metrics import rouge

PARAGRAPH, PARAGRAPH_ZH = re.compile(r"Paragraph (\d+)"), re.compile(r"段落(\d+)")
Metric = Callable[[str, str, Sequence[str]], float]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# What the official scorer takes for Chinese punctuation, gaps included: of a pair like 《》 only the closing mark.
_CHINESE = (
    "！＂＃＄％＆＇（）＊＋，－／：；＜＝＞？＠［＼］＾＿｀｛｜｝～｟｠｡｢｣､"  # full-width forms, without ．
    "、。〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿"  # without 〈〉《
    "–—‘’‛“”„‟…‧﹏"
)
_PUNCTUATION_ZH = str.maketrans("", "", string.punctuation + _CHINESE)


def normalise(text: str) -> str:
    """Lower case, no ASCII punctuation, no English articles, single blanks: in this order."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def normalise_zh(text: str) -> str:
    """Lower case, no ASCII or Chinese punctuation, no blanks."""
    return "".join(text.lower().translate(_PUNCTUATION_ZH).split())


@cache
def _segmenter() -> Any:
    import jieba  # a second of loading, for Chinese tasks only

    jieba.setLogLevel(logging.WARNING)  # it reports its loading on standard error
    return jieba.Tokenizer()  # words that a program adds to jieba's own do not change scores


def segment(text: str) -> list[str]:
    """jieba's words of a text, blanks and punctuation included."""
    return list(_segmenter().cut(text, cut_all=False))


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


def qa_f1_zh(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Token F1 of the segmented texts, each segment normalised; segments of which nothing is left do not count."""
    return f1(*([t for s in segment(text) if (t := normalise_zh(s))] for text in (prediction, reference)))


def rouge_l(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F-score of summary-level ROUGE-L over words between blanks; 0 where either text has no sentence."""
    return rouge.rouge_l(prediction, reference)


def rouge_l_zh(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L of the segments; sentences end at an ASCII full stop, so that a Chinese text is one sentence."""
    return rouge.rouge_l(" ".join(segment(prediction)), " ".join(segment(reference)), rouge.STEPS_ZH)


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
    """Share of the numbers in the prediction that are the reference's paragraph number, `Paragraph N`."""
    return _share(prediction, PARAGRAPH.findall(reference)[0])


def retrieval_zh(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """The same for `段落N`."""
    return _share(prediction, PARAGRAPH_ZH.findall(reference)[0])


def count(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the prediction that are the reference."""
    return _share(prediction, str(reference))


def code_similarity(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """difflib's ratio, in whole percent, of the reference and the first line without a backtick, `#` or `//`.

    Lines count after leading newlines; "" where there is none. Published scores were made with fuzzywuzzy's ratio where
    python-Levenshtein is not installed: this one, half a percent rounded to even, and 0 against nothing.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((x for x in lines if not any(mark in x for mark in ("`", "#", "//"))), "")
    if line == reference:
        return 1.0
    if not line or not reference:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


METRICS: dict[str, Metric] = {
    "qa_f1": qa_f1,
    "qa_f1_zh": qa_f1_zh,
    "rouge_l": rouge_l,
    "rouge_l_zh": rouge_l_zh,
    "classification": classification,
    "retrieval": retrieval,
    "retrieval_zh": retrieval_zh,
    "count": count,
    "code_similarity": code_similarity,
}
