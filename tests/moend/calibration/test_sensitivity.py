from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import moend.calibration.sensitivity as module
from moend.cache.packing import fake_quant_k, fake_quant_v
from moend.cache.prefill import LayerCapture, Prefilled
from moend.calibration.artefact import Artefact
from moend.calibration.queries import TrigStatistics
from moend.calibration.sensitivity import decode, encode, kept_tokens, measure, random_ranks, sensitivity, table
from moend.errors import UserError
from moend.hf.attention import AttentionRule, accumulated_attention
from moend.plan import EXTRA_KEEPS, KEEPS, SINGLES, Config, extend_lattice, lattice
from moend.scoring import scorer
from tests.tiny import ARCHITECTURES, tiny


def capture(length=27, layers=2, heads=2, groups=2, dim=16, seed=0) -> Prefilled:
    g = torch.Generator().manual_seed(seed)

    def draw(h):
        return torch.randn(1, h, length, dim, generator=g) * 2

    made = [LayerCapture(draw(heads), draw(heads), draw(heads * groups)) for _ in range(layers)]
    return Prefilled(made, torch.arange(length)[None], None, None)


def projections(layers=2, width=64, hidden=48, bias=False, seed=1) -> list[nn.Linear]:
    torch.manual_seed(seed)
    return [nn.Linear(width, hidden, bias=bias) for _ in range(layers)]


NOTHING_ELSE = AttentionRule(1.0)
CONFIGS = [Config(0.1, 16, 16), Config(0.5, 8, 4), Config(1.0, 4, 16), Config(0.9, 2, 2), Config(1.0, 16, 8)]


def naive(prefilled, projection, scaling, layer, config, ranks, rule=NOTHING_ELSE):
    """One entry of the table, one query and one head at a time. ranks: (H or 1, T)."""
    x = prefilled.layers[layer]
    q, k, v = x.queries[0].double(), x.keys[0], x.values[0]
    groups, length = q.shape[0] // k.shape[0], k.shape[1]
    n = max(1, round(config.keep * length))

    def outputs(k, v, keeps):
        out = torch.zeros(length, q.shape[0], q.shape[2], dtype=torch.float64)
        for t in range(length):
            for head in range(q.shape[0]):
                kv = head // groups
                rank = ranks[kv if len(ranks) > 1 else 0]
                seen = [j for j in range(t + 1) if j == t or not keeps or rank[j] < n]
                seen = [j for j in seen if rule.window is None or t - j < rule.window]
                seen = [j for j in seen if rule.chunk is None or j // rule.chunk == t // rule.chunk]
                logits = k[kv, seen].double() @ q[head, t] * scaling
                if rule.softcap is not None:
                    logits = (logits / rule.softcap).tanh() * rule.softcap
                sink = 0.0 if rule.sinks is None else rule.sinks[head].double().exp()
                w = logits.exp() / (logits.exp().sum() + sink)
                out[t, head] = w @ v[kv, seen].double()
        return out.flatten(1) @ projection.weight.double().T + (
            0 if projection.bias is None else projection.bias.double()
        )

    full = outputs(k, v, False)
    cut = outputs(fake_quant_k(k, config.k_bits, 64), fake_quant_v(v, config.v_bits), True)
    return ((cut - full).norm(dim=1) / full.norm(dim=1)).mean().item()


@pytest.mark.parametrize("length", [11, 27, 70])  # 70: more tokens than a K group, and than a head has dimensions
@pytest.mark.parametrize("bias", [False, True])
def test_every_entry_equals_the_naive_reference(length, bias, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 5000)  # several blocks of queries
    filled, out = capture(length), projections(bias=bias)
    found = sensitivity(filled, out, 0.3, CONFIGS, eviction="random", seeds=(5, 6))
    for i, seed in enumerate((5, 6)):
        for layer in range(2):
            for c, config in enumerate(CONFIGS):
                expected = naive(filled, out[layer], 0.3, layer, config, random_ranks(length, seed)[None].tolist())
                assert float(found.per_seed[i, layer, c]) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(found.table, found.per_seed.mean(0))


@pytest.mark.parametrize("length", [11, 40])
@pytest.mark.parametrize("odd", [{"window": 5}, {"chunk": 8}, {"softcap": 0.7}, {"sinks": torch.arange(4) * 0.4 - 0.5}])
def test_windows_chunks_soft_caps_and_sinks_count(odd, length, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 5000)
    filled, out, rule = capture(length), projections(), AttentionRule(0.3, **odd)
    plain = sensitivity(filled, out, 0.3, CONFIGS, eviction="random", seeds=(5,)).table
    for layer in filled.layers:
        layer.rule = rule
    found = sensitivity(filled, out, 0.3, CONFIGS, eviction="random", seeds=(5,)).table
    assert not torch.allclose(found, plain, rtol=1e-2)
    for layer in range(2):
        for c, config in enumerate(CONFIGS):
            expected = naive(filled, out[layer], 0.3, layer, config, random_ranks(length, 5)[None].tolist(), rule)
            assert float(found[layer, c]) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_model_s_rules_reach_the_table_and_what_is_observed():
    model, ids = tiny("mistral", sliding_window=9), torch.randint(3, 97, (1, 30))
    h2o = scorer("h2o")
    found = measure(model, ids, [Config(0.5, 16, 16)], scorer=h2o).table
    filled = module.prefill(model, ids, last_queries=30)
    for i, block in enumerate(module.attention_blocks(model)):
        layer = filled.layers[i]
        assert layer.rule is not None and layer.rule.window == 9
        ranks = module.scorer_ranks(h2o, layer, i, block.scaling, None, None)
        received = accumulated_attention(layer.queries, layer.keys, None, layer.rule)[0]
        best = received.argsort(dim=-1, descending=True, stable=True)[:, :15].sort(-1).values
        assert torch.equal((ranks < 15).nonzero()[:, 1].view(2, 15), best)
        expected = naive(
            filled, block.o_proj, block.scaling, i, Config(0.5, 16, 16), ranks.tolist(), AttentionRule(1.0, 9)
        )
        assert float(found[i, 0]) == pytest.approx(expected, rel=1e-4)


def test_the_scorer_ranks_per_head():
    filled, out = capture(), projections()
    snapkv = scorer("snapkv", window=4)
    found = sensitivity(filled, out, 0.25, [Config(0.25, 16, 16)], scorer=snapkv)
    for layer in range(2):
        ranks = module.scorer_ranks(snapkv, filled.layers[layer], layer, 0.25, None, None)
        assert ranks.shape == (2, 27)
        assert all(r < 4 for r in ranks[:, -4:].flatten().tolist())  # SnapKV's own window comes first
        expected = naive(filled, out[layer], 0.25, layer, Config(0.25, 16, 16), ranks.tolist())
        assert float(found.table[layer, 0]) == pytest.approx(expected, rel=1e-4)


def test_hand_made_case():
    # Two tokens, one head, keys of zero (even attention), values 1 and 3 in one dimension, which the projection reads.
    # Query 1 sees (1 + 3) / 2 = 2. Where only token 1 stays it sees 3: an error of 1/2, and 0 for query 0.
    values = torch.zeros(1, 1, 2, 4)
    values[0, 0, :, 0] = torch.tensor([1.0, 3.0])
    filled = Prefilled(
        [LayerCapture(torch.zeros(1, 1, 2, 4), values, torch.ones(1, 1, 2, 4))], torch.arange(2)[None], None, None
    )
    projection = nn.Linear(4, 1, bias=False)
    nn.init.ones_(projection.weight)
    by_seed = {0: [0, 1], 1: [1, 0]}
    seeds = {tuple(random_ranks(2, s).tolist()): s for s in range(20)}
    for kept_first, expected in ((0, 0.0), (1, (0 + 0.5) / 2)):
        seed = seeds[tuple(by_seed[kept_first])]
        found = sensitivity(filled, [projection], 1.0, [Config(0.5, 16, 16)], eviction="random", seeds=(seed,))
        assert float(found.table[0, 0]) == pytest.approx(expected)


def test_27_tokens_feel_quantisation_in_every_layer_and_full_is_exactly_zero():
    model = tiny("llama")
    ids = torch.randint(3, 97, (1, 27), generator=torch.Generator().manual_seed(0))
    found = measure(model, ids, scorer=scorer("snapkv"))
    assert found.table.shape == (3, 54)
    assert found.singles.shape == (3, 9)
    assert found.table.isfinite().all()
    at = {c: i for i, c in enumerate(found.configs)}
    for config in (Config(1.0, 8, 16), Config(1.0, 4, 16)):
        assert (found.table[:, at[config]] > 0).all()
    assert (found.table[:, at[Config(1.0, 16, 16)]] == 0).all()
    columns = [at[c] for c in SINGLES]
    torch.testing.assert_close(found.singles, found.table[:, columns])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_s_own_attention_output_is_the_reference(name):
    """The uncompressed output rebuilt from the capture is what the model's attention block returns."""
    model = tiny(name)
    ids = torch.randint(3, 97, (1, 27), generator=torch.Generator().manual_seed(0))
    outputs = {}
    for i, block in enumerate(module.attention_blocks(model)):
        block.register_forward_hook(lambda _m, _a, out, i=i: outputs.__setitem__(i, out[0].detach()[0]))
    with torch.no_grad():
        model(ids)
    filled = module.prefill(model, ids, last_queries=27)
    for i, block in enumerate(module.attention_blocks(model)):
        x = filled.layers[i]
        k, v = (t[0].repeat_interleave(2, 0) for t in (x.keys, x.values))
        scores = x.queries[0] @ k.transpose(1, 2) * block.scaling
        weights = scores.masked_fill(torch.ones(27, 27).triu(1).bool(), -torch.inf).softmax(-1)
        with torch.no_grad():
            rebuilt = block.o_proj((weights @ v).transpose(0, 1).flatten(1))
        torch.testing.assert_close(rebuilt, outputs[i], atol=1e-4, rtol=1e-4)


def test_trig_with_statistics_and_its_order_of_layers():
    model = tiny("qwen3")
    ids = torch.randint(3, 97, (1, 30), generator=torch.Generator().manual_seed(0))
    stats = TrigStatistics.measure(model, ids).tensors()
    found = measure(model, ids, [Config(0.25, 16, 16)], scorer=scorer("trig"), statistics=stats)
    swapped = {k: t.flip(0) for k, t in stats.items()}
    other = measure(model, ids, [Config(0.25, 16, 16)], scorer=scorer("trig"), statistics=swapped)
    assert not torch.equal(found.table, other.table)  # each layer was given its own rows


@given(st.integers(2, 40), st.integers(0, 5), st.floats(0.1, 10))
@settings(max_examples=25, deadline=None)
def test_errors_do_not_depend_on_the_scale_of_values(length, seed, factor):
    filled, out = capture(length, layers=1, seed=seed), projections(1)
    configs = [Config(0.25, 16, 16), Config(0.5, 8, 16), Config(1.0, 4, 16)]
    before = sensitivity(filled, out, 0.25, configs, eviction="random", seeds=(seed,)).table
    layer = filled.layers[0]
    scaled = Prefilled([LayerCapture(layer.keys, layer.values * factor, layer.queries)], filled.positions, None, None)
    after = sensitivity(scaled, out, 0.25, configs, eviction="random", seeds=(seed,)).table
    torch.testing.assert_close(before, after, rtol=1e-3, atol=1e-5)
    assert (before >= 0).all()


def test_the_lattice():
    assert len(lattice()) == 54
    assert len(set(lattice())) == 54
    assert len(lattice(bits=(16, 8, 4, 2))) == 96
    assert extend_lattice(KEEPS, 0) == KEEPS
    assert extend_lattice(KEEPS, 1) == (*KEEPS, 0.05)
    assert extend_lattice(KEEPS) == (*KEEPS, *EXTRA_KEEPS)
    assert extend_lattice((0.03, 1.0)) == (0.03, 1.0, 0.025, 0.0125)
    assert [c.name for c in SINGLES] == ["keep_10", "keep_25", "keep_50", "keep_75", "keep_90", "k8", "k4", "v8", "v4"]
    assert Config(0.0125, 8, 4).name == "keep_1.25_k8v4"
    assert Config(1.0, 16, 16).name == "full"
    assert decode(encode(lattice(extend_lattice(KEEPS)))) == lattice(extend_lattice(KEEPS))
    for bad in ((0, 16, 16), (1.1, 16, 16), (0.5, 3, 16)):
        with pytest.raises(UserError):
            Config(*bad)


@given(st.floats(0.001, 1), st.integers(1, 5000))
def test_something_is_always_kept(keep, length):
    assert 1 <= kept_tokens(keep, length) <= length


def test_shares_that_keep_the_same_tokens_have_the_same_column():
    configs = lattice(extend_lattice(KEEPS))
    found = sensitivity(capture(), projections(), 0.25, configs, eviction="random")
    at = {c: i for i, c in enumerate(configs)}
    a, b = (found.table[:, at[Config(k, 8, 4)]] for k in (0.05, 0.0125))
    assert torch.equal(a, b)
    assert found.per_seed.shape == (3, 2, 81)
    assert not torch.equal(found.per_seed[0], found.per_seed[1])


def test_columns_by_configuration():
    found = sensitivity(capture(), projections(), 0.25, eviction="random", seeds=(0,))
    artefact = Artefact("sensitivity", {}, found.tensors())
    wanted = [Config(1.0, 4, 4), Config(0.1, 16, 8)]
    at = [found.configs.index(c) for c in wanted]
    np.testing.assert_array_equal(table(artefact, wanted), found.table[:, at].double().numpy())
    with pytest.raises(UserError, match=r"no column for keep_30 \(1 of 2 missing\)"):
        table(artefact, [Config(0.3, 16, 16), *wanted[:1]])


def test_what_cannot_be_measured_is_refused():
    filled, out = capture(), projections()
    with pytest.raises(UserError, match="Did you mean 'random'"):
        sensitivity(filled, out, 0.25, eviction="randon")
    with pytest.raises(UserError, match="must not be empty"):
        sensitivity(filled, out, 0.25, eviction="random", seeds=())
    with pytest.raises(ValueError, match="needs a scorer"):
        sensitivity(filled, out, 0.25)
    filled.layers[1].queries = filled.layers[1].queries[:, :, -5:]
    with pytest.raises(ValueError, match="layer 1: all 27 queries"):
        sensitivity(filled, out, 0.25, eviction="random")
    model = tiny("llama", layers=1)
    model.model.layers[0].self_attn = nn.Identity()
    with pytest.raises(UserError, match="LlamaForCausalLM has no layers with"):
        module.attention_blocks(model)
