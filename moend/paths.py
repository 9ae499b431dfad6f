"""Where packaged files lie: configurations and sweeps, which a wheel holds inside this package, and calibrations."""

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


def calibration(key: str) -> Path | None:
    """The folder of the calibration with this key that comes with the package, or None."""
    found = PACKAGE / "calibration" / "shipped" / key
    return found if (found / "artefact.json").is_file() else None
