"""The store survives torn lines, full disks, two writers, and its own death."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from moend.errors import UserError
from pipelines.store import lease as module
from pipelines.store.cells import CellStore, CorruptRecords, Shard, Store
from pipelines.store.files import share_all, write_atomic, write_json
from pipelines.store.lease import Busy, Lease, LeaseLost, taken


def cell(tmp_path: Path) -> CellStore:
    made = Store(tmp_path).cell("0123456789abcdef")
    made.create({"a": 1}, {})
    return made


def record(id: str, draw: int = 0) -> dict[str, Any]:
    return {"task": "t", "id": id, "draw": draw, "text": "ü\n"}


def shard_path(made: CellStore) -> Path:
    return made.folder / "records" / "0-of-1.jsonl"


def test_append_and_read_back(tmp_path: Path) -> None:
    made = cell(tmp_path)
    with made.shard() as shard:
        shard.append(record("a"))
        shard.append(record("a", draw=1))
        with pytest.raises(ValueError, match="already"):
            shard.append(record("a"))
    assert made.records() == [record("a"), record("a", 1)]
    assert made.done() == {("t", "a", 0), ("t", "a", 1)}


@pytest.mark.req(15)
def test_a_torn_last_line_is_cut_and_nothing_before_it(tmp_path: Path) -> None:
    made = cell(tmp_path)
    with made.shard() as shard:
        shard.append(record("a"))
        shard.append(record("b"))
    whole = shard_path(made).read_bytes()
    for length in range(len(whole) // 2 + 1, len(whole)):
        shard_path(made).write_bytes(whole[:length])
        assert [r["id"] for r in made.records()] == ["a"]
        with made.shard() as shard:
            assert shard.done == {("t", "a", 0)}
            shard.append(record("b"))
        assert shard_path(made).read_bytes() == whole


def test_a_malformed_whole_line_is_an_error_with_file_and_line(tmp_path: Path) -> None:
    made = cell(tmp_path)
    for bad in ("{}", "nonsense", "[1]", json.dumps({"task": "t", "id": "a"})):
        shard_path(made).write_text(json.dumps(record("x")) + "\n" + bad + "\n")
        with pytest.raises(CorruptRecords, match=r"0-of-1\.jsonl, line 2"):
            made.records()
        with pytest.raises(CorruptRecords, match="line 2"):
            Shard(shard_path(made))


def test_shards_of_any_number_are_one_cell(tmp_path: Path) -> None:
    made = cell(tmp_path)
    with made.shard(0, 2) as shard:
        shard.append(record("a"))
    with made.shard(1, 3) as shard:
        shard.append(record("b"))
        shard.append(record("a"))  # computed under both shardings: counts once
    assert sorted(r["id"] for r in made.records()) == ["a", "b"]


def test_lines_that_are_there_twice_are_left_out_and_told(tmp_path: Path) -> None:
    made = cell(tmp_path)
    first = {**record("x"), "score": 1}
    shard_path(made).write_text("".join(json.dumps(r) + "\n" for r in (first, first, record("y"))))
    (made.folder / "records" / "0-of-1.g10.jsonl").write_text(json.dumps({**record("x"), "score": 3}) + "\n")
    (made.folder / "records" / "0-of-1.g2.jsonl").write_text(json.dumps({**record("x"), "score": 2}) + "\n")
    assert made.records() == [first, record("y")]  # of two that differ the earlier generation's counts
    assert made.finish([("t", "x", 0), ("t", "y", 0)], lambda found: {"key": made.key, "n": len(found)})
    told = ["0-of-1.jsonl: 1 of 3 records were there already, left out"]
    told += [f"0-of-1.g{n}.jsonl: 1 of 1 records were there already, left out" for n in (2, 10)]
    assert made.result() == {"key": made.key, "n": 2, "repeated": told}
    assert all(line in (made.folder / "log.txt").read_text() for line in told)


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        ((0, 1), (1, 3), True),
        ((1, 2), (0, 4), False),
        ((1, 2), (3, 4), True),
        ((0, 2), (2, 3), True),
        ((0, 2), (1, 2), False),
    ],
)
def test_shards_with_common_examples_have_one_writer(
    tmp_path: Path, one: tuple[int, int], other: tuple[int, int], common: bool
) -> None:
    assert common == bool(set(range(24)[one[0] :: one[1]]) & set(range(24)[other[0] :: other[1]]))
    made = cell(tmp_path)
    for first, second in ((one, other), (other, one)):
        with made.shard(*first), pytest.raises(Busy) if common else contextlib.nullcontext(), made.shard(*second):
            pass
        with made.shard(*second):  # what was given back, or refused, is in nobody's way
            pass


@pytest.mark.req(6)
def test_a_result_is_written_only_when_complete_and_checked_when_read(tmp_path: Path) -> None:
    made = cell(tmp_path)
    expected = [("t", "a", 0), ("t", "b", 0)]
    with made.shard() as shard:
        shard.append(record("b"))
        assert not made.finish(expected, lambda r: {})
        assert made.result() is None
        shard.append(record("a"))
    assert made.finish(expected, lambda r: {"key": made.key, "ids": [x["id"] for x in r]})
    assert made.result() == {"key": made.key, "ids": ["a", "b"]}
    write_json(made.folder / "result.json", {"key": "other"})
    with pytest.raises(UserError, match="belongs to cell other"):
        made.result()
    (made.folder / "result.json").write_text('{"key": ')
    with pytest.raises(UserError, match=r"result\.json is damaged"):
        made.result()


@pytest.mark.req(8)
def test_folders_are_created_once_by_many_at_the_same_time(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)
    errors: list[BaseException] = []

    def create() -> None:
        barrier.wait()
        try:
            for i in range(20):
                Store(tmp_path).cell(f"{i:016x}").create({"a": i}, {})
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert sorted(p.name for p in (tmp_path / "cells").iterdir()) == [f"{i:016x}" for i in range(20)]
    with pytest.raises(UserError, match="a: has 3, needs 4"):
        Store(tmp_path).cell(f"{3:016x}").create({"a": 4}, {})


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = cell(tmp_path), os.write
    with made.shard() as shard:
        shard.append(record("a"))
        before = shard_path(made).read_bytes()

        def half(fd: int, data: bytes) -> int:
            real(fd, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", half)
        with pytest.raises(OSError, match="No space"):
            shard.append(record("b"))
        monkeypatch.setattr(os, "write", real)
        assert shard_path(made).read_bytes() == before
        shard.append(record("b"))
    assert [r["id"] for r in made.records()] == ["a", "b"]


def test_write_atomic_keeps_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_atomic(path, "old")

    def broken(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
    assert path.read_text() == "old"


# Leases


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "s")
    with pytest.raises(Busy):
        Lease(tmp_path / "s")
    lease.release()
    again = Lease(tmp_path / "s")
    assert again.generation == 2
    again.release()
    assert len(list(tmp_path.iterdir())) == 1


def test_of_many_racers_one_wins(tmp_path: Path) -> None:
    for round in range(20):
        barrier = threading.Barrier(6)
        won: list[Lease] = []

        def race(barrier: threading.Barrier = barrier, won: list[Lease] = won, stem: str = f"s{round}") -> None:
            barrier.wait()
            try:
                won.append(Lease(tmp_path / stem))
            except Busy:
                return

        threads = [threading.Thread(target=race) for _ in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(won) == 1
        won[0].release()


def silent(path: Path) -> None:
    """As if the heart of a lease had not beaten for long."""
    long_ago = path.stat().st_mtime - module.EXPIRY_S - 1
    os.utime(path, (long_ago, long_ago))


def test_a_silent_lease_expires_and_its_holder_notices(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "s")
    silent(tmp_path / "s.lease.1")
    later = Lease(tmp_path / "s")
    assert (later.generation, lease.writes, later.writes) == (2, 1, 2)
    with pytest.raises(LeaseLost):
        lease.check()
    lease.release()  # must not free what is another's
    with pytest.raises(Busy):
        Lease(tmp_path / "s")
    later.check()
    later.release()
    assert Lease(tmp_path / "s").writes == 2  # whose holder has ended for certain: its files are gone on with


def test_who_takes_a_lease_over_writes_a_file_of_its_own(tmp_path: Path) -> None:
    made = cell(tmp_path)
    with made.shard() as first:
        first.append(record("a"))
        silent(shard_path(made).with_name("0-of-1.jsonl.lease.1"))
        with made.shard() as second:
            assert second.path.name == "0-of-1.g2.jsonl"
            second.append(record("b"))
            with pytest.raises(LeaseLost):
                first.append(record("b"))
            os.write(first.fd, json.dumps(record("b")).encode() + b"\n")  # it was stopped just before it wrote
            second.append(record("c"))
    found, repeated = made.union()
    assert [r["id"] for r in found] == ["a", "b", "c"]
    assert repeated == ["0-of-1.g2.jsonl: 1 of 2 records were there already, left out"]


def test_the_age_of_a_lease_is_by_the_clock_that_dates_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease, real = Lease(tmp_path / "s"), time.time
    text = json.dumps({**json.loads((tmp_path / "s.lease.1").read_text()), "host": "elsewhere"})
    (tmp_path / "s.lease.1").write_text(text)
    for shift in (-1e6, 120, 1e6):
        monkeypatch.setattr(time, "time", lambda s=shift: real() + s)
        monkeypatch.setattr(module, "_clocks", {})
        assert taken(tmp_path / "s")
    silent(tmp_path / "s.lease.1")
    assert not taken(tmp_path / "s")
    assert not [p for p in tmp_path.iterdir() if "clock" in p.name]
    lease.release()


def test_one_beat_that_fails_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.01)
    real, failed = os.utime, threading.Event()

    def utime(path: Any, *args: Any) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EIO, "the server is away")
        real(path, *args)

    monkeypatch.setattr(os, "utime", utime)
    lease, path = Lease(tmp_path / "s"), tmp_path / "s.lease.1"
    assert failed.wait(10)
    real(path, (1, 1))
    until(lambda: path.stat().st_mtime > 1)
    lease.release()


def until(ready: Any) -> None:
    deadline = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.process
def test_a_dead_process_on_this_machine_holds_nothing(tmp_path: Path) -> None:
    code = (
        "import os; from pathlib import Path; from pipelines.store.lease import Lease; "
        f"Lease(Path({str(tmp_path / 's')!r})); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert Lease(tmp_path / "s").generation == 2


def test_another_machines_lease_counts_until_it_expires(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "s")
    path = tmp_path / "s.lease.1"
    path.write_text(json.dumps({**json.loads(path.read_text()), "host": "elsewhere", "pid": 999_999_999}))
    with pytest.raises(Busy):
        Lease(tmp_path / "s")
    os.utime(path, (1, 1))
    assert Lease(tmp_path / "s").generation == 2
    lease.release()


def test_a_name_that_two_machines_share_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as m:
        m.setattr(module, "_host", lambda: f"{socket.gethostname()} another-boot pid:[1]")
        lease = Lease(tmp_path / "s")
    path = tmp_path / "s.lease.1"  # alive there; here the process id is nobody's
    path.write_text(json.dumps({**json.loads(path.read_text()), "pid": 999_999_999}))
    with pytest.raises(Busy):
        Lease(tmp_path / "s")
    lease.release()


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left on device") as e:
        write_atomic(tmp_path / "x.json", "{}")
    assert e.value.filename == str(tmp_path / "x.json")
    assert not list(tmp_path.iterdir())


def test_the_heart_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.02)
    lease, path = Lease(tmp_path / "s"), tmp_path / "s.lease.1"
    os.utime(path, (1, 1))
    until(lambda: path.stat().st_mtime > 1)
    lease.release()


# Rights


@pytest.mark.parametrize(("folder", "umask"), [(0o2775, 0o077), (0o755, 0o002), (0o700, 0o022), (0o2770, 0o027)])
def test_what_is_made_has_the_rights_of_the_store(tmp_path: Path, folder: int, umask: int) -> None:
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(folder)
    before = os.umask(umask)
    try:
        store = Store(root)
        store.prepare()
        made = store.cell("0123456789abcdef")
        made.create({}, {})
        with made.shard() as shard:
            shard.append(record("a"))
        made.finish([("t", "a", 0)], lambda r: {"key": made.key})
        made.log("x")
        own = made.folder / "by_a_library"
        own.mkdir()
        (own / "file").write_text("")
        share_all(own)
    finally:
        os.umask(before)
    paths = list((root / "cells").rglob("*"))
    assert len(paths) == 9
    for path in paths:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (folder if path.is_dir() else folder & 0o666), path


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be two users")
def test_two_users_with_different_umasks_share_a_store(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    os.chown(root, -1, 54321)
    root.chmod(0o2770)
    theirs = [p for p in tmp_path.parents if p.name.startswith(("pytest-", "popen-"))]  # also with several processes
    for folder in (tmp_path, *theirs):
        folder.chmod(0o755)

    def write(id: str) -> None:
        store = Store(root)
        store.prepare()
        made = store.cell("0123456789abcdef")
        made.create({}, {})
        Shard(shard_path(made)).append(record(id))

    for n, (user, umask) in enumerate(((54321, 0o077), (54322, 0o022), (54321, 0o077))):
        if (child := os.fork()) == 0:  # an interpreter that only root may start is no obstacle
            os.setgroups([54321])
            os.setgid(54323)
            os.setuid(user)
            os.umask(umask)
            code = 1
            try:
                write(str(n))
                code = 9
            except BaseException as e:
                print(repr(e), file=sys.stderr, flush=True)
            finally:
                os._exit(code)  # no lease is given back
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len(Store(root).cell("0123456789abcdef").records()) == 3
