"""Licence and terms of the data sets that benchmarks read: one table, in data/terms.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

import yaml

from moend.errors import unknown


@dataclass(frozen=True)
class Terms:
    """What may be done with a data set, as its own source states it."""

    name: str  # of the data set
    source: str  # where it comes from
    licence: str  # its licence, and terms that a licence of the collection does not replace

    def __str__(self) -> str:
        return f"{self.source}: {self.licence}"


@cache
def table() -> dict[str, Terms]:
    """All data sets by name."""
    text = resources.files("moend.benchmarks").joinpath("data/terms.yaml").read_text(encoding="utf-8")
    return {name: Terms(name, row["source"], row["licence"]) for name, row in yaml.safe_load(text).items()}


def of(*names: str) -> tuple[Terms, ...]:
    """The terms of these data sets, each once; one that is not in the table is refused with the nearest."""
    for name in names:
        if name not in table():
            raise unknown("data set", name, table())
    return tuple(table()[name] for name in dict.fromkeys(names))
