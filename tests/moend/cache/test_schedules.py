"""Evictions while decoding, forks and joins of the compressed cache: caps, bytes, and a full cache under a mask."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from moend.cache import (
    CompressedCache,
    LayerKV,
    LayerSpec,
    Schedule,
    compress,
    prefill,
)
from moend.cache.decode.eviction import DecodingLayer
from moend.errors import UserError
from moend.layer_bytes import Storage
from tests.moend.cache.lottery import ALL, fork, lottery, masked_reference, simulate, step
from tests.tiny import tiny


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
