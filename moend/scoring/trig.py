"""TriAttention's trigonometric importance: how strongly queries still to come are expected to attend to a key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moend.errors import UserError, unknown
from moend.hf.rope import pairs, unpairs
from moend.scoring.base import LayerView


@dataclass(frozen=True)
class Trig:
    """Expected q . k over future distances, from calibrated means of the pre-RoPE queries (TriAttention).

    With complex pairs f, attention scaling s, q_f and k_f before RoPE, for a key at p and offsets o in {1, 2, 4, ...}:

        score(o) = sum_f s^2 |E q_f| |k_f| cos(omega_f (now - p + o) + arg(E q_f conj k_f))
                 + sum_f s^2 (E|q_f| - |E q_f|) |k_f|

    averaged over the offsets (`offsets="max"`: the largest), z-scored per query head over the entries that are not
    padding (population deviation, floor 1e-6), then the largest (`group="mean"`: mean) over the heads of a group.

    Turning a key back by p and on to now - p + o leaves a rotation that no longer depends on p: the first sum is
    s Re(E q_f e^(i omega_f (now + o)) conj K_f) with K the key as it lies in the cache. So it is a plain product of
    cached keys with one vector per query head, into which the mean over offsets folds, and nothing is un-rotated.
    Dimensions outside a partial rotary are pairs of frequency 0: their part is the expected product itself.

    Needs statistics {"mean_real", "mean_imag", "mean_abs"}, each (Hq, d/2). Scores are in standard deviations.
    """

    offsets: str = "mean"
    group: str = "max"
    max_offset: int = 2**16

    name = "trig"
    per_head = True
    last_queries = 0
    observes = ()
    at_decode = True
    statistics = "queries"

    def __post_init__(self) -> None:
        for setting, value in (("offsets", self.offsets), ("group", self.group)):
            if value not in ("mean", "max"):
                raise unknown(f"{setting} of scorer trig", str(value), ("mean", "max"))
        if self.max_offset < 1:
            raise UserError(f"max_offset of scorer trig must be >= 1, got {self.max_offset}")

    def __call__(self, view: LayerView) -> Tensor:
        """(B, H, n) float32, -inf at padding."""
        rot, stats = view.rotary, view.statistics
        if stats is None or any(k not in stats for k in ("mean_real", "mean_imag", "mean_abs")):
            raise UserError(
                f"scorer trig has no query statistics for layer {view.layer}: run `python -m pipelines.calibrate`"
            )
        if rot is None:
            raise ValueError("scorer trig needs the layer's rotary")
        batch, heads, _, dim = view.keys.shape
        device = view.keys.device
        real, imag, mean_abs = (stats[k].to(device, torch.float32) for k in ("mean_real", "mean_imag", "mean_abs"))
        if real.shape[0] % heads or real.shape[1] != dim // 2:
            raise UserError(
                f"query statistics of shape {tuple(real.shape)} do not fit layer {view.layer} with {heads} KV heads of "
                f"{dim} dimensions: run `python -m pipelines.calibrate`"
            )
        keys = view.keys.float()
        shape = (batch, heads, real.shape[0] // heads, -1)
        scale = rot.scales(dim).to(device)

        # The mean query, turned to now + offset. Angles are few and reach 2^17 rad, so they are computed in float64.
        offsets = 2.0 ** torch.arange(self.max_offset.bit_length(), dtype=torch.float64, device=device)
        angle = (view.now.double()[:, None] + offsets)[..., None] * rot.frequencies(dim).to(device).double()
        turn = torch.polar(torch.ones_like(angle), angle)  # (B, offsets, d/2)
        turn = turn.mean(1, keepdim=True) if self.offsets == "mean" else turn
        query = torch.complex(real, imag)[None, None] * (turn * scale)[:, :, None]  # (B, 1 or offsets, Hq, d/2)
        ahead = unpairs(query.real.float(), query.imag.float(), rot)
        score: Tensor | None = None
        for i in range(ahead.shape[1]):  # a running maximum: memory stays that of one offset
            one = ahead[:, i].reshape(shape) @ keys.transpose(-1, -2)
            score = one if score is None else torch.maximum(score, one, out=one)
        assert score is not None

        k_real, k_imag = pairs(keys, rot)
        size = (k_real * k_real).addcmul_(k_imag, k_imag).sqrt_()
        spread = (mean_abs - torch.hypot(real, imag)) * scale
        score = score + spread.reshape(1, *shape[1:]) @ size.transpose(-1, -2)  # (B, H, G, n)

        valid = view.valid[:, :, None]
        count = valid.sum(-1, keepdim=True).clamp(min=1)
        score = torch.where(valid, score, 0.0)
        score = score - score.sum(-1, keepdim=True) / count
        deviation = (torch.where(valid, score, 0.0).square().sum(-1, keepdim=True) / count).sqrt_()
        score = score / deviation.clamp(min=1e-6)
        score = score.amax(2) if self.group == "max" else score.mean(2)
        return torch.where(view.valid, score, -torch.inf)


SCORER = Trig
