"""Compositions: what every packaged method plans, and that plans keep their promises."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moend.allocation import CostModel
from moend.allocation.uniform import largest
from moend.budget import Arch, Budget
from moend.cache import LayerCapture, Prefilled
from moend.calibration.artefact import Artefact
from moend.errors import Infeasible, UserError
from moend.hf.rope import Rotary
from moend.layer_bytes import layer_bytes
from moend.methods.bind import BoundMethod, bind
from moend.methods.spec import from_fields, method, method_names
from moend.plan import RoutingPlan
from tests.moend.methods.made import (
    ARCH,
    COMPRESSING,
    ROUTED,
    bound,
    peak,
    queries,
    sensitivity,
)


def test_every_packaged_method_is_its_file():
    assert {"full", "1d", "2d_uniform", "2d", "2d_hetero", "SnapKV", "StreamingLLM", "Random"} <= set(method_names())
    for name in method_names():
        assert method(name).name == name


@pytest.mark.parametrize(("wrong", "right"), [("snapkv", "SnapKV"), ("2d_heter", "2d_hetero"), ("Full", "full")])
def test_near_miss_names_the_right_method(wrong, right):
    with pytest.raises(UserError, match=f"'{right}'"):
        method(wrong)


@pytest.mark.parametrize(
    "fields",
    [
        {"beta": 0},
        {"n_sink": -1},
        {"recent": -1},
        {"recent": 1.0},
        {"allocator": {"cost": "bytes"}},
        {"allocator": {"solver": "best"}},
        {"allocator": {"keeps": [0.0]}},
        {"allocator": {"keeps": []}},
        {"allocator": {"t_ref": "auto2"}},
        {"allocator": {"t_ref": 0}},
        {"allocator": {"unit": "head"}},
        {"allocator": 3},
        {"allocator": None},
        {"allocator": {"name": "rippel"}},
        {"scorer": {"name": "trigg"}},
        {"scorer": None},
        {"precision": {"k_bits": 8}},
        {"precision": {"k_bits": 7, "v_bits": 4}},
        {"precision": {"k_bits": "foo", "v_bits": 4}},
        {"allocator": {"bits": []}},
        {"allocator": {"bits": [16, 3]}},
        {"bogus": 1},
        {"allocator": {"name": "ripple", "r": 0.9}, "precision": {"k_bits": 16, "v_bits": 16}},
        {"allocator": {"name": "ripple", "gamma": 0.5}, "precision": {"k_bits": 16, "v_bits": 16}},
        {"allocator": {"name": "ripple", "signal": "outputs"}, "precision": {"k_bits": 16, "v_bits": 16}},
        {"allocator": "ripple"},
        {"allocator": "pyramid"},
    ],
)
def test_bad_fields_are_refused(fields):
    with pytest.raises(UserError):
        method("2d_hetero", **fields)


def test_a_threshold_needs_scores_that_compare_over_heads():
    with pytest.raises(UserError, match="those of scorer moezip are places in each head's own order"):
        method("MoEZip", allocator="global_topk")
    with pytest.raises(UserError, match="scorer tova gives all heads of a layer the same scores"):
        method("KVZip", scorer="tova")
    assert method("SnapKV", allocator="global_topk").allocator == {"name": "global_topk"}


@pytest.mark.req(4)
@pytest.mark.req(19)
@settings(deadline=None, max_examples=150)
@example("2d_uniform", "400KiB", 40, 190, "peak")  # reaches its cap by growing
@example("2d_hetero", 300, 632, 3, "peak")  # keeps all of some layers
@given(
    st.sampled_from(COMPRESSING),
    st.sampled_from(["12%", "25%", "60%", 64, 300, "400KiB"]),
    st.integers(40, 1000),
    st.integers(1, 200),
    st.sampled_from(["prompt", "peak"]),
)
def test_matched_never_passes_the_budget(name, budget, tokens, new, at):
    """After the prompt, and at any point until the end where the budget binds at the peak."""
    b = bound(name, budget, t_ref=None, at=at)
    total = b.budget.to_bytes(ARCH, tokens)
    try:
        specs = b.specs(tokens, new)
    except Infeasible as e:
        assert Budget.parse(e.smallest).value > total
        return
    for spec in specs:
        assert spec.tokens >= 1
    if b.fits(tokens, new):
        return
    if at == "peak":
        assert b.held(tokens, new)[1] <= total
        assert not b.method.evicts or peak(b, tokens, new) <= total
    held = sum(
        int(layer_bytes(min(n, tokens), x.whole if n >= tokens else x, heads, ARCH.head_dim))
        for s in specs
        for n, x, heads in [(p.tokens, p.storage, 1 if s.heads else ARCH.kv_heads) for p in s.heads or (s,)]
    )
    assert held <= total


@pytest.mark.req(4)
@pytest.mark.req(19)
@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(COMPRESSING),
    st.sampled_from([1, 2, 20, 64, "10%", "60%", "99%", "20KiB"]),
    st.sampled_from([1, 2, 3, 40, 90, 150]),
    st.sampled_from([1, 8, 40, 200]),
    st.sampled_from([None, 64, 256]),
    st.sampled_from([(4, 2, 64), (4, 1, 80), (6, 2, 96), (4, 2, 40)]),
    st.sampled_from([{}, {"window": 0}, {"group": 16, "window": 48}, {"group": 128}, {"beta": 7}]),
    st.sampled_from(["prompt", "peak"]),
)
@example("StreamingLLM", 2, 90, 8, None, (4, 2, 40), {}, "peak")  # a cap of one entry would hold two
@example("SnapKV", 64, 150, 8, 64, (4, 2, 64), {}, "prompt")  # keep 1.0 of a reference shorter than the prompt
@example("2d_hetero", 64, 150, 200, 64, (4, 2, 64), {}, "peak")
def test_held_bytes_never_pass_the_budget(name, budget, tokens, new, t_ref, shape, fields, at):
    """Real rows, fed a token at a time: after the prompt, and while decoding for methods that evict then."""
    arch = Arch(2, *shape, max_positions=4096)
    b = bound(name, budget, arch=arch, t_ref=t_ref, at=at, **fields)
    try:
        b.specs(tokens, new)
    except Infeasible:
        return
    q_heads, heads, dim = shape
    layers = [
        LayerCapture(*torch.randn(2, 1, heads, tokens, dim), torch.randn(1, q_heads, min(tokens, 32), dim))
        for _ in range(2)
    ]
    rotary = [Rotary(torch.rand(dim // 2), 1.0, dim)] * 2
    shapes = {"reconstruction": heads, "routing_query": 2, "accumulated": heads}
    observed = {name: [torch.rand(1, rows, tokens)] * 2 for name, rows in shapes.items()}
    prefilled = Prefilled(layers, torch.arange(tokens)[None], None, None, observed)
    cache = b.fork(prefilled, new, rotary=rotary, scaling=[0.1] * 2)
    limit = arch.full_bytes(tokens + new) if b.fits(tokens, new) else b.budget.to_bytes(arch, tokens)
    assert cache.resident_bytes() <= limit
    for _ in range(new if at == "peak" else 0):
        for layer in cache.layers:
            for _ in layer.decoding.feed(*torch.randn(2, 1, heads, 1, dim)):
                pass
        assert cache.resident_bytes() <= limit


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(["prompt", "every"]),
    st.sampled_from([(16, 16), (8, 4), (16, 2), (2, 2)]),
    st.sampled_from([{}, {"window": 0}, {"window": 100}, {"group": 128}, {"beta": 3}]),
    st.sampled_from([(5, 4), (30, 29), (257, 200), (300, 200), (600, 10)]),
    st.floats(0.01, 1),
    st.booleans(),
    st.sampled_from(["prompt", "peak"]),
)
def test_uniform_is_the_largest_that_fits(schedule, bits, fields, lengths, share, exact, at):
    arch = Arch(2, 4, 2, 40, 4096)
    m = method("Random", schedule=schedule, precision=dict(zip(("k_bits", "v_bits"), bits, strict=True)), **fields)
    (reference, new), total = lengths, int(share * arch.full_bytes(lengths[0]))
    b = bind(m, Budget("bytes", float(total)), "matched", arch, t_ref=None, at=at)
    demand = CostModel(
        arch=arch,
        reference=reference,
        exact=exact,
        least=b.least,
        new=new,
        total=total,
        cost="resident",
        storage=m.storage,
        reserve=lambda cap: b.reserve(cap, new),
        evicts=m.evicts,
        at=at,
    )
    fits = [n for n in range(b.least, max(demand.top, b.least) + 1) if 2 * demand.layer_cost(n, *bits) <= total]
    if fits:
        assert largest(demand, *bits) == max(fits)
    else:
        with pytest.raises(Infeasible):
            largest(demand, *bits)


@pytest.mark.parametrize("name", COMPRESSING)
def test_a_hundred_percent_is_full(name):
    assert all(s.tokens >= 10**6 and not s.storage.quantised for s in bound(name, "100%", t_ref=None).specs(3, 50))


def test_all_tokens_at_fewer_bits_must_fit_too():
    """Quantisation alone cannot reach any budget: infeasible with the smallest that it can, never a larger cache."""
    m = from_fields({"name": "q", "allocator": "all", "precision": {"k_bits": 4, "v_bits": 4}})
    with pytest.raises(Infeasible) as e:
        bind(m, Budget.parse("10%"), "matched", ARCH, t_ref=None).specs(1000, 16)
    specs = bind(m, Budget.parse(e.value.smallest), "matched", ARCH, t_ref=None).specs(1000, 16)
    assert all(s.tokens > 1016 and s.storage.k_bits == 4 for s in specs)


def test_all_tokens_with_routed_bits():
    m = from_fields(
        {
            "name": "q",
            "allocator": {"name": "joint", "keeps": [1.0]},
            "precision": {"k_bits": "joint", "v_bits": "joint"},
        }
    )
    assert m.calibrations == ("sensitivity",)
    b = bind(m, Budget.parse("50%"), "matched", ARCH, t_ref=None, artefacts={"sensitivity": sensitivity()})
    plan = b.plan(1000, 16)
    assert all(x.keep == 1.0 for x in plan.layers)
    assert len({(x.k_bits, x.v_bits) for x in plan.layers}) > 1
    assert plan.predicted["resident_bytes"] <= b.budget.to_bytes(ARCH, 1000)


def test_a_plan_or_calibration_of_another_model_is_refused():
    plan = bound("2d_hetero", 300).plan(1000, 16)
    short = dataclasses.replace(plan, layers=plan.layers[:-1])
    with pytest.raises(UserError, match="5 layers, the model has 6"):
        bound("2d_hetero", 300, given=short)
    headed = dataclasses.replace(plan, layers=(dataclasses.replace(plan.layers[0], head_tokens=(3, 4)),) * 6)
    with pytest.raises(UserError, match="head_tokens"):
        bound("2d_hetero", 300, given=headed)
    more = dataclasses.replace(plan, layers=(dataclasses.replace(plan.layers[0], heads=(plan.layers[0],) * 3),) * 6)
    with pytest.raises(UserError, match="other than the model's 2 KV heads"):
        bound("ripple_2d", 300, given=more)
    foreign = dataclasses.replace(queries(), identity={"arch": dataclasses.asdict(ARCH) | {"kv_heads": 4}})
    with pytest.raises(UserError, match="kv_heads: has 4, needs 2"):
        bind(method("1d"), Budget.parse(300), "matched", ARCH, t_ref=None, artefacts={"queries": foreign})


@pytest.mark.parametrize("budget", ["10%", 200])
def test_a_plan_per_head_survives_its_file(budget):
    """Written and read, it gives the specs that it was made for: no head's entries or bits are lost."""
    t_ref = None if budget == "10%" else 1024
    made = bound("ripple_2d_head", budget, t_ref=t_ref)
    plan = made.plan(1000, 16)
    assert {len(x.heads) for x in plan.layers} == {2}
    assert all(h.tokens is None for x in plan.layers for h in x.heads) == (t_ref is None)
    assert len({(h.keep, h.k_bits) for x in plan.layers for h in x.heads}) > 2
    back = RoutingPlan.from_json(plan.to_json())
    assert back == plan
    again = bound("ripple_2d_head", budget, t_ref=t_ref, given=back)
    assert again.specs(1000, 16) == made.specs(1000, 16)


def test_scores_are_not_shared_between_calibrations():
    """Cells of one prefill whose calibrations differ must not read each other's scores."""
    torch.manual_seed(0)
    layers = [LayerCapture(*torch.randn(2, 1, 2, 200, 64), torch.randn(1, 4, 32, 64)) for _ in range(6)]
    prefilled = Prefilled(layers, torch.arange(200)[None], None, None)
    kept = []
    for name in "ab":
        tensors = {k: torch.randn(6, 4, 32) for k in ("mean_real", "mean_imag", "mean_abs")}
        artefacts = {"queries": Artefact("queries", {"data": name}, tensors, {})}
        b = bind(method("1d"), Budget.parse(60), "matched", ARCH, t_ref=None, artefacts=artefacts)
        cache = b.fork(prefilled, 8, rotary=[Rotary(torch.rand(32), 1.0, 64)] * 6, scaling=[0.1] * 6)
        kept.append(cache.layer_kv[0][0].true_positions())
    assert not torch.equal(*kept)


@pytest.mark.parametrize("budget", ["8%", "20%", "45%", "80%"])
@pytest.mark.parametrize("seed", range(4))
def test_hetero_is_never_worse_than_2d(budget, seed):
    """2d's choices are among 2d_hetero's, and the exact solver finds the best of them."""
    artefacts = {"sensitivity": sensitivity(seed=seed), "queries": queries()}
    plans = [
        bind(method(n), Budget.parse(budget), "matched", ARCH, t_ref=None, artefacts=artefacts).plan(1000, 16)
        for n in ("2d", "2d_hetero")
    ]
    assert plans[1].objective <= plans[0].objective + 1e-9
    assert len({x.keep for x in plans[0].layers}) == 1


def test_the_papers_protocol_has_the_papers_bytes():
    """1d holds b tokens, 2d_uniform 8/3 b at the same eq. (1) bytes, 2d and 2d_hetero solve under 8/3 b at 16 bit."""
    one = bound("1d", 192, "paper").plan(1000, 16)
    two = bound("2d_uniform", 192, "paper").plan(1000, 16)
    assert one.layers[0].tokens == 192
    assert two.layers[0].tokens == 512
    assert one.predicted["eq1_bytes"] == two.predicted["eq1_bytes"] == 6 * 192 * 2 * 64 * 4
    for name in ROUTED:
        plan = bound(name, 192, "paper").plan(1000, 16)
        assert one.predicted["eq1_bytes"] < plan.predicted["eq1_bytes"] <= 6 * 512 * 2 * 64 * 4
    assert all(x.tokens == 512 for x in bound("2d", 192, "paper").plan(1000, 16).layers)


@pytest.mark.parametrize(("name", "fields"), [("MiniKV", {}), ("1d", {"precision": {"k_bits": 4, "v_bits": 4}})])
def test_the_papers_exchange_rate_is_of_routed_and_k8v4_methods_only(name, fields):
    """Any other quantised method gets the bytes of 1d, not 8/3 entries for one: MiniKV then had a third of them."""
    one = bound("1d", 192, "paper", t_ref=None).plan(10_000, 16).predicted["eq1_bytes"]
    other = bound(name, 192, "paper", t_ref=None, **fields).plan(10_000, 16).predicted["eq1_bytes"]
    assert one - 6 * 2 * 64 * 4 <= other <= one  # but for less than one entry per layer and head


def routed(budget: object, length: int | None, **allocator: Any) -> BoundMethod:
    fields = {"allocator": {"name": "joint", "solver": "greedy_paper", **allocator}}
    return bound("2d_hetero", budget, "paper", t_ref=length, **fields)


def test_a_share_of_one_never_evicts_in_the_papers_protocol():
    """Table 4's mechanism: layers with keep = 1 grow with the output, those below hold their caps."""
    b, tokens, new = routed(300, 1024), 1024, 4096
    plan = b.plan(tokens, new)
    whole = [x.keep == 1 for x in plan.layers]
    assert any(whole) and not all(whole)
    for spec, keeps in zip(b.specs(tokens, new), whole, strict=True):
        assert (spec.tokens > 10**6 and spec.schedule.cap is None) == keeps
    same = bound("2d_hetero", 300, t_ref=1024, allocator={"name": "joint", "solver": "greedy_paper"})
    assert all(s.schedule.cap is not None for s in same.specs(tokens, new))  # at matched bytes every layer has a cap
    assert all(s.schedule.cap is not None for s in bound("1d", 2000, "paper", t_ref=1024).specs(3000, 16))


def test_shares_of_a_sample_are_of_its_prompt_in_the_papers_protocol():
    """MATH-500: prompts of 900 tokens, outputs of 16k. Most layers keep all, as the paper says (more than 75 %)."""
    for budget, least in ((128, 0.0), (512, 0.76)):
        b = routed(budget, None, t_ref="sample")
        plan = b.plan(900, 16_384)
        assert plan.t_ref == 900
        assert sum(x.keep == 1 for x in plan.layers) / 6 >= least
        assert plan.predicted["eq1_bytes"] <= 6 * budget * 2 * 64 * 4 * 4 / 1.5 + 6 * 64 * 16
        specs = b.specs(900, 16_384)
        assert all(s.tokens > 10**6 or s.tokens == round(x.keep * 900) for s, x in zip(specs, plan.layers, strict=True))
    matched = bound("2d_hetero", 512, t_ref=None, allocator={"name": "joint", "t_ref": "sample"})
    assert matched.plan(900, 100).t_ref == 1000  # nobody holds more than the budget, output included


@pytest.mark.req(3)
@pytest.mark.parametrize("name", method_names())
def test_room_for_all_means_nothing_is_compressed(name):
    b = bound(name, "1e9")
    assert b.fits(1000, 24)
    assert all(s.tokens >= 10**6 and not s.storage.quantised for s in b.specs(1000, 24))
    if name != "full":
        assert not bound(name, "1e9", always_quantise=True).fits(1000, 24)
        assert not bound(name, 1000).fits(1000, 24)


@pytest.mark.req(2)
@pytest.mark.parametrize("name", COMPRESSING)
def test_smallest_budgets(name):
    """One token: the method keeps at least one entry, or says which budget it needs, and that budget works."""
    try:
        assert all(s.tokens >= 1 for s in bound(name, 1).specs(1000, 16))
    except Infeasible as e:
        assert all(s.tokens >= 1 for s in bound(name, e.smallest).specs(1000, 16))


def test_lattice_is_extended_only_where_needed():
    assert min(x.keep for x in bound("2d_hetero", "30%", t_ref=None).plan(1000, 16).layers) >= 0.1
    assert min(x.keep for x in bound("2d_hetero", "2.5%", t_ref=None).plan(4000, 16).layers) < 0.1
    with pytest.raises(Infeasible):
        bound("2d_hetero", "2.5%", t_ref=None, allocator={"extend_lattice": False}).plan(4000, 16)


SHAPED = ["PyramidKV", "RippleKV"]


@pytest.mark.req(4)
@pytest.mark.req(20)
@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(SHAPED),
    st.sampled_from(["10%", "20%", "45%", "90%", 64, 300, "700KiB"]),
    st.integers(40, 1000),
    st.integers(1, 200),
    st.sampled_from([(16, 16), (8, 4)]),
)
def test_divided_budgets_are_the_uniform_one_s_bytes(name, budget, tokens, new, bits):
    """At 16 bit exactly SnapKV's entries in all (less positions where a layer keeps all), below it never more bytes."""
    precision = dict(zip(("k_bits", "v_bits"), bits, strict=True))
    b, snap = (bound(n, budget, t_ref=None, precision=precision) for n in (name, "SnapKV"))
    try:
        specs = snap.specs(tokens, new)
    except Infeasible:
        with pytest.raises(Infeasible):
            b.specs(tokens, new)
        return
    ours, uniform = [x.tokens for x in b.specs(tokens, new)], [min(s.tokens, tokens) for s in specs]
    if b.fits(tokens, new):
        assert uniform == [tokens] * 6
        return
    ours = [min(n, tokens) for n in ours]
    assert all(1 <= n <= tokens for n in ours)
    if bits == (16, 16):
        assert min(ours) >= min(32, *uniform)  # what SnapKV protects
        assert sum(ours) == sum(uniform)
        assert name == "RippleKV" or ours == sorted(ours, reverse=True)
    held = sum(
        int(layer_bytes(n, s.storage, ARCH.kv_heads, ARCH.head_dim))
        for n, s in zip(ours, b.specs(tokens, new), strict=True)
    )
    assert held <= b.budget.to_bytes(ARCH, tokens)
