"""Every decoder family that transformers maps, tried: a tiny random model of it against the stock model.

    python -m tests.moend.hf.families                          # the table
    python -m tests.moend.hf.families gemma2 gpt_oss           # some of it
    python -m tests.moend.hf.families --write docs/models.md   # into the page, between its two marks

A family is right if our logits equal the stock model's at full budget and, at 50 %, those of a dense attention that
hides what was evicted. The prompt is longer than every window and chunk, and weights are wide, so that a rule that is
left out shows. A family is refused if binding says so in one line.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moend.cache import LayerSpec, Selector, attention_of, cache_argument, compress, prefill
from moend.errors import UserError
from moend.hf.probe import shape_of
from moend.layer_bytes import Storage
from moend.scoring import LayerView
from moend.scoring.base import Scorer

PREFIX, LENGTH, CHUNK = 70, 96, 33
LARGEST = 20_000_000  # parameters of a tiny model
TOLERANCE = 2e-3  # of the largest logit
MARKS = "<!-- families: python -m tests.moend.hf.families --write docs/models.md -->", "<!-- end of families -->"
SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.15,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True, "add_cross_attention": False,
    "sliding_window": 24, "use_sliding_window": True, "max_window_layers": 2, "attention_chunk_size": 16,
    "sliding_window_pattern": 2, "query_pre_attn_scalar": 40, "attn_logit_softcapping": 1.5,
    "moe_intermediate_size": 32, "intermediate_size_mlp": 96, "shared_expert_intermediate_size": 32,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "n_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "n_shared_experts": 1,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_dense_layers": 1,
    "moe_layer_start_index": 1, "moe_num_shared_experts": 1, "kv_channels": 16, "ffn_hidden_size": 96,
    "n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 512, "n_ctx": 512, "n_inner": 96, "rotary_dim": 8,
    "d_model": 64, "d_ff": 96, "d_kv": 16, "n_heads": 4, "n_layers": 4, "max_seq_len": 512, "ffn_dim": 96,
    "decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "encoder_layers": 1,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "word_embed_proj_dim": 64, "embedding_size": 64,
    "type_vocab_size": 1, "max_target_positions": 512, "attention_types": [[["global", "local"], 2]], "num_layers": 4,
    "num_heads": 4, "window_size": 24, "local_attention": 24, "global_attn_every_n_layers": 2,
    "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 16, "laurel_rank": 8, "num_kv_shared_layers": 0,
    "mlp_hidden_size": 96, "altup_num_inputs": 2, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "global_head_dim": 16, "mamba_d_state": 8, "state_size": 8,
    "num_attention_groups": 2, "num_key_value_groups": 2, "rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5,
    "image_token_id": 90, "image_token_index": 90, "video_token_id": 91, "audio_token_id": 92, "boi_token_id": 93,
    "eoi_token_id": 94, "boa_token_id": 95, "eoa_token_id": 96, "image_size": 28, "patch_size": 14,
    "attention_multiplier": 0.4, "swa_num_key_value_heads": 2, "swa_num_attention_heads": 4, "swa_head_dim": 16,
}  # fmt: skip
# What the names above do not say.
EXTRA: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4},
    },
    "phimoe": {"num_local_experts": 4},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "qwen2": {"sliding_window": 24},
    "qwen3": {"sliding_window": 24},
    "qwen2_moe": {"sliding_window": 24},
    "phi3": {"sliding_window": 24},
    "starcoder2": {"sliding_window": 24},
    "mixtral": {"sliding_window": 24},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "reformer": {"axial_pos_embds": False},
    "xlm": {"emb_dim": 64},
    "moshi": {"audio_vocab_size": 97},
    "phi": {"partial_rotary_factor": 0.5},
}


@dataclass(frozen=True)
class Verdict:
    """What became of one family. kind: "right", "refused", "not built" or "wrong"."""

    family: str  # transformers' model type
    model: str  # its class
    kind: str
    why: str = ""  # the refusal, the reason it was not built, or by how much it is wrong
    features: str = ""  # windows, chunks, softcap, sinks, other scalings


def names() -> dict[str, str]:
    """Model class by model type: all that transformers maps to a causal language model."""
    return dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())


def multimodal() -> dict[str, str]:
    """The model type of the text part by model type, for models of text with images, sound or video."""
    found: dict[str, str] = {}
    mapped = {**auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    for kind in mapped:
        if kind in names():
            continue
        with contextlib.suppress(Exception):
            found[kind] = CONFIG_MAPPING[kind]().get_text_config(decoder=True).model_type
    return found


def small(kind: str, config_class: Any) -> Any:
    """A tiny config: every field above that the class knows."""
    default = config_class()
    known = set(inspect.signature(config_class).parameters) | set(vars(default))
    known |= set(getattr(config_class, "__annotations__", {}))
    wanted = {k: v for k, v in (SMALL | EXTRA.get(kind, {})).items() if k in known}
    for key in ("sliding_window", "attn_logit_softcapping", "head_dim", "window_size", "q_lora_rank"):
        none = getattr(default, key, 1) is None and key not in EXTRA.get(kind, {})
        if key in wanted and none and key != "head_dim":
            del wanted[key]  # the family has none
    for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
        if name in EXTRA.get(kind, {}):
            continue
        own = type(getattr(default, name, None))  # where the class says only that it is some config
        with contextlib.suppress(Exception):
            chosen = own if issubclass(own, transformers.PreTrainedConfig) else part
            wanted[name] = small(chosen.model_type, chosen).to_dict()
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(listed := getattr(default, key, None), list | tuple) and len(listed) != 4 and listed:
            kinds = list(dict.fromkeys(listed))  # each kind there is; of one kind alone the class decides itself
            if len(kinds) > 1 and key not in EXTRA.get(kind, {}):
                wanted[key] = [kinds[i % len(kinds)] for i in range(4)]
    try:
        return config_class(**wanted)
    except Exception:
        wanted.pop("layer_types", None)
        return config_class(**wanted)


def build(kind: str, name: str) -> Any:
    """A tiny random model with wide weights, in eval mode."""
    torch.manual_seed(0)
    config = small(kind, getattr(transformers, name).config_class or CONFIG_MAPPING[kind])
    with torch.device("meta"):
        size = sum(p.numel() for p in getattr(transformers, name)(config).parameters())
    if size > LARGEST:
        raise ValueError(f"its config stays too large ({size / 1e6:.0f} million parameters)")
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for path, p in model.named_parameters():
            if p.ndim >= 2:
                p.normal_(0, 0.15)
            elif "sink" in path:
                p.normal_(0, 2)
            elif not torch.isfinite(p).all() or p.abs().max() > 1e3:
                p.normal_(0, 0.15)
    return model


class Lottery(Scorer):
    """Ranks by a seeded draw per layer and KV head."""

    def __call__(self, view: LayerView) -> Tensor:
        """(H, n)."""
        return torch.rand(view.keys.shape[:2], generator=torch.Generator().manual_seed(view.layer))


class Slot(DynamicLayer):
    """A cache layer of transformers' own that tells `dense` which one it is."""

    def __init__(self, slot: int):
        super().__init__()
        self.slot = slot

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys with the number of their layer."""
        keys, values = super().update(*args, **kwargs)
        keys = keys.view_as(keys)
        keys.slot = self.slot  # type: ignore[attr-defined]
        return keys, values


HIDDEN: dict[int, Tensor] = {}  # by layer (H, PREFIX) bool: what queries behind the prefix do not see


def dense(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention written out over the whole sequence; nothing of ours is in it."""
    group, q, t = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = (query @ key.repeat_interleave(group, 1).mT).float() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    hidden = torch.ones(q, t, dtype=torch.bool).triu(1)[None, None]
    if attention_mask is not None:
        hidden = ~attention_mask if attention_mask.dtype == torch.bool else attention_mask < -1
    if (gone := HIDDEN.get(getattr(key, "slot", -1))) is not None:
        hidden = hidden.expand(1, query.shape[1], q, t).clone()
        hidden[:, :, PREFIX:, :PREFIX] |= gone.repeat_interleave(query.shape[1] // len(gone), 0)[None, :, None]
    logits = logits.masked_fill(hidden, -torch.inf)
    if s_aux is not None:
        logits = torch.cat([logits, s_aux.float()[None, :, None, None].expand(*logits.shape[:3], 1)], -1)
    share = logits.softmax(-1)[..., :t].to(value.dtype)
    return (share @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def written_out(model: Any, hidden: dict[int, Tensor]) -> Iterator[None]:
    """Run the model with `dense`."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def masked(*args: Any, **kwargs: Any) -> Any:
        return sdpa_mask(*args, **(kwargs | {"allow_is_causal_skip": False}))

    ALL_ATTENTION_FUNCTIONS.register("written_out", dense)
    ALL_MASK_ATTENTION_FUNCTIONS.register("written_out", masked)
    before = model.config._attn_implementation
    model.set_attn_implementation("written_out")
    HIDDEN.update(hidden)
    try:
        yield
    finally:
        HIDDEN.clear()
        model.set_attn_implementation(before)


@torch.no_grad()
def ours(model: Any, ids: Tensor, keep: float) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits of what follows the prefix, computed from what is kept of it, and what each layer does not hold of it."""
    done = prefill(model, ids[:, :PREFIX], chunk=CHUNK)
    heads = done.layers[0].keys.shape[1]
    specs = [LayerSpec(int(PREFIX * keep), Storage()) for _ in done.layers]
    cache = compress(
        done,
        specs,
        lambda layer: Selector(Lottery(), layer, n_sink=0, recent=1, scaling=1.0, seed=0),
        score_key="lottery",
        dtype=torch.float32,
    )
    hidden = {}
    for layer, parts in enumerate(cache.parts()):
        hidden[layer] = torch.ones(heads, PREFIX, dtype=torch.bool)
        for row in parts:
            hidden[layer].scatter_(1, torch.atleast_2d(row.true_positions()).long().expand(heads, -1), False)
    parts_of = []
    with attention_of(model):
        for start, stop in ((PREFIX, PREFIX + 1), (PREFIX + 1, LENGTH - 1), (LENGTH - 1, LENGTH)):
            at = torch.arange(start, stop)[None]
            given = {"input_ids": ids[:, start:stop], "position_ids": at, cache_argument(model): cache}
            parts_of.append(model(**given, use_cache=True).logits)
    return torch.cat(parts_of, 1), hidden


def off(a: Tensor, b: Tensor) -> float:
    """Largest difference of logits, as a share of the largest."""
    return float((a - b).abs().max() / b.abs().max())


def features(rules: Any, head_dim: int) -> str:
    """What the rules of a model's layers hold beyond plain causal attention."""
    names = ("window", "chunk", "softcap", "sinks")
    counts = {name: sum(getattr(r, name) is not None for r in rules) for name in names}
    found = [
        n if count == len(rules) else f"{n} in {count} of {len(rules)} layers" for n, count in counts.items() if count
    ]
    if any(abs(r.scaling - head_dim**-0.5) > 1e-6 for r in rules):
        found.append("scaling")
    return ", ".join(found)


def dense_logits(model: Any, ids: Tensor, hidden: dict[int, Tensor]) -> Tensor:
    """Logits by `dense`, which hides in each cache layer what it is told."""
    with written_out(model, hidden):
        layers = [Slot(i) for i in range(shape_of(model).arch.layers)]
        logits: Tensor = model(input_ids=ids, use_cache=True, **{cache_argument(model): Cache(layers=layers)}).logits
    return logits


@torch.no_grad()
def differences(model: Any) -> tuple[float, float]:
    """How far our logits are off: at full budget from the stock model's, at 50 % from dense attention's."""
    ids = torch.randint(3, 89, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    stock = model(input_ids=ids, use_cache=False).logits[:, PREFIX:]
    if not torch.isfinite(stock).all():
        raise ValueError("the stock model's logits are not finite")
    full, _ = ours(model, ids, 1.0)
    half, hidden = ours(model, ids, 0.5)
    with written_out(model, {}):
        check = model(input_ids=ids, use_cache=False).logits[:, PREFIX:]
    if off(check, stock) > TOLERANCE:
        raise ValueError(f"dense attention differs from the stock model ({off(check, stock):.0e})")
    masked = dense_logits(model, ids, hidden)[:, PREFIX:]
    if not any(bool(x.any()) for x in hidden.values()):
        raise ValueError("nothing was evicted")
    return off(full, stock), off(half, masked)


def judge(kind: str, name: str) -> Verdict:
    """Build a family's model and try it."""
    try:
        model = build(kind, name)
    except Exception as e:
        try:  # a config may say enough
            from moend.hf.config import arch_of

            arch_of(CONFIG_MAPPING[kind]())
        except UserError as refusal:
            return Verdict(kind, name, "refused", str(refusal))
        except Exception:
            pass
        return Verdict(kind, name, "not built", f"{type(e).__name__}: {first_line(e)}")
    try:
        shape = shape_of(model)
    except UserError as e:
        return Verdict(kind, name, "refused", str(e))
    told = features(shape.rules, shape.arch.head_dim)
    try:
        full, half = differences(model)
    except UserError as e:
        return Verdict(kind, name, "refused late", str(e), told)
    except Exception as e:
        return Verdict(kind, name, "wrong", f"{type(e).__name__}: {first_line(e)}", told)
    if max(full, half) > TOLERANCE or not full >= 0 or not half >= 0:
        return Verdict(kind, name, "wrong", f"off by {full:.0e} at full budget, {half:.0e} at 50 %", told)
    return Verdict(kind, name, "right", "", told)


def first_line(e: BaseException) -> str:
    """The first line of an error, shortened."""
    return (str(e).splitlines() or [""])[0][:160]


def table(verdicts: list[Verdict], parts: dict[str, str]) -> str:
    """The section of docs/models.md."""
    by_kind = {
        k: [v for v in verdicts if v.kind == k] for k in ("right", "refused", "not built", "wrong", "refused late")
    }
    counts = ", ".join(f"{len(v)} {k}" for k, v in by_kind.items() if v)
    lines = [
        f"transformers {transformers.__version__} maps {len(verdicts)} model types to causal language models:",
        f"{counts}. A family is right if a tiny random model of it gives the stock model's logits at full",
        "budget, and at 50 % those of a dense attention that hides what was evicted, over a prompt longer than",
        "every window and chunk.",
        "",
        "| right | beyond plain causal attention |",
        "|---|---|",
        *(f"| `{v.family}` | {v.features} |" for v in by_kind["right"]),
        "",
        "| refused | reason |",
        "|---|---|",
        *(f"| `{v.family}` | {tidy(v)} |" for v in by_kind["refused"]),
    ]
    for kind in ("not built", "refused late", "wrong"):
        if by_kind[kind]:
            lines += [
                "",
                f"| {kind} | reason |",
                "|---|---|",
                *(f"| `{v.family}` | {tidy(v)} |" for v in by_kind[kind]),
            ]
    known = {v.family: v.kind for v in verdicts}
    if parts:
        told = ", ".join(f"`{k}` ({t}: {known.get(t, 'not mapped')})" for k, t in sorted(parts.items()))
        lines += ["", f"Models of text with images, sound or video are as their text part: {told}."]
    return "\n".join(lines) + "\n"


def tidy(verdict: Verdict) -> str:
    """A reason as a cell of a table."""
    why = re.sub(r"^\w+ is not supported: |^model type '[\w.-]+' (is|has) ", "", verdict.why)
    return why.replace("|", "/").replace("\n", " ")


def main(args: list[str]) -> int:
    """Print the table, or write it into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="model types (default: all)")
    parser.add_argument("--write", type=Path, help="a page with the two marks")
    parser.add_argument("--verbose", action="store_true", help="say each verdict as it is found")
    asked = parser.parse_args(args)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    verdicts = []
    for kind, name in names().items():
        if asked.families and kind not in asked.families:
            continue
        verdicts.append(judge(kind, name))
        if asked.verbose:
            print(*(str(x) for x in vars(verdicts[-1]).values()), sep=" | ", flush=True)
    text = table(verdicts, {} if asked.families else multimodal())
    if asked.write is None:
        print(text)
        return 0
    page = asked.write.read_text(encoding="utf-8")
    before, rest = page.split(MARKS[0])
    asked.write.write_text(f"{before}{MARKS[0]}\n\n{text}\n{MARKS[1]}{rest.split(MARKS[1])[1]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
