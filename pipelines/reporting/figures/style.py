"""One look for all figures: Okabe-Ito colours and a marker per method, readable in print and for the colour-blind."""

from __future__ import annotations

import contextlib
import contextvars
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Okabe & Ito (2008); yellow is left out: it vanishes on white paper.
BLACK, ORANGE, SKY, GREEN, BLUE, RED, PURPLE, GREY = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#777777",
)  # fmt: skip
# The MoE-nD family is drawn solid, what others chose the tokens for dashed: colour alone never tells two methods apart.
METHODS = {
    "full": (BLACK, "s"),
    "1d": (GREY, "o"),
    "2d_uniform": (SKY, "v"),
    "2d": (BLUE, "^"),
    "2d_hetero": (RED, "D"),
    "ripple_2d": (PURPLE, "p"),
    "ripple_2d_head": (ORANGE, "p"),
    "SnapKV": (GREEN, "P"),
    "StreamingLLM": (ORANGE, "X"),
    "H2O": (SKY, "<"),
    "PyramidKV": (BLUE, ">"),
    "RippleKV": (PURPLE, "h"),
    "KVZip": (RED, "d"),
    "KVZip_uniform": (ORANGE, "d"),
    "MoEZip": (BLUE, "*"),
    "Random": (GREY, "*"),
}
SOLID = {"full", "1d", "2d_uniform", "2d", "2d_hetero", "ripple_2d", "ripple_2d_head"}
_OTHERS = [(c, m) for m in "H8^vosD" for c in (GREEN, PURPLE, ORANGE, RED, BLUE, SKY)]
SETTINGS: dict[str, Any] = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "legend.frameon": False,
    "figure.dpi": 110,
    "savefig.dpi": 200,
    "image.interpolation": "nearest",
    "pdf.fonttype": 42,  # letters stay letters
}


def look(method: str, among: Sequence[str]) -> tuple[str, str]:
    """Colour and marker of a method: always the same for the known ones, distinct for the rest of `among`."""
    if method in METHODS:
        return METHODS[method]
    rest = [m for m in dict.fromkeys(among) if m not in METHODS]
    return _OTHERS[rest.index(method) % len(_OTHERS)]


def line(method: str) -> Any:
    """Dash pattern of a method's line."""
    return "-" if method in SOLID else (0, (4, 1.5))


def errors(
    axis: Any, x: Sequence[float], results: Sequence[Mapping[str, Any]], method: str, among: Sequence[str]
) -> Any:
    """Scores with their interval bars at x, joined by the method's line; the handle is for the legend."""
    colour, marker = look(method, among)
    y = [r["score"] for r in results]
    below = [max(r["score"] - bound(r, "score_low"), 0) for r in results]
    above = [max(bound(r, "score_high") - r["score"], 0) for r in results]
    return axis.errorbar(
        x, y, yerr=[below, above], color=colour, marker=marker, ls=line(method), capsize=2, elinewidth=0.9,
        markeredgecolor="white", markeredgewidth=0.5,
    )  # fmt: skip


def reference(axis: Any, result: Mapping[str, Any]) -> None:
    """The full cache's score as a dashed line over the whole panel, its interval as a band."""
    axis.axhspan(bound(result, "score_low"), bound(result, "score_high"), color=BLACK, alpha=0.07, lw=0)
    axis.axhline(result["score"], color=BLACK, lw=1, ls=(0, (4, 2)))


def theirs(axis: Any, x: Sequence[float], y: Sequence[float], method: str, among: Sequence[str]) -> Any:
    """Published points: hollow and dotted, so that nobody takes them for ours."""
    colour, marker = look(method, among)
    (handle,) = axis.plot(x, y, color=colour, marker=marker, mfc="white", ls=":", lw=1.1, zorder=1.5)
    return handle


def bound(result: Mapping[str, Any], name: str) -> float:
    """An interval's end; the score itself where there is no interval."""
    value = result[name]
    return float(result["score"] if value is None else value)


def score_axis(axis: Any, results: Sequence[Mapping[str, Any]]) -> None:
    """Label and limits of an axis of scores."""
    first = results[0]
    better = "" if first["higher_is_better"] else "\n(lower is better)"
    axis.set_ylabel(f"{first['metric'].replace('_', ' ')}, {first['unit']}{better}")
    if first["higher_is_better"] and all(0 <= r["score"] <= 1 for r in results):
        axis.set_ylim(-0.04, 1.04)


def panel_title(result: Mapping[str, Any]) -> str:
    """Benchmark and question mode."""
    question = {True: ", question visible", False: ", question unseen", None: ""}[result["question_visible"]]
    paper = " (paper protocol)" if result["budget_protocol"] == "paper" else ""
    return f"{result['benchmark']}{question}{paper}"


SCREEN_DPI = 140  # of a page's pictures; files for print have 200
_kinds: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("kinds", default=(".png", ".pdf"))


@contextlib.contextmanager
def only(*kinds: str) -> Iterator[None]:
    """Inside, `figure` writes files of these kinds only, for the screen: a PDF takes as long as its PNG."""
    before = _kinds.set(kinds)
    try:
        yield
    finally:
        _kinds.reset(before)


@contextlib.contextmanager
def figure(path: Path, width: float, height: float, **grid: Any) -> Iterator[tuple[Any, Any]]:
    """`with figure(path, w, h, nrows=.., ncols=..) as (fig, axes)`: styled, saved at the end, closed.

    Saved as PNG and PDF, where `only` does not say otherwise.
    """
    with plt.rc_context(SETTINGS):
        fig, axes = plt.subplots(figsize=(width, height), squeeze=False, layout="constrained", **grid)
        try:
            yield fig, axes
            path.parent.mkdir(parents=True, exist_ok=True)
            fig.get_layout_engine().execute(fig)
            fig.set_layout_engine("none")  # laid out and measured once, for both files
            box = fig.get_tightbbox().padded(0.08)
            kinds = _kinds.get()
            for kind in kinds:
                said = {"CreationDate": None} if kind == ".pdf" else None
                target = path.with_suffix(kind)
                temp = path.with_name(
                    f".{path.stem}.{secrets.token_hex(4)}.tmp{kind}"
                )  # two processes may draw the same
                try:
                    fig.savefig(temp, bbox_inches=box, metadata=said, dpi=None if ".pdf" in kinds else SCREEN_DPI)
                    temp.replace(target)
                finally:
                    temp.unlink(missing_ok=True)
        finally:
            plt.close(fig)
