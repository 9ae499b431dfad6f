"""LongBench's metrics: gold cases worked by hand from the official definitions, traps included."""

from __future__ import annotations

import random
import string
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge import Rouge

from moend.benchmarks import metrics as M
from moend.benchmarks.answers import after_thinking, first_line, number_of_digits


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("The  Cat, a DOG!", "cat dog"),
        ("an apple-pie", "applepie"),  # punctuation goes without a blank
        ("theatre another", "theatre another"),  # articles only as whole words
        ("a.b", "ab"),  # punctuation goes before articles
        ("a. the", ""),
        ("“quoted” – dash", "“quoted” – dash"),  # only ASCII punctuation
        ("tab\tand\nline", "tab and line"),
        ("A's", "as"),
    ],
)
def test_normalise(text, want):
    assert M.normalise(text) == want


@pytest.mark.parametrize(
    ("prediction", "reference", "want"),
    [
        ("Paris", "paris.", 1),
        ("the city of Paris", "Paris", 2 * (1 / 3) * 1 / (1 / 3 + 1)),
        ("Paris Paris", "Paris", 2 * 0.5 / 1.5),  # a multiset: the second one counts against precision
        ("London", "Paris", 0),
        ("", "Paris", 0),
        ("the", "the", 0),  # nothing is left after normalising
        ("Paris", "", 0),
        ("b c d", "a b c", 0.8),  # the article of the reference goes too
        ("x y z", "x y w v", 2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4)),
    ],
)
def test_qa_f1(prediction, reference, want):
    assert M.qa_f1(prediction, reference) == pytest.approx(want)


@pytest.mark.parametrize(
    ("prediction", "reference", "want"),
    [
        ("", "a cat", 0),
        ("   ", "a cat", 0),
        ("...", "a cat", 0),  # full stops only: no sentence
        ("a cat", "", 0),
        ("a cat sat", "a cat sat", 1),
        ("a dog sat", "a cat sat", 2 / 3),
        ("The cat", "the cat", 0.5),  # case counts
        ("the cat the cat", "the cat", 1),  # words count once: the package keeps sets
        ("b a", "a b", 0.5),  # order counts
    ],
)
def test_rouge_l(prediction, reference, want):
    assert M.rouge_l(prediction, reference) == pytest.approx(want, abs=1e-6)


def test_rouge_l_is_the_package_with_all_its_metrics():
    """Asking for ROUGE-L alone changes nothing: the official scorer asks for all three."""
    rng = random.Random(0)
    words = ["cat", "dog", "sat", "on", "mat.", "A", "the", "..", "\n"]
    for _ in range(60):
        a, b = (" ".join(rng.choices(words, k=rng.randrange(1, 20))) for _ in range(2))
        try:
            want = Rouge().get_scores([a], [b], avg=True)["rouge-l"]["f"]
        except ValueError:
            want = 0.0
        assert M.rouge_l(a, b) == want


CLASSES = ["Number", "Other number", "Date", "Individual", "Description of a person", "Person"]


@pytest.mark.parametrize(
    ("prediction", "reference", "want"),
    [
        ("Type: Date", "Date", 1),
        ("Date or Individual", "Date", 0.5),
        ("date", "Date", 0),  # case counts
        ("Individual", "Date", 0),
        ("", "Date", 0),
        ("Other number", "Other number", 1),
        ("Number", "Number", 1),
        ("Number Date", "Date", 0.5),
    ],
)
def test_classification(prediction, reference, want):
    assert M.classification(prediction, reference, CLASSES) == want


def test_classification_one_name_inside_another():
    classes = ["number", "other number", "number of"]
    assert M.classification("other number", "other number", classes) == 1  # the shorter name does not count
    assert M.classification("other number", "number", classes) == 0.5  # the longer one does
    # the official loop removes from the list it walks: after "a" goes, "ab" is skipped and stays
    assert M.classification("abc", "abc", ["a", "ab", "abc"]) == 0.5


@pytest.mark.parametrize(
    ("prediction", "want"),
    [
        ("Paragraph 3", 1),
        ("3", 1),
        ("Paragraph 13", 0),
        ("Paragraphs 3 and 4", 0.5),
        ("3 3", 1),
        ("three", 0),
        ("", 0),
        ("03", 0),  # compared as text
    ],
)
def test_retrieval(prediction, want):
    assert M.retrieval(prediction, "Paragraph 3") == want


@pytest.mark.parametrize(("prediction", "want"), [("7", 1), ("7 of 10", 0.5), ("17", 0), ("none", 0), ("7.0", 0.5)])
def test_count(prediction, want):
    assert M.count(prediction, "7") == want


def naive_f1(a: str, b: str) -> float:
    def tokens(text):
        kept = "".join(c for c in text.lower() if c not in set(string.punctuation))
        return [w for w in kept.split() if w not in ("a", "an", "the")]

    x, y = tokens(a), tokens(b)
    same = sum(min(Counter(x)[w], Counter(y)[w]) for w in set(x))
    return 2 * same / (len(x) + len(y)) if same else 0.0


@given(st.text(alphabet="abthe .,\n-", max_size=40), st.text(alphabet="abthe .,\n-", max_size=40))
def test_f1_against_a_naive_one(a, b):
    assert M.qa_f1(a, b) == pytest.approx(naive_f1(a, b))


@pytest.mark.req(10)
@settings(max_examples=200, deadline=None)
@given(st.text(max_size=80) | st.text(alphabet="0123456789. \n<>/think", max_size=80))
def test_no_text_crashes_a_scorer(text):
    for name, metric in M.METRICS.items():
        reference = "Paragraph 3" if name == "retrieval" else "Date"
        assert 0 <= metric(text, reference, CLASSES) <= 1
    first_line(after_thinking(text))
    number_of_digits(text, 7)


@pytest.mark.parametrize(
    ("text", "want"), [("\n\nDate\nType: x", "Date"), ("Date", "Date"), ("", ""), (" \nDate", " "), ("\r\nDate", "\r")]
)
def test_first_line_strips_newlines_only(text, want):
    assert first_line(text) == want


def test_after_thinking():
    assert after_thinking("so </think> no </think> 42") == " 42"
    assert after_thinking("42") == "42"
    assert after_thinking("<think> 42") == "<think> 42"


@pytest.mark.req(10)
@pytest.mark.parametrize(
    ("text", "want"),
    [
        (" 1234567.", "1234567"),
        ("12345678", None),
        ("123456", None),
        ("x12345678 1234567", "1234567"),
        ("1,234,567", None),
        ("1234567 or 7654321", "1234567"),
        ("١٢٣٤٥٦٧", None),
        ("", None),
    ],
)
def test_number_of_digits(text, want):
    assert number_of_digits(text, 7) == want
