"""Products of queries with what a bank holds, compiled and by torch, against dequantised entries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moend.cache import compiled
from moend.cache.bank import Bank
from moend.cache.packing import quantise_k, quantise_v

STORES = [8, 4, 2, torch.float32, torch.float16, torch.bfloat16]


def filled(kind, per: str, group: int, x: torch.Tensor, spare: int, names: list[int]) -> tuple[Bank, torch.Tensor]:
    """A bank of entries x (s, m, d) with slots to spare, and what it holds in numbers."""
    bits, like = (kind, torch.zeros(0)) if isinstance(kind, int) else (16, torch.zeros(0, dtype=kind))
    m, dim = x.shape[1:]
    bank = Bank(names, m + spare * group, bits, group, per, like, dim)
    if bits == 16:
        bank.write(0, 0, x.to(kind))
        held = x.to(kind).float()
    else:
        piece = quantise_k(x, bits, group) if per == "channel" else quantise_v(x, bits, group)
        bank.write(0, 0, piece)
        held = piece.dequantise()
    bank.used = m
    return bank, held


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(STORES),
    dims=st.sampled_from([(16, 16), (64, 64), (128, 64), (96, 48), (80, 40), (64, 16)]),
    names=st.sampled_from([[0], [0, 1, 2], [2, 3], [0, 2, 3]]),
    groups=st.integers(1, 4),
    spare=st.integers(0, 2),
    rows=st.sampled_from([1, 3, 5, 33]),
    model=st.sampled_from([torch.float32, torch.bfloat16]),
    threads=st.sampled_from([1, 3]),
)
def test_products_are_those_with_dequantised_entries(kind, dims, names, groups, spare, rows, model, threads):
    """Any bits, widths that cross bit fields, spare slots, strands apart, few and many queries, threads."""
    dim, v_group = dims
    m, strands = groups * 32 - 5, 4
    x = torch.randn(len(names), m + 5, dim)
    queries, probs = torch.randn(strands, rows, dim).to(model), torch.rand(strands, rows, m + 7)
    near = 1e-3 if model == torch.float32 else 0.1 * dim**0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "WORK", 1)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        bank, held = filled(kind, "channel", 32, x, spare, names)
        logits = torch.full((strands, rows, m + 9), 7.0).to(model)
        bank.score(queries, logits)
        for i in range(strands):
            if i in names:
                right = queries[i].float() @ held[names.index(i)].mT
                assert (logits[i, :, : m + 5].float() - right).abs().max() < near
        others = [i for i in range(strands) if i not in names]
        assert (logits[others] == 7).all() and (logits[:, :, m + 5 :] == 7).all()

        bank, held = filled(kind, "token", v_group, x[:, :m], spare, names)
        out = torch.randn(strands, rows, dim).to(model)
        before = out.clone()
        bank.mix(probs, out)
        for i in range(strands):
            right = before[i].float()
            if i in names:
                right = right + probs[i, :, :m] @ held[names.index(i)]
            assert (out[i].float() - right).abs().max() < (near if i in names else 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_become_the_same_numbers(dtype):
    """Zeros, subnormals, the largest and the smallest, both signs: a product with 1 gives the number back."""
    least, most = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    x = torch.tensor([0.0, -0.0, 1.0, -1.5, least, -least / 4, most, -most], dtype=dtype)
    bank = Bank([0], 8, 16, 1, "channel", x, 16)
    bank.write(0, 0, x[None, :, None].expand(1, -1, 16))
    one = torch.zeros(1, 1, 16)
    one[..., 3] = 1
    out = torch.empty(1, 1, 8)
    bank.score(one, out)
    assert torch.equal(out[0, 0], x.float())


@settings(deadline=None, max_examples=60)
@given(
    used=st.integers(0, 70),
    columns=st.integers(1, 40),
    gap=st.integers(0, 9),
    spread=st.sampled_from([0.0, 1.0, 30.0, 300.0]),
    threads=st.sampled_from([1, 2]),
)
def test_softmax_without_what_is_hidden(used, columns, gap, spread, threads):
    """Against torch's, whatever the range of the logits; what is hidden gets exactly nothing."""
    strands, rows, n = 3, 4, used + columns
    logits = torch.randn(strands, rows, n) * spread
    hidden = torch.rand(strands, n + gap + 3) < 0.3
    seen = torch.cat([hidden[:, :used], hidden[:, used + gap : used + gap + columns]], dim=1)
    seen[:, -1] = hidden[:, used + gap + columns - 1] = False
    right = logits.masked_fill(seen[:, None], -torch.inf).softmax(-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "WORK", 1)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        compiled.softmax(logits, hidden.numpy(), used, gap)
    assert (logits - right).abs().max() < 1e-6
    assert (logits[seen[:, None].expand_as(logits)] == 0).all()
