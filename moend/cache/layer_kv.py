"""One sequence in one layer, at rest: exactly the entries a method kept, and their positions.

A LayerKV never changes. What happens when more tokens arrive is `moend.cache.decode`'s business, where rows lie
side by side; there and back they stay the same entries, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from moend.budget import Storage
from moend.cache.packing import Packed, quantise_k, quantise_v
from moend.errors import UserError
from moend.hf.rope import Rotary


@dataclass(frozen=True)
class Reindex:
    """StreamingLLM's positions: an entry counts as standing where it lies in the cache, and so does the query.

    What is kept are up to `sinks` first tokens and the newest ones. The newest keep their distance to the query, so
    only the sinks move: they stand as many positions closer as tokens were dropped. Keys stay as they are; it is the
    query that is turned for them, so nothing is rounded twice.
    """

    sinks: int
    rotary: Rotary


@dataclass(frozen=True)
class Schedule:
    """When a row evicts while decoding.

    cap: entries per head of the plan (None: prompt only, the row grows by every new token).
    overshoot "counted": the row never holds more than cap; it makes room for `reserve` tokens at a time.
    overshoot "paper": every `beta` new tokens the row is cut back to cap (MoE-nD section 4, step-count trigger).
    reindex: positions count as in StreamingLLM; for 16-bit rows that keep sinks and the newest.
    """

    cap: int | None = None
    reserve: int = 0
    beta: int = 128
    overshoot: Literal["counted", "paper"] = "counted"
    reindex: Reindex | None = None


PROMPT_ONLY = Schedule()

# (keys (H, n, d), values, positions (n,) or (H, n), next position, entries to keep, observed (..., n) by name,
# last queries (H_q, w, d) or None) -> kept indices (1 or H, k), sorted
Chooser = Callable[[Tensor, Tensor, Tensor, int, int, Mapping[str, Tensor], Tensor | None], Tensor]


class LayerKV:
    """Entries of one sequence in one layer: packed entries (older) followed by a residual window at 16 bit (newest).

    k_tail, v_tail (H, t, d) of KV heads H and dimension d; a side (K or V) at 16 bit is all tail. positions (n,) or
    (H, n) int32, None where they are 0 ... n-1. seen: tokens fed so far, steps: those since the last eviction.
    accumulated (H, n) float32: the attention that entries received so far, where the scorer goes on summing it.
    queries (H, G, w, d): the last w queries of each head's group, right-aligned, zero before the first token, where the
    scorer goes by them. A layer whose heads hold different numbers of entries is a tuple of rows, each of a few
    neighbouring heads.

    A quantised row that evicts while decoding (`storage.scales`) is held flat, as its heads may have different numbers
    of packed entries: codes, V scales and what is at 16 bit (entries, ...) of all heads, one after the other. sizes (H,
    scales) int32 says how many packed entries of each K group are left. widened (H, d) uint8: 0 where no archive of old
    groups exists, else one more than how often its range grew (`moend.cache.decode.groups`). tail: the most entries at
    16 bit that a head may hold; what heads with fewer leave free is `spare`, so that bytes do not depend on which
    entries survive.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        positions: Tensor | None,
        storage: Storage,
        *,
        seen: int,
        dtype: torch.dtype,
        schedule: Schedule = PROMPT_ONLY,
        choose: Chooser | None = None,
        accumulated: Tensor | None = None,
        queries: Tensor | None = None,
    ):
        """keys, values (H, n, d): all but the newest `storage.window` are packed where fewer than 16 bits."""
        if schedule.cap is not None and not storage.scales:
            storage = storage.evicting(schedule.cap)
        n, heads = keys.shape[1], keys.shape[0]
        old = max(n - storage.window, 0) if storage.quantised else 0
        k_cut = old if storage.k_bits < 16 else 0
        v_cut = old if storage.v_bits < 16 else 0
        k = quantise_k(keys[:, :k_cut], storage.k_bits, storage.group) if k_cut else None
        v = quantise_v(values[:, :v_cut], storage.v_bits, storage.channels) if v_cut else None
        # copies, so that no row keeps the whole prefill alive through a view
        k_tail = keys[:, k_cut:].to(dtype, copy=True).contiguous()
        v_tail = values[:, v_cut:].to(dtype, copy=True).contiguous()
        sizes = widened = None
        if storage.scales:
            lengths = [old]
            if storage.k_bits < 16:
                lengths = [min(storage.group, old - at) for at in range(0, old, storage.group)]
                if len(lengths) > storage.scales:
                    raise ValueError(f"{old} packed entries need {len(lengths)} scales, there are {storage.scales}")
                widened = keys.new_zeros(heads, keys.shape[2], dtype=torch.uint8)
                k = k or quantise_k(keys[:, :0], storage.k_bits, storage.group)
                rows = F.pad(k.step, (0, 0, 0, storage.scales - k.step.shape[1]))
                zeros = F.pad(k.zero, (0, 0, 0, storage.scales - k.zero.shape[1]))
                k, k_tail = replace(k, codes=k.codes.flatten(0, 1), step=rows, zero=zeros), k_tail.flatten(0, 1)
            if storage.v_bits < 16:
                v = v or quantise_v(values[:, :0], storage.v_bits, storage.channels)
                codes, step, zero = (x.flatten(0, 1) for x in v.tensors())
                v = replace(v, codes=codes, step=step, zero=zero)
                v_tail = v_tail.flatten(0, 1)
            lengths += [0] * (storage.scales - len(lengths))
            sizes = torch.tensor(lengths, dtype=torch.int32, device=keys.device).repeat(heads, 1)
        self._set(
            (k,) if k is not None else (),
            v,
            k_tail,
            v_tail,
            None if positions is None else positions.to(torch.int32),
            storage,
            seen=seen,
            schedule=schedule,
            choose=choose,
            accumulated=None if accumulated is None else accumulated.clone(),
            queries=None if queries is None else queries.to(dtype, copy=True),
            sizes=sizes,
            widened=widened,
            tail=n - old,
        )

    @classmethod
    def of(cls, *held: Any, **rest: Any) -> LayerKV:
        """A row of what is packed already: k_packed, v_packed, k_tail, v_tail, positions, storage; the rest by name."""
        row = object.__new__(cls)
        row._set(*held, **rest)
        return row

    def _set(
        self,
        k_packed: tuple[Packed, ...],
        v_packed: Packed | None,
        k_tail: Tensor,
        v_tail: Tensor,
        positions: Tensor | None,
        storage: Storage,
        *,
        seen: int,
        schedule: Schedule,
        choose: Chooser | None,
        steps: int = 0,
        accumulated: Tensor | None = None,
        queries: Tensor | None = None,
        sizes: Tensor | None = None,
        widened: Tensor | None = None,
        tail: int = 0,
    ) -> None:
        self.k_packed, self.v_packed, self.k_tail, self.v_tail = k_packed, v_packed, k_tail, v_tail
        self.positions, self.storage, self.schedule, self.choose = positions, storage, schedule, choose
        self.seen, self.steps, self.dtype = seen, steps, k_tail.dtype
        self.accumulated, self.queries, self.sizes, self.widened = accumulated, queries, sizes, widened
        self.spare = k_tail.new_empty(0, dtype=torch.uint8)
        if sizes is None:
            self.heads = k_tail.shape[0]  # KV heads
            self.n = k_tail.shape[1] + sum(p.codes.shape[-2] for p in k_packed)  # entries of each
            self.tail = min(k_tail.shape[1], v_tail.shape[1])  # the newest of them, at 16 bit on both sides
        else:
            self.heads, self.tail = len(sizes), tail
            packed, shape = int(sizes.sum()), k_tail.shape if storage.k_bits < 16 else v_tail.shape
            self.n = (packed + shape[0]) // self.heads
            if free := self.heads * tail - shape[0]:
                # in bytes: an entry at 16 bit on the sides that pack, less one that is packed
                sides = [(k_packed[0], k_tail)] if storage.k_bits < 16 else []
                sides += [(v_packed, v_tail)] if v_packed is not None else []
                self.spare = k_tail.new_empty(free * sum(_gain(*s) for s in sides), dtype=torch.uint8)
        self.bytes = self.nbytes()

    def nbytes(self) -> int:
        """Bytes held: the sum of the sizes of the storages, not of the views."""
        storages = [t.untyped_storage() for t in self.tensors() if t.numel()]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    @property
    def bytes_per_token(self) -> int:
        """What a new token adds before anything is packed: a 16-bit key and value per head, its positions, its
        accumulated attention.
        """
        positions = 0 if self.positions is None else 4 * (self.heads if self.positions.ndim == 2 else 1)
        accumulated = 0 if self.accumulated is None else 4 * self.heads
        return 2 * self.heads * self.k_tail.shape[-1] * self.dtype.itemsize + positions + accumulated

    def tensors(self) -> list[Tensor]:
        """Every tensor this row holds; their storages are its memory."""
        packed = [*self.k_packed, *([self.v_packed] if self.v_packed else [])]
        held = [self.k_tail, self.v_tail, *(t for p in packed for t in p.tensors())]
        beside = self.positions, self.accumulated, self.queries, self.sizes, self.widened
        return [*held, self.spare, *(t for t in beside if t is not None)]

    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values (H, n, d) in `dtype`, in order of position; dequantised where packed."""
        if self.sizes is not None:
            return self._dense(dtype)
        k = [p.dequantise(dtype) for p in self.k_packed] + [self.k_tail.to(dtype)]
        v = ([self.v_packed.dequantise(dtype)] if self.v_packed else []) + [self.v_tail.to(dtype)]
        return (torch.cat(k, 1) if len(k) > 1 else k[0]), (torch.cat(v, 1) if len(v) > 1 else v[0])

    def _dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`dense` of a row that is held flat."""
        assert self.sizes is not None
        device, sizes = self.k_tail.device, self.sizes.long()
        old = torch.arange(self.n, device=device) < sizes.sum(1)[:, None]  # (H, n): the packed entries come first

        def whole(packed: Tensor, window: Tensor) -> Tensor:
            out = packed.new_empty(*old.shape, packed.shape[-1])
            out[old], out[~old] = packed, window.to(dtype)
            return out

        k, v = self.k_tail.to(dtype), self.v_tail.to(dtype)
        if self.storage.k_bits < 16:
            (packed,) = self.k_packed
            of = torch.arange(sizes.numel(), device=device).repeat_interleave(sizes.flatten())
            k = whole(packed.scaled(of, dtype), k)
        if self.v_packed is not None:
            v = whole(self.v_packed.dequantise(dtype), v)
        return k, v

    def true_positions(self) -> Tensor:
        """Original positions (n,) or (H, n)."""
        return torch.arange(self.n, device=self.k_tail.device) if self.positions is None else self.positions


def _gain(packed: Packed, window: Tensor) -> int:
    """Bytes that one entry of a side takes less when it is packed."""
    beside = 4 * packed.step.shape[-1] if packed.per == "token" else 0
    gain = window.shape[-1] * window.dtype.itemsize - packed.codes.shape[-1] - beside
    if gain < 0:
        raise UserError(f"V scales of {packed.group} channels each take more than packing saves: share them among more")
    return gain


def ragged(
    keys: Tensor,
    values: Tensor,
    kept: Sequence[Tensor],
    storage: Storage | Sequence[Storage],
    *,
    seen: int,
    dtype: torch.dtype,
) -> tuple[LayerKV, ...]:
    """Heads that keep different entries: a row each, of keys, values (H, n, d) at kept[h] (k_h,), ascending indices.

    storage: one for all heads, or one each, where "none" says that a head keeps all and needs no positions. They do
    not evict while decoding: a scorer sees all heads of a layer at once.
    """
    stored = [replace(storage, positions="per_head")] * len(kept) if isinstance(storage, Storage) else storage
    rows = []
    for h, (index, own) in enumerate(zip(kept, stored, strict=True)):
        whole = own.positions == "none"
        if whole and len(index) < keys.shape[1]:
            raise ValueError(f"head {h} keeps {len(index)} of {keys.shape[1]} entries: their positions are needed")
        one = slice(h, h + 1)
        positions = None if whole else index[None]
        rows.append(LayerKV(keys[one, index], values[one, index], positions, own, seen=seen, dtype=dtype))
    return tuple(rows)


def gather(keys: Tensor, values: Tensor, positions: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Entries at index (H or 1, k; 1 is shared by all heads) of keys, values (H, n, d) and positions (n,) or (H, n)."""
    where = positions if positions.ndim == 2 else positions.expand(index.shape[0], -1)
    kept = where.gather(1, index.expand(where.shape[0], -1))
    # whole vectors are copied this way, where gather would copy number by number
    at = slice(None) if index.shape[0] == 1 else torch.arange(keys.shape[0], device=keys.device)[:, None]
    of = index[0] if index.shape[0] == 1 else index
    return keys[at, of], values[at, of], kept if kept.shape[0] > 1 else kept[0]
