"""One reading of any transformers config, for keys, plans and dry runs: neither torch nor a model is needed."""

from __future__ import annotations

import inspect
from typing import Any

from moend.budget import Arch
from moend.errors import UserError

KINDS = ("full_attention", "sliding_attention", "chunked_attention")  # layers whose cache is keys and values per token
# Fields that only configs of models have that keep something else than keys and values.
STATEFUL = ("mamba_d_state", "ssm_cfg", "state_size", "mamba_d_ssm", "ssm_state_size", "lru_width")


UNUSED_WINDOW = ("moshi",)  # model types whose configs tell a window that their layers do not have


def text_config(config: Any) -> Any:
    """The config of the decoder over text: the config itself, or a part of a multimodal one."""
    return config.get_text_config(decoder=True)


def decoder_of(model: Any) -> Any:
    """The module that turns ids into hidden states, without the projection onto the vocabulary."""
    base = model.base_model
    return base if base is not model else getattr(model, "model", model)


def cache_argument(model: Any) -> str:
    """The name of the cache in this model's forward: `cache` in transformers 5.2x, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(type(decoder_of(model)).forward).parameters else "past_key_values"


def arch_of(config: Any) -> Arch:
    """The cache's shape from a transformers config: layers, heads, widths and windows are read, never assumed.

    UserError by name for encoder-decoders, latent attention and layers that keep a state instead of keys and values.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"model type '{config.model_type}' is an encoder-decoder: only decoder models are supported")
    config = text_config(config)
    kind = config.model_type

    def read(name: str) -> Any:
        try:
            return getattr(config, name, None)
        except Exception as e:  # transformers refuses to name one value where layers differ
            raise UserError(f"model type '{kind}' has layers that differ in {name}: they must be alike") from e

    if read("kv_lora_rank"):
        raise UserError(f"model type '{kind}' has multi-head latent attention: keys and values are not cached per head")
    layer_types = read("layer_types") or ()
    if odd := sorted({str(x) for x in layer_types} - set(KINDS)):
        raise UserError(f"model type '{kind}' has layers of kind {odd[0]}: only keys and values are supported")
    if odd := [name for name in STATEFUL if read(name)]:
        raise UserError(f"model type '{kind}' has state-space layers ({odd[0]}): only keys and values are supported")
    values: dict[str, int] = {}
    for field, name in (
        ("layers", "num_hidden_layers"),
        ("q_heads", "num_attention_heads"),
        ("max_positions", "max_position_embeddings"),
    ):
        value = read(name)
        if not isinstance(value, int):
            raise UserError(f"model type '{kind}' has no usable {name} in its config (found {value!r})")
        values[field] = value
    heads = values["q_heads"]
    kv_heads = 1 if read("multi_query") else read("num_key_value_heads") or heads
    head_dim = read("head_dim") or read("hidden_size") // heads
    if not isinstance(kv_heads, int) or not isinstance(head_dim, int):
        raise UserError(f"model type '{kind}' has layers of different widths or heads, which moend does not support")
    return Arch(**values, kv_heads=kv_heads, head_dim=head_dim, windows=_windows(config, values))


def _windows(config: Any, values: dict[str, int]) -> tuple[int | None, ...] | None:
    """The window of each layer by the config's own words; None where none is shorter than the longest context."""
    width, used = getattr(config, "sliding_window", None), getattr(config, "use_sliding_window", True)
    if not isinstance(width, int) or used is False or config.model_type in UNUSED_WINDOW:
        return None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * values["layers"]
    windows = tuple(width if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) and width < values["max_positions"] else None
