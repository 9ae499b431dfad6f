"""Benchmarks: samples, prompts, scores. One Python file here and one YAML in conf/benchmark add one.

A module of this package that names its class `BENCHMARK` is a benchmark `type`; a YAML names the type and its fields.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from moend.benchmarks.base import Benchmark, Rendered, Sample, only_fields, overlap, require_disjoint
from moend.errors import UserError, unknown

__all__ = ["Benchmark", "Rendered", "Sample", "benchmark", "names", "overlap", "require_disjoint"]

_CONF = Path(__file__).resolve().parents[2] / "conf" / "benchmark"


def names() -> list[str]:
    """The benchmarks that have a YAML."""
    return sorted(p.stem for p in _CONF.glob("*.yaml"))


def benchmark(spec: str | Mapping[str, Any], /, **fields: Any) -> Benchmark:
    """The benchmark of a name (its packaged YAML) or of a dict of a YAML's fields; keyword arguments replace fields.

    UserError for an unknown name, type or field (with the nearest) and for values out of range.
    """
    if isinstance(spec, str):
        if spec not in names():
            raise unknown("benchmark", spec, names())
        text = (_CONF / f"{spec}.yaml").read_text(encoding="utf-8")
        merged = {**yaml.safe_load(text), **fields}
    else:
        merged = {**spec, **fields}
    for needed in ("name", "type"):
        if not isinstance(merged.get(needed), str):
            raise UserError(f"a benchmark needs a '{needed}', got {merged.get(needed)!r}")
    cls = _implementation(merged["type"])
    return cls(**only_fields(cls, merged))


def _implementation(kind: str) -> type[Benchmark]:
    modules = [m.name for m in pkgutil.iter_modules(__path__) if not m.ispkg]
    if kind in modules and (cls := _declared(kind)):
        return cls
    raise unknown("benchmark type", kind, [m for m in modules if _declared(m)])


def _declared(module: str) -> type[Benchmark] | None:
    return getattr(importlib.import_module(f"{__name__}.{module}"), "BENCHMARK", None)
