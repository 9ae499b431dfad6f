from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional as F

from moend.calibration.rerun import Evictor
from moend.calibration.ripple import Noise, correlation, disturbed, profile, summary
from moend.errors import UserError
from moend.scoring import scorer
from tests.tiny import tiny

BASE = Evictor(scorer("snapkv", window=4, kernel=3), n_sink=2, recent=4)
PREFIX, WINDOW = 30, 9


def draw_ids(count, seed=0):
    return torch.randint(3, 97, (count, PREFIX + WINDOW), generator=torch.Generator().manual_seed(seed))


def whole_run(model, ids, layer=None, values=None, hidden=None):
    """Log-probabilities of the window and layer `layer`'s attention output there, by one eager forward of everything.

    Window queries of that layer see values(v) in place of the prefix's, or none of the keys where hidden(k, q) says so.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kept = {}

    def attention(block, query, key, value, mask, scaling, sliding_window=None, **_):
        length, group = key.shape[2], query.shape[1] // key.shape[1]
        at = torch.arange(length)
        sees = (at <= at[:, None])[None].expand(query.shape[1], -1, -1).clone()
        if sliding_window is not None:
            sees &= at[:, None] - at < sliding_window
        other = value.clone()
        if block.layer_idx == layer and values is not None:
            other[0, :, :PREFIX] = values(value[0, :, :PREFIX])
        if block.layer_idx == layer and hidden is not None:
            gone = hidden(key[0, :, :PREFIX], query[0, :, :PREFIX], scaling).repeat_interleave(group, 0)
            sees[:, PREFIX:, :PREFIX] &= ~gone[:, None]
        shares = (query @ key.repeat_interleave(group, 1).mT * scaling).masked_fill(~sees, -torch.inf).softmax(-1)
        out = shares @ value.repeat_interleave(group, 1)
        out[:, :, PREFIX:] = (shares @ other.repeat_interleave(group, 1))[:, :, PREFIX:]
        return out.transpose(1, 2).contiguous(), None

    def remember(_m, _i, out):
        kept["attended"] = out[0][0, PREFIX:]

    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register("ripple_reference", attention)
    model.set_attn_implementation("ripple_reference")
    handle = model.model.layers[layer or 0].self_attn.register_forward_hook(remember)
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, PREFIX:]
    finally:
        handle.remove()
        model.set_attn_implementation(before)
    return F.log_softmax(logits.double(), -1), kept["attended"].double()


def divergence(p, q):
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.req(20)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe"])
def test_one_sweep_equals_whole_runs_layer_by_layer(name):
    model, ids = tiny(name), draw_ids(2)
    noises = (Noise(0.3, 5), Noise(0.9, 6))
    found = profile(model, ids, WINDOW, BASE, noises=noises, draws=2, keeps=(0.4,))
    assert found.response.shape == found.local.shape == (2, 2, 3) and found.damage.shape == (1, 2, 3)
    for n in range(2):
        for layer in range(3):
            p, full = whole_run(model, ids[n : n + 1], layer)
            for v, noise in enumerate(noises):
                response = local = 0.0
                for draw in range(2):
                    q, moved = whole_run(
                        model,
                        ids[n : n + 1],
                        layer,
                        values=lambda x, noise=noise, draw=draw: disturbed(x, BASE, noise, layer, n, draw),  # noqa: B023
                    )
                    response += divergence(p, q) / 2
                    local += float(((moved - full).norm(dim=-1) / full.norm(dim=-1)).mean()) / 2
                assert found.response[v, n, layer].item() == pytest.approx(response, rel=2e-3, abs=1e-7)
                assert found.local[v, n, layer].item() == pytest.approx(local, rel=1e-3)
            q, _ = whole_run(model, ids[n : n + 1], layer, hidden=snap_hidden)
            assert found.damage[0, n, layer].item() == pytest.approx(divergence(p, q), rel=2e-3, abs=1e-7)
    assert (found.response > 0).all()
    assert (found.damage > 0).all()


def snap_hidden(key, query, scaling):
    """(H, P) what SnapKV does not keep at 40 % of the prefix, 12 entries: 2 sinks, the 4 newest, the best 6."""
    group = len(query) // len(key)
    logits = query[:, -4:] @ key.repeat_interleave(group, 0).mT * scaling
    late = torch.arange(PREFIX)[None] > torch.arange(PREFIX - 4, PREFIX)[:, None]
    mean = logits.masked_fill(late, -torch.inf).softmax(-1).mean(1).unflatten(0, (-1, group)).mean(1)
    mean[:, -4:] = 0
    score = F.avg_pool1d(mean, 3, stride=1, padding=1)
    score[:, :2] = score[:, -4:] = torch.inf
    hidden = torch.ones_like(score, dtype=torch.bool)
    return hidden.scatter(1, score.topk(12, dim=-1).indices, False)


def test_batches_of_rows_do_not_matter():
    model, ids = tiny("qwen2"), draw_ids(1)
    seen = []
    one = profile(model, ids, WINDOW, BASE, keeps=(0.3,), tokens_at_once=1)
    all_ = profile(model, ids, WINDOW, BASE, keeps=(0.3,), progress=lambda done, total: seen.append((done, total)))
    for a, b in ((one.response, all_.response), (one.local, all_.local), (one.damage, all_.damage)):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-8)
    assert seen == [(1, 1)]


def test_sliding_layers_see_their_window():
    model, ids = tiny("qwen2", sliding_window=12, use_sliding_window=True, max_window_layers=1), draw_ids(1)
    found = profile(model, ids, WINDOW, BASE)
    for layer in range(3):
        p, _ = whole_run(model, ids, layer)
        q, _ = whole_run(model, ids, layer, values=lambda x: disturbed(x, BASE, Noise(0.3), layer, 0, 0))  # noqa: B023
        assert found.response[0, 0, layer].item() == pytest.approx(divergence(p, q), rel=2e-3, abs=1e-8)


def test_noise_is_relative_seeded_and_spares_what_is_protected():
    values = torch.randn(3, 400, 16) * torch.tensor([0.1, 1.0, 7.0])[:, None, None]
    noisy = disturbed(values, BASE, Noise(0.3), 1, 2, 0)
    assert torch.equal(noisy[:, :2], values[:, :2])
    assert torch.equal(noisy[:, -4:], values[:, -4:])
    moved = (noisy - values)[:, 2:-4].norm(dim=-1) / values[:, 2:-4].norm(dim=-1)
    assert (moved > 0).all()
    np.testing.assert_allclose(moved.square().mean(1).sqrt().numpy(), [0.3] * 3, rtol=0.05)
    assert torch.equal(disturbed(values, BASE, Noise(0.3), 1, 2, 0), noisy)
    twice = disturbed(values, BASE, Noise(0.6), 1, 2, 0)
    torch.testing.assert_close(twice - values, 2 * (noisy - values), atol=1e-4, rtol=1e-4)
    for noise, *at in ((Noise(0.3, 1), 1, 2, 0), (Noise(0.3), 0, 2, 0), (Noise(0.3), 1, 0, 0), (Noise(0.3), 1, 2, 1)):
        assert not torch.equal(disturbed(values, BASE, noise, *at), noisy)


def test_the_model_is_left_as_it_was():
    model, ids = tiny("llama"), draw_ids(1)
    before = model.config._attn_implementation
    with torch.no_grad():
        logits = model(ids).logits
    profile(model, ids, WINDOW, BASE)
    assert model.config._attn_implementation == before
    assert not any(m._forward_hooks for m in model.modules())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits)


def test_what_cannot_be_profiled_is_refused():
    model, ids = tiny("llama"), draw_ids(1)
    with pytest.raises(UserError, match=r"prefix \(6\) must be longer than the 6 tokens"):
        profile(model, ids[:, :15], WINDOW, BASE)
    with pytest.raises(UserError, match="a prefix and a window"):
        profile(model, ids[:, :9], WINDOW, BASE)
    with pytest.raises(UserError, match="damage of scorer trig"):
        profile(model, ids, WINDOW, Evictor(scorer("trig"), 2, 4), keeps=(0.5,))
    with pytest.raises(UserError, match="scorer kvzip needs reconstruction"):
        profile(model, ids, WINDOW, Evictor(scorer("kvzip"), 2, 4), keeps=(0.5,))
    profile(model, ids, WINDOW, Evictor(scorer("kvzip"), 2, 4))  # the profile itself asks no scorer


def test_correlation_and_its_interval():
    rng = np.random.default_rng(0)
    truth = np.arange(30.0)
    damage = np.exp(truth / 5) * rng.lognormal(0, 0.5, (16, 30))
    found = correlation(damage * rng.lognormal(0, 0.5, (16, 30)), damage)
    assert found["low"] <= found["value"] <= found["high"]
    assert found["value"] > 0.9
    depth = correlation(truth[None], damage)
    assert depth["value"] == pytest.approx(abs(stats.spearmanr(truth, damage.mean(0)).statistic))
    assert correlation(-truth[None], damage)["value"] == pytest.approx(depth["value"])
    wide = correlation(rng.random((16, 30)), damage)
    assert wide["high"] - wide["low"] > 0.1
    assert correlation(np.ones((4, 5)), rng.random((4, 5))) == {"value": None, "low": None, "high": None}
    alone = correlation(rng.random((1, 5)), rng.random((1, 5)))
    assert alone["value"] is not None and alone["low"] is None


def test_summary_says_what_was_measured():
    model, ids = tiny("llama", layers=4), draw_ids(4)
    noises = (Noise(0.3), Noise(0.6), Noise(0.3, 1))
    found = profile(model, ids, WINDOW, BASE, noises=noises, keeps=(0.3,))
    tensors = found.tensors()
    assert torch.equal(tensors["response"], found.response[0]) and tensors["stability"].shape == (2, 4, 4)
    said = summary(tensors, noises, found.keeps)
    assert set(said["stability"]) == {
        "noise 0.6, seed 0",
        "noise 0.3, seed 1",
        "even against odd examples",
        "1 against 1 other example",
        "2 against 2 other examples",
    }
    assert set(said["damage"]["0.3"]) == {"output", "local", "depth", "mean"}
    expected = abs(stats.spearmanr(found.response[0].mean(0), found.damage[0].mean(0)).statistic)
    assert said["damage"]["0.3"]["output"]["value"] == pytest.approx(expected)


def test_stability_grows_with_the_examples_where_they_share_a_signal():
    """Responses = one profile + noise of its own per example: subsets agree the more, the larger they are."""
    rng = np.random.default_rng(0)
    shared = np.arange(30.0)[None]
    response = torch.tensor(shared + rng.normal(0, 20, (32, 30)))
    empty = {"local": response, "damage": torch.zeros(0, 32, 30), "stability": torch.zeros(0, 32, 30)}
    found = summary({"response": response, **empty}, (Noise(0.3),), ())["stability"]
    r = [found[f"{n} against {n} other example{'s' * (n > 1)}"] for n in (1, 2, 4, 8, 16)]
    assert r == sorted(r)
    assert r[0] < 0.4 and r[-1] > 0.7
    pure = torch.tensor(rng.normal(0, 1, (32, 30)))
    alone = summary({"response": pure, **empty}, (Noise(0.3),), ())["stability"]
    assert abs(alone["8 against 8 other examples"]) < 0.2
    constant = summary({"response": torch.ones(4, 30), **empty}, (Noise(0.3),), ())["stability"]
    assert constant["2 against 2 other examples"] is None
