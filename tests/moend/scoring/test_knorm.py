"""Knorm against its formula."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moend.cache.select import select
from moend.methods.spec import method
from moend.scoring import LayerView, scorer
from tests.moend.scoring.views import view


@pytest.mark.req(20)
def test_by_hand() -> None:
    """Keys (3, 4), (0, 1), (5, 12), (0, 2) have norms 5, 1, 13, 2: of two, those at 1 and 3 stay."""
    keys = torch.tensor([[3.0, 4.0], [0.0, 1.0], [5.0, 12.0], [0.0, 2.0]])[None]
    got = scorer("knorm")(LayerView(0, keys, keys, torch.arange(4), 4))
    assert got.tolist() == [[-5.0, -1.0, -13.0, -2.0]]
    m = method("Knorm")
    assert (m.n_sink, m.recent, m.schedule) == (0, 0, "prompt")
    assert select(got, torch.arange(4), 2, m.n_sink, int(m.recent)).tolist() == [[1, 3]]


@pytest.mark.req(20)
@settings(deadline=None, max_examples=25)
@given(st.integers(1, 30), st.integers(0, 99))
def test_formula(n: int, seed: int) -> None:
    """Explicit sums, and RoPE does not matter but for its scale."""
    v = view(n, seed=seed, window=1)
    got = scorer("knorm")(v)
    for h in range(2):
        for i in range(n):
            want = -math.sqrt(sum(float(x) ** 2 for x in v.keys[h, i]))
            assert math.isclose(float(got[h, i]), want, rel_tol=1e-5)
