"""RippleKV: budgets by how far a disturbance of a layer's values reaches the output (RippleKV, eq. 9 to 12)."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import numpy as np

from moend.allocation.base import Allocation, Allocator, Task, at_least, choices
from moend.allocation.shares import Floats, shaped, whole, within
from moend.errors import Infeasible, UserError
from moend.plan import LayerPlan
from moend.registry import LATER

EPSILON = 1e-12


@dataclass(frozen=True)
class Ripple(Allocator):
    """As many entries as `uniform` holds in all, divided by how much the output minds noise on a layer's values."""

    r: float = 1.5  # entries of the most sensitive layer over those of the least sensitive one; 1 is uniform
    gamma: float = 4.0  # multipliers are clipped to [1 / gamma, gamma]
    signal: str = (
        "output"  # the response that budgets follow: output (KL at the model's output) | local (L2 in the layer)
    )

    layers: tuple[int, ...] | None = field(default=None, metadata=LATER)  # compressible layers, the paper's set A

    calibration = "ripple"

    def __post_init__(self) -> None:
        at_least("method.allocator.r", self.r, 1)
        at_least("method.allocator.gamma", self.gamma, 1)
        choices("method.allocator.signal", self.signal, ("output", "local"))
        if self.layers is not None and (
            not self.layers or not all(type(i) is int and i >= 0 for i in self.layers) or not _distinct(self.layers)
        ):
            raise UserError(f"method.allocator.layers must be numbers of layers from 0, each once, got {self.layers!r}")

    def plan(self, task: Task) -> Allocation:
        """See `ripple`; the profile is the mean over the examples of the calibration.

        Layers outside `layers` keep every entry at 16 bit, and the others divide what is left of the budget: algorithm
        1 speaks of compressible layers only. Infeasible where too little is left.
        """
        measured = task.artefact("ripple").tensors["response" if self.signal == "output" else "local"]
        profile = measured.double().mean(0).numpy()
        if self.layers is None:
            return Allocation(shaped(task, functools.partial(ripple, profile=profile, r=self.r, gamma=self.gamma)))
        cost, every = task.cost, range(task.cost.arch.layers)
        if beyond := [i for i in self.layers if i not in every]:
            raise UserError(f"method.allocator.layers names layer {beyond[0]}: the model has 0 to {every[-1]}")
        if cost.arch.windows is not None:
            raise UserError("method.allocator.layers is for models whose layers all grow: here some slide")
        mine, spent = sorted(self.layers), (len(every) - len(self.layers)) * cost.layer_cost(cost.top, 16, 16)
        left = replace(cost, arch=replace(cost.arch, layers=len(mine)), total=cost.total - spent)
        shape = functools.partial(ripple, profile=profile[mine], r=self.r, gamma=self.gamma)
        try:
            divided = shaped(replace(task, cost=left), shape)
        except Infeasible as e:
            raise Infeasible(
                f"{e}: the {len(every) - len(mine)} layers outside method.allocator.layers keep everything",
                f"{int(e.smallest.removesuffix('B')) + spent}B",
            ) from None
        whole_layer = LayerPlan(min(cost.top / cost.reference, 1.0), cost.top, 16, 16)
        plans = dict(zip(mine, divided, strict=True))
        return Allocation([plans.get(i, whole_layer) for i in every])


def _distinct(layers: tuple[int, ...]) -> bool:
    return len(set(layers)) == len(layers)


def multipliers(profile: Floats, r: float, gamma: float) -> Floats:
    """(L,) layer weights of mean one: r^s clipped to [1/gamma, gamma] and rescaled, s the profile scaled to [0, 1].

    A constant profile and r = 1 give weights of one.
    """
    if profile.ndim != 1 or not profile.size or not np.isfinite(profile).all() or (profile < 0).any():
        raise UserError("a sensitivity profile must hold one finite value >= 0 per layer")
    spread = profile.max() - profile.min()
    scaled = (profile - profile.min()) / (spread + EPSILON)
    weights = np.clip(r**scaled, 1 / gamma, gamma)
    return np.asarray(weights / weights.mean(), dtype=np.float64)


def ripple(total: int, low: int, high: int, *, profile: Floats, r: float, gamma: float) -> list[int]:
    """Entries of each layer, of sum `total`: total / L times its multiplier, rounded by largest remainder.

    None below `low` (what the base method protects), none above `high`: what one cannot take goes to the others in
    proportion.
    """
    return whole(within(multipliers(profile, r, gamma), total, low, high), total, profile)


ALLOCATOR = Ripple
