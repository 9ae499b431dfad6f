"""RippleKV: budgets by how far a disturbance of a layer's values reaches the output (RippleKV, eq. 9 to 12)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from moend.allocation.base import Allocation, Allocator, Task, at_least, choices
from moend.allocation.shares import Floats, shaped, whole, within
from moend.errors import UserError

EPSILON = 1e-12


@dataclass(frozen=True)
class Ripple(Allocator):
    """As many entries as `uniform` holds in all, divided by how much the output minds noise on a layer's values."""

    r: float = 1.5  # entries of the most sensitive layer over those of the least sensitive one; 1 is uniform
    gamma: float = 4.0  # multipliers are clipped to [1 / gamma, gamma]
    signal: str = (
        "output"  # the response that budgets follow: output (KL at the model's output) | local (L2 in the layer)
    )

    calibration = "ripple"

    def __post_init__(self) -> None:
        at_least("method.allocator.r", self.r, 1)
        at_least("method.allocator.gamma", self.gamma, 1)
        choices("method.allocator.signal", self.signal, ("output", "local"))

    def plan(self, task: Task) -> Allocation:
        """See `ripple`; the profile is the mean over the examples of the calibration."""
        measured = task.artefact("ripple").tensors["response" if self.signal == "output" else "local"]
        profile = measured.double().mean(0).numpy()
        return Allocation(shaped(task, functools.partial(ripple, profile=profile, r=self.r, gamma=self.gamma)))


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
