"""Calibrations: measured once per model, kept as artefacts, checked field by field before they are used.

A kind is one file: its settings, its identity, its measurement, and what tables and figures read (`base.Kind`). It is
found by its file's name, by a dotted path, or as an entry point of the group "moend.calibrations".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moend.calibration.artefact import Artefact
from moend.calibration.base import Bench, Calibration, Kind, Report, Target, kind, kinds

__all__ = ["Artefact", "Bench", "Calibration", "Kind", "Report", "Target", "figure", "kind", "kinds"]


def figure(folder: Path, name: str | None = None) -> dict[str, Any]:
    """What tables and figures read of the artefact in a folder, verified to be of the kind `name`."""
    artefact = Artefact.load(folder, kind=name)
    return kind(artefact.kind).figure(artefact)
