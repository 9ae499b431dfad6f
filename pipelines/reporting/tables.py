"""A sweep's tables for every reader: CSV for programs, Markdown and LaTeX for papers, the same numbers in each.

A score stands with its interval; an incomplete cell stands as what it is, and enters no mean and no difference.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moend.errors import UserError
from moend.statistics import Difference
from pipelines.cli.terminal import size
from pipelines.reporting import detectable, equal_memory
from pipelines.reporting.match import Comparison, Ours, label
from pipelines.results.deltas import ABLATIONS, Delta
from pipelines.results.sweep import Row, Sweep

HEADER = (
    "model", "benchmark", "question", "method", "budget", "variant", "score", "low", "high", "metric", "answer_nll",
    "token_accuracy", "n", "samples", "extraction_rate", "eq1_bytes", "resident_bytes", "resident_bytes_peak",
    "full_bytes", "compression", "tokens_per_second", "fused", "mixed", "key", "state",
)  # fmt: skip
TASK_HEADER = (
    "model", "benchmark", "question", "method", "budget", "variant", "task", "metric", "score", "low", "high", "n",
    "key",
)  # fmt: skip
DELTA_HEADER = (
    "model", "benchmark", "question", "variant", "budget", "method", "minus", "ablation", "score", "low", "high", "p",
    "p_holm", "test", "n", "answer_nll", "answer_nll_low", "answer_nll_high", "se", "smallest",
)  # fmt: skip
TITLES = (
    "benchmark", "question", "method", "budget", "score [95 % interval]", "answer NLL", "eq. 1", "after prompt", "peak",
    "full", "compression", "tokens/s",
)  # fmt: skip
DIAGNOSED_TITLES = (
    "benchmark", "question", "method", "budget", "Gamma", "anchors", "replaced", "routing flips",
    "repeated by", "keep all: plan, record", "layers",
)  # fmt: skip
DELTA_TITLES = (
    "benchmark", "question", "budget", "difference", "score [95 % interval]", "p (Holm)", "answer NLL", "seen at 80 %",
)  # fmt: skip


# One line per cell


def values(row: Row) -> list[Any]:
    """A cell's line of table.csv."""
    names = HEADER[6:-3]
    renamed = {"low": "score_low", "high": "score_high"}
    found = [None] * len(names) if row.result is None else [row.result[renamed.get(n, n)] for n in names]
    found.append("; ".join(marks(row)))
    return [row.info["model"], *row.columns, row.apart, *found, row.key, row.state]


def cells(row: Row) -> list[str]:
    """A cell's line as people read it."""
    benchmark, asked, _, given = row.columns
    head = [benchmark, asked, row.method, given + (f" {row.variant}" if row.variant else "")]
    if (r := row.result) is None:
        return [*head, row.state, *[""] * 7]
    speed = "" if r["tokens_per_second"] is None else f"{r['tokens_per_second']:.1f}" + ("*" if r["fused"] else "")
    nll = "" if r["answer_nll"] is None else f"{r['answer_nll']:.3f}"
    return [
        *head,
        " ".join([f"{r['score']:.3f} {bounds(r['score_low'], r['score_high'])}", *remarks(r), *_short(row)]),
        nll,
        size(r["eq1_bytes"]),
        size(r["resident_bytes"]),
        size(r["resident_bytes_peak"]),
        size(r["full_bytes"]),
        f"{r['compression']:.2f}x",
        speed,
    ]


def _short(row: Row) -> list[str]:
    return [f"({m.partition(':')[0]})" for m in marks(row)]


def remarks(result: dict[str, Any]) -> list[str]:
    """What a method says of a cell that its name does not promise: `anchors only`, in how many of the records."""
    notes = (result.get("diagnostics") or {}).get("notes", {})
    every = result["n_records"]
    return [note if count == every else f"{note} in {count} of {every}" for note, count in notes.items()]


def bounds(low: float | None, high: float | None, form: str = ".3f") -> str:
    """An interval as people read it."""
    return "[no interval]" if low is None or high is None else f"[{low:{form}}, {high:{form}}]"


def notes(found: Sequence[Row]) -> list[str]:
    """What a reader of the table must know."""
    done = [r.result for r in found if r.result]
    lines = []
    if any(r["fused"] and r["tokens_per_second"] for r in done):
        lines.append("* decoded together with other cells: a share, no speed of its own (engine.fuse=false gives that)")
    lower = sorted({str(r["benchmark"]) for r in done if not r["higher_is_better"]})
    if lower:
        lines.append(f"lower is better: {', '.join(lower)}")
    if told := marked(found):
        lines.append(told)
    if done and len(done) == len(found) and not any(r["compressed"] for r in done):
        lines.append("nothing was dropped in this run: every prompt with its output fits the budget")
    if len({r["budget_protocol"] for r in done if r["budget_protocol"]}) > 1:
        lines.append("the table holds both budget protocols: rows marked (paper) use other bytes than matched rows")
    return lines


def marks(row: Row) -> list[str]:
    """What sets a complete cell's making apart: in what its records differ (device, dtype, kernel, commit)."""
    mixed = (row.result or {}).get("mixed")
    return ["mixed: " + "; ".join(mixed)] if mixed else []


def marked(found: Sequence[Row]) -> str:
    """How many cells are mixed or superseded, in a sentence each; empty where none is."""
    mixed, old = sum(map(bool, map(marks, found))), sum(row.state.startswith("superseded") for row in found)
    why = "their records come from several devices, number formats, kernels or commits"
    told = [f"{mixed} of {len(found)} cells are mixed: {why}."] * bool(mixed)
    told += [f"{old} of {len(found)} cells are superseded: this code gives other numbers."] * bool(old)
    return " ".join(told)


_DIAGNOSED = {"gamma": 2, "anchors": 0, "replaced": 3, "routing_flips": 3, "repeated_by": 0}


def diagnosed(sweep: Sweep) -> list[list[str]]:
    """What methods did beyond their bytes, mean over the examples, as people read it; one line per cell that says any.

    keep all: shares of layers, see `Sweep.whole_layers` (MoE-nD section 5.5: more than 75 % where it has no advantage).
    layers: where heads hold different numbers of entries, the least and the most that a layer keeps of its own.
    """
    out = []
    for row in sweep.rows:
        said = (row.result or {}).get("diagnostics") or {}
        whole = sweep.whole_layers(row)
        if row.result is None or not (set(said) - {"notes"} or whole):
            continue
        benchmark, asked, _, given = row.columns
        values = [f"{said[k]:.{digits}f}" if k in said else "" for k, digits in _DIAGNOSED.items()]
        values.append("" if whole is None else f"{whole[0]:.0%}, {whole[1]:.0%}")
        layers = ""
        if "head_tokens" in said:
            kept = row.result["entries_per_head"]["effective_keep"]
            least, most = kept.index(min(kept)), kept.index(max(kept))
            layers = f"{kept[least]:.0%} of layer {least} to {kept[most]:.0%} of layer {most}"
        out.append([benchmark, asked, row.method, given + (f" {row.variant}" if row.variant else ""), *values, layers])
    return out


# Methods by budgets, as papers print them


@dataclass(frozen=True)
class Pivot:
    """Methods down, budgets across, for one model, benchmark, question mode and protocol. A cell without a row is None.

    full: the cells without a budget, which stand for every column.
    """

    model: str
    benchmark: str
    asked: str
    protocol: str | None
    budgets: tuple[str, ...]
    full: tuple[Row, ...]
    lines: tuple[tuple[str, tuple[Row | None, ...]], ...]

    @property
    def title(self) -> str:
        """Model, benchmark and what else the table is of."""
        asked = "" if self.asked == "-" else f", question {self.asked}"
        paper = ", the paper's budget protocol" if self.protocol == "paper" else ""
        return f"{self.benchmark}{asked}, {self.model}{paper}"

    @property
    def rows(self) -> list[Row]:
        """All of its cells."""
        return [*self.full, *(row for _, line in self.lines for row in line if row is not None)]

    @property
    def done(self) -> list[dict[str, Any]]:
        """Results of its complete cells."""
        return [row.result for row in self.rows if row.result is not None]

    def detectable(self, found: Iterable[Delta]) -> str:
        """The smallest difference that its examples show, among the paired differences of its sweep."""
        if not (done := self.done):
            return ""
        place, paper = (self.model, self.benchmark, self.asked), self.protocol == "paper"
        mine = [d for d in found if d.group[:3] == place and d.group[-1].endswith("(paper)") == paper]
        return detectable.sentence(mine, min(r["n"] for r in done), done[0]["unit"])

    def best(self, column: int) -> float | None:
        """The best score among the complete cells of a budget; None where there is nothing to choose between."""
        done = [r.result for _, line in self.lines if (r := line[column]) is not None and r.result is not None]
        scores = [float(r["score"]) for r in done]
        if len(set(scores)) < 2:
            return None
        return max(scores) if done[0]["higher_is_better"] else min(scores)


def pivots(found: Sequence[Row]) -> list[Pivot]:
    """The tables of a sweep in its order. A `full` cell stands in each table of its model and benchmark."""
    wheres: dict[tuple[str, str, str, str | None], list[Row]] = {}
    full: dict[tuple[str, str, str], list[Row]] = {}
    for row in found:
        place = (row.info["model"], *row.columns[:2])
        if row.is_full:
            full.setdefault(place, []).append(row)
        else:
            wheres.setdefault((*place, row.payload["budget_protocol"]), []).append(row)
    for place in full:
        if not any(where[:3] == place for where in wheres):
            wheres[(*place, None)] = []
    return [_pivot(where, mine, full.get(where[:3], [])) for where, mine in wheres.items()]


def _pivot(where: tuple[str, str, str, str | None], mine: list[Row], full: list[Row]) -> Pivot:
    budgets = tuple(sorted({str(r.payload["budget"]) for r in mine}, key=lambda b: (b[-1], float(b[:-1]))))
    lines = []
    for name in dict.fromkeys(r.series for r in mine):
        by = {r.payload["budget"]: r for r in mine if r.series == name}
        lines.append((name, tuple(by.get(b) for b in budgets)))
    return Pivot(*where, budgets, tuple(full), tuple(lines))


# Differences


def ablations(found: Sequence[Delta]) -> list[list[str]]:
    """The differences that say which axis of routing matters, as people read them."""
    return [described(d) for d in named(found)]


def named(found: Sequence[Delta]) -> list[Delta]:
    """Those of the ablation chain, in the order of groups and of the chain."""
    order = {group: i for i, group in enumerate(dict.fromkeys(d.group for d in found))}
    chain = [d for d in found if d.name]
    return sorted(chain, key=lambda d: (order[d.group], [*ABLATIONS.values()].index(d.name)))


def described(d: Delta) -> list[str]:
    """A difference as people read it."""
    benchmark, asked, variant, given = d.group[1:]
    nll = "" if d.nll is None else f"{d.nll.value:+.3f} {span(d.nll)}"
    title = f"{d.name}: {d.method} - {d.other}" if d.name else f"{d.method} - {d.other}"
    where = given + (f" {variant}" if variant else "")
    least = detectable.shown(detectable.smallest(d), d.unit, named=True)
    return [benchmark, asked, where, title, f"{d.score.value:+.3f} {span(d.score)}", f"{d.p:.3g}", nll, least]


def span(d: Difference) -> str:
    """A difference's interval as people read it."""
    return bounds(d.low, d.high, "+.3f")


# Files


def cells_csv(found: Iterable[Row]) -> str:
    """table.csv: a line per cell."""
    return _csv(HEADER, (values(row) for row in found))


def parts(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Scores of a cell's tasks, and of its turns where the questions of a context follow each other in one chat."""
    turns = {f"turn {t['turn']}": {**t, "metric": result["metric"]} for t in result.get("turns") or ()}
    return {**result["tasks"], **turns}


def tasks_csv(found: Iterable[Row]) -> str:
    """tasks.csv: a line per complete cell and task, and per turn of a chat."""
    lines = []
    for row in found:
        for task, t in parts(row.result).items() if row.result is not None else ():
            head = (row.info["model"], *row.columns, row.apart, task, t["metric"])
            lines.append((*head, t["score"], t["score_low"], t["score_high"], t["n"], row.key))
    return _csv(TASK_HEADER, lines)


def deltas_csv(found: Iterable[Delta]) -> str:
    """deltas.csv: a line per paired difference."""
    lines = []
    for d in found:
        of_nll = (None, None, None) if d.nll is None else (d.nll.value, d.nll.low, d.nll.high)
        tested = (d.score.value, d.score.low, d.score.high, d.score.p, d.p, d.score.test, d.score.n)
        lines.append((*d.group, d.method, d.other, d.name, *tested, *of_nll, d.score.se, detectable.smallest(d)))
    return _csv(DELTA_HEADER, lines)


def published_csv(found: Iterable[Comparison]) -> str:
    """published.csv: a line per number of a paper that the sweep has a counterpart of."""
    head = (
        "paper",
        "table",
        "of",
        "published",
        "unit",
        "published_at_our_kv_heads",
        "ours",
        "low",
        "high",
        "n",
        "state",
    )
    lines = []
    for c in found:
        for i, line in enumerate(c.ours):
            for j, ours in enumerate(line):
                if ours is None:
                    continue
                fact = c.block.fact(i, j)
                of = ", ".join(f"{k}={v}" for k, v in fact.fields.items() if k not in ("unit", "kv_heads", "where"))
                halved = None if c.halved is None else fact.value * c.halved
                mine = (ours.value, ours.low, ours.high, ours.n, ours.state)
                lines.append((c.table.paper, c.table.id, of, fact.value, fact.fields.get("unit"), halved, *mine))
    return _csv(head, lines)


def _csv(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(lines)
    return buffer.getvalue()


def markdown(sweep: Sweep, compared: Sequence[Comparison]) -> str:
    """table.md: all cells, the differences of the ablation chain, and published numbers beside ours."""
    m = sweep.manifest
    lines = [f"# {sweep.name}", "", f"`{m['command']}`, {m['created']}", "", *partial(sweep)]
    lines += grid(("model", *TITLES), [[row.info["model"], *cells(row)] for row in sweep.rows])
    lines += ["", *(f"{n}\n" for n in notes(sweep.rows))]
    lines += [f"{p.title}: {told}\n" for p in pivots(sweep.rows) if (told := p.detectable(sweep.differences))]
    if did := diagnosed(sweep):
        lines += ["## What methods did", "", *grid(DIAGNOSED_TITLES, did), ""]
    if chain := ablations(sweep.differences):
        lines += ["## Paired differences", "", *grid(DELTA_TITLES, chain), ""]
    if equal := equal_memory.equal_memory(sweep):
        lines += ["## At equal measured memory", "", *grid(equal_memory.TITLES, [x.line for x in equal]), ""]
    if compared:
        lines += ["## Published numbers beside ours", "", "Published columns hold what the papers print.", ""]
    last = None
    for c in compared:
        if c.table is not last:
            lines += [f"### {c.table.paper}, {c.table.title}", "", c.table.note, ""]
        last = c.table
        lines += [caption(c), ""]
        head, body = beside(c)
        lines += [*grid(head, body), ""]
    return "\n".join(lines).rstrip() + "\n"


def partial(sweep: Sweep) -> list[str]:
    """What an incomplete sweep's tables say first."""
    if not (missing := sweep.missing):
        return []
    n = len(sweep.rows)
    return [f"**Partial: {len(missing)} of {n} cells are incomplete and enter no mean and no difference.**", ""]


def grid(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, line by line."""

    def line(texts: Iterable[str]) -> str:
        return "| " + " | ".join(t.replace("|", "\\|") for t in texts) + " |"

    return [line(head), "|" + "---|" * len(head), *(line(texts) for texts in body)]


def caption(c: Comparison) -> str:
    """What all numbers of a published block share."""
    b = c.block
    shown = (
        "model",
        "benchmark",
        "method",
        "label",
        "task",
        "budget",
        "quantity",
        "over",
        "unit",
        "context",
    )
    parts = [label(k, b.fixed[k]) for k in shown if k in b.fixed]
    heads = f"published at {b.fixed['kv_heads']} KV heads; in brackets at the model's own" if c.halved else ""
    protocol = ["the paper's budget protocol"] if b.fixed.get("protocol") == "paper" else []
    return ", ".join([*parts, *protocol, *([heads] if heads else [])])


def beside(c: Comparison) -> tuple[list[str], list[list[str]]]:
    """A comparison as a table: head and lines, for each column ours and theirs; the longer axis goes down."""
    b, across = c.block, len(c.block.columns) <= len(c.block.rows) or len(c.block.columns) <= 8
    down, over = (b.row_axis, b.column_axis) if across else (b.column_axis, b.row_axis)
    rows, columns = (b.rows, b.columns) if across else (b.columns, b.rows)
    head = [down] + [f"{label(over, x)}, {who}" for x in columns for who in ("ours", "published")]
    body = []
    for i, name in enumerate(rows):
        line = [label(down, name)]
        for j in range(len(columns)):
            at = (i, j) if across else (j, i)
            line += [told(c.ours[at[0]][at[1]]), published(b.values[at[0]][at[1]], c.halved)]
        body.append(line)
    return head, body


def told(ours: Ours | None) -> str:
    """Our number beside a published one."""
    if ours is None:
        return ""
    if ours.value is None:
        return ours.state.partition(":")[0] or "undefined"  # why stands with the sweep's own tables
    if ours.low is None:
        return number(ours.value)
    return f"{ours.value:.1f} {bounds(ours.low, ours.high, '.1f')}"


def published(value: float, halved: float | None) -> str:
    """A published number as it is printed there, and what its memory is at the model's own KV heads."""
    return str(value) + ("" if halved is None else f" ({number(value * halved)})")


def number(value: float) -> str:
    """Three significant digits or one decimal, whichever is more."""
    return f"{value:.4g}" if abs(value) >= 100 or (value and abs(value) < 1) else f"{value:.3g}" if value else "0"


def terms(rows: Sequence[Row]) -> list[str]:
    """Licence and terms of the data that the cells used, a line for each data set."""
    from moend.benchmarks import benchmark

    found: dict[str, None] = {}
    used = [row.info["benchmark_config"] for row in rows if row.info.get("benchmark_config")]
    for fields in {json.dumps(x, sort_keys=True): x for x in used}.values():
        try:
            found |= dict.fromkeys(map(str, benchmark(fields).terms()))
        except UserError as e:  # a benchmark of the user's own that is not on this machine
            found[f"{fields.get('name')}: its terms are not known here ({e})"] = None
    return list(found)
