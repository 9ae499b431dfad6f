"""Random layer views for scorer tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moend.hf.rope import Rotary
from moend.scoring import LayerView


def roped(x: Tensor, positions: Tensor, rot: Rotary) -> Tensor:
    """x (H, n, d) turned by positions (n,), pair by pair, in float64."""
    out = x.double().clone()
    r = rot.dim // 2
    for f in range(r):
        angle = positions.double() * rot.inv_freq[f].double()
        a, b = x[..., f].double(), x[..., f + r].double()
        out[..., f] = rot.scaling * (a * angle.cos() - b * angle.sin())
        out[..., f + r] = rot.scaling * (b * angle.cos() + a * angle.sin())
    return out.float()


def view(
    n: int = 23,
    *,
    heads: int = 2,
    group: int = 3,
    still: int = 0,
    r: int = 3,
    window: int = 4,
    scaling: float = 1.2,
    start: int = 0,
    seed: int = 0,
    **changes: Any,
) -> LayerView:
    """A prompt of n tokens from position `start`; the last `window` queries, or all where it is shorter."""
    g = torch.Generator().manual_seed(seed)
    d, hq, window = 2 * (r + still), heads * group, min(window, n)
    rot = Rotary(1.0 / 50.0 ** (torch.arange(r) / r), scaling, 2 * r)
    keys, values = torch.randn(heads, n, d, generator=g), torch.randn(heads, n, d, generator=g)
    queries = torch.randn(hq, window, d, generator=g)
    mean = torch.randn(2, hq, d // 2, generator=g)
    extra = torch.rand(hq, d // 2, generator=g)
    positions = torch.arange(start, start + n)
    made = LayerView(
        layer=1,
        keys=roped(keys, positions, rot),
        values=values,
        positions=positions,
        now=n + start,
        queries=queries,
        scaling=d**-0.5,
        rotary=rot,
        statistics={"mean_real": mean[0], "mean_imag": mean[1], "mean_abs": mean.norm(dim=0) + extra},
        seed=7,
        observed={
            "accumulated": torch.rand(heads, n, generator=g),
            "reconstruction": torch.rand(heads, n, generator=g),
            "routing_query": torch.rand(2, n, generator=g),
            "routing_recon": torch.rand(2, n, generator=g),
        },
    )
    return replace(made, **changes)


def asked(v: LayerView, window: int) -> list[int]:
    """Positions of the queries among the last `window` that there are."""
    assert v.queries is not None
    width = min(window, v.queries.shape[1])
    return list(range(v.now - width, v.now))
