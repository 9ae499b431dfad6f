"""StreamingLLM as a whole, with true positions and with the original's positions inside the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moend.budget import Arch, Budget
from moend.cache import prefill
from moend.errors import UserError
from moend.hf.rope import Rotary, rotary, unrotate
from moend.methods.bind import bind
from moend.methods.spec import method
from tests.moend.scoring.decoding import Pass, check, step
from tests.tiny import tiny

ARCH = Arch(3, 4, 2, 16, 4096)


def sinks_and_newest(run: Pass, layer: int, h: int, held: list[int], keep: int) -> list[int]:
    return [*held[:4], *held[len(held) - (keep - 4) :]]


@pytest.mark.req(20)
@pytest.mark.req(13)
@pytest.mark.parametrize("feeds", [[1] * 12, [9, 1, 2]])
@pytest.mark.parametrize("cut", [40, 15])
def test_whole_method(feeds: list[int], cut: int) -> None:
    ids = torch.randint(3, 97, (1, cut + 12), generator=torch.Generator().manual_seed(cut))
    bound = bind(
        method("StreamingLLM"), Budget.parse(20), "matched", ARCH, t_ref=None, at="peak", store_dtype=torch.float32
    )
    check(tiny("llama"), bound, ids, cut, feeds, sinks_and_newest)


def roped(x: Tensor, at: int, rot: Rotary) -> Tensor:
    """x (d,) turned by its position, pair by pair."""
    out, r = x.clone(), rot.dim // 2
    for f in range(r):
        angle = torch.tensor(at * float(rot.inv_freq[f]))
        out[f] = x[f] * angle.cos() - x[f + r] * angle.sin()
        out[f + r] = x[f + r] * angle.cos() + x[f] * angle.sin()
    return out


def original(model: Any, ids: Tensor, cut: int, cap: int, beta: int) -> Tensor:
    """Logits of a plain model in which keys are turned by their place in the cache, as StreamingLLM's own code does.

    The prompt is read whole, at true positions; then the cache holds 4 sinks and the newest, up to `cap` in all.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    total, held = ids.shape[1], list(range(cut))
    places: dict[int, list[int]] = {}  # of each query, the entries it sees in order
    if cut > cap - beta:
        held = [*held[:4], *held[cut - (cap - beta - 4) :]]
    for t in range(cut, total):
        if len(held) >= cap:
            held = [*held[:4], *held[len(held) - (cap - beta - 4) :]]
        held.append(t)
        places[t] = list(held)
    rot = rotary(model, 0)

    def naive(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        at = torch.arange(total)[None]
        raw_q, raw_k = unrotate(query, at, rot)[0], unrotate(key, at, rot)[0]
        out = torch.zeros_like(query[0])
        for h in range(query.shape[1]):
            g = h // 2
            for t in range(total):
                seen = places.get(t, list(range(t + 1)))
                me = roped(raw_q[h, t], len(seen) - 1, rot)
                logits = torch.stack([me @ roped(raw_k[g, p], i, rot) for i, p in enumerate(seen)]) * scaling
                out[h, t] = logits.softmax(0) @ value[0, g, seen]
        return out[None].transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("naive_reindexed", naive)
    before = model.config._attn_implementation
    model.set_attn_implementation("naive_reindexed")
    try:
        with torch.no_grad():
            logits: Tensor = model(input_ids=ids, use_cache=False).logits
    finally:
        model.set_attn_implementation(before)
    return logits


@pytest.mark.req(20)
@pytest.mark.parametrize(("feeds", "beta"), [([1] * 6, 1), ([4, 1, 1], 1), ([1] * 6, 3)])
def test_reindexed_positions_are_the_originals(feeds: list[int], beta: int) -> None:
    model, cut = tiny("llama", layers=2), 20
    ids = torch.randint(3, 97, (1, cut + 6), generator=torch.Generator().manual_seed(1))
    arch = Arch(2, 4, 2, 16, 4096)
    made = method("StreamingLLM", scorer={"reindex": True}, beta=beta)
    assert made.label == "StreamingLLM (reindexed)" and method("StreamingLLM").label == "StreamingLLM"
    bound = bind(made, Budget.parse(14), "matched", arch, t_ref=None, at="peak", store_dtype=torch.float32)
    assert bound.needs_rotary
    cap = bound.specs(cut, 6)[0].schedule.cap
    assert cap is not None and cap - beta >= 8  # room for all four sinks
    want = original(model, ids, cut, cap, beta)

    prefilled = prefill(model, ids[:, :cut])
    outs = []
    for m in (bound, bind(method("StreamingLLM", beta=beta), Budget.parse(14), "matched", arch, t_ref=None, at="peak")):
        cache = m.fork(prefilled, 6, rotary=[rotary(model, i) for i in range(2)], scaling=[0.25] * 2)
        ours, at = [], cut
        for n in feeds:
            ours.append(step(model, cache, ids[:, at : at + n]))
            at += n
        outs.append(torch.cat(ours, 1))
    assert (outs[0] - want[:, cut:]).abs().max() < 1e-4
    assert (outs[1] - want[:, cut:]).abs().max() > 1e-2  # true positions are another method


def test_reindex_is_for_streaming_at_16_bit() -> None:
    with pytest.raises(UserError, match=r"unknown setting of scorer snapkv 'reindex'"):
        method("SnapKV", scorer={"reindex": True})
    for fields in ({"schedule": "prompt"}, {"precision": {"k_bits": 8, "v_bits": 8}}):
        with pytest.raises(UserError, match=r"reindex counts positions inside a cache that evicts at 16 bit"):
            method("StreamingLLM", scorer={"reindex": True}, **fields)
