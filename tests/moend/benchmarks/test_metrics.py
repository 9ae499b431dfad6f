"""LongBench's metrics: gold cases worked by hand from the official definitions, traps included."""

from __future__ import annotations

import string
import subprocess
import sys
import warnings
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge import Rouge

from moend.benchmarks import metrics as M
from moend.benchmarks.answers.extract import after_thinking, first_line, number_of_digits


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


def package_rouge_l(a: str, b: str) -> float:
    """The official call: all three metrics of the package, and 0 for whatever it raises."""
    try:
        return Rouge().get_scores([a], [b], avg=True)["rouge-l"]["f"]
    except (ValueError, RecursionError):
        return 0.0


WORDS = ["cat", "dog", "sat", "on", "the", "mat.", "A", "..", ".", "\n", "\u3000", " ", "会", "3.5"]
texts = st.lists(st.sampled_from(WORDS), max_size=30).map(" ".join) | st.text(alphabet="ab. \n", max_size=40)


@settings(max_examples=400, deadline=None)
@given(texts, texts)
def test_rouge_l_is_the_package(a, b):
    assert M.rouge_l(a, b) == package_rouge_l(a, b)


@pytest.mark.parametrize("prediction", ["", " ", ".", "...", "a. .b", ". ", "a..b", "\n\n", "a\u2003b", "."])
@pytest.mark.parametrize("reference", ["", " ", ".", "a b", "a. .b", "a b. a c"])
def test_rouge_l_of_little_text_is_the_package(prediction, reference):
    assert M.rouge_l(prediction, reference) == package_rouge_l(prediction, reference)


KS = (988, 989, 990, 991)  # the walks are given up from 989, 990 or 991 on
# What the official script does, with as many functions between its first line and the package.
SCRIPT = """
import sys
from rouge import Rouge
def rouge_score(prediction, reference, **unused):
    try:
        return Rouge().get_scores([prediction], [reference], avg=True)["rouge-l"]["f"]
    except RecursionError:
        return 0.0
def rouge_zh_score(prediction, reference, **unused):
    score = rouge_score(prediction, reference)
    return score
def scorer(function, pairs):
    found = []
    for p, r in pairs:
        found.append(function(p, r, classes=None))
    return found
def pairs(k):
    long = " ".join(f"w{i}" for i in range(k))
    other = " ".join(f"v{i}" for i in range(k))
    return [(long, long), (other + " x", "x " + long), (long, "x w0"), ("w0 x", long)]
for k in KS:
    print(k, scorer(rouge_score, pairs(k)), scorer(rouge_zh_score, pairs(k)))
"""


@pytest.mark.process
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="versions of CPython count frames in their own ways")
def test_rouge_l_gives_up_where_the_official_script_does():
    """At Python's limit of 1,000 frames, whatever the shape of the walk; and nowhere else."""
    script = SCRIPT.replace("KS", str(KS))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    space: dict[str, object] = {}
    exec(SCRIPT[SCRIPT.index("def pairs") : SCRIPT.index("for k in KS")], space)
    lines, gave_up = done.stdout.splitlines(), set()
    for k, line in zip(KS, lines, strict=True):
        both = [[M.rouge.rouge_l(p, r, s) for p, r in space["pairs"](k)] for s in (M.rouge.STEPS, M.rouge.STEPS_ZH)]
        gave_up |= {(k, tuple(x == 0 for x in ours)) for ours in both}
        assert line == " ".join(map(str, [k, *both]))
    assert {up for k, up in gave_up if k == 988} == {(False,) * 4}
    assert {up for k, up in gave_up if k == 991} == {(True,) * 4}


def test_rouge_l_does_not_depend_on_the_callers_stack():
    text = " ".join(f"w{i}" for i in range(900))

    def deep(frames):
        return deep(frames - 1) if frames else M.rouge_l(text, text)

    assert deep(500) == deep(0) == pytest.approx(1)


def test_rouge_l_of_very_long_texts():
    one = "word " * 300_000
    assert M.rouge_l(one, "word here") == 0  # one walk of 300,000 steps
    assert M.rouge_l("ab. " * 200_000 + "ab", "ab cd. ab") == pytest.approx(2 * 0.5 / 1.5, abs=1e-6)
    assert M.rouge_l("ab. ", "ab") == pytest.approx(2 * 0.5 / 1.5, abs=1e-6)  # the blank after the stop is a sentence
    assert 0 < M.rouge_l(". ".join(f"w{i} x" for i in range(20_000)), "x y. w7 z") < 0.01


@pytest.mark.parametrize(
    ("prediction", "reference", "want"),
    [
        ("会议讨论了疫情", "会议讨论了疫情", 1),
        ("", "会议", 0),
        ("。", "会议", 0),  # one segment, but not a shared one
        (".", "会议", 0),
        ("物流行业", "物流 行业", 1),  # blanks do not count
        ("物流行业很好", "物流行业", 2 * (2 / 4) / (1 + 2 / 4)),  # 物流 行业 很 好
        ("讨论会议", "会议讨论", 0.5),  # order counts
    ],
)
def test_rouge_l_zh(prediction, reference, want):
    assert M.rouge_l_zh(prediction, reference) == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("《红楼梦》（上）。", "《红楼梦上"),  # the opening 《 is not in the official list
        ("A, B！c\u3000d\n", "abcd"),
        ("．〈x〉", "．〈x〉"),
        ("“引号”—……", "引号"),
        ("３.5", "３5"),
    ],
)
def test_normalise_zh(text, want):
    assert M.normalise_zh(text) == want


@pytest.mark.parametrize(
    ("prediction", "reference", "want"),
    [
        ("北京", "北京。", 1),
        ("他在北京大学", "北京大学", 0.5),  # 他 在 北京大学
        ("北京北京", "北京", 2 * 0.5 / 1.5),
        ("上海", "北京", 0),
        ("", "北京", 0),
        ("。，", "。，", 0),  # nothing is left
        ("2018 年", "2018年", 1),
        ("Beijing", "BEIJING", 1),
    ],
)
def test_qa_f1_zh(prediction, reference, want):
    assert M.qa_f1_zh(prediction, reference) == pytest.approx(want)


def test_words_added_to_jieba_change_nothing():
    import jieba

    before = M.qa_f1_zh("物流行业", "行业")
    jieba.add_word("物流行业", freq=10**6)
    try:
        assert jieba.lcut("物流行业") == ["物流行业"]
        assert M.qa_f1_zh("物流行业", "行业") == before == pytest.approx(2 * 0.5 / 1.5)
    finally:
        jieba.del_word("物流行业")


def test_segmenting_says_nothing(capfd):
    assert M.segment("北京大学") == ["北京大学"]
    assert capfd.readouterr() == ("", "")


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


@pytest.mark.parametrize(
    ("prediction", "want"),
    [("段落3", 1), ("3", 1), ("段落13", 0), ("第3段，不是4", 0.5), ("三", 0), ("３", 0), ("", 0)],
)
def test_retrieval_zh(prediction, want):
    assert M.retrieval_zh(prediction, "段落3") == want


@pytest.mark.parametrize(("prediction", "want"), [("7", 1), ("7 of 10", 0.5), ("17", 0), ("none", 0), ("7.0", 0.5)])
def test_count(prediction, want):
    assert M.count(prediction, "7") == want


@pytest.mark.parametrize(
    ("prediction", "reference", "want"),
    [
        ("x = 1", "x = 1", 1),
        ("\n\nx = 1\ny = 2", "x = 1", 1),  # the first line after newlines
        (" \nx = 1", "x = 1", round(100 * 2 * 1 / 6) / 100),  # a blank line is a line
        ("# say\nx = 1", "x = 1", 1),
        ("// say\nx = 1", "x = 1", 1),
        ("```python\nx = 1\n```", "x = 1", 1),
        ("x = 1  # one\ny = 1", "x = 1", 0.8),  # a mark anywhere in a line leaves it out
        ("a/b", "a/b", 1),
        ("# all\n# of\n`it`", "x = 1", 0),
        ("", "x", 0),
        ("x", "", 0),
        ("", "", 1),  # equal
        ("# x", "", 1),  # and so is no line at all
        ("\tx", "x", round(100 * 2 / 3) / 100),  # blanks count
        ("abcd", "bcde", 0.75),
        # the ratio of difflib takes the longest block first and is not an edit distance
        ("ab" * 3 + "c", "c" + "ab" * 3, round(100 * 12 / 14) / 100),
        ("x" * 3 + "y" * 5, "y" * 8, round(100 * 10 / 16) / 100),  # 62.5 goes to the even 62
    ],
)
def test_code_similarity(prediction, reference, want):
    assert M.code_similarity(prediction, reference) == want


@pytest.fixture(scope="module")
def fuzz():
    """fuzzywuzzy without python-Levenshtein, as published scores had it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it warns that difflib is slow
        from fuzzywuzzy import fuzz as module
    assert module.SequenceMatcher.__module__ == "difflib"
    return module


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab =(\t", max_size=30), st.text(alphabet="ab =(\t", max_size=30), st.sampled_from([1, 15]))
def test_code_similarity_is_fuzzywuzzys(fuzz, a, b, times):
    a, b = a * times, b * times  # from 200 characters on difflib ignores frequent ones
    assert M.code_similarity(a, b) == fuzz.ratio(a, b) / 100


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
@given(
    st.text(max_size=80)
    | st.text(alphabet="0123456789. \n<>/think", max_size=80)
    | st.text(alphabet="会议段落3。，.\n 《》", max_size=80)
)
def test_no_text_crashes_a_scorer(text):
    for name, metric in M.METRICS.items():
        reference = {"retrieval": "Paragraph 3", "retrieval_zh": "段落3"}.get(name, "Date")
        assert 0 <= metric(text, reference, CLASSES) <= 1
        if not name.startswith("retrieval"):
            assert 0 <= metric("Date", text, CLASSES) <= 1
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
