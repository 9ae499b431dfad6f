"""Tiny random models of the architectures we support: made in milliseconds, no files."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "qwen3_moe")


def tiny(name: str = "llama", *, layers: int = 3, seed: int = 0, positions: int = 4096, **extra: Any) -> Any:
    """A random model with 4 query heads, 2 KV heads of 16 dimensions, vocabulary 97, float32, in eval mode."""
    common: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": positions,
        "initializer_range": 0.15,  # large enough that attention is far from uniform
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "sliding_window": None,
    }
    common |= extra
    torch.manual_seed(seed)
    if name == "llama":
        common.pop("sliding_window")
        model = LlamaForCausalLM(LlamaConfig(**common))
    elif name == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**common))
    elif name == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**common))
    elif name == "mistral":
        model = MistralForCausalLM(MistralConfig(**common))
    elif name == "qwen3_moe":
        common |= {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": []}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**common))
    else:
        raise ValueError(name)
    return model.eval()
