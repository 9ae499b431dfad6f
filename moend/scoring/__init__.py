"""Scorers: which entries of a layer matter. One file each, found by its name; adding one is adding a file here.

A scorer's module holds a frozen dataclass of its settings under the name SCORER. Selection (sinks, the recent window,
top-k) is not a scorer's business.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from typing import Any, cast

from moend.errors import unknown
from moend.scoring.base import LayerView, Scorer

__all__ = ["LayerView", "Scorer", "names", "scorer"]


def names() -> tuple[str, ...]:
    """The scorers there are."""
    return _names(tuple(__path__))


@functools.cache  # a plan makes thousands of scorers, and each looks here
def _names(folders: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(m.name for m in pkgutil.iter_modules(folders) if m.name != "base"))


def scorer(name: str, **params: Any) -> Scorer:
    """The scorer of that name with these settings; an unknown name, setting or choice is a UserError."""
    if name not in names():
        raise unknown("scorer", name, names())
    kind = importlib.import_module(f"{__name__}.{name}").SCORER
    fields = [f.name for f in dataclasses.fields(kind)]
    for key in params:
        if key not in fields:
            raise unknown(f"setting of scorer {name}", key, fields)
    return cast(Scorer, kind(**params))
