"""One sequence in one layer, at rest: exactly the entries a method kept, and their positions.

A LayerKV never changes. When more tokens arrive, `moend.cache.decode` lays the sequences of a layer out side by side.
The LayerKVs that it returns hold the same entries, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from moend.cache.packing import Packed, quantise_k, quantise_v
from moend.errors import UserError
from moend.hf.rope import Rotary
from moend.layer_bytes import Storage


@dataclass(frozen=True)
class Reindex:
    """StreamingLLM's positions: entry and query count as standing where they lie in the cache.

    The cache then holds up to `sinks` first tokens and the newest ones. The newest keep their distance to the query, so
    only the sinks move: by as many positions as tokens were dropped. Keys stay as they are. The query is turned for the
    sinks instead, so that nothing is rounded twice.
    """

    sinks: int  # how many first tokens are kept
    rotary: Rotary  # the model's rotary embedding


@dataclass(frozen=True)
class Schedule:
    """When a sequence evicts from a layer while decoding.

    A strict schedule never holds more than `cap` entries: it makes room for `reserve` tokens at a time. A periodic one
    cuts back to `cap` after every `beta` new tokens (MoE-nD section 4, step-count trigger).
    """

    cap: int | None = None  # entries per KV head (None: compress the prompt only, and keep every new token)
    reserve: int = 0  # tokens to make room for at a time (strict)
    beta: int = 128  # new tokens between two evictions (periodic)
    kind: Literal["strict", "periodic"] = "strict"  # never above cap, or above it for up to beta tokens
    reindex: Reindex | None = None  # StreamingLLM's positions, for 16-bit layers that keep sinks and the newest


PROMPT_ONLY = Schedule()

# (keys (H, n, d), values, positions (n,) or (H, n), next position, entries to keep, observed (..., n) by name,
# last queries (H_q, w, d) or None) -> kept indices (1 or H, k), sorted
Chooser = Callable[[Tensor, Tensor, Tensor, int, int, Mapping[str, Tensor], Tensor | None], Tensor]


class LayerKV:
    """Entries of one sequence in one layer: packed entries (older), then a residual window at 16 bit (newest).

    If KV heads hold different numbers of entries, a sequence has a tuple of LayerKVs in a layer, each of a few
    neighbouring KV heads. Here H are the KV heads, d is the head dimension, G are the query heads per KV head.

    heads, n: KV heads H, and entries of each.
    window_len: entries per KV head in the residual window; where `sizes` is set, the most that a KV head may have.
    k_packed: packed keys, oldest first; each `Packed` starts a new group. v_packed: packed values, or None.
    k_window, v_window (H, t, d): what is at 16 bit. A side at 16 bit holds all its entries here: t = n or window_len.
    positions (n,) or (H, n) int32: original positions; None where they are 0 ... n-1.
    storage: bits, groups and window. schedule, choose: when it evicts while decoding, and what picks what to keep.
    tokens_seen: tokens of the sequence so far. steps: those since the last eviction. dtype: that of 16-bit numbers.
    accumulated (H, n) float32: attention that entries received so far; None unless the scorer goes on summing it.
    queries (H, G, w, d): the last w queries, right-aligned, zero before the first token; None unless the scorer asks.
    bytes: what all of it takes.

    A quantised sequence that evicts while decoding (`storage.scales` = C) may hold different numbers of packed entries
    in each KV head. It is therefore held flat: codes, V scales and what is at 16 bit have the shape (entries, ...), one
    KV head after the other. Then also:
    sizes (H, C) int32: packed entries that each K group has left.
    widened (H, d) uint8: 0 without an archive (`moend.cache.decode.groups`), else 1 + how often its range grew.
    spare (bytes,) uint8: unused places of KV heads with fewer than window_len entries in their window. It makes bytes
    independent of which entries survive.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        positions: Tensor | None,
        storage: Storage,
        *,
        tokens_seen: int,
        dtype: torch.dtype,
        schedule: Schedule = PROMPT_ONLY,
        choose: Chooser | None = None,
        accumulated: Tensor | None = None,
        queries: Tensor | None = None,
    ):
        """Pack all but the newest `storage.window` entries, on the sides with fewer than 16 bits.

        keys, values (H, n, d) and positions (n,) or (H, n) are those of the kept entries, oldest first.
        """
        if schedule.cap is not None and not storage.scales:
            storage = storage.evicting(schedule.cap)
        n, heads = keys.shape[1], keys.shape[0]
        old = max(n - storage.window, 0) if storage.quantised else 0
        k_cut = old if storage.k_bits < 16 else 0
        v_cut = old if storage.v_bits < 16 else 0
        k = quantise_k(keys[:, :k_cut], storage.k_bits, storage.group) if k_cut else None
        v = quantise_v(values[:, :v_cut], storage.v_bits, storage.channels) if v_cut else None
        # copies: a view would keep the whole prefill alive
        k_window = keys[:, k_cut:].to(dtype, copy=True).contiguous()
        v_window = values[:, v_cut:].to(dtype, copy=True).contiguous()
        sizes = widened = None
        if storage.scales:
            lengths = [old]
            if storage.k_bits < 16:
                lengths = [min(storage.group, old - at) for at in range(0, old, storage.group)]
                if len(lengths) > storage.scales:
                    raise ValueError(f"{old} packed entries need {len(lengths)} scales, there are {storage.scales}")
                widened = keys.new_zeros(heads, keys.shape[2], dtype=torch.uint8)
                k = k or quantise_k(keys[:, :0], storage.k_bits, storage.group)
                steps = F.pad(k.step, (0, 0, 0, storage.scales - k.step.shape[1]))
                zeros = F.pad(k.zero, (0, 0, 0, storage.scales - k.zero.shape[1]))
                k, k_window = replace(k, codes=k.codes.flatten(0, 1), step=steps, zero=zeros), k_window.flatten(0, 1)
            if storage.v_bits < 16:
                v = v or quantise_v(values[:, :0], storage.v_bits, storage.channels)
                codes, step, zero = (x.flatten(0, 1) for x in v.tensors())
                v = replace(v, codes=codes, step=step, zero=zero)
                v_window = v_window.flatten(0, 1)
            lengths += [0] * (storage.scales - len(lengths))
            sizes = torch.tensor(lengths, dtype=torch.int32, device=keys.device).repeat(heads, 1)
        self._set(
            (k,) if k is not None else (),
            v,
            k_window,
            v_window,
            None if positions is None else positions.to(torch.int32),
            storage,
            tokens_seen=tokens_seen,
            schedule=schedule,
            choose=choose,
            accumulated=None if accumulated is None else accumulated.clone(),
            queries=None if queries is None else queries.to(dtype, copy=True),
            sizes=sizes,
            widened=widened,
            window_len=n - old,
        )

    @classmethod
    def of(cls, *held: Any, **rest: Any) -> LayerKV:
        """A LayerKV of entries that are packed already.

        held: k_packed, v_packed, k_window, v_window, positions, storage. rest: the other attributes, by name.
        """
        kv = object.__new__(cls)
        kv._set(*held, **rest)
        return kv

    def _set(
        self,
        k_packed: tuple[Packed, ...],
        v_packed: Packed | None,
        k_window: Tensor,
        v_window: Tensor,
        positions: Tensor | None,
        storage: Storage,
        *,
        tokens_seen: int,
        schedule: Schedule,
        choose: Chooser | None,
        steps: int = 0,
        accumulated: Tensor | None = None,
        queries: Tensor | None = None,
        sizes: Tensor | None = None,
        widened: Tensor | None = None,
        window_len: int = 0,
    ) -> None:
        self.k_packed, self.v_packed, self.k_window, self.v_window = k_packed, v_packed, k_window, v_window
        self.positions, self.storage, self.schedule, self.choose = positions, storage, schedule, choose
        self.tokens_seen, self.steps, self.dtype = tokens_seen, steps, k_window.dtype
        self.accumulated, self.queries, self.sizes, self.widened = accumulated, queries, sizes, widened
        self.spare = k_window.new_empty(0, dtype=torch.uint8)
        if sizes is None:
            self.heads = k_window.shape[0]
            self.n = k_window.shape[1] + sum(p.codes.shape[-2] for p in k_packed)
            self.window_len = min(k_window.shape[1], v_window.shape[1])
        else:
            self.heads, self.window_len = len(sizes), window_len
            packed, shape = int(sizes.sum()), k_window.shape if storage.k_bits < 16 else v_window.shape
            self.n = (packed + shape[0]) // self.heads
            if free := self.heads * window_len - shape[0]:
                # in bytes: an entry at 16 bit on the sides that pack, less one that is packed
                sides = [(k_packed[0], k_window)] if storage.k_bits < 16 else []
                sides += [(v_packed, v_window)] if v_packed is not None else []
                self.spare = k_window.new_empty(free * sum(_gain(*s) for s in sides), dtype=torch.uint8)
        self.bytes = self.nbytes()

    def nbytes(self) -> int:
        """Bytes of the memory behind all tensors; tensors that share memory count once."""
        storages = [t.untyped_storage() for t in self.tensors() if t.numel()]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    @property
    def bytes_per_token(self) -> int:
        """What a new token adds before anything is packed: a 16-bit key and value per head, its positions, its
        accumulated attention.
        """
        positions = 0 if self.positions is None else 4 * (self.heads if self.positions.ndim == 2 else 1)
        accumulated = 0 if self.accumulated is None else 4 * self.heads
        return 2 * self.heads * self.k_window.shape[-1] * self.dtype.itemsize + positions + accumulated

    def tensors(self) -> list[Tensor]:
        """Every tensor it holds."""
        packed = [*self.k_packed, *([self.v_packed] if self.v_packed else [])]
        held = [self.k_window, self.v_window, *(t for p in packed for t in p.tensors())]
        beside = self.positions, self.accumulated, self.queries, self.sizes, self.widened
        return [*held, self.spare, *(t for t in beside if t is not None)]

    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values (H, n, d) in `dtype`, in order of position; dequantised where packed."""
        if self.sizes is not None:
            return self._dense(dtype)
        k = [p.dequantise(dtype) for p in self.k_packed] + [self.k_window.to(dtype)]
        v = ([self.v_packed.dequantise(dtype)] if self.v_packed else []) + [self.v_window.to(dtype)]
        return (torch.cat(k, 1) if len(k) > 1 else k[0]), (torch.cat(v, 1) if len(v) > 1 else v[0])

    def _dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`dense` where entries are held flat."""
        assert self.sizes is not None
        device, sizes = self.k_window.device, self.sizes.long()
        old = torch.arange(self.n, device=device) < sizes.sum(1)[:, None]  # (H, n): the packed entries come first

        def whole(packed: Tensor, window: Tensor) -> Tensor:
            out = packed.new_empty(*old.shape, packed.shape[-1])
            out[old], out[~old] = packed, window.to(dtype)
            return out

        k, v = self.k_window.to(dtype), self.v_window.to(dtype)
        if self.storage.k_bits < 16:
            (packed,) = self.k_packed
            of = torch.arange(sizes.numel(), device=device).repeat_interleave(sizes.flatten())
            k = whole(packed.scaled(of, dtype), k)
        if self.v_packed is not None:
            v = whole(self.v_packed.dequantise(dtype), v)
        return k, v

    def true_positions(self) -> Tensor:
        """Original positions (n,) or (H, n)."""
        return torch.arange(self.n, device=self.k_window.device) if self.positions is None else self.positions


def _gain(packed: Packed, window: Tensor) -> int:
    """Bytes that packing saves for one entry of a side."""
    beside = 4 * packed.step.shape[-1] if packed.per == "token" else 0
    gain = window.shape[-1] * window.dtype.itemsize - packed.codes.shape[-1] - beside
    if gain < 0:
        raise UserError(f"V scales of {packed.group} channels each take more than packing saves: share them among more")
    return gain


def gather(keys: Tensor, values: Tensor, positions: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and positions of the entries at index (H or 1, k), where 1 stands for all KV heads.

    keys, values (H, n, d), positions (n,) or (H, n).
    """
    where = positions if positions.ndim == 2 else positions.expand(index.shape[0], -1)
    kept = where.gather(1, index.expand(where.shape[0], -1))
    # whole vectors are copied this way, where gather would copy number by number
    at = slice(None) if index.shape[0] == 1 else torch.arange(keys.shape[0], device=keys.device)[:, None]
    of = index[0] if index.shape[0] == 1 else index
    return keys[at, of], values[at, of], kept if kept.shape[0] > 1 else kept[0]
