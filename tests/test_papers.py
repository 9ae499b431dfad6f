"""docs/papers.md names what there is: every file of its list, every sweep file, nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
LOCAL = {"demo", "quickstart", "arena"}  # of no paper


def test_every_file_of_the_list_is_there() -> None:
    named = set(re.findall(r"`([\w/.]+/[\w.]+\.(?:py|yaml|md))`", TEXT))
    assert len(named) > 30
    assert not [name for name in named if not (ROOT / name).is_file()]


def test_every_line_says_where_it_is_computed_tested_and_shown() -> None:
    lines = [x for x in TEXT.splitlines() if re.match(r"\| (MoE-nD|RippleKV|MoEZip) \|", x)]
    assert len(lines) > 20
    assert all(line.count("`") == 6 and "| `tests/" in line for line in lines)


def test_every_sweep_of_a_paper_is_in_the_table() -> None:
    table = TEXT[TEXT.index("## Sweeps") : TEXT.index("## What was decided")]
    files = {p.stem for p in (ROOT / "sweeps" / "sweep").glob("*.yaml")}
    named = set(re.findall(r"`(\w+)`", table)) & {*files, *re.findall(r"`((?:moend|ripple|moezip)_\w+)`", table)}
    papers = {n for n in files if n.startswith(("moend_", "ripple_", "moezip_")) or n == "baselines_longbench"}
    assert papers == named - LOCAL
