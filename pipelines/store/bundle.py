"""Finished cells of a sweep in one file, with their plans, calibrations and provenance, for another store.

A zip archive of JSON and safetensors. bundle.json lists every other file with its SHA-256 and size. Nothing of a bundle
is believed: names, sizes, checksums, keys, and that every record is there, are checked before the first file is added.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moend.errors import UserError
from pipelines.store import payload as payloads
from pipelines.store import provenance
from pipelines.store.cells import CorruptRecords, Store, parse_records, record_key
from pipelines.store.files import make_folder, read_json, share_all, write_json

SCHEMA = 1
INDEX = "bundle.json"
INDEX_BYTES = 64 * 2**20  # more is no list of files
_KEY = r"[0-9a-f]{16}"
_NAMES = re.compile(
    rf"cells/({_KEY})/(?:payload\.json|result\.json|plan\.json|records/\d+-of-\d+(?:\.g\d+)?\.jsonl)"
    rf"|calibration/({_KEY})/(?:artefact\.json|data\.safetensors)|sweeps/(\w[\w.+-]*)/manifest\.json"
)


def pack(store: Store, sweep: str, to: str = "") -> str:
    """Write the finished cells of a sweep to a file (`<sweep>.zip`), whole or not at all. Returns what it did."""
    manifest = store.read_manifest(sweep)
    file = Path(to or f"{manifest['name']}.zip").expanduser()
    cells = [store.cell(c["key"]) for c in manifest["cells"]]
    done = [c for c in cells if c.result() is not None]
    if not done:
        raise UserError(f"no cell of {manifest['name']} is finished: there is nothing to pack")
    used = {k for c in done for k in (c.payload() or {})["payload"]["calibrations"].values()}
    folders = [store.calibration(k) for k in sorted(used)]
    paths = [c.folder / name for c in done for name in ("payload.json", "result.json", "plan.json")]
    paths += [p for c in done for p in c.files()]
    paths += [f / name for f in folders for name in ("artefact.json", "data.safetensors")]
    paths += [store.manifest(manifest["name"])]
    temp = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
    try:
        with zipfile.ZipFile(temp, "x", zipfile.ZIP_DEFLATED) as bundle:
            listed = []
            for path in (p for p in paths if p.is_file()):
                name, data = str(path.relative_to(store.root)), path.read_bytes()
                bundle.writestr(name, data)
                listed.append({"path": name, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)})
            made = {"commit": provenance.commit(), "versions": provenance.versions(), "created": _time()}
            index = {"schema": SCHEMA, "sweep": manifest["name"], **made, "files": listed}
            bundle.writestr(INDEX, json.dumps(index, indent=1))
        with temp.open("rb") as written:
            os.fsync(written.fileno())
        temp.replace(file)
    finally:
        temp.unlink(missing_ok=True)
    return f"packed {len(done)} of {len(cells)} cells of {manifest['name']}: {file}"


def add(store: Store, file: Path) -> list[str]:
    """Check a bundle and add what this store lacks; returns a line for each thing that was added or left alone.

    A cell that is added says in its result where it comes from. A cell or calibration that is finished here stays as it
    is; one that is begun here is left to whoever began it. UserError, and nothing is added, where a file is not what
    the bundle says, a cell is not complete, or a key stands for something else here.
    """
    try:
        with zipfile.ZipFile(file) as bundle:
            need, free = sum(i.file_size for i in bundle.infolist()), _free(store.root)
            if need > free:
                raise UserError(f"{file} unpacks to {need} bytes, and {free} are free where {store.root} is")
            checked = _Checked(bundle, file)
    except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError) as e:
        raise UserError(f"{file} is not a bundle: {e}") from None
    source = {"bundle": file.name, "sha256": checked.sha256, **checked.made, "added": _time()}
    for key in checked.folders("cells"):
        have, described = store.cell(key).payload(), checked.json(f"cells/{key}/payload.json")
        if have is not None:
            payloads.refuse_difference(have.get("payload"), described["payload"], f"cell {key} of {store.root}")
    said = []
    store.prepare()
    for key in checked.folders("calibration"):
        if not (store.calibration(key) / "artefact.json").exists():
            checked.write(f"calibration/{key}", store.calibration(key))
            said.append(f"added: calibration {key}")
    for key in checked.folders("cells"):
        cell, described = store.cell(key), checked.json(f"cells/{key}/payload.json")
        name = f"{described['info'].get('label', 'cell')} [{key}]"
        if cell.result() is not None:
            said.append(f"there already: {name}")
        elif cell.folder.exists():
            said.append(f"left alone: {name} is begun here: finish it, or remove {cell.folder} and add it again")
        else:
            checked.write(f"cells/{key}", cell.folder, source)
            said.append(f"added: {name}")
    for name in checked.folders("sweeps"):
        if not store.manifest(name).exists():
            make_folder(store.sweep(name))
            write_json(store.manifest(name), {**checked.json(f"sweeps/{name}/manifest.json"), "source": source})
            said.append(f"added: sweep {name}")
    return said


def _time() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _free(path: Path) -> int:
    return shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free


@dataclass(frozen=True, init=False)
class _Checked:
    """The contents of a bundle, once all of them are what they have to be."""

    sha256: str  # of the whole file
    made: dict[str, Any]  # where it was packed
    contents: dict[str, bytes]  # by their places in a store

    def __init__(self, bundle: zipfile.ZipFile, file: Path):
        infos = bundle.infolist()
        names = [i.filename for i in infos]
        if names.count(INDEX) != 1 or len(names) != len(set(names)):
            raise UserError(f"{file} is not a bundle: it has no {INDEX}, or a file twice")
        for info in infos:
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in (0, stat.S_IFREG) or not (info.filename == INDEX or _NAMES.fullmatch(info.filename)):
                raise UserError(f"{file}: {info.filename!r} has no place in a store; nothing was added")
        index = _object(_read(bundle, INDEX, min(INDEX_BYTES, bundle.getinfo(INDEX).file_size), file), file, INDEX)
        if index.get("schema") != SCHEMA:
            raise UserError(f"{file} has schema {index.get('schema')!r}; this version reads {SCHEMA}")
        try:
            listed = {str(f["path"]): (str(f["sha256"]), int(f["bytes"])) for f in index["files"]}
            made = {k: index[k] for k in ("sweep", "commit", "versions", "created")}
        except (KeyError, TypeError, ValueError) as e:
            raise UserError(f"{file}: {INDEX} is not a list of files ({type(e).__name__}: {e})") from None
        if odd := sorted(set(names) - {INDEX} ^ set(listed)):
            raise UserError(f"{file}: {odd[0]!r} is listed and not there, or there and not listed")
        contents = {}
        for name, (digest, size) in listed.items():
            data = _read(bundle, name, min(size, bundle.getinfo(name).file_size), file)
            if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
                raise UserError(f"{file}: {name} is damaged: its size or SHA-256 is not the one that {INDEX} lists")
            contents[name] = data
        whole = hashlib.sha256(file.read_bytes()).hexdigest()
        for field, value in (("sha256", whole), ("made", made), ("contents", contents)):
            object.__setattr__(self, field, value)
        for key in self.folders("cells"):
            self._check_cell(key, file)
        for key in self.folders("calibration"):
            self._check_calibration(key, file)

    def folders(self, kind: str) -> Sequence[str]:
        """The names of folders of a kind: cells, calibration or sweeps."""
        return sorted({name.split("/")[1] for name in self.contents if name.startswith(f"{kind}/")})

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object of the bundle."""
        if name not in self.contents:
            raise UserError(f"{name} is missing in the bundle")
        return _object(self.contents[name], Path("the bundle"), name)

    def write(self, folder: str, to: Path, source: dict[str, Any] | None = None) -> None:
        """A folder of the bundle into the store, at once; a cell's result says where it comes from."""
        make_folder(to.parent)
        temp = to.with_name(f".{to.name}.{secrets.token_hex(4)}.tmp")
        try:
            for name, data in self.contents.items():
                if name.startswith(f"{folder}/"):
                    path = temp / Path(name).relative_to(folder)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("wb") as f:
                        f.write(data)
                        f.flush()
                        os.fsync(f.fileno())
            if source is not None:
                write_json(temp / "result.json", {**read_json(temp / "result.json"), "source": source})
            share_all(temp)
            temp.rename(to)
        except OSError as e:
            e.filename, e.filename2 = str(to), None
            raise
        finally:
            shutil.rmtree(temp, ignore_errors=True)

    def _check_cell(self, key: str, file: Path) -> None:
        described, result = self.json(f"cells/{key}/payload.json"), self.json(f"cells/{key}/result.json")
        try:
            expected = int(described["info"]["n_expected"])
            if payloads.key(described["payload"]) != key or result["key"] != key or described["key"] != key:
                raise UserError(f"{file}: cell {key} is not what its key says")
            records = [
                record_key(record)
                for name, data in self.contents.items()
                if name.startswith(f"cells/{key}/records/")
                for record in parse_records(data, Path(name))
            ]
        except (KeyError, TypeError, ValueError, CorruptRecords) as e:
            raise UserError(f"{file}: cell {key} is damaged ({type(e).__name__}: {e})") from None
        if len(set(records)) != expected or result.get("n_records") != expected:
            raise UserError(f"{file}: cell {key} has {len(set(records))} of {expected} records")

    def _check_calibration(self, key: str, file: Path) -> None:
        from moend.calibration.artefact import artefact_key

        meta = self.json(f"calibration/{key}/artefact.json")
        data = self.contents.get(f"calibration/{key}/data.safetensors", b"")
        try:
            same = artefact_key(meta["kind"], meta["identity"]) == key == meta["key"]
            whole = meta["data"]["sha256"] == hashlib.sha256(data).hexdigest()
        except (KeyError, TypeError, AttributeError) as e:
            raise UserError(f"{file}: calibration {key} is damaged ({type(e).__name__}: {e})") from None
        if not same or not whole:
            raise UserError(f"{file}: calibration {key} is not what its key says")


def _read(bundle: zipfile.ZipFile, name: str, size: int, file: Path) -> bytes:
    """A file of a known size: what unpacks to more is not read any further."""
    try:
        with bundle.open(name) as member:
            data = member.read(size + 1)
    except (zipfile.BadZipFile, RuntimeError, EOFError) as e:
        raise UserError(f"{file}: {name} is damaged ({e})") from None
    if len(data) != size:
        raise UserError(f"{file}: {name} does not have the {size} bytes that are announced")
    return data


def _object(data: bytes, file: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as e:
        raise UserError(f"{file}: {name} is not JSON ({e})") from None
    if not isinstance(value, dict):
        raise UserError(f"{file}: {name} is not a JSON object")
    return value
