"""A sweep as one page: index.html holds its style, script, tables and figures, and can be mailed as it is.

Nothing is fetched: no fonts, libraries or trackers. Every text of a configuration or a record is escaped.
"""

from __future__ import annotations

import base64
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape as esc
from importlib import resources
from pathlib import Path
from typing import Any

from pipelines.cli.terminal import budget, duration, size
from pipelines.reporting import tables
from pipelines.reporting.figures import Picture
from pipelines.reporting.match import Comparison, headlines
from pipelines.results.deltas import Delta
from pipelines.results.sweep import Row, Sweep

LOG_LINES = 15
HALF = 1500  # pixels: a wider figure takes the whole width of the page


def page(
    sweep: Sweep,
    compared: Sequence[Comparison],
    pictures: Sequence[tuple[Picture, Path]],
    files: Mapping[str, str],
    made: str,
) -> str:
    """The whole page. pictures: with the PNG of each, its PDF beside it; files: names and texts for download."""
    pivots = tables.pivots(sweep.rows)
    sections = [
        ("scores", "Scores", _scores(sweep, pivots)),
        ("papers", "Beside the papers", _papers(sweep, compared)),
        ("figures", "Figures", _figures(pictures)),
        ("differences", "Paired differences", _differences(sweep)),
        ("tasks", "Tasks", _tasks(pivots)),
        ("cells", "All cells", _cells(sweep)),
        ("run", "What was run", _run(sweep, files)),
    ]
    sections = [s for s in sections if s[2]]
    links = "".join(tag("li", tag("a", title, href=f"#{id}")) for id, title, _ in sections)
    body = "".join(tag("section", tag("h2", title) + text, id=id) for id, title, text in sections)
    foot = f"Made {esc(made)} from the files of the sweep. Intervals are for 95 %: Wilson for shares, else a bootstrap."
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{esc(sweep.name)}</title>{tag("style", _asset("report.css"))}'
    )
    shown = [_header(sweep), tag("nav", tag("ul", links)), tag("main", body), tag("footer", foot), tag("dialog", "")]
    script = tag("script", _asset("report.js"))
    return f'<!doctype html>\n<html lang="en">{tag("head", head)}{tag("body", "".join(shown) + script)}</html>\n'


def _asset(name: str) -> str:
    return resources.files("pipelines.reporting").joinpath("assets", name).read_text(encoding="utf-8")


# HTML


def tag(name: str, inside: str, cls: str = "", **attributes: Any) -> str:
    """An element; `inside` is HTML. data_v becomes data-v; values are escaped, None leaves an attribute out."""
    said = {"class": cls or None, **{k.replace("_", "-"): v for k, v in attributes.items()}}
    text = "".join(f' {k}="{esc(str(v))}"' for k, v in said.items() if v is not None)
    return f"<{name}{text}>{inside}</{name}>"


def cell(text: Any, cls: str = "", **attributes: Any) -> str:
    """A table's cell that shows a text."""
    return tag("td", esc(str(text)), cls, **attributes)


def number(text: str, value: float | None) -> str:
    """A table's cell that sorts by a number; what is not there sorts last."""
    return cell(text, "num", data_v="" if value is None else value)


def note(text: str) -> str:
    """A paragraph in small letters."""
    return tag("p", esc(text), "note")


def grid(heads: Iterable[str], lines: Iterable[str], cls: str = "", **attributes: Any) -> str:
    """A table of <th> and <tr> elements that scrolls sideways where it is too wide."""
    whole = tag("thead", tag("tr", "".join(heads))) + tag("tbody", "".join(lines))
    return tag("div", tag("table", whole, cls, **attributes), "wide")


def head(text: str, cls: str = "") -> str:
    """A column's head."""
    return tag("th", esc(text), cls, scope="col")


def row_head(text: str) -> str:
    """A row's head."""
    return tag("th", esc(text), scope="row")


def sortable(id: str, heads: Sequence[str], lines: Iterable[str], numeric: int) -> str:
    """A table whose columns sort; the last `numeric` stand right."""
    first = len(heads) - numeric
    return grid((head(h, "num" if i >= first else "") for i, h in enumerate(heads)), lines, "sort", id=id)


def search(id: str, n: int) -> str:
    """A field that narrows the table of that id."""
    field = f'<input type="search" data-table="{id}" placeholder="words">'
    return tag(
        "div",
        tag("label", f"Narrow to rows with {field}") + tag("span", f"{n} of {n}", "soft", id=f"{id}-count"),
        "tools",
    )


def download(name: str, kind: str, data: bytes, shown: str) -> str:
    """A link to a file that the page itself holds."""
    return tag("a", esc(shown), download=name, href=f"data:{kind};base64,{base64.b64encode(data).decode()}")


# Parts


def _header(sweep: Sweep) -> str:
    n, done, missing, command = len(sweep.rows), len(sweep.done), sweep.missing, esc(sweep.manifest["command"])
    badge, banner = tag("span", "complete", "badge"), ""
    if missing:
        badge = tag("span", "partial", "badge partial")
        states = Counter(row.state.partition(":")[0] for row in missing)
        told = ", ".join(f"{count} {state}" for state, count in states.items())
        banner = tag(
            "div",
            f"<b>{len(missing)} of {n} cells are not complete</b> ({told}). They are shown as what they are; no mean, "
            f"difference or figure holds them. To go on: <code>{command}</code>",
            "banner",
        )
    infeasible = sum(row.state.startswith("infeasible") for row in sweep.rows)
    results, created = sweep.results, str(sweep.manifest["created"])
    facts = [
        (f"{done} of {n}", "cells complete" + (f", {infeasible} infeasible" if infeasible else "")),
        (_few(row.info["model"] for row in sweep.rows), "model"),
        (_few(row.info["benchmark"] for row in sweep.rows), "benchmark"),
        (_range([r["n"] for r in results], "{:.0f}"), "examples per cell"),
        (_range([r["compression"] for r in results if r["compression"] and r["budget"]], "{:.1f}x"), "compression"),
        (created[:10], f"last run, {created[11:16]}"),
    ]
    shown = "".join(tag("div", tag("b", esc(value)) + tag("span", label)) for value, label in facts if value)
    title = tag("h1", esc(sweep.name) + badge) + tag("code", command)
    return tag("header", tag("div", title + banner + tag("div", shown, "facts")))


def _few(names: Iterable[str]) -> str:
    found = list(dict.fromkeys(names))
    return ", ".join(found) if len(found) <= 3 else f"{', '.join(found[:2])} and {len(found) - 2} more"


def _range(values: Sequence[float], form: str) -> str:
    if not values:
        return ""
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def _scores(sweep: Sweep, pivots: Sequence[tables.Pivot]) -> str:
    legend = (
        "Score, its 95 % interval, and the bytes that the cache held after the prompt, with their compression. The bar "
        "shows the interval, the dark tick the full cache. Bold: the best of a column; whether two methods differ is "
        "tested under Paired differences."
    )
    said = "".join(note(x) for x in tables.notes(sweep.rows) if not x.startswith("*"))
    return note(legend) + "".join(_pivot(p) for p in pivots) + said


def _pivot(p: tables.Pivot) -> str:
    done = p.done
    scale = _scale(done)
    reference = next((r.result["score"] for r in p.full if r.result is not None), None)
    columns = [budget(b) for b in p.budgets] or ["score"]
    lines = [
        tag("tr", row_head(row.series) + tag("td", _score(row, scale, None), colspan=len(columns))) for row in p.full
    ]
    for name, line in p.lines:
        inside = ""
        for i, row in enumerate(line):
            best = row is not None and row.result is not None and row.result["score"] == p.best(i)
            inside += tag("td", _score(row, scale, reference), "best" if best else "")
        lines.append(tag("tr", row_head(name) + inside))
    unit = ""
    if done:
        better = "" if done[0]["higher_is_better"] else ", lower is better"
        metric, ns = done[0]["metric"].replace("_", " "), _range([r["n"] for r in done], "{:.0f}")
        unit = note(f"{metric}, {done[0]['unit']}{better}; n = {ns}")
    return tag("h3", esc(p.title)) + unit + grid(map(head, ["method", *columns]), lines, "pivot")


def _scale(done: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """The ends of a table's interval bars: 0 to 1 for fractions, else what the scores span."""
    if not done:
        return None
    if done[0]["unit"] == "fraction":
        return 0.0, 1.0
    ends = [r[k] for r in done for k in ("score", "score_low", "score_high") if r[k] is not None]
    return (min(ends), max(ends)) if max(ends) > min(ends) else None


def _score(row: Row | None, scale: tuple[float, float] | None, reference: float | None) -> str:
    if row is None:
        return tag("span", "not in this sweep", "soft")
    if (r := row.result) is None:
        return tag("span", esc(row.state), "gone small")
    held = size(r["resident_bytes"]) + ("" if row.is_full else f", {r['compression']:.1f}x")
    interval = tag("span", tables.bounds(r["score_low"], r["score_high"]), "soft")
    bar = "" if scale is None else _bar(r, scale, reference)
    score = tag("span", f"{r['score']:.3f}", "score")
    return f"{score} {interval}{bar}{tag('span', held, 'small')}"


def _bar(r: Mapping[str, Any], scale: tuple[float, float], reference: float | None) -> str:
    def at(x: float) -> float:
        return 100 * min(max((x - scale[0]) / (scale[1] - scale[0]), 0), 1)

    low, high = (at(r["score"] if r[k] is None else r[k]) for k in ("score_low", "score_high"))
    tick = "" if reference is None else tag("s", "", style=f"left:{at(reference):.1f}%")
    span = tag("i", "", style=f"left:{low:.1f}%;width:{high - low:.1f}%")
    return tag("span", tick + span + tag("b", "", style=f"left:{at(r['score']):.1f}%"), "bar", aria_hidden="true")


def _papers(sweep: Sweep, compared: Sequence[Comparison]) -> str:
    out = [note("Italic columns hold what the papers print, never mixed with ours.")] if compared else []
    last = None
    for c in compared:
        heads, body = tables.beside(c)
        shown = (head(text, ("num" if i % 2 else "num theirs") if i else "") for i, text in enumerate(heads))
        lines = (
            tag(
                "tr",
                row_head(x[0]) + "".join(cell(t, "num" + ("" if i % 2 else " theirs")) for i, t in enumerate(x) if i),
            )
            for x in body
        )
        if c.table is not last:
            out += [tag("h3", esc(f"{c.table.paper} ({c.table.source}), {c.table.title}")), note(c.table.note)]
        last = c.table
        out += [tag("h4", esc(tables.caption(c))), grid(shown, lines, "beside")]
    if others := headlines(sweep):
        rows = (tag("tr", row_head(t.paper) + cell(t.title) + cell(t.headline, "theirs")) for t in others)
        heads3 = (head("paper"), head("table"), head("published", "theirs"))
        why = "Published for methods of this sweep on other models and benchmarks: no numbers to set beside ours."
        out += [tag("h3", "For orientation"), note(why), grid(heads3, rows)]
    return "".join(out)


def _figures(pictures: Sequence[tuple[Picture, Path]]) -> str:
    out = []
    for picture, path in pictures:
        data, pdf = path.read_bytes(), path.with_suffix(".pdf")
        width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))  # a PNG's header
        source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        image = f'<img alt="{esc(picture.title)}" width="{width // 2}" height="{height // 2}" src="{source}">'
        links = tag("a", "PNG", "png", download=path.name) + download(
            pdf.name, "application/pdf", pdf.read_bytes(), "PDF"
        )
        caption = tag("figcaption", f"{esc(picture.caption)}<br>{tag('span', links, 'files')}")
        whole = "whole" if width > HALF else ""
        out.append(tag("figure", tag("h3", esc(picture.title)) + image + caption, whole, id=f"figure-{picture.name}"))
    return tag("div", "".join(out), "figures") if out else ""


def _differences(sweep: Sweep) -> str:
    if not sweep.differences:
        return ""
    out = note(
        "One method minus another on the same examples at the same budget, or against the full cache. p is McNemar's "
        "(one task of zeros and ones) or of sign flips, after Holm's correction over all "
        f"{len(sweep.differences)} differences of the sweep; bold: below 0.05."
    )
    if chain := tables.named(sweep.differences):
        out += tag("h3", "The ablation chain") + _delta_table("ablations", chain)
    if rest := [d for d in sweep.differences if not d.name]:
        inside = search("deltas", len(rest)) + _delta_table("deltas", rest)
        out += tag("details", tag("summary", f"All other pairs ({len(rest)})") + inside)
    return out


def _delta_table(id: str, found: Sequence[Delta]) -> str:
    models = len({d.group[0] for d in found}) > 1
    lines = []
    for d in found:
        text = tables.described(d)
        plain = "".join(map(cell, ([d.group[0]] if models else []) + text[:4]))
        score = tag("td", tag("b", text[4]) if d.p < 0.05 else text[4], "num", data_v=d.score.value)
        rest = number(text[5], d.p) + number(text[6], None if d.nll is None else d.nll.value)
        lines.append(tag("tr", plain + score + rest + cell(d.score.n, "num")))
    return sortable(id, (("model",) if models else ()) + (*tables.DELTA_TITLES, "n"), lines, numeric=4)


def _tasks(pivots: Sequence[tables.Pivot]) -> str:
    out: list[str] = []
    for i, p in enumerate(pivots):
        done = [(row, row.result) for row in p.rows if row.result is not None and len(row.result["tasks"]) > 1]
        if not done:
            continue
        tasks = {t: x["n"] for _, r in reversed(done) for t, x in r["tasks"].items()}
        lines = []
        for row, r in done:
            inside = cell(row.series) + cell(row.columns[3])
            for t in (r["tasks"].get(name) for name in tasks):
                if t is None:
                    inside += number("", None)
                else:
                    interval = tag("span", tables.bounds(t["score_low"], t["score_high"]), "small")
                    inside += tag("td", f"{t['score']:.3f}{interval}", "num", data_v=t["score"])
            lines.append(tag("tr", inside))
        out += [tag("h3", esc(p.title)), note("n: " + ", ".join(f"{name} {n}" for name, n in tasks.items()))]
        out.append(sortable(f"tasks-{i}", ("method", "budget", *tasks), lines, numeric=len(tasks)))
    return "".join(out)


def _cells(sweep: Sweep) -> str:
    models = len({row.info["model"] for row in sweep.rows}) > 1
    names = ("score", "answer_nll", "eq1_bytes", "resident_bytes", "resident_bytes_peak", "full_bytes", "compression")
    lines = []
    for row in sweep.rows:
        text, r = tables.cells(row), row.result
        inside = "".join(map(cell, ([row.info["model"]] if models else []) + text[:4]))
        if r is None:
            inside += cell(row.state, "gone", data_v="") + number("", None) * 8
        else:
            values = [r[k] for k in (*names, "tokens_per_second")]
            inside += "".join(number(x, v) for v, x in zip(values, text[4:], strict=True)) + cell(r["n"], "num")
        lines.append(tag("tr", inside))
    heads = (("model",) if models else ()) + (*tables.TITLES, "n")
    said = "".join(note(x) for x in tables.notes(sweep.rows) if x.startswith("*"))
    return search("all-cells", len(lines)) + sortable("all-cells", heads, lines, numeric=9) + said


# What was run


def _run(sweep: Sweep, files: Mapping[str, str]) -> str:
    m, results = sweep.manifest, sweep.results
    seconds = sum(r["prefill_seconds"] + r["decode_seconds"] + r["timing"]["select_seconds"] for r in results)
    finished = sorted(str(r["finished"]) for r in results if r.get("finished"))
    spent = (
        f"{duration(seconds)} in {len(results)} cells: shared prefills, selection, decoding; no loading, no calibration"
    )
    records = f"{sum(r['n_records'] for r in results)} of {sum(row.info['n_expected'] for row in sweep.rows)}"
    again = sum(bool(r.get("rescored")) for r in results)
    parts = [
        ("command", tag("code", esc(m["command"]))),
        ("last run of it", esc(str(m["created"]))),
        ("first cell begun", _begun(sweep)),
        ("last cell finished", esc(finished[-1]) if finished else ""),
        ("computing", spent),
        ("records in complete cells", records),
        ("truncated prompts", str(sum(r["truncated"] for r in results))),
        ("endings", esc(_counts(r["finish_reasons"] for r in results))),
        ("scored again", f"{again} cells" if again else ""),
    ]
    told = "".join(tag("dt", name) + tag("dd", value) for name, value in parts if value)
    kinds = {"csv": "text/csv", "md": "text/markdown", "tex": "application/x-tex"}
    links = "".join(download(x, kinds[x.rpartition(".")[2]], text.encode(), x) for x, text in files.items())
    tables_line = tag("p", f"Tables: {links}", "files")
    return tag("dl", told) + tables_line + _with(results) + _failures(sweep) + _configuration(sweep)


def _begun(sweep: Sweep) -> str:
    """When the first cell's folder was made; empty where there is none."""
    paths = [sweep.store.cell(row.key).folder / "payload.json" for row in sweep.rows]
    times = [p.stat().st_mtime for p in paths if p.exists()]
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(min(times))) if times else ""


def _counts(found: Iterable[Mapping[str, int]]) -> str:
    total: Counter[str] = Counter()
    for counts in found:
        total.update(counts)
    return ", ".join(f"{name} {n}" for name, n in total.most_common())


def _with(results: Sequence[Mapping[str, Any]]) -> str:
    """Versions, commits and machines, a line per combination."""
    groups = Counter(json.dumps([r["commit"], r["versions"], r.get("machine")], sort_keys=True) for r in results)
    lines = []
    for text, n in groups.items():
        commit, versions, machine = json.loads(text)
        where = "not recorded"
        if machine:
            gpus = ", ".join(machine["gpus"]) or "no GPU"
            where = f"{machine['host']}: {machine['processor']}, {machine['cores']} cores, {gpus}; {machine['system']}"
        packages = ", ".join(f"{k} {v}" for k, v in versions.items())
        lines.append(tag("tr", "".join(map(cell, (n, _short(commit), packages, where)))))
    heads = map(head, ("cells", "commit", "versions", "machine"))
    return tag("h3", "Code and machines") + grid(heads, lines) if lines else ""


def _short(commit: str | None) -> str:
    """Twelve digits name a commit; `-dirty` stays."""
    head, dash, dirty = (commit or "unknown").partition("-")
    return head[:12] + dash + dirty


def _failures(sweep: Sweep) -> str:
    found = [row for row in sweep.rows if row.result is None]
    if not found:
        return tag("h3", "Failures") + tag("p", "None: every cell is complete.")
    lines = []
    for row in found:
        log, tail = sweep.store.cell(row.key).folder / "log.txt", ""
        if log.exists():
            last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])
            tail = tag("details", tag("summary", "the end of its log") + tag("pre", esc(last)))
        key = tag("td", tag("code", row.key))
        lines.append(tag("tr", cell(row.info["label"]) + key + tag("td", esc(row.state) + tail)))
    return tag("h3", "Cells without a result") + grid(map(head, ("cell", "key", "state")), lines)


def _configuration(sweep: Sweep) -> str:
    """What all cells share, and the values of what differs."""
    flat = [_flat(row.payload) for row in sweep.rows]
    shared, differing = {}, {}
    for name in dict.fromkeys(k for f in flat for k in f):
        values = Counter(json.dumps(f[name], ensure_ascii=False) if name in f else "-" for f in flat)
        if len(values) == 1:
            shared[name] = next(iter(values))
        else:
            more = f" and {len(values) - 12} more" if len(values) > 12 else ""
            differing[name] = ", ".join(f"{v} ({n})" for v, n in values.most_common(12)) + more

    def listed(title: str, found: Mapping[str, str]) -> str:
        def code(text: str) -> str:
            return tag("code", esc(text))

        items = "".join(tag("dt", code(k)) + tag("dd", code(v)) for k, v in found.items())
        return tag("details", tag("summary", title) + tag("dl", items))

    differs = f"What differs between cells ({len(differing)} fields, in brackets the number of cells)"
    return (
        tag("h3", "Configuration")
        + listed(differs, differing)
        + listed(f"What all cells share ({len(shared)} fields)", shared)
    )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for name, x in value.items() for k, v in _flat(x, f"{prefix}.{name}" if prefix else name).items()}
    return {prefix: value}
