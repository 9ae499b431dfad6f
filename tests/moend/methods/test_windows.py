"""Sliding layers: what is planned is what they hold, and budgets go to the layers that grow."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moend.budget import Budget
from moend.cache import CompressedCache, Prefilled, prefill
from moend.calibration.artefact import identity
from moend.engine import rotations
from moend.errors import Infeasible, UserError
from moend.hf.attention import attention_of
from moend.hf.config import arch_of, cache_argument
from moend.hf.probe import shape_of
from moend.methods.bind import BoundMethod, bind
from moend.methods.spec import method
from moend.models.spec import ModelSpec, compare
from tests.moend.methods.made import calibrations
from tests.tiny import tiny

MODELS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 24},
    "qwen2": {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 1},
    "gemma3_text": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}
METHODS = ["full", "SnapKV", "2d_uniform", "H2O", "KVTuner", "PyramidKV", "2d_hetero", "RippleKV", "TOVA"]


@functools.cache
def model(name: str) -> Any:
    if name != "gemma3_text":
        return tiny(name, **MODELS[name])
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, pad_token_id=0, **MODELS[name],
    )  # fmt: skip
    return Gemma3ForCausalLM(config).eval()


@functools.cache
def filled(name: str, tokens: int) -> Prefilled:
    ids = torch.randint(3, 97, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    return prefill(model(name), ids, last_queries=32, observe=("accumulated",))


def bound(name: str, made: str, budget: object, **rest: Any) -> BoundMethod:
    arch = shape_of(model(name)).arch
    return bind(
        method(made), Budget.parse(budget), "matched", arch, t_ref=None, artefacts=calibrations(arch), **rest,
        store_dtype=torch.bfloat16,
    )  # fmt: skip


def held(b: BoundMethod, name: str, tokens: int, new: int) -> tuple[int, int]:
    """Bytes that the model's layers hold after the prompt, and the sum of the most that each held until the end."""
    scaling = [rule.scaling for rule in shape_of(model(name)).rules]
    with torch.no_grad(), attention_of(model(name)):
        cache = b.fork(filled(name, tokens), new, rotary=rotations(model(name)), scaling=scaling)
        after = most = layers(cache)
        for i in range(tokens, tokens + new):
            given = {"input_ids": torch.tensor([[3 + i % 90]]), "position_ids": torch.tensor([[i]])}
            model(name)(**given, use_cache=True, **{cache_argument(model(name)): cache})
            most = np.maximum(most, layers(cache))
    return int(after.sum()), int(most.sum())


def layers(cache: CompressedCache) -> np.ndarray:
    found = np.array([sum(row.nbytes() for row in parts) for parts in cache.parts()])
    assert found.sum() == cache.resident_bytes()
    return found


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(list(MODELS)),
    st.sampled_from(METHODS),
    st.sampled_from(["15%", "30%", "50%", "80%", "100%", 20, 40, "24KiB"]),
    st.sampled_from([10, 24, 40, 90, 150]),
    st.sampled_from([1, 9, 40]),
    st.sampled_from(["prompt", "peak"]),
)
def test_what_is_planned_is_held(name, made, budget, tokens, new, at):
    b = bound(name, made, budget, at=at)
    total = b.budget.to_bytes(b.arch, tokens)
    try:
        planned = b.held(tokens, new)
    except Infeasible as e:
        assert Budget.parse(e.smallest).value > total
        return
    found = held(b, name, tokens, new)
    if not b.fits(tokens, new):
        assert planned[at == "peak"] <= total
        assert b.plan(tokens, new).predicted["resident_bytes"] == found[0]
    assert planned[0] == found[0]
    if b.method.evicts:  # what is planned counts a step's new entries before it evicts, and positions from the start
        assert planned[1] >= found[1]
    else:
        assert planned[1] == found[1]


@pytest.mark.parametrize("name", MODELS)
def test_windows_are_read_from_the_config_and_change_no_identity(name):
    arch, rules = arch_of(model(name).config), shape_of(model(name)).rules
    assert arch.windows == tuple(r.window for r in rules) and 24 in arch.windows
    plain = dataclasses.replace(arch, windows=None)
    assert identity("m", "r", arch, {}, "", {}) == identity("m", "r", plain, {}, "", {})
    assert arch.full_bytes(100) == sum(128 * min(100, w or 100) for w in arch.windows)
    fields = {k: v for k, v in dataclasses.asdict(arch).items() if k != "windows"}
    assert ModelSpec(name="hf", id="a/b", arch=fields).pinned_arch == plain
    spec = ModelSpec(name="hf", id="a/b", arch={**fields, "windows": list(arch.windows)})
    assert spec.pinned_arch == arch
    compare(spec, arch)
    with pytest.raises(UserError, match="windows: has None"):
        compare(spec, plain)


def test_a_config_that_tells_other_windows_is_refused():
    odd = tiny("llama", layers=2)
    odd.config.sliding_window = 24
    with pytest.raises(UserError, match=r"its config tells windows \(24, 24\), its layers have \(None, None\)"):
        shape_of(odd)


@pytest.mark.parametrize("made", ["SnapKV", "H2O", "PyramidKV", "RippleKV"])
def test_a_window_that_fits_is_held_whole_and_the_rest_grows(made):
    plan = bound("gemma3_text", made, "50%").plan(600, 4)
    first, grows, last = plan.layers
    assert first.keep == last.keep == 1 and first.k_bits == 16
    assert 0.4 < grows.keep < 0.5
    small = bound("gemma3_text", made, 8).plan(600, 4)  # less than a window each: as any other layer
    assert max(x.keep for x in small.layers) < 0.05


def test_a_layer_that_never_outgrows_its_window_does_not_slide():
    specs = bound("mistral", "2d_uniform", "50%").specs(20, 9)
    assert not any(s.slides for s in specs)
    assert all(s.slides for s in bound("mistral", "full", "100%").specs(20, 40))
