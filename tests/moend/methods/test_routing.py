"""What routing reads and plans: profiles, tables of other kinds, feasible budgets of the papers' tables."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from moend.budget import Arch, Budget
from moend.calibration.artefact import Artefact
from moend.calibration.damage import DamageSettings
from moend.calibration.sensitivity import encode
from moend.errors import Blocked, Infeasible, UserError
from moend.methods.bind import BoundMethod, bind, reference_length
from moend.methods.spec import from_fields, method
from tests.moend.methods.made import (
    ARCH,
    ROUTED,
    bound,
    damage,
    queries,
)


@pytest.mark.req(20)
def test_ripple_follows_its_signal():
    """The most sensitive layer gets r times the least sensitive one's entries; the signal and r are the method's."""
    response = torch.tensor([[0.0, 2.0, 1.0, 0.5, 4.0, 1.0], [0.2, 2.0, 1.0, 0.5, 6.0, 1.0]])
    artefact = Artefact("ripple", {}, {"response": response, "local": response.flip(1)})

    def tokens(**fields: Any) -> list[int]:
        b = bind(
            method("RippleKV", allocator=fields),
            Budget.parse("20%"),
            "matched",
            ARCH,
            t_ref=None,
            artefacts={"ripple": artefact},
        )
        return [x.tokens for x in b.specs(1000, 16)]

    snap = [x.tokens for x in bound("SnapKV", "20%", t_ref=None).specs(1000, 16)]
    one = tokens()
    assert one.index(max(one)) == 4 and one.index(min(one)) == 0
    assert max(one) / min(one) == pytest.approx(1.5, abs=0.02)
    assert max(tokens(r=1.25)) < max(one) < max(tokens(r=1.75))
    assert tokens(r=1) == snap
    assert tokens(signal="local").index(max(tokens(signal="local"))) == 1
    assert sum(one) == sum(snap)


@pytest.mark.req(24)
@pytest.mark.parametrize("name", ["1d", "2d_hetero"])
def test_a_missing_calibration_names_the_command(name):
    b = bind(method(name), Budget.parse(100), "matched", ARCH, t_ref=1024)
    with pytest.raises(Blocked, match=r"pipelines\.calibrate"):
        _ = b.plan(1000, 16) if name == "2d_hetero" else b.artefact("queries")


def test_reference_length():
    m = method("2d_hetero")
    assert reference_length(m, Budget.parse(512), 16384, 512) == 16384
    assert reference_length(m, Budget.parse(64), 17000, 16384) == 256  # long generation: 4 b
    assert reference_length(m, Budget.parse("10%"), 16384, 512) is None
    assert reference_length(method("2d_hetero", allocator={"t_ref": 99}), Budget.parse("10%"), 16384, 512) == 99
    assert reference_length(method("2d_hetero", allocator={"t_ref": "sample"}), Budget.parse(64), 16384, 512) is None


@pytest.mark.parametrize("budget", [512, 1024, 2048, 4096])
def test_moend_table2_is_feasible(budget):
    """No 2d_hetero cell of the paper's LongBench table may be infeasible under matched resident bytes."""
    arch = Arch(28, 28, 4, 128, 131072)
    for name in ROUTED:
        plan = bound(name, budget, arch=arch, t_ref=16384).plan(16000, 512)
        assert sum(plan.predicted.values()) > 0
        assert plan.predicted["resident_bytes"] <= arch.full_bytes(budget)


@pytest.mark.parametrize("budget", [64, 128, 256, 512])
def test_moend_table4_is_feasible(budget):
    arch = Arch(28, 28, 4, 128, 131072)
    m = method("2d_hetero")
    t_ref = reference_length(m, Budget.parse(budget), 17000, 16384)
    plan = bound("2d_hetero", budget, arch=arch, t_ref=t_ref).plan(200, 16384)
    assert 0 < plan.predicted["resident_bytes"] <= arch.full_bytes(budget)


def test_from_fields_names_the_nearest_field():
    with pytest.raises(UserError, match="'beta'"):
        from_fields({"name": "x", "betta": 3})


def test_routing_can_read_a_kl_table():
    """`table: kl` feeds the same solver; a coarse table offers what it measured, and doing nothing costs nothing."""
    from moend.calibration.kl import named_configs

    configs = named_configs("coarse")
    values = torch.ones(ARCH.layers, len(configs))
    values[2] = 100.0  # layer 2 must be left alone
    kl = Artefact("kl", {}, {"table": values, "configs": encode(configs)}, {})
    b = bind(
        method("2d_hetero", allocator={"table": "kl"}),
        Budget.parse("45%"),
        "matched",
        ARCH,
        t_ref=None,
        artefacts={"kl": kl, "queries": queries()},
    )
    assert b.method.calibrations == ("kl", "queries")
    plan = b.plan(1000, 16)
    assert (plan.layers[2].keep, plan.layers[2].k_bits, plan.layers[2].v_bits) == (1.0, 16, 16)
    assert 1 <= plan.objective < 100  # others gave way for it


def test_ripple_2d_spares_the_layer_that_its_table_fears_for():
    """A layer keeps its tokens where cutting them hurts, and every plan is one of what was measured."""
    made = damage()
    made.tensors["table"][3] *= 1000
    b = bind(method("ripple_2d"), Budget.parse("10%"), "matched", ARCH, t_ref=None, artefacts={"damage": made})
    assert b.method.calibrations == ("damage",)
    plan = b.plan(1000, 16)
    assert plan.layers[3].keep == max(x.keep for x in plan.layers) > 0.2
    measured = {*DamageSettings().configs, (1.0, 16, 16)}
    assert {(x.k_bits, x.v_bits) for x in plan.layers} <= {(k, v) for _, k, v in measured}
    with pytest.raises(Infeasible, match="ripple_2d cannot meet the budget"):
        replace_budget(b, "0.5%").plan(1000, 16)
    with pytest.raises(Blocked, match="needs a damage calibration and has none"):
        bind(method("ripple_2d"), Budget.parse("10%"), "matched", ARCH, t_ref=None).plan(1000, 16)


def replace_budget(b: BoundMethod, budget: str) -> BoundMethod:
    return dataclasses.replace(b, budget=Budget.parse(budget), _plans={})


def test_what_keeps_every_token_is_costed_at_the_samples_own_length() -> None:
    """No cap holds a quantised cache of 90 tokens at the 64 that its cell was planned for."""
    arch = Arch(4, 4, 2, 64, 4096)
    bound = bind(method("KIVI"), Budget.parse(64), "matched", arch, t_ref=64)
    assert bound.specs(60, 1)
    with pytest.raises(Infeasible, match="KIVI cannot meet the budget 64t"):
        bound.specs(90, 1)
