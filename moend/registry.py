"""Finds scorers, allocators and calibration kinds by name: one file each, inside this package or outside it.

A part is a module with one object under an agreed name (SCORER, ALLOCATOR, KIND). Three ways lead to it:

- its file name inside the package that is searched: `snapkv` is moend/scoring/snapkv.py;
- an entry point of an installed distribution: group `moend.scorers`, `moend.allocators` or `moend.calibrations`;
- a dotted path to a module that Python can import: `my_scorers.keynorm`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
import re
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from moend.errors import UserError, unknown

LATER = {"later": True}  # metadata of a part's setting that came later: its default means what there was before


def names(package: str, group: str, attribute: str = "") -> tuple[str, ...]:
    """Names of the parts that are there: files of `package` and entry points of `group`, sorted.

    attribute: the name that a part's module assigns at its top level; other modules of the package are left out.
    Without it every module counts but `base` and those whose names begin with an underscore. No part is imported.
    """
    own = _files(package, tuple(importlib.import_module(package).__path__), attribute)
    installed = _installed(group)
    for name in own:
        if name in installed:
            raise UserError(_twice(group, name, f"{package}.{name}", installed[name].value))
    return tuple(sorted({*own, *installed}))


def find(package: str, attribute: str, name: str, group: str) -> Any:
    """The object `attribute` of the part called `name`.

    package: the dotted name of the package that is searched first. group: the entry point group. A name with a dot is
    the path of a module. Raises UserError for a name that is not there (with the nearest one), for a name that two
    parts claim, and for a module that does not have the attribute.
    """
    if "." in name:
        return _attribute(_imported(name, group), attribute, name, group)
    if name not in (known := names(package, group, attribute)):
        raise unknown(_word(group), name, known)
    if (entry := _installed(group).get(name)) is None:
        return _attribute(importlib.import_module(f"{package}.{name}"), attribute, name, group)
    try:
        loaded = entry.load()
    except (ImportError, AttributeError) as e:
        raise UserError(f"{_word(group)} '{name}' is installed as {entry.value}, which cannot be imported: {e}") from e
    return _attribute(loaded, attribute, name, group) if isinstance(loaded, ModuleType) else loaded


def build(kind: Any, label: str, settings: Mapping[str, Any]) -> Any:
    """An instance of the dataclass `kind` with these settings; an unknown one is refused with the nearest.

    label: how the message calls the part, such as `scorer snapkv`. Lists become tuples, so that frozen parts stay
    hashable.
    """
    fields = [f.name for f in dataclasses.fields(kind)]
    for key in settings:
        if key not in fields:
            if not fields:
                raise UserError(f"{label} has no settings, got '{key}'")
            raise unknown(f"setting of {label}", str(key), fields)
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()})


@functools.cache  # planning asks for thousands of parts
def _files(package: str, folders: tuple[str, ...], attribute: str) -> tuple[str, ...]:
    found: dict[str, str] = {}
    for module in pkgutil.iter_modules(folders):
        if module.name == "base" or module.name.startswith("_"):
            continue
        spec = module.module_finder.find_spec(module.name, None)
        if spec is None or (attribute and not _assigns(spec.loader, module.name, attribute)):
            continue
        found[module.name] = str(spec.origin)
    return tuple(sorted(found))


def _assigns(loader: Any, name: str, attribute: str) -> bool:
    """Whether the source of a module assigns `attribute` at its top level."""
    source = loader.get_source(name)
    return source is not None and re.search(rf"^{attribute}\b[^=\n]*=", source, re.MULTILINE) is not None


@functools.cache
def _installed(group: str) -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise UserError(_twice(group, entry.name, other.value, entry.value))
    return found


def _twice(group: str, name: str, one: str, other: str) -> str:
    return f"two {_word(group)}s are called '{name}': {one} and {other}. Rename one, or uninstall its distribution"


def _imported(path: str, group: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{path}.".startswith(f"{e.name}."):  # the module is there, what it imports is not
            raise
        raise UserError(
            f"{_word(group)} '{path}' is not a module that Python finds: put its folder on PYTHONPATH"
        ) from e


def _attribute(module: ModuleType, attribute: str, name: str, group: str) -> Any:
    if not hasattr(module, attribute):
        raise UserError(f"{_word(group)} '{name}': {module.__file__} must assign its class to {attribute}")
    return getattr(module, attribute)


def _word(group: str) -> str:
    """`moend.scorers` -> `scorer`."""
    return group.rpartition(".")[2].removesuffix("s")
