"""Rows side by side against one row after the other, computed naively from what each holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moend.cache.decode.eviction import DecodingLayer
from moend.cache.decode.stores import PADDING, allocation, buckets
from moend.cache.layer_kv import PROMPT_ONLY, LayerKV, Schedule
from moend.hf.attention import AttentionRule
from moend.layer_bytes import Storage

HEADS, GROUP, DIM, SEEN = 2, 3, 16, 200
RULE = AttentionRule(0.3)


def newest(keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, now: int, keep: int, *_: Any) -> Any:
    """A chooser: the newest entries and every third of the others while they last, the same for all heads."""
    n = keys.shape[1]
    old = list(range(0, n, 3))[: keep // 2]
    rest = [i for i in range(n) if i not in old]
    return torch.tensor(sorted(old + rest[len(rest) - (keep - len(old)) :]))[None]


def row(n: int, storage: Storage, schedule: Schedule = PROMPT_ONLY, heads: int = HEADS) -> LayerKV:
    """A row of n random entries at random positions of SEEN."""
    keys, values = torch.randn(2, heads, n, DIM)
    positions = torch.stack([torch.randperm(SEEN)[:n].sort().values for _ in range(heads)])
    return LayerKV(
        keys, values, positions, storage, tokens_seen=SEEN, dtype=torch.float32, schedule=schedule,
        choose=None if schedule is PROMPT_ONLY else newest, accumulated=torch.rand(heads, n) if storage.accumulated
        else None,
        queries=torch.randn(heads, GROUP, storage.queries // GROUP, DIM) if storage.queries else None,
    )  # fmt: skip


def naive(
    rows: tuple[LayerKV, ...], query: torch.Tensor, scaling: float, window: int | None, received: torch.Tensor
) -> torch.Tensor:
    """Attention of the newest q queries (H_q, q, d) over what rows hold, head by head and query by query.

    What each position receives is added to received (H, positions).
    """
    q, out, head = query.shape[1], torch.empty_like(query), 0
    for part in rows:
        keys, values = part.dense(torch.float32)
        at = part.true_positions().expand(part.heads, -1)
        for h in range(part.heads):
            for j in range(q):
                me = part.tokens_seen - q + j
                seen = at[h] <= me
                if window is not None:
                    seen &= me - at[h] < window
                for g in range(GROUP):
                    logits = keys[h, seen] @ query[head * GROUP + g, j] * scaling
                    out[head * GROUP + g, j] = logits.softmax(0) @ values[h, seen]
                    received[head, at[h, seen]] += logits.softmax(0)
            head += 1
    return out


def received(rows: tuple[LayerKV, ...]) -> torch.Tensor:
    """(H, positions): the accumulated attention that rows hold, by position."""
    out, head = torch.zeros(HEADS, 2000), 0
    for part in rows:
        if part.accumulated is not None:
            out[head : head + part.heads].scatter_(1, part.true_positions().long(), part.accumulated)
        head += part.heads
    return out


FORMS = st.builds(
    lambda k, v, form, accumulated, last, channels: Storage(
        k, v, *form, "per_head", accumulated, last * GROUP, channels
    ),
    st.sampled_from([16, 8, 4, 2]),
    st.sampled_from([16, 8, 4, 2]),
    st.sampled_from([(32, 32), (16, 40), (32, 0), (16, 5)]),
    st.booleans(),
    st.sampled_from([0, 0, 1, 5]),
    st.sampled_from([64, 8]),
)


@st.composite
def sequences(draw: Any) -> tuple[LayerKV, ...]:
    """One sequence: a row of all heads that may evict while decoding, or a row per head, each of its own length."""
    storage, lengths = draw(FORMS), st.integers(1, 150)
    if draw(st.booleans()):
        return tuple(row(draw(lengths), storage, heads=1) for _ in range(HEADS))
    n = draw(lengths)
    kind = draw(st.sampled_from(["prompt", "strict", "periodic"]))
    if kind == "prompt":
        return (row(n, storage),)
    return (row(n, storage, Schedule(max(n + 3, 8), max(n // 4, 1), 7, kind)),)


def last_queries(rows: tuple[LayerKV, ...]) -> torch.Tensor | None:
    """(H, G, w, d) that rows hold."""
    held = [r.queries for r in rows if r.queries is not None]
    return torch.cat(held) if held else None


@pytest.mark.slow
@pytest.mark.req(5)
@pytest.mark.req(13)
@settings(deadline=None, max_examples=20)
@given(st.lists(sequences(), min_size=1, max_size=4), st.lists(st.integers(1, 50), min_size=1, max_size=5), st.data())
def test_side_by_side_equals_one_by_one(held, feeds, data):
    """Any rows in any company, ragged heads, evictions, forks and picks on the way: naive attention over each."""
    torch.manual_seed(0)
    layer, twins, sums = DecodingLayer(held), [DecodingLayer([x]) for x in held], [received(x) for x in held]
    asked = [last_queries(x) for x in held]
    assert layer.allocated == allocation(held)
    for q in feeds:
        if data.draw(st.booleans()):
            order = data.draw(st.lists(st.integers(0, len(twins) - 1), min_size=1, max_size=4))
            before, layer = layer, layer.pick(order)
            twins, sums = [twins[i].fork() for i in order], [sums[i].clone() for i in order]
            asked = [asked[i] for i in order]
            new = torch.randn(2, before.sequences, HEADS, 3, DIM)
            for _ in before.feed(*new):  # what is left behind goes its own way
                pass
        query = torch.randn(len(twins), HEADS * GROUP, q, DIM)
        keys, values = torch.randn(2, len(twins), HEADS, q, DIM)
        window = data.draw(st.sampled_from([None, 60]))
        ours = layer.attend(query, keys, values, AttentionRule(0.3, window))
        for i, twin in enumerate(twins):
            done = 0
            for taken in twin.feed(keys[i : i + 1], values[i : i + 1]):
                part = slice(done, done + taken)
                reference = naive(twin.at_rest()[0], query[i, :, part], 0.3, window, sums[i])
                assert (ours[i, :, part] - reference).abs().max() < 1e-4
                done += taken
            for a, b in zip(layer.at_rest()[i], twin.at_rest()[0], strict=True):
                assert (a.n, a.tokens_seen, a.steps, a.bytes) == (b.n, b.tokens_seen, b.steps, b.bytes)
                assert torch.equal(a.true_positions(), b.true_positions())
                assert (a.accumulated is None) == (b.accumulated is None)
                for x, y in zip(a.dense(torch.float32), b.dense(torch.float32), strict=True):
                    assert torch.equal(x, y)
            if (before := asked[i]) is not None:
                mine = query[i].view(HEADS, GROUP, q, DIM)
                asked[i] = torch.cat([before, mine], dim=2)[:, :, -before.shape[2] :]
                assert torch.equal(last_queries(layer.at_rest()[i]), asked[i])
            summed = received(layer.at_rest()[i])
            torch.testing.assert_close(summed, torch.where(summed > 0, sums[i], 0.0), atol=1e-4, rtol=1e-4)
        assert layer.held.tolist() == [sum(r.nbytes() for r in x) for x in layer.at_rest()]


@settings(deadline=None, max_examples=30)
@given(st.lists(sequences(), min_size=1, max_size=4), st.integers(1, 90))
def test_there_and_back_is_the_same(held, q):
    """Rows laid side by side, grown, taken out as rows and laid again: the same entries, bytes and next output."""
    torch.manual_seed(0)
    layer = DecodingLayer(held)
    for a, b in zip(layer.at_rest(), held, strict=True):
        for x, y in zip(a, b, strict=True):
            assert (x.n, x.window_len, x.bytes) == (y.n, y.window_len, y.bytes)
            assert all(torch.equal(s, t) for s, t in zip(x.dense(torch.float32), y.dense(torch.float32), strict=True))
    for _ in layer.feed(*torch.randn(2, len(held), HEADS, q, DIM)):
        pass
    again = DecodingLayer(layer.at_rest())
    assert again.held.tolist() == layer.held.tolist()
    query = torch.randn(len(held), HEADS * GROUP, 20, DIM)
    new = torch.randn(2, len(held), HEADS, 20, DIM)
    assert (again.attend(query, *new, RULE) - layer.attend(query, *new, RULE)).abs().max() < 1e-5


def test_what_is_allocated_beyond_what_is_held_stays_bounded():
    """Long generation of a row that never packs, one that packs, one with a cap: padding and spare room as promised."""
    rows = [
        (row(100, Storage(16, 16, 32, 32, "per_head")),),
        (row(120, Storage(8, 4, 32, 32, "per_head")),),
        (row(60, Storage(4, 16, 16, 16, "per_head"), Schedule(64, 8)),),
    ]
    layer = DecodingLayer(rows)
    window = (32 + 32 + 32) * 2 * DIM * 4 * HEADS * len(rows)  # window, group and spare columns of K and V
    for _ in range(400):
        for _ in layer.feed(*torch.randn(2, 3, HEADS, 1, DIM)):
            pass
        stores = sum(b.nbytes for b in (*layer.k_stores, *layer.v_stores))
        assert stores <= 1.125 * (layer.held.sum() + 3 * PADDING * 4)
        assert layer.k_window.nbytes + layer.v_window.nbytes <= window
    assert layer.count(0) == [500, 500]
    assert layer.allocated == sum(
        t.untyped_storage().nbytes()
        for t in [layer.k_window, layer.v_window, layer.hidden, layer.where]
        + [x for b in (*layer.k_stores, *layer.v_stores) for x in (b.x, b.step, b.zero, b.scale_of, b.widened)]
        + [p.positions for p in layer.parts]
        if t is not None
    )


def test_a_row_that_leaves_takes_its_padding_along():
    """The shorter row of a store, alone, holds no more slots than it uses, and computes what it did."""
    for storage in (Storage(16, 16, 16, 16, "per_head"), Storage(8, 4, 16, 16, "per_head")):
        long, short = row(150, storage), row(90, storage)
        layer = DecodingLayer([(long,), (short,)])
        assert [len(b.heads) for b in layer.k_stores] == [2 * HEADS]
        alone = layer.pick([1])
        stores = sum(b.nbytes for b in (*alone.k_stores, *alone.v_stores))
        assert stores == sum(b.nbytes for s in [DecodingLayer([(short,)])] for b in (*s.k_stores, *s.v_stores))
        query, new = torch.randn(2, HEADS * GROUP, 4, DIM), torch.randn(2, 2, HEADS, 4, DIM)
        both = layer.attend(query, *new, RULE)
        assert (alone.attend(query[1:], *new[:, 1:], RULE) - both[1:]).abs().max() < 1e-5


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=20), st.integers(0, 500))
def test_buckets_hold_all_and_pad_little(sizes, limit):
    made = buckets(sizes, limit)
    assert sorted(i for b in made for i in b) == list(range(len(sizes)))
    for b in made:
        longest = max(sizes[i] for i in b)
        assert all(longest - sizes[i] <= max(sizes[i], limit) for i in b)


@pytest.mark.parametrize("store", [torch.float32, torch.bfloat16])
def test_queries_lie_in_memory_as_models_leave_them(store):
    """One query head per KV head, (B, T, H, d) turned to (B, H, T, d); and shapes that do not fit are refused."""
    torch.manual_seed(0)
    one = LayerKV(*torch.randn(2, HEADS, 9, DIM), None, Storage(), tokens_seen=9, dtype=store)
    layer, (query, keys, values) = DecodingLayer([(one,)]), torch.randn(3, 1, 4, HEADS, DIM).mT.mT.transpose(2, 3)
    assert not query.is_contiguous()
    twin = layer.fork()
    ours = layer.attend(query, keys, values, RULE)
    assert (ours - twin.attend(query.contiguous(), keys, values, RULE)).abs().max() < 1e-6
    with pytest.raises(ValueError, match="1 sequences of 2 heads of 16"):
        layer.attend(query[..., :8], keys[..., :8], values[..., :8], RULE)


def test_rows_of_different_stores_are_refused():
    a = row(5, Storage())
    b = LayerKV(*torch.randn(2, HEADS, 5, DIM), None, Storage(), tokens_seen=5, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="share one dtype"):
        DecodingLayer([(a,), (b,)])


@pytest.mark.parametrize("bits", [(16, 16), (8, 16), (16, 4), (8, 4)])
@pytest.mark.parametrize("n", [20, 32, 44, 64])
def test_a_store_of_one_row_holds_what_is_old_and_nothing_else(bits, n):
    """Whether it takes over the row's tensors or copies them: no entry of the window, and no second copy."""
    keys, values = torch.randn(2, 2, n, 16)
    row = LayerKV(
        keys, values, None, Storage(*bits, 32, 12 if min(bits) < 16 else 0), tokens_seen=n, dtype=torch.float32
    )
    layer = DecodingLayer([(row,)])
    old = n - row.window_len if row.storage.quantised else n
    for store in (layer.k_stores[0], layer.v_stores[0]):
        assert (store.x[:, old:] == 0).all()
        taken = store.x.data_ptr() in {t.data_ptr() for t in row.tensors()}
        if min(bits) == 16 or (old == store.slots and store.bits < 16):
            assert taken
    before = [t.clone() for t in row.tensors()]
    new = torch.randn(1, 2, 50, 16)
    layer.attend(torch.randn(1, 2, 50, 16), new, new, AttentionRule(0.25, None))
    assert all(torch.equal(a, b) for a, b in zip(before, row.tensors(), strict=True))


def test_what_was_evicted_leaves_no_trace():
    """Values that are not finite are gone with their entry, from the places that no entry takes."""
    keys, values = torch.randn(2, 1, 64, 16)
    values[:, 25] = torch.inf  # in a group of which fewer than 25 stay
    storage = Storage(8, 16, 32, 8, positions="shared")

    def newest(keys, values, positions, seen, keep, observed, asked):
        return torch.cat([torch.arange(keep - 10), torch.arange(keys.shape[1] - 10, keys.shape[1])])[None]

    row = LayerKV(
        keys, values, torch.arange(64), storage, tokens_seen=64, dtype=torch.float32, choose=newest,
        schedule=Schedule(cap=30, beta=4, kind="periodic"),
    )  # fmt: skip
    layer = DecodingLayer([(row,)])
    for _ in range(12):
        new = torch.randn(1, 1, 1, 16)
        out = layer.attend(torch.randn(1, 1, 1, 16), new, new, AttentionRule(0.25, None))
    assert layer.count(0)[0] < 40 and out.isfinite().all()
