"""Figures of a sweep: a module of this package that has `pictures(sweep)` is found by that and drawn into the report.

`pictures(sweep)` yields `Picture`s, none where the sweep has nothing to draw; `ORDER` (default 50) is its place
on the page. What a module draws, and `calibrate` or a script may call by itself, is its `draw(data, path) -> bool`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from pipelines.results.sweep import Sweep

T = TypeVar("T")


@dataclass(frozen=True)
class Picture:
    """A figure to be drawn: its file's stem, what stands above and below it, and how it is drawn into a PNG and a PDF.

    draw: writes `path` (a .png) and the same with .pdf, False where there is nothing. caption: how to read it.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[Path], bool]


def pictures(sweep: Sweep) -> list[Picture]:
    """All figures of a sweep, module by module in their order; two of one name are a mistake of their modules."""
    modules = [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]
    modules.sort(key=lambda m: (getattr(m, "ORDER", 50), m.__name__))
    found: list[Picture] = []
    for module in modules:
        if (make := getattr(module, "pictures", None)) is not None:
            found += make(sweep)
    names = [p.name for p in found]
    if twice := {n for n in names if names.count(n) > 1}:
        raise ValueError(f"figures share a name: {', '.join(sorted(twice))}")
    return found


def safe(*parts: str) -> str:
    """A file's stem of parts that may hold any characters."""
    return "_".join("".join(c if c.isalnum() or c in "._-" else "_" for c in part) for part in parts if part)


def chunks(items: Iterable[T], size: int) -> list[list[T]]:
    """Pieces of at most `size`: a figure holds only so many panels."""
    rest = list(items)
    return [rest[i : i + size] for i in range(0, len(rest), size)]
