"""The attention function `moend`: the one place where a model's attention meets our cache.

transformers looks the function up by the name in `config._attn_implementation`. Registered with it is a mask function
that hands the 2-D padding mask through, so no dense mask is ever built: what a query may see follows from positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moend.errors import UserError

NAME = "moend"
QUERY_BLOCK = 512  # queries that are masked at a time: bounds the mask to QUERY_BLOCK x T


class Attends(Protocol):
    """A cache layer that computes attention itself."""

    def attend(self, query: Tensor, scaling: float, window: int | None) -> Tensor:
        """query (B, H_q, q, d) -> output (B, H_q, q, d)."""


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
        out = layer.attend(query, scale, sliding_window)
    else:
        if (capture := getattr(key, "capture", None)) is not None:
            capture.observe(query)
        out = causal(query, key, value, attention_mask, scale, sliding_window)
    return out.transpose(1, 2).contiguous(), None


def causal(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, scaling: float, window: int | None
) -> Tensor:
    """Causal attention of the last q of T tokens: (B, H_q, q, d). Memory grows with q + T, never q x T per head."""
    q, t = query.shape[2], key.shape[2]
    gqa = query.shape[1] != key.shape[1]
    if padding is not None and bool(padding.all()):
        padding = None
    window = None if window is not None and window >= t else window
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


def _padding_mask(batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any) -> Tensor | None:
    """transformers' mask hook: no dense mask, only the 2-D padding mask (B, T)."""
    mask = kwargs.get("attention_mask")
    return None if mask is None else mask[:, -kv_length:]


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
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
