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

from moend.budget import Storage
from moend.cache.packing import Packed, quantise_k, quantise_v
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
    """Entries of one sequence in one layer: packed chunks (older) followed by a 16-bit tail (newest).

    k_tail, v_tail (H, t, d) of KV heads H and dimension d; a side (K or V) at 16 bit is all tail. positions (n,) or
    (H, n) int32, None where they are 0 ... n-1. seen: tokens fed so far, steps: those since the last eviction.
    accumulated attention
    (H, n) float32: the attention entries received so far, where the scorer goes on summing it. queries (H, G, w, d):
    the last w queries of each head's group, right-aligned, zero before the first token, where the scorer goes by them.
    A layer whose heads hold different numbers of entries is a tuple of rows, each of a few neighbouring heads.
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
        n = keys.shape[1]
        old = max(n - storage.window, 0) if storage.quantised else 0
        k_cut = old if storage.k_bits < 16 else 0
        v_cut = old if storage.v_bits < 16 else 0
        self._set(
            (quantise_k(keys[:, :k_cut], storage.k_bits, storage.group),) if k_cut else (),
            quantise_v(values[:, :v_cut], storage.v_bits, storage.channels) if v_cut else None,
            # copies, so that no row keeps the whole prefill alive through a view
            keys[:, k_cut:].to(dtype, copy=True).contiguous(),
            values[:, v_cut:].to(dtype, copy=True).contiguous(),
            None if positions is None else positions.to(torch.int32),
            storage,
            seen=seen,
            schedule=schedule,
            choose=choose,
            accumulated=None if accumulated is None else accumulated.clone(),
            queries=None if queries is None else queries.to(dtype, copy=True),
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
    ) -> None:
        self.k_packed, self.v_packed, self.k_tail, self.v_tail = k_packed, v_packed, k_tail, v_tail
        self.positions, self.storage, self.schedule, self.choose = positions, storage, schedule, choose
        self.seen, self.steps, self.dtype, self.accumulated, self.queries = (
            seen,
            steps,
            k_tail.dtype,
            accumulated,
            queries,
        )
        self.n = k_tail.shape[1] + sum(p.codes.shape[-2] for p in k_packed)
        self.bytes = self.nbytes()

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.k_tail.shape[0]

    @property
    def tail(self) -> int:
        """The newest entries, at 16 bit on both sides."""
        return min(self.k_tail.shape[1], self.v_tail.shape[1])

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
        return 2 * self.heads * self.k_tail.shape[2] * self.dtype.itemsize + positions + accumulated

    def tensors(self) -> list[Tensor]:
        """Every tensor this row holds; their storages are its memory."""
        packed = [*self.k_packed, *([self.v_packed] if self.v_packed else [])]
        held = [self.k_tail, self.v_tail, *(t for p in packed for t in p.tensors())]
        return [*held, *(t for t in (self.positions, self.accumulated, self.queries) if t is not None)]

    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values (H, n, d) in `dtype`, in order of position; dequantised where packed."""
        k = [p.dequantise(dtype) for p in self.k_packed] + [self.k_tail.to(dtype)]
        v = ([self.v_packed.dequantise(dtype)] if self.v_packed else []) + [self.v_tail.to(dtype)]
        return (torch.cat(k, 1) if len(k) > 1 else k[0]), (torch.cat(v, 1) if len(v) > 1 else v[0])

    def true_positions(self) -> Tensor:
        """Original positions (n,) or (H, n)."""
        return torch.arange(self.n, device=self.k_tail.device) if self.positions is None else self.positions


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
