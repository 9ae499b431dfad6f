"""A calibration result on disk: tensors in safetensors, everything else in JSON, found again only by its full identity.

A folder holds `data.safetensors` and `artefact.json`. Both are written to temporary names, synced and renamed, the JSON
last, so a folder with `artefact.json` is complete. The JSON carries the identity (model, revision, shapes, settings,
data), a checksum of the tensors and the free-form `info` that says how the result came about.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from moend.budget import Arch
from moend.errors import Blocked, UserError

SCHEMA = 1
DATA, META = "data.safetensors", "artefact.json"


def canonical(value: object) -> str:
    """JSON that is the same text for the same value: sorted keys, no spaces; what has no such text is a TypeError."""
    return json.dumps(_plain(value, "value"), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _plain(value: object, where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(x, f"{where}[{i}]") for i, x in enumerate(value)]
    if isinstance(value, Mapping):
        if odd := [k for k in value if not isinstance(k, str)]:
            raise TypeError(f"{where} has the key {odd[0]!r}: only text keys have one canonical form")
        return {k: _plain(x, f"{where}.{k}") for k, x in value.items()}
    raise TypeError(f"{where} is a {type(value).__name__}, which has no canonical form")


def identity(
    model_id: str,
    revision: str,
    arch: Arch,
    settings: Mapping[str, Any],
    data_fingerprint: str,
    versions: Mapping[str, int],
) -> dict[str, Any]:
    """What a calibration depends on, as plain JSON: two with the same identity are the same calibration.

    revision: the hub revision or the weight file's hash. settings: every knob that changes the numbers (lattice,
    eviction, scorer with its parameters, seeds, dtype). data_fingerprint: hash of the token ids. versions: of the
    computations involved (ours, raised by hand when the numbers change), not of packages: those belong in `info`.
    """
    shape = {name: getattr(arch, name) for name in ("layers", "q_heads", "kv_heads", "head_dim", "max_positions")}
    return {
        "model": model_id,
        "revision": revision,
        "arch": shape,
        "settings": _plain(settings, "settings"),
        "data": data_fingerprint,
        "versions": _plain(versions, "versions"),
    }


def token_fingerprint(ids: Tensor) -> str:
    """16 hex digits of the token ids (N, T) a calibration ran on, padding included: hash of shape and values."""
    return hashlib.sha256(canonical({"shape": list(ids.shape), "ids": ids.flatten().tolist()}).encode()).hexdigest()[
        :16
    ]


@dataclass(frozen=True)
class Artefact:
    """One calibration."""

    kind: str  # name of its kind (`moend.calibration.kinds`)
    identity: dict[str, Any]  # see `identity`
    tensors: dict[str, Tensor]  # what was measured; each kind names and shapes its own
    info: dict[str, Any] = field(default_factory=dict)  # results, settings and versions, JSON-able

    @property
    def key(self) -> str:
        """16 hex digits of kind and identity: the name of its folder."""
        return artefact_key(self.kind, self.identity)

    def save(self, folder: Path) -> None:
        """Write both files, or neither. UserError where the folder cannot be written or the disk is full."""
        tensors = {name: t.detach().cpu().contiguous().clone() for name, t in self.tensors.items()}
        data = safetensors.torch.save(tensors)
        meta = {
            "schema": SCHEMA,
            "kind": self.kind,
            "key": self.key,
            "identity": self.identity,
            "info": _plain(self.info, "info"),
            "data": {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)},
        }
        text = json.dumps(meta, indent=1, sort_keys=True, allow_nan=False) + "\n"
        existed = folder.is_dir()
        written: list[Path] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Both are on disk before either takes its name: a full disk never leaves new data beside an old JSON.
            for content in (data, text.encode()):
                written.append(_write_temporary(folder, content))  # noqa: PERF401 (each must be known for removal)
            for temporary, name in zip(tuple(written), (DATA, META), strict=True):
                temporary.replace(folder / name)
                written.remove(temporary)
            _sync_folder(folder)
        except OSError as e:
            for temporary in written:
                temporary.unlink(missing_ok=True)
            if not existed and folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
            raise UserError(f"cannot write the calibration to {folder}: {e.strerror or e}") from e

    @classmethod
    def load(cls, folder: Path, expect: Mapping[str, Any] | None = None, kind: str | None = None) -> Artefact:
        """Read and verify a calibration. `expect` is the identity it must have, `kind` what it must be.

        Blocked where there is none; UserError, in one line, where a file is foreign or damaged (named), or where the
        identity differs (every differing field as `field: has X, needs Y`).
        """
        meta = _read_meta(folder)
        found = cls(kind=meta["kind"], identity=meta["identity"], tensors={}, info=meta["info"])
        if kind is not None and kind != found.kind:
            raise UserError(f"{folder / META} holds a '{found.kind}' calibration, '{kind}' is needed")
        if expect is not None and (differences := differing(found.identity, expect)):
            raise UserError(f"the calibration in {folder} is not the one needed: {'; '.join(differences)}")
        path = folder / DATA
        try:
            data = path.read_bytes()
        except OSError as e:
            raise UserError(f"{path} cannot be read: {e.strerror or e}") from e
        digest = hashlib.sha256(data).hexdigest()
        if digest != meta["data"]["sha256"]:
            raise UserError(f"{path} is damaged: sha256 {digest[:16]}, {META} says {meta['data']['sha256'][:16]}")
        try:
            found.tensors.update(safetensors.torch.load(data))
        except (SafetensorError, ValueError) as e:
            raise UserError(f"{path} is not a safetensors file: {e}") from e
        return found


def artefact_key(kind: str, identity: Mapping[str, Any]) -> str:
    """The key an artefact of this kind and identity has: 16 hex digits of sha256 over their canonical JSON."""
    return hashlib.sha256(canonical({"kind": kind, "identity": identity}).encode()).hexdigest()[:16]


def differing(has: Mapping[str, Any], needs: Mapping[str, Any]) -> list[str]:
    """One `field: has X, needs Y` per field in which two identities differ, fields of nested ones joined by dots."""
    a, b = _flat(_plain(has, "has")), _flat(_plain(needs, "needs"))
    return [
        f"{name}: has {_show(a, name)}, needs {_show(b, name)}"
        for name in sorted(a.keys() | b.keys())
        if _show(a, name) != _show(b, name)
    ]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    out: dict[str, Any] = {}
    for name, item in value.items():
        out |= _flat(item, f"{prefix}.{name}" if prefix else name)
    return out


def _show(fields: dict[str, Any], name: str) -> str:
    return canonical(fields[name]) if name in fields else "nothing"


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / META
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Blocked(f"there is no calibration in {folder} ({META} is missing)") from None
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror or e}") from e
    except ValueError as e:  # not UTF-8 or not JSON
        raise UserError(f"{path} is not a calibration: {e}") from None
    if not isinstance(meta, dict) or meta.get("schema") != SCHEMA:
        schema = meta.get("schema") if isinstance(meta, dict) else None
        raise UserError(f"{path} is not a calibration of this version: schema {schema!r}, {SCHEMA} is needed")
    wanted: dict[str, type] = {"kind": str, "key": str, "identity": dict, "info": dict, "data": dict}
    for name, expected in wanted.items():
        if not isinstance(meta.get(name), expected):
            raise UserError(f"{path} is not a calibration: '{name}' is missing or not a {expected.__name__}")
    if not isinstance(meta["data"].get("sha256"), str):
        raise UserError(f"{path} is not a calibration: its checksum is missing")
    if artefact_key(meta["kind"], meta["identity"]) != meta["key"]:
        raise UserError(f"{path} was changed by hand: its identity no longer gives its key {meta['key']}")
    return meta


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file: readers see the old one or all of the new one."""
    _write_temporary(path.parent, content).replace(path)


def _write_temporary(folder: Path, content: bytes) -> Path:
    path = folder / f".artefact-{secrets.token_hex(8)}.tmp"
    try:
        with path.open("xb") as file:  # unlike tempfile's, readable by whoever may read the folder
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return path


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
