"""Random layer views for scorer tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moend.hf.rope import Rotary
from moend.scoring import LayerView


def roped(x: Tensor, positions: Tensor, rot: Rotary) -> Tensor:
    """x (B, H, n, d) turned by positions (B, n), pair by pair, in float64."""
    out = x.double().clone()
    r = rot.dim // 2
    for f in range(r):
        angle = positions.double()[:, None] * rot.inv_freq[f].double()
        a, b = x[..., f].double(), x[..., f + r].double()
        out[..., f] = rot.scaling * (a * angle.cos() - b * angle.sin())
        out[..., f + r] = rot.scaling * (b * angle.cos() + a * angle.sin())
    return out.float()


def view(
    n: int = 23,
    *,
    batch: int = 2,
    heads: int = 2,
    group: int = 3,
    still: int = 0,
    r: int = 3,
    window: int = 4,
    scaling: float = 1.2,
    padding: int = 0,
    start: int = 0,
    seed: int = 0,
    **changes: Any,
) -> LayerView:
    """A prompt of n tokens from position `start`, with `padding` left-padding columns in row 0 only."""
    g = torch.Generator().manual_seed(seed)
    d, hq = 2 * (r + still), heads * group
    rot = Rotary(1.0 / 50.0 ** (torch.arange(r) / r), scaling, 2 * r)
    keys, values = torch.randn(batch, heads, n, d, generator=g), torch.randn(batch, heads, n, d, generator=g)
    queries = torch.randn(batch, hq, window, d, generator=g)
    mean = torch.randn(2, hq, d // 2, generator=g)
    extra = torch.rand(hq, d // 2, generator=g)
    pads = torch.tensor([padding] + [0] * (batch - 1))[:, None]
    at = torch.arange(n)[None] - pads
    positions = torch.where(at >= 0, at + start, -1)
    made = LayerView(
        layer=1,
        keys=roped(keys, positions, rot),
        values=values,
        positions=positions,
        now=n - pads[:, 0] + start,
        queries=queries,
        query_positions=positions[:, -window:],
        scaling=d**-0.5,
        rotary=rot,
        statistics={"mean_real": mean[0], "mean_imag": mean[1], "mean_abs": mean.norm(dim=0) + extra},
        seed=7,
        observed={
            "accumulated": torch.rand(batch, heads, n, generator=g),
            "reconstruction": torch.rand(batch, heads, n, generator=g),
            "routing_query": torch.rand(batch, 2, n, generator=g),
            "routing_recon": torch.rand(batch, 2, n, generator=g),
        },
    )
    return replace(made, **changes)


def row(v: LayerView, b: int, skip: int = 0) -> LayerView:
    """One row alone, without its first `skip` columns."""

    def cut(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[b : b + 1]

    return replace(
        v,
        keys=v.keys[b : b + 1, :, skip:],
        values=v.values[b : b + 1, :, skip:],
        positions=v.positions[b : b + 1, ..., skip:],
        now=v.now[b : b + 1],
        queries=cut(v.queries),
        query_positions=cut(v.query_positions),
        observed={name: seen[b : b + 1, ..., skip:] for name, seen in v.observed.items()},
    )
