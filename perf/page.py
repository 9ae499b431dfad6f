"""The page of figures: what perf's programs measured, as tables, pictures and one line per aim, and its history."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from perf.kvpress_page import table
from pipelines.reporting.figures import style

# (dtype, cell, least ratio to DynamicCache's steps at 8k)
AIMS = (
    ("float32", "SnapKV 10 %", 2.2),
    ("bfloat16", "SnapKV 10 %", 5.0),
    ("float32", "2d_hetero 1/14", 2.0),
    ("bfloat16", "2d_hetero 1/14", 4.0),
    ("float32", "K8/V4", 1.0),
    ("bfloat16", "K8/V4", 1.0),
)
DTYPES = ("float32", "bfloat16")
NAMES = (
    "aims", "decode", "fused", "memory", "prefill", "fused_sweep", "calibration", "profile", "damage", "solver",
    "planning", "report",
)  # fmt: skip
HISTORY = Path(__file__).with_name("history.jsonl")
KERNELS = Path(__file__).with_name("kernels.md")  # the choice of kernels, measured once and written by hand
LINES = 12  # of the history on the page
DRAWN = ("DynamicCache sdpa", "full", "K8/V4", "SnapKV 10 %", "2d_hetero 1/14", "floor")
INK = dict(zip(DRAWN, (style.GREY, style.BLUE, style.RED, style.GREEN, style.PURPLE, "#BBBBBB"), strict=True))


def span(x: dict[str, float]) -> str:
    """A median with its lowest and highest."""
    return f"{x['median']:g} ({x['low']:g} to {x['high']:g})"


def read(folder: Path, names: Sequence[str] = NAMES) -> dict[str, Any]:
    """What was measured, by program."""
    return {n: json.loads(f.read_text()) for n in names if (f := folder / f"{n}.json").exists()}


def ratios(data: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The figures whose history is kept: ratios, or milliseconds and seconds where there is no peer."""
    for dtype, cell, _ in AIMS:
        if found := data.get("aims", {}).get(dtype):
            at = found[max(found, key=int)]
            if cell in at["ms"]:
                yield f"decode {dtype} {cell}, times DynamicCache", at["times_dynamic"][cell]["median"]
                yield f"decode {dtype} {cell}, times own full", at["times_own_full"][cell]["median"]
    for dtype in DTYPES:
        for x in data.get("fused", {}).get(dtype, {}).values():
            yield f"16 cells as one {dtype}, times one", x["ratio"]["median"]
    for kind, ratio in data.get("prefill", {}).get("ratio_to_plain", {}).items():
        yield f"prefill {kind}, over plain", ratio["median"]
    if "fused_sweep" in data:
        yield "sweep as one, times cell by cell", data["fused_sweep"]["ratio"]["cpu"]
    for name in ("calibration", "profile", "damage"):
        for kind, ratio in data.get(name, {}).get("ratio", {}).items():
            yield f"{name} {kind}, over a forward pass", ratio
    for kind, solver, x in _solvers(data):
        yield f"solver {kind} {solver}, ms", x["ms_median"]
    if "planning" in data:
        yield "planning 200 cells, s", data["planning"]["plan"]
    if "report" in data:
        yield f"report of {data['report']['cells']} cells, s", data["report"]["compared"] + data["report"]["write"]


def _solvers(data: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, float]]]:
    """(kind of bytes, solver, its figures)."""
    for kind, found in data.get("solver", {}).items():
        if isinstance(found, dict):
            yield from ((kind, name, x) for name, x in found.items())


def remember(folder: Path, names: Sequence[str]) -> None:
    """Add what these programs measured to the history: date, commit, processor, ratios."""
    asked = ["git", "-C", str(HISTORY.parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(asked, capture_output=True, text=True).stdout.strip() or None
    line = {"date": time.strftime("%Y-%m-%d"), "commit": commit, "processor": _processor()}
    with HISTORY.open("a") as f:
        f.write(json.dumps({**line, "ratios": dict(ratios(read(folder, names)))}) + "\n")


def write(folder: Path, page: Path) -> None:
    """The page and its figures from the JSON files there are; what is missing is named."""
    data = read(folder)
    lines = [
        "# Performance",
        "",
        "Made by `OMP_NUM_THREADS=1 python -m perf --publish` (SmolLM2-135M, one CPU thread). Times are CPU "
        "milliseconds per new token; ratios are formed within rounds in which all caches take turns: median (lowest "
        "to highest round). `floor` is a step with two entries: what the model costs without a cache. Measured on: "
        f"{_processor()}. Against kvpress: [comparison](comparison.md); on large models: [scaling](scaling.md).",
        "",
    ]
    if "aims" in data:
        lines += _aims(data["aims"])
    if "decode" in data:
        lines += _decode(data["decode"], page)
    if "fused" in data:
        lines += _fused(data["fused"])
    if "memory" in data:
        lines += _memory(data["memory"]["memory"], page)
    if "prefill" in data:
        lines += _prefill(data["prefill"])
    if "fused_sweep" in data:
        x = data["fused_sweep"]
        lines += [
            "## A sweep as one",
            "",
            f"{x['cells']} cells, {x['examples']} examples of {x['length']} tokens, {x['dtype']}: {x['ratio']['cpu']} "
            f"times faster than cell by cell in CPU time ({x['ratio']['wall']} in wall time), "
            f"{x['identical']} of {x['identical'] + x['different']} outputs identical; decoding alone "
            f"{x['speed']['cpu']} times.",
            "",
        ]
    lines += _calibrations(data)
    if "solver" in data:
        rows = [
            [kind, name, f"{x['ms_median']:g}", f"{x['ms_max']:g}", f"{x['excess_max']:.2%}"]
            for kind, name, x in _solvers(data)
        ]
        lines += ["## Solver", "", "28 layers, 54 configurations, in one thread:", ""]
        lines += [table(["bytes", "solver", "ms, median", "ms, worst", "above the optimum, worst"], rows)]
    if "planning" in data or "report" in data:
        lines += ["## Around a sweep", ""]
    if x := data.get("planning"):
        lines += [
            f"- {x['cells']} cells: composed in {x['compose']:g} s, planned in {x['plan']:g} s; the whole dry run "
        ]
        lines[-1] += f"takes {x['command_seconds']:g} s ({x['command_cpu']:g} s of CPU time)."
    if x := data.get("report"):
        lines += [f"- The report of {x['cells']} cells x {x['examples']} samples: {x['compared'] + x['write']:.1f} s "]
        lines[-1] += f"({x['cpu']:g} s of CPU time), {x['files']} files, a page of {x['page_mib']:g} MiB."
    lines += ["", KERNELS.read_text()]
    if missing := [n for n in NAMES if n not in data]:
        lines += [f"Not measured: {', '.join(missing)}.", ""]
    lines += _history()
    page.write_text("\n".join(lines).rstrip() + "\n")


def _calibrations(data: dict[str, Any]) -> list[str]:
    rows = [
        [name, kind, f"{ratio:g}"]
        for name in ("calibration", "profile", "damage")
        for kind, ratio in data.get(name, {}).get("ratio", {}).items()
    ]
    if not rows:
        return []
    text = "Over one plain forward pass on the same tokens: the sensitivity table (`calibration`), RippleKV's profile, "
    text += "the damage tables of ripple_2d and ripple_2d_head."
    return ["## Calibration", "", text, "", table(["", "", "forward passes"], rows)]


def _history() -> list[str]:
    """The last lines of the history, a figure a row."""
    if not HISTORY.exists():
        return []
    entries = [json.loads(x) for x in HISTORY.read_text().splitlines()][-LINES:]
    figures = dict.fromkeys(name for e in entries for name in e["ratios"])
    head = ["", *(f"{e['date']} {e['commit'] or ''}".strip() for e in entries)]
    rows = [[name, *(f"{e['ratios'][name]:g}" if name in e["ratios"] else "" for e in entries)] for name in figures]
    return ["## History", "", "One column a run, from `perf/history.jsonl`.", "", table(head, rows)]


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    found = [x.split(":")[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")]
    return found[0] if found else "unknown"


def _aims(data: dict[str, Any]) -> list[str]:
    """What is asked of decoding at 8,000 entries, and what is possible."""
    rows, longest = [], max(data[next(d for d in DTYPES if d in data)], key=int)
    for dtype, cell, least in AIMS:
        at = data.get(dtype, {}).get(longest)
        if at and cell in at["ms"]:
            got, read = at["times_dynamic"][cell], at["held"][cell] / data["bandwidth"] / 1e6
            most = at["ms"]["DynamicCache sdpa"]["median"] / (at["ms"]["floor"]["median"] + read)
            verdict = f"{'met' if got['median'] >= least else 'missed'}; " if longest == "8000" else ""
            others = (at[k].get(cell) for k in ("times_repeated", "times_eager", "times_own_full"))
            spans = [span(x) if x else "" for x in others]
            held = f"{at['held_of_full'][cell]:.1%}"
            rows.append([dtype, cell, f">= {least:g}", span(got), *spans, held, f"{verdict}at most {most:.2f}"])
    head = [
        "dtype",
        "cell",
        "aim at 8000",
        f"at {longest}, times DynamicCache, sdpa",
        "keys repeated",
        "eager",
        "own full",
    ]
    return [
        "## Decoding: what is asked",
        "",
        table([*head, "bytes", ""], rows),
        f"{data['rounds']} rounds of {data['steps']} tokens each. At most: the floor's time, and reading what is held "
        f"once at the {data['bandwidth']:g} GB/s that this machine reads with one thread. transformers has torch group "
        "the queries of a KV head, a slow path on a CPU in bfloat16; `keys repeated` is its SDPA without that.",
        "",
    ]


def _decode(data: dict[str, Any], page: Path) -> list[str]:
    lines = ["## Decoding, by length", "", "![Milliseconds per token by length](figures/decode.png)", ""]
    present = [d for d in DTYPES if d in data]
    for dtype in present:
        lengths = sorted(data[dtype], key=int)
        names = list(data[dtype][lengths[-1]]["ms"])
        rows = [
            [n, *(span(data[dtype][t]["ms"][n]) if n in data[dtype][t]["ms"] else "" for t in lengths)] for n in names
        ]
        lines += [f"Milliseconds per token, {dtype}, load {data['load']:.1f}, {data['rounds']} rounds:", ""]
        lines += [table(["", *lengths], rows)]
        skipped = {k: v for t in lengths for k, v in data[dtype][t]["skipped"].items()}
        lines += [f"Left out: {k} ({v})." for k, v in skipped.items()] + [""]
    _draw_decode(data, present, page)
    return lines


def _draw_decode(data: dict[str, Any], present: Sequence[str], page: Path) -> None:
    figure, axes = style.plt.subplots(1, len(present), figsize=(5 * len(present), 3.4), squeeze=False)
    for axis, dtype in zip(axes[0], present, strict=True):
        lengths = sorted(data[dtype], key=int)
        for name in DRAWN:
            points = [(int(t), data[dtype][t]["ms"][name]) for t in lengths if name in data[dtype][t]["ms"]]
            if points:
                xs, ys = [t for t, _ in points], [p["median"] for _, p in points]
                bars = [[p["median"] - p["low"] for _, p in points], [p["high"] - p["median"] for _, p in points]]
                axis.errorbar(xs, ys, yerr=bars, marker="o", markersize=3, label=name, color=INK[name], capsize=2)
        axis.set(title=dtype, xlabel="entries", ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("CPU ms per token")
    axes[0][-1].legend(fontsize=7)
    _save(figure, page, "decode")


def _fused(data: dict[str, Any]) -> list[str]:
    lines = ["## 16 distinct cells as one batch", ""]
    rows = []
    for dtype in DTYPES:
        for length, x in data.get(dtype, {}).items():
            share = x["ms_floor_of_all"]["median"] / x["ms_all"]["median"]
            read = x["held"] / data["bandwidth"] / 1e6
            most = len(x["cells"]) * x["ms_one"]["median"] / (x["ms_floor_of_all"]["median"] + read)
            rows.append(
                [
                    dtype,
                    length,
                    span(x["ms_one"]),
                    span(x["ms_all"]),
                    span(x["ratio"]),
                    f"{most:.2f}",
                    f"{share:.0%}",
                ]
            )
    head = ["dtype", "entries", "ms, mean of one", "ms, all", "tokens per second of all over one (aim 7)"]
    lines += [table([*head, "at most", "model's share of the step"], rows)]
    text = "At most: the model's own time for 16 sequences, and reading what they hold once at "
    return [*lines, f"{text}{data['bandwidth']:g} GB/s.", ""]


def _memory(data: dict[str, Any], page: Path) -> list[str]:
    lines = [
        "## Memory by the system's account",
        "",
        "High-water mark while decoding above the process without a cache, a fresh process per point; `seen` is the "
        "fall against DynamicCache that the system sees, of the fall that is claimed (aim: 90 %). Both sides rise "
        "above what they hold, as freed memory stays with the process for a while, DynamicCache to twice that: so "
        "shares are above 100 %. The last column is what they would be had it never had more than it holds.",
        "",
        "![MiB by the system and claimed](figures/memory.png)",
        "",
    ]
    for at, points in data.items():
        rows = [
            [n, *(f"{p[k] / 2**20:.1f}" for k in ("system", "claimed", "allocated")),
             *(f"{p[k]:.0%}" if k in p else "" for k in ("seen_of_claimed_fall", "seen_below_held"))]
            for n, p in points.items()
        ]  # fmt: skip
        lines += [f"{at}, MiB:", "", table(["", "system", "held", "allocated", "seen", "below what is held"], rows)]
    figure, axes = style.plt.subplots(1, len(data), figsize=(5 * len(data), 3.4), squeeze=False)
    for axis, (at, points) in zip(axes[0], data.items(), strict=True):
        ys = range(len(points))
        axis.barh(
            [y - 0.2 for y in ys], [p["system"] / 2**20 for p in points.values()], 0.4, label="system", color=style.BLUE
        )
        axis.barh(
            [y + 0.2 for y in ys],
            [p["claimed"] / 2**20 for p in points.values()],
            0.4,
            label="held",
            color=style.ORANGE,
        )
        axis.set(title=at, xlabel="MiB", yticks=list(ys), yticklabels=list(points))
        axis.tick_params(labelsize=7)
        axis.invert_yaxis()
    axes[0][-1].legend(fontsize=7)
    _save(figure, page, "memory")
    return lines


def _prefill(data: dict[str, Any]) -> list[str]:
    ratio = data["ratio_to_plain"]
    lines = [
        "## Prefill",
        "",
        f"{data['tokens']} tokens, scoring, selecting and packing included, over a plain prefill:",
        "",
    ]
    rows = []
    for kind, got in ratio.items():
        most = 1.15 if kind == "H2O" else 1.05
        verdict = "" if kind == "plain" else "met" if got["median"] <= most else "missed"
        rows.append([kind, span(got), "" if kind == "plain" else f"<= {most:g}", verdict])
    lines += [table(["", "ratio", "aim", ""], rows)]
    return [
        *lines,
        "Peak memory of a prefill above the loaded model, MiB:",
        "",
        table(["", "MiB"], [[k, f"{v:g}"] for k, v in data["peak_mib"].items()]),
    ]


def _save(figure: Any, page: Path, name: str) -> None:
    folder = page.parent / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(folder / f"{name}.png", dpi=120)
    style.plt.close(figure)
