"""What a model is called: the fields of a conf/model file, and the files of a folder that decide its answers."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moend import errors, paths
from moend.budget import Arch
from moend.errors import UserError
from moend.paths import PACKAGE

DTYPES = ("auto", "float32", "bfloat16", "float16")
STORE_DTYPES = ("half", "model")
SOURCES = ("auto", "hub", "wheel", "fixture", "local")
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


@dataclass(frozen=True)
class ModelSpec:
    """A model as configured: the fields of a conf/model file.

    name: the config's name. id: hub repository, local folder (made absolute), or the pip requirement of a wheel.
    revision: hub commit, branch or tag. gguf_file: a GGUF file in the folder, repository or wheel. sha256: of a wheel's
    GGUF. wheel: a wheel file already here. arch: {layers, q_heads, kv_heads, head_dim, max_positions}, compared with
    the loaded config. dtype: of the computation; `auto` is float32 on a CPU for small models, else the checkpoint's.
    store_dtype: of cache entries at 16 bit; `half` is the checkpoint's 16-bit type or bfloat16, `model` the compute
    type. device: auto, cpu, cuda, cuda:1, mps. device_map: transformers'. chat_template: wrap prompts in the
    tokenizer's template if it has one. thinks: what that template says of thinking, compared with the loaded one:
    never, switch (it asks for a thought unless told not to), always, or null (not known). calibration_text: what
    sensitivities are measured on by default.
    reconstruction: how to ask for the context to be repeated, for a vocabulary that lacks KVZip's own words.
    texts: the bundled texts whose words it knows: `text` (English) or `recall` (recall_moe's tasks).
    """

    name: str
    id: str | None
    source: Literal["auto", "hub", "wheel", "fixture", "local"] = "auto"  # where files come from
    revision: str | None = None
    gguf_file: str | None = None
    sha256: str | None = None
    wheel: str | None = None
    dtype: str = "auto"
    store_dtype: str = "half"
    arch: dict[str, Any] | None = None
    trust_remote_code: bool = False  # whether code from the repository may run
    use_safetensors: bool = True  # False: pickled weights, which can run code, are loaded too
    device: str = "auto"
    device_map: str | None = None
    chat_template: bool = True
    thinks: Literal["never", "switch", "always"] | None = None
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
            wanted = {f.name for f in dataclasses.fields(Arch)} - {"windows"}  # which are written where a layer slides
            if set(self.arch) - {"windows"} != wanted:
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
        if self.arch is None:
            return None
        fields: dict[str, Any] = dict(self.arch)
        windows = fields.pop("windows", None)
        return Arch(**fields, windows=None if windows is None else tuple(windows))

    @property
    def label(self) -> str:
        """A short name for tables: the config's name, or the last part of the id for `model=hf`."""
        return self.name if self.name != "hf" else Path(str(self.id)).name


def conf_dir() -> Path:
    """The folder of packaged configs."""
    return paths.folder("conf", "model")


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


def compare(spec: ModelSpec, found: Arch) -> None:
    """Refuse an architecture that differs from the pinned one, field by field."""
    pinned = dataclasses.asdict(spec.pinned_arch or found)
    odd = [f"{k}: has {v}, needs {pinned[k]}" for k, v in dataclasses.asdict(found).items() if pinned[k] != v]
    if odd:
        raise UserError(f"model '{spec.name}' ({spec.id}) differs from model.arch in its config: {'; '.join(odd)}")


# Local folders


def folder_of(spec: ModelSpec) -> Path:
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
    check_weights(folder, spec)
    return folder


def check_weights(folder: Path, spec: ModelSpec) -> None:
    """Weights in an allowed format are there, all shards of them."""
    if missing := missing_weights(folder, spec):
        raise UserError(f"model '{spec.name}' in {folder}: {missing}")


def missing_weights(folder: Path, spec: ModelSpec) -> str | None:
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


def folder_hash(folder: Path, spec: ModelSpec, cache_dir: Path) -> str:
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
    found = sha256(path)
    with cache_errors(cache_dir):
        memo.parent.mkdir(parents=True, exist_ok=True)
        write(memo, found)
    return found


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write(path: Path, text: str) -> None:
    """Write a small file so that others see all of it or nothing."""
    temp = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with temp.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    temp.replace(path)


# Errors as one line


@contextlib.contextmanager
def cache_errors(cache_dir: Path) -> Iterator[None]:
    """An unwritable cache folder or a full disk is one line for the user."""
    try:
        yield
    except OSError as e:
        raise UserError(f"cannot write to the cache folder {cache_dir} ({e.strerror or e}): set paths.cache=") from e


@contextlib.contextmanager
def plain_errors(spec: ModelSpec) -> Iterator[None]:
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
