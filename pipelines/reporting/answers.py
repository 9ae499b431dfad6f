"""answers.html: what compression changes in the answers of a sweep, with their texts; one file that fetches nothing."""

from __future__ import annotations

from typing import Any

from pipelines.reporting import tables
from pipelines.reporting.page import asset, template
from pipelines.results.flips import Against, Flip, against_full
from pipelines.results.kept import segments
from pipelines.results.sweep import Sweep

SHOWN = 50  # flips of each direction and cell with their texts
TEXT = 2000  # characters of an answer: of a longer one the beginning and the end stand


def page(sweep: Sweep, made: str) -> str | None:
    """The whole page; None where no complete cell has a full cache to stand beside."""
    found = [_cell(x) for x in against_full(sweep)]
    if not found:
        return None
    return template("answers.html").render(
        name=sweep.name,
        made=made,
        css=asset("page.css"),
        cells=found,
        missing=len(sweep.missing),
        total=len(sweep.rows),
    )


def _cell(found: Against) -> dict[str, Any]:
    row, length = found.row, found.length
    return {
        "benchmark": ", ".join((row.info["model"], *row.columns[:2])),
        "title": f"{row.series}, {row.columns[3]}",
        "answers": found.answers,
        "lists": [
            ("lost", "The full cache is right, this cell is not", len(found.lost), _shown(found.lost)),
            ("won", "This cell is right, the full cache is not", len(found.won), _shown(found.won)),
        ],
        "length": f"{length.value:+.1f} {tables.bounds(length.low, length.high, '+.1f')}",
    }


def _shown(flips: tuple[Flip, ...]) -> list[dict[str, Any]]:
    return [
        {
            "who": f"{f.cell['task']}: {f.cell['id']}" + (f", draw {f.cell['draw']}" if f.cell["draw"] else ""),
            "kept": _kept(f.cell),
            "gold": [_cut(x) for x in f.cell.get("gold", ())],
            "answers": [(name, r["score"], r["new_tokens"], _cut(r["text"])) for name, r in _named(f)],
        }
        for f in flips[:SHOWN]
    ]


def _kept(record: dict[str, Any]) -> str:
    """What the cell kept of each segment of this prompt, where its record tells it."""
    found = segments(record["kept"]) if record.get("kept") else None
    return ", ".join(f"{name} {share:.1%}" for name, share in (found or {}).items())


def _named(flip: Flip) -> tuple[tuple[str, dict[str, Any]], ...]:
    return ("full", flip.full), ("this cell", flip.cell)


def _cut(text: str) -> str:
    """A text, or its two ends with how much is left out between them."""
    gone, half = len(text) - TEXT, TEXT // 2
    return text if gone <= 0 else f"{text[:half]} [... {gone} characters left out ...] {text[-half:]}"
