"""Quantisation that really packs: asymmetric min/max, K per channel, V per token, codes of 8, 4 or 2 bits in bytes.

As in KIVI (arXiv 2402.02750, section 3): K is grouped along tokens, one scale per channel and group; V is grouped along
channels, one scale per token and group. Scales and zero points are float16. The zero point is rounded down and the step
up, so that every element lies inside the code range and its error is at most half the stored step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moend.errors import UserError
from moend.layer_bytes import v_group

# float16 has 11 significant bits: moving a value by 2^-10 of itself (or the smallest subnormal) before rounding to
# nearest guarantees the side on which the rounded value lies.
_MARGIN, _TINY, _LARGEST = 2.0**-10, 6.0e-8, 65504.0


def span(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(step, zero) in float16 with zero <= low and zero + (2^bits - 1) * step >= high; beyond its range, clipped."""
    zero = (low - low.abs() * _MARGIN - _TINY).clamp(-_LARGEST, _LARGEST).to(torch.float16)
    step = ((high - zero.float()) / (2**bits - 1) * (1 + _MARGIN) + _TINY).clamp(max=_LARGEST).to(torch.float16)
    return step, zero


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes (..., d) -> bytes (..., d * bits / 8): the channels in 8/bits equal parts, one per bit field."""
    if codes.shape[-1] % (8 // bits):
        raise UserError(f"{bits} bits need heads of a multiple of {8 // bits} dimensions, got {codes.shape[-1]}")
    parts = codes.chunk(8 // bits, dim=-1)
    packed = parts[0].clone()
    for i, part in enumerate(parts[1:], 1):
        packed |= part << (bits * i)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`: bytes (..., d * bits / 8) -> uint8 codes (..., d)."""
    if bits == 8:
        return packed
    return torch.cat([(packed >> (bits * i)) & (2**bits - 1) for i in range(8 // bits)], dim=-1)


@dataclass(frozen=True)
class Packed:
    """Codes of one side (K or V) of m tokens: codes (..., m, d * bits / 8) uint8, step and zero float16.

    K: step, zero (..., ceil(m / group), d). V: step, zero (..., m, d / group), group channels each.
    """

    codes: Tensor
    step: Tensor
    zero: Tensor
    bits: int
    group: int
    per: str  # "channel" for K, "token" for V

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """All tensors held."""
        return self.codes, self.step, self.zero

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(..., m, d) = zero + code * step."""
        codes = unpack(self.codes, self.bits).to(dtype)
        if self.per == "token":
            grouped = codes.unflatten(-1, (-1, self.group))
            return torch.addcmul(self.zero.to(dtype)[..., None], grouped, self.step.to(dtype)[..., None]).flatten(-2)
        m, full = codes.shape[-2], codes.shape[-2] // self.group
        step, zero = self.step.to(dtype), self.zero.to(dtype)
        cut = full * self.group
        body = torch.addcmul(
            zero[..., :full, None, :],
            codes[..., :cut, :].unflatten(-2, (full, self.group)),
            step[..., :full, None, :],
        ).flatten(-3, -2)
        if cut == m:
            return body
        rest = torch.addcmul(zero[..., full:, :], codes[..., cut:, :], step[..., full:, :])
        return torch.cat([body, rest], dim=-2)

    def scaled(self, of: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """K entries (..., m, d) whose scales are those at `of` (..., m) of all there are, counted through the heads."""
        step, zero = (x.reshape(-1, x.shape[-1])[of].to(dtype) for x in (self.step, self.zero))
        return torch.addcmul(zero, unpack(self.codes, self.bits).to(dtype), step)


def encode(x: Tensor, step: Tensor, zero: Tensor, bits: int) -> Tensor:
    """uint8 codes of numbers in a range (step, zero); those beyond it are clipped."""
    return ((x - zero.float()) / step.float()).round_().clamp_(0, 2**bits - 1).to(torch.uint8)


def quantise_k(keys: Tensor, bits: int, group: int) -> Packed:
    """Keys (..., m, d) per channel in groups of `group` tokens; a last partial group has its own scale."""
    x = keys.float()
    m = x.shape[-2]
    groups = -(-m // group)
    if pad := groups * group - m:  # repeating the last token changes neither minimum nor maximum
        x = torch.cat([x, x[..., -1:, :].expand(*x.shape[:-2], pad, x.shape[-1])], dim=-2)
    x = x.unflatten(-2, (groups, group))
    step, zero = span(x.amin(-2), x.amax(-2), bits)
    codes = encode(x, step[..., None, :], zero[..., None, :], bits)
    return Packed(pack(codes.flatten(-3, -2)[..., :m, :], bits), step, zero, bits, group, "channel")


def quantise_v(values: Tensor, bits: int, channels: int = 64) -> Packed:
    """Values (..., m, d) per token in groups of `plan.v_group(d, channels)` channels."""
    group = v_group(values.shape[-1], channels)
    x = values.float().unflatten(-1, (-1, group))
    step, zero = span(x.amin(-1), x.amax(-1), bits)
    codes = encode(x, step[..., None], zero[..., None], bits)
    return Packed(pack(codes.flatten(-2), bits), step, zero, bits, group, "token")


def fake_quant_k(keys: Tensor, bits: int, group: int) -> Tensor:
    """Keys after a round trip through `bits` (16: unchanged), in their own dtype."""
    return keys if bits == 16 else quantise_k(keys, bits, group).dequantise().to(keys.dtype)


def fake_quant_v(values: Tensor, bits: int) -> Tensor:
    """Values after a round trip through `bits` (16: unchanged), in their own dtype."""
    return values if bits == 16 else quantise_v(values, bits).dequantise().to(values.dtype)
