"""Products of queries with what a bank holds, compiled and by torch, against dequantised entries."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moend.cache import packed_store as bank_module
from moend.cache.packed_store import PackedStore
from moend.cache.packing import quantise_k, quantise_v
from moend.kernels.cpu import compiled

STORES = [8, 4, 2, torch.float32, torch.float16, torch.bfloat16]


def filled(
    kind, per: str, group: int, x: torch.Tensor, spare: int, names: list[int]
) -> tuple[PackedStore, torch.Tensor]:
    """A bank of entries x (s, m, d) with slots to spare, and what it holds in numbers."""
    bits, like = (kind, torch.zeros(0)) if isinstance(kind, int) else (16, torch.zeros(0, dtype=kind))
    m, dim = x.shape[1:]
    bank = PackedStore(names, m + spare * group, bits, group, per, like, dim)
    if bits == 16:
        bank.write(0, 0, x.to(kind))
        held = x.to(kind).float()
    else:
        piece = quantise_k(x, bits, group) if per == "channel" else quantise_v(x, bits, group)
        bank.write(0, 0, piece)
        held = piece.dequantise()
    bank.fill(torch.full((len(names),), m))
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
    """Zeros, subnormals, the largest and the smallest, infinities, both signs, NaN: one a slot, times one."""
    least, most = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    x = torch.tensor(
        [0.0, -0.0, 1.0, -1.5, least, -least / 4, most, -most, torch.inf, -torch.inf, torch.nan], dtype=dtype
    )
    for dim in (1, 16):
        bank = PackedStore([0], len(x), 16, 1, "channel", x, dim)
        bank.write(0, 0, torch.cat([x[:, None], x.new_zeros(len(x), dim - 1)], dim=1)[None])
        out, one = torch.empty(1, 1, len(x)), torch.zeros(1, 1, dim)
        one[..., 0] = 1
        bank.score(one, out)
        assert torch.equal(out[0, 0].nan_to_num(1e9), x.float().nan_to_num(1e9))
        assert out[0, 0, -1].isnan()


@settings(deadline=None, max_examples=30)
@given(
    kind=st.sampled_from(STORES),
    m=st.integers(1, 150),
    rows=st.integers(1, 9),
    gap=st.integers(0, 9),
    cut=st.integers(0, 40),
)
def test_a_strand_is_computed_alike_in_any_company(kind, m, rows, gap, cut):
    """Bit for bit: alone or beside longer ones, wherever its columns lie, with fewer of its queries."""
    x, query = torch.randn(3, m + cut, 32), torch.randn(3, rows, 32)
    lengths = torch.tensor([m + cut, m, m])
    for verb, per in (("score", "channel"), ("mix", "token")):
        bank, _ = filled(kind, per, 16, x, 2, [0, 1, 2])
        usual = lengths if per == "token" or not isinstance(kind, int) else -(-lengths // 16) * 16
        bank.fill(usual)
        alone = bank.pick([1], [0], -(-(m + 1) // 16) * 16 if per == "channel" else m)
        alone.fill(usual[1:2])
        n = int(usual.max())
        if verb == "score":
            together, one = torch.zeros(3, rows, n + gap), torch.zeros(1, 1, n)
            bank.score(query, together)
            alone.score(query[1:2, rows - 1 :].contiguous(), one)
            assert torch.equal(together[1, -1, : usual[1]], one[0, 0, : usual[1]])
        else:
            probs = torch.rand(3, rows, n + gap)
            together, one = torch.zeros(3, rows, 32), torch.zeros(1, 1, 32)
            bank.mix(probs, together)
            alone.mix(probs[1:2, rows - 1 :, :n].contiguous(), one)
            assert torch.equal(together[1, -1], one[0, 0])


def test_what_compiled_code_would_misread_is_refused():
    """Memory that does not lie in a row, other numbers, sizes that do not fit: it would read or write beside them."""
    bank = PackedStore([0], 8, 16, 1, "channel", torch.zeros(0), 16)
    seen, one = torch.zeros(1, 4, dtype=torch.bool), torch.ones(1, 4, 16)
    with pytest.raises(ValueError, match="in a row"):
        bank.score(torch.ones(1, 16, 4).mT, torch.empty(1, 4, 8))
    with pytest.raises(ValueError, match="in a row"):
        compiled.softmax(torch.ones(1, 1, 8)[..., ::2], seen, bank.lengths, 0, 0, False)
    with pytest.raises(ValueError, match="float32"):
        compiled.softmax(torch.ones(1, 1, 4).double(), seen, bank.lengths, 0, 0, False)
    for hidden, lengths, used, gap in ((seen, bank.lengths.int(), 0, 0), (seen, bank.lengths, 0, 1),
                                       (seen[:, :3].clone(), bank.lengths, 0, 0), (seen, bank.lengths, 5, 0),
                                       (seen.byte(), bank.lengths, 0, 0)):  # fmt: skip
        with pytest.raises(ValueError, match="fit together"):
            compiled.softmax(torch.ones(1, 1, 4), hidden, lengths, used, gap, False)
    with pytest.raises(ValueError, match="fit together"):
        bank.score(one, torch.empty(1, 4, 7))
    with pytest.raises(ValueError, match="fit together"):
        PackedStore([3], 8, 16, 1, "channel", torch.zeros(0), 16).score(one, torch.empty(1, 4, 8))
    with pytest.raises(ValueError, match="fit together"):
        bank.fill(torch.tensor([9]))
        bank.score(one, torch.empty(1, 4, 9))
    with pytest.raises(ValueError, match="fit together"):
        compiled.softmax(torch.ones(1, 1, 4), seen, torch.tensor([3]), 2, 0, False)
    with pytest.raises(ValueError, match="fit together"):
        PackedStore([0], 8, 16, 1, "channel", torch.zeros(0), 8).score(one, torch.empty(1, 4, 8))
    with pytest.raises(ValueError, match=r"float64"):
        PackedStore([0], 8, 16, 1, "channel", torch.zeros(0).double(), 16).score(one, torch.empty(1, 4, 8))


def test_small_scales_count_on_processors_that_take_subnormals_for_zero():
    """Scales of small entries are subnormal in float16, never in float32."""
    x, query = torch.randn(1, 64, 32) * 1e-3, torch.randn(1, 2, 32)
    piece = quantise_k(x, 8, 32)
    assert 0 < piece.step.max() < torch.finfo(torch.float16).smallest_normal
    bank, held = filled(8, "channel", 32, x, 0, [0])
    out = torch.empty(1, 2, 64)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not")
    try:
        bank.score(query, out)
    finally:
        torch.set_flush_denormal(False)
    assert (out - query @ held.mT).abs().max() < 1e-6 * (query.abs() @ held.mT.abs()).max() + 1e-9


def test_whoever_wants_gradients_gets_them():
    """Compiled code has none: torch's operations are taken."""
    bank = PackedStore([0], 8, 16, 1, "channel", torch.zeros(0), 16)
    bank.write(0, 0, torch.randn(1, 8, 16))
    query, out = torch.randn(1, 1, 16, requires_grad=True), torch.zeros(1, 1, 8)
    bank.score(query, out)
    out.sum().backward()
    assert (query.grad - bank.x.sum(1, keepdim=True)).abs().max() < 1e-4


def test_an_interrupted_caller_may_let_go_of_its_memory(monkeypatch):
    """Threads at work keep what they write to."""
    given = []

    class Interrupted:
        def submit(self, *args):
            given.append(args)
            return self

        def result(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(compiled, "WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(compiled, "_pool", Interrupted)
    logits, lengths = torch.zeros(2, 1, 4), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(KeyboardInterrupt):
        compiled.softmax(logits, torch.zeros(2, 4, dtype=torch.bool), lengths, 0, 0, False)
    assert len(given) == 2 and all(any(x is logits for x in args[-1]) for args in given)


def test_a_copy_sees_its_own_memory():
    """deepcopy and pickle: what is written to the copy's tensors is what it computes with."""
    bank = PackedStore([0], 8, 16, 1, "channel", torch.zeros(0), 16)
    out, one = torch.empty(1, 1, 8), torch.ones(1, 1, 16)
    bank.score(one, out)
    for twin in (copy.deepcopy(bank), pickle.loads(pickle.dumps(bank))):
        twin.write(0, 3, torch.ones(1, 1, 16))
        twin.score(one, out)
        assert out[0, 0].tolist() == [0, 0, 0, 16, 0, 0, 0, 0]
    bank.score(one, out)
    assert (out == 0).all()


def test_what_grown_banks_leave_behind_goes_back_to_the_system(monkeypatch):
    """Not at each time, which would cost more than it gives, but before it adds up; nor where malloc cannot."""
    calls = []
    monkeypatch.setattr(bank_module, "_trim", lambda: calls.append)
    monkeypatch.setattr(bank_module, "_behind", 0)
    monkeypatch.setattr(bank_module, "BEHIND", 4000)
    bank = PackedStore([0], 64, 16, 1, "channel", torch.zeros(0), 4)  # 1,024 bytes, then 1,152 and 1,296, 1,456
    for slots, so_far in ((65, 0), (73, 0), (82, 0), (92, 1), (104, 1)):
        bank.reserve(slots)
        assert calls == [0] * so_far
    monkeypatch.setattr(bank_module, "_trim", lambda: None)
    bank.reserve(100_000)


def test_nothing_keeps_a_replaced_tensor():
    """Growing lets go of what was there, and a clone that a write makes of the shared one."""
    bank = PackedStore([0], 64, 8, 32, "channel", torch.zeros(0), 16)
    query, out = torch.ones(1, 1, 16), torch.empty(1, 1, 200)
    piece = quantise_k(torch.randn(1, 32, 16), 8, 32)
    bank.write(0, 0, piece)
    bank.score(query, out)
    old = weakref.ref(bank.x)
    bank.reserve(96)
    assert old() is None
    bank.score(query, out)
    twin = bank.pick([0], [0], bank.slots)
    twin.score(query, out)
    twin.write(0, 32, piece)
    old = weakref.ref(bank.x)
    del bank
    assert old() is None


@settings(deadline=None, max_examples=60)
@given(
    used=st.integers(0, 70),
    columns=st.integers(1, 40),
    gap=st.integers(0, 9),
    spread=st.sampled_from([0.0, 1.0, 30.0, 300.0]),
    threads=st.sampled_from([1, 2]),
    clear=st.booleans(),
)
def test_softmax_without_what_is_hidden(used, columns, gap, spread, threads, clear):
    """Against torch's, whatever the range of the logits; what is hidden gets exactly nothing."""
    strands, rows, n = 3, 4, used + columns
    lengths = torch.tensor([used, used // 2, 0])
    logits = torch.randn(strands, rows, n) * spread
    hidden = torch.rand(strands, n + gap + 3) < 0.3
    seen = torch.cat([hidden[:, :used], hidden[:, used + gap : used + gap + columns]], dim=1)
    seen[:, -1] = hidden[:, used + gap + columns - 1] = False
    for strand, length in enumerate(lengths.tolist()):
        seen[strand, length:used] = True
        logits[strand, :, length:used] = torch.nan  # nothing is held there
    right = logits.masked_fill(seen[:, None], -torch.inf).softmax(-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "WORK", 1)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        compiled.softmax(logits, hidden, lengths, used, gap, clear)
    if not clear:  # what nothing is held in is left as it was
        for strand, length in enumerate(lengths.tolist()):
            assert logits[strand, :, length:used].isnan().all()
            logits[strand, :, length:used] = 0
    assert (logits - right).abs().max() < 1e-6
    assert (logits[seen[:, None].expand_as(logits)] == 0).all()
