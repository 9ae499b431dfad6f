"""TriAttention's trigonometric importance: how strongly queries still to come are expected to attend to a key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moend.errors import UserError, unknown
from moend.hf.rope import pairs, unpairs
from moend.scoring.base import LayerView, Scorer


@dataclass(frozen=True)
class Trig(Scorer):
    """Expected q . k over future distances, from calibrated means of the queries before RoPE (TriAttention).

    With complex pairs f, RoPE's own scaling s, q_f and k_f before RoPE, for a key at p and offsets o in {1, 2, 4, ...}:

        score(o) = sum_f s^2 |E q_f| |k_f| cos(omega_f (now - p + o) + arg(E q_f conj k_f))
                 + sum_f s^2 (E|q_f| - |E q_f|) |k_f|

    reduced over the offsets, z-scored per query head over the entries (population deviation, at least 1e-6), then
    reduced over the query heads that share a KV head.

    Turning a key back by p and on to now - p + o leaves a rotation that no longer depends on p: the first sum is
    s Re(E q_f e^(i omega_f (now + o)) conj K_f) with K the key as it lies in the cache. So it is a plain product of
    cached keys with one vector per query head, into which the mean over offsets folds, and no key is turned back.
    Dimensions outside a partial rotary are pairs of frequency 0: their part is the expected product itself.

    Needs the calibration "queries": mean_real, mean_imag, mean_abs, each (H_q, d/2) in a layer.
    """

    offsets: str = "mean"  # mean or max over the offsets
    group: str = "max"  # mean or max over the query heads that share a KV head
    max_offset: int = 2**16  # the largest offset, in tokens

    statistics = "queries"

    def __post_init__(self) -> None:
        for setting, value in (("offsets", self.offsets), ("group", self.group)):
            if value not in ("mean", "max"):
                raise unknown(f"{setting} of scorer trig", str(value), ("mean", "max"))
        if self.max_offset < 1:
            raise UserError(f"max_offset of scorer trig must be >= 1, got {self.max_offset}")

    def __call__(self, view: LayerView) -> Tensor:
        """(H, n) float32, in standard deviations."""
        if view.rotary is None:
            raise ValueError("scorer trig needs the layer's rotary")
        rot, keys = view.rotary, view.keys.float()
        heads, _, dim = keys.shape
        real, imag, mean_abs = _statistics(view)
        scale, frequencies = rot.scales(dim).to(keys.device), rot.frequencies(dim).to(keys.device).double()

        # E q turned to now + offset. Angles are few and reach 2^17 rad, so they are computed in float64.
        offsets = 2.0 ** torch.arange(self.max_offset.bit_length(), dtype=torch.float64, device=keys.device)
        angle = (view.now + offsets)[:, None] * frequencies
        turn = torch.polar(torch.ones_like(angle), angle)  # (offsets, d/2)
        turn = turn.mean(0, keepdim=True) if self.offsets == "mean" else turn
        query = torch.complex(real, imag) * (turn * scale)[:, None]  # (1 or offsets, H_q, d/2)
        ahead = unpairs(query.real.float(), query.imag.float(), rot).unflatten(1, (heads, -1))  # (.., H, G, d)
        score = ahead[0] @ keys.mT  # (H, G, n)
        for at_offset in ahead[1:]:  # a running maximum: memory stays that of one offset
            score = torch.maximum(score, at_offset @ keys.mT)

        k_real, k_imag = pairs(keys, rot)
        size = (k_real * k_real).addcmul_(k_imag, k_imag).sqrt_()  # (H, n, d/2): |K_f|, which contains s once
        spread = (mean_abs - torch.hypot(real, imag)) * scale
        score = score + spread.unflatten(0, (heads, -1)) @ size.mT

        score = score - score.mean(-1, keepdim=True)
        score = score / score.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)
        return score.amax(1) if self.group == "max" else score.mean(1)


def _statistics(view: LayerView) -> tuple[Tensor, Tensor, Tensor]:
    """Re E q, Im E q and E|q| (H_q, d/2) of the layer; UserError where they are missing or of another model."""
    names = ("mean_real", "mean_imag", "mean_abs")
    if view.statistics is None or any(n not in view.statistics for n in names):
        raise UserError(
            f"scorer trig has no query statistics for layer {view.layer}: run `python -m pipelines.calibrate`"
        )
    real, imag, mean_abs = (view.statistics[n].to(view.keys.device, torch.float32) for n in names)
    heads, _, dim = view.keys.shape
    if real.shape[0] % heads or real.shape[1] != dim // 2:
        raise UserError(
            f"query statistics of shape {tuple(real.shape)} do not fit layer {view.layer} with {heads} KV heads of "
            f"{dim} dimensions: run `python -m pipelines.calibrate`"
        )
    return real, imag, mean_abs


SCORER = Trig
