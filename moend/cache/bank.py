"""One side (K or V) of the older entries of several strands, stored alike and padded to one number of slots.

Attention reads it as it is. With codes c, steps s and zero points z, K per channel and group gives
q . k = (q s) . c + q . z, and V per token gives sum_t p v = sum_t (p s) c + sum_t p z: scales fold into the query and
into the probabilities, the product runs over the codes, and only one block of them is a number at a time.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from moend.cache.packing import Packed, fields

BLOCK = 2**20  # codes that are turned into numbers at a time
FOLD = 32  # with more queries per group than this, dequantising once is cheaper than scaling every query


class Bank:
    """Slots (s, M) of `strands`, of bits, group (K: tokens per scale; V: channels), and `per` as in `Packed`.

    x: 16-bit entries (s, M, d) or codes (s, M, d * bits / 8); step, zero float16: K (s, M / group, d), V (s, M, d /
    group). Unused slots are zero: whoever reads masks them. Attention reads the first `used` slots only (K: whole
    groups). Twins share tensors until one of them is written to.
    """

    def __init__(self, strands: Sequence[int], slots: int, bits: int, group: int, per: str, like: Tensor, dim: int):
        """like: a tensor of the device and of the dtype that 16-bit entries have."""
        self.bits, self.group, self.per, self.dim = bits, group, per, dim
        self._shared, self.used = False, slots
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
        self.at = slice(first, first + len(strands)) if straight else torch.tensor(strands, device=self.x.device)

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

    def score(self, query: Tensor) -> Tensor:
        """q . k of query (s, q, d) of its own strands: (s, q, used), in float32 where `wide`."""
        if self.bits == 16 and self.x.dtype == query.dtype:
            return torch.bmm(query, self.x[:, : self.used].mT)
        if self.wide and query.shape[1] <= FOLD:
            query = query.float()
        parts = [self._score(query[rows], rows) for rows in self._blocks()]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    @property
    def wide(self) -> bool:
        """Whether codes become float32 whatever the model computes in: on a CPU that takes less time than bfloat16."""
        return self.bits < 16 and self.x.device.type == "cpu"

    def _blocks(self) -> list[slice]:
        """Strands whose codes become numbers together."""
        size = max(BLOCK // (self.used * self.dim), 1)
        return [slice(i, i + size) for i in range(0, len(self.strands), size)]

    def _score(self, query: Tensor, rows: slice) -> Tensor:
        s, q, dim = query.shape
        dtype, x = query.dtype, self.x[rows, : self.used]
        if self.bits == 16:
            return torch.bmm(query, x.to(dtype).mT)
        groups, width = self.used // self.group, x.shape[2]
        step, zero = self.step[rows, :groups].to(dtype), self.zero[rows, :groups].to(dtype)  # (s, groups, d)
        if q > FOLD:
            codes = torch.cat([*fields(x, self.bits, dtype)], dim=-1).mul_(self._unit(dtype)).view(-1, self.group, dim)
            keys = torch.addcmul(zero.view(-1, 1, dim), codes, step.view(-1, 1, dim))
            return torch.bmm(query, keys.view(s, -1, dim).mT)
        scaled = ((query * self._unit(dtype))[:, None] * step[:, :, None]).view(-1, q, dim)
        out = None
        for i, codes in enumerate(fields(x, self.bits, dtype)):  # channels of one bit field after the other
            part, turned = scaled[:, :, i * width : (i + 1) * width], codes.view(-1, self.group, width).mT
            out = torch.bmm(part, turned) if out is None else out.baddbmm_(part, turned)
        assert out is not None
        logits = query.new_empty(s, q, groups, self.group)
        base = torch.bmm(query, zero.mT)
        torch.add(out.view(s, groups, q, self.group).transpose(1, 2), base[..., None], out=logits)
        return logits.view(s, q, -1)

    def _unit(self, dtype: torch.dtype) -> Tensor:
        """What a field's numbers are to be multiplied by (d,)."""
        return unit(self.dim, self.bits, dtype, self.x.device)

    def mix_into(self, probs: Tensor, out: Tensor) -> None:
        """`mix` from probs (S, q, >= used) of all strands into their out (S, q, d)."""
        if isinstance(self.at, slice):
            self.mix(probs[self.at, :, : self.used], out[self.at])
        else:
            part = out.new_zeros(len(self.strands), *out.shape[1:])
            self.mix(probs[self.at, :, : self.used], part)
            out.index_add_(0, self.at, part)

    def mix(self, probs: Tensor, out: Tensor) -> None:
        """Add the values weighted by probs (s, q, used) to out (s, q, d), contiguous, of its own strands."""
        if self.bits == 16 and self.x.dtype == out.dtype:
            out.baddbmm_(probs.to(out.dtype), self.x[:, : self.used])
            return
        probs = probs.float() if self.wide and probs.shape[1] <= FOLD else probs.to(out.dtype)
        for rows in self._blocks():
            self._mix(probs[rows], out[rows], rows)

    def _mix(self, probs: Tensor, out: Tensor, rows: slice) -> None:
        dtype, x = probs.dtype, self.x[rows, : self.used]
        if self.bits == 16:
            out.baddbmm_(probs, x.to(dtype))
            return
        step, zero = self.step[rows, : self.used].to(dtype).mT, self.zero[rows, : self.used].to(dtype).mT
        groups, width = step.shape[1], x.shape[2]  # step, zero (s, d / group, used)
        folded = [probs * step[:, g : g + 1] for g in range(groups)]
        parts = []
        for i, codes in enumerate(fields(x, self.bits, dtype)):
            begin, end = i * width, (i + 1) * width
            while begin < end:  # channels of one bit field and one group
                g = begin // self.group
                stop = min(end, (g + 1) * self.group)
                parts.append(torch.bmm(folded[g], codes[..., begin - i * width : stop - i * width]))
                begin = stop
        if groups == 1:
            base = (probs * zero).sum(-1, keepdim=True)
        else:
            base = torch.bmm(probs, zero.mT).repeat_interleave(self.group, dim=-1)
        mixed = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        out += base.addcmul(mixed, self._unit(dtype))


@functools.cache
def unit(dim: int, bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """2^-(bits i) for the channels of the i-th bit field (d,)."""
    exponent = torch.arange(8 // bits, device=device).repeat_interleave(dim * bits // 8) * -bits
    return torch.exp2(exponent.float()).to(dtype)


def _bytes(like: Tensor, strands: int, slots: int, dim: int, bits: int) -> Tensor:
    return like.new_zeros(strands, slots, dim * bits // 8, dtype=torch.uint8)


def _longer(x: Tensor, more: int) -> Tensor:
    return torch.cat([x, x.new_zeros(x.shape[0], more, x.shape[2])], dim=1)
