"""Results as files that survive anything: append-only records, leases, and a result that exists only when complete.

<store>/cells/<key>/payload.json              what the cell is, beside the hash it is named by
<store>/cells/<key>/records/<i>-of-<n>.jsonl  one line per (task, id, draw); the reader takes the union
<store>/cells/<key>/result.json               written last, only when every expected record is there
<store>/cells/<key>/log.txt                   failures, with tracebacks
<store>/calibration/<key>/  sweeps/<name>/manifest.json  reports/<name>/  wandb/
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moend.errors import UserError
from pipelines.planning.identity import refuse_difference

RecordKey = tuple[str, str, int]
HEARTBEAT_S = 10.0
EXPIRY_S = 60.0  # a lease whose heart has not beaten for so long is dead, on whatever machine its holder was


class CorruptRecords(Exception):
    """A records file holds a complete line that is not a record: names file and line."""


class Busy(Exception):
    """Another live process holds this shard."""


class LeaseLost(Exception):
    """This process was silent for so long that another one took the shard over."""


def write_atomic(path: Path, text: str) -> None:
    """Write to a temporary name, fsync, rename, fsync the folder: readers see the old file or all of the new one."""
    temp = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temp.open("w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        temp.replace(path)
    except BaseException as e:
        with contextlib.suppress(OSError):
            temp.unlink()
        if isinstance(e, OSError):
            e.filename, e.filename2 = str(path), None  # a full disk names no file, and the temporary one tells nobody
        raise
    _sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of readable JSON without NaN."""
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; anything else is a UserError naming it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError(f"a {type(value).__name__} instead of an object")
        return value
    except ValueError as e:
        raise UserError(f"{path} is damaged ({e}); remove it to compute it again") from None


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def record_key(record: dict[str, Any]) -> RecordKey:
    """What makes a record the same record."""
    return str(record["task"]), str(record["id"]), int(record["draw"])


def parse_records(data: bytes, source: Path) -> list[dict[str, Any]]:
    """Records of a file's bytes, a torn last line left out. A complete line that does not parse is an error."""
    records, seen = [], set()
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    for i, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            key = record_key(record)
        except (ValueError, TypeError, KeyError) as e:
            raise CorruptRecords(f"{source}, line {i}, is not a record ({type(e).__name__}: {e})") from None
        if key in seen:
            raise CorruptRecords(f"{source}, line {i}, holds {key} a second time")
        seen.add(key)
        records.append(record)
    return records


@dataclass(frozen=True)
class _Holder:
    host: str
    pid: int
    started: str
    token: str
    released: bool = False

    @classmethod
    def me(cls) -> _Holder:
        return cls(_host(), os.getpid(), _process_start(os.getpid()), secrets.token_hex(8))


def _host() -> str:
    """Where process ids mean something: containers and cloned machines may share a name, but not this."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _process_start(pid: int) -> str:
    """When a process began, so that a reused pid is not taken for its predecessor; empty where the system hides it.

    Also empty for a process that has ended and that nobody has waited for: it holds nothing any more.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@dataclass(frozen=True)
class Process:
    """A process by host, number and start, so that a later one with the same number is not taken for it."""

    host: str
    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Process:
        """A process of this machine that exists."""
        return cls(_host(), pid, _process_start(pid))

    def here(self) -> bool:
        """Whether it was started on this machine."""
        return self.host == _host()

    def alive(self) -> bool:
        """Whether it still runs, as seen from this machine: a process of another one does not."""
        return self.here() and _alive(self.pid) and _process_start(self.pid) == self.started


class Lease:
    """The right to write one shard: exclusive creation of the next generation file, kept alive by a heartbeat.

    Generations only grow, so creating `<name>.lease.<g+1>` is decided by the file system for exactly one process,
    also where file locks do not work. A holder that dies on this machine is noticed at once, elsewhere after EXPIRY_S.
    """

    def __init__(self, stem: Path, clock: Callable[[], float] = time.time):
        self.stem, self.clock = stem, clock
        self.holder = _Holder.me()
        current = self._generations()
        top = current[-1] if current else 0
        if top and self._live(self._file(top)):
            raise Busy(f"{stem.name} is being written by another process")
        self.generation = top + 1
        try:
            fd = os.open(self._file(self.generation), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            raise Busy(f"{stem.name} was just taken by another process") from None
        with os.fdopen(fd, "w") as f:
            f.write(json.dumps(self.holder.__dict__))
            f.flush()
            os.fsync(f.fileno())
        if self._generations()[-1] != self.generation:  # others came and went between our look and our creation
            self._file(self.generation).unlink(missing_ok=True)
            raise Busy(f"{stem.name} was just taken by another process")
        for old in current:
            self._file(old).unlink(missing_ok=True)
        self._stop = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _file(self, generation: int) -> Path:
        return self.stem.with_name(f"{self.stem.name}.lease.{generation}")

    def _generations(self) -> list[int]:
        prefix = f"{self.stem.name}.lease."
        names = [p.name[len(prefix) :] for p in self.stem.parent.iterdir() if p.name.startswith(prefix)]
        return sorted(int(n) for n in names if n.isdigit())

    def _live(self, path: Path) -> bool:
        try:
            age = self.clock() - path.stat().st_mtime
            text = path.read_text()
        except FileNotFoundError:
            return True  # replaced this moment: someone is at work
        if age > EXPIRY_S:
            return False
        try:
            holder = _Holder(**json.loads(text))
        except (ValueError, TypeError):
            return True  # created this moment and not yet written
        if holder.released:
            return False
        if holder.host == _host() and holder.started:
            return _alive(holder.pid) and _process_start(holder.pid) == holder.started
        return True

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            try:
                os.utime(self._file(self.generation))
            except OSError:
                return  # `check` will tell the writer

    @classmethod
    def taken(cls, stem: Path) -> bool:
        """Whether a live process holds the lease, without trying to take it."""
        probe = cls.__new__(cls)
        probe.stem, probe.clock = stem, time.time
        if not stem.parent.is_dir():
            return False
        generations = probe._generations()
        return bool(generations) and probe._live(probe._file(generations[-1]))

    def check(self) -> None:
        """Raise LeaseLost unless this process still holds the shard."""
        generations = self._generations()
        if not generations or generations[-1] != self.generation:
            raise LeaseLost(f"{self.stem.name} was taken over by another process")

    def release(self) -> None:
        """Give the shard back; the file stays, marked, so that generations keep growing."""
        self._stop.set()
        if self._generations()[-1:] == [self.generation]:
            released = json.dumps({**self.holder.__dict__, "released": True})
            with contextlib.suppress(OSError):  # a full disk: the next one sees that this process is gone
                write_atomic(self._file(self.generation), released)


@contextlib.contextmanager
def held(stem: Path, busy: Callable[[], None], poll_s: float = 1.0) -> Iterator[None]:
    """Hold the lease of `stem`, waiting for whoever has it; `busy` is called once where that is so."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    told = False
    while True:
        try:
            lease = Lease(stem)
            break
        except Busy:
            if not told:
                busy()
                told = True
            time.sleep(poll_s)
    try:
        yield
    finally:
        lease.release()


class Shard:
    """The one writer of `records/<i>-of-<n>.jsonl`: truncates a torn last line, knows what is there, never repeats."""

    def __init__(self, path: Path):
        self.path = path
        self.lease = Lease(path)
        try:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            data = path.read_bytes()
            good = data.rfind(b"\n") + 1
            self.done = {record_key(r) for r in parse_records(data[:good], path)}
            if good != len(data):
                os.ftruncate(self.fd, good)
            self.size = good
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
                raise OSError(28, f"only {written} of {len(line)} bytes were written", str(self.path))
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
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            temp = self.folder.with_name(f".{self.key}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
            (temp / "records").mkdir(parents=True)
            try:
                write_json(temp / "payload.json", {"key": self.key, "payload": payload, "info": info})
                temp.rename(self.folder)
            except OSError as e:
                for path in sorted(temp.rglob("*"), reverse=True):
                    path.rmdir() if path.is_dir() else path.unlink()
                temp.rmdir()
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
        for stem in self._leased():
            other, of = (int(x) for x in stem.stem.split("-of-"))
            if of != count and (index - other) % math.gcd(count, of) == 0 and Lease.taken(stem):
                raise Busy(f"{stem.name} has examples of shard {index} of {count}, and another process is writing it")

    def _leased(self) -> set[Path]:
        leases = (self.folder / "records").glob("*.lease.*")
        return {p.with_name(p.name.partition(".lease.")[0]) for p in leases if not p.name.startswith(".")}

    def records(self) -> list[dict[str, Any]]:
        """The union over all shards, whatever their number; what two shardings both computed counts once."""
        out: dict[RecordKey, dict[str, Any]] = {}
        for path in sorted((self.folder / "records").glob("*-of-*.jsonl")):
            for record in parse_records(path.read_bytes(), path):
                out.setdefault(record_key(record), record)
        return list(out.values())

    def is_held(self) -> bool:
        """Whether a live process is writing one of the shards."""
        return any(Lease.taken(stem) for stem in self._leased())

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
        records = {record_key(r): r for r in self.records()}
        keys = list(expected)
        if any(k not in records for k in keys):
            return False
        write_json(self.folder / "result.json", aggregate([records[k] for k in keys]))
        return True

    def log(self, text: str) -> Path:
        """Append to the cell's log."""
        path = self.folder / "log.txt"
        with path.open("a", encoding="utf-8") as f:
            f.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text.rstrip()}\n")
        return path


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
        """Make the store and prove that it can be written, before anything is computed."""
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
        from moend.errors import unknown

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
