"""Where the configurations and the sweeps lie: at the top of a checkout, inside this package in a wheel."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def folder(name: str, *parts: str) -> Path:
    """The folder `conf` or `sweeps`, or a part of it: `folder("conf", "method")`.

    The one inside the package comes first: another package of the same environment may have put a `conf` beside it.
    """
    inside = PACKAGE / name
    found = inside if inside.is_dir() else PACKAGE.parent / name
    if not found.is_dir():
        raise RuntimeError(f"this installation lacks the folder {name}: neither {inside} nor {found} is there")
    return found.joinpath(*parts)
