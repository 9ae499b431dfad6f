"""A sweep as one page: index.html holds its style, script, tables and figures, and can be mailed as it is.

Nothing is fetched: no fonts, libraries or trackers. The template escapes every text of a configuration or a record.
Here is what it shows; templates/page.html says how.
"""

from __future__ import annotations

import base64
import io
import json
import time
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.cli.terminal import budget, duration, size
from pipelines.reporting import detectable, equal_memory, pareto, tables
from pipelines.reporting.figures import Picture
from pipelines.reporting.match import Comparison, headlines
from pipelines.results.deltas import Delta
from pipelines.results.sweep import Row, Sweep

if TYPE_CHECKING:
    from jinja2 import Template

LOG_LINES = 15
HALF = 1500  # pixels: a wider figure takes the whole width of the page
OPEN = 6  # so many tables of scores are open when the page opens; the rest is folded
LONG = 400  # rows: a longer table is folded
LARGE = 200_000  # bytes: larger tables are one compressed archive for download


@dataclass(frozen=True)
class Cell:
    """A cell of a table. v: the value to sort by ("" sorts last; None: the text). bold, code, small, log: its style."""

    text: str
    cls: str = ""
    v: Any = None
    head: bool = False
    bold: bool = False
    code: bool = False
    small: str = ""
    log: str = ""


@dataclass(frozen=True)
class Table:
    """A table: heads, rows of texts or cells; search: whether a field narrows its rows."""

    heads: list[Cell]
    rows: list[list[str | Cell]]
    cls: str = ""
    id: str = ""
    search: bool = False


def page(
    sweep: Sweep,
    compared: Sequence[Comparison],
    pictures: Sequence[tuple[Picture, Path]],
    more: Sequence[str],
    files: Mapping[str, str],
    made: str,
) -> str:
    """The whole page.

    pictures: the figures that were drawn, with the PNG of each, its PDF beside it where there is one.
    more: kinds of figures of which there are others. files: names and texts for download. made: when.
    """
    pivots = tables.pivots(sweep.rows)
    papers, others = _papers(compared), _others(sweep, compared)
    chain, rest = tables.named(sweep.differences), [d for d in sweep.differences if not d.name]
    tasks = _tasks(pivots)
    shared, differing = _configuration(sweep)
    states = Counter(row.state.partition(":")[0] for row in sweep.missing)
    return template("page.html").render(
        sweep=sweep,
        made=made,
        css=asset("page.css"),
        js=asset("page.js"),
        missing=len(sweep.missing),
        states=", ".join(f"{count} {state}" for state, count in states.items()),
        marked=tables.marked(sweep.rows),
        facts=_facts(sweep),
        sections=[
            ("scores", "Scores", True),
            ("pareto", "Score against bytes", sweep.fronts),
            ("papers", "Beside the papers", papers or others),
            ("figures", "Figures", pictures),
            ("differences", "Paired differences", sweep.differences),
            ("tasks", "Tasks", tasks),
            ("cells", "All cells", True),
            ("run", "What was run", True),
        ],
        open_tables=OPEN,
        long=LONG,
        pivots=[{**_pivot(p), "seen": p.detectable(sweep.differences)} for p in pivots],
        notes=tables.notes(sweep.rows),
        papers=papers,
        others=others,
        figures=[_figure(picture, path) for picture, path in pictures],
        more=more,
        differences=bool(sweep.differences),
        chain=_differences("ablations", chain, search=False) if chain else None,
        rest=_differences("deltas", rest, search=True) if rest else None,
        did=_plain("did", tables.DIAGNOSED_TITLES, tables.diagnosed(sweep)),
        equal=_plain("equal", equal_memory.TITLES, [x.line for x in equal_memory.equal_memory(sweep)]),
        fronts=[(f.title, f.answer, _plain("", pareto.TITLES, pareto.lines(f))) for f in sweep.fronts],
        tasks=tasks,
        cells=_cells(sweep),
        run=_run(sweep),
        files=_downloads(files),
        code=_code(sweep.results),
        failures=_failures(sweep),
        shared=shared,
        differing=differing,
        licences=tables.terms(sweep.rows),
    )


def asset(name: str) -> Any:
    """The text of a file of the templates, as it is."""
    from markupsafe import Markup

    return Markup(resources.files("pipelines.reporting").joinpath("templates", name).read_text(encoding="utf-8"))


@cache
def template(name: str) -> Template:
    """A template that escapes every text it is given."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("pipelines.reporting", "templates")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template(name)


def heads(texts: Iterable[str], numeric: int = 0) -> list[Cell]:
    """A table's heads; the last `numeric` stand right."""
    found = list(texts)
    return [Cell(x, "num" if i >= len(found) - numeric else "") for i, x in enumerate(found)]


def number(text: str, value: float | None, **look: Any) -> Cell:
    """A cell that sorts by a number; what is not there sorts last."""
    return Cell(text, "num", "" if value is None else f"{value:.8g}", **look)


# Parts


def _facts(sweep: Sweep) -> list[tuple[str, str]]:
    infeasible = sum(row.state.startswith("infeasible") for row in sweep.rows)
    results, created = sweep.results, str(sweep.manifest["created"])
    kept = [r["compression"] for r in results if r["compression"] and r["budget"]]
    return [
        (f"{len(sweep.done)} of {len(sweep.rows)}", "cells complete" + f", {infeasible} infeasible" * bool(infeasible)),
        (_few(row.info["model"] for row in sweep.rows), "model"),
        (_few(row.info["benchmark"] for row in sweep.rows), "benchmark"),
        (_range([r["n"] for r in results], "{:.0f}"), "examples per cell"),
        (_range(kept, "{:.1f}x"), "compression"),
        (created[:10], f"last run, {created[11:16]}"),
    ]


def _few(names: Iterable[str]) -> str:
    found = list(dict.fromkeys(names))
    return ", ".join(found) if len(found) <= 3 else f"{', '.join(found[:2])} and {len(found) - 2} more"


def _range(values: Sequence[float], form: str) -> str:
    if not values:
        return ""
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def _pivot(p: tables.Pivot) -> dict[str, Any]:
    done, unit = p.done, ""
    scale = _scale(done)
    reference = next((r.result["score"] for r in p.full if r.result is not None), None)
    if done:
        better = "" if done[0]["higher_is_better"] else ", lower is better"
        metric, ns = done[0]["metric"].replace("_", " "), _range([r["n"] for r in done], "{:.0f}")
        unit = f"{metric}, {done[0]['unit']}{better}; n = {ns}"
    best = [p.best(i) for i in range(len(p.budgets))]
    return {
        "title": p.title,
        "unit": unit,
        "heads": ["method", *([budget(b) for b in p.budgets] or ["score"])],
        "full": [(row.series, _score(row, scale, None, None)) for row in p.full],
        "lines": [
            (name, [_score(row, scale, reference, best[i]) for i, row in enumerate(line)]) for name, line in p.lines
        ],
    }


def _scale(done: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """The ends of a table's interval bars: 0 to 1 for fractions, else what the scores span."""
    if not done:
        return None
    if done[0]["unit"] == "fraction":
        return 0.0, 1.0
    ends = [r[k] for r in done for k in ("score", "score_low", "score_high") if r[k] is not None]
    return (min(ends), max(ends)) if max(ends) > min(ends) else None


def _score(
    row: Row | None, scale: tuple[float, float] | None, reference: float | None, best: float | None
) -> dict[str, Any] | None:
    if row is None:
        return None
    if (r := row.result) is None:
        return {"gone": row.state, "best": False}
    shown = {
        "gone": "",
        "score": f"{r['score']:.3f}",
        "interval": tables.bounds(r["score_low"], r["score_high"]),
        "held": f"{size(r['resident_bytes'])}, peak {size(r['resident_bytes_peak'])}"
        + ("" if row.is_full else f", {r['compression']:.1f}x"),
        "best": best is not None and r["score"] == best,
        "marks": tables.marks(row),
        "bar": scale is not None,
    }
    if scale is not None:
        first, last = scale

        def at(x: float) -> float:
            return 100 * min(max((x - first) / (last - first), 0), 1)

        low, high = (at(r["score"] if r[k] is None else r[k]) for k in ("score_low", "score_high"))
        shown |= {"low": f"{low:.1f}", "width": f"{high - low:.1f}", "at": f"{at(r['score']):.1f}"}
        shown |= {"tick": None if reference is None else f"{at(reference):.1f}"}
    return shown


def _papers(compared: Sequence[Comparison]) -> list[dict[str, Any]]:
    out, last = [], None
    for c in compared:
        names, body = tables.beside(c)
        classes = ["", *("num" if i % 2 else "num theirs" for i in range(1, len(names)))]
        rows: list[list[str | Cell]] = [
            [Cell(line[0], head=True), *(Cell(t, cls) for t, cls in zip(line[1:], classes[1:], strict=True))]
            for line in body
        ]
        title = "" if c.table is last else f"{c.table.paper} ({c.table.source}), {c.table.title}"
        last = c.table
        top = [Cell(text, cls) for text, cls in zip(names, classes, strict=True)]
        table = Table(top, rows, "beside")
        out.append({"title": title, "note": c.table.note, "caption": tables.caption(c), "table": table})
    return out


def _others(sweep: Sweep, compared: Sequence[Comparison]) -> Table | None:
    found: list[list[str | Cell]] = [
        [Cell(t.paper, head=True), t.title, Cell(str(t.headline), "theirs")] for t in headlines(sweep, compared)
    ]
    return Table([Cell("paper"), Cell("table"), Cell("published", "theirs")], found) if found else None


def _figure(picture: Picture, path: Path) -> dict[str, Any]:
    data, pdf = path.read_bytes(), path.with_suffix(".pdf")
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))  # a PNG's header
    return {
        "name": picture.name,
        "title": picture.title,
        "caption": picture.caption,
        "width": width // 2,
        "height": height // 2,
        "whole": width > HALF,
        "png": base64.b64encode(data).decode(),
        "pdf": base64.b64encode(pdf.read_bytes()).decode() if pdf.exists() else "",
    }


def _differences(id: str, found: Sequence[Delta], *, search: bool) -> Table:
    models = len({d.group[0] for d in found}) > 1
    rows: list[list[str | Cell]] = []
    for d in found:
        text = tables.described(d)
        nll = number(text[6], None if d.nll is None else d.nll.value)
        tested = [
            number(text[4], d.score.value, bold=d.p < 0.05),
            number(text[5], d.p),
            nll,
            number(text[7], detectable.smallest(d)),
            Cell(str(d.score.n), "num"),
        ]
        rows.append([*([d.group[0]] if models else []), *text[:4], *tested])
    return Table(heads((*(["model"] if models else []), *tables.DELTA_TITLES, "n"), 5), rows, "sort", id, search)


def _plain(id: str, titles: Sequence[str], lines: Sequence[Sequence[str]]) -> Table | None:
    """A table of texts; None where there are none."""
    return Table([Cell(t) for t in titles], [list(line) for line in lines], "", id) if lines else None


def _tasks(pivots: Sequence[tables.Pivot]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for i, p in enumerate(pivots):
        found = [(row, tables.parts(row.result)) for row in p.rows if row.result is not None]
        done = [(row, parts) for row, parts in found if len(parts) > 1]
        if not done:
            continue
        tasks = {t: x["n"] for _, parts in reversed(done) for t, x in parts.items()}
        rows: list[list[str | Cell]] = []
        for row, parts in done:
            line: list[str | Cell] = [row.series, row.columns[3]]
            for t in (parts.get(name) for name in tasks):
                interval = "" if t is None else tables.bounds(t["score_low"], t["score_high"])
                line.append(number("", None) if t is None else number(f"{t['score']:.3f}", t["score"], small=interval))
            rows.append(line)
        table = Table(heads(("method", "budget", *tasks), len(tasks)), rows, "sort", f"tasks-{i}")
        counts = "n: " + ", ".join(f"{name} {n}" for name, n in tasks.items())
        out.append({"title": p.title, "note": counts, "table": table})
    return out


def _cells(sweep: Sweep) -> Table:
    models = len({row.info["model"] for row in sweep.rows}) > 1
    names = ("score", "answer_nll", "eq1_bytes", "resident_bytes", "resident_bytes_peak", "full_bytes", "compression")
    rows: list[list[str | Cell]] = []
    for row in sweep.rows:
        text, r = tables.cells(row), row.result
        line: list[str | Cell] = [*([row.info["model"]] if models else []), *text[:4]]
        if r is None:
            line += [Cell(row.state, "gone", ""), *[number("", None)] * 8]
        else:
            values = [r[k] for k in (*names, "tokens_per_second")]
            line += [number(x, v) for v, x in zip(values, text[4:], strict=True)] + [Cell(str(r["n"]), "num")]
        rows.append(line)
    return Table(heads((*(["model"] if models else []), *tables.TITLES, "n"), 9), rows, "sort", "all-cells", True)


# What was run


def _run(sweep: Sweep) -> list[tuple[str, str]]:
    m, results = sweep.manifest, sweep.results
    seconds = sum(r["prefill_seconds"] + r["decode_seconds"] + r["timing"]["select_seconds"] for r in results)
    finished = sorted(str(r["finished"]) for r in results if r.get("finished"))
    again = sum(bool(r.get("rescored")) for r in results)
    endings: Counter[str] = Counter()
    for r in results:
        endings.update(r["finish_reasons"])
    parts = [
        ("command", m["command"]),
        ("last run of it", str(m["created"])),
        ("first cell started", _begun(sweep)),
        ("last cell finished", finished[-1] if finished else ""),
        (
            "computing",
            f"{duration(seconds)} in {len(results)} cells: shared prefills, selection and decoding, without loading and"
            " calibration",
        ),
        ("records", f"{sum(r['n_records'] for r in results)} of {sum(row.info['n_expected'] for row in sweep.rows)}"),
        ("truncated prompts", str(sum(r["truncated"] for r in results))),
        ("endings", ", ".join(f"{name} {n}" for name, n in endings.most_common())),
        ("scored again", f"{again} cells" if again else ""),
    ]
    return [(name, value) for name, value in parts if value]


def _downloads(files: Mapping[str, str]) -> list[tuple[str, str]]:
    """(name, data address) of each file, or of one archive where they are large together."""
    kinds = {"csv": "text/csv", "md": "text/markdown", "tex": "application/x-tex", "zip": "application/zip"}
    named = {name: text.encode() for name, text in files.items()}
    if sum(map(len, named.values())) > LARGE:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as z:
            for name, data in named.items():
                z.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        named = {"tables.zip": buffer.getvalue()}
    return [(x, f"data:{kinds[x.rpartition('.')[2]]};base64,{base64.b64encode(d).decode()}") for x, d in named.items()]


def _begun(sweep: Sweep) -> str:
    """When the first cell's folder was made; empty where there is none."""
    paths = [sweep.store.cell(row.key).folder / "payload.json" for row in sweep.rows]
    times = [p.stat().st_mtime for p in paths if p.exists()]
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(min(times))) if times else ""


def _code(results: Sequence[Mapping[str, Any]]) -> Table | None:
    """Versions, commits and machines, a line per combination."""
    groups = Counter(json.dumps([r["commit"], r["versions"], r.get("machine")], sort_keys=True) for r in results)
    rows: list[list[str | Cell]] = []
    for text, n in groups.items():
        commit, versions, machine = json.loads(text)
        where = "not recorded"
        if machine:
            gpus = ", ".join(machine["gpus"]) or "no GPU"
            where = f"{machine['host']}: {machine['processor']}, {machine['cores']} cores, {gpus}; {machine['system']}"
        rows.append([str(n), _short(commit), ", ".join(f"{k} {v}" for k, v in versions.items()), where])
    return Table(heads(("cells", "commit", "versions", "machine")), rows) if rows else None


def _short(commit: str | None) -> str:
    """Twelve digits name a commit; `-dirty` stays."""
    head, dash, dirty = (commit or "unknown").partition("-")
    return head[:12] + dash + dirty


def _failures(sweep: Sweep) -> Table | None:
    rows: list[list[str | Cell]] = []
    for row in sweep.rows:
        if row.result is None:
            log, tail = sweep.store.cell(row.key).folder / "log.txt", ""
            if log.exists():
                tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])
            rows.append([row.info["label"], Cell(row.key, code=True), Cell(row.state, log=tail)])
    return Table(heads(("cell", "key", "state")), rows) if rows else None


def _configuration(sweep: Sweep) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """What all cells share, and the values of what differs."""
    flat = [_flat(row.payload) for row in sweep.rows]
    shared, differing = [], []
    for name in dict.fromkeys(k for f in flat for k in f):
        values = Counter(json.dumps(f[name], ensure_ascii=False) if name in f else "-" for f in flat)
        if len(values) == 1:
            shared.append((name, next(iter(values))))
        else:
            more = f" and {len(values) - 12} more" if len(values) > 12 else ""
            differing.append((name, ", ".join(f"{v} ({n})" for v, n in values.most_common(12)) + more))
    return shared, differing


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for name, x in value.items() for k, v in _flat(x, f"{prefix}.{name}" if prefix else name).items()}
    return {prefix: value}
