"""The pages of docs: what they tell people to type works, and what they point to is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))
ELSEWHERE = {"adding.md"}  # tests/test_adding.py runs it


def blocks(page: Path) -> list[str]:
    """The code blocks of a page that are marked as shell commands."""
    return re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p) and p.name not in ELSEWHERE], ids=lambda p: p.name)
def test_the_shell_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """In an empty folder, one after the other, as they stand; `python` is the one of the tests."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(blocks(page))],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
