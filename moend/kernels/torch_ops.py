"""Attention over packed entries in plain torch operations: on every device, always there.

Codes become float32 without their offset, a bounded number at a time; scales are folded into queries and probabilities
(see `moend.kernels.entries.Entries`). Logits and sums are float32 on every device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moend.kernels.entries import Entries, Held

BLOCK = 2**18  # numbers formed at a time, where a KV head has fewer: they stay in a CPU's second cache


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Bytes (..., d * bits / 8) -> uint8 codes (..., d): byte j holds channels j, j + w, ..., lowest bits first."""
    if bits == 8:
        return packed
    return torch.cat([(packed >> (bits * i)) & (2**bits - 1) for i in range(8 // bits)], dim=-1)


def score(query: Tensor, keys: Entries, logits: Tensor) -> None:
    """Write q . k of query (S, R, d) into the columns of logits (S, R, n) that stand for these keys; float32."""
    mine, begin = query[keys.at], keys.begin
    if not keys.quantised:
        parts = [torch.bmm(mine[i], keys.x[i, begin : keys.end].to(query.dtype).mT) for i in _pieces(keys)]
    else:
        parts = [_score_codes(mine[i], keys, i) for i in _pieces(keys)]
    made = torch.cat(parts) if len(parts) > 1 else parts[0]
    logits[keys.at, :, keys.to : keys.to + keys.end - begin] = made[..., : keys.end - begin]


def _score_codes(query: Tensor, keys: Entries, rows: slice) -> Tensor:
    """(b, R, blocks * group): (q * step) . code + q . zero."""
    blocks = -(-keys.end // keys.group)
    step, zero = (_scales(x, keys, rows, blocks).to(query.dtype) for x in (keys.step, keys.zero))
    codes = unpack(keys.x[rows, : blocks * keys.group], keys.bits).to(query.dtype)
    folded = query[:, None] * step[:, :, None]  # (b, blocks, R, d)
    products = folded @ codes.unflatten(1, (blocks, keys.group)).mT
    products += (zero @ query.mT)[..., None]  # (b, blocks, R, 1)
    return products.transpose(1, 2).flatten(2)


def _scales(x: Tensor, keys: Entries, rows: slice, blocks: int) -> Tensor:
    """Scales (b, blocks, d) of the first blocks."""
    if keys.scale_of is None:
        return x[rows, :blocks]
    where = keys.scale_of[rows, :blocks, None].long()
    return x[rows].gather(1, where.expand(-1, -1, x.shape[2]))


def mix(probs: Tensor, values: Entries, out: Tensor) -> None:
    """Add the values weighted by the columns of probs (S, R, n) that stand for them to out (S, R, d); float32."""
    mine = probs[values.at, :, values.to : values.to + values.end - values.begin]
    form = _mix_codes if values.quantised else _mix_numbers
    parts = [form(mine[i], values, i, out.dtype) for i in _pieces(values)]
    made = torch.cat(parts) if len(parts) > 1 else parts[0]
    if isinstance(values.at, slice):
        out[values.at] += made
    else:
        out.index_add_(0, values.at, made)


def _mix_numbers(probs: Tensor, values: Entries, rows: slice, dtype: torch.dtype) -> Tensor:
    return torch.bmm(probs, values.x[rows, values.begin : values.end].to(dtype))


def _mix_codes(probs: Tensor, values: Entries, rows: slice, dtype: torch.dtype) -> Tensor:
    """(b, R, d): sum_t (p_t step_t) code_t + sum_t p_t zero_t, by groups of channels."""
    codes = unpack(values.x[rows, : values.end], values.bits).to(dtype).unflatten(-1, (-1, values.group))
    step, zero = (x[rows, : values.end].to(dtype) for x in (values.step, values.zero))
    folded = probs[:, None] * step.mT[:, :, None]  # (b, d / group, R, n)
    products = folded @ codes.transpose(1, 2) + (probs @ zero).mT[..., None]
    return products.transpose(1, 2).flatten(2)


def softmax(logits: Tensor, held: Held, clear: bool = True, sinks: Tensor | None = None) -> Tensor:
    """softmax of logits (S, R, n) over the columns that are used and not hidden; the others get 0, asked or not.

    sinks (S, R, 1): one more logit of each softmax, whose share is nobody's.
    """
    used, n = held.used, logits.shape[2]
    if held.some_hidden[0]:
        logits[:, :, :used].masked_fill_(held.hidden[:, None, :used], -torch.inf)
    if held.some_hidden[1]:
        newest = held.hidden[:, None, used + held.gap : n + held.gap]
        logits[:, :, used:].masked_fill_(newest, -torch.inf)
    probs = torch.softmax(logits, dim=-1)
    if sinks is not None:
        probs *= torch.sigmoid(torch.logsumexp(logits, dim=-1, keepdim=True) - sinks)
    return probs


def _pieces(entries: Entries) -> Iterator[slice]:
    """KV heads whose entries become numbers together."""
    n = len(entries.heads)
    same = entries.x.dtype is torch.float32
    size = n if same else max(BLOCK // max((entries.end - entries.begin) * entries.dim, 1), 1)
    return (slice(i, i + size) for i in range(0, n, size))
