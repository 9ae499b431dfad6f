"""The damage table against one explicit run per layer and configuration."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from moend.cache import prefill
from moend.cache.packing import fake_quant_k, fake_quant_v
from moend.calibration.artefact import Artefact
from moend.calibration.damage import damage_table, repeated
from moend.calibration.queries import TrigStatistics
from moend.calibration.rerun import Evictor
from moend.calibration.sensitivity import decode
from moend.errors import UserError
from moend.layer_bytes import Storage
from moend.plan import Config
from moend.replay import Replay, Request
from moend.scoring import scorer
from tests.tiny import tiny

BASE = Evictor(scorer("snapkv", window=4, kernel=3), n_sink=2, recent=4)
PREFIX, WINDOW, EVERY = 40, 9, 2
CONFIGS = (Config(0.3, 8, 4), Config(0.1, 4, 4), Config(0.5, 16, 16), Config(1.0, 4, 8), Config(1.0, 16, 16))


def storage(cap, k_bits, v_bits):
    return Storage(k_bits, v_bits, 8, cap // 4, "per_head")


def draw(count, seed=0):
    return torch.randint(3, 97, (count, PREFIX + WINDOW), generator=torch.Generator().manual_seed(seed))


def compressed(key, value, query, scaling, config, sliding, scores=None):
    """(keys, values, positions) of a prefix as SnapKV leaves it, head by head: kept, then quantised but for a tail.

    scores (H, PREFIX): another scorer's.
    """
    count, group = max(1, round(config.keep * PREFIX)), len(query) // len(key)
    tail, out = count // 4, []
    for h in range(len(key)):
        score = torch.zeros(PREFIX)
        for g in range(group):
            for i in range(PREFIX - 4, PREFIX):
                logits = key[h] @ query[h * group + g, i] * scaling
                unseen = torch.arange(PREFIX) > i
                if sliding is not None:
                    unseen |= torch.arange(PREFIX) < PREFIX - sliding + 1  # no query of the window sees them
                score += logits.masked_fill(unseen, -torch.inf).softmax(0) / (4 * group)
        score[-4:] = 0
        score = F.avg_pool1d(score[None], 3, stride=1, padding=1)[0]
        score[-4:] = torch.tensor([2.0, 3.0, 4.0, 5.0])  # its window always stays
        score = score if scores is None else scores[h].clone()
        sinks = min(2, count // 2)
        score[:sinks] = torch.inf
        score[PREFIX - min(4, count - sinks) :] = torch.inf
        if sliding is not None:
            score[: PREFIX - sliding + 1] = -torch.inf
        kept = score.topk(count).indices.sort().values
        k, v = key[h, kept], value[h, kept]
        old = count - tail if min(config.k_bits, config.v_bits) < 16 else 0
        k = torch.cat([fake_quant_k(k[:old], config.k_bits, 8), k[old:]]) if config.k_bits < 16 else k
        v = torch.cat([fake_quant_v(v[:old], config.v_bits), v[old:]]) if config.v_bits < 16 else v
        out.append((k, v, kept))
    return out


def run(model, ids, layer=None, config=None, only=None, scores=None):
    """Log-probabilities of the window, by one eager forward; window queries of `layer` see its compressed prefix.

    only: of this KV head alone. scores: see `compressed`.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(block, query, key, value, mask, scaling, sliding_window=None, **_):
        length, group = key.shape[2], query.shape[1] // key.shape[1]
        at = torch.arange(length)
        sees = at <= at[:, None]
        if sliding_window is not None:
            sees = sees & (at[:, None] - at < sliding_window)
        shares = (query @ key.repeat_interleave(group, 1).mT * scaling).masked_fill(~sees, -torch.inf).softmax(-1)
        out = shares @ value.repeat_interleave(group, 1)
        if block.layer_idx == layer:
            before = (x[0, :, :PREFIX] for x in (key, value, query))
            held = compressed(*before, scaling, config, sliding_window, scores)
            for head in range(query.shape[1]):
                if only not in (None, head // group):
                    continue
                k, v, kept = held[head // group]
                for i in range(PREFIX, length):
                    own = slice(PREFIX, i + 1)
                    logits = torch.cat([k, key[0, head // group, own]]) @ query[0, head, i] * scaling
                    if sliding_window is not None:
                        away = i - torch.cat([kept, torch.arange(PREFIX, i + 1)])
                        logits = logits.masked_fill(away >= sliding_window, -torch.inf)
                    out[0, head, i] = logits.softmax(0) @ torch.cat([v, value[0, head // group, own]])
        return out.transpose(1, 2).contiguous(), None

    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register("damage_reference", attention)
    model.set_attn_implementation("damage_reference")
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, PREFIX:]
    finally:
        model.set_attn_implementation(before)
    return F.log_softmax(logits.double(), -1)


def divergence(p, q):
    return float((p.exp() * (p - q)).sum(-1)[::EVERY].mean())


def measure(model, examples, **rest):
    return damage_table(model, examples, WINDOW, CONFIGS, BASE, storage, **{"every": EVERY, **rest})


@pytest.mark.req(20)
@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("llama", {}),
        ("qwen3_moe", {}),
        ("qwen2", {"sliding_window": 30, "use_sliding_window": True, "max_window_layers": 1}),
    ],
)
def test_the_table_is_one_run_per_layer_and_configuration(name, extra):
    model, examples = tiny(name, **extra), {"text": draw(2), "recall": repeated(draw(2, 1), WINDOW, 3)}
    found = measure(model, examples)
    assert found.per_example.shape == (2, 2, 3, 5)
    for k, ids in enumerate(examples.values()):
        for n in range(2):
            full = run(model, ids[n : n + 1])
            for layer in range(3):
                for c, config in enumerate(CONFIGS[:4]):
                    expected = divergence(full, run(model, ids[n : n + 1], layer, config))
                    assert found.per_example[k, n, layer, c].item() == pytest.approx(expected, rel=5e-3, abs=2e-6)
    assert (found.per_example[..., :2] > 0).all()
    assert (found.per_example[..., 4] == 0).all()  # nothing is compressed


@pytest.mark.req(20)
@pytest.mark.parametrize(
    ("name", "extra"),
    [("llama", {}), ("qwen2", {"sliding_window": 30, "use_sliding_window": True, "max_window_layers": 1})],
)
def test_per_head_it_is_one_run_per_head(name, extra):
    model, ids = tiny(name, **extra), draw(1)
    found = measure(model, {"text": ids}, heads=True)
    assert found.per_example.shape == (1, 1, 3, 2, 5)
    full = run(model, ids)
    for layer, head in itertools.product(range(3), range(2)):
        for c, config in enumerate(CONFIGS[:4]):
            expected = divergence(full, run(model, ids, layer, config, only=head))
            assert found.heads[layer, head, c].item() == pytest.approx(expected, rel=5e-3, abs=2e-6)
    torch.testing.assert_close(found.table, found.heads.sum(1))
    torch.testing.assert_close(found.tensors()["heads"], found.heads)
    assert measure(model, {"text": ids}).heads is None


def test_kinds_add_up_and_survive_the_disk(tmp_path: Path):
    found = measure(tiny(), {"text": draw(3), "recall": draw(3, 1)})
    torch.testing.assert_close(found.per_kind[1], sum(found.per_example[1]) / 3)
    torch.testing.assert_close(found.table, found.per_kind[0] + found.per_kind[1])
    Artefact("damage", {"a": 1}, found.tensors()).save(tmp_path / "x")
    back = Artefact.load(tmp_path / "x", {"a": 1}, "damage").tensors
    assert torch.equal(back["table"], found.table)
    assert decode(back["configs"]) == CONFIGS


def test_batches_of_rows_and_other_kinds_do_not_matter():
    model, seen = tiny("qwen2"), []
    one = measure(model, {"text": draw(2)}, tokens_at_once=1)
    both = measure(model, {"recall": draw(2, 1), "text": draw(2)}, progress=lambda *x: seen.append(x))
    torch.testing.assert_close(one.per_example[0], both.per_example[1], rtol=1e-3, atol=1e-7)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_scorer_with_statistics_uses_them():
    model, ids = tiny(), draw(1)
    made = TrigStatistics.measure(model, draw(1, 5)).tensors()
    base = Evictor(scorer("trig"), 2, 4)
    configs = (Config(0.3, 16, 16),)
    a = damage_table(model, {"text": ids}, WINDOW, configs, base, storage, statistics=made)
    other = {k: v.flip(0) for k, v in made.items()}
    b = damage_table(model, {"text": ids}, WINDOW, configs, base, storage, statistics=other)
    assert (a.table > 0).all() and not torch.equal(a.table, b.table)


@pytest.mark.req(5)
def test_a_scorer_that_replays_the_prompt_does_so_once_per_window():
    """KVZip, each KV head: the cut is by its scores over the whole prefix, which `test_replay` holds to naive ones."""
    model, ids, asked = tiny(), draw(2), []
    replay = Replay(model, None, 4096)
    replay.request = Request((80, 81, 82), (83, 84))

    def observe(done, names, tokens, context):
        asked.append((set(names), context))
        return replay.observe(done, names, tokens, context)

    evictor = Evictor(scorer("kvzip"), n_sink=2, recent=4)
    found = damage_table(
        model, {"text": ids}, WINDOW, CONFIGS, evictor, storage, every=EVERY, heads=True, observe=observe
    )
    assert asked == [({"reconstruction"}, (0, PREFIX))] * 2
    snap = damage_table(model, {"text": ids}, WINDOW, CONFIGS, BASE, storage, every=EVERY, heads=True)
    assert not torch.allclose(found.table, snap.table, rtol=1e-2)
    for n in range(2):
        before = ids[n : n + 1, :PREFIX]
        done = replay.observe(prefill(model, before), {"reconstruction"}, before[0].tolist(), (0, PREFIX))
        full = run(model, ids[n : n + 1])
        for layer, head in itertools.product(range(3), range(2)):
            scores = done.observed["reconstruction"][layer][0]
            for c, config in enumerate(CONFIGS[:4]):
                expected = divergence(full, run(model, ids[n : n + 1], layer, config, head, scores))
                assert found.per_example[0, n, layer, head, c].item() == pytest.approx(expected, rel=5e-3, abs=2e-6)


def test_the_model_is_left_as_it_was():
    model = tiny()
    before = model.config._attn_implementation
    measure(model, {"text": draw(1)})
    assert model.config._attn_implementation == before
    assert not any(m._forward_hooks for m in model.modules())


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 200), st.integers(1, 4))
def test_a_passage_comes_again(window, cue, spare, rows):
    body = 2 * (window + cue) + spare
    ids = torch.arange(rows * (body + cue + window)).view(rows, -1)  # every token is its own
    again = repeated(ids, window, cue)
    assert again.shape == ids.shape
    assert torch.equal(again, repeated(ids, window, cue))
    for old, new in zip(ids, again, strict=True):
        assert torch.equal(new[:body], old[:body])
        passage = new[body:]
        start = int(passage[0] - old[0])
        assert torch.equal(passage, old[start : start + cue + window])
        assert body // 8 <= start <= body - body // 8 - cue - window


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(UserError, match=r"calibration.damage.prefix \(40\) is too short to repeat"):
        repeated(draw(1), WINDOW, 25)
    with pytest.raises(UserError, match="scorer kvzip needs reconstruction, and nothing here replays the prompt"):
        damage_table(tiny(), {"text": draw(1)}, WINDOW, CONFIGS, Evictor(scorer("kvzip"), 2, 4), storage)
    with pytest.raises(UserError, match="ranks entries for all heads of a layer alike"):
        damage_table(
            tiny(), {"text": draw(1)}, WINDOW, CONFIGS, Evictor(scorer("streaming"), 2, 4), storage, heads=True
        )
    with pytest.raises(UserError, match="a prefix and a window"):
        damage_table(tiny(), {"text": draw(1)}, PREFIX + WINDOW, CONFIGS, BASE, storage)
