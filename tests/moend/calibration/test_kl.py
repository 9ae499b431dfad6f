from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import moend.calibration.kl as module
from moend.cache.packing import fake_quant_k, fake_quant_v
from moend.calibration import rerun
from moend.calibration.artefact import Artefact
from moend.calibration.base import windows
from moend.calibration.kl import COARSE, PAPER, kl_table, named_configs, rank_agreement
from moend.calibration.queries import TrigStatistics
from moend.calibration.sensitivity import attention_blocks, random_ranks, table
from moend.errors import UserError
from moend.plan import Config
from moend.scoring import scorer
from tests.tiny import ARCHITECTURES, tiny

CONFIGS = (Config(0.25, 16, 16), Config(1.0, 4, 8), Config(0.5, 8, 4), Config(1.0, 16, 16))


def draw_ids(count, length, seed=0):
    return torch.randint(3, 97, (count, length), generator=torch.Generator().manual_seed(seed))


def full_forward(model, ids, layer, config, ranks):
    """Logits (T, V) of the whole model with eager attention, layer `layer` compressed by hand."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(block, query, key, value, mask, scaling, **_):
        length = key.shape[2]
        sees = torch.ones(length, length).tril().bool()
        if block.layer_idx == layer:
            key, value = fake_quant_k(key, config.k_bits, 64), fake_quant_v(value, config.v_bits)
            kept = ranks < max(1, round(config.keep * length))
            sees = (sees & kept[None]) | torch.eye(length).bool()
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
        scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~sees, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register("kl_reference", attention)
    model.set_attn_implementation("kl_reference")
    try:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(before)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_resumed_runs_equal_whole_runs(name):
    model, ids = tiny(name), draw_ids(2, 41)
    found = kl_table(model, ids, CONFIGS, positions=7, eviction="random", seeds=(3,), tokens_at_once=90)
    nothing = Config(1.0, 16, 16)
    for n in range(2):
        ranks = random_ranks(41, 3 * 65_537 + n)
        p = F.log_softmax(full_forward(model, ids[n : n + 1], 0, nothing, ranks)[-7:].double(), -1)
        for layer in range(3):
            for c, config in enumerate(CONFIGS):
                q = F.log_softmax(full_forward(model, ids[n : n + 1], layer, config, ranks)[-7:].double(), -1)
                expected = (p.exp() * (p - q)).sum(-1).mean().item()
                assert found.per_sequence[n, layer, c].item() == pytest.approx(expected, rel=2e-3, abs=1e-7)
    torch.testing.assert_close(found.table, found.per_sequence.mean(0))
    assert (found.table[:, :3] > 0).all()
    assert (found.table[:, 3] == 0).all()


def test_batching_and_blocks_do_not_matter(monkeypatch):
    model, ids = tiny("llama"), draw_ids(1, 50)
    one = kl_table(model, ids, CONFIGS, positions=None, scorer=scorer("snapkv", window=8), tokens_at_once=1)
    monkeypatch.setattr(module, "QUERIES", 16)
    monkeypatch.setattr(rerun, "POSITIONS", 11)
    seen = []
    all_ = kl_table(
        model,
        ids,
        CONFIGS,
        positions=None,
        scorer=scorer("snapkv", window=8),
        progress=lambda done, total: seen.append((done, total)),
    )
    torch.testing.assert_close(one.table, all_.table, rtol=1e-3, atol=1e-9)
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_seeds_are_averaged_and_layers_can_be_chosen():
    model, ids = tiny("qwen2"), draw_ids(1, 30)
    parts = [kl_table(model, ids, CONFIGS, positions=9, eviction="random", seeds=(s,)).table for s in (0, 1)]
    both = kl_table(model, ids, CONFIGS, positions=9, eviction="random", seeds=(0, 1), layers=(2, 0))
    assert both.layers == (2, 0)
    torch.testing.assert_close(both.table, ((parts[0] + parts[1]) / 2)[[2, 0]], rtol=1e-4, atol=1e-9)


def test_trig_gets_each_layer_s_statistics():
    model, ids = tiny("llama"), draw_ids(1, 40)
    stats = TrigStatistics.measure(model, ids).tensors()
    found = kl_table(model, ids, CONFIGS[:1], positions=8, scorer=scorer("trig"), statistics=stats)
    other = {k: t.flip(0) for k, t in stats.items()}
    assert (found.table > 0).all()
    assert not torch.equal(
        found.table, kl_table(model, ids, CONFIGS[:1], positions=8, scorer=scorer("trig"), statistics=other).table
    )


def test_the_model_is_left_as_it_was():
    model, ids = tiny("llama"), draw_ids(1, 20)
    before = model.config._attn_implementation
    with torch.no_grad():
        logits = model(ids).logits
    kl_table(model, ids, CONFIGS[:1], positions=4, eviction="random", layers=(1,))
    with pytest.raises(UserError):
        kl_table(model, ids, CONFIGS[:1], positions=40, eviction="random")
    assert model.config._attn_implementation == before
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits)


def test_an_artefact_serves_columns():
    model, ids = tiny("llama"), draw_ids(1, 20)
    found = kl_table(model, ids, CONFIGS, positions=4, eviction="random")
    artefact = Artefact("kl", {}, found.tensors())
    np.testing.assert_array_equal(table(artefact, CONFIGS[::-1]), found.table.flip(1).numpy())


def test_named_sets():
    singles = ["keep_10", "keep_25", "keep_50", "keep_75", "keep_90", "k8", "k4", "v8", "v4"]
    assert [c.name for c in PAPER] == [*singles, "k8v4", "k4v4"]
    assert len(COARSE) == 10
    assert set(COARSE) | set(PAPER) <= set(named_configs("all"))
    with pytest.raises(UserError, match="Did you mean 'coarse'"):
        named_configs("course")


@given(st.integers(1, 5), st.integers(2, 9), st.integers(0, 30))
@settings(max_examples=50, deadline=None)
def test_windows_are_disjoint_and_in_order(sequences, tokens, spare):
    ids = list(range(sequences * tokens + spare))
    cut = windows(ids, sequences, tokens)
    assert cut.shape == (sequences, tokens)
    flat = cut.flatten().tolist()
    assert flat == sorted(set(flat))
    assert (cut.diff(dim=1) == 1).all()


def test_what_cannot_be_measured_is_refused():
    model, ids = tiny("llama"), draw_ids(1, 20)
    with pytest.raises(UserError, match="between 1 and the 20 tokens, got 21"):
        kl_table(model, ids, positions=21, eviction="random")
    with pytest.raises(UserError, match="layer 3 is not one of the model's 3 layers"):
        kl_table(model, ids, positions=4, eviction="random", layers=(0, 3))
    with pytest.raises(UserError, match="Did you mean 'scorer'"):
        kl_table(model, ids, positions=4, eviction="score")
    with pytest.raises(UserError, match="more than the 5 tokens"):
        windows(range(5), 2, 3)
    sliding = tiny("mistral", sliding_window=8)
    with pytest.raises(UserError, match="sliding window of 8 < 20 tokens"):
        kl_table(sliding, ids, positions=4, eviction="random")
    scaled = tiny("llama")
    embed = scaled.model.embed_tokens
    scaled.model.register_forward_pre_hook(
        lambda _m, args, kw: (args, kw | {"input_ids": None, "inputs_embeds": 2 * embed(kw["input_ids"])}),
        with_kwargs=True,
    )
    with pytest.raises(UserError, match="not a plain stack"):
        kl_table(scaled, ids, positions=4, eviction="random")


def test_agreement_by_hand():
    configs = [Config(0.5, 16, 16), Config(1.0, 8, 16), Config(1.0, 4, 16), Config(1.0, 16, 16)]
    proxy = np.array([[1.0, 2.0, 3.0, 0.0], [1.0, 2.0, 3.0, 0.0], [5.0, 5.0, 5.0, 0.0]])
    kl = np.array([[10.0, 20.0, 30.0, 0.0], [9.0, 4.0, 1.0, 0.0], [1.0, 2.0, 3.0, 0.0]])
    found = rank_agreement(proxy, kl, configs)
    assert found["per_layer"]["pearson"][0] == pytest.approx(1.0)
    assert found["per_layer"]["spearman"] == [pytest.approx(1.0), pytest.approx(-1.0), None]
    assert found["mean"]["spearman"] == pytest.approx(0.0)
    assert (found["layers"], found["above_0.8"]) == (3, 1)
    assert set(found["per_config"]) == {"keep_50", "k8", "k4"}
    expected = np.corrcoef(proxy[:, 0], kl[:, 0])[0, 1]
    assert found["per_config"]["keep_50"]["pearson"] == pytest.approx(expected)


@given(st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_spearman_only_sees_order(seed):
    rng = np.random.default_rng(seed)
    proxy, configs = rng.random((3, 10)), list(COARSE)
    found = rank_agreement(proxy, np.exp(5 * proxy), configs)
    assert found["per_layer"]["spearman"] == [pytest.approx(1.0)] * 3
    assert found["mean"]["pearson"] <= 1 + 1e-9


def test_blocks_are_found():
    assert len(attention_blocks(tiny("llama"))) == 3
