"""Scissorhands against its paper: counts in a window of queries, half of a full layer dropped at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moend.budget import Arch, Budget
from moend.methods.bind import bind
from moend.methods.spec import method
from moend.scoring import LayerView, scorer
from tests.moend.scoring.decoding import Pass, check
from tests.moend.scoring.views import asked, view
from tests.tiny import tiny

ARCH = Arch(3, 4, 2, 16, 4096)


@pytest.mark.req(20)
def test_by_hand() -> None:
    """Two queries over four tokens, keys 0, ln 5, 0 and ln 2.

    The query at 2 sees three: attention 1/7, 5/7, 1/7 against 1/3: the first and third are below. The one at 3 sees
    four: 1/9, 5/9, 1/9, 2/9 against 1/4: all but the second are below. Not below: 0, 2, 0 and (the query before it
    included) 1 times.
    """
    keys = torch.tensor([1.0, 5.0, 1.0, 2.0]).log()[None, :, None]
    v = LayerView(0, keys, keys, torch.arange(4), 4, torch.ones(1, 2, 1))
    got = scorer("scissorhands", window=2)(v)[0]
    assert got.floor().tolist() == [0, 2, 0, 1]
    assert got[2] > got[0]  # ties go to the newer
    m = method("Scissorhands")
    assert (m.n_sink, m.recent, m.schedule, m.beta) == (0, 10, "full", 0.5)


def counts(attention: torch.Tensor, queries: list[int], keys: list[int]) -> list[int]:
    """attention (G, len(queries), len(keys)): how often each key, by position, is not below the average."""
    out = []
    for j, key in enumerate(keys):
        below = 0
        for i, q in enumerate(queries):
            t = sum(k <= q for k in keys)
            below += sum(key <= q and float(a[i, j]) < 1 / t for a in attention)
        out.append(len(attention) * len(queries) - below)
    return out


@pytest.mark.req(20)
@settings(deadline=None, max_examples=15)
@given(st.integers(3, 14), st.integers(0, 99), st.integers(1, 5))
def test_formula(n: int, seed: int, window: int) -> None:
    v = view(n, seed=seed, window=window)
    got = scorer("scissorhands", window=window)(v)
    assert v.queries is not None
    keys, at = list(range(n)), asked(v, window)
    for h in range(2):
        logits = v.queries[3 * h : 3 * h + 3] @ v.keys[h].T * v.scaling
        logits = logits.masked_fill(torch.tensor(keys) > torch.tensor(at)[:, None], -torch.inf)
        assert got[h].floor().tolist() == counts(logits.softmax(-1), at, keys)


def test_a_query_that_sees_no_entry_finds_none_unimportant() -> None:
    """Only the newest two of six are held: the first two of four queries see nothing."""
    v = view(6, window=4)
    held = replace(v, keys=v.keys[:, 4:], values=v.values[:, 4:], positions=v.positions[4:])
    got = scorer("scissorhands", window=4)(held)
    assert got.isfinite().all()
    assert v.queries is not None
    logits = v.queries.view(2, 3, 4, -1)[:, :, 2:] @ held.keys[:, None].mT * v.scaling
    for h in range(2):
        own = logits[h].masked_fill(torch.tensor([[False, True], [False, False]]), -torch.inf).softmax(-1)
        assert got[h].floor().tolist() == [x + 3 * 2 for x in counts(own, [4, 5], [4, 5])]


def unimportant_go(run: Pass, layer: int, h: int, held: list[int], keep: int) -> list[int]:
    """The paper: the newest stay, then the highest counts over the last 8 queries (8: the tests' window)."""
    total = run.keys[layer].shape[1]
    at = list(range(max(total - 8, 0), total))
    logits = run.queries[layer][2 * h : 2 * h + 2, at] @ run.keys[layer][h, held].T * 0.25
    logits = logits.masked_fill(torch.tensor(held) > torch.tensor(at)[:, None], -torch.inf)
    score = dict(zip(held, counts(logits.softmax(-1), at, held), strict=True))
    newest = held[-min(4, keep) :]
    rest = sorted(held[: -len(newest)], key=lambda p: (-score[p], -p))
    return [*rest[: keep - len(newest)], *newest]


@pytest.mark.req(20)
@pytest.mark.req(13)
@pytest.mark.parametrize("feeds", [[1] * 22, [9, 1, 12]])
@pytest.mark.parametrize("cut", [40, 17])  # compressed after the prompt; or reaching its cap by growing
def test_whole_method(feeds: list[int], cut: int) -> None:
    model = tiny("llama")
    ids = torch.randint(3, 97, (1, cut + 22), generator=torch.Generator().manual_seed(cut))
    made = method("Scissorhands", scorer={"name": "scissorhands", "window": 8}, recent=4)
    bound = bind(made, Budget.parse(30), "matched", ARCH, t_ref=None, at="peak", store_dtype=torch.float32)
    spec = bound.specs(cut, 22)[0]
    assert spec.schedule.reserve == (spec.schedule.cap or 0) // 2  # half of what a layer may hold goes at once
    check(model, bound, ids, cut, feeds, unimportant_go)


def test_mistakes() -> None:
    from moend.errors import UserError

    with pytest.raises(UserError, match="window >= 1"):
        scorer("scissorhands", window=0)
