"""What the papers print, as data: one YAML per paper, plain numbers with their table, unit and caveats, never ours.

A table holds blocks; a block is a rectangle of numbers with the fields that all of them share (`fixed`), one axis along
its columns and one along its rows:

    fixed: {benchmark: aime24, quantity: score, unit: points}
    columns: {budget: [64t, 128t]}
    rows: {method: {1d: [0.0, 0.0], 2d: [0.0, 10.0]}}

so that every number becomes a `Fact` with named fields. Budgets are canonical (`512t` tokens, `0.1r` of the cache, null
for full). `where` names fields of our configuration that a cell must have to be the same thing; `kv_heads` is how many
heads the paper's memory was computed with.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

Fields = dict[str, Any]


@dataclass(frozen=True)
class Fact:
    """One published number and what it is of: fields such as model, benchmark, method, budget, quantity, unit."""

    value: float
    fields: Fields


@dataclass(frozen=True)
class Block:
    """A rectangle of numbers: values[i][j] belongs to rows[i] and columns[j]."""

    fixed: Fields
    row_axis: str
    rows: tuple[Any, ...]
    column_axis: str
    columns: tuple[Any, ...]
    values: tuple[tuple[float, ...], ...]

    def fact(self, i: int, j: int) -> Fact:
        """The number in row i and column j, with all of its fields."""
        axes = {self.row_axis: self.rows[i], self.column_axis: self.columns[j]}
        return Fact(self.values[i][j], self.fixed | axes)

    def facts(self) -> Iterator[Fact]:
        """All numbers, row by row."""
        for i in range(len(self.rows)):
            for j in range(len(self.columns)):
                yield self.fact(i, j)


@dataclass(frozen=True)
class PublishedTable:
    """A table of a paper. headline: its numbers in a line, for reports of other models."""

    paper: str
    source: str
    id: str
    title: str
    note: str
    headline: str
    blocks: tuple[Block, ...]

    def facts(self) -> Iterator[Fact]:
        """All numbers of the table."""
        for block in self.blocks:
            yield from block.facts()


@functools.cache
def tables() -> tuple[PublishedTable, ...]:
    """Every table of every paper."""
    return tuple(table for _, document in sorted(_documents().items()) for table in _tables(document))


@functools.cache
def categories() -> dict[str, tuple[str, ...]]:
    """LongBench's task categories, as RippleKV averages over them."""
    return {name: tuple(tasks) for name, tasks in _documents()["ripplekv"]["categories"].items()}


@functools.cache
def _documents() -> dict[str, Any]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    files = [p for p in resources.files(__package__).iterdir() if p.name.endswith(".yaml")]
    return {p.name.removesuffix(".yaml"): yaml.load(p.read_text(encoding="utf-8"), loader) for p in files}


def _tables(document: Any) -> Iterator[PublishedTable]:
    for name, table in document["tables"].items():
        blocks = tuple(_block(table.get("fixed", {}), b, f"{document['paper']} {name}") for b in table["blocks"])
        yield PublishedTable(
            document["paper"],
            document["source"],
            name,
            table["title"],
            table["note"],
            table.get("headline", ""),
            blocks,
        )


def _block(shared: Fields, block: Any, where: str) -> Block:
    ((column_axis, columns),) = block["columns"].items()
    ((row_axis, rows),) = block["rows"].items()
    values = tuple(tuple(line) for line in rows.values())  # whole numbers stay whole: they are shown as printed
    if any(len(line) != len(columns) for line in values):
        raise ValueError(f"{where}: a row has not one number for each of {columns}")
    return Block(shared | block.get("fixed", {}), row_axis, tuple(rows), column_axis, tuple(columns), values)
