"""A sweep as tables and figures read it: its cells, results, records, plans and artefacts, from files alone."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moend.errors import Blocked
from moend.version import ENGINE_VERSION, numbers_stand
from pipelines.cli.terminal import budget, question
from pipelines.planning.identity import differences, upgrade
from pipelines.results.deltas import Delta, Scored, deltas
from pipelines.store.cells import Store
from pipelines.store.files import read_json

if TYPE_CHECKING:
    from pipelines.results.pareto import Front

CALIBRATED = "calibrated"  # the state of a cell whose calibrations and plan were made, and nothing else
GONE = ("incomplete", "failed", "blocked")  # states that a rerun of the command may change


@dataclass(frozen=True)
class Row:
    """One cell of a sweep as a table shows it."""

    key: str
    info: dict[str, Any]
    payload: dict[str, Any]
    state: str  # done, or why there is no score
    result: dict[str, Any] | None
    variant: str = ""  # what sets it apart from cells that would look the same, but for
    own: str = ""  # fields of its method and its calibrations: they belong to the method's name

    @property
    def is_full(self) -> bool:
        """Whether the cell has no budget."""
        return self.payload["budget"] is None

    @property
    def columns(self) -> tuple[str, str, str, str]:
        """Benchmark, question mode, method and budget, as people read them."""
        protocol = " (paper)" if self.payload["budget_protocol"] == "paper" else ""
        asked = question(self.payload["question_visible"])
        return self.info["benchmark"], asked, self.info["method"], budget(self.payload["budget"]) + protocol

    @property
    def method(self) -> str:
        """The method as a table names it."""
        return self.info["method"] + (f" ({self.own})" if self.own else "")

    @property
    def apart(self) -> str:
        """All that sets it apart from cells that would look the same."""
        return ", ".join(x for x in (self.own, self.variant) if x)

    @property
    def series(self) -> str:
        """The method's name with all of that: cells of a series differ in their budgets only."""
        return self.info["method"] + (f" ({self.apart})" if self.apart else "")


def rows(store: Store, manifest: dict[str, Any]) -> list[Row]:
    """The cells of a sweep in its order, results where they are complete."""
    out = []
    doubt = functools.cache(functools.partial(_doubt, store))  # cells share artefacts
    for cell in manifest["cells"]:
        folder = store.cell(cell["key"])
        result = folder.result()
        doubts = [doubt(kind, key) for kind, key in cell["payload"]["calibrations"].items()]
        made = engine_of(cell["payload"])
        if result is not None and not numbers_stand(made, cell["payload"]["method"], cell["payload"]):
            state, result = f"superseded: made by engine {made}, this is {ENGINE_VERSION}; run its command again", None
        elif result is not None and _quantised(result) and (why := next(filter(None, doubts), None)):
            state, result = f"not tabled: {why}", None
        elif result is not None:
            state = "done"
        elif cell["state"] == CALIBRATED:
            state = f"{CALIBRATED} only: no question was asked"
        elif cell["state"] in ("infeasible", "blocked", "failed"):
            state = f"{cell['state']}: {cell['reason']}"
        else:
            state = f"incomplete: {len(folder.done())} of {cell['info']['n_expected']} records"
        out.append(Row(cell["key"], cell["info"], upgrade(cell["payload"]), state, result))
    return _variants(out)


def engine_of(payload: dict[str, Any]) -> int:
    """The version of the engine that a cell is of; payloads from before it was in the key are of the first."""
    return int(payload["facts"].get("engine", 1))


def _quantised(result: dict[str, Any]) -> bool:
    return bool(min(*result["k_bits"], *result["v_bits"]) < 16)


def _doubt(store: Store, name: str, key: str) -> str | None:
    """Why a cell gets no place in a table, by a calibration that vouches for those which use it."""
    from moend.calibration import Artefact, kind

    if not (this := kind(name)).vouches:
        return None
    folder = store.calibration(key)
    try:
        return this.doubt(Artefact.load(folder, kind=name))
    except Blocked:
        return f"its {name} calibration is not in the store ({folder}): run it again"


_OF_METHOD = ("method.", "calibrations.")
_HASHES = ("facts.benchmark.data", "calibrations.")  # follow from other fields, and are shown where none is another


def _variants(found: list[Row]) -> list[Row]:
    """Name what sets cells apart that would look the same in the table.

    A field of the method is a part of the method's name, `RippleKV (signal=local)`: such cells are compared with each
    other and with the other methods. Other fields (a seed, a length) keep cells apart.
    """
    alike: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        alike.setdefault((row.info["model"], *row.columns), []).append(row)
    out = []
    for row in found:
        others = [o for o in alike[row.info["model"], *row.columns] if o.key != row.key]
        apart = [{d.partition(":")[0] for d in differences(row.payload, o.payload)} for o in others]
        told = [{f for f in each if not f.startswith(_HASHES)} for each in apart]
        fields = set().union(*(told if all(told) else apart))
        values = {f: lookup(row.payload, f) for f in sorted(fields)}
        of_method = {f: v for f, v in values.items() if f.startswith(_OF_METHOD)}
        own, variant = _named(of_method), _named({f: v for f, v in values.items() if f not in of_method})
        out.append(Row(row.key, row.info, row.payload, row.state, row.result, variant, own))
    return out


def _named(values: dict[str, Any]) -> str:
    """Fields as people write them: without the part of a configuration that they belong to."""
    shown = {re.sub(r"^(facts|method(\.(scorer|allocator|params))?)\.", "", f): v for f, v in values.items()}
    return ", ".join(f"{f}={v}" for f, v in shown.items() if v is not None)


def lookup(payload: Any, path: str) -> Any:
    """A field of nested mappings by its dotted name, None where there is none."""
    for part in path.split("."):
        payload = payload.get(part) if isinstance(payload, dict) else None
    return payload


def compared(store: Store, found: Sequence[Row]) -> list[Delta]:
    """Paired differences of the complete cells."""
    return deltas(
        [
            Scored(
                group=(row.info["model"], *row.columns[:2], row.variant, row.columns[3]),
                method=row.info["method"],
                own=row.own,
                is_full=row.is_full,
                records=functools.partial(records, store, row),
                unit=row.info["unit"],
            )
            for row in found
            if row.result is not None
        ]
    )


def records(store: Store, row: Row) -> list[dict[str, Any]]:
    """A complete cell's records; where its scores were computed again, with those and not the first ones."""
    from pipelines.results import rescore

    found = store.cell(row.key).records()
    again = row.result is not None and row.result.get("rescored")
    return rescore.rescore({"payload": row.payload, "info": row.info}, found) if again else found


@dataclass(frozen=True)
class Sweep:
    """What figures and pages are made of. differences: those of `compared`, made once."""

    store: Store
    manifest: dict[str, Any]
    rows: list[Row]
    differences: Sequence[Delta]

    @property
    def name(self) -> str:
        """The sweep's name."""
        return str(self.manifest["name"])

    @property
    def done(self) -> list[Row]:
        """Cells that are complete: no others may be averaged or drawn."""
        return [row for row in self.rows if row.result is not None]

    @property
    def results(self) -> list[dict[str, Any]]:
        """Results of the complete cells."""
        return [row.result for row in self.rows if row.result is not None]

    @property
    def missing(self) -> list[Row]:
        """Cells that a rerun could still complete."""
        return [row for row in self.rows if row.state.startswith(GONE)]

    @functools.cached_property
    def fronts(self) -> list[Front]:
        """Score against bytes, a table each."""
        from pipelines.results.pareto import fronts

        return fronts(self)

    def records(self, row: Row) -> list[dict[str, Any]]:
        """A complete cell's records."""
        return records(self.store, row)

    def kept(self, row: Row) -> dict[str, Any] | None:
        """Where the kept entries of a cell's first example lie, layer by layer, if its records hold that."""
        for path in sorted((self.store.cell(row.key).folder / "records").glob("*-of-*.jsonl")):
            with path.open(encoding="utf-8") as lines:
                for line in lines:
                    if '"kept": {' not in line or '"by": "tokens"' in line:
                        continue
                    if found := json.loads(line).get("kept"):
                        return dict(found)
        return None

    def plan(self, row: Row) -> dict[str, Any] | None:
        """What each layer keeps in a cell, where its method has a plan."""
        path = self.store.cell(row.key).folder / "plan.json"
        if path.exists():
            return read_json(path)
        return next((c.get("plan") for c in self.manifest["cells"] if c["key"] == row.key), None)

    @property
    def measured(self) -> list[Row]:
        """Cells that are complete, and those of which only calibration and plan were asked for."""
        return [row for row in self.rows if row.result is not None or row.state.startswith(CALIBRATED)]

    def whole_layers(self, row: Row) -> tuple[float, float] | None:
        """Shares of a cell's layers that keep all: by its plan (keep = 1), and by its records (effective_keep = 1).

        None where no solver gave its layers their shares, or there is no result.
        """
        if row.result is None or (plan := self.plan(row)) is None or plan.get("solver", "none") == "none":
            return None
        planned = [x["keep"] == 1 for x in plan["layers"]]
        held = [x >= 1 - 1e-6 for x in row.result["entries_per_head"]["effective_keep"]]
        return sum(planned) / len(planned), sum(held) / len(held)

    def artefact(self, row: Row, kind: str) -> Path | None:
        """The folder of a calibration that a cell used, where it is there."""
        key = row.payload["calibrations"].get(kind)
        folder = self.store.calibration(key) if key else None
        return folder if folder is not None and (folder / "artefact.json").exists() else None

    def artefacts(self, kind: str) -> dict[str, tuple[Row, Path]]:
        """Distinct artefacts of a kind that complete or calibrated cells use, by key, with a cell of each."""
        found: dict[str, tuple[Row, Path]] = {}
        for row in self.measured:
            if (folder := self.artefact(row, kind)) is not None:
                found.setdefault(folder.name, (row, folder))
        return found
