from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moend.allocation import solver as solver_module
from moend.allocation.solver import SOLVERS, solve, solve_common
from moend.errors import Infeasible, UserError


def brute(s, m, budget):
    """The least total S of all C^L choices that fit."""
    choices = itertools.product(range(s.shape[1]), repeat=s.shape[0])
    rows = np.arange(s.shape[0])
    fitting = (c for c in choices if m[rows, c].sum() <= budget)
    return min((math.fsum(s[rows, c]) for c in fitting), default=None)


def naive_greedy(s, m, budget, adjacent):
    """Section 4 as written: cheapest everywhere, then the best dS/dm that still fits, until none does."""
    chains = []
    for row_s, row_m in zip(s, m, strict=True):
        chain = []
        for c in sorted(range(len(row_s)), key=lambda c: (row_m[c], row_s[c], c)):
            if not chain or row_s[c] < row_s[chain[-1]]:
                chain.append(c)
        chains.append(chain)
    at = [0] * len(s)

    def cost():
        return sum(m[i, chains[i][a]] for i, a in enumerate(at))

    while True:
        best = None
        for i, chain in enumerate(chains):
            for j in range(at[i] + 1, at[i] + 2 if adjacent else len(chain)):
                if j >= len(chain):
                    continue
                dm = m[i, chain[j]] - m[i, chain[at[i]]]
                rate = (s[i, chain[at[i]]] - s[i, chain[j]]) / dm
                if cost() + dm <= budget and (best is None or rate > best[0]):
                    best = (rate, i, j)
        if best is None:
            return tuple(chain[a] for chain, a in zip(chains, at, strict=True))
        at[best[1]] = best[2]


@st.composite
def instances(draw, ties=False):
    layers, configs = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    top = draw(st.sampled_from([3, 20, 10**6]))
    m = rng.integers(0, top, (layers, configs))
    s = rng.integers(0, 4, (layers, configs)).astype(float) if ties or draw(st.booleans()) else rng.random(m.shape)
    low, high = m.min(1).sum(), m.max(1).sum()
    budget = int(low + draw(st.floats(0, 1.05)) * (high - low))
    return s, m, budget


@given(instances())
@settings(max_examples=150, deadline=None)
def test_exact_is_the_brute_force_optimum(instance):
    s, m, budget = instance
    found = solve(s, m, budget, "exact")
    assert found.objective == pytest.approx(brute(s, m, budget), abs=1e-9)
    assert found.gap == 0.0
    assert found.bound <= found.objective


@given(instances(), st.sampled_from(SOLVERS))
@settings(max_examples=150, deadline=None)
@pytest.mark.req(19)
def test_a_solution_fits_and_describes_itself(instance, name):
    s, m, budget = instance
    found = solve(s, m, budget, name)
    rows = np.arange(len(s))
    assert found.cost == m[rows, found.choice].sum() <= budget
    assert found.objective == pytest.approx(s[rows, found.choice].sum(), abs=1e-9)
    assert found.solver == name
    assert found.gap >= 0
    assert found.bound <= found.objective
    assert found == solve(s, m, budget, name)


@given(instances())
@settings(max_examples=100, deadline=None)
def test_greedy_is_never_better_and_its_gap_covers_the_optimum(instance):
    s, m, budget = instance
    optimum = solve(s, m, budget, "exact").objective
    for name in ("greedy", "greedy_paper"):
        found = solve(s, m, budget, name)
        assert found.objective >= optimum - 1e-9
        assert found.objective * (1 - found.gap) <= optimum + 1e-9


@given(instances())
@settings(max_examples=100, deadline=None)
def test_greedy_equals_the_naive_loop(instance):
    s, m, budget = instance
    for name, adjacent in (("greedy_paper", True), ("greedy", False)):
        expected = naive_greedy(s, m, budget, adjacent)
        assert solve(s, m, budget, name).choice == expected


@given(instances(), st.floats(0, 0.5))
@settings(max_examples=100, deadline=None)
def test_more_budget_is_never_worse(instance, extra):
    s, m, budget = instance
    assert solve(s, m, budget + int(extra * m.sum())).objective <= solve(s, m, budget).objective + 1e-9


@given(instances(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_order_of_layers_does_not_matter(instance, rng):
    s, m, budget = instance
    order = list(range(len(s)))
    rng.shuffle(order)
    assert solve(s[order], m[order], budget).objective == pytest.approx(solve(s, m, budget).objective, abs=1e-9)


def test_hand_made_case_where_greedy_loses():
    # Layer 0's small step has the best rate (3 per byte) and then blocks layer 1's large one (2.9 per byte).
    s = np.array([[3.0, 0.0], [29.0, 0.0]])
    m = np.array([[0, 1], [0, 10]])
    assert solve(s, m, 10, "greedy_paper").choice == (1, 0)
    found = solve(s, m, 10, "exact")
    assert (found.choice, found.objective, found.cost) == ((0, 1), 3.0, 10)
    assert found.bound == pytest.approx(32 - 3 - 9 * 2.9)  # one byte to layer 0, nine tenths of layer 1's step


def test_hand_made_case_where_the_next_step_is_poor():
    # The chain's next entry gains nothing to speak of; only a solver that looks further sees the one behind it.
    s = np.array([[10.0, 9.9, 0.0], [5.0, 4.0, 4.0]])
    m = np.array([[0, 2, 4], [0, 4, 5]])
    assert solve(s, m, 4, "greedy_paper").choice == (0, 1)
    assert solve(s, m, 4, "greedy").choice == (2, 0)


def test_ties_go_to_the_cheaper_then_the_lower_column():
    s = np.array([[1.0, 0.0, 0.0, 0.0]])
    m = np.array([[1, 3, 2, 2]])
    for name in SOLVERS:
        assert solve(s, m, 3, name).choice == (2,)


def test_dropped_states_leave_an_honest_certificate(monkeypatch):
    rng = np.random.default_rng(3)
    m = np.sort(rng.integers(1, 10**6, (12, 20)), axis=1)
    s = 1e6 - m + 1e4 * np.cumsum(rng.random(m.shape), axis=1)  # all rates nearly equal: bounds prune little
    budget = int(m.min(1).sum() + 0.3 * (m.max(1) - m.min(1)).sum())
    optimum = solve(s, m, budget)
    monkeypatch.setattr(solver_module, "STATES", 4)
    rough = solve(s, m, budget)
    assert rough.gap > 0
    assert rough.objective * (1 - rough.gap) <= optimum.objective <= rough.objective
    assert rough.cost <= budget


def test_infeasible_names_the_smallest_budget():
    with pytest.raises(Infeasible, match="needs 7 bytes, the budget is 6") as error:
        solve(np.zeros((2, 2)), np.array([[3, 9], [4, 9]]), 6)
    assert error.value.smallest == "7B"
    assert solve(np.zeros((2, 2)), np.array([[3, 9], [4, 9]]), 7).cost == 7


def test_bad_input_is_refused():
    with pytest.raises(UserError, match="Did you mean 'greedy'"):
        solve(np.zeros((1, 1)), np.zeros((1, 1), int), 1, "gredy")
    with pytest.raises(ValueError, match="layer 0, configuration 1 is nan"):
        solve(np.array([[0.0, np.nan]]), np.zeros((1, 2), int), 1)
    with pytest.raises(ValueError, match="whole numbers"):
        solve(np.zeros((1, 2)), np.array([[1.5, 2.0]]), 3)
    with pytest.raises(ValueError, match="must both be"):
        solve(np.zeros((1, 2)), np.zeros((2, 1), int), 3)


@given(instances(), st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_common_group_is_the_best_of_the_groups(instance, count, seed):
    s, m, budget = instance
    groups = np.random.default_rng(seed).integers(0, count, s.shape[1])
    best = [brute(s[:, groups == g], m[:, groups == g], budget) for g in np.unique(groups)]
    fitting = [b for b in best if b is not None]
    if not fitting:
        with pytest.raises(Infeasible) as error:
            solve_common(s, m, budget, groups)
        assert solve_common(s, m, int(error.value.smallest[:-1]), groups).cost == int(error.value.smallest[:-1])
        return
    found = solve_common(s, m, budget, groups)
    assert found.objective == pytest.approx(min(fitting), abs=1e-9)
    assert len({int(groups[c]) for c in found.choice}) == 1
    assert found.cost == m[np.arange(len(s)), found.choice].sum() <= budget
    assert found.gap == 0.0
    assert solve(s, m, budget).objective <= found.objective + 1e-9  # 2d_hetero is never worse than 2d
