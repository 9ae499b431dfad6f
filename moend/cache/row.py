"""One sequence in one layer: the entries that are really held, their positions, and what happens when more arrive.

A layer of a batch is a list of rows. Rows never pad each other: each holds exactly its own tokens, so a batch of
prompts of unequal length, and the cells of a sweep that decode together, need no masks between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from moend.cache.packing import Packed, quantise_k, quantise_v
from moend.plan import Storage


@dataclass(frozen=True)
class Schedule:
    """When a row evicts while decoding.

    cap: entries per head of the plan (None: prompt only, the row grows by every new token).
    overshoot "counted": the row never holds more than cap; it makes room for `reserve` tokens at a time.
    overshoot "paper": every `beta` new tokens the row is cut back to cap (MoE-nD section 4, step-count trigger).
    """

    cap: int | None = None
    reserve: int = 0
    beta: int = 128
    overshoot: Literal["counted", "paper"] = "counted"


PROMPT_ONLY = Schedule()

# (keys (H, n, d), values, positions (n,) or (H, n), next position, entries to keep) -> kept indices (1 or H, k), sorted
Chooser = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]


class Row:
    """Entries of one sequence in one layer: packed chunks (older) followed by a 16-bit tail (newest).

    keys, values of KV heads H and dimension d. A side (K or V) at 16 bit is all tail.
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
    ):
        """keys, values (H, n, d); positions (n,) or (H, n), None where they are 0 ... n-1; seen: tokens fed so far."""
        self.seen, self.dtype = seen, dtype
        self.bytes = 0  # always equal to nbytes(), kept up to date so that asking is free
        self.fed, self.area = 0, 0  # tokens fed since the prompt, and the sum of the bytes held after each of them
        self.crest = 0  # bytes just before the newest token came: after it the row may have packed or evicted
        self.schedule = schedule
        self.choose = choose
        self.steps = 0  # new tokens since the last eviction
        self._hold(keys, values, positions, storage)

    def _hold(self, keys: Tensor, values: Tensor, positions: Tensor | None, storage: Storage) -> None:
        n = keys.shape[1]
        self.n, self.storage = n, storage
        self.positions = None if positions is None else positions.to(torch.int32)
        old = max(n - storage.window, 0) if storage.quantised else 0
        self.k_packed: tuple[Packed, ...] = ()
        self.v_packed: Packed | None = None
        k_cut = old if storage.k_bits < 16 else 0
        v_cut = old if storage.v_bits < 16 else 0
        if k_cut:
            self.k_packed = (quantise_k(keys[:, :k_cut], storage.k_bits, storage.group),)
        if v_cut:
            self.v_packed = quantise_v(values[:, :v_cut], storage.v_bits)
        # copies, so that no row keeps the whole prefill alive through a view
        self.k_tail = keys[:, k_cut:].to(self.dtype, copy=True).contiguous()
        self.v_tail = values[:, v_cut:].to(self.dtype, copy=True).contiguous()
        self.tail = n - old
        self.bytes = self.nbytes()

    def fork(self) -> Row:
        """An independent row that shares tensors: every change below makes new tensors, so sharing is safe."""
        twin = object.__new__(Row)
        twin.__dict__.update(self.__dict__)
        return twin

    def tensors(self) -> list[Tensor]:
        """Every tensor this row holds; their storages are its memory."""
        packed = [*self.k_packed, *([self.v_packed] if self.v_packed else [])]
        held = [self.k_tail, self.v_tail, *(t for p in packed for t in p.tensors())]
        return held if self.positions is None else [*held, self.positions]

    def nbytes(self) -> int:
        """Bytes held: the sum of the sizes of the storages, not of the views."""
        storages = [t.untyped_storage() for t in self.tensors() if t.numel()]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values (H, n, d) in `dtype`, in order of position; dequantised where packed."""
        k = [p.dequantise(dtype) for p in self.k_packed] + [self.k_tail.to(dtype)]
        v = ([self.v_packed.dequantise(dtype)] if self.v_packed else []) + [self.v_tail.to(dtype)]
        return (torch.cat(k, 1) if len(k) > 1 else k[0]), (torch.cat(v, 1) if len(v) > 1 else v[0])

    def true_positions(self) -> Tensor:
        """Original positions (n,) or (H, n)."""
        return torch.arange(self.n, device=self.k_tail.device) if self.positions is None else self.positions

    def room(self) -> int | None:
        """How many tokens may be fed at once (None: any number).

        Within it, evictions and packing fall on the same token however tokens come, so that what a query sees does not
        depend on the company it is fed in.
        """
        s, rooms = self.schedule, []
        if s.cap is not None:
            counted = s.cap - self.n if self.n < s.cap else max(s.reserve, 1)
            rooms.append(s.beta - self.steps if s.overshoot == "paper" else counted)
        if self.storage.quantised:
            rooms.append(self.storage.window + self.storage.group - self.tail)
        return min(rooms, default=None)

    def make_room(self, new: int) -> None:
        """Before `new` tokens arrive: evict if they would pass the cap ("counted")."""
        s = self.schedule
        if s.cap is None or s.overshoot != "counted" or self.n + new <= s.cap:
            return
        self.evict(max(s.cap - max(s.reserve, new), 1))

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add q new tokens at positions seen ... seen + q - 1; keys, values (H, q, d)."""
        q = keys.shape[1]
        self.k_tail = torch.cat([self.k_tail, keys.to(self.dtype)], dim=1)
        self.v_tail = torch.cat([self.v_tail, values.to(self.dtype)], dim=1)
        if self.positions is not None:
            new = torch.arange(self.seen, self.seen + q, dtype=torch.int32, device=keys.device)
            self.positions = torch.cat([self.positions, new.expand(*self.positions.shape[:-1], q)], dim=-1)
        self.seen, self.n, self.tail, self.steps = self.seen + q, self.n + q, self.tail + q, self.steps + q
        positions = 0 if self.positions is None else 4 * self.positions[..., 0].numel()
        one = 2 * keys[:, 0].numel() * self.dtype.itemsize + positions
        self.fed, self.area = self.fed + q, self.area + (q - 1) * self.bytes + one * q * (q - 1) // 2
        self.bytes += q * one
        self.crest = self.bytes - one

    def settle(self) -> None:
        """After attention has used the new tokens: pack complete groups that left the window, evict if it is time."""
        s = self.schedule
        due = s.cap is not None and s.overshoot == "paper" and self.steps >= s.beta
        if due and s.cap is not None and self.n > s.cap:
            self.evict(s.cap)
        else:
            self.steps = 0 if due else self.steps
            self._pack()
        self.area += self.bytes

    def _pack(self) -> None:
        """Pack the whole groups that left the window."""
        st = self.storage
        count = max(self.tail - st.window, 0) // st.group * st.group if st.quantised else 0
        if not count:
            return
        if st.k_bits < 16:
            chunk = quantise_k(self.k_tail[:, :count], st.k_bits, st.group)
            last = self.k_packed[-1] if self.k_packed else None
            if last is None or last.codes.shape[-2] % st.group:
                self.k_packed = (*self.k_packed, chunk)
            else:
                self.k_packed = (*self.k_packed[:-1], last.append(chunk))
            self.k_tail = self.k_tail[:, count:].clone()
        if st.v_bits < 16:
            values = quantise_v(self.v_tail[:, :count], st.v_bits)
            self.v_packed = values if self.v_packed is None else self.v_packed.append(values)
            self.v_tail = self.v_tail[:, count:].clone()
        self.tail -= count
        self.bytes = self.nbytes()

    def evict(self, keep: int) -> None:
        """Keep `keep` entries per head, chosen by the method's own scorer from what is still held."""
        if keep >= self.n:
            return
        if self.choose is None:
            raise RuntimeError("a row with a cap needs a scorer that can score while decoding")
        keys, values = self.dense(torch.float32)
        positions = self.true_positions()
        index = self.choose(keys, values, positions, self.seen, keep)
        keys, values, kept = gather(keys, values, positions, index)
        form: Literal["shared", "per_head"] = "per_head" if index.shape[0] > 1 else "shared"
        self._hold(keys, values, kept, replace(self.storage, positions=form))
        self.steps = 0


def gather(keys: Tensor, values: Tensor, positions: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Entries at index (H or 1, k; 1 is shared by all heads) of keys, values (H, n, d) and positions (n,) or (H, n)."""
    heads, _, dim = keys.shape
    at = index.expand(heads, -1)[..., None].expand(-1, -1, dim)
    where = positions if positions.ndim == 2 else positions.expand(index.shape[0], -1)
    kept = where.gather(1, index.expand(where.shape[0], -1))
    return keys.gather(1, at), values.gather(1, at), kept if kept.shape[0] > 1 else kept[0]
