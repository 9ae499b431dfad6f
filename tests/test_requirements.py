"""Every one of the 25 requirements has a test, or an issue that brings it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

# Requirement -> what it waits for. Only what a later issue delivers may stand here.
LATER: dict[int, str] = {}
MARK = re.compile(r"pytest\.mark\.req\(([\d, ]+)\)")


def held() -> dict[int, list[str]]:
    """Requirement -> test files that carry its mark."""
    out: dict[int, list[str]] = {}
    for path in sorted(Path(__file__).parent.rglob("test_*.py")):
        if path.name == Path(__file__).name:
            continue
        for match in MARK.finditer(path.read_text(encoding="utf-8")):
            for number in match[1].split(","):
                out.setdefault(int(number), []).append(path.name)
    return out


@pytest.mark.parametrize("number", range(1, 26))
def test_each_requirement_has_a_test(number: int) -> None:
    assert number in held() or number in LATER, f"requirement {number} has no test marked @pytest.mark.req({number})"


def test_nothing_waits_that_is_there() -> None:
    assert not [n for n in LATER if n in held()]
