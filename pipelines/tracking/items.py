"""What there is to publish of a store: its finished cells and reports, each with what its W&B run is made from."""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipelines.planning.identity import key as hash_of
from pipelines.planning.schema import sweeps as sweep_files
from pipelines.store.cells import Store
from pipelines.store.files import read_json

FORM = 1  # of what is written; another number publishes every cell again
TAG = 64  # the longest tag W&B takes
Kind = Literal["cell", "report"]


@dataclass(frozen=True)
class Item:
    """What becomes a run: a finished cell, or the tables and figures of a sweep. `name` is the key or the sweep."""

    kind: Kind
    name: str

    @property
    def id(self) -> str:
        """The run's id: the same for the same item, always."""
        if self.kind == "cell":
            return self.name
        plain = re.fullmatch(r"[\w.-]{1,100}", self.name, re.ASCII)
        return f"report-{self.name if plain else hash_of(self.name)}"


def items(store: Store, sweep: str) -> list[Item]:
    """What there is to publish of a sweep: its complete cells, and its report where it has one."""
    keys = dict.fromkeys(c["key"] for c in store.read_manifest(sweep)["cells"])
    cells = [Item("cell", key) for key in keys if (store.cell(key).folder / "result.json").exists()]
    return [*cells, *([Item("report", sweep)] if report_files(store, sweep) else [])]


def report_files(store: Store, sweep: str) -> list[Path]:
    """The tables and pictures of a sweep that are published. Not its pages: they name the command and its paths."""
    folder = store.report(sweep)
    return [*sorted(folder.glob("*.csv")), *sorted(folder.glob("*.png"))]


@dataclass(frozen=True)
class Source:
    """What an item is made from, as far as publishing again depends on it."""

    item: Item
    project: str
    entity: str | None
    group: str
    tags: tuple[str, ...]
    digest: str


def source(store: Store, item: Item, sweep: str, project: str, entity: str | None) -> Source | None:
    """What would be published of an item now; None where its files are not there.

    Project and entity count: wandb writes them into artifacts, where its upload program does not replace them.
    """
    if item.kind == "cell":
        path = store.cell(item.name).folder / "result.json"
        files = [path] if path.exists() else []
        sweeps = [s for s, keys in _membership(store).items() if item.name in keys]
    else:
        files, sweeps = report_files(store, item.name), [item.name]
    if not files:
        return None
    have = published(store, item)
    group = have["group"] if have and have["group"] in sweeps else sweep
    names = sorted({sweep, *sweeps})
    tags = tuple(dict.fromkeys(t[:TAG] for t in [*(f"sweep:{s}" for s in names), *(t for s in names for t in _of(s))]))
    contents = [hashlib.sha256(f.read_bytes()).hexdigest() for f in files]
    digest = hash_of([FORM, item.id, project, entity, group, list(tags), contents])
    return Source(item, project, entity, group, tags, digest)


def _of(sweep: str) -> list[str]:
    """The tags of the published table and the paper a sweep belongs to, also with an axis replaced (<name>-<8 hex>)."""
    table = re.sub(r"-[0-9a-f]{6,8}$", "", sweep)
    paper, underscore, _ = table.partition("_")
    return [f"table:{table}", f"paper:{paper}"] if underscore and table in sweep_files() else []


def _membership(store: Store) -> dict[str, frozenset[str]]:
    """The keys of each sweep of the store."""
    found = ((name, store.manifest(name)) for name in store.sweep_names())
    return {name: _keys(path, path.stat().st_mtime_ns) for name, path in found}


@functools.lru_cache(maxsize=1024)
def _keys(manifest: Path, _changed: int) -> frozenset[str]:
    return frozenset(c["key"] for c in read_json(manifest)["cells"])


def published(store: Store, item: Item) -> dict[str, Any] | None:
    """What lies in the tracker's folder for an item; None where nothing whole does."""
    path = store.root / "wandb" / "published" / f"{item.id}.json"
    if not path.exists():
        return None
    have = read_json(path)
    return (
        have if (store.root / "wandb" / "wandb" / have["folder"]).is_dir() and have["root"] == str(store.root) else None
    )
