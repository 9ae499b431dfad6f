"""Contamination: a calibration that has read a benchmark's text is found, by a naive reference and by hand."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moend.benchmarks import Sample, benchmark, names
from moend.benchmarks.contamination import WORDS, contamination, require_uncontaminated, shared
from moend.calibration import Calibration, Target, kind, kinds
from moend.errors import Blocked, UserError
from moend.methods.spec import method
from moend.models.load import spec

SENTENCE = "one two three four five six seven eight nine ten eleven twelve thirteen"  # 13 words


def sample(context: str, question: str = "", *gold: str, id: str = "s") -> Sample:
    return Sample("t", id, context, question, "", gold)


def test_by_hand() -> None:
    assert shared([SENTENCE], [sample(f"zero {SENTENCE} fourteen")]) == {"s": 1 / 3}  # 3 runs, one of them shared
    assert shared([SENTENCE.upper().replace(" ", ",  ")], [sample("", f"{SENTENCE}!")]) == {"s": 1}
    assert shared([SENTENCE], [sample(SENTENCE.replace("seven", "7"))]) == {}
    assert (
        shared([SENTENCE], [sample("one two three four five six", "seven eight nine ten eleven twelve thirteen")]) == {}
    )


def test_a_short_text_counts_as_a_whole() -> None:
    eight = "what is the sum of six and nine"
    assert set(shared([f"a b c {eight} d"], [sample("", eight)])) == {"s"}  # the sample is short
    assert set(shared([eight], [sample(f"{SENTENCE} {eight} {SENTENCE}")])) == {"s"}  # the calibration is short
    assert shared([f"{SENTENCE} six and nine"], [sample("", "six and nine")]) == {}, "three words are shared by chance"


@given(
    st.lists(st.lists(st.sampled_from("abcd"), min_size=13, max_size=40), max_size=3),
    st.lists(st.lists(st.sampled_from("abcde"), min_size=13, max_size=60), min_size=1, max_size=4),
    st.integers(2, 13),
)
def test_naive_reference(read: list[list[str]], contexts: list[list[str]], n: int) -> None:
    texts = [" ".join(words) for words in read]
    samples = [sample(" ".join(words), id=str(i)) for i, words in enumerate(contexts)]
    runs = {tuple(words[i : i + n]) for words in read for i in range(len(words) - n + 1)}
    found = shared(texts, samples, n)
    for i, words in enumerate(contexts):
        mine = {tuple(words[j : j + n]) for j in range(len(words) - n + 1)}
        assert (str(i) in found) == bool(mine & runs)


def test_the_line_names_calibration_and_sample() -> None:
    samples = [sample(SENTENCE, id="clean" if i else "dirty") for i in range(1)]
    with pytest.raises(UserError, match=r"the sensitivity has read 1 of .* 100% of the runs of 13 words in dirty"):
        require_uncontaminated([SENTENCE], samples, "the sensitivity")
    assert contamination(["other words"], samples, "the sensitivity") is None


def texts_of(model: str) -> set[str]:
    """All that the kinds of calibration read by default for a model."""
    target = Target(Calibration(), method("ripple_2d_head"), spec(model))
    found: set[str] = set()
    for name in kinds():
        for value in kind(name).texts(target).values():
            found |= {value} if isinstance(value, str) else set(value) if isinstance(value, list) else set()
    return found


@pytest.mark.parametrize("model", ["smollm2_135m", "recall_moe"])
def test_the_calibrations_that_ship_have_read_no_benchmark(model: str) -> None:
    read = texts_of(model)
    assert any(len(re.findall(r"\w+", text)) > 1000 for text in read), "there is something to compare"
    for name in names():
        bench = benchmark(name, **({"limit": 2} if benchmark(name).type == "ruler" else {}))
        try:
            samples = bench.samples()
        except Blocked:
            continue  # its data are not here
        assert shared(read, samples) == {}, name
        longest = max((s.context for s in samples), key=len)
        if len(re.findall(r"\w+", longest)) >= WORDS:
            assert shared([*read, longest], samples), f"{name}: a calibration on its own text is found"
