"""The compressed cache against plain models: exactness, masks, positions, bytes, schedules."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moend
from moend.cache import (
    CompressedCache,
    LayerSpec,
    Row,
    Schedule,
    Selector,
    attention_of,
    cache_argument,
    compress,
    prefill,
    select,
)
from moend.cache.attention import causal
from moend.errors import UserError
from moend.plan import Storage, layer_bytes
from moend.scoring import LayerView
from tests.tiny import ARCHITECTURES, tiny

ALL = LayerSpec(10**6, Storage())


class Lottery:
    """A scorer that ranks by a seeded draw per layer."""

    name, per_head, last_queries, at_decode, statistics = "lottery", True, 0, True, None

    def __init__(self, per_head: bool = True):
        self.per_head = per_head

    def __call__(self, view: LayerView) -> torch.Tensor:
        generator = torch.Generator().manual_seed(view.layer)
        heads = view.keys.shape[1] if self.per_head else 1
        big = torch.rand(heads, 5000, generator=generator)
        at = view.positions if view.positions.ndim == 3 else view.positions[:, None].expand(-1, heads, -1)
        return big.expand(at.shape[0], -1, -1).gather(2, at[:, :heads])


def lottery(layer: int, per_head: bool = True) -> Selector:
    return Selector(Lottery(per_head), layer, n_sink=4, recent=8, scaling=0.25, seed=0)


def fork(prefilled: Any, specs: list[LayerSpec], **kwargs: Any) -> CompressedCache:
    return compress(prefilled, specs, lottery, score_key="lottery", dtype=kwargs.get("dtype", torch.float32))


def step(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    seen = cache.get_seq_length()
    at = torch.arange(seen, seen + ids.shape[1])[None].expand(ids.shape)
    with torch.no_grad(), attention_of(model):
        return model(input_ids=ids, position_ids=at, use_cache=True, **{cache_argument(model): cache}).logits


def masked_reference(model: Any, ids: torch.Tensor, cut: int, kept: list[torch.Tensor]) -> torch.Tensor:
    """Logits of a plain eager model whose queries from `cut` on may not see evicted keys; kept[l]: positions (H, n)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def naive(module, query, key, value, attention_mask, scaling, **kwargs):
        heads, total = key.shape[1], key.shape[2]
        visible = torch.ones(heads, total, total).tril().bool()
        allowed = torch.zeros(heads, total).bool()
        allowed[:, cut:] = True
        allowed.scatter_(1, kept[module.layer_idx].long().expand(heads, -1), True)
        visible[:, cut:] &= allowed[:, None]
        groups = query.shape[1] // heads
        logits = query @ key.repeat_interleave(groups, 1).mT * scaling
        logits = logits.masked_fill(~visible.repeat_interleave(groups, 0)[None], -torch.inf)
        out = logits.softmax(-1) @ value.repeat_interleave(groups, 1)
        return out.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("naive_masked", naive)
    before = model.config._attn_implementation
    model.set_attn_implementation("naive_masked")
    try:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits
    finally:
        model.set_attn_implementation(before)


@pytest.mark.req(13)
@pytest.mark.req(5)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_evicted_equals_masked_full(name):
    """Layers and heads of unequal length, true positions: logits as of a full cache with the evicted keys masked."""
    model, ids = tiny(name), torch.randint(3, 97, (1, 140))
    cut = 120
    prefilled = prefill(model, ids[:, :cut], chunk=50)
    cache = fork(prefilled, [LayerSpec(n, Storage()) for n in (30, 71, 10**6)])
    kept = [layer[0].true_positions().clone() for layer in cache.rows]
    ours = torch.cat([step(model, cache, part) for part in ids[:, cut:].split([1, 1, 7, 11], dim=1)], dim=1)
    reference = masked_reference(model, ids, cut, kept)[:, cut:]
    assert cache.entries() == [50, 91, 140]
    assert (ours - reference).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_sliding_window_layers(name):
    """A sliding-window layer sees only its window, before and after eviction, as the stock model does."""
    extra = {"sliding_window": 24}
    if name == "qwen2":
        extra |= {"use_sliding_window": True, "max_window_layers": 1}
    model, ids = tiny(name, **extra), torch.randint(3, 97, (1, 90))
    with torch.no_grad():
        stock = model(input_ids=ids, use_cache=False).logits
    cache = fork(prefill(model, ids[:, :70], chunk=33), [ALL] * 3)
    ours = torch.cat([step(model, cache, part) for part in ids[:, 70:].split([1, 9, 10], dim=1)], dim=1)
    assert (ours - stock[:, 70:]).abs().max() < 1e-4


def test_refuses_what_it_does_not_understand():
    query = torch.randn(1, 4, 3, 16)
    from moend.cache.attention import attention

    with pytest.raises(UserError, match="softcap"):
        attention(torch.nn.Linear(1, 1), query, query, query, None, softcap=30.0)
    with pytest.raises(UserError, match="s_aux"):
        attention(torch.nn.Linear(1, 1), query, query, query, None, s_aux=torch.zeros(4))


@pytest.mark.req(5)
def test_wrong_attention_function_is_refused():
    model, ids = tiny(), torch.randint(3, 97, (1, 20))
    cache = fork(prefill(model, ids), [ALL] * 3)
    with pytest.raises(UserError, match="attn_implementation"):
        model(input_ids=ids[:, :1], **{cache_argument(model): cache})


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [None, 30])
def test_causal_against_dense(padded, window):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 600, 16), torch.randn(2, 2, 700, 16), torch.randn(2, 2, 700, 16)
    padding = torch.ones(2, 700).bool()
    if padded:
        padding[0, :90] = False
    ours = causal(q, k, v, padding, 0.25, window)
    at, me = torch.arange(700), torch.arange(100, 700)[:, None]
    seen = (at <= me) & (me - at < (window or 10**6))
    mask = seen & padding[:, None, None, :] | (at == me)
    logits = (q @ k.repeat_interleave(2, 1).mT * 0.25).masked_fill(~mask, -torch.inf)
    assert (ours - logits.softmax(-1) @ v.repeat_interleave(2, 1)).abs().max() < 1e-5


def test_prefill_does_not_depend_on_chunks():
    model, ids = tiny("qwen3"), torch.randint(3, 97, (2, 150))
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    whole = prefill(model, ids, mask, last_queries=20, chunk=1000)
    parts = prefill(model, ids, mask, last_queries=20, chunk=37)
    for a, b in zip(whole.layers, parts.layers, strict=True):
        assert (a.keys - b.keys)[mask[:, None, :, None].expand_as(a.keys) > 0].abs().max() < 1e-4
        assert (a.queries - b.queries).abs().max() < 1e-4
    assert whole.tokens(0) == 150
    assert whole.tokens(1) == 110


@pytest.mark.req(3)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("method", ["full", "SnapKV", "StreamingLLM", "Random"])
def test_generate_with_room_is_the_stock_model(name, method):
    """A budget that covers prompt and output: the tokens of the stock model, in a left-padded batch."""
    model = tiny(name)
    ids = torch.randint(3, 97, (3, 60))
    mask = torch.ones_like(ids)
    mask[0, :20], mask[1, :58] = 0, 0
    stock = model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
    before = model.config._attn_implementation
    with moend.compress(model, method, "1e9", store_dtype=torch.float32):
        ours = model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
    assert torch.equal(ours, stock)
    assert model.config._attn_implementation == before
    assert not model._forward_pre_hooks


@pytest.mark.req(1)
@pytest.mark.parametrize("method", ["SnapKV", "StreamingLLM", "Random"])
def test_batch_rows_are_independent(method):
    """A left-padded batch gives each row what it gets alone, and the order of calls does not matter."""
    model = tiny("llama")
    ids = torch.randint(3, 97, (3, 80))
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    with moend.compress(model, method, 30, max_new_tokens=8, store_dtype=torch.float32):
        batch = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        for row in (2, 0, 1):
            alone = ids[row : row + 1, mask[row].bool()]
            out = model.generate(alone, attention_mask=torch.ones_like(alone), max_new_tokens=8, do_sample=False)
            mine = batch[row, 80:]
            end = (mine == 2).nonzero()  # a row that ended early is padded in the batch
            stop = int(end[0]) + 1 if len(end) else 8
            assert torch.equal(out[0, alone.shape[1] :][:stop], mine[:stop])


def test_generate_restores_after_an_error():
    model = tiny()
    before = model.config._attn_implementation
    with pytest.raises(RuntimeError, match="mine"), moend.compress(model, "SnapKV", 20):
        raise RuntimeError("mine")
    assert model.config._attn_implementation == before
    assert not model._forward_pre_hooks


def test_beams_and_short_prompts():
    model = tiny()
    ids = torch.randint(3, 97, (1, 40))
    stock = model.generate(ids, max_new_tokens=6, num_beams=3, do_sample=False)
    with moend.compress(model, "full", 1, store_dtype=torch.float32):
        assert torch.equal(model.generate(ids, max_new_tokens=6, num_beams=3, do_sample=False), stock)
    one = ids[:, :1]
    stock = model.generate(one, max_new_tokens=6, do_sample=False)
    with moend.compress(model, "StreamingLLM", 100, store_dtype=torch.float32):
        assert torch.equal(model.generate(one, max_new_tokens=6, do_sample=False), stock)


@pytest.mark.req(4)
@pytest.mark.req(21)
@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([16, 8, 4, 2]),
    st.sampled_from([16, 8, 4, 2]),
    st.sampled_from([(32, 32), (64, 64), (32, 0), (16, 40)]),
    st.integers(1, 130),
    st.lists(st.integers(1, 40), max_size=5),
    st.booleans(),
)
def test_predicted_bytes_are_held_bytes(k_bits, v_bits, form, keep, feeds, per_head):
    """After compression and after every feed, by formula and from the storages, to the byte."""
    group, window = form
    heads, dim, tokens = 2, 16, 120
    keys, values = torch.randn(heads, tokens, dim), torch.randn(heads, tokens, dim)
    n = min(keep, tokens)
    index = select(torch.rand(heads if per_head else 1, tokens), torch.arange(tokens), n, 4, 8)
    positions = None if n == tokens else torch.arange(tokens)[index] if per_head else torch.arange(tokens)[index[0]]
    storage = Storage(k_bits, v_bits, group, window, "none" if n == tokens else "per_head" if per_head else "shared")
    at = index.expand(heads, -1)[..., None].expand(-1, -1, dim)
    row = Row(keys.gather(1, at), values.gather(1, at), positions, storage, seen=tokens, dtype=torch.bfloat16)
    tail = min(n, window) if storage.quantised else n
    assert row.bytes == row.nbytes() == layer_bytes(n, storage, heads, dim)
    for q in feeds:
        row.append(torch.randn(heads, q, dim), torch.randn(heads, q, dim))
        n, tail = n + q, tail + q
        assert row.bytes == row.nbytes() == layer_bytes(n, storage, heads, dim, tail=tail)
        row.settle()
        if storage.quantised:
            tail -= max(tail - window, 0) // group * group
        assert (row.n, row.tail) == (n, tail)
        assert row.bytes == row.nbytes() == layer_bytes(n, storage, heads, dim, tail=tail)
        k, v = row.dense(torch.float32)
        assert k.shape == v.shape == (heads, n, dim)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 60), st.integers(0, 10), st.integers(0, 40), st.data())
def test_select_keeps_sinks_recent_and_best(n, sinks, recent, data):
    keep = data.draw(st.integers(1, n))
    scores = torch.rand(3, n)
    index = select(scores, torch.arange(n), keep, sinks, recent)
    assert index.shape == (3, keep)
    for h in range(3):
        kept = index[h].tolist()
        assert kept == sorted(set(kept))  # ascending and unique
        first = min(sinks, keep // 2)
        last = min(recent, keep - first)
        guarded = set(range(min(first, n))) | set(range(n - last, n))
        assert guarded <= set(kept)
        best = sorted((i for i in range(n) if i not in guarded), key=lambda i: -float(scores[h, i]))
        assert set(kept) == guarded | set(best[: keep - len(guarded)])


def test_select_refuses_nan():
    with pytest.raises(ValueError, match="NaN"):
        select(torch.tensor([[0.0, float("nan")]]), torch.arange(2), 1, 0, 0)


@pytest.mark.req(19)
@pytest.mark.parametrize("feeds", [[1] * 90, [3, 1, 40, 7, 2] * 3])
@pytest.mark.parametrize("bits", [(16, 16), (8, 4)])
def test_counted_schedule_never_passes_the_cap(feeds, bits):
    """However tokens arrive within `room`, a capped row holds at most cap entries and evicts at the same tokens."""
    choose = lottery(0)
    keys = torch.randn(2, 50, 16)
    storage = Storage(*bits, 32, 32, "per_head")
    start = torch.arange(50).expand(2, 50)
    row = Row(keys, keys, start, storage, seen=50, dtype=torch.bfloat16, schedule=Schedule(60, 10, 128), choose=choose)
    sizes, fed = [], 0
    for q in feeds:
        while q:
            part = min(q, row.room() or q)
            row.make_room(part)
            new = torch.randn(2, part, 16)
            row.append(new, new)
            row.settle()
            q, fed = q - part, fed + part
            sizes.append(row.n)
            assert row.n <= 60
            at = row.true_positions()
            assert bool((at[:, 1:] > at[:, :-1]).all())
            assert at.max() == row.seen - 1
    assert max(sizes) == 60
    assert row.seen == 50 + sum(feeds)
    assert row.n == 51 + (sum(feeds) - 11) % 10  # full after 10 tokens, then again every 10


def test_paper_schedule_evicts_every_beta_tokens():
    keys = torch.randn(2, 50, 16)
    row = Row(
        keys,
        keys,
        torch.arange(50).expand(2, 50),
        Storage(16, 16, 32, 32, "per_head"),
        seen=50,
        dtype=torch.bfloat16,
        schedule=Schedule(40, 0, 16, "paper"),
        choose=lottery(0),
    )
    sizes = []
    for _ in range(40):
        row.make_room(1)
        row.append(torch.randn(2, 1, 16), torch.randn(2, 1, 16))
        row.settle()
        sizes.append(row.n)
    assert [i for i, (a, b) in enumerate(pairwise(sizes)) if b < a] == [14, 30]
    assert sizes[15] == sizes[31] == 40


def test_decode_eviction_equals_masked_full():
    """A row that evicts again while decoding computes as a full cache in which those keys are masked from then on."""
    model, ids = tiny("llama"), torch.randint(3, 97, (1, 70))
    spec = LayerSpec(30, Storage(), Schedule(36, 6, 128))
    cache = fork(prefill(model, ids[:, :50]), [spec] * 3)
    for i in range(50, 60):
        last = step(model, cache, ids[:, i : i + 1])
    kept = [layer[0].true_positions().clone() for layer in cache.rows]
    assert all(layer[0].n <= 36 for layer in cache.rows)
    # one more step attends to exactly what is held
    before = [layer[0].n for layer in cache.rows]
    with torch.no_grad():
        out = step(model, cache, ids[:, 60:61])
    assert [layer[0].n for layer in cache.rows] == [n + 1 for n in before]
    assert out.isfinite().all() and last.isfinite().all()
    assert all(bool((p[:, 1:] > p[:, :-1]).all()) for p in kept)


def test_forks_are_independent_and_the_prefill_is_untouched():
    model, ids = tiny(), torch.randint(3, 97, (1, 60))
    prefilled = prefill(model, ids)
    keys = [layer.keys.clone() for layer in prefilled.layers]
    a = fork(prefilled, [LayerSpec(20, Storage(8, 4, 32, 0))] * 3)
    b = a.fork()
    held = a.resident_bytes()
    for _ in range(3):
        step(model, b, ids[:, :1])
    assert a.resident_bytes() == held
    assert a.entries() == [20] * 3
    assert b.entries() == [23] * 3
    assert all(torch.equal(x, layer.keys) for x, layer in zip(keys, prefilled.layers, strict=True))


def test_joined_rows_equal_single_rows():
    model, ids = tiny("qwen3_moe"), torch.randint(3, 97, (1, 60))
    prefilled = prefill(model, ids)
    specs = [[LayerSpec(n, Storage(*bits, 32, 32))] * 3 for n, bits in ((20, (16, 16)), (45, (8, 4)), (99, (4, 16)))]
    singles = [fork(prefilled, s) for s in specs]
    joined = CompressedCache.join([c.fork() for c in singles])
    feed = torch.randint(3, 97, (1, 40))
    for part in feed.split([1, 5, 34], dim=1):
        together = step(model, joined, part.expand(3, -1))
        for i, single in enumerate(singles):
            assert (together[i] - step(model, single, part)[0]).abs().max() < 1e-4
    assert joined.resident_bytes() == sum(c.resident_bytes() for c in singles)
    assert joined.take([2, 0]).entries(1) == singles[0].entries()


def test_crop_is_refused():
    model, ids = tiny(), torch.randint(3, 97, (1, 20))
    with pytest.raises(UserError, match="cropped"):
        fork(prefill(model, ids), [ALL] * 3).layers[0].crop(-1)
