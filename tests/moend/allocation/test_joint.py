"""Entries and bits per head: the choice against every choice there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moend.allocation import CostModel, Task
from moend.allocation.joint import Joint
from moend.budget import Arch
from moend.calibration.artefact import Artefact
from moend.calibration.sensitivity import encode
from moend.errors import Infeasible, UserError
from moend.layer_bytes import Storage, layer_bytes
from moend.plan import Config

KEEPS = (0.1, 0.4, 1.0)
PAIRS = ((8, 4), (4, 4))
CONFIGS = tuple(Config(k, *pair) for k in KEEPS for pair in PAIRS)
TOKENS = 64


def storage(cap, k_bits, v_bits):
    return Storage(k_bits, v_bits, 8, cap // 8, "per_head")


def demand(total, arch, least=1):
    return CostModel(
        arch=arch,
        reference=TOKENS,
        exact=True,
        least=least,
        new=0,
        total=total,
        cost="resident",
        storage=storage,
        reserve=lambda cap: 0,
    )


def artefact(table, configs=CONFIGS):
    return Artefact("damage", {}, {"heads": torch.tensor(table), "configs": encode(configs)})


def bytes_of(config, dim):
    n = max(round(config.keep * TOKENS), 1)
    stored = storage(n, config.k_bits, config.v_bits)
    return int(layer_bytes(n, stored.whole if n >= TOKENS else stored, 1, dim))


def choose(total, arch, table, **rest):
    return plan(demand(total, arch), artefact(table), KEEPS, ((16, 8, 4), (16, 4)), **rest)


def plan(cost, table, keeps, bits, **rest):
    made = Joint(unit="head", table="damage", keeps=keeps, extend_lattice=False, **rest)
    allocation = made.plan(Task(cost, bits, 0, None, lambda kind: table))
    return allocation.layers, allocation.solution


def brute(table, total, dim):
    """The least total damage, every configuration of every head tried."""
    options = []
    for own in itertools.chain.from_iterable(table):
        options.append([(bytes_of(c, dim), d) for c, d in zip(CONFIGS, own, strict=True)])
        options[-1].append((bytes_of(Config(1.0, 16, 16), dim), 0.0))
    fitting = [sum(d for _, d in x) for x in itertools.product(*options) if sum(b for b, _ in x) <= total]
    return min(fitting, default=None)


@pytest.mark.req(20)
@settings(deadline=None, max_examples=40)
@given(st.integers(1, 2), st.integers(1, 2), st.integers(0, 2**32 - 1), st.floats(0.02, 1.2))
def test_no_other_choice_that_fits_does_less_damage(layers, heads, seed, share):
    arch = Arch(layers, 2 * heads, heads, 16, 4096)
    table = np.random.default_rng(seed).random((layers, heads, len(CONFIGS)))
    total = int(share * arch.full_bytes(TOKENS))
    best = brute(table, total, arch.head_dim)
    if best is None:
        with pytest.raises(Infeasible):
            choose(total, arch, table)
        return
    plans, solution = choose(total, arch, table)
    assert solution.objective <= best + 1e-9  # below it: what the lattice leaves is spent between its shares
    held = 0
    for plan in plans:
        assert plan.keep == pytest.approx(np.mean([x.keep for x in plan.heads]))
        assert plan.k_bits == max(x.k_bits for x in plan.heads)
        for x in plan.heads:
            assert x.tokens == max(round(x.keep * TOKENS), 1)
            held += bytes_of(Config(x.keep, x.k_bits, x.v_bits), arch.head_dim)
    assert held == solution.cost <= total
    assert (plans, solution) == choose(total, arch, table)


def test_one_head_that_looks_back_keeps_all_the_other_little():
    """A toy by hand: only head 1 of layer 0 minds; the bytes of one whole head at 4 bit and three small ones do."""
    arch = Arch(2, 4, 2, 16, 4096)
    table = np.zeros((2, 2, len(CONFIGS)))
    table[0, 1] = [5.0 * (1 - c.keep) for c in CONFIGS]
    total = bytes_of(Config(1.0, 4, 4), 16) + 3 * bytes_of(Config(0.1, 4, 4), 16)
    plans, solution = choose(total, arch, table)
    assert [[x.keep for x in plan.heads] for plan in plans] == [[0.1, 1.0], [0.1, 0.1]]
    assert [[x.tokens for x in plan.heads] for plan in plans] == [[6, 64], [6, 6]]
    assert {(x.k_bits, x.v_bits) for plan in plans for x in plan.heads} == {(4, 4)}
    assert (solution.objective, solution.cost) == (0.0, total)
    assert (plans[0].keep, plans[0].tokens) == (0.55, 35)


def test_what_was_not_measured_per_head_is_refused():
    arch = Arch(1, 2, 2, 16, 4096)
    whole = Artefact("damage", {}, {"table": torch.zeros(1, 6), "configs": encode(CONFIGS)})
    with pytest.raises(UserError, match="measured for whole layers"):
        plan(demand(10**6, arch), whole, KEEPS, ((4,), (4,)))
    with pytest.raises(UserError, match=r"none of method\.allocator\.keeps x bits"):
        plan(demand(10**6, arch), artefact(np.zeros((1, 2, 6))), (0.3,), ((4,), (4,)))
