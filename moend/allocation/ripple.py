"""RippleKV: budgets by how far a disturbance of a layer's values reaches the output (RippleKV, eq. 9 to 12)."""

from __future__ import annotations

import numpy as np

from moend.allocation.shares import Floats, whole, within
from moend.errors import UserError

EPSILON = 1e-12


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
