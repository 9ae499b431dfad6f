"""The model of bytes and time: by hand on round numbers, and what must hold of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moend.budget import Arch
from perf.scaling import SHAPES, Kept, Machine, Shape, against, prefill_seconds, step_seconds, table2

TOY = Shape("toy", Arch(2, 4, 2, 10, 100), 1000, 1000)
MOE = Shape("moe", Arch(2, 4, 2, 10, 100), 1000, 200, 1, 4)
SLOW = Machine("slow", 1e3, 1e9, 1e6, 0.5, 0.5)  # bound by bandwidth
DULL = Machine("dull", 1e9, 1e3, 1e6, 0.5, 0.5)  # bound by arithmetic


def test_by_hand():
    assert Kept("", 1).bytes(TOY.arch, 50) == TOY.arch.full_bytes(50) == 2 * 2 * 50 * 10 * 4
    assert step_seconds(TOY, SLOW, [(3000, 50), (500, 5)]) == (2000 + 3500) / 500
    assert step_seconds(TOY, DULL, [(0, 50)]) == (2000 + 4 * 4 * 10 * 2 * 50) / 500
    assert prefill_seconds(TOY, DULL, 7) == (2000 * 7 + 2 * 4 * 10 * 2 * 49) / 500
    assert MOE.active() == 200 + 800 / 4
    assert math.isclose(MOE.read(2), 200 + 800 * (1 - (3 / 4) ** 2))


@given(st.integers(1, 64))
def test_rows_share_weights(rows):
    """Rows together never read less than one, nor more than each alone; a dense model reads all once."""
    assert TOY.read(rows) == TOY.read(1) == 1000
    assert MOE.read(1) <= MOE.read(rows) <= min(rows * MOE.read(1), 1000)
    one = [(100.0, 5.0)]
    assert step_seconds(MOE, SLOW, one) <= step_seconds(MOE, SLOW, one * rows) <= rows * step_seconds(MOE, SLOW, one)


def test_known_sizes():
    """Qwen3-30B-A3B uses 3.3e9 weights per token; a 7B model's cache at 16k tokens is 0.94 GB."""
    assert SHAPES[2].active() == pytest.approx(3.3e9, rel=0.02)
    assert Kept("", 1).bytes(SHAPES[0].arch, 16384) == 28 * 4 * 16384 * 128 * 4


def test_a_sweep_costs_less_as_one():
    hours = table2(SHAPES[0], SLOW)
    assert hours["prefill"] < hours["fused"] < hours["one by one"]


def test_points_on_the_line_are_predicted():
    points = {str(n): {"ms": {"full": {"median": 10 + n / 100}, "floor": {"median": 10}}} for n in (100, 200, 800)}
    assert against(points, 8) == [(100, 11, pytest.approx(11)), (200, 12, pytest.approx(12))]
