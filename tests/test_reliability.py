"""docs/reliability.md counts what may go wrong: each pair of cause and state has a test that is there and runs."""

from __future__ import annotations

import ast
import functools

from tests import ROOT

LEAST = 60


def rows() -> list[tuple[str, str, str]]:
    """Cause, state and test of each line of the table."""
    lines = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8").splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]
    return [(cause, state, test.strip("`")) for cause, state, _, test in cells]


@functools.cache
def functions_of(file: str) -> dict[str, bool]:
    """The tests of a file, and whether each is skipped by a mark of its own."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    found = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {f.name: any("skip" in ast.unparse(d) for d in f.decorator_list) for f in found}


def test_pairs_are_distinct_and_enough() -> None:
    pairs = [(cause, state) for cause, state, _ in rows()]
    assert len(pairs) == len(set(pairs)) >= LEAST
    assert len({test for *_, test in rows()}) >= LEAST


def test_each_pair_has_a_test_that_runs() -> None:
    for cause, state, test in rows():
        file, _, name = test.partition("::")
        assert functions_of(file).get(name) is False, f"{cause}, {state}: {test} is not there, or is skipped"
