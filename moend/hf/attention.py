"""The attention function `moend`: the one place where a model's attention meets our cache.

transformers looks the function up by the name in `config._attn_implementation`. Registered with it is a mask function
that hands the 2-D padding mask through, so no dense mask is ever built: what a query may see follows from positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moend.errors import UserError

NAME = "moend"
QUERY_BLOCK = 512  # queries that are masked at a time: bounds the mask to QUERY_BLOCK x T
BLOCK = 2**20  # attention weights held at a time where they are written out: they stay in a CPU's last cache
QUERIES = 16  # of a multiple of so many queries,
ROWS = 192  # and of no more than so many query heads and queries of one KV head, if that allows it


@dataclass(frozen=True)
class AttentionRule:
    """What a model's attention call asks of a layer, beside its queries, keys and values."""

    scaling: float  # logits are scaling x (q . k)
    window: int | None = None  # a query sees itself and the window - 1 positions before it; None: all before it
    softcap: float | None = None  # logits l become softcap x tanh(l / softcap); None: they stay as they are
    sinks: Tensor | None = None  # (H_q,): a learned logit per query head that takes part in its softmax


class Attends(Protocol):
    """A cache layer that computes attention itself."""

    def attend(self, query: Tensor, rule: AttentionRule) -> Tensor:
        """query (B, H_q, q, d) -> output (B, H_q, q, d)."""


class Captures(Protocol):
    """A cache layer that keeps more of a prefill than keys and values."""

    wanted: frozenset[str]

    def add_accumulated(self, accumulated: Tensor) -> None:
        """What all entries so far (B, H_kv, T) received from a chunk's queries."""

    def keep_last(self, query: Tensor) -> None:
        """A chunk's queries (B, H_q, q, d)."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query (B, H_q, q, d), key and value (B, H_kv, T, d) as `update()` returned them -> (B, q, H_q, d).

    A layer that holds a compressed cache computes with what it holds; otherwise plain causal attention, with
    `attention_mask` the 2-D padding mask (B, T) or None. Score caps and learned sinks are refused by name.
    """
    for feature in ("softcap", "s_aux"):
        if kwargs.get(feature) is not None:
            raise UserError(f"{type(module).__name__} uses '{feature}' in its attention, which moend does not support")
    if dropout:
        raise UserError("moend's attention is for inference: call model.eval() first")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Attends | None = getattr(key, "moend_layer", None)
    if layer is not None:
        out = layer.attend(query, AttentionRule(scale, sliding_window))
    else:
        capture: Captures | None = getattr(key, "capture", None)
        if capture is None or "accumulated" not in capture.wanted:
            out = causal(query, key, value, attention_mask, scale, sliding_window)
        else:
            out, accumulated = causal_and_accumulated(query, key, value, attention_mask, scale, sliding_window)
            capture.add_accumulated(accumulated)
        if capture is not None:
            capture.keep_last(query)
    return out.transpose(1, 2).contiguous(), None


def causal(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, scaling: float, window: int | None
) -> Tensor:
    """Causal attention of the last q of T tokens: (B, H_q, q, d). Memory grows with q + T, never q x T per head."""
    q, t = query.shape[2], key.shape[2]
    if padding is not None and bool(padding.all()):
        padding = None
    window = None if window is not None and window >= t else window
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if query.device.type != "cpu" or q in (1, t) or learning:
        return _fused(query, key, value, padding, scaling, window)
    if padding is None and window is None and value.shape == key.shape:
        return _in_two(query, key, value, scaling)
    return _blocks(query, key, value, padding, scaling, window, accumulated=False)[0]


def _in_two(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """`causal` on a CPU: over the tokens before these queries, which all see, and over the queries' own.

    With the logarithms l of both softmax sums the whole is sigmoid(l_own - l_before) of the one and the rest of the
    other. torch's fused attention with a mask would compute what the mask hides.
    """
    group, before = query.shape[1] // key.shape[1], key.shape[2] - query.shape[2]
    if group > 1:
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own, own_sum = flash(query, key[:, :, before:], value[:, :, before:], is_causal=True, scale=scaling)
    old, old_sum = flash(query, key[:, :, :before], value[:, :, :before], is_causal=False, scale=scaling)
    out: Tensor = torch.lerp(old.float(), own.float(), torch.sigmoid(own_sum - old_sum)[..., None]).to(query.dtype)
    return out


def _fused(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, scaling: float, window: int | None
) -> Tensor:
    """`causal` by torch's fused attention."""
    q, t = query.shape[2], key.shape[2]
    gqa = query.shape[1] != key.shape[1]
    if padding is None and window is None and (q == t or q == 1):
        return F.scaled_dot_product_attention(query, key, value, is_causal=q > 1, scale=scaling, enable_gqa=gqa)
    at, out = torch.arange(t, device=query.device), []
    for start in range(0, q, QUERY_BLOCK):
        part = query[:, :, start : start + QUERY_BLOCK]
        me = torch.arange(start, start + part.shape[2], device=query.device)[:, None] + (t - q)
        seen = at <= me
        if window is not None:
            seen &= me - at < window
        mask = seen[None, None]
        if padding is not None:
            # a padding query sees itself: its output is never used, but must not be NaN
            mask = (mask & padding.bool()[:, None, None, :]) | (at == me)[None, None]
        out.append(F.scaled_dot_product_attention(part, key, value, attn_mask=mask, scale=scaling, enable_gqa=gqa))
    return torch.cat(out, dim=2) if len(out) > 1 else out[0]


def accumulated_attention(
    query: Tensor, key: Tensor, padding: Tensor | None, scaling: float, window: int | None
) -> Tensor:
    """What each of T entries receives from the last q of T tokens: (B, H_kv, T) float32 (H2O, section 3).

    The sum of softmax(q . k) over these queries and the query heads of a KV head's group; query (B, H_q, q, d), key
    (B, H_kv, T, d). Padding queries count for nothing. Memory grows with T.
    """
    return _blocks(query, key, None, padding, scaling, window, accumulated=True)[1]


def causal_and_accumulated(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, scaling: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """`causal` and `accumulated_attention`; on a CPU the weights are written out once for both."""
    if query.device.type == "cpu":
        return _blocks(query, key, value, padding, scaling, window, accumulated=True)
    asked = query, key, padding, scaling, window
    return causal(query, key, value, *asked[2:]), accumulated_attention(*asked)


def _blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    padding: Tensor | None,
    scaling: float,
    window: int | None,
    *,
    accumulated: bool,
) -> tuple[Tensor, Tensor]:
    """Attention written out for a block of queries at a time: (output or an empty tensor, accumulated attention or an
    empty tensor).

    On a CPU logits are float32 whatever the model computes in: bfloat16 has three digits, too few for an exponent.
    """
    (batch, heads, t, _), q = key.shape, query.shape[2]
    rows, group = batch * heads, query.shape[1] // heads
    cpu = key.device.type == "cpu"
    wide = torch.float32 if cpu else key.dtype
    grouped = (query.to(wide) * scaling).unflatten(1, (heads, group)).flatten(0, 1)  # (B * H, G, q, d)
    turned = key.to(wide).mT.contiguous().flatten(0, 1)  # (B * H, d, T)
    values = None if value is None else value.flatten(0, 1)
    out = query.new_empty(0 if value is None else (rows, group, q, value.shape[3]))
    total = key.new_zeros(rows, 1, t if accumulated else 0, dtype=torch.float32)
    padding = None if padding is None or bool(padding.all()) else padding.bool()
    window = None if window is not None and window >= t else window
    # A thread of a CPU takes one KV head: products over several take a third longer, out of its cache.
    span = min(torch.get_num_threads(), rows) if cpu else rows
    step = min(BLOCK // (span * group * t), ROWS // group) // QUERIES * QUERIES
    step = min(max(step, QUERIES), q)
    # The same memory for all blocks: a fresh one per block costs as much as its softmax.
    most = span * group * step * t
    all_logits = turned.new_empty(most)
    all_shares = all_logits if wide == torch.float32 else turned.new_empty(most, dtype=torch.float32)
    at = torch.arange(t, device=key.device)
    for start in range(0, q, step):
        width = min(step, q - start)
        seen = t - q + start + width  # entries beyond the block's last query are unseen,
        first = 0 if window is None else max(seen - width - window + 1, 0)  # and those before its first one's window
        me, there = at[seen - width : seen, None], at[first:seen]
        hidden = there > me if window is None else (there > me) | (me - there >= window)
        for begin in range(0, rows, span):
            mine = slice(begin, min(begin + span, rows))
            n = mine.stop - begin
            shape, size = (n, group * width, seen - first), n * group * width * (seen - first)
            logits, shares = all_logits[:size].view(shape), all_shares[:size].view(shape)
            asking = grouped[mine, :, start : start + width].flatten(1, 2)
            torch.bmm(asking, turned[mine, :, first:seen], out=logits)
            counts = None
            if padding is not None:  # a padding query sees itself, so that no softmax is empty, and is not counted
                real = padding[at.new_tensor(range(begin, mine.stop)) // heads]  # (n, T), of each row's sequence
                gone = hidden | (~real[:, None, first:seen] & (there != me))  # (n, width, seen - first)
                logits.view(n, group, width, -1).masked_fill_(gone[:, None], -torch.inf)
                counts = real[:, None, seen - width : seen].expand(-1, group, -1)
            elif window is not None:
                logits.view(n, group, width, -1).masked_fill_(hidden, -torch.inf)
            else:
                logits.view(n, group, width, -1)[..., -width:].masked_fill_(hidden[:, -width:], -torch.inf)
            torch.softmax(logits, dim=-1, dtype=torch.float32, out=shares)
            if accumulated:
                ones = shares.new_ones(n, 1, group * width) if counts is None else counts.reshape(n, 1, -1).float()
                total[mine, :, first:seen].baddbmm_(ones, shares)
            if values is not None:
                mixed = torch.bmm(shares.to(values.dtype), values[mine, first:seen])
                out[mine, :, start : start + width] = mixed.view(n, group, width, -1)
    if values is not None:
        out = out.view(batch, heads * group, q, -1)
    return out, total.view(batch, heads, total.shape[2])


def _padding_mask(batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any) -> Tensor | None:
    """transformers' mask hook: no dense mask, only the 2-D padding mask (B, T)."""
    mask = kwargs.get("attention_mask")
    return None if mask is None else mask[:, -kv_length:]


def _register() -> None:
    # These modules take seconds to import; whoever has a model has them, whoever plans a sweep needs neither.
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _padding_mask)


@contextmanager
def attention_of(model: Any) -> Iterator[None]:
    """Run `model` with the attention function `moend`; the model's own is restored at the end, errors included."""
    before = model.config._attn_implementation
    if before == NAME:
        yield
        return
    if not getattr(model, "_supports_attention_backend", False):
        raise UserError(f"{type(model).__name__} does not go through transformers' attention interface")
    _register()
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
