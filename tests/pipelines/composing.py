"""Hydra's part of a command for the price of a copy: a test of planning, storing or showing composes nothing anew.

A program composes its command line three times, a quarter of a second in all: Hydra asks for its mode, composes the
sweep, and `points.compose` its points. Here a process reads Hydra's files once, and the bases of the options chosen are
kept from one command to the next; everything else, `points.compose` above all, is the programs' own. A command that is
not plainly `key=value`, and one with a mistake, goes through Hydra. cli/test_compose.py holds that both give the same
points, and runs on Hydra alone itself (the fixture `hydra_itself`).
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import hydra
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from moend import paths
from pipelines.cli.hydra import Point
from pipelines.planning import points

PLAIN = re.compile(r"\+{0,2}(?!hydra\b)[\w./]+=.*", re.S)
real_main = hydra.main


class Kept:
    """Hydra's loader for one folder, what it composed so far, and the grids of sweep files."""

    def __init__(self, conf: str):
        with initialize_config_dir(conf, version_base="1.3"):
            self.loader = GlobalHydra.instance().config_loader()
        self.composer = points._Composer(self.loader, self.master())

    def master(self, *overrides: str) -> Any:
        return self.loader.load_configuration("run", list(overrides), run_mode=RunMode.MULTIRUN)

    @functools.cache  # noqa: B019
    def grids(self, sweep: str | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The axes of all grids and the grids that `+sweep=...` adds."""
        if sweep is None:
            return {}, []
        sweeper: Any = OmegaConf.to_container(self.master(sweep).hydra.sweeper)
        return sweeper.get("params") or {}, sweeper.get("grids") or []


@functools.cache
def kept(conf: str, env: tuple[str | None, ...]) -> Kept:
    """One for each folder and state of the variables that conf/paths asks."""
    return Kept(conf)


def composed(args: Sequence[str]) -> list[Point] | None:
    """The points of a command line as `hydra.main` gets it, or None where Hydra has to see it itself."""
    wanted = [a for a in args if a not in ("-m", "--multirun")]
    if not all(PLAIN.fullmatch(a) for a in wanted):
        return None
    try:
        one = kept(str(paths.folder("conf")), (os.environ.get("MOEND_STORE"), os.environ.get("MOEND_CACHE")))
        params, grids = one.grids(next((a for a in wanted if a.startswith("+sweep=")), None))
        found = points.expand(params, grids, wanted, one.loader)
        return [points._with_parts(one.composer, i, overrides) for i, overrides in enumerate(found)]
    except Exception:  # a mistake: Hydra says which
        return None


def main(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    """In the place of `hydra.main`."""

    def decorate(program: Callable[[list[Point]], int]) -> Callable[[], None]:
        entry = real_main(*args, **kwargs)(program)

        def run() -> None:
            found = composed(sys.argv[1:])
            if found is None:
                return entry()
            raise SystemExit(program(found))

        return run

    return decorate
