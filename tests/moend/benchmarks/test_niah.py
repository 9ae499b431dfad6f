"""Needles stand where they should, prompts fit their length, golden prompts do not move."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import re
from collections import Counter

import pytest
import yaml

from moend import paths
from moend.benchmarks import benchmark, niah, questions
from moend.benchmarks.contamination import shared
from moend.benchmarks.phrasings import PHRASINGS
from moend.benchmarks.text import bundled, part
from moend.benchmarks.topics import distinct, filler, topics
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
    b = benchmark("niah", phrasing=0, haystack=haystack, keys=keys, length=1500, limit=6)
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
    b = benchmark("niah", phrasing=0, length=1500, limit=5)
    for s in b.samples():
        r = b.render(s, BYTES, ARCH, chat=False)
        units = niah.UNIT.findall(s.context)
        assert "".join(units) == s.context
        text = BYTES.decode(r.ids)
        used = next(i for i, u in enumerate(units) if u.strip() not in text)
        assert r.prompt_tokens + len(units[used]) > 1500 - 2


def test_depths_are_spread_and_true():
    b = benchmark("niah", phrasing=0, length=3000, limit=40)
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
    for phrasing in (0, "mix"):
        few, many = (benchmark("niah", phrasing=phrasing, limit=n).samples() for n in (5, 50))
        assert few == many[:5]
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
    samples = benchmark("niah", phrasing=0, length=200_000, limit=2).samples()
    assert [r.getMessage().count("repeats") for r in caplog.records] == [1]
    assert all(len(s.context) >= 200_000 * 5 and len(set(s.context.split("\n\n"))) > 1000 for s in samples)
    head = part("test")[:500]
    assert any(s.context.count(head) for s in samples)  # the window goes over the end of the text


def test_haystack_file(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("\n".join(f"Line {chr(97 + i % 26)} of mine is here." for i in range(2000)))
    b = benchmark("niah", haystack_file=str(file), limit=2)
    assert "of mine" in BYTES.decode(b.render(b.samples()[0], BYTES, ARCH, chat=False).ids)
    assert b.identity() != benchmark("niah", haystack="text", limit=2).identity()
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
    b = benchmark("niah", phrasing=0, length=700, limit=1)
    r = b.render(b.samples()[0], CHAT, ARCH, chat=True)
    text = CHAT.decode(r.ids)
    assert text.startswith("<|im_start|>user\nAn access code is hidden in the text below. Remember it:")
    assert hashlib.sha256(str(r.ids).encode()).hexdigest()[:16] == "6e8e3c6e75f36913"


@pytest.mark.parametrize("keys", [1, 4])
def test_the_mix_says_every_needle_as_its_wording_does(keys):
    b = benchmark("niah", keys=keys, length=1500, limit=len(PHRASINGS))
    assert b.phrasing == "mix" and b.haystack == "topics"
    for s in b.samples():
        said = PHRASINGS[s.meta.get("phrasing", 0)]
        text = CHAT.decode(b.render(s, CHAT, ARCH, chat=True).ids)
        for word, number, _ in s.meta["needles"]:
            assert text.count(said.needle.format(key=word, number=number).rstrip(".")) == 1
        assert said.question.format(key=s.meta["needles"][0][0]) in text
        assert (said.one if keys == 1 else said.several) in text
        assert sum(p.prefix.format(key=s.meta["needles"][0][0]) == s.answer_prefix for p in PHRASINGS) == 1


def test_the_mix_meets_every_wording_and_every_topic_equally():
    n = len(PHRASINGS)
    assert n >= 8 and len(topics()) == 8
    samples = benchmark("niah", limit=8 * n).samples()
    pairs = Counter((s.meta.get("phrasing", 0), s.id.rsplit("-", 1)[1]) for s in samples)
    assert len(pairs) == 8 * n and set(pairs.values()) == {1}
    assert {s.meta.get("phrasing", 0) for s in samples[:n]} == set(range(n))
    other = benchmark("niah", seed=1, limit=n).samples()
    assert [s.meta.get("phrasing") for s in other] != [s.meta.get("phrasing") for s in samples[:n]]
    assert {s.meta["phrasing"] for s in benchmark("niah", phrasing=3).samples()} == {3}
    grid = benchmark("niah_grid", lengths=[1000], depths=[0, 1], limit=n)
    assert {s.meta.get("phrasing", 0) for s in grid.samples()} == set(range(n))


def test_topics_are_long_enough_and_do_not_repeat_themselves():
    for topic in topics():
        text = filler(topic, 44_000, random.Random(topic))  # 8k tokens
        assert text.isascii() and not re.search(r"[\d\[\]|{}]", text) and len(text) >= 44_000
        sentences = re.split(r"(?<=\.)\s+", text)
        assert len(set(sentences)) == len(sentences) and distinct(topic) > 4 * len(sentences)
    first = {t: {w for p in topics()[t] for w in re.findall(r"[a-z]{7,}", p.lower())} for t in topics()}
    for a in topics():
        for b in topics():
            assert a == b or len(first[a] & first[b]) < 0.2 * len(first[a])


def test_no_calibration_reads_a_wording_or_a_topic():
    """All that calibrations are measured on, in runs of six words."""
    models = [yaml.safe_load(p.read_text()) for p in paths.folder("conf", "model").glob("*.yaml")]
    read = [part("calibration"), *(m.get("calibration_text") or "" for m in models)]
    read += [s.context for s in benchmark("recall", split="calibration").samples()]
    samples = benchmark("niah", keys=2, limit=8 * len(PHRASINGS)).samples()
    said = [
        dataclasses.replace(s, context=" ".join([p.one, p.several, p.needle.format(key="apple", number=1)]))
        for s, p in zip(samples, PHRASINGS, strict=False)
    ]
    assert shared(read, [*samples, *said], 6) == {}
    assert set(shared([samples[3].context], samples, 6)) >= {samples[3].id}
    assert set(shared([f"x {PHRASINGS[5].needle} x", PHRASINGS[5].one], said, 6)) == {said[5].id}
    for fields in ({}, {"phrasing": 0, "haystack": "topics"}):
        with pytest.raises(UserError, match=r"for tests only, .* set benchmark.phrasing=0"):
            benchmark("niah", split="calibration", **fields)


@pytest.mark.parametrize("value", ["mixed", -1, len(PHRASINGS), True, 1.5])
def test_a_wording_that_is_not_there(value):
    with pytest.raises(UserError, match=r"benchmark\.phrasing"):
        benchmark("niah", phrasing=value)


@pytest.mark.parametrize(("tokenizer", "chat"), [(BYTES, False), (CHAT, True)])
@pytest.mark.parametrize("turns", [False, True])
def test_questions_of_one_context_ask_for_its_needles(tokenizer, chat, turns):
    """Three of four needles, one after the other; all prompts of a context hold the same text."""
    fields = {"length": 900, "rows": 8, "questions_per_context": 3, "turns": turns, "max_new_tokens": 16}
    bench = benchmark("niah_multikey", **fields)
    assert [len(c) for c in bench.contexts()] == [3, 3, 2] and bench.expected() == {"niah": 8}
    assert len({s.id for s in bench.samples()}) == 8
    for context in bench.contexts():
        needles = context[0].meta["needles"]
        assert [s.gold[0] for s in context] == [n[1] for n in needles[: len(context)]]
        assert all(n[0] in s.question and s.meta["depth"] == n[2] for s, n in zip(context, needles, strict=False))
        own = [bench.render(s, tokenizer, ARCH, chat=chat) for s in context]
        assert len({r.ids[: r.context_tokens] for r in own}) == 1
        assert max(len(r.ids) for r in own) <= 900
        asked = questions.prompts(own, tokenizer, visible=False, turns=turns)
        assert asked[0] == own[0]
        for prompt, sample in zip(asked[1:], context[1:], strict=True):
            text = tokenizer.decode(list(prompt.ids))
            assert sample.question in text and (sample.context[:40] in text) != turns
    whole = benchmark("niah_multikey", **{**fields, "rows": 9}).samples()
    assert whole[:8] == bench.samples()


def test_questions_need_needles():
    with pytest.raises(UserError, match=r"asks for more needles than benchmark\.keys=1 hides"):
        benchmark("niah", questions_per_context=2)
    with pytest.raises(UserError, match="niah_grid asks one question of each context"):
        benchmark("niah_grid", questions_per_context=2, keys=4)
