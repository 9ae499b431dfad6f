"""Decoding with eviction, against a plain model that masks what has gone and recomputes everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moend.cache import CompressedCache, attention_of, cache_argument, prefill
from moend.hf.rope import rotary
from moend.methods.bind import BoundMethod


@dataclass
class Pass:
    """What a plain model computed: logits (1, T, V), per layer attention (H_q, T, T), queries and keys (H, T, d)."""

    logits: Tensor
    shares: list[Tensor]
    queries: list[Tensor]
    keys: list[Tensor]


def masked_pass(model: Any, ids: Tensor, visible: list[Tensor]) -> Pass:
    """A plain model over ids (1, T) whose layer l sees visible[l] (H, T, T) bool."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def naive(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        allowed = visible[module.layer_idx].repeat_interleave(groups, 0)[None]
        logits = (query @ key.repeat_interleave(groups, 1).mT * scaling).masked_fill(~allowed, -torch.inf)
        seen[module.layer_idx] = logits.softmax(-1)[0], query[0], key[0]
        return (logits.softmax(-1) @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("naive_masked", naive)
    before = model.config._attn_implementation
    model.set_attn_implementation("naive_masked")
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
    finally:
        model.set_attn_implementation(before)
    return Pass(logits, *([seen[i][k] for i in range(len(visible))] for k in range(3)))  # type: ignore[arg-type]


def step(model: Any, cache: CompressedCache, ids: Tensor) -> Tensor:
    """Logits of ids fed on top of a cache."""
    seen = cache.get_seq_length()
    at = torch.arange(seen, seen + ids.shape[1])[None]
    with torch.no_grad(), attention_of(model):
        out: Tensor = model(input_ids=ids, position_ids=at, use_cache=True, **{cache_argument(model): cache}).logits
    return out


# (the pass so far, layer, KV head, positions held, how many to keep) -> positions that stay
Choice = Callable[[Pass, int, int, list[int], int], list[int]]


def check(
    model: Any, bound: BoundMethod, ids: Tensor, cut: int, feeds: list[int], choice: Choice
) -> tuple[CompressedCache, Pass]:
    """A prompt of `cut` tokens, then the rest in pieces: entries, logits and bytes against a masked plain model.

    choice is the method's paper in plain Python; the model has 3 layers of 2 KV heads and a scaling of 0.25.
    """
    total = ids.shape[1]
    spec = bound.specs(cut, total - cut)[0]
    cap, keep = spec.schedule.cap, min(spec.tokens, cut)
    assert cap is not None
    made = bound.method.make_scorer()
    assert made is not None
    held = [[list(range(cut)) for _ in range(2)] for _ in range(3)]
    visible = [torch.ones(2, total, total).tril().bool() for _ in range(3)]
    run = masked_pass(model, ids[:, :cut], [v[:, :cut, :cut] for v in visible])
    evictions = 0

    def evict(keep: int) -> None:
        nonlocal evictions
        evictions += 1
        for layer in range(3):
            held[layer] = [sorted(choice(run, layer, h, held[layer][h], keep)) for h in range(2)]

    if keep < cut:
        evict(keep)
    for t in range(cut, total):
        if len(held[0][0]) >= cap:
            evict(cap - max(spec.schedule.reserve, 1))
        for layer in range(3):
            for h in range(2):
                held[layer][h].append(t)
                visible[layer][h, t] = False
                visible[layer][h, t, held[layer][h]] = True
        run = masked_pass(model, ids[:, : t + 1], [v[:, : t + 1, : t + 1] for v in visible])
    assert evictions > 1

    prefilled = prefill(model, ids[:, :cut], last_queries=made.last_queries, observe=made.observes, chunk=17)
    rotation = [rotary(model, layer) for layer in range(3)] if bound.needs_rotary else None
    cache = bound.fork(prefilled, total - cut, rotary=rotation, scaling=[0.25] * 3)
    ours, at = [], cut
    for n in feeds:
        ours.append(step(model, cache, ids[:, at : at + n]))
        at += n
    for layer, (row,) in enumerate(cache.layer_kv):
        positions = row.true_positions().expand(2, -1)
        assert [positions[h].tolist() for h in range(2)] == held[layer]
        assert row.bytes == row.nbytes()
    assert (torch.cat(ours, 1) - run.logits[:, cut:]).abs().max() < 1e-4
    return cache, run
