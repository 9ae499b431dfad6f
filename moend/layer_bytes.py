"""What one layer of a cache holds, to the byte: packed codes, scales, the residual window, positions.

`Storage` says how entries are held, `layer_bytes` what they take, the others the most they take while decoding. This
is what `moend.cache` really holds: a test compares predicted bytes with held ones.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from moend.errors import UserError

BITS = (16, 8, 4, 2)
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Storage:
    """How one layer's entries are held.

    The newest `window` entries stay at 16 bit when a layer is compressed: the residual window. While decoding it grows
    to window + group - 1 entries; the next token packs its oldest `group`. A side (K or V) at 16 bit has no window, as
    all its entries are held as they are. Per KV head, `moend.cache` also holds 2 float16 per K scale and V scale: step
    and zero point.
    """

    k_bits: int = 16  # bits of a number of K: 16, 8, 4 or 2
    v_bits: int = 16  # bits of a number of V: 16, 8, 4 or 2
    group: int = 64  # tokens that share the K scale of a channel
    window: int = 64  # tokens of the residual window just after compression
    positions: Literal["none", "shared", "per_head"] = "none"  # int32: none stored, one per token, or one per KV head
    accumulated: bool = False  # whether each entry has its accumulated attention beside it, a float32
    queries: int = 0  # 16-bit query vectors held per KV head, the last ones of its group, for scorers that ask
    channels: int = 64  # most channels that share the V scale of a token (`v_group`)
    # K scales per KV head of a quantised layer that evicts while decoding (`evicting`); 0: one per group. Such a layer
    # also holds an int32 per scale, the entries left in its group, and a uint8 per channel, the archive's growth.
    scales: int = 0

    def __post_init__(self) -> None:
        if self.k_bits not in BITS or self.v_bits not in BITS:
            raise UserError(f"bits must be one of {BITS}, got k_bits={self.k_bits}, v_bits={self.v_bits}")
        if self.group < 1 or self.window < 0:
            raise UserError(f"group must be >= 1 and window >= 0, got {self.group} and {self.window}")
        if self.channels < 1 or self.queries < 0:
            raise UserError(f"channels must be >= 1 and queries >= 0, got {self.channels} and {self.queries}")

    @property
    def quantised(self) -> bool:
        """True where K or V has fewer than 16 bits."""
        return self.k_bits < 16 or self.v_bits < 16

    @property
    def whole(self) -> Storage:
        """How a layer that never evicts is held: nothing is kept for choosing."""
        return replace(self, positions="none", accumulated=False, queries=0, scales=0)

    def evicting(self, cap: int) -> Storage:
        """How a layer is held that evicts while decoding whatever passes `cap`.

        Evictions leave groups of K half empty: there are twice as many scales as full groups would need, so their
        number follows from the cap and not from what survives.
        """
        if not self.quantised:
            return self
        return replace(self, scales=max(2 * -(-cap // self.group), 2) if self.k_bits < 16 else 1)


def v_group(head_dim: int, channels: int = 64) -> int:
    """Channels that share one V scale: `channels`, or the largest divisor of head_dim below."""
    return next(g for g in range(min(channels, head_dim), 0, -1) if head_dim % g == 0)


def layer_bytes(
    n: int | Ints, storage: Storage, kv_heads: int, head_dim: int, window_len: int | Ints | None = None
) -> Ints:
    """Bytes one layer holds for n entries per KV head, of which the newest `window_len` are at 16 bit.

    window_len: length of the residual window; None: min(n, window), as just after compression. It broadcasts with n.
    """
    n = np.asarray(n, dtype=np.int64)
    if not storage.quantised:
        t = n
    else:
        t = np.minimum(n, storage.window) if window_len is None else np.asarray(window_len, dtype=np.int64)
    m = n - t
    if storage.k_bits < 16:
        scales = storage.scales or -(-m // storage.group)
        k = m * head_dim * storage.k_bits // 8 + scales * head_dim * 4 + t * head_dim * 2
    else:
        k = n * head_dim * 2
    if storage.v_bits < 16:
        scales = head_dim // v_group(head_dim, storage.channels)
        v = m * head_dim * storage.v_bits // 8 + m * scales * 4 + t * head_dim * 2
    else:
        v = n * head_dim * 2
    groups = 4 * storage.scales + head_dim * (storage.scales > 0 and storage.k_bits < 16)
    beside = {"none": 0, "shared": 4, "per_head": 4 * kv_heads}[storage.positions] + 4 * kv_heads * storage.accumulated
    fixed = storage.queries * head_dim * 2 + groups
    return np.asarray(kv_heads * (k + v + fixed) + beside * n, dtype=np.int64)


def peak_layer_bytes(
    cap: int,
    reserve: int,
    storage: Storage,
    kv_heads: int,
    head_dim: int,
    *,
    start: int | None = None,
    new: int | None = None,
) -> int:
    """The most bytes a layer holds while it takes in `new` tokens and evicts `reserve` entries when it holds cap.

    start: entries just after compression; None: cap - reserve. new: None: as many as it takes to see every state
    (`storage.scales` set), or until it holds cap (a layer that never evicts).
    """
    start = cap - reserve if start is None else start
    until = cap - start if new is None and not storage.scales else new
    n, window_len = _course(start, cap, reserve, storage.window, storage.group, until, storage.scales > 0)
    return int(layer_bytes(n, storage, kv_heads, head_dim, window_len=window_len).max())


def sliding(window: int) -> tuple[int, int]:
    """Cap and reserve of a layer that holds its window while decoding: it lets go of an eighth of it at a time."""
    spare = max(window // 8, 8)
    return window + spare, spare


def visible(tokens: int, window: int | None) -> int:
    """How many of `tokens` entries the next query sees in a layer with this window; the newest one always stays."""
    return tokens if window is None else max(min(tokens, window - 1), min(tokens, 1))


def sliding_bytes(
    n: int, new: int, window: int, storage: Storage, kv_heads: int, head_dim: int, after: Storage
) -> tuple[int, int]:
    """Bytes of a sliding layer that holds n entries, and the most until `new` more have come.

    storage: how it is held up to its first eviction, after: from then on.
    """
    cap, reserve = sliding(window)
    storage, after = storage.evicting(cap), after.evicting(cap)
    new = min(new, cap - n + 2 * reserve * storage.group)  # what comes later repeats itself
    entries, window_len = _course(n, cap, reserve, storage.window, storage.group, new, True)
    held = layer_bytes(entries, storage, kv_heads, head_dim, window_len=window_len)
    later = layer_bytes(entries, after, kv_heads, head_dim, window_len=window_len)
    held = np.where(np.arange(len(entries)) > max(cap - n, 0), later, held)
    return int(held[0]), int(held.max())


@functools.lru_cache(maxsize=65536)
def _course(
    start: int, cap: int, reserve: int, window: int, group: int, new: int | None, evicts: bool
) -> tuple[Ints, Ints]:
    """Entries per KV head and those of them at 16 bit, at most, after compression and after each new token."""
    drop = max(min(max(reserve, 1), cap - 1), 1)
    grows = max(cap - start, 0)
    free = cap - drop >= window + group  # no eviction shortens the residual window
    if new is None:
        new = grows + drop * group * (1 if free else 2)
    if not evicts or reserve == 0:
        new = min(new, grows)
    at = np.arange(new + 1)
    n = np.where(at <= grows, start + at, cap - drop + 1 + (at - grows - 1) % drop)
    if free or new <= grows:
        grown = min(start, window) + at
        return n, grown - np.maximum(grown - window, 0) // group * group
    lengths, t = [], min(start, window)
    for i, entries in enumerate(n.tolist()):
        if i:
            t = min(t, entries - 1) + 1
            t -= group if t >= window + group else 0
        lengths.append(t)
    return n, np.array(lengths)


@functools.lru_cache(maxsize=4096)
def overshooting_layer_bytes(
    cap: int, beta: int, storage: Storage, kv_heads: int, head_dim: int, *, start: int, new: int
) -> int:
    """The most bytes a layer holds while it takes in `new` tokens and every `beta` of them is cut back to cap.

    start: entries just after compression, at most cap.
    """
    at = np.arange(new + 1)
    first = -(-(cap - start + 1) // beta) * beta  # the token of the first cut
    n = np.where(at < first, start + at, cap + (at - first) % beta)
    tail = [min(start, storage.window)]
    for entries in n[1:].tolist():
        t = min(tail[-1] + 1, entries)
        tail.append(t - storage.group if t >= storage.window + storage.group else t)
    return int(layer_bytes(n, storage, kv_heads, head_dim, window_len=np.array(tail)).max())
