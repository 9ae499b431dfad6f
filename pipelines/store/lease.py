"""Who may write: a file that exactly one process can create, kept alive by a heartbeat, aged by the server's clock."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipelines.store.files import create, make_folder, write_atomic

HEARTBEAT_S = 10.0
EXPIRY_S = 60.0  # a lease whose heart has not beaten for so long is dead, on whatever machine its holder was
CLOCK_S = 5.0  # for so long the difference between the clocks of the file server and of this machine is remembered


class Busy(Exception):
    """Another live process holds this lease."""


class LeaseLost(Exception):
    """This process was silent for so long that another one took the lease over."""


@dataclass(frozen=True)
class Process:
    """A process by host, number and start, so that a later one with the same number is not taken for it."""

    host: str  # where process ids mean something
    pid: int
    started: str  # empty where the system hides it, or where the process has ended

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


def _host() -> str:
    """This machine: containers and cloned machines may share a name, but not this."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _process_start(pid: int) -> str:
    """When a process began. Empty also for one that has ended and that nobody has waited for: it holds nothing."""
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


class Lease:
    """The right to write what `stem` names: exclusive creation of the next generation file `<name>.lease.<g>`.

    Generations only grow. Of several processes that create the next file, the file system lets exactly one succeed; no
    file locks are needed. A holder that ends on this machine is noticed at once. One on another machine, or one that
    hangs, is noticed after EXPIRY_S.

    writes: the generation of the files that the holder may write. It is that of the holder before, where that one has
    ended for certain, and else a new one: a holder that only stood still finds its own files as it left them, and
    whatever it still writes harms nobody's.
    """

    def __init__(self, stem: Path):
        self.stem = stem
        generations = _generations(stem)
        top = generations[-1] if generations else 0
        state, writes = _look(_file(stem, top)) if top else ("ended", 1)
        if state == "live":
            raise Busy(f"{stem.name} is being written by another process")
        self.generation = top + 1
        self.writes = writes if state == "ended" else self.generation
        self._word = {**Process.of(os.getpid()).__dict__, "writes": self.writes, "released": False}
        mine = _file(stem, self.generation)
        try:
            with os.fdopen(create(mine), "w") as f:
                try:
                    f.write(json.dumps(self._word))
                    f.flush()
                    os.fsync(f.fileno())
                except OSError as e:
                    e.filename = str(mine)
                    mine.unlink(missing_ok=True)
                    raise
        except FileExistsError:
            raise Busy(f"{stem.name} was just taken by another process") from None
        if _generations(stem)[-1] != self.generation:  # others came and went between our look and our creation
            mine.unlink(missing_ok=True)
            raise Busy(f"{stem.name} was just taken by another process")
        for old in generations:
            with contextlib.suppress(OSError):
                _file(stem, old).unlink()
        self._stop = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        """One beat that fails is no end: the server may answer the next. `check` tells the writer what was lost."""
        while not self._stop.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):
                os.utime(_file(self.stem, self.generation))

    def check(self) -> None:
        """Raise LeaseLost unless this process still holds the lease."""
        if _generations(self.stem)[-1:] != [self.generation]:
            raise LeaseLost(f"{self.stem.name} was taken over by another process")

    def release(self) -> None:
        """Give it back; the file stays, marked, so that generations keep growing."""
        self._stop.set()
        if _generations(self.stem)[-1:] == [self.generation]:
            with contextlib.suppress(OSError):  # a full disk: the next one sees that this process is gone
                write_atomic(_file(self.stem, self.generation), json.dumps({**self._word, "released": True}))


def taken(stem: Path) -> bool:
    """Whether a live process holds the lease, without trying to take it."""
    generations = _generations(stem) if stem.parent.is_dir() else []
    return bool(generations) and _look(_file(stem, generations[-1]))[0] == "live"


def leased(folder: Path) -> set[Path]:
    """What leases there are in a folder, by the files they stand for."""
    found = (p for p in folder.glob("*.lease.*") if not p.name.startswith("."))
    return {p.with_name(p.name.partition(".lease.")[0]) for p in found}


def forget(stem: Path) -> None:
    """Remove the files of a lease that nobody needs any more: what it stood for is there, whole. Not a live one."""
    if not taken(stem):
        for generation in _generations(stem) if stem.parent.is_dir() else ():
            with contextlib.suppress(OSError):  # another process does the same, or the folder is another user's
                _file(stem, generation).unlink()


@contextlib.contextmanager
def held(stem: Path, busy: Callable[[], None], poll_s: float = 1.0) -> Iterator[None]:
    """Hold the lease of `stem`, waiting for whoever has it; `busy` is called once where that is so."""
    make_folder(stem.parent)
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


def _file(stem: Path, generation: int) -> Path:
    return stem.with_name(f"{stem.name}.lease.{generation}")


def _generations(stem: Path) -> list[int]:
    prefix = f"{stem.name}.lease."
    names = [p.name[len(prefix) :] for p in stem.parent.iterdir() if p.name.startswith(prefix)]
    return sorted(int(n) for n in names if n.isdigit())


def _look(path: Path) -> tuple[Literal["live", "ended", "silent"], int]:
    """What became of a lease's holder, and the generation of the files that it wrote."""
    try:
        beat, text = path.stat().st_mtime, path.read_text()
    except FileNotFoundError:
        return "live", 0  # replaced this moment: someone is at work
    try:
        word = json.loads(text)
        holder = Process(word["host"], int(word["pid"]), word["started"])
        released, writes = bool(word["released"]), int(word.get("writes", 1))
    except (ValueError, TypeError, KeyError):
        holder, released, writes = None, False, 0  # created this moment and not yet written
    if released or (holder is not None and holder.here() and holder.started and not holder.alive()):
        return "ended", writes
    return ("silent" if _now(path.parent) - beat > EXPIRY_S else "live"), writes


_clocks: dict[int, tuple[float, float]] = {}  # device -> when it was asked (monotonic), its clock less ours


def _now(folder: Path) -> float:
    """The time by the clock that also dates the heartbeats: a file that is touched now has it.

    This machine's own clock only where the folder cannot be written: who cannot write takes no lease over.
    """
    device, ours = folder.stat().st_dev, time.monotonic()
    if device not in _clocks or ours - _clocks[device][0] > CLOCK_S:
        probe = folder / f".clock.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            os.close(create(probe))
            theirs = probe.stat().st_mtime
        except OSError:
            return time.time()
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()
        _clocks[device] = (ours, theirs - ours)
    return ours + _clocks[device][1]
