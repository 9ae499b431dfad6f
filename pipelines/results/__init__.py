"""Results from finished files: aggregates, paired differences, scores made again, pandas frames (`load`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelines.results.frame import Results


def load(store: str | Path = "outputs", sweep: str | None = None) -> Results:
    """The frames of all sweeps of a store, or of one (its name, or `latest`): cells, records, differences.

    UserError where there is no such folder or sweep, or no pandas. docs/results.md has recipes.
    """
    from pipelines.results.frame import load as read

    return read(store, sweep)
