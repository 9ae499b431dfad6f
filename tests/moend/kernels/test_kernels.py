"""Every path of `moend.kernels` against attention written out in float64, and what compiled code relies on."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moend import kernels
from moend.cache.packing import quantise_k, quantise_v
from moend.kernels import Entries, Held, cpu, reference, torch_ops

KINDS = [8, 4, 2, torch.float32, torch.float16, torch.bfloat16]
OPS = [torch_ops] + ([cpu] if cpu.installed() else [])
compiled = pytest.mark.skipif(not cpu.installed(), reason="the extra cpu is not installed")


def store(kind, side: str, group: int, x: torch.Tensor, spare: int, heads: list[int], moved: bool = False) -> Entries:
    """Entries of x (s, m, d) with slots to spare; moved: K's scales lie in another order than its blocks."""
    s, m, d = x.shape
    lengths = torch.full((s,), m)
    if not isinstance(kind, int):
        stored = torch.cat([x, x.new_zeros(s, spare, d)], dim=1).to(kind)
        return Entries(side, stored, x.new_zeros(0), x.new_zeros(0), 16, 1, heads, lengths)
    piece = quantise_k(x, kind, group) if side == "k" else quantise_v(x, kind, group)
    slots = -(-m // group) * group + spare * group if side == "k" else m + spare
    tensors = []
    for t, size in zip(piece.tensors(), (slots, *[slots // group if side == "k" else slots] * 2), strict=True):
        tensors.append(torch.cat([t, t.new_zeros(s, size - t.shape[1], t.shape[2])], dim=1).contiguous())
    where = None
    if moved and side == "k":
        order = torch.stack([torch.randperm(slots // group) for _ in range(s)])
        tensors[1:] = [torch.zeros_like(t).scatter_(1, order[..., None].expand_as(t), t) for t in tensors[1:]]
        where = order.int()
    return Entries(side, *tensors, kind, piece.group, heads, lengths, scale_of=where)


@st.composite
def layers(draw, kinds=KINDS, offset: float = 0.0):
    """(query, held) of a layer: stores of several kinds on each side, unequal lengths, holes, a newest part."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    dim, v_group = draw(st.sampled_from([(16, 16), (64, 64), (128, 64), (96, 48), (80, 40), (64, 16)]))
    heads, rows = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 5, 7]))
    group, blocks, new = draw(st.sampled_from([16, 32])), draw(st.integers(1, 4)), draw(st.integers(1, 40))
    m, begin, spare = blocks * group, draw(st.integers(0, 5)), draw(st.integers(0, 2))
    lengths = torch.randint(0, blocks + 1, (heads,)) * group
    lengths[0] = m
    sides = []
    for side in ("k", "v"):
        cut = draw(st.integers(1, heads))
        stores = []
        for part in (list(range(cut)), list(range(cut, heads))):
            if part and int(lengths[part].max()):
                x = torch.randn(len(part), int(lengths[part].max()), dim) + (offset if side == "k" else 0)
                kind, size = draw(st.sampled_from(kinds)), group if side == "k" else v_group
                made = store(kind, side, size, x, spare, part, draw(st.booleans()))
                made.lengths.copy_(lengths[part])
                stores.append(made)
        sides.append(stores)
    kind = draw(st.sampled_from([k for k in kinds if not isinstance(k, int)]))
    newest = []
    for side in ("k", "v"):
        x, none = (torch.randn(heads, begin + new + 2, dim) + (offset if side == "k" else 0)).to(kind), torch.zeros(0)
        ends = torch.full((heads,), begin + new)
        newest.append(Entries(side, x, none, none, 16, 1, list(range(heads)), ends, begin, m))
    gap = draw(st.integers(0, 9))
    hidden = torch.rand(heads, m + gap + new + 3) < 0.3
    for head in range(heads):
        hidden[head, lengths[head] : m] = True
    hidden[:, m + gap + new - 1] = False
    return torch.randn(heads, rows, dim) * dim**-0.5, Held(*sides, tuple(newest), hidden, lengths, m, gap)


@settings(deadline=None, max_examples=60)
@given(layer=layers(), threads=st.sampled_from([1, 3]), weights=st.booleans())
@pytest.mark.parametrize("ops", OPS, ids=lambda x: x.__name__.rsplit(".", 1)[-1])
def test_attention_is_what_the_reference_computes(ops, layer, threads, weights):
    """Any bits and group, scales moved, holes, unequal lengths, several stores a side, threads."""
    query, held = layer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "installed", lambda: ops is cpu)
        patch.setattr(cpu, "WORK", 1)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        out, probs = kernels.attention(query, held, weights=weights)
    right, seen = reference.attention(query, held)
    assert (out - right).abs().max() < 1e-3
    if weights:
        assert (probs - seen).abs().max() < 1e-4 and (probs[seen == 0] == 0).all()


@settings(deadline=None, max_examples=20)
@given(layer=layers(offset=100.0))
@pytest.mark.parametrize("ops", OPS, ids=lambda x: x.__name__.rsplit(".", 1)[-1])
def test_keys_far_from_zero_lose_nothing(ops, layer):
    """K channels of mean 100: the offset is a bias in float32, not part of a number that is rounded."""
    query, held = layer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "installed", lambda: ops is cpu)
        out, _ = kernels.attention(query, held)
    assert (out - reference.attention(query, held)[0]).abs().max() < 2e-3


def test_the_caller_may_change_logits():
    """`change` sees queries and logits before what is hidden is masked."""
    x = torch.randn(1, 4, 16)
    none, ends = torch.zeros(0), torch.tensor([4])
    newest = tuple(Entries(s, x.clone(), none, none, 16, 1, [0], ends.clone()) for s in "kv")
    held = Held([], [], newest, torch.zeros(1, 4, dtype=torch.bool), torch.zeros(1, dtype=torch.int64), 0, 0)
    out, _ = kernels.attention(torch.randn(1, 2, 16), held, lambda _, logits: logits[..., 1:].fill_(-torch.inf))
    assert torch.allclose(out, x[:, :1].expand(1, 2, 16))


def test_without_numba_the_torch_path_runs(monkeypatch):
    cpu_device = torch.device("cpu")
    if cpu.installed():
        assert kernels.path(cpu_device, 3) == "cpu"
    assert kernels.path(cpu_device, cpu.ROWS + 1) == "torch"
    monkeypatch.setattr(cpu, "installed", lambda: False)
    assert kernels.path(cpu_device, 3) == "torch"


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_become_the_same_numbers(dtype):
    """Zeros, subnormals, the largest and the smallest, infinities, both signs, NaN: one a slot, times one."""
    least, most = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    x = torch.tensor(
        [0.0, -0.0, 1.0, -1.5, least, -least / 4, most, -most, torch.inf, -torch.inf, torch.nan], dtype=dtype
    )
    for dim in (1, 16):
        entries = store(dtype, "k", 1, torch.cat([x[:, None], x.new_zeros(len(x), dim - 1)], dim=1)[None], 0, [0])
        out, one = torch.empty(1, 1, len(x)), torch.zeros(1, 1, dim)
        one[..., 0] = 1
        cpu.score(one, entries, out)
        assert torch.equal(out[0, 0].nan_to_num(1e9), x.float().nan_to_num(1e9))
        assert out[0, 0, -1].isnan()


@compiled
@settings(deadline=None, max_examples=30)
@given(
    kind=st.sampled_from(KINDS),
    m=st.integers(1, 150),
    rows=st.integers(1, 9),
    gap=st.integers(0, 9),
    cut=st.integers(0, 40),
)
def test_a_kv_head_is_computed_alike_in_any_company(kind, m, rows, gap, cut):
    """Bit for bit: alone or beside longer ones, wherever its columns lie, with fewer of its queries."""
    x, query = torch.randn(3, m + cut, 32), torch.randn(3, rows, 32)
    for side in ("k", "v"):
        entries = store(kind, side, 16, x, 2, [0, 1, 2])
        entries.lengths[1:] = m
        alone = copy.copy(entries)
        alone.x, alone.step, alone.zero = (
            t[1:2].contiguous() if t.numel() else t for t in (entries.x, entries.step, entries.zero)
        )
        alone.heads, alone.lengths, alone.end, alone.memo = [0], torch.tensor([m]), m, {}
        if side == "k":
            together, one = torch.zeros(3, rows, m + cut + gap), torch.zeros(1, 1, m)
            cpu.score(query, entries, together)
            cpu.score(query[1:2, rows - 1 :].contiguous(), alone, one)
            assert torch.equal(together[1, -1, :m], one[0, 0])
        else:
            probs = torch.rand(3, rows, m + cut + gap)
            together, one = torch.zeros(3, rows, 32), torch.zeros(1, 1, 32)
            cpu.mix(probs, entries, together)
            cpu.mix(probs[1:2, rows - 1 :, :m].contiguous(), alone, one)
            assert torch.equal(together[1, -1], one[0, 0])


@compiled
def test_what_compiled_code_would_misread_is_refused():
    """Memory that is not contiguous, other numbers, sizes that do not fit: it would read or write beside them."""
    x, none, eight = torch.zeros(1, 8, 16), torch.zeros(0), torch.tensor([8])
    plain = Entries("k", x, none, none, 16, 1, [0], eight)
    with pytest.raises(ValueError, match="contiguous"):
        cpu.score(torch.ones(1, 16, 4).mT, plain, torch.empty(1, 4, 8))
    with pytest.raises(ValueError, match="float32"):
        cpu.score(torch.ones(1, 4, 16).double(), plain, torch.empty(1, 4, 8))
    with pytest.raises(ValueError, match="do not fit"):
        cpu.score(torch.ones(1, 4, 16), plain, torch.empty(1, 4, 7))
    with pytest.raises(ValueError, match="do not fit"):
        cpu.score(torch.ones(1, 4, 8), plain, torch.empty(1, 4, 8))
    with pytest.raises(ValueError, match="do not fit"):
        cpu.score(torch.ones(1, 4, 16), Entries("k", x, none, none, 16, 1, [3], eight), torch.empty(1, 4, 8))
    wrong = [
        {"x": x.double()}, {"x": x.mT}, {"bits": 8}, {"lengths": torch.tensor([9])}, {"lengths": eight.int()},
        {"x": x.byte(), "bits": 8}, {"heads": [0, 1]},
    ]  # fmt: skip
    usual = {"side": "k", "x": x, "step": none, "zero": none, "bits": 16, "group": 1, "heads": [0], "lengths": eight}
    for change in wrong:
        with pytest.raises(ValueError):
            Entries(**usual | change)
    held = Held([], [], (plain, plain), torch.zeros(1, 7, dtype=torch.bool), torch.zeros(1, dtype=torch.int64), 0, 0)
    with pytest.raises(ValueError, match="do not fit"):
        cpu.softmax(torch.ones(1, 1, 8), held)


@compiled
def test_small_scales_count_on_processors_that_take_subnormals_for_zero():
    """Scales of small entries are subnormal in float16, never in float32."""
    x, query = torch.randn(1, 64, 32) * 1e-3, torch.randn(1, 2, 32)
    entries = store(8, "k", 32, x, 0, [0])
    held = reference.dense(entries, 0).float()
    assert 0 < entries.step.max() < torch.finfo(torch.float16).smallest_normal
    out = torch.empty(1, 2, 64)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not")
    try:
        cpu.score(query, entries, out)
    finally:
        torch.set_flush_denormal(False)
    assert (out - query @ held.mT).abs().max() < 1e-6 * (query.abs() @ held.mT.abs()).max() + 1e-9


@settings(deadline=None, max_examples=60)
@given(
    used=st.integers(0, 70),
    columns=st.integers(1, 40),
    gap=st.integers(0, 9),
    spread=st.sampled_from([0.0, 1.0, 30.0, 300.0]),
    clear=st.booleans(),
)
@compiled
def test_softmax_without_what_is_hidden(used, columns, gap, spread, clear):
    """Against torch's, whatever the range of the logits; what is hidden gets exactly nothing."""
    heads, rows, n = 3, 4, used + columns
    lengths = torch.tensor([used, used // 2, 0])
    logits = torch.randn(heads, rows, n) * spread
    hidden = torch.rand(heads, n + gap + 3) < 0.3
    seen = torch.cat([hidden[:, :used], hidden[:, used + gap : used + gap + columns]], dim=1)
    seen[:, -1] = hidden[:, used + gap + columns - 1] = False
    for head, length in enumerate(lengths.tolist()):
        seen[head, length:used] = True
        logits[head, :, length:used] = torch.nan  # nothing is held there
    right = logits.masked_fill(seen[:, None], -torch.inf).softmax(-1)
    cpu.softmax(logits, Held([], [], (), hidden, lengths, used, gap), clear)
    if not clear:
        for head, length in enumerate(lengths.tolist()):
            assert logits[head, :, length:used].isnan().all()
            logits[head, :, length:used] = 0
    assert (logits - right).abs().max() < 1e-6
    assert (logits[seen[:, None].expand_as(logits)] == 0).all()
