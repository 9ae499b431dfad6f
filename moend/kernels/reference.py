"""Attention over packed entries written out in float64, head by head and slot by slot: what tests compare with."""

from __future__ import annotations

import torch
from torch import Tensor

from moend.kernels.entries import Entries, Held


def dense(entries: Entries, head: int) -> Tensor:
    """The entries (n, d) of one KV head, the head-th of its store, in float64: zero + code * step."""
    n, rows = int(entries.lengths[head]), []
    for slot in range(entries.begin, n):
        stored = entries.x[head, slot]
        if not entries.quantised:
            rows.append(stored.double())
            continue
        width = len(stored)
        parts = [(int(stored[c % width]) >> entries.bits * (c // width)) for c in range(entries.dim)]
        codes = torch.tensor(parts, dtype=torch.float64) % 2**entries.bits
        if entries.side == "k":
            block = slot // entries.group
            block = block if entries.scale_of is None else int(entries.scale_of[head, block])
            step, zero = (x[head, block].double() for x in (entries.step, entries.zero))
        else:
            step, zero = (x[head, slot].double().repeat_interleave(entries.group) for x in (entries.step, entries.zero))
        rows.append(zero.cpu() + codes * step.cpu())
    return torch.stack(rows) if rows else torch.zeros(0, entries.dim, dtype=torch.float64)


def attention(query: Tensor, held: Held) -> tuple[Tensor, Tensor]:
    """Scaled queries (S, R, d) over all that is held: outputs (S, R, d) and probabilities (S, R, columns)."""
    query = query.double().cpu()
    logits = torch.full((*query.shape[:2], held.columns), -torch.inf, dtype=torch.float64)
    values = torch.zeros(query.shape[0], held.columns, query.shape[2], dtype=torch.float64)
    for stores, is_keys in (((*held.keys, held.newest[0]), True), ((*held.values, held.newest[1]), False)):
        for store in stores:
            for i, head in enumerate(store.heads):
                entries = dense(store, i)
                at = slice(store.to, store.to + len(entries))
                if is_keys:
                    logits[head, :, at] = query[head] @ entries.mT
                else:
                    values[head, at] = entries
    for j in range(held.columns):
        gone = held.hidden[:, j if j < held.used else j + held.gap].cpu()
        if j < held.used:
            gone = gone | (j >= held.lengths.cpu())
        logits[gone, :, j] = -torch.inf
    probs = logits.softmax(-1)
    return probs @ values, probs
