"""The groups of a configuration as the library's own types, each text bound once however many cells share it."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moend.errors import UserError
from pipelines.cli.hydra import unknown_key
from pipelines.planning.identity import canonical
from pipelines.planning.schema import RunConfig, mistake

if TYPE_CHECKING:
    from moend.benchmarks import Benchmark
    from moend.calibration import Calibration
    from moend.methods.spec import Method
    from moend.models.load import ModelSpec


def parts(config: RunConfig) -> tuple[ModelSpec, Method, Benchmark]:
    """A cell's model, method and benchmark."""
    return (
        model_spec(canonical(config.model)),
        method(canonical(config.method)),
        benchmark(canonical(config.benchmark), config.generation.reasoning, config.generation.thinking).at(
            config.cache
        ),
    )


@functools.lru_cache(maxsize=64)
def calibration(text: str) -> Calibration:
    from moend.calibration import Calibration

    return Calibration.from_fields(json.loads(text))


@functools.lru_cache(maxsize=256)
def model_spec(text: str) -> ModelSpec:
    from moend.models.load import ModelSpec

    spec: ModelSpec = _typed(ModelSpec, "model", json.loads(text))
    return spec


@functools.lru_cache(maxsize=256)
def method(text: str) -> Method:
    from moend.methods.spec import Method, from_fields

    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(text).items()}
    _typed(Method, "method", fields)
    return from_fields(fields)


@functools.lru_cache(maxsize=64)
def benchmark(text: str, reasoning: bool, thinking: str) -> Benchmark:
    from moend.benchmarks import benchmark

    fields = json.loads(text)
    if "reasoning" in fields:
        raise UserError("benchmark.reasoning is set by generation.reasoning (generation=reasoning)")
    if "thinking" in fields:
        raise UserError("benchmark.thinking is set by generation.thinking")
    return benchmark(fields, reasoning=reasoning, thinking=thinking)


def _typed(cls: Any, group: str, values: Mapping[str, Any]) -> Any:
    """A library dataclass from a config group, its types checked; unknown and wrong fields are UserErrors."""
    from pydantic import TypeAdapter, ValidationError

    known = [f.name for f in dataclasses.fields(cls)]
    for name in values:
        if name not in known:
            raise UserError(unknown_key(f"{group}.{name}", [f"{group}.{k}" for k in known]))
    try:
        return TypeAdapter(cls).validate_python(dict(values))
    except ValidationError as e:
        raise mistake(e, group) from None
