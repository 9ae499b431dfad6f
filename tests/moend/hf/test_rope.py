"""moend.hf.rope against transformers' own rotary modules."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GlmConfig,
    GlmForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from moend.errors import UserError
from moend.hf.rope import Rotary, depends_on_length, pairs, rotary, unpairs, unrotate
from tests.tiny import ARCHITECTURES, tiny

BASE: dict[str, Any] = {"rope_theta": 10000.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.3 * i for i in range(8)],
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(rope: dict[str, Any], positions: int = 64) -> Any:
    return tiny("llama", layers=2, positions=positions, rope_parameters=BASE | rope)


def own_rotation(model: Any, x: torch.Tensor, positions: torch.Tensor, kind: str | None = None) -> torch.Tensor:
    """x turned by the model's own module and function."""
    decoder = model.get_decoder()
    module = importlib.import_module(type(decoder).__module__)
    cos, sin = decoder.rotary_emb(x, positions, *([kind] if kind else []))
    turned: torch.Tensor = module.apply_rotary_pos_emb(x, x, cos, sin)[0]
    return turned


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("length", [12, 48, 200])
def test_every_rope_type_is_undone(name: str, length: int) -> None:
    model = llama(ROPES[name])
    x = torch.randn(2, 2, length, 16)
    positions = torch.stack((torch.arange(length), torch.arange(length)))
    roped = own_rotation(model, x, positions)
    rot = rotary(model)  # after the pass: dynamic and longrope have set what they used
    assert (unrotate(roped, positions, rot) - x).abs().max() < 1e-5
    assert rot.scaling == model.model.rotary_emb.attention_scaling
    assert (rot.scaling != 1) == (name in ("yarn", "longrope"))


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_reading_neither_changes_the_model_nor_follows_it(name: str) -> None:
    model = llama(ROPES[name])
    module = model.model.rotary_emb
    x = torch.zeros(1, 1, 16)
    module(x, torch.arange(200)[None])
    long = module.inv_freq.clone()
    rot = rotary(model)
    assert torch.equal(module.inv_freq, long)
    module(x, torch.arange(4)[None])
    assert torch.equal(rot.inv_freq, long)
    assert not torch.equal(rotary(model).inv_freq, long)


@pytest.mark.parametrize("name", ROPES)
def test_which_ropes_depend_on_length(name: str) -> None:
    assert depends_on_length(llama(ROPES[name])) == (name in ("dynamic", "longrope"))


def test_one_pair_by_hand() -> None:
    """A frequency of a quarter turn, scale 2, position 1."""
    rot = Rotary(torch.tensor([torch.pi / 2]), 2.0, 2)
    roped = torch.tensor([[[[0.0, 2.0]]]])  # (1, 0) turned by a quarter and doubled
    assert torch.allclose(unrotate(roped, torch.tensor([[1]]), rot), torch.tensor([1.0, 0.0]), atol=1e-6)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_keys_of_real_caches_are_undone(name: str) -> None:
    """The same token at two positions has the same layer-0 key before RoPE."""
    model = tiny(name)
    cache = DynamicCache()
    with torch.no_grad():
        model(torch.full((1, 9), 5), past_key_values=cache)
    plain = unrotate(cache.layers[0].keys, torch.arange(9)[None], rotary(model))
    assert (plain - plain[:, :, :1]).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["phi", "neox", "smollm3", "gemma3"])
def test_partial_absent_and_per_layer_rotation(name: str) -> None:
    torch.manual_seed(0)
    model: Any
    if name == "phi":
        model = PhiForCausalLM(PhiConfig(**SMALL, rope_parameters=BASE | {"partial_rotary_factor": 0.5}))
    elif name == "neox":
        small = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**small, rope_parameters=BASE | {"partial_rotary_factor": 0.25}))
    elif name == "smollm3":
        model = SmolLM3ForCausalLM(SmolLM3Config(**SMALL, no_rope_layers=[1, 0], use_sliding_window=False))
    else:
        kinds = ["sliding_attention", "full_attention"]
        ropes = {kinds[0]: {"rope_type": "default", "rope_theta": 1e4}, kinds[1]: ROPES["linear"] | {"rope_theta": 1e6}}
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, head_dim=16, layer_types=kinds, rope_parameters=ropes))
    model.eval()
    seen: list[torch.Tensor] = []

    cache = DynamicCache()
    store = cache.update

    def update(key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(key)
        return store(key, *args, **kwargs)

    cache.update = update
    # One token repeated: the hidden states are the same at every position, so keys differ by RoPE alone.
    with torch.no_grad():
        model(torch.full((1, 9), 5), past_key_values=cache, position_ids=torch.arange(9)[None])
    for layer, keys in enumerate(seen):
        rot = rotary(model, layer)
        plain = unrotate(keys, torch.arange(9)[None], rot)
        assert (plain - plain[:, :, :1]).abs().max() < 1e-5, layer
        if name == "phi":
            assert (rot.dim, len(rot.frequencies(16))) == (8, 8)
            assert torch.equal(rot.frequencies(16)[4:], torch.zeros(4))
        if name == "smollm3":
            assert bool(rot.inv_freq.any()) == (layer == 0)
    if name in ("smollm3", "gemma3"):
        with pytest.raises(UserError, match="layers differ"):
            rotary(model)


def test_unknown_layouts_are_refused_by_name() -> None:
    cohere = CohereForCausalLM(CohereConfig(**SMALL))
    glm = GlmForCausalLM(GlmConfig(**SMALL, head_dim=16))
    latent = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **{**SMALL, "num_key_value_heads": 4},
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            first_k_dense_replace=2,
        )
    )
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=2))
    for model in (cohere, glm, latent, gpt2):
        with pytest.raises(UserError, match=type(model).__name__):
            rotary(model)
    with pytest.raises(UserError, match="layer 9 has no attention"):
        rotary(tiny("llama"), 9)


def test_a_norm_after_rope_is_refused() -> None:
    """HunYuan normalises keys after turning them: with weights that differ per dimension nothing can be turned back."""
    from transformers import HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM

    model: Any = HunYuanDenseV1ForCausalLM(HunYuanDenseV1Config(**SMALL, head_dim=16))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.key_layernorm.weight.copy_(torch.linspace(0.1, 2.0, 16))
    with pytest.raises(UserError, match="HunYuanDenseV1ForCausalLM"):
        rotary(model)


def test_half_precision_models_pass_the_check() -> None:
    rot = rotary(tiny("llama").bfloat16())
    assert rot.inv_freq.dtype == torch.float32


@given(
    heads=st.integers(1, 3), n=st.integers(1, 6), r=st.integers(1, 4), still=st.integers(0, 3), seed=st.integers(0, 99)
)
def test_rotation_properties(heads: int, n: int, r: int, still: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    rot = Rotary(torch.rand(r, generator=g) * 2, float(torch.rand(1, generator=g)) + 0.5, 2 * r)
    d = 2 * (r + still)
    x = torch.randn(2, heads, n, d, generator=g)
    assert torch.equal(unpairs(*pairs(x, rot), rot), x)
    positions = torch.randint(-1, 500, (2, heads, n), generator=g)
    back = unrotate(x, positions, rot)
    scale = unpairs(rot.scales(d), rot.scales(d), rot)
    # Turning keeps the length of each pair, and padding is not turned at all.
    assert torch.allclose(torch.hypot(*pairs(back * scale, rot)), torch.hypot(*pairs(x, rot)), atol=1e-4)
    assert torch.allclose((back * scale)[positions <= 0], x[positions <= 0], atol=1e-6)
    # Positions per head and shared positions are the same thing.
    shared = positions[:, 0]
    assert torch.equal(unrotate(x, shared, rot), unrotate(x, shared[:, None].expand(-1, heads, -1), rot))
