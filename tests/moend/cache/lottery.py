"""A cache whose evictions are drawn by lot, and what it must equal: a full cache under a mask."""

from __future__ import annotations

from typing import Any

import torch

from moend.cache import (
    CompressedCache,
    LayerSpec,
    Selector,
    attention_of,
    cache_argument,
    compress,
)
from moend.layer_bytes import Storage
from moend.scoring import LayerView

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
