"""Long outputs: the gold answer follows from the context, the beginning is given, the score is the right prefix."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moend.benchmarks import benchmark
from moend.benchmarks.long_output import END, NEW, OLD, ROUNDS, TASKS
from moend.budget import Arch
from moend.errors import UserError
from tests.moend.benchmarks.conftest import CHATML, byte_tokenizer

PLAIN = byte_tokenizer(bos=True)
CHAT = byte_tokenizer(bos=False, template=CHATML)
ARCH = Arch(2, 2, 1, 8, 20_000)
ALL = list(TASKS)


def made(task: str, **fields: Any) -> Any:
    return benchmark("long_output", tasks=[task], **{"words": 50, "limit": 4, **fields})


def answer(sample: Any) -> list[str]:
    """The whole answer: its given beginning and the gold rest."""
    return f"{sample.answer_prefix} {sample.gold[0]}".split()


def test_recite_repeats_the_list():
    for s in made("recite", period=7).samples():
        names, words = s.context.split(", "), [w.rstrip(",") for w in answer(s)]
        assert len(names) == 7 * ROUNDS and len(set(names)) == 7
        assert all(name == names[i % 7] for i, name in enumerate(names))
        assert words == [names[i % 7] for i in range(54)]


def test_count_goes_on_by_one():
    for s in made("count", words=500).samples():
        numbers = [int(n) for n in s.context.split(", ")] + [int(n.rstrip(",")) for n in answer(s)]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_transform_numbers_every_line():
    for s in made("transform").samples():
        lines = s.context.split("\n")
        assert (s.answer_prefix + s.gold[0]).split("\n") == [f"{i}. {w}" for i, w in enumerate(lines, 1)]
        assert len(s.gold[0].split()) == 50


def test_edit_changes_one_word_and_no_other():
    changed = 0
    for s in made("edit", words=300).samples():
        text, copied = s.context.split(), answer(s)
        assert len(text) == len(copied) == 304 and OLD not in copied
        for a, b in zip(text, copied, strict=True):
            assert b == (NEW if a == OLD else a)
            changed += a == OLD
    assert changed > 20


@pytest.mark.parametrize("task", ALL)
@pytest.mark.parametrize(("tokenizer", "chat"), [(PLAIN, False), (CHAT, True)])
def test_the_prompt_ends_in_the_beginning_and_the_limit_is_the_answers_length(task, tokenizer, chat):
    b = made(task, words=20, chat_template="all" if chat else "none", max_new_tokens=2000)
    for s in b.samples():
        r = b.render(s, tokenizer, ARCH, chat=chat)
        assert tokenizer.decode(r.ids).endswith(s.answer_prefix)
        assert tokenizer.decode(r.gold_ids).strip() == s.gold[0].strip()
        assert r.max_new_tokens == len(r.gold_ids) + END
        assert b.score(s, tokenizer.decode(r.gold_ids)) == {"score": 1.0, "answer": " ".join(s.gold[0].split())}
        assert b.render(s, tokenizer, ARCH, chat=chat, max_new_tokens=9).max_new_tokens == 9


def test_the_score_by_hand():
    b = made("count", words=10)
    s = next(iter(b.samples()))
    words = s.gold[0].split()
    assert len(words) == 10
    assert b.score(s, " ".join(words[:4]))["score"] == 0.4  # it stopped
    assert b.score(s, " ".join([*words[:4], "0,", *words[5:]]))["score"] == 0.4  # what follows an error does not count
    assert b.score(s, "\n".join(words) + " and on")["score"] == 1  # what follows the answer does not count
    assert b.score(s, f"so: {s.gold[0]}") == {"score": 0.0, "answer": None}
    assert b.score(s, "") == {"score": 0.0, "answer": None}


@given(st.lists(st.integers(0, 9), min_size=8, max_size=8), st.text())
def test_the_score_is_the_longest_common_prefix(wrong, tail):
    s = SAMPLE
    gold = s.gold[0].split()
    said = [w if ok else "x" for w, ok in zip(gold, wrong, strict=True)]
    naive = 0
    while naive < 8 and wrong[naive]:
        naive += 1
    assert BENCH.score(s, " ".join(said))["score"] == naive / 8
    assert 0 <= BENCH.score(s, tail)["score"] <= 1


BENCH = made("recite", words=8, limit=1)
SAMPLE = BENCH.samples()[0]


def test_samples_depend_on_their_own_seed_only():
    a, b = (benchmark("long_output", tasks=ALL, words=40, limit=n) for n in (2, 5))
    assert [s for s in b.samples() if re.search(r"-[01]$", s.id)] == a.samples()
    others = [{"seed": 1}, {"split": "calibration"}, {"period": 9}, {"words": 41}]
    prints = {benchmark("long_output", **{"words": 40, "limit": 2, **o}).fingerprint() for o in ({}, *others)}
    assert len(prints) == 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"words": 7}, r"benchmark\.words=7 must be a whole number of at least 8"),
        ({"period": 3}, r"benchmark\.period=3 must be a whole number of at least 4"),
        ({"period": 500}, r"benchmark\.period=500 is more than the \d+ words"),
        ({"length": 512}, r"benchmark\.length=512: long_output is sized by benchmark\.words"),
    ],
)
def test_sizes_that_cannot_be_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        benchmark("long_output", **fields)


def test_a_prompt_that_does_not_fit_is_refused():
    b = made("edit", words=200)
    with pytest.raises(UserError, match=r"does not fit the model's 1500 positions: lower benchmark\.words"):
        b.render(b.samples()[0], PLAIN, Arch(2, 2, 1, 8, 1500), chat=False)
