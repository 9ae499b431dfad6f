"""Results as files that survive anything: append-only records, and a result that exists only when complete.

<store>/cells/<key>/payload.json              what the cell is, beside the hash it is named by
<store>/cells/<key>/records/<i>-of-<n>.jsonl  one line per (task, id, draw); the reader takes the union
                            <i>-of-<n>.g2.jsonl  of who took the lease of a silent writer over (`Lease.writes`)
<store>/cells/<key>/result.json               written last, only when every expected record is there
<store>/cells/<key>/state/                    of long answers that are being generated (`moend.saved`)
<store>/cells/<key>/log.txt                   failures, with tracebacks
<store>/calibration/<key>/  sweeps/<name>/manifest.json  reports/<name>/  wandb/
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moend.errors import UserError, unknown
from pipelines.store.files import create, make_folder, read_json, write_atomic, write_json
from pipelines.store.lease import Busy, Lease, leased, taken
from pipelines.store.payload import key, refuse_difference

RecordKey = tuple[str, str, int]
SHARD = re.compile(r"(\d+)-of-(\d+)(?:\.g(\d+))?\.jsonl")


class CorruptRecords(Exception):
    """A records file holds a complete line that is not a record: names file and line."""


def record_key(record: dict[str, Any]) -> RecordKey:
    """What makes a record the same record."""
    return str(record["task"]), str(record["id"]), int(record["draw"])


def parse_records(data: bytes, source: Path) -> list[dict[str, Any]]:
    """Records of a file's bytes, a torn last line left out. A complete line that does not parse is an error."""
    records = []
    for i, line in enumerate(data[: data.rfind(b"\n") + 1].split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
            record_key(record)
        except (ValueError, TypeError, KeyError) as e:
            raise CorruptRecords(f"{source}, line {i}, is not a record ({type(e).__name__}: {e})") from None
        records.append(record)
    return records


class Shard:
    """The one writer of a file of records: truncates a torn last line, knows what is there, never repeats."""

    def __init__(self, stem: Path):
        self.lease = Lease(stem)
        number = self.lease.writes
        self.path = stem if number == 1 else stem.with_suffix(f".g{number}.jsonl")
        try:
            self.fd = create(self.path, flags=0)
            data = self.path.read_bytes()
            self.size = data.rfind(b"\n") + 1
            self.done = {record_key(r) for r in parse_records(data, self.path)}
            if self.size != len(data):
                os.ftruncate(self.fd, self.size)
        except BaseException:
            self.lease.release()
            raise

    def append(self, record: dict[str, Any]) -> None:
        """Write one record: whole line, one write, fsync. A full disk leaves the file as it was."""
        key = record_key(record)
        if key in self.done:
            raise ValueError(f"{self.path} has {key} already")
        line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
        self.lease.check()
        try:
            if (written := os.write(self.fd, line)) != len(line):
                raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes were written", str(self.path))
            os.fsync(self.fd)
        except OSError as e:
            os.ftruncate(self.fd, self.size)
            e.filename = e.filename or str(self.path)
            raise
        self.size += len(line)
        self.done.add(key)

    def close(self) -> None:
        """Close the file and give the shard back."""
        os.close(self.fd)
        self.lease.release()


@dataclass(frozen=True)
class CellStore:
    """The folder of one cell."""

    folder: Path

    @property
    def key(self) -> str:
        """The folder's name is the key."""
        return self.folder.name

    def payload(self) -> dict[str, Any] | None:
        """What lies beside the hash: {key, payload, info}, or None where the cell was never begun."""
        path = self.folder / "payload.json"
        return read_json(path) if path.exists() else None

    def create(self, payload: dict[str, Any], info: dict[str, Any]) -> None:
        """Make the folder with its payload in one step, or check that the one that is there is the same cell."""
        if (have := self.payload()) is None:
            make_folder(self.folder.parent)
            temp = self.folder.with_name(f".{self.key}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
            try:
                make_folder(temp / "records")
                write_json(temp / "payload.json", {"key": self.key, "payload": payload, "info": info})
                temp.rename(self.folder)
            except OSError as e:
                shutil.rmtree(temp, ignore_errors=True)
                if not self.folder.exists():
                    raise
                if (have := self.payload()) is None:
                    raise UserError(f"{self.folder} is in the way: it has no payload.json") from e
        if have is not None:
            refuse_difference(have.get("payload"), payload, str(self.folder / "payload.json"))

    @contextlib.contextmanager
    def shard(self, index: int = 0, count: int = 1) -> Iterator[Shard]:
        """Hold shard `index` of `count` for writing; Busy where another process writes any of its examples."""
        self._refuse_overlap(index, count)
        shard = Shard(self.folder / "records" / f"{index}-of-{count}.jsonl")
        try:
            self._refuse_overlap(
                index, count
            )  # of two that came at the same moment each sees the other, and comes again
            yield shard
        finally:
            shard.close()

    def _refuse_overlap(self, index: int, count: int) -> None:
        """Busy where a live process holds a shard of another count that has examples in common with this one."""
        for stem in leased(self.folder / "records"):
            other, of = (int(x) for x in stem.stem.split("-of-"))
            if of != count and (index - other) % math.gcd(count, of) == 0 and taken(stem):
                raise Busy(f"{stem.name} has examples of shard {index} of {count}, and another process is writing it")

    def files(self) -> list[Path]:
        """The files of records, generations of a shard in their order."""
        found = [(m, p) for p in (self.folder / "records").glob("*.jsonl") if (m := SHARD.fullmatch(p.name))]
        return [p for _, p in sorted(found, key=lambda x: (int(x[0][2]), int(x[0][1]), int(x[0][3] or 1)))]

    def union(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Every record once, the first of those with one key, whatever the number of shards; and which files repeat it.

        Two writers of one example are rare (one that slept and came back; shardings that changed) and no fault.
        """
        found: dict[RecordKey, dict[str, Any]] = {}
        repeated = []
        for path in self.files():
            before, lines = len(found), parse_records(path.read_bytes(), path)
            for record in lines:
                found.setdefault(record_key(record), record)
            if again := len(lines) - (len(found) - before):
                repeated.append(f"{path.name}: {again} of {len(lines)} records were there already, left out")
        return list(found.values()), repeated

    def records(self) -> list[dict[str, Any]]:
        """Every record once."""
        return self.union()[0]

    def is_held(self) -> bool:
        """Whether a live process is writing one of the shards."""
        return any(taken(stem) for stem in leased(self.folder / "records"))

    def done(self) -> set[RecordKey]:
        """Which records are there."""
        return {record_key(r) for r in self.records()}

    def result(self) -> dict[str, Any] | None:
        """The result, if the cell is complete."""
        path = self.folder / "result.json"
        if not path.exists():
            return None
        result = read_json(path)
        if result.get("key") != self.key:
            raise UserError(f"{path} belongs to cell {result.get('key')}; remove it to compute it again")
        return result

    def finish(
        self, expected: Iterable[RecordKey], aggregate: Callable[[list[dict[str, Any]]], dict[str, Any]]
    ) -> bool:
        """Write result.json if every expected record is there. False where some are missing."""
        found, repeated = self.union()
        records = {record_key(r): r for r in found}
        keys = list(expected)
        if any(k not in records for k in keys):
            return False
        result = aggregate([records[k] for k in keys])
        if repeated:
            self.log("; ".join(repeated))
            result["repeated"] = repeated
        write_json(self.folder / "result.json", result)
        return True

    @property
    def state(self) -> Path:
        """Where the states of its answers lie, each under the name of its context (`state_name`)."""
        return self.folder / "state"

    def forget(self, name: str) -> None:
        """Remove the states of a context whose records are written."""
        if self.state.is_dir():
            for path in [*self.state.glob(f"{name}-*"), *self.state.glob(f".{name}-*")]:
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # states of other contexts are there
                self.state.rmdir()

    def tokens_saved(self) -> int:
        """Tokens that the states of its unfinished answers hold: what there is of its work besides records."""
        return sum(map(_steps, self.state.glob("*.safetensors")))

    def log(self, text: str) -> Path:
        """Append to the cell's log."""
        path = self.folder / "log.txt"
        with os.fdopen(create(path, flags=0), "a", encoding="utf-8") as f:
            f.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text.rstrip()}\n")
        return path


def state_name(examples: Sequence[tuple[str, str]]) -> str:
    """The file name for the saved states of the answers to one context, from its (task, id) pairs."""
    return key([list(example) for example in examples])


def _steps(path: Path) -> int:
    """Steps that a saved state says it has behind it, 0 where it cannot be read."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return int(header["__metadata__"]["step"])
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        OverflowError,
    ):  # replaced meanwhile, or damaged: the engine tells
        return 0


@dataclass(frozen=True)
class Store:
    """The folder that `paths.store` names."""

    root: Path

    def cell(self, key: str) -> CellStore:
        """One cell's folder, begun or not."""
        return CellStore(self.root / "cells" / key)

    def calibration(self, key: str) -> Path:
        """One artefact's folder."""
        return self.root / "calibration" / key

    def report(self, name: str) -> Path:
        """Where a sweep's tables and figures go."""
        return self.root / "reports" / name

    def prepare(self) -> None:
        """Make the store and prove that it can be written, before anything is computed.

        Its folder has the rights of this user's umask; all that is made in it later has the folder's.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        probe = self.root / f".probe-{secrets.token_hex(6)}"
        try:
            write_atomic(probe, "probe\n")
        except OSError as e:
            e.filename = str(self.root)
            raise
        finally:
            probe.unlink(missing_ok=True)

    def sweep(self, name: str) -> Path:
        """A sweep's folder: its manifest, and what was submitted of it."""
        return self.root / "sweeps" / name

    def manifest(self, name: str) -> Path:
        """The list of cells of a sweep."""
        return self.sweep(name) / "manifest.json"

    def sweep_names(self) -> list[str]:
        """Sweeps that were run into this store, the newest last."""
        manifests = (self.root / "sweeps").glob("*/manifest.json")
        return [p.parent.name for p in sorted(manifests, key=lambda p: (p.stat().st_mtime_ns, p.parent.name))]

    def read_manifest(self, name: str) -> dict[str, Any]:
        """A sweep's manifest, `latest` for the newest; an unknown name is a UserError with the nearest."""
        names = self.sweep_names()
        if not names:
            raise UserError(f"no sweep was run into {self.root} yet")
        if name == "latest":
            name = names[-1]
        if name not in names:
            raise unknown("sweep", name, [*names, "latest"])
        manifest = read_json(path := self.manifest(name))
        if not {"name", "command", "created", "cells"} <= manifest.keys():
            raise UserError(f"{path} is damaged: it is not the list of a sweep's cells; run the sweep again")
        return manifest
