"""MoEZip's mathematics: the trace against the matrix it is the trace of, anchor counts, and the order of entries."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moend.errors import UserError
from moend.scoring import LayerView, scorer
from moend.scoring.moezip import (
    Propagation,
    anchor_count,
    anchor_counts,
    fisher_trace,
    largest_trace,
    ranking,
    strongest_attention,
)

logits = st.lists(st.floats(-6, 6, width=32), min_size=2, max_size=16)


@pytest.mark.req(5)
@settings(deadline=None)
@given(logits)
def test_softmax_trace_is_that_of_the_explicit_fisher_matrix(values):
    x = torch.tensor(values, dtype=torch.float64)
    g = x.softmax(-1)
    jacobian = torch.autograd.functional.jacobian(lambda z: z.softmax(-1), x)
    matrix = torch.diag(g) - torch.outer(g, g)
    torch.testing.assert_close(jacobian, matrix)  # for a softmax the Fisher matrix is its Jacobian
    # and it is the covariance of the score, d log g_e / dz = onehot(e) - g
    score = torch.eye(len(g), dtype=torch.float64) - g
    torch.testing.assert_close((score.T * g) @ score, matrix)
    assert float(fisher_trace(g, "softmax")) == pytest.approx(float(matrix.trace()), abs=1e-6)


@pytest.mark.req(5)
@settings(deadline=None)
@given(logits)
def test_sigmoid_trace_is_that_of_independent_gates(values):
    x = torch.tensor(values, dtype=torch.float64)
    g = torch.sigmoid(x)
    jacobian = torch.autograd.functional.jacobian(torch.sigmoid, x)
    torch.testing.assert_close(jacobian, torch.diag(g * (1 - g)))
    assert float(fisher_trace(g, "sigmoid")) == pytest.approx(float(jacobian.trace()), abs=1e-5)


@pytest.mark.req(5)
def test_both_formulas_on_the_same_logits_and_on_one_distribution():
    x = torch.tensor([2.0, 0.0, -1.0])
    soft, sig = fisher_trace(x.softmax(-1), "softmax"), fisher_trace(torch.sigmoid(x), "sigmoid")
    assert float(soft) == pytest.approx(
        1 - sum((math.exp(v) / (math.exp(2) + 1 + math.exp(-1))) ** 2 for v in (2, 0, -1))
    )
    assert float(sig) == pytest.approx(sum(s * (1 - s) for s in (1 / (1 + math.exp(-v)) for v in (2, 0, -1))))
    assert abs(float(soft) - float(sig)) > 0.1
    g = x.softmax(-1)  # one g that sums to 1: sum g (1 - g) = 1 - sum g^2
    assert float(fisher_trace(g, "softmax")) == pytest.approx(float(fisher_trace(g, "sigmoid")), abs=1e-6)


def test_the_largest_traces_are_reached():
    assert (
        float(fisher_trace(torch.full((8,), 1 / 8), "softmax")) == pytest.approx(largest_trace(8, "softmax")) == 0.875
    )
    assert float(fisher_trace(torch.full((8,), 0.5), "sigmoid")) == pytest.approx(largest_trace(8, "sigmoid")) == 2.0
    assert float(fisher_trace(torch.eye(8)[0], "softmax")) == 0.0


@pytest.mark.parametrize("bad", [float("nan"), -0.1, 1.2])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_gates_that_are_none_are_refused(bad, kind):
    with pytest.raises(ValueError, match="gates"):
        fisher_trace(torch.tensor([0.5, bad]), kind)


@pytest.mark.req(5)
@pytest.mark.parametrize(
    ("budget", "gamma", "anchors"),
    [
        (256, 0.0, 32),
        (256, 1.0, 64),
        (1000, 0.0, 50),
        (10_000, 1.0, 128),
        (31, 1.0, 31),
        (32, 0.0, 32),
        (1, 0.5, 1),
        (0, 1.0, 0),
    ],
)
def test_anchor_count(budget, gamma, anchors):
    assert anchor_count(budget, gamma) == anchors


@settings(deadline=None)
@given(st.integers(0, 3000), st.floats(0, 1), st.integers(0, 64), st.integers(64, 200))
def test_anchor_counts_grow_by_one_at_most_and_never_pass_the_budget(budget, gamma, least, most):
    counts = anchor_counts(torch.arange(budget + 2), gamma, least, most)
    steps = counts.diff()
    assert bool(((steps == 0) | (steps == 1)).all())
    assert bool((counts <= torch.arange(budget + 2)).all())
    assert int(counts[budget]) == min(budget, max(least, min(most, math.floor(budget * (0.05 + 0.2 * gamma) + 1e-9))))


@pytest.mark.req(5)
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_ranking_holds_the_papers_choice_of_every_budget(data):
    heads, n = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 60))
    least = data.draw(st.integers(0, 12))
    most = data.draw(st.integers(least, 20))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    ties = data.draw(st.booleans())
    base = torch.rand(heads, n, generator=generator)
    base = (base * 4).round() if ties else base
    received = torch.rand(n, generator=generator)
    received = (received * 3).round() if ties else received
    received[n - data.draw(st.integers(0, n - 1)) :] = -torch.inf  # what follows the context is never an anchor
    counts = anchor_counts(torch.arange(1, n + 1), data.draw(st.floats(0, 1)), least, most)
    rank = ranking(base, received, counts)
    assert bool((rank.sort(-1).values == torch.arange(n)).all())
    anchors = sorted(range(n), key=lambda i: (-received[i].item(), i))
    for budget in range(1, n + 1):
        possible = [i for i in anchors if received[i] > -torch.inf]
        chosen = set(possible[: int(counts[budget - 1])])
        for h in range(heads):
            others = sorted((i for i in range(n) if i not in chosen), key=lambda i: (-base[h, i].item(), i))
            expected = chosen | set(others[: budget - len(chosen)])
            assert set((rank[h] < budget).nonzero().flatten().tolist()) == expected


def test_toy_ranking():
    # anchors in order 4, 0; base's order 0 1 2 3 4; one anchor at B = 1, the second at B = 3
    base = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]])
    received = torch.tensor([2.0, 0.0, 0.0, 0.0, 9.0])
    rank = ranking(base, received, torch.tensor([1, 1, 2, 2, 2]))
    # B = 1: {4}; B = 2: {4} + base's 0; B = 3: {4, 0} + base's 1; then 2, 3
    assert rank.tolist() == [[1, 2, 3, 4, 0]]


def test_strongest_attention_is_the_largest_over_heads_of_the_full_matrix():
    torch.manual_seed(0)
    q, k = torch.randn(4, 40, 8), torch.randn(2, 70, 8)
    for window in (None, 16):
        full = (q @ k.repeat_interleave(2, 0).mT) * 0.3
        me, at = torch.arange(30, 70)[:, None], torch.arange(70)
        hidden = (at > me) if window is None else (at > me) | (me - at >= window)
        full = full.masked_fill(hidden, -torch.inf).softmax(-1)
        found = strongest_attention(q, k, 25, 0.3, window)
        torch.testing.assert_close(found, full.amax(0)[..., :25])
        assert float((found - full.mean(0)[..., :25]).abs().max()) > 0.01  # a mean would be another method


def test_propagation_is_the_double_sum():
    torch.manual_seed(1)
    attention, gates = torch.rand(3, 5, 11), torch.randn(3, 5, 4).softmax(-1)
    total = Propagation(11, "softmax")
    for a, g in zip(attention, gates, strict=True):
        total.add(a[:2], g[:2])  # in pieces
        total.add(a[2:], g[2:])
    f = [[1 - sum(x * x for x in g) for g in layer] for layer in gates.tolist()]
    r = [sum(f[layer][t] * attention[layer, t, i].item() for layer in range(3) for t in range(5)) for i in range(11)]
    above = sum(v > 0.85 * 0.75 for layer in f for v in layer) / 15
    assert 0 < above < 1
    found = total.result()
    torch.testing.assert_close(found[0], torch.tensor(r))
    torch.testing.assert_close(found[1], torch.full((11,), above))


@pytest.mark.parametrize("bad", [float("nan"), -0.5])
def test_attention_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match="attention"):
        Propagation(2, "softmax").add(torch.tensor([[0.1, bad]]), torch.tensor([[0.5, 0.5]]))


def test_no_instruction_token_is_a_users_mistake():
    with pytest.raises(UserError, match="question after the context is empty"):
        Propagation(4, "softmax").result()


def test_settings():
    with pytest.raises(UserError, match=r"mode 'reckon'. Did you mean 'recon'"):
        scorer("moezip", mode="reckon")
    with pytest.raises(UserError, match="anchor_min=200"):
        scorer("moezip", anchor_min=200)
    with pytest.raises(UserError, match="cannot be the base"):
        scorer("moezip", base={"name": "trig"})
    with pytest.raises(UserError, match="cannot be the base"):
        scorer("moezip", base={"name": "moezip"})
    made = scorer("moezip", mode="recon", base={"name": "snapkv", "window": 8})
    assert (made.observes, made.last_queries) == (("routing_recon",), 8)
    assert scorer("moezip").observes == ("reconstruction", "routing_query")


def view(base: torch.Tensor, received: torch.Tensor, gamma: float) -> LayerView:
    heads, n = base.shape
    keys = torch.zeros(heads, n, 4)
    routing = torch.stack([received, torch.full((n,), gamma)])
    observed = {"reconstruction": base, "routing_query": routing}
    return LayerView(0, keys, keys, torch.arange(n), n, observed=observed)


def test_anchors_are_in_every_head_and_the_rest_is_the_bases():
    torch.manual_seed(2)
    base, received = torch.rand(2, 300), torch.rand(300)
    score = scorer("moezip")(view(base, received, 1.0))
    kept = score.topk(256).indices
    anchors = set(received.topk(64).indices.tolist())
    for h in range(2):
        others = [i for i in base[h].argsort(descending=True).tolist() if i not in anchors]
        assert set(kept[h].tolist()) == anchors | set(others[:192])


def test_diagnostics():
    torch.manual_seed(3)
    base, received = torch.rand(2, 300), torch.rand(300)
    made = scorer("moezip")
    score = made(view(base, received, 0.0))
    routing = torch.stack([received, torch.zeros(300)])
    kept, own = score.topk(100).indices.sort().values, base.topk(100).indices.sort().values
    found = made.diagnostics(routing, [kept, kept], [own, own])
    replaced = sum(len(set(own[h].tolist()) - set(kept[h].tolist())) for h in range(2)) / 200
    assert found == {"gamma": 0.0, "anchors": 32, "replaced": pytest.approx(replaced)}
    assert 0 < replaced <= 0.32
    few = score.topk(20).indices
    found = made.diagnostics(routing, [few], [base.topk(20).indices])
    assert (found["anchors"], found["note"]) == (20, "anchors only")
