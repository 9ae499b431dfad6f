"""Windows are disjoint, prefixes have exactly the asked length, gold is what follows."""

from __future__ import annotations

import itertools

import pytest

from moend.benchmarks import benchmark
from moend.benchmarks.text import part
from moend.budget import Arch
from moend.errors import UserError
from tests.moend.benchmarks.conftest import byte_tokenizer

ARCH = Arch(2, 2, 1, 8, 8192)


@pytest.mark.parametrize("bos", [False, True])
def test_prefix_and_gold(bos):
    tokenizer = byte_tokenizer(bos=bos)
    b = benchmark("continuation", limit=3)
    for s in b.samples():
        r = b.render(s, tokenizer, ARCH, chat=True)
        assert (len(r.ids), len(r.gold_ids), r.context_tokens, r.max_new_tokens) == (1024, 128, 1024, 0)
        whole = tokenizer(s.context.lstrip()).input_ids
        assert list(r.ids + r.gold_ids) == whole[:1152]


def test_windows_are_disjoint_parts_of_the_text():
    text = part("test")
    b = benchmark("continuation", limit=75)
    spans = sorted((text.index(s.context), len(s.context)) for s in b.samples())
    assert all(a + n <= c for (a, n), (c, _) in itertools.pairwise(spans))
    assert b.samples()[:20] == benchmark("continuation").samples()
    # the first few are spread over the text, not bunched at its start
    assert max(s.meta["slot"] for s in b.samples()[:5]) > 40


def test_longer_windows_are_fewer():
    assert benchmark("continuation", length=7000).expected() == {"continuation": 13}
    with pytest.raises(UserError, match=r"14 samples of benchmark.length=7000 asked for; .* holds 13"):
        benchmark("continuation", length=7000, limit=14).samples()
    with pytest.raises(UserError, match="holds 0"):
        benchmark("continuation", length=10**6).samples()


@pytest.mark.req(11)
def test_lengths_that_cannot_fit():
    b = benchmark("continuation", length=8100)
    with pytest.raises(UserError, match="positions"):
        b.check(ARCH)


def test_user_text(tmp_path):
    file = tmp_path / "t.txt"
    file.write_text("\n".join(f"line {i}" for i in range(9000)))
    b = benchmark("continuation", text_file=str(file), limit=2)
    assert all(s.context in file.read_text() for s in b.samples())


def test_it_is_not_scored_from_text():
    b = benchmark("continuation", limit=1)
    assert (b.kind, b.higher_is_better, b.metric("continuation")) == ("nll", False, "nll")
    with pytest.raises(TypeError):
        b.score(b.samples()[0], "")
