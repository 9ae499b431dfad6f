"""Plans and query statistics in the forms that other tools read, and back.

| tool | form | what it holds of a plan |
|---|---|---|
| kvpress | JSON with `compression_ratios` for its PerLayerCompressionPress | how many tokens each layer keeps |
| TensorRT-LLM, SGLang | `0-3:fp8,4-35:nvfp4`, a data type per range of layers | how many bits each layer has |
| vLLM | `--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 0 1` | the same, for one type and the model's own |
| TriAttention | a dictionary of tensors, saved by torch | nothing: query statistics (moend.calibration.queries) |

No form holds a whole plan. What one cannot hold is refused by name, unless the caller says that it may be lost.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moend.calibration.artefact import Artefact
from moend.calibration.queries import TrigStatistics
from moend.errors import UserError, unknown
from moend.plan import LayerPlan, RoutingPlan

# The name that each engine has for a number of so many bits. A layer of 16 bits is not named to TensorRT-LLM: what is
# not in the map follows the checkpoint there.
TYPES: Mapping[str, Mapping[int, str]] = {
    "trtllm": {8: "fp8", 4: "nvfp4"},
    "sglang": {16: "bf16", 8: "fp8_e4m3", 4: "fp4_e2m1"},
    "vllm": {8: "fp8", 4: "nvfp4"},
}
FORMS = ("kvpress", *TYPES)
STATISTICS = ("mean_real", "mean_imag", "mean_abs")
NAMES = ("q_mean_real", "q_mean_imag", "q_abs_mean")  # TriAttention's names for the same


def export_plan(plan: RoutingPlan, form: str, *, tokens: int | None = None, lossy: bool = False) -> str:
    """A plan as the text that a tool reads. form: kvpress, trtllm, sglang or vllm.

    tokens: length of the prompt that kvpress will compress; the plan's own t_ref by default. lossy: write what the form
    holds although the plan says more: the layer's mean where its heads differ, the wider of K and V where they do.

    UserError: an unknown form, or a plan that says what the form cannot hold.
    """
    if form not in FORMS:
        raise unknown("form", form, FORMS)
    if form == "kvpress":
        return kvpress_json(plan, tokens, lossy)
    if tokens is not None:
        raise UserError(f"tokens={tokens} is for to=kvpress: {form} reads bits only")
    return vllm_flags(plan, lossy) if form == "vllm" else type_map(plan, form, lossy)


def kvpress_json(plan: RoutingPlan, tokens: int | None = None, lossy: bool = False) -> str:
    """JSON whose `compression_ratios` go to kvpress' PerLayerCompressionPress: the share each layer loses, in order.

    kvpress keeps max(1, floor(T * (1 - ratio))) of T tokens. The ratios give a prompt of `tokens` tokens exactly the
    plan's own number in each layer. Longer prompts keep the same share, where a plan with caps would keep its caps.
    """
    length = plan.t_ref if tokens is None else tokens
    if length < 1:
        raise UserError(f"tokens must be a whole number >= 1, got {length}")
    lost = [*_lost_heads(plan), *_lost_bits(plan)]
    _refuse(lost, "kvpress' ratios", lossy)
    ratios = [_ratio(layer, length) for layer in plan.layers]
    told = {"model": plan.model, "revision": plan.revision, "budget": plan.budget, "tokens": length, "left_out": lost}
    return json.dumps({"compression_ratios": ratios, **told}, indent=1) + "\n"


def read_kvpress(text: str) -> tuple[float, ...]:
    """The ratios of `kvpress_json`, as PerLayerCompressionPress takes them."""
    try:
        ratios = tuple(float(x) for x in json.loads(text)["compression_ratios"])
    except (ValueError, TypeError, KeyError):
        raise UserError("this is no file for kvpress: it needs a list of numbers `compression_ratios`") from None
    if odd := [x for x in ratios if not 0 <= x < 1]:
        raise UserError(f"compression_ratios must be in [0, 1), got {odd[0]}")
    return ratios


def type_map(plan: RoutingPlan, engine: str, lossy: bool = False) -> str:
    """The data type of each layer's cache, `0-3:fp8,4-35:nvfp4`, in the names of TensorRT-LLM or SGLang.

    The engine's types are not moend's quantiser: fp8 and fp4 are floating-point formats with scales of their own.
    """
    bits = _bits(plan, f"the type map of {engine}", lossy)
    runs: list[str] = []
    for name, group in groupby(enumerate(bits), key=lambda x: _type(engine, x[1])):
        layers = [i for i, _ in group]
        span = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else f"{layers[0]}"
        runs += [f"{span}:{name}"] if name is not None else []
    return ",".join(runs) or "auto"


def read_type_map(text: str, layers: int, engine: str) -> tuple[int, ...]:
    """The bits of each layer that a type map names; 16 for a layer that it leaves out, `auto` for none."""
    bits = [16] * layers
    of = {name: width for width, name in TYPES[engine].items()}
    seen: set[int] = set()
    for part in text.split(",") if text != "auto" else ():
        found = re.fullmatch(r"(\d+)(?:-(\d+))?:(\w+)", part)
        if found is None:
            raise UserError(f"'{part}' is no part of a type map: write 3:fp8 or 0-3:fp8")
        first, last = int(found[1]), int(found[2] or found[1])
        if found[3] not in of:
            raise unknown(f"data type of {engine}", found[3], of)
        if first > last or last >= layers:
            raise UserError(f"'{part}' names layers that are not among 0 to {layers - 1}")
        if twice := seen & set(range(first, last + 1)):
            raise UserError(f"layer {min(twice)} is named twice in '{text}'")
        seen |= set(range(first, last + 1))
        bits[first : last + 1] = [of[found[3]]] * (last + 1 - first)
    return tuple(bits)


def vllm_flags(plan: RoutingPlan, lossy: bool = False) -> str:
    """`vllm serve`'s flags: one type for the cache, and the layers that stay in the model's own.

    UserError where the plan has two types below 16 bits, which no released vLLM reads.
    """
    bits = _bits(plan, "vLLM's flags", lossy)
    narrow = sorted({x for x in bits if x < 16})
    if len(narrow) > 1:
        raise UserError(
            f"vLLM's flags hold one type below 16 bits, the plan has {' and '.join(map(str, narrow))} bits: "
            "plan with method.precision.k_bits and v_bits of one width, or write to=trtllm or to=sglang"
        )
    if not narrow:
        return "--kv-cache-dtype auto"
    kept = [str(i) for i, x in enumerate(bits) if x == 16]
    skip = f" --kv-cache-dtype-skip-layers {' '.join(kept)}" if kept else ""
    return f"--kv-cache-dtype {_type('vllm', narrow[0])}{skip}"


def read_vllm_flags(text: str, layers: int) -> tuple[int, ...]:
    """The bits of each layer that `vllm_flags` says."""
    found = re.fullmatch(r"--kv-cache-dtype (\w+)(?: --kv-cache-dtype-skip-layers ([\d ]+))?", text)
    of = {"auto": 16, **{name: width for width, name in TYPES["vllm"].items()}}
    if found is None or found[1] not in of:
        raise UserError(f"'{text}' is not --kv-cache-dtype {'|'.join(of)} [--kv-cache-dtype-skip-layers N ...]")
    kept = {int(x) for x in (found[2] or "").split()}
    return tuple(16 if i in kept else of[found[1]] for i in range(layers))


def triattention(artefact: Artefact) -> dict[str, Any]:
    """Query statistics in the layout of TriAttention's own calibration script, which its engines' plugins read.

    `metadata`: head_dim, rope_style `half` (pairs (i, i + d/2)), rope_type, sampled_heads [[layer, head], ...],
    model_name, inv_freq (d/2,). `stats`: one entry `layerLL_headHH` per query head with q_mean_real, q_mean_imag and
    q_abs_mean, each (d/2,) float32. Plain dictionaries, lists, texts, numbers and tensors.

    UserError: another kind of calibration, or a rotation that the layout cannot say (partial, scaled, or layers that
    differ).
    """
    if artefact.kind != "queries":
        raise UserError(f"TriAttention's statistics are a calibration of kind 'queries', this one is '{artefact.kind}'")
    model, head_dim = artefact.identity["model"], artefact.identity["arch"]["head_dim"]
    rotation = artefact.info.get("rotation", "missing")
    if rotation == "missing":
        raise UserError("this calibration is of an older moend and does not say its rotation: measure it again")
    if rotation is None:
        raise UserError(f"layers of {model} rotate differently: TriAttention's layout has one rotation for all")
    if rotation["dim"] != head_dim:
        raise UserError(
            f"{model} rotates {rotation['dim']} of {head_dim} dimensions: TriAttention's layout has no such"
        )
    if rotation["scaling"] != 1:
        raise UserError(
            f"{model} scales rotated queries by {rotation['scaling']:g}: TriAttention's script counts that factor "
            "twice, so its meaning in the file is open"
        )
    columns = [artefact.tensors[name].float() for name in STATISTICS]
    layers, heads, _ = columns[0].shape
    stats = {
        f"layer{layer:02d}_head{head:02d}": {
            name: x[layer, head].clone() for name, x in zip(NAMES, columns, strict=True)
        }
        for layer in range(layers)
        for head in range(heads)
    }
    metadata = {
        "num_traces": 1,
        "head_dim": head_dim,
        "rope_style": "half",
        "rope_type": "default",
        "sampled_heads": [[layer, head] for layer in range(layers) for head in range(heads)],
        "model_name": model,
        "inv_freq": torch.tensor(rotation["inv_freq"], dtype=torch.float32),
    }
    return {"metadata": metadata, "stats": stats}


def save_triattention(artefact: Artefact, path: Path, *, pickle: bool = False) -> None:
    """Write `triattention` as torch.save does. That is a pickle: pickle=True says that the caller wants one."""
    if not pickle:
        raise UserError("TriAttention's file is a pickle, which moend writes on request only: add pickle=true")
    payload = triattention(artefact)
    try:
        torch.save(payload, path)
    except (OSError, RuntimeError) as e:
        raise UserError(f"cannot write the statistics to {path}: {e}") from e


def read_triattention(path: Path) -> TrigStatistics:
    """Statistics from a file of that layout, ours or TriAttention's own. Nothing in the file is run: weights_only."""
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror or e}") from e
    except Exception as e:  # torch names what it refuses to unpickle in errors of several kinds
        raise UserError(f"{path} holds more than plain tensors, or is damaged: it is not read") from e
    stats = payload.get("stats") if isinstance(payload, dict) else None
    if not isinstance(stats, dict) or not stats:
        raise UserError(f"{path} has no `stats`: it is not in the layout of TriAttention's calibration")
    at: dict[tuple[int, int], Mapping[str, Tensor]] = {}
    for key, entry in stats.items():
        found = re.fullmatch(r"layer(\d+)_head(\d+)", str(key))
        if found is None or not isinstance(entry, dict) or not all(isinstance(entry.get(n), Tensor) for n in NAMES):
            raise UserError(f"{path}: '{key}' is not layerLL_headHH with {', '.join(NAMES)}")
        at[int(found[1]), int(found[2])] = entry
    layers, heads = (1 + max(x[i] for x in at) for i in (0, 1))
    if len(at) < layers * heads:
        raise UserError(f"{path} has {len(at)} of {layers * heads} heads: moend's statistics are of all heads")
    columns = ([torch.stack([at[i, h][name].float() for h in range(heads)]) for i in range(layers)] for name in NAMES)
    return TrigStatistics(*(torch.stack(column) for column in columns))


def _ratio(layer: LayerPlan, length: int) -> float:
    """The share to drop, such that floor(length * (1 - ratio)) is what the layer keeps of `length` tokens."""
    if layer.tokens is None:
        return 1 - layer.keep
    kept = min(layer.tokens, length)
    ratio = 1 - kept / length
    while int(length * (1 - ratio)) < kept:  # the rounding of a division may lose one
        ratio = math.nextafter(ratio, 0)
    return ratio


def _bits(plan: RoutingPlan, form: str, lossy: bool) -> list[int]:
    """The bits of each layer's cache, or why the form cannot hold them."""
    mixed = [i for i, x in enumerate(plan.layers) if x.k_bits != x.v_bits]
    lost = [f"K and V of layers {_names(mixed)} differ in bits"] if mixed else []
    kept = [i for i, x in enumerate(plan.layers) if x.keep < 1]
    lost += [f"layers {_names(kept)} keep a part of their tokens"] if kept else []
    _refuse([*_lost_heads(plan), *lost], form, lossy)
    return [max(x.k_bits, x.v_bits) for x in plan.layers]


def _lost_heads(plan: RoutingPlan) -> list[str]:
    headed = [i for i, x in enumerate(plan.layers) if x.heads is not None and len(set(x.heads)) > 1]
    return [f"KV heads of layers {_names(headed)} differ"] if headed else []


def _lost_bits(plan: RoutingPlan) -> list[str]:
    narrow = [i for i, x in enumerate(plan.layers) if min(x.k_bits, x.v_bits) < 16]
    return [f"layers {_names(narrow)} have fewer than 16 bits"] if narrow else []


def _refuse(lost: list[str], form: str, lossy: bool) -> None:
    if lost and not lossy:
        raise UserError(f"{form} cannot hold all of this plan: {'; '.join(lost)}. lossy=true writes the rest")


def _names(layers: list[int]) -> str:
    """`0-3, 7` for [0, 1, 2, 3, 7]."""
    runs = [[i for _, i in group] for _, group in groupby(enumerate(layers), key=lambda x: x[1] - x[0])]
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)


def _type(engine: str, bits: int) -> str | None:
    """The engine's name for this width, None where it is the model's own; UserError where it has none."""
    if bits not in TYPES[engine] and bits != 16:
        raise UserError(f"{engine} has no cache of {bits} bits: it has {', '.join(map(str, TYPES[engine]))}, and 16")
    return TYPES[engine].get(bits)
