"""What moend does not understand it refuses in one line, while binding or at the call; what it understands is right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    JetMoeConfig,
    JetMoeForCausalLM,
)

import moend
from moend.cache import LayerSpec, Selector, attention_of, cache_argument, compress, prefill
from moend.errors import UserError
from moend.hf.cache_layers import CacheLayer
from moend.hf.config import arch_of
from moend.hf.probe import shape_of
from moend.layer_bytes import Storage
from moend.scoring import scorer
from tests.moend.hf import families
from tests.tiny import tiny

IDS = torch.randint(3, 97, (1, 60), generator=torch.Generator().manual_seed(0))
NEW = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def jetmoe() -> Any:
    config = JetMoeConfig(
        vocab_size=97, hidden_size=64, num_hidden_layers=2, num_key_value_heads=2, kv_channels=16, intermediate_size=64,
        max_position_embeddings=512, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return JetMoeForCausalLM(config).eval()


def cross_attention() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=64, n_head=4, n_layer=2, attn_pdrop=0.1)).train()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (jetmoe, "JetMoeForCausalLM is not supported: .* changes them first"),
        (lambda: families.build("diffllama", "DiffLlamaForCausalLM"), "changes keys or values"),
        pytest.param(
            lambda: families.build("dory", "DoryForCausalLM"),
            "several times",
            marks=pytest.mark.skipif(
                not hasattr(transformers, "DoryForCausalLM"), reason="newer than this transformers"
            ),
            id="dory",
        ),
        (lambda: families.build("camembert", "CamembertForCausalLM"), "count positions"),
        (lambda: families.build("mimo_v2_flash", "MiMoV2FlashForCausalLM"), "layer 1 has kv_heads 4 instead of 2"),
        (lambda: tiny("llama").train(), None),
        (cross_attention, "eval"),
    ],
)
def test_a_model_is_refused_while_binding(make: Callable[[], Any], says: str | None) -> None:
    model = make()
    if says is None:
        assert shape_of(model).arch.layers == 3
        return
    with pytest.raises(UserError, match=says) as e, moend.compress(model, "SnapKV", "50%"):
        pass
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("deepseek_v3", "latent attention"),
        ("mamba", "linear_attention"),
        ("jamba", "linear_attention"),
        ("t5", "encoder-decoder"),
        ("gemma4_text", "differ in head_dim"),
    ],
)
def test_a_config_is_refused_by_name(family: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as e:
        arch_of(families.CONFIG_MAPPING[family]())
    assert family in str(e.value) and "\n" not in str(e.value)


def test_a_multimodal_model_is_its_text_part() -> None:
    text = Gemma3TextConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=24, pad_token_id=0,
    )  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text.to_dict(), vision_config=vision | {"image_size": 28, "patch_size": 14})
    model = Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        stock = model.generate(IDS, **NEW)
        with moend.compress(model, "SnapKV", "100%", max_new_tokens=6):
            assert torch.equal(model.generate(IDS, **NEW), stock)


@pytest.mark.parametrize("padding", [1, 2])
def test_right_padding(padding: int) -> None:
    model, mask = tiny(), torch.ones(1, 60 + padding, dtype=torch.long)
    mask[:, 60:] = 0
    ids = torch.cat([IDS, torch.zeros(1, padding, dtype=torch.long)], 1)
    with torch.no_grad(), moend.compress(model, "SnapKV", "50%"), pytest.raises(UserError, match="only left padding"):
        model.generate(ids, attention_mask=mask, **NEW)


def test_prompts_in_pieces() -> None:
    model = tiny()
    with moend.compress(model, "SnapKV", "50%"), pytest.raises(UserError, match="prefill_chunk_size=16"):
        model.generate(IDS, prefill_chunk_size=16, **NEW)
    assert model.generate(IDS, prefill_chunk_size=16, **NEW).shape == (1, 66)  # outside it is transformers' business


def test_a_row_of_one_real_token_keeps_it() -> None:
    model, x = tiny(), torch.tensor([[0, 0, 0, 0, 5], [7, 8, 9, 10, 11]])
    alone = model.generate(x[:1, 4:], **NEW)[0, 1:]
    with torch.no_grad(), moend.compress(model, "SnapKV", "50%", store_dtype=torch.float32):
        both = model.generate(x, attention_mask=(x > 0).long(), **NEW)
    assert both.shape == (2, 11) and torch.equal(both[0, 5:], alone)


def test_a_second_turn_after_left_padding() -> None:
    model, x = tiny(), torch.cat([IDS, IDS.flip(1)])
    x[0, :20] = 0
    mask = (x > 0).long()
    with torch.no_grad(), moend.compress(model, "SnapKV", "50%"):
        out = model.generate(x, attention_mask=mask, return_dict_in_generate=True, **NEW)
        longer = torch.cat([out.sequences, x[:, :3]], 1)
        mask = torch.cat([mask, torch.ones(2, longer.shape[1] - 60, dtype=torch.long)], 1)
        with pytest.raises(UserError, match="second turn after left padding"):
            model.generate(longer, attention_mask=mask, past_key_values=out.past_key_values, **NEW)


def test_a_copy_of_a_cache_outside_its_context() -> None:
    model = tiny()
    with torch.no_grad(), moend.compress(model, "SnapKV", "50%"):
        twin = copy.deepcopy(model.generate(IDS, return_dict_in_generate=True, **NEW).past_key_values)
    with torch.no_grad(), pytest.raises(UserError, match=r"inside moend\.compress"):
        model(input_ids=IDS[:, :1], **{cache_argument(model): twin})


def test_gradients() -> None:
    model = tiny()
    with moend.compress(model, "SnapKV", "50%"), pytest.raises(UserError, match="no_grad"):
        model(IDS)


def test_layers_are_attended_once_each() -> None:
    class Plain(CacheLayer):
        def take(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return keys, values

        def answer(self, query: torch.Tensor, rule: Any) -> torch.Tensor:
            return query

        def get_seq_length(self) -> int:
            return 0

    layer, x = Plain(), torch.zeros(1, 1, 1, 4)
    key, value = layer.update(x, x)
    assert key.moend_layer is layer and value.moend_layer is layer  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="does not compute with the keys"):
        layer.update(x, x)
    layer.attend(x, None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="several times"):
        layer.attend(x, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_sliding_layers_hold_their_window_only(share: float) -> None:
    """Also while decoding; and at full budget nothing that a query could see is missing."""
    window, new = 24, 80
    model, ids = tiny("mistral", sliding_window=window), torch.randint(3, 97, (1, 60 + new))
    with torch.no_grad():
        stock = model(ids).logits[:, 60:]
        done = prefill(model, ids[:, :60])
        specs = [LayerSpec(int(60 * share), Storage())] * 3
        made = Selector(scorer("streaming"), 0, n_sink=4, recent=8, scaling=0.25, seed=0)
        cache = compress(done, specs, lambda _: made, score_key="", dtype=torch.float32)
        assert all(c == window - 1 for counts in cache.counts() for c in counts)
        logits = []
        with attention_of(model):
            for i in range(60, 60 + new):
                given = {"input_ids": ids[:, i : i + 1], "position_ids": torch.tensor([[i]])}
                logits.append(model(**given, use_cache=True, **{cache_argument(model): cache}).logits)
                assert all(c <= window + 8 for counts in cache.counts() for c in counts)
    assert (torch.cat(logits, 1) - stock).abs().max() < 1e-3
