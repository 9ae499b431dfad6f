"""Bytes that a cache is predicted to hold, from what its layers are to hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moend.budget import Arch, eq1_bytes
from moend.cache import LayerSpec
from moend.layer_bytes import layer_bytes, overshooting_layer_bytes, peak_layer_bytes, sliding_bytes, visible
from moend.plan import LayerPlan


def held(specs: Sequence[LayerSpec], arch: Arch, tokens: int, new: int) -> tuple[int, int]:
    """Bytes after a prompt of `tokens`, and the most until `new` more have come."""
    after = peak = 0
    for spec, window in zip(specs, arch.each_window, strict=True):
        for part in spec.heads or (spec,):
            heads = 1 if spec.heads else arch.kv_heads
            now, most = _part(part, heads, arch.head_dim, None if spec.heads else window, tokens, new)
            after, peak = after + now, peak + most
    return after, peak


def _part(spec: LayerSpec, heads: int, dim: int, window: int | None, tokens: int, new: int) -> tuple[int, int]:
    """`held` of a layer of this many KV heads, or of one KV head by itself, which has no window."""
    schedule, seen = spec.schedule, visible(tokens, window)
    n = min(spec.tokens, seen)
    stored = spec.storage.whole if spec.tokens >= tokens and not spec.evicts else spec.storage
    now = replace(stored, positions="none") if n >= tokens else stored
    if n < tokens and spec.tokens >= seen:  # nothing was chosen: what left the window went
        now = replace(stored, positions="shared")
    if window is not None and not spec.evicts and spec.slides:
        later = now if now.positions != "none" else replace(now, positions="shared")
        return sliding_bytes(n, new, window, now, heads, dim, later)
    after = int(layer_bytes(n, now, heads, dim))
    if schedule.cap is None:
        most = peak_layer_bytes(n + new, new, now, heads, dim)
    elif schedule.kind == "strict":
        most = peak_layer_bytes(schedule.cap, schedule.reserve, stored, heads, dim, start=n, new=new)
    else:
        most = overshooting_layer_bytes(schedule.cap, schedule.beta, stored, heads, dim, start=n, new=new)
    return after, max(after, most)


def codes(layers: Sequence[LayerPlan], specs: Sequence[LayerSpec], arch: Arch, tokens: int) -> int:
    """Bytes of codes alone after a prompt of `tokens`, by MoE-nD eq. (1)."""
    total = 0
    for layer, spec, window in zip(layers, specs, arch.each_window, strict=True):
        parts = zip(spec.heads or (spec,), layer.heads or (layer,), strict=True)
        heads, seen = (1, tokens) if spec.heads else (arch.kv_heads, visible(tokens, window))
        total += sum(eq1_bytes(min(s.tokens, seen), heads, arch.head_dim, x.k_bits, x.v_bits) for s, x in parts)
    return total
