"""The frontier of score and bytes as a table to paste: its cells, and the one that is chosen."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.cli.terminal import size
from pipelines.reporting.tables import bounds, grid
from pipelines.results.pareto import Front, Spot

TITLES = (
    "method", "budget", "score [95 % interval]", "loss against full [95 % interval]", "bytes", "of full", "tokens/s",
    "choice",
)  # fmt: skip


def lines(front: Front) -> list[list[str]]:
    """The frontier, the smallest cache first, and the chosen cell where it is not on it."""
    return [_line(s) for s in front.spots if s.on_frontier or s.chosen]


def _line(spot: Spot) -> list[str]:
    r = spot.row.result
    assert r is not None
    loss = "" if spot.loss is None else f"{spot.loss.value:+.3f} {bounds(spot.loss.low, spot.loss.high, '+.3f')}"
    return [
        spot.row.series,
        spot.row.columns[3],
        f"{spot.score:.3f} {bounds(r['score_low'], r['score_high'])}",
        loss,
        size(spot.held),
        f"{spot.held / r['full_bytes']:.1%}",
        "" if r["fused"] or r["tokens_per_second"] is None else f"{r['tokens_per_second']:.1f}",
        "chosen" if spot.chosen else "",
    ]


def markdown(fronts: Sequence[Front]) -> str:
    """pareto.md: the frontier of each table."""
    out = []
    for front in fronts:
        out += [f"## {front.title}", "", *grid(TITLES, lines(front)), "", front.answer, ""]
    return "\n".join(out)
