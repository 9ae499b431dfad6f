"""Scores computed again from records, without a model."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moend.errors import Blocked, UserError
from pipelines.results.aggregate import aggregate
from pipelines.store.cells import Store
from pipelines.store.files import write_json

if TYPE_CHECKING:
    from moend.benchmarks import Benchmark, Sample


@functools.lru_cache(maxsize=64)
def _benchmark(text: str, reasoning: bool) -> Benchmark:
    from moend.benchmarks import benchmark

    return benchmark(json.loads(text), reasoning=reasoning)


@functools.lru_cache(maxsize=64)
def _identity(bench: Benchmark) -> dict[str, Any]:
    return bench.identity()


def scorer_version(cell: dict[str, Any]) -> int:
    """The version of the scorer that `rescore` uses for a cell."""
    from moend.benchmarks import implementation

    return implementation(cell["info"]["benchmark_config"]["type"]).scorer_version


def rescore(cell: dict[str, Any], records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records with their scores computed again from what they hold, without model, data or network.

    Where the data are here, UserError if they are not those that the records answer (the same id may stand for another
    question now) or if a record belongs to another cell.
    """
    generation = cell["payload"].get("generation") or {}  # a likelihood has none
    bench = _benchmark(json.dumps(cell["info"]["benchmark_config"]), bool(generation.get("reasoning")))
    if bench.kind == "nll":
        return list(records)
    _refuse_foreign(bench, cell, records)
    samples = {(r["task"], r["id"]): _recorded(r, cell["info"]["label"]) for r in records}
    return [
        r
        | bench.score(
            samples[r["task"], r["id"]],
            r["text"],
            finished=r["finish_reason"] != "length",
            opened=r.get("thinking", False),  # records from before this field have no reasoning protocol either
        )
        for r in records
    ]


def _refuse_foreign(bench: Benchmark, cell: dict[str, Any], records: Sequence[dict[str, Any]]) -> None:
    label = cell["info"]["label"]
    try:
        with _offline():
            known = {(s.task, s.id) for s in bench.samples()}
            need, have = cell["payload"]["facts"]["benchmark"]["data"], _identity(bench)["data"]
    except Blocked:
        return  # the data are not here: the records' own gold answers stand
    if have != need:
        raise UserError(f"the data of {bench.name} changed since {label} was run: has {have}, needs {need}")
    if foreign := [r for r in records if (r["task"], r["id"]) not in known]:
        raise UserError(
            f"{len(foreign)} of {len(records)} records of {label} are not of this cell, the first is"
            f" {foreign[0]['task']} {foreign[0]['id']}: its records folder holds another cell's files"
        )


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Data that are not here are not fetched."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        os.environ.pop("HF_HUB_OFFLINE")
        if before is not None:
            os.environ["HF_HUB_OFFLINE"] = before


def _recorded(record: dict[str, Any], label: str) -> Sample:
    """The part of a sample that scoring reads, as its record keeps it."""
    from moend.benchmarks import Sample

    try:
        gold = tuple(record["gold"])
        return Sample(record["task"], record["id"], "", "", "", gold, dict(record["scored_meta"]))
    except KeyError as e:
        raise UserError(
            f"the record {record['task']} {record['id']} of {label} has no {e}: it was written before records held all"
            " that scoring needs; run the cell again"
        ) from None


@dataclass(frozen=True)
class Rescored:
    """What scoring a cell's records again has changed: records of another score, and the cell's score."""

    label: str
    records: int
    changed: int
    before: dict[str, Any]
    after: dict[str, Any]

    def __str__(self) -> str:
        was, now = self.before.get("scorer_version"), self.after["scorer_version"]
        version = f"scorer version {was}" + (f" -> {now}" if was != now else "")
        score = f"{self.before['score']:.3f} -> {self.after['score']:.3f}"
        return f"{self.label}: {self.changed} of {self.records} records changed, score {score}, {version}"


def rescore_sweep(store: Store, manifest: dict[str, Any]) -> list[Rescored]:
    """Compute scores again from the records of complete cells, and rewrite the results that are others now.

    A rewritten result names under `rescored` the scorer version of the run and the one that counts now, when, and how
    many records changed. Incomplete cells stay as they are.
    """
    found = []
    for cell in manifest["cells"]:
        folder = store.cell(cell["key"])
        if (before := folder.result()) is None:
            continue
        records = folder.records()
        scored = rescore(cell, records)
        # of the run that produced the records
        kept = {
            k: before[k] for k in ("versions", "commit", "machine", "finished", "source", "repeated") if k in before
        }
        result = aggregate(cell, scored) | kept
        ran, now = result["scorer_version"], scorer_version(cell)
        changed = sum(new["score"] != old["score"] for new, old in zip(scored, records, strict=True))
        if scored != records or now != ran:
            mark = {"from": ran, "to": now, "changed": changed}
            last = before.get("rescored") or {}
            same = {k: last.get(k) for k in mark} == mark
            when = last["when"] if same else time.strftime("%Y-%m-%dT%H:%M:%S%z")
            result |= {"scorer_version": now, "rescored": {**mark, "when": when}}
        if result != before:
            write_json(folder.folder / "result.json", result)
            found.append(Rescored(cell["info"]["label"], len(records), changed, before, result))
    return found
