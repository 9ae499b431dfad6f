"""One side (K or V) of the older entries of several strands, stored alike and padded to one number of slots.

Attention reads it as it is. With codes c, steps s and zero points z, K per channel and group gives
q . k = (q s) . c + q . z, and V per token gives sum_t p v = sum_t (p s) c + sum_t p z: scales fold into the query and
into the probabilities, the product runs over the codes, and only one block of them is a number at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from moend.cache.packing import Packed, numbers

BLOCK = 2**19  # codes that are turned into numbers at a time
FOLD = 32  # with more queries per group than this, dequantising once is cheaper than scaling every query


class Bank:
    """Slots (s, M) of `strands`, of bits, group (K: tokens per scale; V: channels), and `per` as in `Packed`.

    x: 16-bit entries (s, M, d) or codes (s, M, d * bits / 8); step, zero float16: K (s, M / group, d), V (s, M, d /
    group). Unused slots are zero: whoever reads masks them. Twins share tensors until one of them is written to.
    """

    def __init__(self, strands: Sequence[int], slots: int, bits: int, group: int, per: str, like: Tensor, dim: int):
        """like: a tensor of the device and of the dtype that 16-bit entries have."""
        self.bits, self.group, self.per, self.dim = bits, group, per, dim
        self._shared = False
        self.x = (
            like.new_zeros(len(strands), slots, dim) if bits == 16 else _bytes(like, len(strands), slots, dim, bits)
        )
        self.step = self.zero = like.new_zeros(0)
        if bits < 16:
            shape = (slots // group, dim) if per == "channel" else (slots, dim // group)
            self.step = like.new_zeros(len(strands), *shape, dtype=torch.float16)
            self.zero = torch.zeros_like(self.step)
        self._place(list(strands))

    def _place(self, strands: list[int]) -> None:
        self.strands = strands
        first = strands[0]
        straight = strands == list(range(first, first + len(strands)))
        self._at = slice(first, first + len(strands)) if straight else torch.tensor(strands, device=self.x.device)

    @property
    def slots(self) -> int:
        """M."""
        return self.x.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, unused slots included."""
        return self.x.nbytes + self.step.nbytes + self.zero.nbytes

    def pick(self, local: Sequence[int], strands: Sequence[int], slots: int) -> Bank:
        """These of its strands by their place here, which use `slots`, under new names; all share until one writes."""
        twin = copy.copy(self)
        if list(local) == list(range(len(self.strands))):
            self._shared = twin._shared = True
        else:
            index = torch.tensor(local, device=self.x.device)
            twin.x, twin._shared = self.x[:, :slots][index], False
            if self.bits < 16:
                scales = slots // self.group if self.per == "channel" else slots
                twin.step, twin.zero = self.step[:, :scales][index], self.zero[:, :scales][index]
        twin._place(list(strands))
        return twin

    def reserve(self, slots: int) -> None:
        """Make `slots` of them usable, with an eighth to spare so that growing is amortised."""
        if slots <= self.slots:
            return
        unit = self.group if self.per == "channel" and self.bits < 16 else 1
        more = -(-max(slots - self.slots, self.slots // 8) // unit) * unit
        self.x = _longer(self.x, more)
        if self.bits < 16:
            more = more // self.group if self.per == "channel" else more
            self.step, self.zero = _longer(self.step, more), _longer(self.zero, more)
        self._shared = False

    def write(self, start: int, slot: int, piece: Packed | Tensor) -> None:
        """Entries of neighbouring strands from `start` on, into the slots from `slot` on (K: whole groups)."""
        if self._shared:
            self.x, self.step, self.zero = self.x.clone(), self.step.clone(), self.zero.clone()
            self._shared = False
        codes = piece.codes if isinstance(piece, Packed) else piece
        rows = slice(start, start + codes.shape[0])
        self.x[rows, slot : slot + codes.shape[1]] = codes
        if isinstance(piece, Packed):
            at = slot // self.group if self.per == "channel" else slot
            self.step[rows, at : at + piece.step.shape[1]] = piece.step
            self.zero[rows, at : at + piece.zero.shape[1]] = piece.zero

    def read(self, start: int, count: int, begin: int, end: int) -> Packed | Tensor:
        """The slots begin ... end of `count` neighbouring strands, as copies."""
        rows = slice(start, start + count)
        codes = self.x[rows, begin:end].clone()
        if self.bits == 16:
            return codes
        if self.per == "channel":
            begin, end = begin // self.group, -(-end // self.group)
        step, zero = self.step[rows, begin:end].clone(), self.zero[rows, begin:end].clone()
        return Packed(codes, step, zero, self.bits, self.group, self.per)

    # Attention

    def score(self, query: Tensor, out: Tensor) -> None:
        """Write q . k of query (S, q, d) of all strands into the first M columns of out (S, q, >= M)."""
        if not self.slots:
            return
        query = query[self._at]
        if self.bits == 16:
            part = torch.bmm(query, self.x.to(query.dtype).mT)
        else:
            size = max(BLOCK // (self.slots * self.dim), 1)
            parts = [self._score(query[i : i + size], slice(i, i + size)) for i in range(0, len(query), size)]
            part = torch.cat(parts) if len(parts) > 1 else parts[0]
        out[self._at, :, : self.slots] = part

    def _score(self, query: Tensor, rows: slice) -> Tensor:
        s, q, dim = query.shape
        dtype = query.dtype
        step, zero = self.step[rows].to(dtype), self.zero[rows].to(dtype)  # (s, groups, d)
        codes = numbers(self.x[rows], self.bits, dtype).view(-1, self.group, dim)
        if q > FOLD:
            keys = torch.addcmul(zero.view(-1, 1, dim), codes, step.view(-1, 1, dim))
            return torch.bmm(query, keys.view(s, -1, dim).mT)
        scaled = (query[:, None] * step[:, :, None]).view(-1, q, dim)
        grouped = torch.bmm(scaled, codes.mT).view(s, -1, q, self.group)
        return (grouped + torch.bmm(zero, query.mT)[..., None]).transpose(1, 2).reshape(s, q, -1)

    def mix(self, probs: Tensor, out: Tensor) -> None:
        """Add the values weighted by the first M columns of probs (S, q, >= M) to out (S, q, d)."""
        if not self.slots:
            return
        probs = probs[self._at, :, : self.slots]
        if self.bits == 16:
            part = torch.bmm(probs, self.x.to(probs.dtype))
        else:
            size = max(BLOCK // (self.slots * self.dim), 1)
            parts = [self._mix(probs[i : i + size], slice(i, i + size)) for i in range(0, len(probs), size)]
            part = torch.cat(parts) if len(parts) > 1 else parts[0]
        if isinstance(self._at, slice):
            out[self._at] += part
        else:
            out.index_add_(0, self._at, part)

    def _mix(self, probs: Tensor, rows: slice) -> Tensor:
        dtype = probs.dtype
        codes = numbers(self.x[rows], self.bits, dtype)
        step, zero = self.step[rows].to(dtype), self.zero[rows].to(dtype)  # (s, M, d / group)
        parts = [
            torch.bmm(probs * step[:, None, :, g], codes[..., g * self.group : (g + 1) * self.group])
            for g in range(step.shape[2])
        ]
        base = torch.bmm(probs, zero)  # (s, q, d / group)
        return (torch.stack(parts, dim=2) + base[..., None]).flatten(2)


def _bytes(like: Tensor, strands: int, slots: int, dim: int, bits: int) -> Tensor:
    return like.new_zeros(strands, slots, dim * bits // 8, dtype=torch.uint8)


def _longer(x: Tensor, more: int) -> Tensor:
    return torch.cat([x, x.new_zeros(x.shape[0], more, x.shape[2])], dim=1)
