"""Shared by the tests of the pipelines: composing in process, and a store in a temporary folder."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import hydra
import pytest

from pipelines import run
from pipelines.cli.hydra import Point, run_hydra
from pipelines.reporting import figures
from tests.pipelines import composing, stub
from tests.pipelines.tracking.wandb_server import Server


@pytest.fixture(scope="session", autouse=True)
def _composed_once() -> Iterator[None]:
    """Commands in process are composed from what Hydra composed before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hydra, "main", composing.main)
        yield


@pytest.fixture
def hydra_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command goes through Hydra: for tests of what Hydra is asked and says."""
    monkeypatch.setattr(hydra, "main", composing.real_main)


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
    """Runs commands in process with a stub library and a store of its own. Figures are drawn where `drawn` is set."""

    def __init__(self, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        self.store, self.monkeypatch, self.capsys = store, monkeypatch, capsys
        self.library = stub.install(monkeypatch)
        self.drawn = False
        draw = figures.first
        monkeypatch.setattr(figures, "first", lambda sweep, most: draw(sweep, most) if self.drawn else ([], []))
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


@pytest.fixture(scope="session")
def no_figures() -> Callable[[], AbstractContextManager[None]]:
    """`with no_figures():` reports are written without figures, for tests that look at none: drawing is slow."""

    @contextlib.contextmanager
    def left_out() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(figures, "first", lambda sweep, most: ([], []))
            yield

    return left_out


@pytest.fixture
def undrawn(no_figures: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """`no_figures` for a whole test."""
    with no_figures():
        yield


TRACKED = ("model=recall_moe", "benchmark=recall", "calibration=recall", "benchmark.limit=2", "method=full,2d_hetero",
           "budget=25%", "-m")  # fmt: skip
# What a shell may have left behind: none of it may reach a run. The last two are secrets of other programs.
INHERITED = {
    "WANDB_RUN_ID": "inherited", "WANDB_MODE": "online", "WANDB_PROJECT": "inherited", "WANDB_ENTITY": "inherited",
    "WANDB_RUN_GROUP": "inherited", "WANDB_TAGS": "inherited", "WANDB_NAME": "inherited", "WANDB_RESUME": "must",
    "WANDB_DIR": "/proc/nowhere", "WANDB_CACHE_DIR": "/proc/nowhere", "WANDB_DISABLED": "true",
    "WANDB_API_KEY": "5ec2e7" * 6 + "aaaa", "AWS_SECRET_ACCESS_KEY": "canary-of-the-environment",
    "HF_TOKEN": "canary-of-the-hub",
}  # fmt: skip


@pytest.fixture(scope="session")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """The same evaluation without a tracker and, in a hostile shell with a home that cannot be written, with one."""
    folder = tmp_path_factory.mktemp("tracking")
    home = folder / "home"
    home.write_text("a file: nothing can be written below it, not even by root")
    with pytest.MonkeyPatch.context() as patch:
        assert run.main([*TRACKED, "tracking=none", f"paths.store={folder / 'none'}"]) == 0
        for name, value in INHERITED.items():
            patch.setenv(name, value)
        patch.setenv("HOME", str(home))
        cache = f"paths.cache={os.environ.get('MOEND_CACHE', folder / 'canary-of-the-command')}"
        assert run.main([*TRACKED, f"paths.store={folder / 'offline'}", "tracking.timeout_s=400", cache]) == 0
    assert home.is_file()
    yield folder / "none", folder / "offline"


KEY = "0123456789" * 4  # as long as a real one


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    """A server that the environment names, with a key for it; a home without any."""
    found = Server()
    monkeypatch.setenv("WANDB_BASE_URL", found.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NETRC", raising=False)
    (tmp_path / "home").mkdir()
    yield found
    found.shutdown()
    found.server_close()
