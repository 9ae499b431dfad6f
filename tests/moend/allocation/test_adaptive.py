"""AdaKV: entries of a layer divided among its heads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moend.allocation.adaptive import adaptive
from moend.budget import Arch, Budget
from moend.cache import CompressedCache, LayerCapture, Prefilled
from moend.methods.bind import bind
from moend.methods.spec import method

ARCH = Arch(3, 8, 4, 16, 4096)


@pytest.mark.req(20)
def test_by_hand() -> None:
    """Two heads of b = 5: 9 of the 10 best are head 0's, so 0.8 x 9 + 0.2 x 5 = 8.2 and 0.8 + 1 = 1.8, so 8 and 2."""
    scores = torch.zeros(2, 12)
    scores[0, :9] = torch.arange(9, 0, -1)
    scores[1, 4] = 0.5
    scores[1, 5:] = -1
    assert adaptive(scores, 5) == [8, 2]
    assert adaptive(scores, 5, floor=1.0) == [5, 5]
    assert adaptive(scores, 5, floor=0.0) == [9, 1]
    assert adaptive(torch.ones(3, 4), 4) == [4, 4, 4]
    # rounding each by itself would give 3 x round(2.6) = 9 of 8 entries and more
    assert sum(adaptive(torch.tensor([[9.0, 8, 7, 6], [5, 4, 3, 2], [1, 1, 0, 0]]), 2)) == 6


@pytest.mark.req(19)
@pytest.mark.req(20)
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_formula(data: st.DataObject) -> None:
    """The sum is exact, no head is empty or above its length, and each is within one of the paper's number."""
    heads, n = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 40))
    keep, floor = data.draw(st.integers(1, n)), data.draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    scores = (torch.rand(heads, n, generator=generator) * data.draw(st.sampled_from([3, 1000]))).round()
    got = adaptive(scores, keep, floor)
    assert sum(got) == heads * keep
    assert all(1 <= k <= n for k in got)
    flat = sorted((-float(scores[h, i]), h, i) for h in range(heads) for i in range(n))[: heads * keep]
    paper = [(1 - floor) * sum(h == head for _, h, _ in flat) + floor * keep for head in range(heads)]
    if all(p >= 1 for p in paper):
        assert all(abs(k - p) < 1 + 1e-6 for k, p in zip(got, paper, strict=True))


def test_mistakes() -> None:
    for keep in (0, 4):
        with pytest.raises(ValueError, match=f"cannot keep {keep} of 3"):
            adaptive(torch.ones(2, 3), keep)
    with pytest.raises(ValueError, match="NaN"):
        adaptive(torch.tensor([[float("nan")]]), 1)


@pytest.mark.req(5)
@pytest.mark.req(19)
@pytest.mark.req(20)
@settings(max_examples=20, deadline=None)
@given(st.integers(40, 200), st.sampled_from(["6%", "20%", "50%", 40, "30KiB"]), st.integers(0, 2**16))
def test_ragged_heads_cost_what_they_hold(tokens: int, budget: object, seed: int) -> None:
    """Bytes are the sum over heads, never the longest head times the heads, and SnapKV's to the byte."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    # queries and keys of head 0 agree, so that its attention is sharp and heads differ
    layers = []
    for _ in range(3):
        keys = draw(1, 4, tokens, 16)
        queries = draw(1, 8, 32, 16)
        queries[:, :2] *= 4
        layers.append(LayerCapture(keys, draw(1, 4, tokens, 16), queries))
    prefilled = Prefilled(layers, torch.arange(tokens)[None], None, None)
    caches = [
        bind(method(n), Budget.parse(budget), "matched", ARCH, t_ref=None).fork(
            prefilled, 8, rotary=None, scaling=[0.25] * 3
        )
        for n in ("AdaKV", "SnapKV")
    ]
    ada, snap = caches
    assert (
        ada.resident_bytes()
        == snap.resident_bytes()
        <= max(Budget.parse(budget).to_bytes(ARCH, tokens), ARCH.full_bytes(tokens))
    )
    if min(min(c) for c in snap.counts()) == tokens:
        return
    assert ada.resident_bytes() <= Budget.parse(budget).to_bytes(ARCH, tokens)
    counts = ada.counts()
    assert [sum(c) for c in counts] == [sum(c) for c in snap.counts()]
    assert ada.resident_bytes() == sum(k * (2 * 2 * 16 + 4) for c in counts for k in c)
    for parts, capture in zip(ada.parts(), layers, strict=True):
        for h, row in enumerate(parts):
            at = row.true_positions()[0].long()
            assert (at[1:] > at[:-1]).all()
            assert set(range(tokens - min(32, row.n), tokens)) <= set(at.tolist())  # the window
            assert torch.equal(row.k_window[0], capture.keys[0, h, at].to(row.dtype))
    if any(max(c) > min(c) for c in counts):
        longest = sum(max(c) * len(c) * (2 * 2 * 16 + 4) for c in counts)
        assert ada.resident_bytes() < longest
    assert isinstance(ada, CompressedCache)
