"""At one budget and one moment every method holds the same bytes, or keeps everything, or says why it cannot."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moend.budget import Budget
from moend.cache import LayerSpec
from moend.errors import Infeasible, UserError
from moend.layer_bytes import layer_bytes
from moend.methods.bind import BoundMethod
from moend.methods.spec import method, method_names
from tests.bytes_table import PAGE, written
from tests.moend.methods.made import ARCH, bound

SHARE = 0.03  # of the budget that may stay unspent
CHOOSING = [n for n in method_names() if not method(n).keeps_all or method(n).joint_bits]


def next_entry(b: BoundMethod, spec: LayerSpec, new: int) -> int:
    """The bytes of one entry more in every KV head of a layer, at 16 bit, or with what else it opens.

    Below 16 bit that may be a group of K: its scales, or two scale slots where a layer evicts while decoding.
    """
    count = 1 if spec.heads else ARCH.kv_heads
    parts = [(x.schedule.cap or x.tokens, x.storage, count) for x in spec.heads or (spec,)]
    most = 0
    for cap, now, heads in parts:
        flat = heads * (4 * ARCH.head_dim + 8)
        then = b.storage(cap + 1, now.k_bits, now.v_bits)
        costs = [int(layer_bytes(n, x, heads, ARCH.head_dim)) for n, x in ((cap, now), (cap + 1, then))]
        most += max(flat, costs[1] - costs[0])
    return most


@pytest.mark.slow
@pytest.mark.req(4)
@settings(deadline=None, max_examples=400)
@example("2d_uniform", "6%", 330, 2, "prompt")  # the next entry opens a group of K
@example("2d_uniform", 128, 83, 200, "peak")  # a prompt shorter than what an eviction leaves
@given(
    st.sampled_from(CHOOSING),
    st.sampled_from(["6%", "12%", "25%", "40%", "60%", "85%", 48, 64, 128, 300, "400KiB"]),
    st.integers(40, 2000),
    st.sampled_from([1, 2, 16, 64, 200, 1000]),
    st.sampled_from(["prompt", "peak"]),
)
def test_nobody_leaves_more_than_a_little_unspent(name, budget, tokens, new, at):
    b = bound(name, budget, t_ref=None, at=at)
    total = b.budget.to_bytes(ARCH, tokens)
    try:
        after, peak = b.held(tokens, new)
    except Infeasible as e:
        assert Budget.parse(e.smallest).value > total
        return
    specs, held = b.specs(tokens, new), after if at == "prompt" else peak
    if b.fits(tokens, new):
        return
    assert held <= total
    assert b.plan(tokens, new).predicted["peak_bytes"] == peak
    stays = tokens + (new if at == "peak" and b.method.evicts else 0)
    if all(min(p.schedule.cap or p.tokens for p in s.heads or (s,)) >= stays for s in specs):
        return  # everything is kept
    assert total - held < max(SHARE * total, sum(next_entry(b, s, new) for s in specs))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(CHOOSING), st.sampled_from([64, "20%"]), st.integers(200, 800), st.integers(1, 400))
def test_between_evictions_nobody_holds_more_than_its_cap_and_beta(name, budget, tokens, new):
    b = bound(name, budget, t_ref=None)
    try:
        specs = b.specs(tokens, new)
    except Infeasible:
        return
    for s in specs:
        assert (s.schedule.cap is None) == (not b.method.evicts or s.tokens > tokens)
        assert s.schedule.cap is None or s.schedule.beta <= max(b._beta(s.schedule.cap), 1)


def test_an_output_that_does_not_fit_makes_prompt_only_methods_infeasible():
    with pytest.raises(Infeasible, match=r"its 400 new tokens stay, and budget_at=peak counts them; SnapKV\+decode"):
        bound("SnapKV", 300, t_ref=None, at="peak").specs(1000, 400)
    b = bound("SnapKV", 300, t_ref=None, at="peak", schedule="every")
    assert b.method.label == "SnapKV+decode" and method("SnapKV").label == "SnapKV"
    assert b.held(1000, 400)[1] <= ARCH.full_bytes(300)


def test_the_papers_protocol_is_stated_after_the_prompt():
    with pytest.raises(UserError, match="budget_at must be prompt"):
        bound("1d", 300, "paper", at="peak")
    with pytest.raises(UserError, match="unknown budget_at 'peek'"):
        bound("1d", 300, at="peek")


@pytest.mark.slow
def test_the_table_of_bytes_is_as_the_page_says():
    text = PAGE.read_text(encoding="utf-8")
    assert written(text) == text, "python -m tests.bytes_table"
