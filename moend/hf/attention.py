"""The attention function `moend`: the one place where a model's attention meets our cache.

transformers looks the function up by the name in `config._attn_implementation`. Registered with it is a mask function.
transformers asks it for a dense mask; it returns what the mask would say (`Visible`), so no dense mask is ever built.
Whatever the function does not understand it refuses by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
SINK_WIDTH = 8  # channels that the fused path adds for sinks: kernels want widths that are multiples of 8

# Keywords that models hand to every attention function and that do not change what SDPA would compute.
INERT = frozenset(
    {
        "cache",
        "cache_position",
        "is_causal",
        "layer_type",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


@dataclass(frozen=True)
class AttentionRule:
    """What an attention call asks of a layer, besides being causal."""

    scaling: float  # what q . k is multiplied with
    window: int | None = None  # newest positions that a query sees, itself included (None: all)
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    sinks: Tensor | None = None  # (H_q,) a learned logit per query head that takes its share of each softmax
    chunk: int | None = None  # a query sees its own chunk of so many positions only (None: all)

    @property
    def reach(self) -> int | None:
        """The most entries that a query sees, itself included; None: no bound."""
        bounds = [x for x in (self.window, self.chunk) if x is not None]
        return min(bounds) if bounds else None

    @property
    def bare(self) -> bool:
        """Whether there is nothing but scaled products and a softmax over all that came before."""
        return self.reach is None and self.softcap is None and self.sinks is None

    def oldest(self, position: int) -> int:
        """The first position that a query at `position` sees."""
        first = 0 if self.window is None else max(position - self.window + 1, 0)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)

    def seen_by(self, positions: Tensor, now: int) -> Tensor:
        """How many of the queries before `now` saw the entries at these positions, those at them included."""
        last = torch.full_like(positions, now)
        if self.window is not None:
            last = last.minimum(positions + self.window)
        if self.chunk is not None:
            last = last.minimum((positions // self.chunk + 1) * self.chunk)
        return last - positions

    def unseen(self, queries: Tensor, positions: Tensor) -> Tensor:
        """What queries at positions (..., q) do not see of entries at positions (..., n): (..., q, n) bool."""
        asked, at = queries[..., :, None], positions[..., None, :]
        gone = at > asked
        if self.window is not None:
            gone = gone | (asked - at >= self.window)
        if self.chunk is not None:
            gone = gone | (at < asked - asked % self.chunk)
        return gone

    def cap(self, logits: Tensor) -> Tensor:
        """Logits after the soft cap, in place where there is one."""
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def plain(self, what: str) -> None:
        """UserError where a layer caps its logits, has sinks or chunks: for calculations that know only windows."""
        odd = [n for n in ("softcap", "sinks", "chunk") if getattr(self, n) is not None]
        if odd:
            raise UserError(f"{what} does not support attention with {' and '.join(odd)}")


@dataclass(frozen=True)
class Visible:
    """What a layer's mask says: queries see what came before them, and here is how far back, and who is padding."""

    padding: Tensor | None = None  # (B, T) bool, False at padding; None: no padding
    window: int | None = None  # as in AttentionRule
    chunk: int | None = None  # as in AttentionRule


class Attends(Protocol):
    """A cache layer that computes attention itself (`moend.hf.cache_layers`)."""

    def attend(self, query: Tensor, rule: AttentionRule) -> Tensor:
        """query (B, H_q, q, d) -> output (B, H_q, q, d)."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visible | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query (B, H_q, q, d), key and value (B, H_kv, T, d) as `update()` returned them -> (B, q, H_q, d).

    attention_mask is what `_mask` made; None where a layer is called on its own, then `sliding_window` holds. A cache
    layer that marked its keys computes with what it holds; unmarked keys are attended to as they are. UserError for
    any other keyword, for masks that a model built itself, and for keys or values that it changed after the cache.
    """
    name = type(module).__name__
    if dropout:
        raise UserError("moend's attention is for inference: call model.eval() first")
    if kwargs.get("is_causal") is False:
        raise UserError(f"{name} attends in both directions, which moend does not support")
    if odd := sorted(k for k, v in kwargs.items() if k not in INERT and v is not None and v is not False):
        raise UserError(f"{name} uses '{odd[0]}' in its attention, which moend does not support")
    layer: Attends | None = getattr(key, "moend_layer", None)
    if getattr(value, "moend_layer", None) is not layer:
        raise UserError(
            f"{name} changes keys or values between its cache and its attention, which moend does not support"
        )
    if attention_mask is None:
        if getattr(getattr(module, "config", None), "attention_chunk_size", None) is not None:
            raise UserError(f"{name} was called without a mask, which alone says where its chunks begin")
        attention_mask = Visible(window=sliding_window)
    if not isinstance(attention_mask, Visible):
        raise UserError(f"{name} builds its own attention mask, which moend does not support")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    rule = AttentionRule(scale, attention_mask.window, softcap, s_aux, attention_mask.chunk)
    if layer is None:
        out = causal(query, key, value, attention_mask.padding, rule)
    else:
        out = layer.attend(query, rule)
    return out.transpose(1, 2).contiguous(), None


def causal(query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, rule: AttentionRule) -> Tensor:
    """Causal attention of the last q of T tokens: (B, H_q, q, d_v). Memory grows with q + T, never q x T per head.

    query (B, H_q, q, d), key (B, H_kv, T, d), value (B, H_kv, T, d_v), padding (B, T) False at left padding.
    """
    q, t = query.shape[2], key.shape[2]
    if padding is not None and bool(padding.all()):
        padding = None
    rule = _within(rule, t)
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if rule.softcap is None and (query.device.type != "cpu" or q in (1, t) or learning):
        return _fused(query, key, value, padding, rule)
    if learning:
        raise UserError("moend computes no gradients through attention with a soft cap")
    if rule.softcap is None and padding is None and rule.reach is None and value.shape == key.shape:
        return _in_two(query, key, value, rule)
    return _blocks(query, key, value, padding, rule, accumulated=False)[0]


def _within(rule: AttentionRule, t: int) -> AttentionRule:
    """The rule for t tokens: a window or chunk that holds all of them is none."""
    window = None if rule.window is not None and rule.window >= t else rule.window
    chunk = None if rule.chunk is not None and rule.chunk >= t else rule.chunk
    return replace(rule, window=window, chunk=chunk)


def _in_two(query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
    """`causal` on a CPU: over the tokens before these queries, which all see, and over the queries' own.

    With the logarithms l of both softmax sums the whole is sigmoid(l_own - l_before) of the one and the rest of the
    other. torch's fused attention with a mask would compute what the mask hides. Sinks take sigmoid(sink - l) of it.
    """
    group, before = query.shape[1] // key.shape[1], key.shape[2] - query.shape[2]
    if group > 1:
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own, own_sum = flash(query, key[:, :, before:], value[:, :, before:], is_causal=True, scale=rule.scaling)
    old, old_sum = flash(query, key[:, :, :before], value[:, :, :before], is_causal=False, scale=rule.scaling)
    out = torch.lerp(old.float(), own.float(), torch.sigmoid(own_sum - old_sum)[..., None])
    if rule.sinks is not None:
        out *= torch.sigmoid(torch.logaddexp(own_sum, old_sum) - rule.sinks.float()[:, None])[..., None]
    return out.to(query.dtype)


def _fused(query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, rule: AttentionRule) -> Tensor:
    """`causal` by torch's fused attention, for rules without a soft cap.

    A sink is one more key, before all others: its value is 0, and further channels of query and key make its logit.
    """
    q, t = query.shape[2], key.shape[2]
    gqa, wide = query.shape[1] != key.shape[1], value.shape[3]
    if rule.sinks is None and padding is None and rule.reach is None and (q == t or q == 1):
        return F.scaled_dot_product_attention(query, key, value, is_causal=q > 1, scale=rule.scaling, enable_gqa=gqa)
    if rule.sinks is not None:
        logit = (rule.sinks / rule.scaling).to(query.dtype)[:, None, None].expand(*query.shape[:3], 1)
        query = torch.cat([query, logit, query.new_zeros(*query.shape[:3], SINK_WIDTH - 1)], dim=-1)
        key = F.pad(key, (0, SINK_WIDTH, 1, 0))
        key[:, :, 0, -SINK_WIDTH] = 1
        value = F.pad(value, (0, SINK_WIDTH, 1, 0))
    at, out = torch.arange(t, device=query.device), []
    for start in range(0, q, QUERY_BLOCK):
        part = query[:, :, start : start + QUERY_BLOCK]
        me = torch.arange(start, start + part.shape[2], device=query.device) + (t - q)
        mask = ~_hidden(me, at, padding, rule)
        if padding is not None:
            # a padding query sees itself: its output is never used, but must not be NaN
            mask = (mask & padding.bool()[:, None, None, :]) | (at == me[:, None])
        if rule.sinks is not None:
            mask = F.pad(mask, (1, 0), value=True)
        out.append(F.scaled_dot_product_attention(part, key, value, attn_mask=mask, scale=rule.scaling, enable_gqa=gqa))
    return (torch.cat(out, dim=2) if len(out) > 1 else out[0])[..., :wide]


def _hidden(me: Tensor, at: Tensor, padding: Tensor | None, rule: AttentionRule) -> Tensor:
    """What queries in columns me (q,) do not see of columns at (n,): (1 or B, 1, q, n) bool. Padding is not hidden."""
    gone = at > me[:, None]
    if rule.window is not None:
        gone = gone | (me[:, None] - at >= rule.window)
    if rule.chunk is None:
        return gone[None, None]
    left = at.new_zeros(1) if padding is None else (~padding.bool()).sum(1)  # chunks count from the first real token
    first = (me - left[:, None]).div(rule.chunk, rounding_mode="floor") * rule.chunk + left[:, None]  # (B, q)
    return (gone | (at < first[..., None]))[:, None]


def accumulated_attention(query: Tensor, key: Tensor, padding: Tensor | None, rule: AttentionRule) -> Tensor:
    """What each of T entries receives from the last q of T tokens: (B, H_kv, T) float32 (H2O, section 3).

    The sum of softmax(q . k) over these queries and the query heads of a KV head's group; query (B, H_q, q, d), key
    (B, H_kv, T, d). Padding queries count for nothing, and what sinks receive is nobody's. Memory grows with T.
    """
    return _blocks(query, key, None, padding, rule, accumulated=True)[1]


def causal_and_accumulated(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    """`causal` and `accumulated_attention`; on a CPU the weights are written out once for both."""
    if query.device.type == "cpu":
        return _blocks(query, key, value, padding, rule, accumulated=True)
    return causal(query, key, value, padding, rule), accumulated_attention(query, key, padding, rule)


def _blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    padding: Tensor | None,
    rule: AttentionRule,
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
    grouped = (query.to(wide) * rule.scaling).unflatten(1, (heads, group)).flatten(0, 1)  # (B * H, G, q, d)
    turned = key.to(wide).mT.contiguous().flatten(0, 1)  # (B * H, d, T)
    values = None if value is None else value.flatten(0, 1)
    out = query.new_empty(0 if value is None else (rows, group, q, value.shape[3]))
    total = key.new_zeros(rows, 1, t if accumulated else 0, dtype=torch.float32)
    padding = None if padding is None or bool(padding.all()) else padding.bool()
    rule = _within(rule, t)
    sinks = None if rule.sinks is None else rule.sinks.float().view(heads, group).repeat(batch, 1)[..., None, None]
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
        first = 0  # and those before what its first one sees
        if rule.reach is not None:
            first = max(seen - width - rule.reach + 1, 0)
        me, there = at[seen - width : seen], at[first:seen]
        hidden = _hidden(me, there, padding, rule)[:, 0]  # (1 or B, width, seen - first)
        for begin in range(0, rows, span):
            mine = slice(begin, min(begin + span, rows))
            n = mine.stop - begin
            shape, size = (n, group * width, seen - first), n * group * width * (seen - first)
            logits, shares = all_logits[:size].view(shape), all_shares[:size].view(shape)
            asking = grouped[mine, :, start : start + width].flatten(1, 2)
            torch.bmm(asking, turned[mine, :, first:seen], out=logits)
            rule.cap(logits)
            counts = None
            if padding is not None:  # a padding query sees itself, so that no softmax is empty, and is not counted
                of = at.new_tensor(range(begin, mine.stop)) // heads  # each row's sequence
                real = padding[of]  # (n, T)
                gone = hidden[of if len(hidden) > 1 else 0] | (~real[:, None, first:seen] & (there != me[:, None]))
                logits.view(n, group, width, -1).masked_fill_(gone[:, None], -torch.inf)
                counts = real[:, None, seen - width : seen].expand(-1, group, -1)
            elif rule.reach is not None:
                logits.view(n, group, width, -1).masked_fill_(hidden, -torch.inf)
            else:
                logits.view(n, group, width, -1)[..., -width:].masked_fill_(hidden[..., -width:], -torch.inf)
            rest = None  # what sinks leave to the entries; logits and shares may be the same memory
            if sinks is not None:
                rest = torch.sigmoid(torch.logsumexp(logits.float(), dim=-1).view(n, group, width, 1) - sinks[mine])
            torch.softmax(logits, dim=-1, dtype=torch.float32, out=shares)
            if rest is not None:
                shares.view(n, group, width, -1).mul_(rest)
            if accumulated:
                ones = shares.new_ones(n, 1, group * width) if counts is None else counts.reshape(n, 1, -1).float()
                total[mine, :, first:seen].baddbmm_(ones, shares)
            if values is not None:
                mixed = torch.bmm(shares.to(values.dtype), values[mine, first:seen])
                out[mine, :, start : start + width] = mixed.view(n, group, width, -1)
    if values is not None:
        out = out.view(batch, heads * group, q, -1)
    return out, total.view(batch, heads, total.shape[2])


def _mask(batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any) -> Visible:
    """transformers' mask hook: no dense mask, only what it would say. UserError for masks that say anything else."""
    window: int | None = None
    chunk: int | None = None
    for part in _parts(kwargs["mask_function"]):
        kind, held = _function(part)
        if kind == "sliding_window_overlay":
            window = int(held["sliding_window"])
        elif kind == "chunked_overlay":
            chunk = int(held["chunk_size"])
        elif kind != "causal_mask_function":
            raise UserError(f"the model's attention mask is more than causal ({kind}), which moend does not support")
    mask: Tensor | None = kwargs.get("attention_mask")
    return Visible(None if mask is None else mask[:, -kv_length:].bool(), window, chunk)


def _function(part: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """A mask function of transformers: what made it, and what it holds."""
    code, cells = part.__code__, part.__closure__ or ()
    return part.__qualname__.split(".")[0], dict(zip(code.co_freevars, (c.cell_contents for c in cells), strict=True))


def _parts(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The conditions that must all hold, without those that are never met."""
    kind, held = _function(function)
    if kind == "and_masks":
        for part in held["mask_functions"]:
            yield from _parts(part)
    elif kind == "or_masks":  # blocks in which tokens see each other (images): none of them where all ids are -1
        met = [f for f in held["mask_functions"] if not _nowhere(f)]
        if len(met) != 1:
            yield function
        else:
            yield from _parts(met[0])
    else:
        yield function


def _nowhere(function: Callable[..., Any]) -> bool:
    kind, held = _function(function)
    return kind == "blockwise_overlay" and bool((held["block_sequence_ids"] < 0).all())


def _register() -> None:
    # These modules take seconds to import; whoever has a model has them, whoever plans a sweep needs neither.
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)


def runs(config: Any) -> str:
    """The name of the attention function that a model's text part runs."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return str(text._attn_implementation)


@contextmanager
def attention_of(model: Any) -> Iterator[None]:
    """Run `model` with the attention function `moend`; the model's own is restored at the end, errors included."""
    before = runs(model.config)
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
