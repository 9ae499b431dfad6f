"""The code that jobs run: a copy made when they are submitted, named by its content and checked where it runs.

Modules of the user's own that a configuration names (a scorer, a benchmark by its dotted path) are part of the copy.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from moend.errors import UserError
from pipelines.store import provenance
from pipelines.store.files import make_folder, share_all, write_atomic

PARTS = ("moend", "pipelines", "hydra_plugins", "conf", "sweeps")
PLUGINS = "_plugins"  # in a copy: what lay outside of the package
COMMIT = provenance.COMMIT_FILE


def root() -> Path:
    """The folder of the code that is running: a checkout, site-packages, or a copy."""
    return Path(__file__).resolve().parents[2]


def _files(folder: Path) -> Iterator[Path]:
    parts = (p for p in PARTS if not (folder / "moend" / p).is_dir())  # a wheel has conf and sweeps inside moend
    for part in (*parts, PLUGINS):
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


def plugins(configs: Iterable[Mapping[str, Any]]) -> dict[str, Path]:
    """The files of the modules outside of the package that configurations name, by their places on Python's path.

    What lies in the same folder and is imported by now comes along: it may be what they are made of. Installed
    distributions stay where they are, as torch does. UserError for a module of which there is no file to copy.
    """
    named = {text for config in configs for text in _texts(config) if "." in text and text in sys.modules}
    tops = {name.partition(".")[0]: sys.modules[name] for name in named}
    folders = {_folder(top, module) for top, module in tops.items()} - {None}
    found: dict[str, Path] = {}
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        if top in PARTS or (folder := _folder(top, module)) is None or folder not in folders:
            continue
        source = Path(str(module.__file__))
        of = source.parent.rglob("*") if source.stem == "__init__" else [source]
        found |= {str(p.relative_to(folder)): p for p in of if p.is_file() and "__pycache__" not in p.parts}
    return found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _folder(top: str, module: ModuleType) -> Path | None:
    """The folder on Python's path that a module comes from; None for what is installed, built in or of the package."""
    if (
        top in PARTS
        or top in sys.builtin_module_names
        or top == "__main__"
        or getattr(module, "__file__", None) is None
    ):
        return None
    file = Path(str(module.__file__))
    depth = len(module.__name__.split(".")) - (file.stem != "__init__")
    if not file.is_absolute() or depth >= len(file.parents):  # a made-up one: no file of that name
        return None
    folder = file.parents[depth]
    installed = {sysconfig.get_path(n) for n in ("stdlib", "platstdlib", "purelib", "platlib")}
    if any(folder.is_relative_to(Path(p)) for p in installed):
        return None
    if not file.is_file():
        raise UserError(f"jobs cannot have a copy of {module.__name__}: {file} is no file")
    return folder


def take(into: Path, more: Mapping[str, Path] | None = None) -> Path:
    """Copy the running code to `into`/<digest>, in one step, where it is not there yet. Returns the copy.

    more: further files (`plugins`).
    """
    make_folder(into)
    temp = into / f".{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        copies = {str(p.relative_to(root())): p for p in _files(root())}
        for name, source in (copies | {f"{PLUGINS}/{n}": p for n, p in (more or {}).items()}).items():
            target = temp / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        if (commit := provenance.commit()) is not None:
            (temp / COMMIT).write_text(commit + "\n")
        share_all(temp)
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
    path = os.pathsep.join(p for p in (str(copy), str(copy / PLUGINS), os.environ.get("PYTHONPATH", "")) if p)
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
