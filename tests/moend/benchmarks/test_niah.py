"""Needles stand where they should, prompts fit their length, golden prompts do not move."""

from __future__ import annotations

import hashlib
import re

import pytest

from moend.benchmarks import benchmark, niah
from moend.benchmarks.text import bundled, part
from moend.budget import Arch
from moend.errors import Blocked, UserError
from tests.moend.benchmarks.conftest import CHATML, byte_tokenizer

BYTES = byte_tokenizer(bos=True)
CHAT = byte_tokenizer(bos=False, template=CHATML)
ARCH = Arch(2, 2, 1, 8, 8192)


def test_text_is_the_one_the_numbers_were_made_with():
    text = bundled()
    assert hashlib.sha256(text.encode()).hexdigest().startswith("b484bf02f55d71a1")
    assert text.isascii()
    assert not re.search(r"\d{5}", text)  # nothing that could be taken for a needle
    calibration, test = part("calibration"), part("test")
    assert text.strip() == f"{calibration}\n\n{test}"
    paragraphs = text.strip().split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs)  # no repetition


@pytest.mark.req(11)
@pytest.mark.parametrize("haystack", ["text", "noise"])
@pytest.mark.parametrize("keys", [1, 4])
@pytest.mark.parametrize(("tokenizer", "chat"), [(BYTES, False), (CHAT, True)])
def test_prompts_fit_and_hold_their_needles(haystack, keys, tokenizer, chat):
    b = benchmark("niah", haystack=haystack, keys=keys, length=1500, limit=6)
    for s in b.samples():
        r = b.render(s, tokenizer, ARCH, chat=chat)
        assert 1000 < r.prompt_tokens <= 1500
        assert r.truncated == 0
        text = tokenizer.decode(r.ids)
        context = tokenizer.decode(r.ids[: r.context_tokens])
        for word, number, _ in s.meta["needles"]:
            # the full stop of a needle that comes last may share a token with the question's newline
            assert context.count(f"The access code for {word} is {number}") == 1
            assert text.count(number) == 1
        assert text.endswith(s.answer_prefix)
        assert s.question not in context
        assert s.question in text
        assert tokenizer.decode(r.gold_ids) == " " + s.gold[0]


def test_the_haystack_is_as_long_as_fits():
    """One more sentence would be too much."""
    b = benchmark("niah", length=1500, limit=5)
    for s in b.samples():
        r = b.render(s, BYTES, ARCH, chat=False)
        units = niah.UNIT.findall(s.context)
        assert "".join(units) == s.context
        text = BYTES.decode(r.ids)
        used = next(i for i, u in enumerate(units) if u.strip() not in text)
        assert r.prompt_tokens + len(units[used]) > 1500 - 2


def test_depths_are_spread_and_true():
    b = benchmark("niah", length=3000, limit=40)
    depths = []
    for s in b.samples():
        text = BYTES.decode(b.render(s, BYTES, ARCH, chat=False).ids)
        start, end = text.index("\n\n") + 2, text.rindex("\n\n")
        at = text.index(f"The access code for {s.meta['needles'][0][0]} is {s.gold[0]}")
        depths.append((at - start) / (end - start))
        assert abs(depths[-1] - s.meta["depth"]) < 0.1
    asked = sorted(s.meta["depth"] for s in b.samples())
    assert all(abs(d - (i + 0.5) / 40) < 0.05 for i, d in enumerate(asked))


def test_rows_do_not_depend_on_the_limit():
    assert benchmark("niah", limit=5).samples() == benchmark("niah", limit=50).samples()[:5]
    ids = [s.id for n in ("niah", "niah_multikey") for s in benchmark(n, limit=50).samples()]
    assert len(set(ids)) == 100


@pytest.mark.req(11)
def test_lengths_that_cannot_fit():
    with pytest.raises(UserError, match=r"length=8192 with 16 new tokens needs 8208 positions; the model has 8192"):
        benchmark("niah", length=8192).check(ARCH)
    b = benchmark("niah", length=8000, max_new_tokens=500, limit=1)
    with pytest.raises(UserError, match="positions"):
        b.render(b.samples()[0], BYTES, ARCH, chat=False)
    with pytest.raises(UserError, match="positions"):
        benchmark("niah", length=8000).check(ARCH, max_new_tokens=193)
    b = benchmark("niah", length=150, limit=1)
    with pytest.raises(UserError, match="too short"):
        b.render(b.samples()[0], BYTES, ARCH, chat=False)
    with pytest.raises(UserError, match="length=63 is too short for niah: at least 64"):
        benchmark("niah", length=63)


def test_a_text_that_is_too_short_begins_again_and_says_so(caplog):
    samples = benchmark("niah", length=200_000, limit=2).samples()
    assert [r.getMessage().count("repeats") for r in caplog.records] == [1]
    assert all(len(s.context) >= 200_000 * 5 and len(set(s.context.split("\n\n"))) > 1000 for s in samples)
    head = part("test")[:500]
    assert any(s.context.count(head) for s in samples)  # the window goes over the end of the text


def test_haystack_file(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("\n".join(f"Line {chr(97 + i % 26)} of mine is here." for i in range(2000)))
    b = benchmark("niah", haystack_file=str(file), limit=2)
    assert "of mine" in BYTES.decode(b.render(b.samples()[0], BYTES, ARCH, chat=False).ids)
    assert b.identity() != benchmark("niah", limit=2).identity()
    with pytest.raises(Blocked):
        benchmark("niah", haystack_file=str(tmp_path / "no.txt")).samples()
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UserError, match="UTF-8"):
        benchmark("niah", haystack_file=str(file)).samples()


@pytest.mark.req(10)
def test_score():
    b = benchmark("niah", limit=1)
    (s,) = b.samples()
    gold = s.gold[0]
    assert b.score(s, f" {gold}.") == {"score": 1.0, "answer": gold}
    assert b.score(s, f'"{gold}"')["score"] == 1
    assert b.score(s, f"1111111 {gold}") == {"score": 0.0, "answer": "1111111"}
    assert b.score(s, gold[:-1]) == {"score": 0.0, "answer": None}
    assert b.score(s, f"1111111 </think> {gold}")["score"] == 1


@pytest.mark.req(12)
def test_golden_prompt():
    b = benchmark("niah", length=700, limit=1)
    r = b.render(b.samples()[0], CHAT, ARCH, chat=True)
    text = CHAT.decode(r.ids)
    assert text.startswith("<|im_start|>user\nAn access code is hidden in the text below. Remember it:")
    assert hashlib.sha256(str(r.ids).encode()).hexdigest()[:16] == "6e8e3c6e75f36913"
