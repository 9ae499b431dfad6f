"""Attention of new queries over all that one layer holds."""

from __future__ import annotations

import torch
from torch import Tensor

from moend import kernels
from moend.cache.decode.layout import Layout
from moend.cache.decode.part import Part
from moend.hf.attention import AttentionRule
from moend.hf.rope import back

LOGITS = 2**24  # most logits computed at a time


def path(held: Layout) -> str:
    """The kernel path that computes a step of one token (`moend.kernels.choose.path`)."""
    return kernels.path(held.k_window.device, fused=held.accumulated is None and not held.reindexed)


def attention(held: Layout, query: Tensor, rule: AttentionRule) -> Tensor:
    """Attention (S, G, p, d) of the newest p tokens over all that is held, from their scaled queries (S, G, p, d)."""
    heads, group, p, dim = query.shape
    entries, out = held.entries(), []
    size = max(LOGITS // (heads * group * entries.columns), 1)
    for start in range(0, p, size):
        asking = query[:, :, start : start + size]
        q = asking.shape[2]

        def change(flat: Tensor, logits: Tensor, start: int = start, q: int = q) -> None:
            for part in held.reindexed:
                _bring_near(held, part, flat, logits)
            rule.cap(logits)
            if p > 1 or rule.reach is not None:
                _hide(held, logits.view(heads, group, q, -1), start, p, rule)

        changes = bool(held.reindexed) or p > 1 or rule.reach is not None or rule.softcap is not None
        summed = held.accumulated is not None
        sinks = None if rule.sinks is None else _sinks(rule.sinks, heads, group, q)
        flat = asking.reshape(heads, group * q, dim)
        mixed, probs = kernels.attention(flat, entries, change if changes else None, summed, p == 1, sinks)
        if held.accumulated is not None and probs is not None:
            received = probs.sum(1)
            held.accumulated[:, : held.used] += received[:, : held.used]
            held.accumulated[:, held.slots + held.begin : held.slots + held.cursor] += received[:, held.used :]
        out.append(mixed.view(heads, group, q, dim))
    return torch.cat(out, dim=2) if len(out) > 1 else out[0]


def _sinks(sinks: Tensor, heads: int, group: int, queries: int) -> Tensor:
    """Sinks (H_q,) repeated for each row of the logits: (S, group * queries, 1) float32."""
    mine = sinks.float().view(-1, group)  # of each KV head
    return mine.repeat(heads // len(mine), 1).repeat_interleave(queries, dim=1)[..., None]


def _bring_near(held: Layout, part: Part, query: Tensor, logits: Tensor) -> None:
    """Overwrite the logits of a re-indexed part's sinks, as if they lay right before its newest entries (`Reindex`)."""
    reindex, known = part.schedule.reindex, part.positions
    part.touch(held.clock)
    if reindex is None or known is None or part.tokens_seen == part.n:
        return
    first = known[: reindex.sinks]
    sinks = int((first == torch.arange(len(first), device=first.device)).sum())
    store, start = held.k_stores[part.k[0]], part.k[1]
    keys = store.x[start : start + part.heads, :sinks].to(query.dtype)
    nearer = back(query[part.kv_heads], part.tokens_seen - part.n, reindex.rotary).to(query.dtype)
    logits[part.kv_heads, :, :sinks] = torch.bmm(nearer, keys.mT)


def _hide(held: Layout, logits: Tensor, start: int, p: int, rule: AttentionRule) -> None:
    """Hide from queries start, start + 1 ... of the newest p all later tokens, and what left their window or chunk."""
    q, n = logits.shape[2:]
    me = torch.arange(start, start + q, device=logits.device)
    later = torch.arange(p, device=logits.device) > me[:, None]
    logits[..., n - p :].masked_fill_(later, -torch.inf)
    if rule.reach is not None:
        where, ahead = held.places()
        where = torch.cat([where[:, : held.used], where[:, held.slots + held.begin : held.slots + held.cursor]], dim=1)
        at = (ahead[:, None] + (held.clock - p) + me)[..., None]  # (S, q, 1): the queries' own positions
        if rule.window is not None:
            logits.masked_fill_((at - where[:, None] >= rule.window)[:, None], -torch.inf)
        if rule.chunk is not None:
            logits.masked_fill_((where[:, None] < at - at % rule.chunk)[:, None], -torch.inf)
