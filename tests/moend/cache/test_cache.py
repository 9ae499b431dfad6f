"""The compressed cache against plain models: exactness, masks, positions, bytes, schedules."""

from __future__ import annotations

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
    cache_argument,
    prefill,
    select,
)
from moend.cache.decode.eviction import DecodingLayer
from moend.errors import UserError
from moend.hf.attention import AttentionRule, _fused, accumulated_attention, causal, causal_and_accumulated
from moend.layer_bytes import Storage, layer_bytes
from tests.moend.cache.lottery import ALL, best, fork, masked_reference, step
from tests.tiny import ARCHITECTURES, tiny


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
