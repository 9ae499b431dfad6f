"""Routers of the MoE families that transformers ships: found, read, and refused where they are not understood."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from moend.errors import UserError
from moend.hf.routers import Routing, find, read
from tests.tiny import tiny

EXPERTS, TOP_K = 8, 2
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "moe_intermediate_size": 32,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [],
    "moe_num_experts": EXPERTS,
    "moe_k": TOP_K,
}
DBRX: dict[str, Any] = {
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 128,
    "vocab_size": 97,
    "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
    "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": EXPERTS, "moe_top_k": TOP_K},
}
# family, kind, layers with a router, settings
FAMILIES: list[tuple[str, str, list[int], dict[str, Any]]] = [
    ("qwen3_moe", "softmax", [0, 1], {}),
    ("qwen2_moe", "softmax", [0, 1], {}),
    ("mixtral", "softmax", [0, 1], {}),
    ("olmoe", "softmax", [0, 1], {}),
    ("flex_olmo", "softmax", [0, 1], {}),
    ("gpt_oss", "softmax", [0, 1], {"head_dim": 16}),
    ("granitemoe", "softmax", [0, 1], {}),
    ("phimoe", "softmax", [0, 1], {}),
    ("ernie4_5_moe", "softmax", [1], {}),
    ("dbrx", "softmax", [0, 1], DBRX),
    ("deepseek_v2", "softmax", [1], {"first_k_dense_replace": 1, "topk_method": "greedy"}),
    ("deepseek_v3", "sigmoid", [1], {"first_k_dense_replace": 1}),
    ("glm4_moe", "sigmoid", [1], {"first_k_dense_replace": 1, "head_dim": 16}),
    ("minimax_m2", "sigmoid", [0, 1], {"head_dim": 16}),
    ("exaone_moe", "sigmoid", [1], {"head_dim": 16}),
    ("llama4_text", "sigmoid", [0, 1], {"intermediate_size_mlp": 96, "head_dim": 16, "interleave_moe_layer_step": 1}),
]


def family(name: str, settings: dict[str, Any], seed: int = 0) -> Any:
    known = AutoConfig.for_model(name)
    fields = settings if name == "dbrx" else {k: v for k, v in COMMON.items() if hasattr(known, k)} | settings
    config = AutoConfig.for_model(name, **fields)
    with torch.device("meta"):
        assert AutoModelForCausalLM.from_config(config).num_parameters() < 2_000_000
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for router in find(model)[0].values():  # spread the scores, as training does
        for p in router.parameters():
            nn.init.normal_(p, std=0.5)
    return model


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 97, (1, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.req(5)
@pytest.mark.parametrize(("name", "kind", "layers", "settings"), FAMILIES, ids=[f[0] for f in FAMILIES])
def test_families(name, kind, layers, settings, ids):
    model = family(name, settings)
    routing = Routing.of(model, ids)
    assert (routing.kind, list(routing.modules)) == (kind, layers)
    told = []
    with torch.no_grad(), routing.recording(told.append):
        model(input_ids=ids)
    assert [t.layer for t in told] == layers
    # the router's own input and weights give the logits once more
    inputs: dict[int, torch.Tensor] = {}
    hooks = [
        m.register_forward_pre_hook(
            lambda _m, args, kw, at=at: inputs.update({at: [*args, *kw.values()][0]}), with_kwargs=True
        )
        for at, m in routing.modules.items()
    ]
    with torch.no_grad():
        model(input_ids=ids)
    for h in hooks:
        h.remove()
    for t in told:
        weight = next(p for n, p in routing.modules[t.layer].named_parameters() if p.shape == (EXPERTS, 64))
        bias = next((p for n, p in routing.modules[t.layer].named_parameters() if n == "bias"), torch.zeros(EXPERTS))
        logits = inputs[t.layer].reshape(-1, 64) @ weight.T + bias
        expected = logits.softmax(-1) if kind == "softmax" else logits.sigmoid()
        torch.testing.assert_close(t.gates, expected, atol=1e-5, rtol=1e-4)
        assert t.chosen.shape == (24, model.config.num_experts_per_tok if name != "dbrx" else TOP_K)
        if name not in ("phimoe", "ernie4_5_moe", "deepseek_v3", "glm4_moe", "minimax_m2", "exaone_moe"):
            # the others choose by their gates alone
            top = expected.topk(t.chosen.shape[1]).indices
            assert torch.equal(top.sort(-1).values, t.chosen.sort(-1).values)


def test_gates_of_sigmoid_routers_are_before_bias_and_normalisation(ids):
    model = family("deepseek_v3", {"first_k_dense_replace": 1})
    router = find(model)[0][1]
    router.e_score_correction_bias += torch.linspace(-2, 2, EXPERTS)
    told = []
    with torch.no_grad(), Routing.of(model, ids).recording(told.append):
        model(input_ids=ids)
    assert float((told[0].gates.sum(-1) - 1).abs().max()) > 0.1
    assert bool((told[0].chosen == EXPERTS - 1).any(-1).all())  # the bias decides, the gates do not show it
    assert float(told[0].gates[:, -1].min()) < 0.5


def test_a_dense_model_is_refused():
    with pytest.raises(
        UserError, match="LlamaForCausalLM has no router that transformers can record: it is a dense model"
    ):
        find(tiny("llama"))


def test_a_family_without_moe_layers_is_refused():
    model = tiny("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp = nn.Identity()
    with pytest.raises(UserError, match="none of its layers has one"):
        find(model)


def test_an_unknown_gate_is_refused(ids):
    model = tiny("qwen3_moe")
    for router in find(model)[0].values():
        original = router.forward

        def odd(x, original=original):
            logits, _, chosen = original(x)
            return logits, torch.nn.functional.softplus(logits).sqrt().gather(-1, chosen), chosen

        router.forward = odd
    with pytest.raises(UserError, match="cannot tell how Qwen3MoeTopKRouter of Qwen3MoeForCausalLM turns its scores"):
        Routing.of(model, ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_readings(dtype):
    torch.manual_seed(0)
    logits = torch.randn(40, 8) * 2
    for name, gates, shown in (
        ("softmax of logits", logits.softmax(-1), logits),
        ("sigmoid of logits", logits.sigmoid(), logits),
        ("probabilities", logits.softmax(-1), logits.softmax(-1)),
        ("sigmoid scores", logits.sigmoid(), logits.sigmoid()),
    ):
        weights, chosen = gates.topk(3)
        for given in (weights, weights / weights.sum(-1, keepdim=True), weights * 2.5):
            assert read([(shown, chosen, given.to(dtype))]) == name
        one, top = gates.topk(1)
        assert read([(shown, top, one.to(dtype))]) == name
        assert read([(shown, top, torch.ones_like(one))]) is None  # normalised to one: nothing can be told
    assert read([(torch.zeros(4, 8), torch.zeros(4, 2).long(), torch.ones(4, 2))]) is None  # no spread: either fits
    assert read([(logits, None, None)]) is None
    assert read([]) is None
