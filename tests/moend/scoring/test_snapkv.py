"""SnapKV against its formula, written out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moend.scoring import LayerView, scorer
from tests.moend.scoring.views import asked, view


def naive(v: LayerView, window: int, pool: str, kernel: int) -> Tensor:
    """Explicit loops; the window is given as inf."""
    assert v.queries is not None
    heads, n, _ = v.keys.shape
    group, rows = v.queries.shape[0] // heads, asked(v, window)
    out = torch.full((heads, n), math.inf)
    old = [c for c in range(n) if v.positions[c] < v.now - window]
    for h in range(heads):
        mean = torch.zeros(n)
        for g in range(group):
            for at in rows:
                seen = [c for c in range(n) if v.positions[c] <= at]
                query = v.queries[h * group + g, at - v.now]
                logits = torch.stack([query @ v.keys[h, c] * v.scaling for c in seen])
                mean[seen] += logits.softmax(0) / (len(rows) * group)
        for c in old:
            near = [float(mean[x]) if x in old else 0.0 for x in range(c - kernel // 2, c + kernel // 2 + 1)]
            out[h, c] = sum(near) / kernel if pool == "avg" else max(near)
    return out


@pytest.mark.req(20)
@pytest.mark.parametrize("pool", ["avg", "max"])
@pytest.mark.parametrize(("window", "kernel"), [(4, 5), (3, 7), (4, 1), (30, 5)])
def test_formula(pool: str, window: int, kernel: int) -> None:
    v = view(23, window=window)
    got = scorer("snapkv", window=window, pool=pool, kernel=kernel)(v)
    assert got.shape == (2, 23) and got.dtype == torch.float32
    want = naive(v, window, pool, kernel)
    inside = want == math.inf
    assert (got[inside] > 1).all() and (got[~inside] <= 1).all()
    torch.testing.assert_close(got.masked_fill(inside, math.inf), want, atol=1e-6, rtol=1e-5)


@pytest.mark.req(20)
def test_by_hand() -> None:
    """One head, window 1: logits 0, ln 2, 0, ln 4, 0 give attention 1/9 2/9 1/9 4/9 1/9; the last is the window."""
    keys = torch.tensor([0.0, math.log(2), 0.0, math.log(4), 0.0])[None, :, None]
    v = LayerView(0, keys, keys, torch.arange(5), 5, queries=torch.ones(1, 1, 1))
    avg = scorer("snapkv", window=1, kernel=3)(v)[0]
    assert torch.allclose(avg[:4], torch.tensor([3.0, 4.0, 7.0, 5.0]) / 27)
    most = scorer("snapkv", window=1, kernel=3, pool="max")(v)[0]
    assert torch.allclose(most[:4], torch.tensor([2.0, 2.0, 4.0, 4.0]) / 9)
    assert avg[4] > 1 and most[4] > 1


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 99), pool=st.sampled_from(["avg", "max"]), n=st.integers(5, 20))
def test_invariants(seed: int, pool: str, n: int) -> None:
    snap = scorer("snapkv", window=4, pool=pool)
    v = view(n, seed=seed)
    assert v.queries is not None
    keys, queries = v.keys.clone(), v.queries.clone()
    got = snap(v)
    assert torch.equal(snap(v), got) and torch.equal(v.keys, keys) and torch.equal(v.queries, queries)
    # The window always stays: any budget of at least its size takes all of it, newest first below that.
    order = got[1].argsort(descending=True)
    assert order[:4].tolist() == [n - 1, n - 2, n - 3, n - 4]
    # More queries than the window asks for change nothing.
    more = replace(v, queries=torch.cat((torch.randn_like(v.queries), v.queries), 1))
    torch.testing.assert_close(snap(more), got)


def test_needs_queries() -> None:
    assert scorer("snapkv", window=16).last_queries == 16
    with pytest.raises(ValueError, match="last queries"):
        scorer("snapkv")(view(queries=None))


@pytest.mark.parametrize("pool", ["avg", "max"])
def test_best_is_the_best_place_that_a_query_head_gives(pool: str) -> None:
    """Each query head ranks by itself; an entry's place is the best of its group, ties by the larger share."""
    v, window, kernel = view(23, window=4), 4, 3
    got = scorer("snapkv", window=window, pool=pool, kernel=kernel, heads="best")(v)
    assert v.queries is not None
    for h in range(2):
        votes = []
        for g in range(3):
            mine = replace(v, keys=v.keys[h : h + 1], queries=v.queries[h * 3 + g : h * 3 + g + 1])
            votes.append(naive(mine, window, pool, kernel)[0, :19])
        places = [sorted(range(19), key=lambda i, s=shares: (-float(s[i]), i)) for shares in votes]
        best = [min(order.index(i) for order in places) for i in range(19)]
        most = [max(float(s[i]) for s in votes) for i in range(19)]
        want = sorted(range(19), key=lambda i: (best[i], -most[i]))
        assert got[h, :19].argsort(descending=True).tolist() == want
        assert (got[h, 19:] > 1).all() and (got[h, :19] <= 1).all()
    assert not scorer("snapkv", heads="best").comparable
    alone = view(23, group=1)  # with one query head it is the same order
    orders = [scorer("snapkv", window=4, heads=how)(alone).argsort(dim=-1) for how in ("mean", "best")]
    assert torch.equal(*orders)
