"""python -m pipelines.report sweep=<name|latest>: a sweep's table on the screen, as CSV and Markdown, and figures."""

from __future__ import annotations

import csv
import functools
import io
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moend.errors import UserError, unknown
from moend.statistics import Difference
from pipelines import results
from pipelines.compose import small
from pipelines.deltas import ABLATIONS, Delta, Scored, deltas
from pipelines.identity import differences
from pipelines.store import CorruptRecords, Store, read_json, write_atomic, write_json
from pipelines.terminal import budget, console, question, say, size

USAGE = """Tables and figures of a sweep, from its files alone.

  python -m pipelines.report [sweep=latest] [paths.store=outputs] [rescore=false]

  sweep        name of a sweep that was run, or latest
  paths.store  where it was run
  rescore      true: compute the scores again from the records, without model or network

Writes table.csv, deltas.csv (paired differences of all methods), table.md and figures to
<store>/reports/<sweep>/. Exit codes: 0 complete, 2 a mistake in the command, 3 some cells are incomplete."""


@dataclass(frozen=True)
class Row:
    """One cell of a sweep as a table shows it."""

    key: str
    info: dict[str, Any]
    payload: dict[str, Any]
    state: str  # done, or why there is no score
    result: dict[str, Any] | None
    variant: str = ""


def rows(store: Store, manifest: dict[str, Any]) -> list[Row]:
    """The cells of a sweep in its order, results where they are complete."""
    out = []
    for cell in manifest["cells"]:
        folder = store.cell(cell["key"])
        result = folder.result()
        if result is not None:
            state = "done"
        elif cell["state"] in ("infeasible", "blocked", "failed"):
            state = f"{cell['state']}: {cell['reason']}"
        else:
            state = f"incomplete: {len(folder.done())} of {cell['info']['n_expected']} records"
        out.append(Row(cell["key"], cell["info"], cell["payload"], state, result))
    return _variants(out)


def _variants(found: list[Row]) -> list[Row]:
    """Name what sets cells apart that would look the same in the table."""
    alike: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        alike.setdefault((row.info["model"], *_columns(row)), []).append(row)
    out = []
    for row in found:
        others = [o for o in alike[row.info["model"], *_columns(row)] if o.key != row.key]
        fields = {d.partition(":")[0] for o in others for d in differences(row.payload, o.payload)}
        values = {f: _lookup(row.payload, f) for f in sorted(fields)}
        named = ", ".join(f"{f}={v}" for f, v in values.items() if v is not None)
        out.append(Row(row.key, row.info, row.payload, row.state, row.result, named))
    return out


def _columns(row: Row) -> tuple[str, str, str, str]:
    protocol = " (paper)" if row.payload["budget_protocol"] == "paper" else ""
    asked = question(row.payload["question_visible"])
    return row.info["benchmark"], asked, row.info["method"], budget(row.payload["budget"]) + protocol


def _lookup(payload: Any, path: str) -> Any:
    for part in path.split("."):
        payload = payload.get(part) if isinstance(payload, dict) else None
    return payload


HEADER = (
    "model", "benchmark", "question", "method", "budget", "variant", "score", "low", "high", "metric", "answer_nll",
    "token_accuracy", "n", "samples", "extraction_rate", "eq1_bytes", "resident_bytes", "resident_bytes_peak",
    "full_bytes", "compression", "tokens_per_second", "fused", "key", "state",
)  # fmt: skip


DELTA_HEADER = (
    "model", "benchmark", "question", "variant", "budget", "method", "minus", "ablation", "score", "low", "high", "p",
    "p_holm", "test", "n", "answer_nll", "answer_nll_low", "answer_nll_high",
)  # fmt: skip


def _values(row: Row) -> list[Any]:
    names = HEADER[6:-2]
    renamed = {"low": "score_low", "high": "score_high"}
    values = [None] * len(names) if row.result is None else [row.result[renamed.get(n, n)] for n in names]
    return [row.info["model"], *_columns(row)[:4], row.variant, *values, row.key, row.state]


def _cells(row: Row) -> list[str]:
    """A row as people read it."""
    benchmark, asked, method, given = _columns(row)
    head = [benchmark, asked, method, given + (f" {row.variant}" if row.variant else "")]
    if (r := row.result) is None:
        return [*head, row.state, *[""] * 7]
    speed = "" if r["tokens_per_second"] is None else f"{r['tokens_per_second']:.1f}" + ("*" if r["fused"] else "")
    nll = "" if r["answer_nll"] is None else f"{r['answer_nll']:.3f}"
    return [
        *head,
        f"{r['score']:.3f} {_bounds(r)}",
        nll,
        size(r["eq1_bytes"]),
        size(r["resident_bytes"]),
        size(r["resident_bytes_peak"]),
        size(r["full_bytes"]),
        f"{r['compression']:.2f}x",
        speed,
    ]


def _bounds(result: dict[str, Any]) -> str:
    low, high = result["score_low"], result["score_high"]
    return "[no interval]" if low is None else f"[{low:.3f}, {high:.3f}]"


TITLES = (
    "benchmark", "question", "method", "budget", "score [95 % interval]", "answer NLL", "eq. 1", "resident", "peak",
    "full", "compression", "tokens/s",
)  # fmt: skip


def notes(found: Sequence[Row]) -> list[str]:
    """What a reader of the table must know."""
    done = [r.result for r in found if r.result]
    lines = []
    if any(r["fused"] and r["tokens_per_second"] for r in done):
        lines.append("* decoded together with other cells: a share, no speed of its own (engine.fuse=false gives that)")
    lower = sorted({str(r["benchmark"]) for r in done if not r["higher_is_better"]})
    if lower:
        lines.append(f"lower is better: {', '.join(lower)}")
    if done and len(done) == len(found) and not any(r["compressed"] for r in done):
        lines.append("nothing was dropped in this run: every prompt with its output fits the budget")
    if len({r["budget_protocol"] for r in done if r["budget_protocol"]}) > 1:
        lines.append("the table holds both budget protocols: rows marked (paper) use other bytes than matched rows")
    return lines


def show(store: Store, name: str, to: Console) -> list[Row]:
    """Print the table."""
    manifest = store.read_manifest(name)
    found = rows(store, manifest)
    models = sorted({r.info["model"] for r in found})
    for model in models:
        title = f"{manifest['name']}: {model}"
        table = Table(*TITLES, box=None, title=title, title_justify="left", header_style="bold")
        for i in range(5, len(TITLES)):
            table.columns[i].justify = "right"
        last = None
        for row in (r for r in found if r.info["model"] == model):
            cells = _cells(row)
            if last not in (None, cells[:2]):
                table.add_section()
            last = cells[:2]
            table.add_row(*cells)
        to.print(table)
    for line in notes(found):
        say(to, line)
    return found


def compared(store: Store, found: Sequence[Row]) -> list[Delta]:
    """Paired differences of the complete cells."""
    return deltas(
        [
            Scored(
                group=(row.info["model"], *_columns(row)[:2], row.variant, _columns(row)[3]),
                method=row.info["method"],
                is_full=row.payload["budget"] is None,
                records=functools.partial(_records, store, row),
            )
            for row in found
            if row.result is not None
        ]
    )


def _records(store: Store, row: Row) -> list[dict[str, Any]]:
    """A complete cell's records; where its scores were computed again, with those and not the first ones."""
    from pipelines import evaluate

    records = store.cell(row.key).records()
    again = row.result is not None and row.result.get("rescored")
    return evaluate.rescore({"payload": row.payload, "info": row.info}, records) if again else records


DELTA_TITLES = ("benchmark", "question", "budget", "difference", "score [95 % interval]", "p (Holm)", "answer NLL")


def ablations(found: Sequence[Delta]) -> list[list[str]]:
    """The differences that say which axis of routing matters, as people read them."""
    out = []
    order = {group: i for i, group in enumerate(dict.fromkeys(d.group for d in found))}
    for d in sorted(found, key=lambda d: (order[d.group], [*ABLATIONS.values()].index(d.name) if d.name else 0)):
        if d.name:
            benchmark, asked, variant, given = d.group[1:]
            nll = "" if d.nll is None else f"{d.nll.value:+.3f} {_span(d.nll)}"
            label = f"{d.name}: {d.method} - {d.other}"
            where = given + (f" {variant}" if variant else "")
            score = f"{d.score.value:+.3f} {_span(d.score)}"
            out.append([benchmark, asked, where, label, score, f"{d.p:.3g}", nll])
    return out


def _span(d: Difference) -> str:
    return "[no interval]" if d.low is None else f"[{d.low:+.3f}, {d.high:+.3f}]"


def show_deltas(found: Sequence[Delta], to: Console) -> None:
    """Print the ablations, where the sweep has any."""
    lines = ablations(found)
    if not lines:
        return
    table = Table(*DELTA_TITLES, box=None, title="paired differences", title_justify="left", header_style="bold")
    for i in (4, 5, 6):
        table.columns[i].justify = "right"
    for line in lines:
        table.add_row(*line)
    to.print(table)


def write(store: Store, name: str, differences: Sequence[Delta]) -> list[Path]:
    """Write table.csv, deltas.csv, table.md and figures; returns their paths."""
    manifest = store.read_manifest(name)
    found = rows(store, manifest)
    folder = store.report(manifest["name"])
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows(_values(row) for row in found)
    write_atomic(folder / "table.csv", buffer.getvalue())
    lines = [f"# {manifest['name']}", "", f"`{manifest['command']}`, {manifest['created']}", ""]
    lines += ["| " + " | ".join(("model", *TITLES)) + " |", "|" + "---|" * (len(TITLES) + 1)]
    lines += ["| " + " | ".join([row.info["model"], *_cells(row)]) + " |" for row in found]
    lines += ["", *(f"{n}\n" for n in notes(found))]
    if chain := ablations(differences):
        lines += ["## Paired differences", "", "| " + " | ".join(DELTA_TITLES) + " |", "|" + "---|" * len(DELTA_TITLES)]
        lines += ["| " + " | ".join(line) + " |" for line in chain]
    write_atomic(folder / "table.md", "\n".join(lines) + "\n")
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(DELTA_HEADER)
    for d in differences:
        of_nll = (None, None, None) if d.nll is None else (d.nll.value, d.nll.low, d.nll.high)
        tested = (d.score.value, d.score.low, d.score.high, d.score.p, d.p, d.score.test, d.score.n)
        writer.writerow((*d.group, d.method, d.other, d.name, *tested, *of_nll))
    write_atomic(folder / "deltas.csv", buffer.getvalue())
    made = [folder / name for name in ("table.csv", "deltas.csv", "table.md")]
    return [*made, *_figures(store, found, folder)]


def _figures(store: Store, found: Sequence[Row], folder: Path) -> list[Path]:
    from pipelines.figures import accuracy_memory, niah_heatmap, routing_map, sensitivity

    made = []
    done = [row for row in found if row.result is not None]
    if accuracy_memory.draw([row.result for row in done if row.result], folder / "accuracy_memory.png"):
        made.append(folder / "accuracy_memory.png")
    grids: dict[str, list[tuple[str, list[dict[str, Any]]]]] = {}
    for row in done:
        if row.result and (grid := row.result.get("grid")):
            benchmark, asked, method, given = _columns(row)
            name = f"{benchmark}_{row.info['model']}_{asked}"
            title = " ".join(x for x in (method, given if given != "-" else "", row.variant) if x)
            grids.setdefault(name, []).append((title, grid))
    for name, panels in grids.items():
        path = folder / f"{_safe(name)}.png"
        if niah_heatmap.draw(panels, path):
            made.append(path)
    plans: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for row in done:
        path = store.cell(row.key).folder / "plan.json"
        plan = read_json(path) if path.exists() else {}
        if len({str(x) for x in plan.get("layers", ())}) > 1:
            benchmark, asked, method, given = _columns(row)
            mode = "" if asked == "-" else f", question {asked}"
            title = f"{method} at {given}, {row.info['model']}, {benchmark}{mode}"
            seen = plans.setdefault(row.info["model"], [])
            if all(p["layers"] != plan["layers"] for _, p in seen):
                seen.append((title, plan))
    for model, pairs in plans.items():
        path = folder / f"routing_map_{_safe(model)}.png"
        if routing_map.draw(sorted(pairs, key=_sameness)[:6], path):
            made.append(path)
    for row in {r.payload["calibrations"].get("sensitivity"): r for r in done}.values():
        if key := row.payload["calibrations"].get("sensitivity"):
            path = folder / f"sensitivity_{_safe(row.info['model'])}_{key[:6]}.png"
            if (singles := read_singles(store.calibration(key))) is not None:
                values, operations = singles
                if sensitivity.draw(values, operations, f"sensitivity, {row.info['model']}", path):
                    made.append(path)
    return made


def read_singles(folder: Path) -> tuple[Any, list[str]] | None:
    """The single-axis operations of a sensitivity artefact: (layers, operations) and their names."""
    from pipelines import evaluate

    return evaluate.single_operations(folder) if (folder / "artefact.json").exists() else None


def _sameness(pair: tuple[str, dict[str, Any]]) -> int:
    """Plans that give layers different shares of tokens come first where there are more than a figure holds."""
    return -len({layer["keep"] for layer in pair[1]["layers"]})


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name)


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


def rescore(store: Store, manifest: dict[str, Any]) -> list[Rescored]:
    """Compute scores again from the records of complete cells, and rewrite the results that are others now.

    A rewritten result names under `rescored` the scorer version of the run and the one that counts now, when, and how
    many records changed. Incomplete cells stay as they are.
    """
    from pipelines import evaluate

    found = []
    for cell in manifest["cells"]:
        folder = store.cell(cell["key"])
        if (before := folder.result()) is None:
            continue
        records = folder.records()
        scored = evaluate.rescore(cell, records)
        kept = {k: before[k] for k in ("versions", "commit")}  # of the run that produced the records
        result = results.aggregate(cell, scored) | kept
        ran, now = result["scorer_version"], evaluate.scorer_version(cell)
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


def parse(argv: Sequence[str], defaults: dict[str, str]) -> dict[str, str]:
    """key=value arguments of the small programs; an unknown key is a UserError with the nearest."""
    values = dict(defaults)
    for arg in argv:
        name, equals, value = arg.partition("=")
        if name in defaults and not equals:
            raise UserError(f"{name} needs a value: {name}={defaults[name]}")
        if name not in defaults:
            raise unknown("argument", name, defaults)
        values[name] = value
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return small(argv, USAGE, _main)


def _main(args: list[str]) -> int:
    try:
        values = parse(
            args, {"sweep": "latest", "paths.store": os.environ.get("MOEND_STORE", "outputs"), "rescore": "false"}
        )
        if values["rescore"] not in ("true", "false"):
            raise UserError(f"rescore is true or false, got '{values['rescore']}'")
        store, to = Store(Path(values["paths.store"]).expanduser().absolute()), console()
        manifest = store.read_manifest(values["sweep"])
        if values["rescore"] == "true":
            again = rescore(store, manifest)
            say(to, f"scores computed again from the records: {len(again)} of {len(manifest['cells'])} results changed")
            for cell in again:
                say(to, f"  {cell}")
        found = show(store, manifest["name"], to)
        differences = compared(store, found)
        show_deltas(differences, to)
        for path in write(store, manifest["name"], differences):
            say(to, str(path))
        missing = [r for r in found if r.state.startswith(("incomplete", "failed", "blocked"))]
        if missing:
            say(to, f"{len(missing)} of {len(found)} cells are incomplete; to go on: {manifest['command']}")
        return 3 if missing else 0
    except CorruptRecords as e:
        print(f"error: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
