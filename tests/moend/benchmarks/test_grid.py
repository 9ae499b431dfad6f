"""Needle grids: every length with every depth, true depths, and places in the records."""

from __future__ import annotations

from collections import Counter

import pytest

from moend.benchmarks import benchmark, require_disjoint
from moend.budget import Arch
from moend.errors import UserError
from tests.moend.benchmarks.conftest import CHATML, byte_tokenizer

ARCH = Arch(2, 2, 1, 8, 8192)
CHAT = byte_tokenizer(bos=False, template=CHATML)


def grid(**fields):
    return benchmark(
        "niah_grid", **{"lengths": [1000, 3000], "depths": [0, 0.5, 1], "limit": 2, "phrasing": 0, **fields}
    )


def test_every_length_meets_every_depth():
    b = grid()
    assert b.task_names == ("niah_1000", "niah_3000") and b.length == 3000
    assert b.expected() == {"niah_1000": 6, "niah_3000": 6}
    places = Counter((s.meta["axes"]["length"], s.meta["axes"]["depth"]) for s in b.samples())
    assert places == {(n, d): 2 for n in (1000, 3000) for d in (0, 0.5, 1)}
    assert [s for s in grid(limit=5).samples() if s.task == "niah_1000"][:6] == b.samples()[:6]
    assert len({s.id for s in grid(limit=5).samples()}) == 30
    require_disjoint(grid(split="calibration").samples(), b.samples())


@pytest.mark.parametrize("haystack", ["text", "noise"])
def test_needles_stand_where_the_grid_says(haystack):
    b = grid(haystack=haystack, keys=2)
    for s in b.samples():
        r = b.render(s, CHAT, ARCH, chat=True)
        length, depth = s.meta["axes"]["length"], s.meta["axes"]["depth"]
        assert length - 400 < r.prompt_tokens <= length
        text = CHAT.decode(r.ids)
        context = text[text.index("\n\n") + 2 : text.rindex("\n\n")]
        at = context.index(f"The access code for {s.meta['needles'][0][0]} is {s.gold[0]}")
        end = len(context) - len(f"The access code for {s.meta['needles'][0][0]} is {s.gold[0]}.")
        assert abs(at / end - depth) < 200 / length
        if depth in (0, 1) and all(n[2] not in (0, 1) for n in s.meta["needles"][1:]):
            assert at == depth * end
        assert b.score(s, s.gold[0])["score"] == 1


def test_a_part_of_the_lengths():
    b = grid(tasks=["niah_1000"])
    assert b.reference_length(ARCH) == 1000 and set(b.expected()) == {"niah_1000"}
    grid(tasks=["niah_1000"], lengths=[1000, 100_000]).check(ARCH)
    with pytest.raises(UserError, match="the model has 8192"):
        grid(lengths=[1000, 100_000]).check(ARCH)


def test_mistakes():
    cases = [
        ({"lengths": []}, "lengths"),
        ({"lengths": [1000, 1000]}, "each once"),
        ({"lengths": [30]}, "lengths=30"),
        ({"lengths": ["long"]}, "lengths=long"),
        ({"depths": [0, 1.5]}, "depths=1.5"),
        ({"depths": [True]}, "depths=True"),
        ({"depths": []}, "depths"),
        ({"length": 2000}, "are benchmark.lengths"),
        ({"tasks": ["niah_2000"]}, "Choices: niah_1000, niah_3000"),
    ]
    for fields, message in cases:
        with pytest.raises(UserError, match=message.replace(".", r"\.")):
            grid(**fields)
    assert grid(lengths=2000).lengths == (2000,)
