"""Our number for a published one, where a sweep has it: same model, benchmark, method, budget and protocol.

Ours and theirs are shown side by side and never mixed: nothing here averages, ranks or draws conclusions over both.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moend import statistics
from pipelines.cli.terminal import budget
from pipelines.reporting.published import Block, Fact, PublishedTable, categories, tables
from pipelines.results.deltas import ABLATIONS
from pipelines.results.sweep import Row, Sweep, lookup

MIB = 2**20


@dataclass(frozen=True)
class Ours:
    """Our number: value with interval and examples, or `state` where there is none yet."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    state: str = ""


@dataclass(frozen=True)
class Comparison:
    """A published block with ours: ours[i][j] stands beside block.values[i][j], None where the sweep has no such cell.

    halved: published[i][j] times this is what the paper's memory is at the model's own number of KV heads.
    """

    table: PublishedTable
    block: Block
    ours: tuple[tuple[Ours | None, ...], ...]
    halved: float | None


def comparisons(sweep: Sweep) -> list[Comparison]:
    """Every block of the papers of which the sweep has at least one number."""
    finder, out = _Finder(sweep), []
    for table in tables():
        for block in table.blocks:
            ours = tuple(
                tuple(finder.find(block.fact(i, j)) for j in range(len(block.columns))) for i in range(len(block.rows))
            )
            if any(x is not None for line in ours for x in line):
                out.append(Comparison(table, block, ours, finder.halved(block)))
    return out


def headlines(sweep: Sweep, compared: Sequence[Comparison]) -> list[PublishedTable]:
    """Published tables in a line, of papers whose methods the sweep ran on something else: not those compared."""
    ran = {row.info["method"] for row in sweep.rows} - {"full"}
    shown = {id(c.table) for c in compared}
    methods = {"MoE-nD": {"1d", "2d_uniform", "2d", "2d_hetero"}, "RippleKV": {"RippleKV"}, "MoEZip": {"MoEZip"}}
    return [t for t in tables() if t.headline and id(t) not in shown and ran & methods.get(t.paper, set())]


def label(axis: str, value: Any) -> str:
    """A value of an axis, as people read it."""
    if axis == "budget":
        return "full cache" if value is None else budget(value)
    if axis == "context":
        return f"{value // 1024}k"
    if axis == "question_visible":
        return "question visible" if value else "question unseen"
    return str(value).replace("_", " ") if axis in ("quantity", "over") else str(value)


class _Finder:
    def __init__(self, sweep: Sweep):
        self.sweep = sweep
        self.methods: dict[str, list[Row]] = {}
        for row in sweep.rows:
            self.methods.setdefault(row.info["method"], []).append(row)
        self.kinds: dict[str, Callable[[Fact], Ours | None]] = {
            "score": self._score,
            "memory": self._memory,
            "compression": self._memory,
            "layers that keep all": self._whole,
            "decode time ratio": self._ratio,
            "solve time": lambda fact: Ours(state="measured by python -m perf.solver") if self._ran(fact) else None,
            "difference": self._difference,
            "latency": self._speed,
            "throughput": self._speed,
            "peak memory": self._speed,
            "error": self._error,
            "min over layers": self._spread,
            "max over layers": self._spread,
            "max/min": self._spread,
            "damage": self._damage,
            "mean": self._ranks,
            "lowest": self._ranks,
            "highest": self._ranks,
            "mean Pearson": self._proxy,
            "mean Spearman": self._proxy,
            "layers above 0.8": self._proxy,
            "Pearson": self._proxy,
            "lowest Pearson": self._proxy,
            "highest Pearson": self._proxy,
        }

    def find(self, fact: Fact) -> Ours | None:
        """Ours for a published number; None where the sweep does not have it."""
        kind = self.kinds.get(fact.fields["quantity"])
        return None if kind is None else kind(fact)

    def halved(self, block: Block) -> float | None:
        if (heads := block.fixed.get("kv_heads")) is None:
            return None
        for row in self.sweep.rows:
            if row.info["model"] == block.fixed["model"] and (have := lookup(row.payload, "model.arch.kv_heads")):
                return None if have == heads else float(have / heads)
        return None

    def _cells(self, fields: dict[str, Any], *also: str) -> list[Row]:
        """Cells that agree with a fact in whatever of these it names."""
        out = []
        for row in self.methods.get(fields["method"], ()) if "method" in fields else self.sweep.rows:
            have = {
                "model": row.info["model"],
                "benchmark": row.info["benchmark"],
                "method": row.info["method"],
                "budget": row.payload["budget"],
                "protocol": row.payload["budget_protocol"] or fields.get("protocol"),
                "question_visible": row.payload["question_visible"],
            }
            if fields.get("benchmark") == "unstated":
                have["benchmark"] = "unstated"
            same = all(have[name] == fields[name] for name in have if name in fields)
            if same and all(lookup(row.payload, k) == v for k, v in fields.get("where", {}).items()):
                out.append(row)
        return out

    def _score(self, fact: Fact) -> Ours | None:
        fields = fact.fields
        found = self._cells(fields)
        tasks: Sequence[str] | None = None
        if (category := fields.get("category", "average")) != "average":
            tasks = categories()[category]
        elif (task := fields.get("task", "average")) != "average":
            tasks = [task]
        found = [r for r in found if tasks is None or set(tasks) <= set(r.info["metrics"])]
        if not found:
            return None
        if len(found) > 1:
            return Ours(state=f"{len(found)} cells: see the tables")
        return self._of_tasks(found[0], tasks)

    def _of_tasks(self, row: Row, tasks: Sequence[str] | None) -> Ours:
        r = row.result
        if r is None:
            return Ours(state=row.state)
        unit = 100 if r["unit"] == "fraction" else 1
        if tasks is None:
            return _scaled(unit, r["score"], r["score_low"], r["score_high"], r["n"])
        if len(tasks) == 1:
            t = r["tasks"][tasks[0]]
            return _scaled(unit, t["score"], t["score_low"], t["score_high"], t["n"])
        mine = statistics.summarise([x for x in self.sweep.records(row) if x["task"] in set(tasks)])
        return _scaled(unit, mine["score"], mine["low"], mine["high"], mine["n"])

    def _memory(self, fact: Fact) -> Ours | None:
        found = self._cells(fact.fields)
        if not found:
            return None
        r = found[0].result
        if r is None:
            return Ours(state=found[0].state)
        if fact.fields["quantity"] == "compression":
            return Ours(r["full_bytes"] / r["eq1_bytes"], n=r["n"]) if r["eq1_bytes"] else None
        return Ours(r["eq1_bytes"] / MIB, n=r["n"])

    def _ran(self, fact: Fact) -> bool:
        """Whether the sweep solved a plan of MoE-nD's for the model."""
        return any(self.sweep.plan(row) for row in self._cells({**fact.fields, "method": "2d_hetero"}))

    def _whole(self, fact: Fact) -> Ours | None:
        """Share of layers that keep every entry, by plan and by record: the least over the budgets of the sweep."""
        shares = [x for row in self._cells(fact.fields) if (x := self.sweep.whole_layers(row)) is not None]
        return Ours(100 * min(min(x) for x in shares)) if shares else None

    def _ratio(self, fact: Fact) -> Ours | None:
        """Decoding seconds per token of 2d_hetero over those of 2d_uniform, mean over budgets at equal bytes."""
        speeds: dict[str, dict[str, float]] = {}
        for method in ("2d_hetero", "2d_uniform"):
            for row in self._cells({**fact.fields, "method": method, "protocol": "matched"}):
                if row.result is not None and not row.result["fused"] and row.result["tokens_per_second"]:
                    speeds.setdefault(row.payload["budget"], {})[method] = row.result["tokens_per_second"]
        both = [x["2d_uniform"] / x["2d_hetero"] for x in speeds.values() if len(x) == 2]
        return Ours(sum(both) / len(both)) if both else None

    def _difference(self, fact: Fact) -> Ours | None:
        fields = fact.fields
        benchmarks = str(fields["benchmark"]).split(" and ")
        pair = next(k for k, v in ABLATIONS.items() if v == fields["ablation"])
        sides: list[dict[tuple[str, Any], Row]] = []
        for method in pair:
            mine = [self._cells({**fields, "benchmark": b, "method": method}) for b in benchmarks]
            sides.append({(r.info["benchmark"], r.payload["budget"]): r for cells in mine for r in cells})
        both = [k for k in sides[0] if k in sides[1]]
        if not both or {b for b, _ in both} != set(benchmarks):
            return None
        if waiting := [s[k] for k in both for s in sides if s[k].result is None]:
            return Ours(state=waiting[0].state)
        # several budgets are averaged within each example, so that examples stay the unit of the interval
        a, b = ([x for k in both for x in self.sweep.records(side[k])] for side in sides)
        d = statistics.compare(a, b)
        return _scaled(100, d.value, d.low, d.high, d.n)

    def _speed(self, fact: Fact) -> Ours | None:
        fields = fact.fields
        for row in self._cells({k: fields[k] for k in ("model", "method") if k in fields}):
            length = row.info["benchmark_config"].get("length")
            new = lookup(row.payload, "generation.max_new_tokens")
            if not length or not new or length + new != fields["context"]:
                continue
            if row.result is None:
                return Ours(state=row.state)
            r = row.result
            if r["fused"]:
                return Ours(state="decoded together with others: engine.fuse=false")
            if not r.get("timed"):
                return Ours(state="not timed: engine.timed=true")
            if fields["quantity"] == "peak memory":
                peak = r.get("device_peak_bytes")
                return Ours(peak / 2**30, n=r["n"]) if peak else Ours(state="no GPU")
            if fields["quantity"] == "throughput":
                return Ours(r["tokens_per_second"], n=r["n"])
            seconds = r["prefill_seconds"] + r["timing"]["select_seconds"] + r["decode_seconds"]
            return Ours(seconds / r["n_records"], n=r["n"])
        return None

    @functools.cache  # noqa: B019 - lives as long as one report
    def _singles(self, model: str) -> tuple[Any, list[str]] | None:
        for row, folder in self.sweep.artefacts("sensitivity").values():
            if row.info["model"] == model:
                from moend.calibration import figure  # takes torch along

                found = figure(folder, "sensitivity")
                return found["singles"], found["operations"]
        return None

    def _error(self, fact: Fact) -> Ours | None:
        singles = self._singles(fact.fields["model"])
        if singles is None or fact.fields["operation"] not in singles[1]:
            return None
        return Ours(float(singles[0][fact.fields["layer"], singles[1].index(fact.fields["operation"])]))

    def _spread(self, fact: Fact) -> Ours | None:
        singles = self._singles(fact.fields["model"])
        if singles is None or fact.fields["operation"] not in singles[1]:
            return None
        column = np.asarray(singles[0])[:, singles[1].index(fact.fields["operation"])]
        low, high = float(column.min()), float(column.max())
        kinds = {"min over layers": low, "max over layers": high, "max/min": high / low if low > 0 else None}
        return Ours(kinds[fact.fields["quantity"]])

    @functools.cache  # noqa: B019
    def _profiles(self) -> list[tuple[Row, dict[str, Any]]]:
        from moend.calibration import figure

        return [(row, figure(f, "ripple")) for row, f in self.sweep.artefacts("ripple").values()]

    def _ranks(self, fact: Fact) -> Ours | None:
        """Over the models of the sweep, at the share that the fact names alone: shares are never pooled."""
        name = {"layer index": "depth", "output response": "output"}[fact.fields["signal"]]
        said = [p["info"]["damage"].get(f"{fact.fields['keep']:g}") for _, p in self._profiles()]
        values = [x[name]["value"] for x in said if x is not None and x[name]["value"] is not None]
        if not values:
            return None
        kinds = {"mean": sum(values) / len(values), "lowest": min(values), "highest": max(values)}
        return Ours(kinds[fact.fields["quantity"]])

    def _damage(self, fact: Fact) -> Ours | None:
        for row, profile in self._profiles():
            if row.info["model"] == fact.fields["model"] and profile["damage"]:
                if (measured := profile["damage"].get(fact.fields["keep"])) is None:
                    continue
                layers = measured.mean(0)
                return Ours(float(layers.min() if fact.fields["over"] == "smallest layer" else layers.max()))
        return None

    @functools.cache  # noqa: B019
    def _agreement(self, model: str, which: str) -> dict[str, Any] | None:
        from moend.calibration import Artefact
        from moend.calibration.kl import against_proxy

        found: dict[str, Artefact] = {}
        for kind in ("sensitivity", "kl"):
            for row, folder in self.sweep.artefacts(kind).values():
                if row.info["model"] == model:
                    found.setdefault(kind, Artefact.load(folder, kind=kind))
        return against_proxy(found["sensitivity"], found["kl"], which) if len(found) == 2 else None

    def _proxy(self, fact: Fact) -> Ours | None:
        found = self._agreement(fact.fields["model"], fact.fields.get("configurations", "all"))
        if found is None:
            return None
        if (among := fact.fields.get("among")) is not None:
            values = [r["pearson"] for n, r in found["per_config"].items() if _is_among(n, among)]
            known = [v for v in values if v is not None]
            kinds = {"lowest Pearson": min(known), "highest Pearson": max(known)} if known else {}
            return Ours((kinds | {"mean Pearson": sum(known) / len(known)})[fact.fields["quantity"]]) if known else None
        if (operation := fact.fields.get("operation")) is not None:
            return Ours((found["per_config"].get(operation) or {}).get("pearson"))
        mean = {f"mean {k.capitalize()}": v for k, v in found["mean"].items()}
        return Ours((mean | {"layers above 0.8": found["above_0.8"]})[fact.fields["quantity"]])


def _is_among(configuration: str, among: str) -> bool:
    """Whether a configuration only evicts, or only quantises V."""
    if among == "eviction":
        return re.fullmatch(r"keep_[\d.]+", configuration) is not None
    return re.fullmatch(r"v\d+", configuration) is not None


def _scaled(unit: float, value: float, low: float | None, high: float | None, n: int) -> Ours:
    if low is None or high is None:
        return Ours(value * unit, n=n)
    return Ours(value * unit, low * unit, high * unit, n)
