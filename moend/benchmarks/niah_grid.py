"""Needle in a haystack on a grid: every length with every depth, one task per length, drawn as a heatmap."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from moend.benchmarks.base import Sample, whole
from moend.benchmarks.niah import LEAST, Niah
from moend.budget import Arch
from moend.errors import UserError


@dataclass(frozen=True, kw_only=True)
class NiahGrid(Niah):
    """As Niah; `rows` and `limit` count samples at one length and depth.

    lengths: prompt tokens, a task `niah_<length>` each. depths: where the needle stands, 0 (first) to 1 (last).
    Records carry both under `axes`.
    """

    asks_several: ClassVar[bool] = False

    length: int | None = None
    rows: int | None = 2
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    depths: tuple[float, ...] = (0, 0.25, 0.5, 0.75, 1)

    def __post_init__(self) -> None:
        lengths = tuple(whole("benchmark.lengths", n, least=LEAST) or 0 for n in _listed("lengths", self.lengths))
        if self.length not in (None, max(lengths)):
            raise UserError(f"benchmark.length={self.length}: the lengths of {self.name} are benchmark.lengths")
        depths = _listed("depths", self.depths)
        for depth in depths:
            if isinstance(depth, bool) or not isinstance(depth, int | float) or not 0 <= depth <= 1:
                raise UserError(f"benchmark.depths={depth} must be a number from 0 to 1")
        self._set("lengths", lengths)
        self._set("depths", depths)
        self._set("length", max(lengths))
        self._set("all_tasks", tuple(f"niah_{n}" for n in lengths))
        super().__post_init__()

    def reference_length(self, arch: Arch) -> int:
        """The longest of the chosen lengths."""
        return max(_length(task) for task in self.task_names)

    def make_samples(self) -> list[Sample]:
        """Length by length; a larger limit appends whole rounds over the depths."""
        samples = []
        for task in self.task_names:
            length, haystack = _length(task), self._haystack(_length(task))
            for i in range(self.limit or self.rows or 1):
                for at, depth in enumerate(self.depths):
                    name = f"niah-grid-{self.split}-{self.haystack}-{length}-{depth}-k{self.keys}-s{self.seed}-{i}"
                    sample = self._sample(task, name, haystack, depth, i * len(self.depths) + at)
                    axes = {"length": length, "depth": depth}
                    samples.append(dataclasses.replace(sample, meta={**sample.meta, "axes": axes}))
        return samples

    def prompt_length(self, sample: Sample) -> int:
        """The length of its task."""
        return _length(sample.task)


def _length(task: str) -> int:
    return int(task.removeprefix("niah_"))


def _listed(field: str, values: Any) -> tuple[Any, ...]:
    """A list of a config, or one value; refused where empty or with a repetition."""
    listed = tuple(values) if isinstance(values, list | tuple) else (values,)
    if not listed or len(set(listed)) != len(listed):
        raise UserError(f"benchmark.{field}={list(listed)} must name at least one value, each once")
    return listed


BENCHMARK = NiahGrid
