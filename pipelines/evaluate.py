"""The one seam between the pipelines and the library: everything the pipelines ask of moend is asked here.

`Library.facts` says what a cell is, without weights or network; `Library.calibrate` computes an artefact;
`Library.session` loads a model and answers examples. Planner, store and launcher know nothing else of moend.
moend's heavy modules are imported inside functions: help, errors and composition need none of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from moend.errors import Blocked, Infeasible, UserError
from moend.plan import Arch, Budget
from pipelines import terminal
from pipelines.compose import unknown_key
from pipelines.identity import canonical, key
from pipelines.schema import RunConfig, mistake

if TYPE_CHECKING:
    from moend.benchmarks import Benchmark
    from moend.calibration import Calibration
    from moend.calibration.artefact import Artefact
    from moend.methods import BoundMethod, Method
    from moend.models import LoadedModel, ModelSpec


@dataclass(frozen=True)
class CalibrationNeed:
    """An artefact a cell uses: its kind, its key and the identity that the key is the hash of."""

    kind: str
    key: str
    identity: dict[str, Any] = field(compare=False, hash=False)


@dataclass(frozen=True)
class Facts:
    """What a cell is, as far as its configuration cannot say.

    identity: joins the key (weights, data, versions); `identity["method"]` is left out of the group's key.
    calibrations: in the order they are computed. expected: (task, id) of every example, in order. full_bytes,
    cell_bytes: estimates for the plan, of the longest prompt uncompressed and of the cell's own cache. One line each:
    blocked (cannot run here), absent (weights that a run will try to fetch), infeasible.
    """

    model: str
    method: str
    benchmark: str
    identity: dict[str, Any]
    calibrations: tuple[CalibrationNeed, ...]
    expected: tuple[tuple[str, str], ...]
    metrics: dict[str, str]
    unit: str
    higher_is_better: bool
    is_full: bool
    is_nll: bool
    full_bytes: int = 0
    cell_bytes: int = 0
    blocked: str | None = None
    absent: str | None = None
    infeasible: str | None = None


class Session(Protocol):
    """A loaded model and the cells of one group."""

    def bind(self, key: str, config: RunConfig, facts: Facts, artefacts: dict[str, Path]) -> dict[str, Any] | None:
        """Fit a cell's method, its artefacts loaded and verified. Returns its plan as JSON, None for `full`."""

    def run(self, jobs: list[tuple[str, int]], task: str, id: str) -> list[dict[str, Any]]:
        """One example for several (key, draw) of bound cells: one prefill, one record per job, in order."""


class Library:
    """moend, as the pipelines use it. Keeps what several cells share: specs, data, one loaded model."""

    def __init__(self) -> None:
        self._loaded: tuple[str, LoadedModel] | None = None

    # What a cell is

    def facts(self, config: RunConfig, choices: Mapping[str, str]) -> Facts:
        """Describe a cell. UserError for values the library refuses; blocked and infeasible are told, not raised."""
        from moend import models

        spec, method, bench = self._parts(config)
        arch, unreadable = self._arch(spec, config.cache)
        if arch is not None:
            bench.check(arch, config.generation.max_new_tokens)
        expected, no_data = _expected(bench)
        identity: dict[str, Any] = {
            "model": models.identity(spec, config.cache),
            "benchmark": _identity_of(bench),
            "method": method.version,
        }
        blocked = unreadable or no_data
        infeasible = None
        full = cell = 0
        if arch is not None:
            length, new = _lengths(bench, arch, config)
            full = arch.full_bytes(length)
            cell = full if method.allocator == "all" else min(Budget.parse(config.budget).to_bytes(arch, length), full)
            infeasible = self._infeasible(config, method, arch, length, new)
        return Facts(
            model=spec.label,
            method=method.name,
            benchmark=choices.get("benchmark", bench.name),
            identity=identity,
            calibrations=() if arch is None else self._needs(config, spec, method, arch, identity["model"]),
            expected=expected,
            metrics={task: bench.metric(task) for task in bench.task_names},
            unit=bench.unit,
            higher_is_better=bench.higher_is_better,
            is_full=method.allocator == "all" and set(method.precision.values()) == {16},
            is_nll=bench.kind == "nll",
            full_bytes=full,
            cell_bytes=cell,
            blocked=blocked,
            absent=models.available(spec, config.cache),
            infeasible=infeasible,
        )

    def _parts(self, config: RunConfig) -> tuple[ModelSpec, Method, Benchmark]:
        return (
            _model_spec(canonical(config.model)),
            _method(canonical(config.method)),
            _benchmark(canonical(config.benchmark)),
        )

    def _arch(self, spec: ModelSpec, cache: Path) -> tuple[Arch | None, str | None]:
        """The architecture, and why the model is not ready (None: it is, or a run will fetch it)."""
        from moend import models

        if spec.pinned_arch is not None:
            return spec.pinned_arch, None
        if (absent := models.available(spec, cache)) is not None:
            return None, absent
        return models.read_arch(spec, cache), None

    def _infeasible(self, config: RunConfig, method: Method, arch: Arch, length: int, new: int) -> str | None:
        """Whether the budget can be met: that depends on bytes only, so a table of zeros stands for any other."""
        bound = _bind(config, method, arch, length, new, {method.table: _zeros(method, arch)})
        try:
            if not bound.fits(length, new):
                bound.plan(length, new)
        except Infeasible as e:
            return f"{e}; the smallest budget it can meet is {_smallest(e, bound.budget, arch, length)}"
        return None

    def _needs(
        self, config: RunConfig, spec: ModelSpec, method: Method, arch: Arch, weights: dict[str, Any]
    ) -> tuple[CalibrationNeed, ...]:
        """The artefacts of a cell by identity, `queries` before the `sensitivity` that may use it."""
        from moend.calibration.artefact import artefact_key, identity

        calibration = _calibration(canonical(config.calibration))
        text = calibration.text or spec.calibration_text
        prompt = {"text": text, "chat_template": spec.chat_template}
        revision = str(weights.get("revision") or weights.get("weights_sha256"))
        made: dict[str, CalibrationNeed] = {}
        for kind in sorted(method.calibrations, key=lambda k: k != "queries"):
            data = key({"text": _kl_text(calibration)} if kind == "kl" else prompt)
            settings = {"dtype": spec.dtype, **calibration.settings(kind, method.scorer)}
            if "queries" in made and "scorer" in settings:
                settings["queries"] = made["queries"].key
            described = identity(str(weights["id"]), revision, arch, settings, data, _versions(kind))
            made[kind] = CalibrationNeed(kind, artefact_key(kind, described), described)
        return tuple(made.values())

    # Calibrating

    def calibrate(self, config: RunConfig, facts: Facts, need: CalibrationNeed, folder: Path) -> Artefact:
        """Load the artefact in `folder`, verified against the identity it must have, or compute and save it there."""
        from moend.calibration.artefact import Artefact

        if (folder / "artefact.json").exists():
            return Artefact.load(folder, need.identity, need.kind)
        begin = time.perf_counter()
        tensors, info = self._measure(config, facts, need, folder)
        info["seconds"] = time.perf_counter() - begin
        artefact = Artefact(need.kind, need.identity, tensors, info)
        artefact.save(folder)
        return artefact

    def _measure(
        self, config: RunConfig, facts: Facts, need: CalibrationNeed, folder: Path
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        import torch

        from moend import models
        from moend.calibration.artefact import Artefact
        from moend.calibration.kl import kl_table, named_configs, windows
        from moend.calibration.queries import TrigStatistics
        from moend.calibration.sensitivity import lattice, measure

        spec, method, _ = self._parts(config)
        loaded = self._load(spec, config.cache)
        calibration = _calibration(canonical(config.calibration))
        ids = models.calibration_ids(loaded, calibration.text)
        batch = torch.tensor([ids], device=loaded.device)
        info = {"tokens": len(ids), "text": calibration.text or spec.calibration_text}
        if need.kind == "queries":
            return TrigStatistics.measure(loaded.model, batch).tensors(), info
        statistics = None
        for other in facts.calibrations:
            if other.kind == "queries":
                statistics = Artefact.load(folder.parent / other.key, other.identity, other.kind).tensors
        shared: dict[str, Any] = {
            "eviction": calibration.eviction,
            "scorer": method.make_scorer() if calibration.eviction == "scorer" else None,
            "seeds": calibration.seeds,
            "statistics": statistics,
        }
        if need.kind == "sensitivity":
            found = measure(loaded.model, batch, lattice(calibration.keeps, calibration.bits), **shared)
            return found.tensors(), info
        kl = calibration.kl
        text = loaded.tokenizer(_kl_text(calibration), add_special_tokens=False, verbose=False)["input_ids"]
        unknown_id = loaded.tokenizer.unk_token_id
        if unknown_id is not None and text.count(unknown_id) > len(text) // 10:
            raise UserError(f"{spec.label} does not know the words of the text: set calibration.kl.text_file")
        with terminal.progress(terminal.console(), f"KL table of {spec.label}") as step:
            divergence = kl_table(
                loaded.model,
                windows(text, kl.sequences, kl.tokens).to(loaded.device),
                named_configs(kl.configs),
                positions=kl.positions,
                progress=step,
                **shared,
            )
        return divergence.tensors(), {"tokens": kl.sequences * kl.tokens, "text_file": kl.text_file}

    def plan(self, config: RunConfig, facts: Facts, artefacts: Mapping[str, Path]) -> dict[str, Any] | None:
        """The cell's RoutingPlan as JSON, from its verified artefacts and without the model; None for `full`."""
        spec, _, bench = self._parts(config)
        arch, unreadable = self._arch(spec, config.cache)
        if arch is None:
            raise Blocked(str(unreadable))
        bound = self._bound(config, facts, artefacts, arch)
        length, new = _lengths(bench, arch, config)
        return None if facts.is_full else dataclasses.asdict(bound.plan(length, new))

    def _bound(
        self, config: RunConfig, facts: Facts, artefacts: Mapping[str, Path], arch: Arch, **rest: Any
    ) -> BoundMethod:
        from moend.calibration.artefact import Artefact

        _, method, bench = self._parts(config)
        needs = {n.kind: n for n in facts.calibrations}
        loaded = {kind: Artefact.load(folder, needs[kind].identity, kind) for kind, folder in artefacts.items()}
        weights = facts.identity["model"]
        revision = str(weights.get("revision") or weights.get("weights_sha256"))
        length, new = _lengths(bench, arch, config)
        return _bind(config, method, arch, length, new, loaded, model_id=str(weights["id"]), revision=revision, **rest)

    # Evaluating

    def session(self, config: RunConfig) -> Session:
        """Load the model of a group (kept while the next group has the same)."""
        spec, _, bench = self._parts(config)
        return _Session(self, self._load(spec, config.cache), bench, config)

    def _load(self, spec: ModelSpec, cache: Path) -> LoadedModel:
        from moend import models

        name = canonical(dataclasses.asdict(spec))
        if self._loaded is None or self._loaded[0] != name:
            from transformers.utils import logging

            logging.disable_progress_bar()
            self._loaded = None  # the old model goes before the new one comes
            self._loaded = (name, models.load(spec, cache))
        return self._loaded[1]


class _Session:
    def __init__(self, library: Library, loaded: LoadedModel, bench: Benchmark, config: RunConfig):
        from moend.engine import Engine, Generation

        g = config.generation
        self.library, self.loaded, self.bench, self.config = library, loaded, bench, config
        self.engine = Engine(
            loaded, chunk=config.engine.chunk, max_bytes=config.engine.max_bytes, fuse=config.engine.fuse
        )
        self.generation = Generation(g.max_new_tokens, g.temperature, g.top_p, g.samples)
        self.samples = {(s.task, s.id): s for s in bench.samples()}
        self.bound: dict[str, BoundMethod] = {}

    def bind(self, key: str, config: RunConfig, facts: Facts, artefacts: dict[str, Path]) -> dict[str, Any] | None:
        bound = self.library._bound(config, facts, artefacts, self.loaded.arch, store_dtype=self.loaded.store_dtype)
        self.bound[key] = bound
        length, new = _lengths(self.bench, self.loaded.arch, config)
        if facts.is_full or bound.fits(length, new):
            return None
        return dataclasses.asdict(bound.plan(length, new))

    def run(self, jobs: list[tuple[str, int]], task: str, id: str) -> list[dict[str, Any]]:
        from moend.engine import Job

        sample = self.samples[task, id]
        rendered = self.bench.render(
            sample,
            self.loaded.tokenizer,
            self.loaded.arch,
            chat=self.loaded.spec.chat_template and bool(self.loaded.tokenizer.chat_template),
            max_new_tokens=self.generation.max_new_tokens,
        )
        outcomes = self.engine.run(
            rendered,
            [Job(self.bound[k], draw) for k, draw in jobs],
            self.generation,
            question_visible=self.config.question_visible or self.bench.kind == "nll",
            seed=self.config.seed,
        )
        records = []
        for (name, draw), out in zip(jobs, outcomes, strict=True):
            if self.bench.kind == "nll":
                scored: dict[str, Any] = {"score": out.answer_nll, "answer": None}
            else:
                scored = self.bench.score(sample, out.text)
            fed = out.prompt_tokens - out.compressed_tokens
            new = fed + max(rendered.max_new_tokens, len(rendered.gold_ids)) - 1
            specs = self.bound[name].specs(out.compressed_tokens, new)
            records.append(
                {
                    "task": task,
                    "id": id,
                    "draw": draw,
                    **scored,
                    "text": out.text,
                    "prompt_tokens": out.prompt_tokens,
                    "compressed_tokens": out.compressed_tokens,
                    "new_tokens": out.new_tokens,
                    "truncated": rendered.truncated,
                    "finish_reason": out.finish_reason if out.new_tokens else "none",
                    "answer_nll": out.answer_nll,
                    "token_accuracy": out.token_accuracy,
                    "compressed": out.compressed,
                    "eq1_bytes": out.eq1_bytes,
                    "resident_bytes": out.resident_bytes,
                    "resident_bytes_end": out.resident_bytes_end,
                    "resident_bytes_peak": out.resident_bytes_peak,
                    "resident_bytes_mean": out.resident_bytes_mean,
                    "full_bytes": out.full_bytes,
                    "requested": [min(s.tokens, out.compressed_tokens) for s in specs],
                    "entries": out.entries,
                    "effective_keep": [round(x, 6) for x in out.effective_keep],
                    "k_bits": out.k_bits,
                    "v_bits": out.v_bits,
                    "peak_bytes": out.peak_bytes,
                    "timing": {
                        "fused_rows": out.fused_rows,
                        "group_prefill_seconds": out.prefill_seconds,
                        "prefill_rows": len(jobs),
                        "select_seconds": out.select_seconds,
                        "pack_seconds": 0.0,  # packing is part of the fork: in select_seconds
                        "decode_seconds_share": out.decode_seconds,
                    },
                }
            )
        return records


# The configuration's groups as the library's own types; each text is bound once however many cells share it.


@functools.lru_cache(maxsize=64)
def _calibration(text: str) -> Calibration:
    from moend.calibration import Calibration

    return Calibration.from_fields(_load_json(text))


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


@functools.lru_cache(maxsize=256)
def _model_spec(text: str) -> ModelSpec:
    from moend.models import ModelSpec

    spec: ModelSpec = _typed(ModelSpec, "model", _load_json(text))
    return spec


@functools.lru_cache(maxsize=256)
def _method(text: str) -> Method:
    from moend.methods import Method, from_fields

    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in _load_json(text).items()}
    _typed(Method, "method", fields)
    return from_fields(fields)


@functools.lru_cache(maxsize=64)
def _benchmark(text: str) -> Benchmark:
    from moend.benchmarks import benchmark

    return benchmark(_load_json(text))


def _load_json(text: str) -> dict[str, Any]:
    import json

    values: dict[str, Any] = json.loads(text)
    return values


@functools.lru_cache(maxsize=64)
def _benchmark_identity(bench: Benchmark) -> str:
    return canonical(bench.identity())


def _identity_of(bench: Benchmark) -> dict[str, Any]:
    return _load_json(_benchmark_identity(bench))


@functools.lru_cache(maxsize=64)
def _expected(bench: Benchmark) -> tuple[tuple[tuple[str, str], ...], str | None]:
    """(task, id) of every example, and why there are none here; then only their number is right."""
    reason = bench.available()
    if reason is None:
        try:
            return tuple((s.task, s.id) for s in bench.samples()), None
        except Blocked as e:
            reason = str(e)
    return tuple((task, f"?{i}") for task, n in bench.expected().items() for i in range(n)), reason


def _lengths(bench: Benchmark, arch: Arch, config: RunConfig) -> tuple[int, int]:
    """The longest prompt and the most tokens fed after it, in tokens."""
    new = max(bench.output_tokens(task, config.generation.max_new_tokens) for task in bench.task_names)
    return bench.reference_length(arch), new


def _bind(
    config: RunConfig, method: Method, arch: Arch, length: int, new: int, artefacts: Mapping[str, Artefact], **rest: Any
) -> BoundMethod:
    from moend.methods import bind, reference_length

    budget = Budget.parse(config.budget)
    t_ref = reference_length(method, budget, length + new, new)
    return bind(method, budget, config.budget_protocol, arch, t_ref=t_ref, artefacts=dict(artefacts), **rest)


def _smallest(error: Infeasible, budget: Budget, arch: Arch, length: int) -> str:
    """The smallest feasible budget in the units that were typed."""
    need = int(Budget.parse(error.smallest).value)
    if budget.kind == "tokens":
        return f"{-(-need // arch.full_bytes(1))} tokens ({error.smallest})"
    if budget.kind == "ratio":
        return f"{math.ceil(need / arch.full_bytes(length) * 1000) / 10:g}% ({error.smallest})"
    return error.smallest


def _zeros(method: Method, arch: Arch) -> Artefact:
    import torch

    from moend.calibration.artefact import Artefact
    from moend.calibration.sensitivity import encode, extend_lattice, lattice

    configs = lattice(extend_lattice(tuple(method.keeps)), (16, 8, 4, 2))
    tensors = {"table": torch.zeros(arch.layers, len(configs)), "configs": encode(configs)}
    return Artefact(method.table, {}, tensors)


def _kl_text(calibration: Calibration) -> str:
    """The calibration part of the text that KL tables are measured on; no benchmark tests on it."""
    from moend.benchmarks import text

    return text.part("calibration", calibration.kl.text_file)


def agreement(sensitivity: Path, kl: Path) -> dict[str, Any]:
    """How well the proxy ranks what the KL table measures, over what both hold (MoE-nD, appendix B)."""
    from moend.calibration.artefact import Artefact
    from moend.calibration.kl import agreement as compare
    from moend.calibration.sensitivity import decode, table

    proxy, truth = Artefact.load(sensitivity), Artefact.load(kl)
    both = [c for c in decode(truth.tensors["configs"]) if c in set(decode(proxy.tensors["configs"]))]
    return compare(table(proxy, both), table(truth, both), both)


def _versions(kind: str) -> dict[str, int]:
    from moend.calibration import kl, queries, sensitivity

    versions = {"sensitivity": sensitivity.VERSION, "queries": queries.VERSION, "kl": kl.VERSION}
    return {kind: versions[kind]}


# What the report asks


def single_operations(folder: Path) -> tuple[Any, list[str]]:
    """The nine single-axis operations of a sensitivity artefact: (layers, operations) and their names."""
    from moend.calibration.artefact import Artefact
    from moend.calibration.sensitivity import decode

    artefact = Artefact.load(folder, kind="sensitivity")
    names = [c.name for c in decode(artefact.tensors["single_configs"])]
    return artefact.tensors["singles"].numpy(), names


def rescore(cell: dict[str, Any], records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records with their scores computed again from the recorded texts, without a model.

    UserError where the data are not those that the records answer: the same id may stand for another question now.
    """
    bench = _benchmark(canonical(cell["info"]["benchmark_config"]))
    if bench.kind == "nll":
        return list(records)
    need, have = cell["payload"]["facts"]["benchmark"]["data"], _identity_of(bench)["data"]
    if have != need:
        label = cell["info"]["label"]
        raise UserError(f"the data of {bench.name} changed since {label} was run: has {have}, needs {need}")
    samples = {(s.task, s.id): s for s in bench.samples()}
    return [{**r, **bench.score(samples[r["task"], r["id"]], r["text"])} for r in records]
