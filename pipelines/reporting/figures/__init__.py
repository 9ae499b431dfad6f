"""Figures of a sweep: a module of this package that has `pictures(sweep)` is found by that and drawn into the report.

`pictures(sweep)` yields `Picture`s, none where the sweep has nothing to draw; `ORDER` (default 50) is its place
on the page. `of_plan(plan, found, title, model)` yields what `calibrate` draws of one plan and its calibrations. What a
module draws, and a script may call by itself, is its `draw(data, path) -> bool`.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

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
    kind: str = ""  # the module that made it


def pictures_of_plan(
    plan: dict[str, Any], found: Mapping[str, Mapping[str, Any]], title: str, model: str
) -> list[Picture]:
    """Figures of one plan and of the calibrations it comes from.

    found: by kind what `moend.calibration.figure` reads of it. title: of the cell. model: its name.
    """
    drawing = [of for module in _modules() if (of := getattr(module, "of_plan", None)) is not None]
    return [picture for of in drawing for picture in of(plan, found, title, model)]


def _modules() -> list[ModuleType]:
    """The modules of this package, in their order on the page."""
    modules = [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]
    return sorted(modules, key=lambda m: (getattr(m, "ORDER", 50), m.__name__))


def first(sweep: Sweep, most: int | None) -> tuple[list[Picture], list[str]]:
    """The figures of a sweep, module by module in their order, and the kinds (modules) of which there are more.

    most: figures of each kind; None: all of them. Two figures of one name are a mistake of their modules.
    """
    found: list[Picture] = []
    more = []
    for module in _modules() if most != 0 else ():
        if (make := getattr(module, "pictures", None)) is not None:
            kind = module.__name__.rpartition(".")[2]
            made = iter(make(sweep))  # what is not asked for is not even prepared
            found += [replace(p, kind=kind) for p in itertools.islice(made, most)]
            more += [kind.replace("_", " ")] * (next(made, None) is not None)
    names = [p.name for p in found]
    if twice := {n for n in names if names.count(n) > 1}:
        raise ValueError(f"figures share a name: {', '.join(sorted(twice))}")
    return found, more


def pictures(sweep: Sweep) -> list[Picture]:
    """All figures of a sweep."""
    return first(sweep, None)[0]


def only_png() -> AbstractContextManager[None]:
    """Inside, figures are drawn as PNG alone."""
    from pipelines.reporting.figures import style

    return style.only(".png")


def safe(*parts: str) -> str:
    """A file's stem of parts that may hold any characters."""
    return "_".join("".join(c if c.isalnum() or c in "._-" else "_" for c in part) for part in parts if part)


def chunks(items: Iterable[T], size: int) -> list[list[T]]:
    """Pieces of at most `size`: a figure holds only so many panels."""
    rest = list(items)
    return [rest[i : i + size] for i in range(0, len(rest), size)]
