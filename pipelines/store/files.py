"""Files that are whole or not there, with the rights of the folder they lie in: a store may have several users."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from moend.errors import UserError


def write_atomic(path: Path, text: str) -> None:
    """Write to a temporary name, fsync, rename, fsync the folder: readers see the old file or all of the new one."""
    temp = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with os.fdopen(create(temp), "w", encoding="utf-8") as f:
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


def create(path: Path, flags: int = os.O_EXCL) -> int:
    """A descriptor that appends to a file, which is made where it is not there and must not be there with O_EXCL."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | flags, 0o666)
    try:
        share(path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_folder(path: Path) -> None:
    """Make a folder of the store and those above it that are not there, each with the rights of the one it lies in."""
    for folder in reversed([p for p in (path, *path.parents) if not p.exists()]):
        folder.mkdir(exist_ok=True)  # somebody else may be making it
        share(folder)


def share(path: Path) -> None:
    """Give what this user has made the rights and the group of its folder, whatever this user's umask is.

    In a store that its group may write, everything is then the group's. What another user has made is left alone.
    """
    have, folder = path.stat(), path.parent.stat()
    if have.st_uid != os.geteuid():
        return
    if have.st_gid != folder.st_gid:
        with contextlib.suppress(PermissionError):  # a group that this user is no member of
            os.chown(path, -1, folder.st_gid)
    mode = (folder.st_mode & 0o2777) | 0o700 if stat.S_ISDIR(have.st_mode) else (folder.st_mode & 0o666) | 0o600
    if stat.S_IMODE(have.st_mode) != mode:
        path.chmod(mode)


def share_all(folder: Path) -> None:
    """`share` of a folder and everything in it: for what a library has written there."""
    for path in (folder, *sorted(folder.rglob("*"))):
        share(path)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
