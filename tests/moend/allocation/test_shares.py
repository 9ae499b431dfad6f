"""PyramidKV's and RippleKV's division of entries among layers: exact sums, bounds, order, degenerate profiles."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moend.allocation import CostModel, Task
from moend.allocation.pyramid import pyramid
from moend.allocation.ripple import Ripple, multipliers, ripple
from moend.allocation.shares import whole, within
from moend.budget import Arch
from moend.calibration.artefact import Artefact
from moend.errors import Infeasible, UserError
from moend.layer_bytes import Storage
from moend.plan import LayerPlan

PROFILES = st.lists(st.floats(0, 1e3, allow_nan=False), min_size=1, max_size=128)


@pytest.mark.req(20)
def test_multipliers_by_hand():
    """s 1, 2, 3 with r = 4: 1, 2, 4 before scaling; gamma 3 clips to 1, 2, 3."""
    profile = np.array([2.0, 1.0, 3.0])
    np.testing.assert_allclose(multipliers(profile, 4.0, 8.0), np.array([2, 1, 4]) * 3 / 7, rtol=1e-9)
    np.testing.assert_allclose(multipliers(profile, 4.0, 3.0), np.array([2, 1, 3]) * 3 / 6, rtol=1e-9)
    assert ripple(30, 0, 100, profile=profile, r=4.0, gamma=3.0) == [10, 5, 15]
    assert ripple(31, 0, 100, profile=profile, r=4.0, gamma=3.0) == [10, 5, 16]  # 10.33, 5.17, 15.5


def test_surplus_goes_to_the_others_in_proportion():
    """Shares 10, 5, 15 with at most 12: the 3 that are too many go two to one; with at least 7: they come so."""
    profile = np.array([2.0, 1.0, 3.0])
    assert ripple(30, 0, 12, profile=profile, r=4.0, gamma=3.0) == [12, 6, 12]
    assert ripple(31, 7, 100, profile=profile, r=4.0, gamma=3.0) == [10, 7, 14]  # 24 as 2 to 3: 9.6, 14.4


@settings(deadline=None, max_examples=300)
@given(PROFILES, st.integers(1, 4000), st.floats(1, 64), st.floats(1, 64), st.integers(0, 200), st.integers(0, 5000))
@example([0.0], 1, 1.0, 1.0, 0, 0)
@example([0.0] * 128, 17, 1.5, 4.0, 32, 0)
@example([1e-15, 0.0], 17, 64.0, 4.0, 32, 0)
def test_ripple_properties(values, mean, r, gamma, low, room):
    profile, layers = np.array(values), len(values)
    low, high, total = min(low, mean), mean + room, mean * layers
    budgets = ripple(total, low, high, profile=profile, r=r, gamma=gamma)
    assert sum(budgets) == total
    assert all(low <= b <= high for b in budgets)
    levels = [[b for v, b in zip(values, budgets, strict=True) if v == level] for level in sorted(set(values))]
    assert all(max(less) <= min(more) for less, more in itertools.pairwise(levels))  # monotone in the profile
    assert ripple(total, low, high, profile=profile, r=1.0, gamma=gamma) == [mean] * layers
    assert ripple(total, low, high, profile=profile, r=r, gamma=1.0) == [mean] * layers
    flat = np.full(layers, values[0])
    assert ripple(total, low, high, profile=flat, r=r, gamma=gamma) == [mean] * layers


@settings(deadline=None, max_examples=100)
@given(PROFILES, st.floats(1, 8), st.floats(0.5, 100), st.floats(0.1, 10))
def test_multipliers_do_not_depend_on_scale(values, r, factor, shift):
    profile = np.array(values)
    one = multipliers(profile, r, 1e9)
    assert one.mean() == pytest.approx(1)
    if np.ptp(profile) > 1e-3:
        np.testing.assert_allclose(multipliers(profile * factor + shift, r, 1e9), one, rtol=1e-5)
        assert one.max() / one.min() == pytest.approx(r, rel=1e-6)


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [1.0, float("inf")], [1.0, -1e-9], [[1.0, 2.0]]])
def test_broken_profiles_are_refused(values):
    with pytest.raises(UserError, match="finite value >= 0 per layer"):
        multipliers(np.array(values), 1.5, 4.0)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.floats(0.05, 20), min_size=1, max_size=40), st.integers(0, 20), st.integers(0, 60), st.floats(0, 1))
def test_within_is_one_factor_clipped(weights, low, room, share):
    w, high = np.array(weights), low + room
    total = len(w) * (low + share * room)
    x = within(w, total, low, high)
    assert x.sum() == pytest.approx(total, abs=1e-6)
    assert (x >= low).all() and (x <= high).all()
    inside = (x > low + 1e-9) & (x < high - 1e-9)
    if inside.any():
        factor = x[inside] / w[inside]
        np.testing.assert_allclose(factor, factor[0], rtol=1e-6)
        assert (w[x >= high - 1e-9] * factor[0] >= high - 1e-6).all()
        assert (w[x <= low + 1e-9] * factor[0] <= low + 1e-6).all()


def test_within_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="cannot hold 7"):
        within(np.ones(3), 7, 0, 2)


def test_whole_is_largest_remainder():
    assert whole(np.array([1.6, 2.7, 3.7]), 8, np.array([0.0, 0.0, 1.0])) == [1, 3, 4]
    assert whole(np.array([1.5, 2.5, 3.0]), 7, np.array([0.0, 1.0, 0.0])) == [1, 3, 3]  # a tie: by rank


@pytest.mark.req(20)
def test_pyramid_by_hand():
    """b = 72, w = 32: min = 2, max = 78, so 110, 91, 72, 53, 34; at most 80: max = 48, min = 32: 80, 76, 72, 68, 64."""
    assert pyramid(360, 32, 10**6, layers=5, window=32) == [110, 91, 72, 53, 34]
    assert pyramid(360, 32, 80, layers=5, window=32) == [80, 76, 72, 68, 64]
    assert pyramid(72, 32, 100, layers=1, window=32) == [72]
    assert pyramid(100, 20, 100, layers=5, window=32) == [20] * 5


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 128), st.integers(1, 3000), st.integers(0, 64), st.integers(0, 4000))
def test_pyramid_properties(layers, mean, window, room):
    high = mean + room
    budgets = pyramid(mean * layers, min(window, mean), high, layers=layers, window=window)
    assert sum(budgets) == mean * layers
    assert all(min(window, mean) <= b <= high for b in budgets)
    assert budgets == sorted(budgets, reverse=True)
    exact = np.array(budgets, dtype=float)
    if mean > window and layers > 1:
        spare = mean - window
        most = min(1.95 * spare, high - window)
        line = window + most - np.arange(layers) * 2 * (most - spare) / (layers - 1)
        assert np.abs(exact - line).max() < 1


def layers_of(total: int, **settings: Any) -> list[LayerPlan]:
    arch = Arch(layers=4, q_heads=2, kv_heads=1, head_dim=8, max_positions=4096)
    cost = CostModel(
        arch=arch, reference=100, exact=False, least=1, new=0, total=total, cost="eq1", storage=_stored,
        reserve=lambda cap: 0, at="prompt",
    )  # fmt: skip
    profile = torch.tensor([[3.0, 1.0, 9.0, 1.0]])
    held = Artefact("ripple", {}, {"response": profile, "local": profile}, {})
    task = Task(cost, ((16,), (16,)), protected=0, fixed=None, artefact=lambda kind: held)
    return Ripple(**settings).plan(task).layers


def _stored(cap: int, k_bits: int, v_bits: int) -> Storage:
    return Storage(k_bits, v_bits, 64, 0, "none")


def test_layers_outside_set_a_keep_everything():
    """200 entries of 8 channels: layer 1 keeps its 100, the three others share 99 (3 x 33) by the mapping."""
    total = 200 * 8 * 4
    plans = layers_of(total, layers=(0, 2, 3), r=2.0)
    assert plans[1].tokens == 100 and plans[1].keep == 1
    assert [plans[i].tokens for i in (0, 2, 3)] == ripple(99, 0, 100, profile=np.array([3.0, 9, 1]), r=2.0, gamma=4.0)
    assert layers_of(total, r=2.0) == layers_of(total, layers=(0, 1, 2, 3), r=2.0)  # A is all layers by default
    with pytest.raises(Infeasible, match="the 3 layers outside"):
        layers_of(total, layers=(2,))
    with pytest.raises(UserError, match="names layer 4: the model has 0 to 3"):
        layers_of(total, layers=(0, 4))
    for wrong in ((), (0, 0), (-1,), (1.5,)):
        with pytest.raises(UserError, match=r"method\.allocator\.layers must be numbers"):
            Ripple(layers=wrong)
