"""Writes the table of bytes by method, budget and moment into docs/methods.md: python -m tests.bytes_table

Bytes are predicted for the embedded model's cache (30 layers, 3 KV heads of 64) at a prompt of 1,024 tokens and 256 new
ones. A random table stands for the calibrations: joint methods hold the same bytes whatever theirs says, but for a few
parts in a thousand.
"""

from __future__ import annotations

import re
import sys

from moend.budget import Arch
from moend.errors import Infeasible
from moend.methods.spec import method_names
from tests import ROOT
from tests.moend.methods.made import bound

ARCH = Arch(30, 9, 3, 64, 8192)
TOKENS, NEW = 1024, 256
BUDGETS = ("10%", "25%", "50%")
PAGE = ROOT / "docs" / "methods.md"
MARKS = re.compile(r"(<!-- bytes: [^>]*-->\n).*?(<!-- end -->)", re.DOTALL)


def cell(name: str, budget: str, at: str) -> str:
    """MiB after the prompt and at the peak."""
    b = bound(name, budget, arch=ARCH, t_ref=None, at=at)
    try:
        after, peak = b.held(TOKENS, NEW)
    except Infeasible:
        return "infeasible"
    return f"{after / 2**20:.2f} / {peak / 2**20:.2f}"


def table() -> str:
    """One row per method, a pair of columns per budget: `prompt`, then `peak`."""
    total = [ARCH.full_bytes(TOKENS) * float(b[:-1]) / 100 / 2**20 for b in BUDGETS]
    heads = [f"{b}, {m}" for b in BUDGETS for m in ("prompt", "peak")]
    lines = [
        "MiB held after the prompt / at most, of "
        + ", ".join(f"{t:.2f} ({b})" for b, t in zip(BUDGETS, total, strict=True))
        + f": SmolLM2's layers, {TOKENS:,} tokens of prompt, {NEW} new ones.",
        "",
        "| method | " + " | ".join(heads) + " |",
        "|---|" + "---|" * len(heads),
    ]
    for name in method_names():
        cells = [cell(name, b, at) for b in BUDGETS for at in ("prompt", "peak")]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def written(text: str) -> str:
    """The page with the table as it is now."""
    return MARKS.sub(lambda m: m[1] + "\n" + table() + "\n" + m[2], text)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
