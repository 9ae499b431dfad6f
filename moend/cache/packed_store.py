"""One side (K or V) of the older entries of several KV heads, stored alike and padded to one number of slots.

Kernels read it as it is (`entries`).
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moend.cache.packing import Packed
from moend.kernels import Entries

BEHIND = 2**24  # bytes that growing stores may free before malloc must give them back to the system


class PackedStore:
    """M slots for each of s KV heads, all of the same bits and group.

    heads: which KV heads of the layer these are, s indices. bits: 16, 8, 4 or 2. dim: head dimension d.
    per: "channel" (K) or "token" (V), as in `Packed`. group: tokens (K) or channels (V) that share a scale.
    x: numbers (s, M, d), or codes (s, M, d * bits / 8) uint8.
    step, zero float16: K (s, M / group, d), V (s, M, d / group); empty at 16 bit.
    lengths (s,) int64: slots in use, the first of each KV head. used: the most of them.
    scale_of (s, M / group) int32: which scale a block of `group` slots has. widened (s, d) uint8: see `LayerKV`. Both
    are None unless the store has a fixed number of K `scales` per KV head (`moend.cache.decode.groups`); step and zero
    then are (s, scales, d).

    Unused slots are zero, and readers mask them. Copies share tensors until one of them is written to.
    """

    def __init__(
        self,
        heads: Sequence[int],
        slots: int,
        bits: int,
        group: int,
        per: str,
        like: Tensor,
        dim: int,
        scales: int = 0,
    ):
        """like: a tensor of the device and of the dtype that 16-bit entries have."""
        self.bits, self.group, self.per, self.dim = bits, group, per, dim
        self._shared = False
        self.scale_of: Tensor | None = None
        self.widened: Tensor | None = None
        if scales:
            self.scale_of = like.new_zeros(len(heads), slots // group, dtype=torch.int32)
            self.widened = like.new_zeros(len(heads), dim, dtype=torch.uint8)
        self.x = like.new_zeros(len(heads), slots, dim) if bits == 16 else _bytes(like, len(heads), slots, dim, bits)
        self.step = self.zero = like.new_zeros(0)
        if bits < 16:
            shape = (scales or slots // group, dim) if per == "channel" else (slots, dim // group)
            self.step = like.new_zeros(len(heads), *shape, dtype=torch.float16)
            self.zero = torch.zeros_like(self.step)
        self._place(list(heads))

    @classmethod
    def of(cls, heads: Sequence[int], piece: Packed | Tensor, bits: int, group: int, per: str, dim: int) -> PackedStore:
        """A store of these entries (s, M, ...), whose memory it shares until it is written to."""
        store = object.__new__(cls)
        store.bits, store.group, store.per, store.dim, store._shared = bits, group, per, dim, True
        store.scale_of = store.widened = None
        if isinstance(piece, Packed):
            store.x, store.step, store.zero = piece.codes, piece.step, piece.zero
        else:
            store.x, store.step, store.zero = piece, piece.new_zeros(0), piece.new_zeros(0)
        store._place(list(heads))
        return store

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What it is and holds: numbers, and tensors by name."""
        named = {"x": self.x, "step": self.step, "zero": self.zero, "scale_of": self.scale_of, "widened": self.widened}
        told = {"heads": self.heads, "bits": self.bits, "group": self.group, "per": self.per, "dim": self.dim}
        return told, {name: x for name, x in named.items() if x is not None}

    @classmethod
    def restored(cls, told: dict[str, Any], tensors: dict[str, Tensor]) -> PackedStore:
        """The store of a state, whose tensors become its own."""
        store = object.__new__(cls)
        store.bits, store.group, store.per, store.dim = told["bits"], told["group"], told["per"], told["dim"]
        store._shared = False
        store.x, store.step, store.zero = tensors["x"], tensors["step"], tensors["zero"]
        store.scale_of, store.widened = tensors.get("scale_of"), tensors.get("widened")
        store._place(list(told["heads"]))
        return store

    def _place(self, heads: list[int]) -> None:
        self.heads = heads
        self.fill(torch.full((len(heads),), self.slots))

    def fill(self, lengths: Tensor) -> None:
        """Set how many slots each KV head uses, int64 (s,)."""
        self.lengths, self.used = lengths, int(lengths.max())
        self._known: Entries | None = None  # what `entries` returned, while it holds

    @property
    def slots(self) -> int:
        """Slots per KV head, M."""
        return self.x.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, unused slots included."""
        return sum(t.nbytes for t in (self.x, self.step, self.zero, self.scale_of, self.widened) if t is not None)

    def own(self) -> None:
        """Stop sharing tensors with copies: this store is about to be written to."""
        if self._shared:
            self.x, self.step, self.zero = self.x.clone(), self.step.clone(), self.zero.clone()
            if self.scale_of is not None and self.widened is not None:
                self.scale_of, self.widened = self.scale_of.clone(), self.widened.clone()
            self._shared, self._known = False, None

    def pick(self, local: Sequence[int], heads: Sequence[int], slots: int) -> PackedStore:
        """A store of the KV heads at the indices `local` here, which use `slots`, as the KV heads `heads` of a layer.

        It shares tensors with this one if it has the same KV heads in the same order.
        """
        twin = copy.copy(self)
        if list(local) == list(range(len(self.heads))):
            self._shared = twin._shared = True
        else:
            index = torch.tensor(local, device=self.x.device)
            twin.x, twin._shared = self.x[:, :slots][index], False
            if self.bits < 16:
                scales = slots // self.group if self.per == "channel" else slots
                if self.scale_of is not None and self.widened is not None:
                    twin.scale_of, twin.widened = self.scale_of[:, :scales][index], self.widened[index]
                    scales = self.step.shape[1]
                twin.step, twin.zero = self.step[:, :scales][index], self.zero[:, :scales][index]
        twin._place(list(heads))
        return twin

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots, with an eighth to spare so that growing is amortised."""
        if slots <= self.slots:
            return
        unit = self.group if self.per == "channel" and self.bits < 16 else 1
        more, before = -(-max(slots - self.slots, self.slots // 8) // unit) * unit, self.nbytes
        self.x = _longer(self.x, more)
        if self.scale_of is not None and self.widened is not None:
            self.scale_of = _longer(self.scale_of[..., None], more // self.group)[..., 0].contiguous()
            if self._shared:
                self.step, self.zero, self.widened = self.step.clone(), self.zero.clone(), self.widened.clone()
        elif self.bits < 16:
            more = more // self.group if self.per == "channel" else more
            self.step, self.zero = _longer(self.step, more), _longer(self.zero, more)
        self._shared, self._known = False, None
        if self.x.is_cpu:
            _give_back(before)

    def write(self, start: int, slot: int, piece: Packed | Tensor) -> None:
        """Write entries of the KV heads from `start` on to the slots from `slot` on (K: whole groups)."""
        codes = piece.codes if isinstance(piece, Packed) else piece
        if codes.data_ptr() == self.x.data_ptr() and codes.shape == self.x.shape:
            return  # this store was made of them (`of`)
        self.own()
        rows = slice(start, start + codes.shape[0])
        self.x[rows, slot : slot + codes.shape[1]] = codes
        if isinstance(piece, Packed):
            at = slot // self.group if self.per == "channel" else slot
            self.step[rows, at : at + piece.step.shape[1]] = piece.step
            self.zero[rows, at : at + piece.zero.shape[1]] = piece.zero

    def per_slot(self) -> tuple[Tensor, ...]:
        """The tensors whose second axis is the slot."""
        return (self.x, self.step, self.zero) if self.bits < 16 and self.per == "token" else (self.x,)

    def fill_in(self, start: int, taken: Tensor, flat: Sequence[Tensor]) -> None:
        """Write entries of the KV heads from `start` on, one KV head after the other, to the slots taken (h, slots)."""
        self.own()
        for there, entries in zip(self.per_slot(), flat, strict=False):
            there[start : start + len(taken), : taken.shape[1]][taken] = entries

    def numbers(self, rows: slice, slots: int) -> Tensor:
        """The first slots of the KV heads `rows` as float32 (h, slots, d)."""
        x = self.x[rows, :slots]
        if self.bits == 16:
            return x.float()
        if self.scale_of is None:
            scales = -(-slots // self.group) if self.per == "channel" else slots
            step, zero = self.step[rows, :scales], self.zero[rows, :scales]
            return Packed(x, step, zero, self.bits, self.group, self.per).dequantise()
        of = self.scale_of[rows, : -(-slots // self.group)].long().repeat_interleave(self.group, dim=1)[:, :slots]
        of += torch.arange(len(x), device=of.device)[:, None] * self.step.shape[1]
        return Packed(x, self.step[rows], self.zero[rows], self.bits, self.group, self.per).scaled(of)

    def clear(self, start: int, count: int, begin: int, end: int) -> None:
        """Zero the slots begin ... end of the `count` KV heads from `start` on: hidden values must be finite."""
        rows = slice(start, start + count)
        self.x[rows, begin:end] = 0
        if self.bits < 16 and self.per == "token":
            self.step[rows, begin:end] = 0
            self.zero[rows, begin:end] = 0

    def read(self, start: int, count: int, begin: int, end: int) -> Packed | Tensor:
        """Copies of the slots begin ... end of the `count` KV heads from `start` on."""
        rows = slice(start, start + count)
        codes = self.x[rows, begin:end].clone()
        if self.bits == 16:
            return codes
        if self.per == "channel":
            begin, end = begin // self.group, -(-end // self.group)
        step, zero = self.step[rows, begin:end].clone(), self.zero[rows, begin:end].clone()
        return Packed(codes, step, zero, self.bits, self.group, self.per)

    # Attention

    def entries(self) -> Entries:
        """The store as kernels read it: the same object until tensors are replaced or lengths change."""
        if self._known is None:
            side = "k" if self.per == "channel" else "v"
            rest = self.bits, self.group, self.heads, self.lengths
            self._known = Entries(side, self.x, self.step, self.zero, *rest, scale_of=self.scale_of)
        return self._known

    def __getstate__(self) -> dict[str, Any]:
        """The state that a copy starts from, without what names tensors of this object."""
        return self.__dict__ | {"_known": None}


def _bytes(like: Tensor, heads: int, slots: int, dim: int, bits: int) -> Tensor:
    return like.new_zeros(heads, slots, dim * bits // 8, dtype=torch.uint8)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    with contextlib.suppress(OSError, AttributeError):
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim  # glibc has it
        return trim
    return None


_behind = 0


def _give_back(size: int) -> None:
    """Count `size` bytes that a growing store freed, and give freed memory back to the system once BEHIND is reached.

    Growing stores never fit into the places they leave, and malloc would keep these.
    """
    global _behind
    _behind += size
    if _behind >= BEHIND and (trim := _trim()) is not None:
        trim(0)
        _behind = 0


def _longer(x: Tensor, more: int) -> Tensor:
    return torch.cat([x, x.new_zeros(x.shape[0], more, x.shape[2])], dim=1)
