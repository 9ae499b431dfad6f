"""What an entry store hands to a kernel: the contract of `moend.kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

CODE_BITS = (2, 4, 8)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass
class Entries:
    """One side (K or V) of some KV heads of a layer, as it lies in memory.

    The side has s KV heads with M slots of head dimension d. A slot holds one entry: a number per channel, or a code
    per channel with entry = zero + code * step. K shares a scale among `group` neighbouring slots and keeps one per
    channel, so that q . k = (q * step) . code + q . zero. V shares a scale among `group` channels and keeps one per
    slot, so that sum_t p_t v_t = sum_t (p_t step_t) code_t + sum_t p_t zero_t. Kernels fold scales in this way and
    never form the entries themselves.

    A block of K that has lost entries keeps its scale: unused slots are hidden by the mask of `Held`, and `scale_of`
    says where a block's scale lies when blocks have moved. Tensors are contiguous and on one device. Make an object
    anew when one of its tensors is replaced; a kernel may remember in `memo` how it reads them.
    """

    side: str  # "k" or "v"
    x: Tensor  # (s, M, d) float16, bfloat16 or float32; or codes (s, M, d * bits / 8) uint8 (`packing.pack`)
    step: Tensor  # float16; K (s, C, d) with C scales per KV head, V (s, M, d / group); empty for numbers
    zero: Tensor  # float16, as step
    bits: int  # 2, 4 or 8 for codes; 16 for numbers, whatever their dtype
    group: int  # K: slots that share a scale; V: channels that share one
    heads: Sequence[int]  # s rows of the query tensor, one per KV head here
    lengths: Tensor  # int64 (s,): slots in use, the first of each KV head; packed K counts whole blocks
    begin: int = 0  # first slot in use, the same for all KV heads; 0 for codes
    to: int = 0  # column of logits and probabilities where slot `begin` stands
    scale_of: Tensor | None = None  # int32 (s, M / group): the scale of each block of K; None: block j has scale j
    memo: dict[str, Any] = field(default_factory=dict, repr=False)  # what a kernel derived from these tensors

    def __post_init__(self) -> None:
        """Check what compiled code takes for granted; ValueError says what does not fit."""
        s, m, wide = self.x.shape
        codes = self.x.dtype is torch.uint8
        if not codes and self.x.dtype not in FLOATS:
            raise ValueError(f"entries are uint8 codes, float16, bfloat16 or float32, not {self.x.dtype}")
        if codes != (self.bits in CODE_BITS):
            raise ValueError(f"entries of {self.bits} bits cannot be {self.x.dtype}")
        self.dim = wide * 8 // self.bits if codes else wide
        tensors = [self.x, self.step, self.zero, self.lengths] + ([] if self.scale_of is None else [self.scale_of])
        if not all(t.is_contiguous() for t in tensors):
            raise ValueError(f"entries must be contiguous, got strides {[t.stride() for t in tensors]}")
        if self.lengths.dtype is not torch.int64 or len(self.lengths) != s or len(self.heads) != s:
            raise ValueError(f"{s} KV heads need int64 lengths and a name each, got {len(self.lengths)}")
        self.end = int(self.lengths.max()) if s else 0
        if self.end > m:
            raise ValueError(f"KV heads use {self.end} of {m} slots")
        if codes:
            self._check_scales(s, m)

    def _check_scales(self, s: int, m: int) -> None:
        blocks = m // self.group
        shapes = {self.step.shape, self.zero.shape}
        if self.side == "v":
            fits = shapes == {torch.Size([s, m, self.dim // self.group])} and self.scale_of is None
        elif self.scale_of is None:
            fits = m % self.group == 0 and shapes == {torch.Size([s, blocks, self.dim])}
        else:
            fits = len(shapes) == 1 and self.step.shape[::2] == (s, self.dim) and self.scale_of.shape == (s, blocks)
            fits = fits and self.scale_of.dtype is torch.int32
        if not fits or self.begin or self.step.dtype is not torch.float16 or self.zero.dtype is not torch.float16:
            raise ValueError(f"scales {self.step.shape}, {self.zero.shape} do not fit {s} KV heads of {m} slots")

    @property
    def quantised(self) -> bool:
        """Whether slots hold codes."""
        return self.bits < 16

    @property
    def at(self) -> slice | Tensor:
        """`heads` as an index of the query tensor: a slice where they are neighbours."""
        if "at" not in self.memo:
            first = self.heads[0]
            near = list(self.heads) == list(range(first, first + len(self.heads)))
            self.memo["at"] = (
                slice(first, first + len(self.heads)) if near else torch.tensor(self.heads, device=self.x.device)
            )
        at: slice | Tensor = self.memo["at"]
        return at

    def extend(self, end: int) -> None:
        """Every KV head uses the slots up to `end` from now on."""
        if end > self.x.shape[1]:
            raise ValueError(f"{end} slots are asked for, there are {self.x.shape[1]}")
        self.lengths.fill_(end)
        self.end = end


@dataclass
class Held:
    """All entries of one layer: older ones in stores, the newest at full precision, and what may not be seen.

    Logits and probabilities have one column per slot: columns 0 ... used - 1 stand for the first slots of every store,
    the columns after them for the newest entries. The S KV heads of all sequences share the matrix. A KV head that
    uses fewer than `used` columns leaves the rest unused.
    """

    keys: Sequence[Entries]  # stores of older keys; a KV head lies in one at most
    values: Sequence[Entries]  # stores of older values; bits and groups may differ from those of keys
    newest: tuple[Entries, Entries]  # keys and values of the residual window, of all S KV heads
    hidden: Tensor  # bool (S, N): columns that no query may see, N >= used + gap + newest
    lengths: Tensor  # int64 (S,): columns in use of those before `used`
    used: int  # columns of older entries
    gap: int  # column j >= used has its mask in column j + gap of `hidden`
    some_hidden: tuple[bool, bool] = (True, True)  # whether anything is hidden among older and newest entries
    memo: dict[str, Any] = field(default_factory=dict, repr=False)  # what a kernel derived from these tensors

    @property
    def columns(self) -> int:
        """Columns of logits: older and newest entries."""
        newest = self.newest[0]
        return self.used + newest.end - newest.begin
