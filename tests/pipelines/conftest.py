"""Shared by the tests of the pipelines: composing in process, and a store in a temporary folder."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipelines import run
from pipelines.compose import Point, run_hydra
from tests.pipelines import stub


def compose_points(args: Sequence[str]) -> list[Point]:
    """The points that a command line composes."""
    found: list[Point] = []

    def keep(points: list[Point]) -> int:
        found.extend(points)
        return 0

    assert run_hydra(keep, list(args)) == 0
    return found


@functools.cache
def sweep_points(name: str) -> tuple[Point, ...]:
    """The points of a sweep file, composed once for all tests."""
    return tuple(compose_points([f"+sweep={name}", "-m"]))


class Runs:
    """Runs commands in process with a stub library and a store of its own."""

    def __init__(self, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        self.store, self.monkeypatch, self.capsys = store, monkeypatch, capsys
        self.library = stub.install(monkeypatch)
        self.out = self.err = ""

    def __call__(self, *args: str, main: Any = run.main) -> int:
        self.capsys.readouterr()
        code: int = main([f"paths.store={self.store}", "tracking=none", *args])
        self.out, self.err = self.capsys.readouterr()
        return code


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runs:
    """`runs("method=1d", ...)` is an exit code; `.out` and `.err` hold what was printed, `.library` the stub."""
    return Runs(tmp_path / "store", monkeypatch, capsys)
