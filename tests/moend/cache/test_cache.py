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
    LayerKV,
    LayerSpec,
    Schedule,
    Selector,
    attention_of,
    cache_argument,
    compress,
    prefill,
    select,
)
from moend.cache.decode.eviction import DecodingLayer
from moend.errors import UserError
from moend.hf.attention import AttentionRule, _fused, accumulated_attention, causal, causal_and_accumulated
from moend.layer_bytes import Storage, layer_bytes
from moend.scoring import LayerView
from tests.tiny import ARCHITECTURES, tiny

ALL = LayerSpec(10**6, Storage())


class Lottery:
    """A scorer that ranks by a seeded draw per layer."""

    name, per_head, last_queries, observes, at_decode, statistics = "lottery", True, 0, (), True, None

    def __init__(self, per_head: bool = True):
        self.per_head = per_head

    def __call__(self, view: LayerView) -> torch.Tensor:
        generator = torch.Generator().manual_seed(view.layer)
        heads = view.keys.shape[0] if self.per_head else 1
        big = torch.rand(view.head + heads, 5000, generator=generator)[view.head :]
        return big.gather(1, view.at.expand(heads, -1))


def lottery(layer: int, per_head: bool = True) -> Selector:
    return Selector(Lottery(per_head), layer, n_sink=4, recent=8, scaling=0.25, seed=0)


def fork(prefilled: Any, specs: list[LayerSpec], **kwargs: Any) -> CompressedCache:
    return compress(prefilled, specs, lottery, score_key="lottery", dtype=kwargs.get("dtype", torch.float32))


def step(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    seen = cache.get_seq_length()
    at = torch.arange(seen, seen + ids.shape[1])[None].expand(ids.shape)
    with torch.no_grad(), attention_of(model):
        return model(input_ids=ids, position_ids=at, use_cache=True, **{cache_argument(model): cache}).logits


def masked_reference(model: Any, ids: torch.Tensor, visible: list[torch.Tensor]) -> torch.Tensor:
    """Logits of a plain full-cache model; visible[l] (H, T, T) bool says which keys each query of each head may see."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def naive(module, query, key, value, attention_mask, scaling, **kwargs):
        groups = query.shape[1] // key.shape[1]
        mask = visible[module.layer_idx].repeat_interleave(groups, 0)[None]
        logits = (query @ key.repeat_interleave(groups, 1).mT * scaling).masked_fill(~mask, -torch.inf)
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


def best(scores: torch.Tensor, held: list[int], keep: int) -> list[int]:
    """Of the positions one head holds: up to 4 sinks (at most half), the 8 newest, then the best of its lottery."""
    sinks = min(4, keep // 2)
    guarded = {p for p in held if p < sinks} | set(held[len(held) - min(8, keep - sinks) :])
    rest = sorted((p for p in held if p not in guarded), key=lambda p: -float(scores[p]))
    return sorted([*guarded, *rest[: keep - len(guarded)]])


def simulate(spec: LayerSpec, layer: int, cut: int, total: int, per_head: bool) -> torch.Tensor:
    """(2, T, T) bool: which keys each query sees, one token at a time, from the schedule's words alone."""
    s, table = spec.schedule, torch.rand(2 if per_head else 1, 5000, generator=torch.Generator().manual_seed(layer))
    visible = torch.ones(2, total, total).tril().bool()
    for head in range(2):
        scores = table[head if per_head else 0]
        held = list(range(cut)) if spec.tokens >= cut else best(scores, list(range(cut)), spec.tokens)
        for fed, t in enumerate(range(cut, total), 1):
            if s.cap is not None and s.kind == "strict" and len(held) == s.cap:
                held = best(scores, held, s.cap - max(s.reserve, 1))
            held.append(t)
            visible[head, t] = False
            visible[head, t, held] = True
            if s.cap is not None and s.kind == "periodic" and fed % s.beta == 0 and len(held) > s.cap:
                held = best(scores, held, s.cap)
    return visible


@pytest.mark.req(13)
@pytest.mark.req(5)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_evicted_equals_masked_full(name):
    """Layers and heads of unequal length, true positions: logits as of a full cache with the evicted keys masked."""
    model, ids = tiny(name), torch.randint(3, 97, (1, 140))
    cut = 120
    prefilled = prefill(model, ids[:, :cut], chunk=50)
    cache = fork(prefilled, [LayerSpec(n, Storage()) for n in (30, 71, 10**6)])
    visible = []
    for layer in cache.layer_kv:
        seen = torch.ones(2, 140, 140).tril().bool()
        kept = torch.zeros(2, cut).bool().scatter_(1, layer[0].true_positions().long().expand(2, -1), True)
        seen[:, cut:, :cut] &= kept[:, None]
        visible.append(seen)
    ours = torch.cat([step(model, cache, part) for part in ids[:, cut:].split([1, 1, 7, 11], dim=1)], dim=1)
    reference = masked_reference(model, ids, visible)[:, cut:]
    assert cache.entries() == [50, 91, 140]
    assert (ours - reference).abs().max() < 1e-4


@pytest.mark.req(5)
@pytest.mark.req(13)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_ragged_heads_equal_masked_full(name):
    """Every head its own number of entries, beside a row of even heads: a full cache with the others masked."""
    model, ids, cut = tiny(name), torch.randint(3, 97, (1, 100)), 70
    prefilled = prefill(model, ids[:, :cut])
    counts, visible, layers = [[3, 60], [41, 12], [70, 1]], [], []
    for layer, heads in zip(prefilled.layers, counts, strict=True):
        kept = [torch.randperm(cut)[:k].sort().values for k in heads]
        own, rows = Storage(positions="per_head"), []
        for head, at in enumerate(kept):
            sides = (x[0, head : head + 1, at] for x in (layer.keys, layer.values))
            rows.append(LayerKV(*sides, at[None], own, tokens_seen=cut, dtype=torch.float32))
        layers.append([tuple(rows)])
        assert sum(r.bytes for r in rows) == sum(k * (2 * 16 * 4 + 4) for k in heads)
        seen = torch.ones(2, 100, 100).tril().bool()
        for head, index in enumerate(kept):
            seen[head, cut:, :cut] = torch.isin(torch.arange(cut), index)
        visible.append(seen)
    alone = CompressedCache(layers, model.config)
    assert alone.counts() == counts
    cache = CompressedCache.join([fork(prefilled, [LayerSpec(20, Storage(8, 4, 16, 8)), ALL, ALL]), alone])
    parts = [part.expand(2, -1) for part in ids[:, cut:].split([1, 9, 20], dim=1)]
    ours = torch.cat([step(model, cache, part) for part in parts], dim=1)[1]
    assert (ours - masked_reference(model, ids, visible)[0, cut:]).abs().max() < 1e-4
    assert cache.counts(1) == [[k + 30 for k in heads] for heads in counts]
    assert cache.resident_bytes(1) == sum(sum(k + 30 for k in heads) * (2 * 16 * 4 + 4) for heads in counts)


@pytest.mark.req(5)
@pytest.mark.req(13)
@pytest.mark.parametrize("bits", [(16, 16), (8, 8)])
def test_heads_of_their_own_length_and_storage(bits):
    """A whole head without positions, beside one that evicts and is stored otherwise: a full cache, the rest masked."""
    model, ids, cut = tiny(), torch.randint(3, 97, (1, 100)), 70
    prefilled = prefill(model, ids[:, :cut])
    few, whole = Storage(*bits, 8, 4, "per_head"), Storage(16, bits[1], 16, 4)
    counts = [(13, cut), (cut, 40), (22, 5)]
    specs = [
        LayerSpec(40, few, heads=tuple(LayerSpec(n, whole if n == cut else few) for n in heads)) for heads in counts
    ]
    cache, visible = fork(prefilled, specs), []
    for parts, heads, layer in zip(cache.parts(), counts, range(3), strict=True):
        seen = torch.ones(2, 100, 100).tril().bool()
        for h, (row, n) in enumerate(zip(parts, heads, strict=True)):
            own = whole if n == cut else few
            assert (row.n, row.storage, row.positions is None) == (n, own, n == cut)
            table = torch.rand(2, 5000, generator=torch.Generator().manual_seed(layer))
            kept = list(range(cut)) if n == cut else best(table[h], list(range(cut)), n)
            assert row.true_positions().flatten().tolist() == kept
            seen[h, cut:, :cut] = torch.isin(torch.arange(cut), torch.tensor(kept))
        visible.append(seen)
    held = fork(prefilled, specs, dtype=torch.bfloat16).resident_bytes()
    assert held == sum(int(layer_bytes(n, whole if n == cut else few, 1, 16)) for heads in counts for n in heads)
    ours = torch.cat([step(model, cache, part) for part in ids[:, cut:].split([1, 9, 20], dim=1)], dim=1)
    reference = masked_reference(model, ids, visible)[:, cut:]
    assert (ours - reference).abs().max() < (1e-4 if bits == (16, 16) else 0.05 * reference.abs().max())


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


def test_sliding_layers_keep_what_can_still_be_seen():
    """What has left the window is dropped first, sinks included: room for the window gives the stock model's logits."""
    model = tiny("qwen2", sliding_window=24, use_sliding_window=True, max_window_layers=1)
    ids = torch.randint(3, 97, (1, 120))
    with torch.no_grad():
        stock = model(input_ids=ids, use_cache=False).logits
    kinds = model.config.layer_types
    assert set(kinds) == {"full_attention", "sliding_attention"}
    specs = [LayerSpec(30, Storage(), Schedule(40, 10)) if k == "sliding_attention" else ALL for k in kinds]
    cache = fork(prefill(model, ids[:, :70]), specs)
    ours = torch.cat([step(model, cache, ids[:, i : i + 1]) for i in range(70, 120)], dim=1)
    assert max(cache.entries()[i] for i, k in enumerate(kinds) if k == "sliding_attention") <= 40
    assert (ours - stock[:, 70:]).abs().max() < 1e-4


def test_refuses_what_it_does_not_understand():
    query = torch.randn(1, 4, 3, 16)
    from moend.hf.attention import attention

    with pytest.raises(UserError, match="position_bias"):
        attention(torch.nn.Linear(1, 1), query, query, query, None, position_bias=torch.zeros(4))
    with pytest.raises(UserError, match="own attention mask"):
        attention(torch.nn.Linear(1, 1), query, query, query, torch.zeros(1, 1, 3, 3))


@pytest.mark.req(5)
def test_wrong_attention_function_is_refused():
    model, ids = tiny(), torch.randint(3, 97, (1, 20))
    cache = fork(prefill(model, ids), [ALL] * 3)
    with torch.no_grad(), pytest.raises(UserError, match="attn_implementation"):
        model(input_ids=ids[:, :1], **{cache_argument(model): cache})


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("way", ["96 queries", "16 queries", "fused"])
def test_causal_against_dense(padded, window, way, monkeypatch):
    monkeypatch.setattr("moend.hf.attention.BLOCK", 1 if way.startswith("16") else 2**24)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # KV heads at a time: across sequences, and one left over
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 600, 16), torch.randn(2, 2, 700, 16), torch.randn(2, 2, 700, 16)
    padding = torch.ones(2, 700).bool()
    if padded:
        padding[0, :90] = False
    ours = (_fused if way == "fused" else causal)(q, k, v, padding, AttentionRule(0.25, window))
    at, me = torch.arange(700), torch.arange(100, 700)[:, None]
    seen = (at <= me) & (me - at < (window or 10**6))
    mask = seen & padding[:, None, None, :] | (at == me)
    logits = (q @ k.repeat_interleave(2, 1).mT * 0.25).masked_fill(~mask, -torch.inf)
    assert (ours - logits.softmax(-1) @ v.repeat_interleave(2, 1)).abs().max() < 1e-5
    half = causal(q.bfloat16(), k.bfloat16(), v.bfloat16(), padding, AttentionRule(0.25, window))
    assert half.dtype == torch.bfloat16 and (half - ours).abs().max() < 0.05


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


def dense_mass(q: torch.Tensor, k: torch.Tensor, valid: torch.Tensor, scaling: float, window: int) -> torch.Tensor:
    """Attention received (B, H, T) by the whole T x T softmax; q and k of all tokens, valid (B, T)."""
    at, group = torch.arange(k.shape[2]), q.shape[1] // k.shape[1]
    seen = (at <= at[:, None]) & (at[:, None] - at < window) & valid[:, None, None, :]
    logits = (q @ k.repeat_interleave(group, 1).mT * scaling).masked_fill(~seen, -torch.inf)
    shares = logits.softmax(-1).nan_to_num(0.0) * valid[:, None, :, None]  # padding queries see nothing
    return shares.sum(2).unflatten(1, (-1, group)).sum(2)


@pytest.mark.req(20)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize(("block", "threads"), [(1, 3), (2**24, 1)])
def test_attention_mass_against_dense(monkeypatch, padded, window, block, threads):
    monkeypatch.setattr("moend.hf.attention.BLOCK", block)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(0)
    q, k = 3 * torch.randn(2, 6, 150, 16), torch.randn(2, 2, 150, 16)
    valid = torch.ones(2, 150).bool()
    if padded:
        valid[0, :47] = False
    whole = dense_mass(q, k, valid, 0.25, window or 10**6)
    ours = accumulated_attention(q, k, valid if padded else None, AttentionRule(0.25, window))
    assert ours.shape == (2, 2, 150)
    torch.testing.assert_close(ours, whole, atol=1e-4, rtol=1e-4)
    assert whole[1].sum().item() == pytest.approx(6 * 150, rel=1e-4)
    v = torch.randn(2, 2, 150, 16)
    out, accumulated = causal_and_accumulated(q, k, v, valid if padded else None, AttentionRule(0.25, window))
    assert torch.equal(accumulated, ours)
    assert (out - causal(q, k, v, valid if padded else None, AttentionRule(0.25, window))).abs().max() < 1e-5
    late = accumulated_attention(q[:, :, 130:], k, valid if padded else None, AttentionRule(0.25, window))
    early = dense_mass(q[:, :, :130], k[:, :, :130], valid[:, :130], 0.25, window or 10**6)
    late[..., :130] += early
    torch.testing.assert_close(late, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("padded", [False, True])
def test_prefill_observes_mass_whatever_the_chunks(name, padded):
    model, ids = tiny(name), torch.randint(3, 97, (2, 150))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :40] = 0
    whole = prefill(model, ids, mask, last_queries=150, observe={"accumulated"}, chunk=1000)
    parts = prefill(model, ids, mask, observe={"accumulated"}, chunk=37)
    plain = prefill(model, ids, mask)
    assert plain.observed == {} and parts.layers[0].queries is None
    for i, layer in enumerate(whole.layers):
        expected = dense_mass(layer.queries, layer.keys, mask.bool(), 0.25, 10**6)
        torch.testing.assert_close(whole.observed["accumulated"][i], expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(parts.observed["accumulated"][i], expected, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(plain.layers[i].keys, whole.layers[i].keys, atol=1e-4, rtol=1e-4)
        mine = parts.seen(i, 1, ("accumulated",))["accumulated"]
        assert mine.shape == (2, 110 if padded else 150)
    with pytest.raises(ValueError, match="did not observe accumulated"):
        plain.seen(0, 0, ("accumulated",))
    with pytest.raises(ValueError, match="cannot observe gates"):
        prefill(model, ids, observe=("gates",))


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


def entries_after(model: Any, ids: torch.Tensor, new: int) -> list[int]:
    """Entries per layer after a plain call of generate that is given no end token."""
    out = model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None, return_dict_in_generate=True)
    return out[cache_argument(model)].entries()


@pytest.mark.req(4)
@pytest.mark.parametrize("prompt", [1, 2, 60])
def test_caps_hold_however_long_generation_gets(prompt):
    """Without max_new_tokens nothing is known of the length: a method that evicts while decoding keeps its budget."""
    model, ids = tiny(), torch.randint(3, 97, (1, prompt))
    with moend.compress(model, "StreamingLLM", 100):
        assert entries_after(model, ids, 200) == [96] * 3  # 100 tokens less their positions
    with moend.compress(model, "StreamingLLM", 100, max_new_tokens=20):
        assert entries_after(model, ids, 20) == [prompt + 19] * 3


def test_the_inner_of_nested_contexts_holds():
    model, ids = tiny(), torch.randint(3, 97, (1, 60))
    with moend.compress(model, "SnapKV", 40):
        with moend.compress(model, "full", 1):
            assert entries_after(model, ids, 3) == [62] * 3
        assert max(entries_after(model, ids, 3)) < 45
    assert not model._forward_pre_hooks


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
    row = LayerKV(
        keys.gather(1, at), values.gather(1, at), positions, storage, tokens_seen=tokens, dtype=torch.bfloat16
    )
    window_len = min(n, window) if storage.quantised else n
    assert row.bytes == row.nbytes() == layer_bytes(n, storage, heads, dim)
    layer = DecodingLayer([(row,)])
    for q in feeds:
        for taken in layer.feed(torch.randn(1, heads, q, dim), torch.randn(1, heads, q, dim)):
            n, window_len = n + taken, window_len + taken
            assert layer.held[0] == layer_bytes(n, storage, heads, dim, window_len=window_len)
            if storage.quantised:
                window_len -= max(window_len - window, 0) // group * group
        ((row,),) = layer.at_rest()
        assert (row.n, row.window_len) == (n, window_len if storage.quantised else n)
        assert layer.held[0] == row.bytes == row.nbytes() == layer_bytes(n, storage, heads, dim, window_len=window_len)
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
def test_strict_schedule_never_passes_the_cap(feeds, bits):
    """However tokens arrive, a capped row holds at most cap entries and evicts at the same tokens."""
    keys = torch.randn(2, 50, 16)
    storage = Storage(*bits, 32, 32, "per_head")
    start = torch.arange(50).expand(2, 50)
    schedule = Schedule(60, 10, 128)
    layer = DecodingLayer(
        [
            (
                LayerKV(
                    keys,
                    keys,
                    start,
                    storage,
                    tokens_seen=50,
                    dtype=torch.bfloat16,
                    schedule=schedule,
                    choose=lottery(0),
                ),
            )
        ]
    )
    sizes, kept, fed = [], [], 50
    for q in feeds:
        new = torch.randn(1, 2, q, 16)
        for taken in layer.feed(new, new):
            sizes.append(layer.count(0)[0])
            assert sizes[-1] <= 60
            fed += taken
        ((row,),) = layer.at_rest()
        at = row.true_positions()
        assert bool((at[:, 1:] > at[:, :-1]).all())
        assert at.max() == row.tokens_seen - 1 == fed - 1
        kept.append(at)
    assert max(sizes) == 60
    assert row.n == 51 + (sum(feeds) - 11) % 10  # full after 10 tokens, then again every 10
    once = DecodingLayer(
        [
            (
                LayerKV(
                    keys,
                    keys,
                    start,
                    storage,
                    tokens_seen=50,
                    dtype=torch.bfloat16,
                    schedule=schedule,
                    choose=lottery(0),
                ),
            )
        ]
    )
    for _ in once.feed(torch.randn(1, 2, sum(feeds), 16), torch.randn(1, 2, sum(feeds), 16)):
        pass
    assert torch.equal(once.at_rest()[0][0].true_positions(), kept[-1])


def test_periodic_schedule_evicts_every_beta_tokens():
    keys = torch.randn(2, 50, 16)
    row = LayerKV(
        keys,
        keys,
        torch.arange(50).expand(2, 50),
        Storage(16, 16, 32, 32, "per_head"),
        tokens_seen=50,
        dtype=torch.bfloat16,
        schedule=Schedule(40, 0, 16, "periodic"),
        choose=lottery(0),
    )
    layer, sizes = DecodingLayer([(row,)]), []
    for _ in range(40):
        for _ in layer.feed(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16)):
            pass
        sizes.append(layer.count(0)[0])
    assert [i for i, (a, b) in enumerate(pairwise(sizes)) if b < a] == [14, 30]
    assert sizes[15] == sizes[31] == 40


@pytest.mark.req(13)
@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("kind", ["strict", "periodic"])
@pytest.mark.parametrize("feed", [1, 7, 100])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_decode_eviction_equals_masked_full(name, kind, feed, per_head):
    """Evicting while decoding computes as a full cache with a mask per query, layer and head, however tokens come."""
    model, ids, cut = tiny(name), torch.randint(3, 97, (1, 150)), 50
    caps = [(36, 6, 16), (20, 10, 9), (70, 1, 30)]  # layer 2 reaches its cap by growing
    strict = kind == "strict"
    specs = [
        LayerSpec(min(cap - reserve if strict else cap, cut), Storage(), Schedule(cap, reserve, beta, kind))
        for cap, reserve, beta in caps
    ]
    cache = compress(
        prefill(model, ids[:, :cut]), specs, lambda x: lottery(x, per_head), score_key="lottery", dtype=torch.float32
    )
    ours, at = [], cut
    while at < 150:
        n = min(feed, 150 - at)
        ours.append(step(model, cache, ids[:, at : at + n]))
        at += n
        assert not strict or all(n <= cap for n, (cap, _, _) in zip(cache.entries(), caps, strict=True))
    visible = [simulate(spec, layer, cut, 150, per_head) for layer, spec in enumerate(specs)]
    assert not any(v[:, -1].all() for v in visible)
    reference = masked_reference(model, ids, visible)[:, cut:]
    assert (torch.cat(ours, dim=1) - reference).abs().max() < 1e-4


@pytest.mark.req(13)
@pytest.mark.parametrize("bits", [(16, 16), (8, 8)])
@pytest.mark.parametrize("kind", ["strict", "periodic"])
@pytest.mark.parametrize("feed", [1, 7, 100])
def test_heads_of_their_own_size_evict_while_decoding(kind, feed, bits):
    """Each head has its own cap and drops entries when it is full: a full cache with what it dropped masked."""
    model, ids, cut = tiny(), torch.randint(3, 97, (1, 150)), 60
    storage = Storage(*bits, 8, 4, "per_head")

    def head(cap: int) -> LayerSpec:
        schedule = Schedule(cap, min(cap // 2, 9), beta=7, kind=kind)
        return LayerSpec(min(cap - schedule.reserve * (kind == "strict"), cut), storage.evicting(cap), schedule)

    caps = [(40, 12), (70, 33), (8, 9)]
    specs = [LayerSpec(1, storage, heads=tuple(map(head, own))) for own in caps]
    cache = fork(prefill(model, ids[:, :cut]), specs)
    ours = torch.cat([step(model, cache, part) for part in ids[:, cut:].split(feed, dim=1)], dim=1)
    visible = []
    for layer, spec in enumerate(specs):
        each = [simulate(own, layer, cut, 150, True)[h] for h, own in enumerate(spec.heads or ())]
        visible.append(torch.stack(each))
    reference = masked_reference(model, ids, visible)[:, cut:]
    assert (ours - reference).abs().max() < (1e-4 if bits == (16, 16) else 0.05 * reference.abs().max())
    for counts, own in zip(cache.counts(), caps, strict=True):
        assert all(n <= cap + (kind == "periodic") * 7 for n, cap in zip(counts, own, strict=True))


@pytest.mark.parametrize("bits", [(8, 4), (16, 4), (4, 16), (2, 2)])
@pytest.mark.parametrize("feeds", [[100], [3, 40, 57], [33, 1, 1, 65]])
def test_tokens_fed_at_once_equal_tokens_fed_singly(bits, feeds):
    """Packing happens at the same token however many come at once."""
    model, ids = tiny(), torch.randint(3, 97, (1, 160))
    specs = [LayerSpec(40, Storage(*bits, 16, 24)), LayerSpec(60, Storage(*bits, 32, 0)), ALL]
    cache = fork(prefill(model, ids[:, :60]), specs)
    singly = cache.fork()
    ours = [step(model, cache, part) for part in ids[:, 60:].split(feeds, dim=1)]
    theirs, peak = [], 0
    for i in range(60, 160):
        theirs.append(step(model, singly, ids[:, i : i + 1]))
        peak = max(peak, singly.peak_bytes(0)) if i >= 160 - feeds[-1] else 0
    assert (torch.cat(ours, dim=1) - torch.cat(theirs, dim=1)).abs().max() < 1e-3
    assert cache.resident_bytes() == singly.resident_bytes()
    assert cache.peak_bytes(0) == peak
    assert cache.mean_bytes[0] == singly.mean_bytes[0]


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


def test_right_padding_is_refused():
    ids = torch.randint(3, 97, (1, 20))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    with pytest.raises(UserError, match="left padding"):
        prefill(tiny(), ids, mask)


def test_crop_is_refused():
    model, ids = tiny(), torch.randint(3, 97, (1, 20))
    with pytest.raises(UserError, match="cropped"):
        fork(prefill(model, ids), [ALL] * 3).layers[0].crop(-1)


@pytest.mark.parametrize("feeds", [[1] * 40, [7, 1, 12, 20], [40]])
def test_mean_and_peak_bytes_do_not_depend_on_how_tokens_come(feeds):
    """The bytes held after each token, summed: as counted, and by asking the storages after single tokens."""
    torch.manual_seed(0)
    keys = torch.randn(2, 50, 16)
    row = LayerKV(
        keys,
        keys,
        torch.arange(50).expand(2, 50),
        Storage(8, 4, 16, 8, "per_head"),
        tokens_seen=50,
        dtype=torch.bfloat16,
        schedule=Schedule(60, 10, 128),
        choose=lottery(0),
    )
    single, naive = DecodingLayer([(row,)]), []
    for _ in range(40):
        for _ in single.feed(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16)):
            pass
        naive.append(single.at_rest()[0][0].nbytes())
    layer, peak = DecodingLayer([(row,)]), 0
    for q in feeds:
        for _ in layer.feed(torch.randn(1, 2, q, 16), torch.randn(1, 2, q, 16)):
            pass
        peak = max(peak, int(layer.trace.max()))
    assert layer.clock == single.clock == 40
    assert layer.area[0] == single.area[0] == sum(naive)
    assert peak == max(naive)
