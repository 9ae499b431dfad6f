"""R-KV against its formula, with all similarities at once."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from moend.budget import Arch, Budget
from moend.methods.bind import bind
from moend.methods.spec import method
from moend.scoring import LayerView, rkv, scorer
from tests.moend.scoring.decoding import Pass, check
from tests.moend.scoring.views import asked, view
from tests.tiny import tiny

ARCH = Arch(3, 4, 2, 16, 4096)


@pytest.mark.req(20)
def test_by_hand() -> None:
    """Three equal keys and another, window 1: the newest of the equal ones is the least redundant.

    Cosines are 1 among the first three. Each spares the last it resembles: rows 0 and 1 the third token, row 2 the
    second. So column means are 2/4, 1/4, 0, 0 and redundancy is their softmax. The query is at right angles to
    all, so each of the three gets 1/3 of the attention, before and after pooling.
    """
    keys = torch.tensor([[1.0, 0.0, 0.0], [2.0, 0.0, 0.0], [3.0, 0.0, 0.0], [0.0, 1.0, 0.0]])[None]
    query = torch.tensor([0.0, 0.0, 1.0])[None, None]
    v = LayerView(0, keys, keys, torch.arange(4), 4, query)
    got = scorer("rkv", window=1, mix=0.1)(v)[0]
    e = [math.exp(0.5), math.exp(0.25), 1.0, 1.0]
    want = [0.1 / 3 - 0.9 * x / sum(e) for x in e[:3]]
    torch.testing.assert_close(got[:3], torch.tensor(want))
    assert got[3] > 1
    m = method("RKV")
    assert (m.recent, m.beta, m.schedule, m.scorer) == (
        8, 128, "every", {"name": "rkv", "window": 8, "kernel": 7, "mix": 0.1, "threshold": 0.5},
    )  # fmt: skip


def naive(keys: Tensor, queries: Tensor, at: list[int], positions: list[int], window: int, kernel: int) -> Tensor:
    """One head: keys (n, d), scaled queries (G, w, d); scores of the entries before the window."""
    n = len(keys)
    cos = torch.zeros(n, n)
    for i in range(n):
        for j in range(n):
            if i != j:
                cos[i, j] = functional.cosine_similarity(keys[i], keys[j], dim=0)
    for i in range(n):
        alike = [j for j in range(n) if cos[i, j] > 0.5]
        if alike:
            cos[i, alike[-1]] = 0
    redundant = cos.mean(0).softmax(0)
    old = [j for j in range(n) if positions[j] < max(at) + 1 - window]
    if not old:
        return torch.zeros(0)
    strongest = (queries @ keys[old].T).amax(0)  # (w, old)
    mean = strongest.softmax(-1).mean(0)
    half = kernel // 2
    pooled = torch.stack([mean[max(j - half, 0) : j + half + 1].max() for j in range(len(old))])
    return 0.1 * pooled - 0.9 * redundant[: len(old)]


@pytest.mark.req(20)
@settings(deadline=None, max_examples=15)
@given(st.integers(2, 14), st.integers(0, 99), st.integers(1, 4), st.sampled_from([1, 5]))
def test_formula(n: int, seed: int, window: int, kernel: int) -> None:
    v = view(n, seed=seed, window=window, r=1, still=1)  # few dimensions: many similar keys
    got = scorer("rkv", window=window, kernel=kernel)(v)
    assert v.queries is not None
    for h in range(2):
        q = v.queries[3 * h : 3 * h + 3] * v.scaling
        want = naive(v.keys[h], q, asked(v, window), list(range(n)), window, kernel)
        torch.testing.assert_close(got[h, : len(want)], want, atol=1e-5, rtol=1e-5)
        assert (got[h, len(want) :] > 1).all()
        assert (got[h, len(want) :].diff() > 0).all()


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    v = view(23, window=8)
    whole = scorer("rkv")(v)
    monkeypatch.setattr(rkv, "BLOCK", 5 * 2 * 23)
    torch.testing.assert_close(scorer("rkv")(v), whole)


def as_the_paper(run: Pass, layer: int, h: int, held: list[int], keep: int) -> list[int]:
    total = run.keys[layer].shape[1]
    at = list(range(max(total - 8, 0), total))
    queries = run.queries[layer][2 * h : 2 * h + 2, at] * 0.25
    score = naive(run.keys[layer][h, held], queries, at, held, 8, 7)
    newest = held[len(score) :][-keep:]
    best = sorted(range(len(score)), key=lambda j: -float(score[j]))[: keep - len(newest)]
    return [*(held[j] for j in best), *newest]


@pytest.mark.req(20)
@pytest.mark.req(13)
@pytest.mark.parametrize("cut", [40, 20])  # compressed after the prompt; or reaching its cap by growing
def test_whole_method(cut: int) -> None:
    """Every 8 tokens here, instead of 128."""
    model = tiny("llama")
    ids = torch.randint(3, 97, (1, cut + 22), generator=torch.Generator().manual_seed(cut))
    bound = bind(
        method("RKV", beta=8), Budget.parse(32), "matched", ARCH, t_ref=None, at="peak", store_dtype=torch.float32
    )
    check(model, bound, ids, cut, [9, 1, 1, 11], as_the_paper)


def test_mistakes() -> None:
    from moend.errors import UserError

    for wrong in ({"window": 0}, {"kernel": 4}, {"mix": 2.0}):
        with pytest.raises(UserError, match="scorer rkv"):
            scorer("rkv", **wrong)
