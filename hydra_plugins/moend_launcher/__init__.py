"""Hydra only instantiates plugins whose class lives under `hydra_plugins.`; the work is in pipelines.planning.points.

Every Hydra program of the environment imports this module at its start, so it imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from moend import paths


class MoendSearchPath(SearchPathPlugin):
    """Makes `+sweep=<name>` find sweeps/sweep/<name>.yaml, from a checkout and from a wheel."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("moend", f"file://{paths.folder('sweeps')}")


class MoendSweeper(BasicSweeper):
    """Hydra's grid, or a union of several, handed to the launcher whole; writes no multirun.yaml and composes once.

    `params` are the axes of all grids, `grids` a list of more axes each (pipelines.planning.points.expand).
    """

    def __init__(self, params: Mapping[str, Any] | None = None, grids: Sequence[Mapping[str, Any]] | None = None):
        super().__init__(max_batch_size=None, params=dict(params or {}))
        self.grids = grids or ()

    def sweep(self, arguments: list[str]) -> Any:
        from pipelines.planning.points import expand

        assert self.hydra_context is not None and self.launcher is not None
        points = expand(self.params or {}, self.grids, arguments, self.hydra_context.config_loader)
        return self.launcher.launch(points, initial_job_idx=0)


class MoendLauncher(Launcher):
    """Composes every point of the sweep and hands all of them to the program at once; its answer is the exit code."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.program, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from pipelines.planning.points import compose

        raise SystemExit(self.program(compose(self.context.config_loader, self.config, job_overrides)))
