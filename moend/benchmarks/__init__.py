"""Benchmarks: samples, prompts, scores. One Python file here and one YAML in conf/benchmark add one.

A module that names its class `BENCHMARK` is a benchmark `type`: one of this package by its name, one of the user's own
by its dotted path. A YAML names the type and its fields. docs/adding.md shows it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import yaml

from moend import paths
from moend.benchmarks.base import Benchmark, Rendered, Sample, only_fields, overlap, require_disjoint
from moend.errors import UserError, unknown

__all__ = ["Benchmark", "Rendered", "Sample", "benchmark", "implementation", "names", "overlap", "require_disjoint"]

_CONF = paths.folder("conf", "benchmark")


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
        loaded = yaml.safe_load((_CONF / f"{spec}.yaml").read_text(encoding="utf-8"))
        # what Hydra fills in from elsewhere (a folder) has no value here: the field's own default
        merged = {k: v for k, v in loaded.items() if not str(v).startswith("${")} | fields
    else:
        merged = {**spec, **fields}
    for needed in ("name", "type"):
        if not isinstance(merged.get(needed), str):
            raise UserError(f"a benchmark needs a '{needed}', got {merged.get(needed)!r}")
    cls = implementation(merged["type"])
    return cls(**only_fields(cls, merged))


def implementation(kind: str) -> type[Benchmark]:
    """The class of a benchmark type: a module here, or a dotted path to a module of the user's own."""
    if "." in kind:
        try:
            module = importlib.import_module(kind)
        except ModuleNotFoundError as e:
            if e.name is None or not f"{kind}.".startswith(f"{e.name}."):  # the module is there, what it needs is not
                raise
            raise UserError(f"benchmark type '{kind}' is not a module that Python finds (PYTHONPATH says where)") from e
        return _declared(module, kind)
    modules = [m.name for m in pkgutil.iter_modules(__path__) if not m.ispkg]
    if kind in modules and hasattr(found := importlib.import_module(f"{__name__}.{kind}"), "BENCHMARK"):
        return _declared(found, kind)
    types = [m for m in modules if hasattr(importlib.import_module(f"{__name__}.{m}"), "BENCHMARK")]
    raise unknown("benchmark type", kind, types)


def _declared(module: ModuleType, kind: str) -> type[Benchmark]:
    cls = getattr(module, "BENCHMARK", None)
    if not (isinstance(cls, type) and issubclass(cls, Benchmark)):
        raise UserError(f"benchmark type '{kind}': {module.__file__} must name its class BENCHMARK, a moend Benchmark")
    return cls
