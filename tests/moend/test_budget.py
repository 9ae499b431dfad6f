"""Budgets, byte models and plan files."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moend.budget import Arch, Budget, eq1_bytes
from moend.errors import UserError
from moend.layer_bytes import Storage, layer_bytes, overshooting_layer_bytes, peak_layer_bytes
from moend.plan import LayerPlan, RoutingPlan

ARCH = Arch(layers=30, q_heads=9, kv_heads=3, head_dim=64, max_positions=8192)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("512", "512t"),
        (512, "512t"),
        (512.0, "512t"),
        ("1", "1t"),
        ("1e9", "1000000000t"),
        ("0.1", "0.1r"),
        (0.1, "0.1r"),
        ("10%", "0.1r"),
        ("100%", "1r"),
        ("12.5%", "0.125r"),
        ("64MiB", "67108864B"),
        ("1.5 KiB", "1536B"),
        ("2GiB", "2147483648B"),
    ],
)
def test_budget_grammar(text, canonical):
    budget = Budget.parse(text)
    assert str(budget) == canonical
    assert Budget.parse(canonical) == budget


@pytest.mark.req(2)
@pytest.mark.parametrize("text", ["0", "-1", "abc", "0%", "101%", "1.5", "", "nan", "inf", "-5%", "12 MB", True, None])
def test_budget_refuses(text):
    with pytest.raises(UserError):
        Budget.parse(text)


def test_budget_bytes():
    assert Budget.parse(512).to_bytes(ARCH, 1000) == 30 * 512 * 3 * 64 * 4
    assert Budget.parse("10%").to_bytes(ARCH, 1000) == ARCH.full_bytes(100)
    assert Budget.parse("1MiB").to_bytes(ARCH, 1000) == 2**20


@given(st.integers(1, 5000))
def test_share_of_all_is_full(tokens):
    assert Budget.parse("100%").to_bytes(ARCH, tokens) == ARCH.full_bytes(tokens)


def test_eq1_is_the_papers():
    # 7B model at 8 heads, d 128, 28 layers: 512 tokens at 16 bit are 56 MiB (MoE-nD Table 2)
    assert 28 * eq1_bytes(512, 8, 128, 16, 16) == 56 * 2**20
    # b * 4/1.5 tokens at K8/V4 are the same bytes
    assert 28 * eq1_bytes(512 * 4 / 1.5, 8, 128, 8, 4) == 56 * 2**20


def test_layer_bytes_by_hand():
    # 100 tokens, one head, d 64: 68 packed (3 groups of 32), 32 in the window
    storage = Storage(8, 4, group=32, window=32, positions="per_head")
    k = 68 * 64 + 3 * 64 * 4 + 32 * 64 * 2
    v = 68 * 32 + 68 * 4 + 32 * 64 * 2
    assert layer_bytes(100, storage, 1, 64) == k + v + 400
    assert layer_bytes(100, Storage(), 1, 64) == 100 * 256


@given(st.integers(1, 400), st.sampled_from([16, 8, 4, 2]), st.sampled_from([16, 8, 4, 2]), st.sampled_from([32, 64]))
def test_more_entries_never_cost_less(n, k_bits, v_bits, group):
    storage = Storage(k_bits, v_bits, group, group, "per_head")
    cost = layer_bytes(np.array([n, n + 1]), storage, 2, 64)
    assert cost[1] > cost[0]


def test_peak_is_the_largest_on_the_way():
    storage = Storage(8, 4, 32, 32, "shared")
    # from 50 entries (18 packed, 32 in the residual window) to 100: the window packs 32 whenever it reaches 64
    states, n, window_len = [], 50, 32
    for _ in range(51):
        states.append(int(layer_bytes(n, storage, 2, 64, window_len=window_len)))
        n, window_len = n + 1, window_len + 1
        if window_len == 64:
            window_len -= 32
    assert peak_layer_bytes(100, 50, storage, 2, 64) == max(states)


def test_plan_file_round_trip():
    layers = (LayerPlan(0.1, 51, 8, 4), LayerPlan(1.0, None, 16, 16, (3, 4)))
    plan = RoutingPlan("m", "r", 1024, "512t", "matched", "exact", 1.5, 0.0, layers, {"eq1_bytes": 1})
    assert RoutingPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    "layer",
    [
        {"keep": 0.5, "tokens": 0},
        {"keep": 0.5, "tokens": 2.5},
        {"keep": 2.0, "tokens": None},
        {"keep": float("nan"), "tokens": None},
        {"keep": "a", "tokens": 3},
        {"keep": 0.5, "tokens": 3, "k_bits": 3},
    ],
)
def test_impossible_layers_are_refused(layer):
    plan = RoutingPlan("m", "r", 8, "4t", "matched", "exact", None, None, (LayerPlan(0.5, 4),))
    data = json.loads(plan.to_json()) | {"layers": [layer]}
    with pytest.raises(UserError, match=r"p\.json"):
        RoutingPlan.from_json(json.dumps(data), "p.json")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"schema": 2}', '{"schema": 1, "layers": [{"kep": 1}]}'])
def test_foreign_plan_is_refused(text):
    with pytest.raises(UserError, match=r"p\.json"):
        RoutingPlan.from_json(text, "p.json")


def test_plan_file_is_plain_json():
    plan = RoutingPlan("m", "r", 8, "4t", "matched", "exact", None, None, (LayerPlan(0.5, 4),))
    assert json.loads(plan.to_json())["layers"][0]["k_bits"] == 16


@given(
    st.integers(1, 90),
    st.integers(1, 40),
    st.integers(0, 30),
    st.integers(0, 150),
    st.sampled_from([(16, 16), (8, 4), (2, 2)]),
)
def test_a_layer_that_is_cut_back_every_beta_tokens(cap, beta, short, new, bits):
    """A token at a time: it comes, the layer is cut where beta have come, a group that left the window is packed."""
    storage = Storage(*bits, group=32, window=8, positions="per_head").evicting(cap)
    n = start = max(cap - short, 1)
    tail = min(n, 8)
    most = int(layer_bytes(n, storage, 2, 64, window_len=tail))
    for token in range(1, new + 1):
        n, tail = n + 1, tail + 1
        if token % beta == 0 and n > cap:
            n, tail = cap, min(tail, cap)
        if tail - 8 >= 32:
            tail -= 32
        most = max(most, int(layer_bytes(n, storage, 2, 64, window_len=tail)))
    assert overshooting_layer_bytes(cap, beta, storage, 2, 64, start=start, new=new) == most
