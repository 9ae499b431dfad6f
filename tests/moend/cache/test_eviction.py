"""Eviction moves codes: what survives is what was packed, and bytes do not depend on what survives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moend.cache.decode.eviction import DecodingLayer
from moend.cache.decode.groups import BLOCK, REQUANTISATIONS, WIDENINGS, lay_out
from moend.cache.layer_kv import LayerKV, Schedule
from moend.cache.packing import quantise_k, quantise_v, unpack
from moend.hf.attention import AttentionRule
from moend.layer_bytes import Storage, layer_bytes, peak_layer_bytes

HEADS, GROUP, DIM = 2, 2, 16


def fates(seed: int, kind: str, per_head: bool) -> Any:
    """A chooser whose survivors are drawn anew at each eviction, die in runs, die young, or are one of a few."""

    def choose(keys: Tensor, values: Tensor, positions: Tensor, now: int, keep: int, *_: Any) -> Tensor:
        heads, n = (keys.shape[0] if per_head else 1), keys.shape[1]
        scores = torch.rand(heads, n, generator=torch.Generator().manual_seed(seed + now))
        at = torch.atleast_2d(positions)[:heads].expand(heads, -1)
        if kind == "runs":
            scores += (at // 7) % 3
        if kind == "young":
            scores -= at / 1e3
        if kind == "few":  # few of each group live for ever: groups grow sparse until they merge
            scores += 10.0 * (at % 13 == 0) + at / 1e3
        return scores.topk(keep, dim=1).indices.sort(dim=1).values

    return choose


def scales_of(row: LayerKV) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, steps and zeros (entries of all heads, d) of packed keys."""
    (packed,) = row.k_packed
    assert row.sizes is not None
    of = torch.arange(row.sizes.numel()).repeat_interleave(row.sizes.flatten().long())
    step, zero = (x.flatten(0, 1)[of] for x in (packed.step, packed.zero))
    return unpack(packed.codes, packed.bits), step, zero


def packed_positions(row: LayerKV) -> list[tuple[int, int]]:
    """(head, position) of the packed entries, as they lie."""
    assert row.sizes is not None
    counts, at = row.sizes.sum(1).tolist(), row.true_positions().expand(row.heads, -1)
    return [(h, p) for h in range(row.heads) for p in at[h, : counts[h]].tolist()]


SCHEDULES = st.sampled_from(
    [
        Schedule(60, 1),
        Schedule(60, 12),
        Schedule(48, 24),
        Schedule(9, 4),
        Schedule(40, 0, 5, "periodic"),
        Schedule(40, 0, 37, "periodic"),
    ]
)


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(
    st.sampled_from([(8, 8), (8, 4), (4, 4), (2, 2), (16, 4), (8, 16)]),
    st.sampled_from([(16, 16), (16, 5), (8, 0), (12, 12)]),
    SCHEDULES,
    st.sampled_from(["any", "runs", "young", "few"]),
    st.booleans(),
    st.integers(0, 2**20),
    st.lists(st.sampled_from([1, 3, 40]), min_size=8, max_size=30),
)
def test_survivors_keep_their_codes(bits, form, schedule, kind, per_head, seed, feeds):
    """V bit for bit; K's numbers requantised REQUANTISATIONS times at most; bytes, positions, attention right."""
    torch.manual_seed(seed)
    n, heads = 30, HEADS
    if schedule.cap < 30:
        n = schedule.cap - schedule.reserve
    storage = Storage(*bits, *form, "per_head" if per_head else "shared")
    positions = torch.arange(2 * n)[::2]
    keys, values = (torch.randn(2, heads, n, DIM) * torch.rand(n, 1).exp()).bfloat16().float()
    row = LayerKV(
        keys, values, positions.expand(heads, -1) if per_head else positions, storage,
        tokens_seen=2 * n, dtype=torch.bfloat16, schedule=schedule, choose=fates(seed, kind, per_head),
    )  # fmt: skip
    stored = storage.evicting(schedule.cap)
    assert row.storage == stored and row.bytes == layer_bytes(n, stored, heads, DIM)
    layer = DecodingLayer([(row,)])
    truth = {p: (keys[:, i], values[:, i]) for i, p in enumerate(positions.tolist())}
    v_known: dict[tuple[int, int], list[bytes]] = {}
    k_known: dict[tuple[int, int], Tensor] = {}
    counted: dict[tuple[int, int], Tensor] = {}
    peak, total = row.bytes, sum(feeds)
    for q in feeds:
        new = torch.randn(2, 1, heads, q, DIM) * torch.rand(q, 1).exp()
        new = new.bfloat16().float()
        for i in range(q):
            truth[layer.longest + i] = (new[0, 0, :, i], new[1, 0, :, i])
        query, done = torch.randn(1, heads * GROUP, q, DIM), 0
        twin = layer.fork()
        ours = twin.attend(query, new[0], new[1], AttentionRule(0.3))
        for taken in layer.feed(new[0], new[1]):
            ((held,),) = layer.at_rest()
            k, v = held.dense(torch.float32)
            at = held.true_positions().expand(heads, -1)
            assert bool((at[:, 1:] > at[:, :-1]).all()) and int(at.max()) == held.tokens_seen - 1
            for h in range(heads * GROUP):
                for j in range(taken):
                    seen = at[h // GROUP] <= held.tokens_seen - taken + j
                    p = (k[h // GROUP, seen] @ query[0, h, done + j] * 0.3).softmax(0)
                    assert (ours[0, h, done + j] - p @ v[h // GROUP, seen]).abs().max() < 2e-4
            done += taken
        ((held,),) = layer.at_rest()
        ((same,),) = twin.at_rest()
        assert torch.equal(held.true_positions(), same.true_positions())
        assert (
            layer.held[0]
            == held.bytes
            == held.nbytes()
            == layer_bytes(held.n, held.storage, heads, DIM, held.window_len)
        )
        peak = max(peak, int(layer.trace.max()))
        again = DecodingLayer([(held,)]).at_rest()[0][0]
        for a, b in zip(held.tensors(), again.tensors(), strict=True):
            assert torch.equal(a, b) or a is held.spare or (a.dtype is torch.uint8 and a.shape == b.shape)
        where = packed_positions(held)
        if bits[1] < 16:
            assert held.v_packed is not None
            for i, key in enumerate(where):
                mine = [t[i].numpy().tobytes() for t in held.v_packed.tensors()]
                assert v_known.setdefault(key, mine) == mine
                once = quantise_v(truth[key[1]][1][key[0]][None], bits[1])
                assert all(
                    torch.equal(a[i], b[0]) for a, b in zip(held.v_packed.tensors(), once.tensors(), strict=True)
                )
        if bits[0] < 16:
            codes, step, zero = scales_of(held)
            for i, key in enumerate(where):
                mine = torch.stack([codes[i].float(), step[i].float(), zero[i].float()])
                if key in k_known:
                    counted[key] = counted[key] + (mine != k_known[key]).any(0)
                else:
                    counted[key] = torch.zeros(DIM)
                k_known[key] = mine
    if counted:
        assert max(int(c.max()) for c in counted.values()) <= REQUANTISATIONS
    if schedule.kind == "strict":
        assert peak <= peak_layer_bytes(schedule.cap, schedule.reserve, stored, heads, DIM, start=n, new=total)


@pytest.mark.parametrize("schedule", [Schedule(60, 1), Schedule(60, 12), Schedule(64, 32), Schedule(9, 4)])
@pytest.mark.parametrize("bits", [(16, 16), (8, 4)])
@pytest.mark.parametrize("new", [5, 40, 333, None])
def test_predicted_peak_is_the_held_peak(schedule, bits, new):
    """The bytes held after every token, from the storages, against the closed formula of the plan."""
    n, cap = schedule.cap - schedule.reserve, schedule.cap
    storage = Storage(*bits, 16, 8, "shared").evicting(cap)
    keys, values = torch.randn(2, 1, n, DIM)
    layer = DecodingLayer([(LayerKV(keys, values, torch.arange(n), storage, tokens_seen=n, dtype=torch.bfloat16,
                                    schedule=schedule, choose=fates(0, "any", False)),)])  # fmt: skip
    most = int(layer.held[0])
    for _ in range(16 * schedule.reserve * 2 + 70 if new is None else new):
        for _ in layer.feed(*torch.randn(2, 1, 1, 1, DIM)):
            pass
        ((held,),) = layer.at_rest()
        assert held.nbytes() == layer.held[0]
        most = max(most, int(layer.held[0]))
    assert most == peak_layer_bytes(cap, schedule.reserve, storage, 1, DIM, new=new)


HELD, BETA = 512, 128
SURVIVORS = torch.randperm(HELD, generator=torch.Generator().manual_seed(0))[:256].sort().values


def survivors(keys: Tensor, values: Tensor, positions: Tensor, now: int, keep: int, *_: Any) -> Tensor:
    """256 of the first 512 entries, drawn at random within every group of K, and the newest."""
    wanted = torch.isin(positions.reshape(-1)[: keys.shape[1]], SURVIVORS.to(positions.dtype))
    first, others = wanted.nonzero()[:, 0][:keep], (~wanted).nonzero()[:, 0]
    return torch.cat([first, others[len(others) - (keep - len(first)) :]]).sort().values[None]


@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 4)])
def test_errors_do_not_grow_with_evictions(bits):
    """128 evictions: V's error is that of packing once, K's at most 1.5 times, and no larger than after 16."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, HELD, 64)
    row = LayerKV(keys, values, None, Storage(*bits, 64, 64, "shared"), tokens_seen=HELD, dtype=torch.bfloat16,
                  schedule=Schedule(HELD, BETA, BETA), choose=survivors)  # fmt: skip
    layer = DecodingLayer([(row,)])
    k_once = quantise_k(keys, bits[0], 64).dequantise()
    # what stands in the residual window at first is rounded to 16 bit before it is packed
    v_once = quantise_v(torch.cat([values[:, :-64], values[:, -64:].bfloat16().float()], 1), bits[1]).dequantise()

    def rms(x: Tensor, true: Tensor) -> float:
        return float((x - true[:, SURVIVORS]).pow(2).mean().sqrt())

    once, found = (rms(k_once[:, SURVIVORS], keys), rms(v_once[:, SURVIVORS], values)), {}
    for token in range(128 * BETA):
        for _ in layer.feed(*torch.randn(2, 1, 1, 1, 64)):
            pass
        if (token + 1) in (BETA * 16, BETA * 128):
            ((held,),) = layer.at_rest()
            k, v = held.dense(torch.float32)
            assert held.positions is not None
            at = torch.isin(held.positions, SURVIVORS.int())
            found[(token + 1) // BETA] = rms(k[:, at], keys) / once[0], rms(v[:, at], values) / once[1]
    assert found[128][1] == 1.0
    assert found[128][0] <= 1.5 and found[128][0] <= found[16][0]


def test_archive_bounds_the_error_of_what_lives_for_ever():
    """One entry of each group lives on, far more groups than scales: the archive takes them, each number once."""
    torch.manual_seed(0)
    storage, lives = Storage(8, 8, 16, 0, "shared"), set(range(0, 8000, 48))
    keys, values = torch.randn(2, 1, 32, DIM)

    def choose(keys: Tensor, values: Tensor, positions: Tensor, now: int, keep: int, *_: Any) -> Tensor:
        old = [i for i, p in enumerate(positions.tolist()) if p in lives][: keep // 2]
        rest = [i for i in range(len(positions)) if i not in set(old)]
        return torch.tensor(sorted(old + rest[len(rest) - (keep - len(old)) :]))[None]

    row = LayerKV(
        keys, values, None, storage, tokens_seen=32, dtype=torch.bfloat16, schedule=Schedule(96, 16), choose=choose
    )
    layer, truth = DecodingLayer([(row,)]), [keys[0]]
    for _ in range(4000):
        new = torch.randn(2, 1, 1, 1, DIM)
        truth.append(new[0, 0, 0])
        for _ in layer.feed(*new):
            pass
    ((held,),) = layer.at_rest()
    assert held.widened is not None and held.sizes is not None
    assert int(held.widened.max()) <= 1 + WIDENINGS and int(held.widened.min()) >= 1 and int(held.sizes[0, 0]) > 16
    k, true = held.dense(torch.float32)[0][0], torch.cat(truth)
    archive = int(held.sizes[0, 0])
    error = (k[:archive] - true[held.true_positions()[:archive].long()]).pow(2).mean().sqrt()
    once = (quantise_k(true[None], 8, 16).dequantise()[0] - true).pow(2).mean().sqrt()
    assert error < 4 * once


@given(
    st.lists(st.lists(st.integers(0, 40), min_size=5, max_size=5), min_size=1, max_size=4), st.sampled_from([1, BLOCK])
)
def test_groups_lie_in_whole_blocks(sizes, block):
    group, taken = lay_out(torch.tensor(sizes), block)
    for h, lengths in enumerate(sizes):
        expected = [(g, j < n) for g, n in enumerate(lengths) for j in range(-(-n // block) * block)]
        used = len(expected)
        assert list(zip(group[h, :used].tolist(), taken[h, :used].tolist(), strict=True)) == expected
        assert not bool(taken[h, used:].any())


def test_scales_larger_than_what_packing_saves_are_refused():
    from moend.errors import UserError

    storage = Storage(8, 8, 16, 16, channels=1)
    row = LayerKV(*torch.randn(2, 1, 40, 16), None, storage, tokens_seen=40, dtype=torch.bfloat16,
                  schedule=Schedule(44, 4), choose=fates(0, "young", False))  # fmt: skip
    layer = DecodingLayer([(row,)])
    with pytest.raises(UserError, match="share them among more"):
        for _ in layer.feed(*torch.randn(2, 1, 1, 30, 16)):
            layer.at_rest()


@pytest.mark.slow
def test_long_answers_lose_nothing_to_evictions(tmp_path_factory):
    """2,048 teacher-forced tokens, an eviction every 32, 8 bits against 16: next tokens agree as without evictions."""
    from pathlib import Path

    from moend.benchmarks.text import part
    from moend.cache import LayerSpec, Selector, attention_of, cache_argument, compress, prefill
    from moend.models import load as models
    from moend.scoring import scorer

    loaded = models.load(models.spec("smollm2_135m"), Path("~/.cache/moend").expanduser())
    model, prompt, new, cap = loaded.model, 512, 2048, 512
    ids = torch.tensor([loaded.tokenizer(part("test")[:40000])["input_ids"][: prompt + new]])
    assert ids.shape[1] == prompt + new
    with torch.no_grad():
        filled = prefill(model, ids[:, :prompt])

    def chooser(layer: int) -> Selector:
        return Selector(scorer("random"), layer, n_sink=4, recent=64, scaling=0.125, seed=0)

    def tokens(storage: Storage, evicts: bool) -> Tensor:
        spec = LayerSpec(10**6, storage.whole)
        if evicts:
            spec = LayerSpec(cap - 32, storage.evicting(cap), Schedule(cap, 32, 32))
        specs = [spec] * model.config.num_hidden_layers
        cache = compress(filled, specs, chooser, score_key="random", dtype=loaded.store_dtype)
        best = []
        for at in range(prompt, prompt + new, 32):
            where = torch.arange(at, at + 32)[None]
            with torch.no_grad(), attention_of(model):
                out = model(
                    input_ids=ids[:, at : at + 32], position_ids=where, use_cache=True, **{cache_argument(model): cache}
                )
            best.append(out.logits[0].argmax(-1))
        return torch.cat(best)

    agreed = {}
    for evicts in (True, False):
        of16, of8 = (tokens(Storage(b, b, positions="per_head"), evicts) for b in (16, 8))
        agreed[evicts] = float((of16 == of8).float().mean())
    print(f"next tokens at 8 bits agree with 16 bits: {agreed[True]:.4f} with evictions, {agreed[False]:.4f} without")
    assert agreed[True] >= agreed[False] - 0.01
