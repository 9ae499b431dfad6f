"""The code that jobs run: a copy made when they are submitted, named by its content and checked where it runs."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from pipelines.store import provenance
from pipelines.store.files import write_atomic

PARTS = ("moend", "pipelines", "hydra_plugins", "conf", "sweeps")
COMMIT = provenance.COMMIT_FILE


def root() -> Path:
    """The folder of the code that is running: a checkout, site-packages, or a copy."""
    return Path(__file__).resolve().parents[2]


def _files(folder: Path) -> Iterator[Path]:
    for part in (p for p in PARTS if not (folder / "moend" / p).is_dir()):  # a wheel has conf and sweeps inside moend
        for path in sorted((folder / part).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
                yield path


def digest(folder: Path) -> str:
    """16 hex digits of the SHA-256 over the names and contents of all files of the product in a folder."""
    total = hashlib.sha256()
    for path in _files(folder):
        content = hashlib.sha256(path.read_bytes()).digest()
        total.update(str(path.relative_to(folder)).encode() + b"\0" + content)
    return total.hexdigest()[:16]


def take(into: Path) -> Path:
    """Copy the running code to `into`/<digest>, in one step, where it is not there yet. Returns the copy."""
    into.mkdir(parents=True, exist_ok=True)
    temp = into / f".{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        for source in _files(root()):
            target = temp / source.relative_to(root())
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        if (commit := provenance.commit()) is not None:
            (temp / COMMIT).write_text(commit + "\n")
        made = into / digest(temp)  # of the copy: the original may be edited this moment
        if made.is_dir() and digest(made) != made.name:  # somebody has edited the copy
            made.rename(temp.with_suffix(".edited"))
        try:
            temp.rename(made)
        except OSError:
            if not made.is_dir():
                raise
    finally:
        for rest in (temp, temp.with_suffix(".edited")):
            shutil.rmtree(rest, ignore_errors=True)
    return made


def record_difference(path: Path) -> None:
    """Write what the checkout has beyond its commit, as a patch; nothing where there is no checkout."""
    if (provenance.commit() or "").endswith("-dirty"):
        command = ["git", "diff", "HEAD", "--binary", "--", *PARTS]
        done = subprocess.run(command, cwd=root(), capture_output=True, text=True, timeout=60, check=True)
        write_atomic(path, done.stdout)
    else:
        path.unlink(missing_ok=True)


def environment(copy: Path) -> dict[str, str]:
    """Variables under which Python takes the copy, and not what lies in the working folder."""
    path = os.pathsep.join(p for p in (str(copy), os.environ.get("PYTHONPATH", "")) if p)
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
