"""Bytes and time on large models from shapes and a few assumed speeds: `python -m perf.scaling` writes docs/scaling.md.

    python -m perf.scaling [--measured perf.json] [--out docs/scaling.md]

A step that makes one token for each of B rows reads every weight it uses once and every entry that the rows hold once,
or is bound by arithmetic: seconds = max(bytes / (bandwidth x share), FLOP / (peak x share)). With N active weights, H
query heads of dimension d, L layers and n entries per head: FLOP = 2 N B + 4 H d L n per row; a prefill of T tokens
2 N T + 2 H d L T^2. A mixture of experts reads the experts that B rows choose: a share 1 - (1 - k/E)^B of them where
choices are independent. --measured: JSON of perf.decode, whose points the same formula is held against.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moend.budget import Arch
from moend.layer_bytes import Storage, layer_bytes


@dataclass(frozen=True)
class Machine:
    """Peak bytes/s, FLOP/s at 16 bit and bytes of memory; shares of the peaks that programs reach (assumed)."""

    name: str
    bandwidth: float
    flops: float
    memory: float
    bandwidth_share: float = 0.6
    flops_share: float = 0.4


@dataclass(frozen=True)
class Shape:
    """A model: its cache, weights in all, those outside of experts, and k of E experts per token (1 of 1: dense)."""

    name: str
    arch: Arch
    weights: float
    shared: float
    chosen: int = 1
    experts: int = 1

    def active(self) -> float:
        """Weights one token is multiplied with."""
        return self.shared + (self.weights - self.shared) * self.chosen / self.experts

    def read(self, rows: int) -> float:
        """Weights that a step of `rows` rows reads."""
        return self.shared + (self.weights - self.shared) * (1 - (1 - self.chosen / self.experts) ** rows)


H200 = Machine("H200", 4.8e12, 9.9e14, 141e9)
SHAPES = (
    Shape("7B (Qwen2.5)", Arch(28, 28, 4, 128, 131072), 7.6e9, 7.6e9),
    Shape("70B (Llama 3)", Arch(80, 64, 8, 128, 131072), 70.6e9, 70.6e9),
    Shape("30B-A3B (Qwen3)", Arch(48, 32, 4, 128, 40960), 30.5e9, 1.5e9, 8, 128),
)
LENGTHS = (16_384, 131_072, 1_048_576)
TOKENS = 1024  # of an answer in Table 2's sweep: 16 times the tasks' limits 128, 32, 64 and 32, their mean


@dataclass(frozen=True)
class Kept:
    """What a cell keeps of `length` tokens in every layer: a share, at some bits; a routed plan at its mean."""

    name: str
    share: float
    k_bits: int = 16
    v_bits: int = 16

    def bytes(self, arch: Arch, length: int) -> int:
        """Resident bytes of the cache."""
        form = "none" if self.share == 1 else "per_head"
        storage = Storage(self.k_bits, self.v_bits, positions=form)  # type: ignore[arg-type]
        return arch.layers * int(layer_bytes(round(self.share * length), storage, arch.kv_heads, arch.head_dim))


CELLS = (
    Kept("full", 1),
    Kept("K8/V4", 1, 8, 4),
    Kept("10 % at 16 bit", 0.1),
    Kept("18 % at K8/V4 (1/14)", 0.176, 8, 4),
)


def step_seconds(shape: Shape, machine: Machine, held: Sequence[tuple[float, float]]) -> float:
    """One token for each row; held: (bytes, entries per head) of every row."""
    rows, a = len(held), shape.arch
    moved = 2 * shape.read(rows) + sum(b for b, _ in held)
    flop = 2 * shape.active() * rows + sum(4 * a.q_heads * a.head_dim * a.layers * n for _, n in held)
    return max(moved / (machine.bandwidth * machine.bandwidth_share), flop / (machine.flops * machine.flops_share))


def prefill_seconds(shape: Shape, machine: Machine, tokens: int) -> float:
    """All of a prompt once."""
    a = shape.arch
    flop = 2 * shape.active() * tokens + 2 * a.q_heads * a.head_dim * a.layers * tokens**2
    return flop / (machine.flops * machine.flops_share)


def devices(shape: Shape, machine: Machine) -> int:
    """How many the weights need, so that they take at most six tenths of the memory; a power of two."""
    count = 1
    while 2 * shape.weights > 0.6 * count * machine.memory:
        count *= 2
    return count


def table2(shape: Shape, machine: Machine, length: int = 16_384, prompts: int = 200) -> dict[str, float]:
    """GPU hours of MoE-nD's Table 2 (sweeps/sweep/moend_table2.yaml), every answer as long as allowed.

    17 cells: full, and four methods at 512 ... 4,096 tokens, of which 1d keeps the budget's bytes, 2d_uniform those of
    4/1.5 times its tokens at K8/V4, and the routed ones 4/1.5 times the bytes (the published protocol).
    """
    a = shape.arch
    held = [(float(a.full_bytes(length)), float(length))]
    for budget in (512, 1024, 2048, 4096):
        whole = a.full_bytes(budget)
        more = min(budget * 4 / 1.5, length)
        uniform = Kept("", more / length, 8, 4).bytes(a, length)
        held += [(whole, budget), (uniform, more), (whole * 4 / 1.5, more), (whole * 4 / 1.5, more)]
    held = [(b + a.full_bytes(TOKENS) / 2, n + TOKENS / 2) for b, n in held]  # half of the answer, on average
    prefill = prefill_seconds(shape, machine, length)
    fused = prompts * (prefill + TOKENS * step_seconds(shape, machine, held))
    alone = prompts * sum(prefill + TOKENS * step_seconds(shape, machine, [x]) for x in held)
    return {"fused": fused / 3600, "one by one": alone / 3600, "prefill": prompts * prefill / 3600}


def against(points: dict[str, Any], bytes_per_token: float) -> list[tuple[int, float, float]]:
    """Measured steps of our full cache against floor + bytes / bandwidth, with the bandwidth of the longest point.

    points: perf.decode's entry of one dtype, by length; (length, measured ms, predicted ms) for the others.
    """
    known = {int(n): (p["ms"]["full"]["median"], p["ms"]["floor"]["median"]) for n, p in points.items()}
    longest = max(known)
    per_byte = (known[longest][0] - known[longest][1]) / (longest * bytes_per_token)
    return [(n, ms, floor + n * bytes_per_token * per_byte) for n, (ms, floor) in sorted(known.items()) if n != longest]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(r) + " |" for r in (head, ["---"] * len(head), *rows)] + [""]


def page(machine: Machine, measured: dict[str, Any] | None) -> str:
    """docs/scaling.md."""
    lines = [
        "# Bytes and time on large models",
        "",
        "Written by `python -m perf.scaling`, which holds the formulas. Arithmetic, not measurements: one "
        f"{machine.name} with {machine.bandwidth / 1e12:g} TB/s, {machine.flops / 1e12:g} TFLOP/s at 16 bit and "
        f"{machine.memory / 1e9:g} GB, of which programs are assumed to reach {machine.bandwidth_share:.0%} of the "
        f"bandwidth and {machine.flops_share:.0%} of the arithmetic; weights at 16 bit; no time between kernels, "
        "no traffic between devices. A single step is shown at one device's speed, also where weights and cache need "
        "more.",
        "",
        "## A decode step, one sequence",
        "",
    ]
    rows = []
    for shape in SHAPES:
        for length in LENGTHS:
            base = step_seconds(shape, machine, [(CELLS[0].bytes(shape.arch, length), length)])
            row = [shape.name, f"{length // 1024}k"]
            for cell in CELLS:
                size = cell.bytes(shape.arch, length)
                seconds = step_seconds(shape, machine, [(size, cell.share * length)])
                row.append(f"{size / 1e9:.2f} GB, {seconds * 1e3:.1f} ms ({base / seconds:.2f}x)")
            rows.append(row)
    lines += _table(["model", "tokens", *(c.name for c in CELLS)], rows)
    lines += [
        "One sequence gains from a smaller cache only what the cache is of all that is read: at 16k tokens the weights "
        "dominate. What a small cache buys there is more sequences:",
        "",
    ]
    rows = []
    for shape in SHAPES:
        for length in LENGTHS:
            count = devices(shape, machine)
            group = replace(
                machine,
                bandwidth=machine.bandwidth * count,
                flops=machine.flops * count,
                memory=machine.memory * count,
            )
            free = group.memory * 0.9 - 2 * shape.weights
            seconds = prefill_seconds(shape, group, length)
            row = [f"{shape.name} on {count}", f"{length // 1024}k", f"{seconds:.1f} s"]
            for cell in CELLS:
                fit = int(free // cell.bytes(shape.arch, length)) if free > 0 else 0
                if not fit:
                    row.append("none")
                    continue
                held = [(cell.bytes(shape.arch, length), cell.share * length)] * fit
                row.append(f"{fit:,}, {fit / step_seconds(shape, group, held):,.0f}/s")
            rows.append(row)
    lines += [
        f"## Sequences that fit (90 % of the memory of as many {machine.name} as named), and tokens per second of all",
        "",
    ]
    lines += _table(["model", "tokens", "prefill", *(c.name for c in CELLS)], rows)
    lines += ["## Table 2 of MoE-nD", ""]
    hours = table2(SHAPES[0], machine)
    lines += [
        "17 cells, 200 prompts of 16,384 tokens, answers of 1,024 tokens (all as long as allowed), 7B, GPU hours: "
        f"**{hours['fused']:.1f} as planned here** (one prefill per prompt, 17 rows decode as one), "
        f"**{hours['one by one']:.1f} cell by cell**, of which prefills are {hours['prefill']:.2f} and "
        f"{17 * hours['prefill']:.1f}.",
        "",
    ]
    lines += ["## Against measured points", ""]
    if measured is None:
        lines += ["None at hand: `python -m perf.scaling --measured` takes perf.decode's JSON.", ""]
    else:
        lines += [
            "SmolLM2-135M on one CPU thread: time of a step on our uncompressed cache is taken to be that of the model "
            "(`floor`) and the cache's bytes at the bandwidth of the longest point. The other points, milliseconds:",
            "",
        ]
        rows = []
        for dtype, size in (("float32", 4), ("bfloat16", 2)):
            if dtype in measured:
                per_token = 30 * 3 * 64 * 2 * size
                rows += [
                    [dtype, f"{n:,}", f"{ms:.1f}", f"{guess:.1f}", f"{guess / ms - 1:+.0%}"]
                    for n, ms, guess in against(measured[dtype], per_token)
                ]
        lines += _table(["dtype", "tokens", "measured", "formula", "off by"], rows)
    return "\n".join(lines)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, help="JSON of perf.decode")
    parser.add_argument("--out", type=Path, default=Path("docs/scaling.md"))
    args = parser.parse_args()
    measured = json.loads(args.measured.read_text()) if args.measured else None
    args.out.write_text(page(H200, measured))


if __name__ == "__main__":
    main()
