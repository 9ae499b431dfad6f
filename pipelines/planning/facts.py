"""What a plan must know of a cell: read from configurations and files' hashes, without weights or network."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moend.budget import Arch, Budget
from moend.errors import Blocked, Infeasible, UserError
from moend.version import ENGINE_VERSION
from pipelines.planning import parts, thinking
from pipelines.planning.identity import canonical
from pipelines.planning.needs import CalibrationNeed, needs, target, texts_read
from pipelines.planning.schema import RunConfig
from pipelines.store.payload import text

if TYPE_CHECKING:
    from moend.benchmarks import Benchmark
    from moend.calibration import Artefact, Target
    from moend.methods.bind import BoundMethod
    from moend.methods.spec import Method
    from moend.models.load import ModelSpec


@dataclass(frozen=True)
class Facts:
    """What a cell is, as far as its configuration cannot say.

    identity: joins the key (weights, data, versions); `identity["method"]` is left out of the group's key.
    calibrations: in the order they are computed. expected: (task, id) of every example, in order; ids are made up
    where the data is not here. shared: how many examples, one after the other, have a context in common; empty: none
    has. full_bytes, cell_bytes: estimates for the plan, of the longest prompt uncompressed and of the cell's own cache.
    arch, prompt_tokens (the longest), new_tokens (the most), reads (of the prompt: 2 where the
    model also repeats it): what time is estimated from.
    settings: every field of the method, those of its parts complete, so that equal methods have equal keys.
    One line each: blocked (cannot run here), infeasible, absent and absent_data (what a run will fetch first),
    caution (said with the plan).
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
    arch: Arch | None = None
    prompt_tokens: int = 0
    new_tokens: int = 0
    reads: int = 1
    absent_data: str | None = None
    full_bytes: int = 0
    cell_bytes: int = 0
    blocked: str | None = None
    absent: str | None = None
    infeasible: str | None = None
    caution: str | None = None
    settings: dict[str, Any] = field(default_factory=dict, compare=False, hash=False)
    shared: tuple[int, ...] = ()

    @functools.cached_property
    def contexts(self) -> tuple[tuple[tuple[str, str], ...], ...]:
        """The examples by the context that they have in common: what is computed together, in order."""
        if not self.shared:
            return tuple((example,) for example in self.expected)
        ends = itertools.accumulate(self.shared)
        return tuple(self.expected[end - n : end] for n, end in zip(self.shared, ends, strict=True))


@dataclass(frozen=True)
class Fetch:
    """Weights or data: a name, the fields they belong to, what is missing of them here (None: nothing), how to get it.

    `bring` may be called where nothing is missing: it then checks or converts what there is. Blocked where it fails.
    """

    name: str
    fields: str
    absent: str | None
    bring: Callable[[], object] = field(compare=False)


_NOT_DESCRIBED = ("seed", "engine", "cluster", "tracking")


class Planner:
    """Describes cells. Keeps what several cells of a plan share: specs, architectures, hashes, data."""

    def __init__(self) -> None:
        self._memo: dict[tuple[Any, ...], Any] = {}

    def resolve(self, config: RunConfig) -> RunConfig:
        """The configuration with what `model.dtype=auto` stands for where its work will be done.

        Jobs get the resolved configuration, so that planning and computing mean the same key.
        """
        if config.model.get("dtype") != "auto":
            return config
        found = self._once(_dtype, config, by=(text(config.model), on_gpu(config), config.cache))
        return config.model_copy(update={"model": {**config.model, "dtype": found}})

    def facts(self, config: RunConfig, choices: Mapping[str, str]) -> Facts:
        """Describe a cell. UserError for values the library refuses; blocked and infeasible are told, not raised.

        A dry run asks no network: what is not here is `absent`, and named by what the configuration pins. Cells that
        differ in nothing but their seed and where they run have the same description.
        """
        fields = (getattr(config, name) for name in RunConfig.model_fields if name not in _NOT_DESCRIBED)
        by = (choices.get("benchmark"), *(repr(x) if isinstance(x, dict) else x for x in fields))
        made: Facts = self._once(self._facts, config, choices, by=by)
        return made

    def _facts(self, config: RunConfig, choices: Mapping[str, str]) -> Facts:
        from moend.models import hub
        from moend.models import load as models

        spec, method, bench = parts.parts(config)
        made = method.make_scorer()
        network, model = not config.dry_run, text(config.model)
        missing = self._once(models.available, spec, config.cache, by=model)
        arch, unreadable = self._once(self._arch, spec, config.cache, missing, network, by=model)
        weights = self._once(models.identity, spec, config.cache, by=model, network=network)
        if arch is not None:
            bench.check(arch, config.generation.max_new_tokens)
        expected, shared, no_data, no_data_yet = self._once(_expected, bench, network)
        identity: dict[str, Any] = {"model": weights, "benchmark": identity_of(bench), "method": method.version}
        identity |= {"engine": ENGINE_VERSION, "scorer": None if made is None else made.version}
        if missing and spec.source == "hub" and hub.is_off():
            unreadable = unreadable or missing
        if not config.question_visible and not (no_data or no_data_yet) and (why := bench.unseen()):
            raise UserError(f"question_visible=false: {why}")
        if config.engine.timed and config.engine.fuse:
            raise UserError("engine.timed=true measures each cell by itself: set engine.fuse=false")
        if config.engine.timed and bench.kind == "nll":
            raise UserError(f"engine.timed=true times what is generated, and {bench.name} generates nothing")
        calibrations = () if arch is None else needs(config, arch, weights)
        seen = None if no_data or no_data_yet else self._contamination(config, bench, calibrations)
        tested = bench.split == "test"
        cautions = (
            bench.caution(config.generation.samples),
            thinking.check(spec, bench, config.generation),
            None if tested else seen,
        )
        infeasible = None
        full = cell = length = new = 0
        if arch is not None:
            length, new = lengths(bench, arch, config)
            full = arch.full_bytes(length)
            cell = (
                full
                if method.keeps_all and not method.quantises
                else min(Budget.parse(config.budget).to_bytes(arch, length), full)
            )
            asked = canonical(
                [config.method, config.calibration, config.budget, config.budget_protocol, config.budget_at]
            )
            infeasible = self._once(self._infeasible, config, method, arch, length, new, by=(asked, arch, length, new))
        return Facts(
            model=spec.label,
            method=method.label,
            benchmark=choices.get("benchmark", bench.name),
            identity=identity,
            calibrations=calibrations,
            expected=expected,
            metrics={task: bench.metric(task) for task in bench.task_names},
            unit=bench.unit,
            higher_is_better=bench.higher_is_better,
            is_full=method.keeps_all and not method.quantises,
            is_nll=bench.kind == "nll",
            arch=arch,
            prompt_tokens=length,
            new_tokens=new,
            reads=2 if made is not None and "reconstruction" in made.observes else 1,
            full_bytes=full,
            cell_bytes=cell,
            blocked=unreadable or no_data or (seen if tested else None),
            absent=missing,
            absent_data=no_data_yet,
            infeasible=infeasible,
            caution=" | ".join(filter(None, cautions)) or None,
            settings=method.settings,
            shared=shared,
        )

    def _contamination(
        self, config: RunConfig, bench: Benchmark, calibrations: tuple[CalibrationNeed, ...]
    ) -> str | None:
        """What a cell's calibrations have read of its benchmark, in one line; None: nothing. Its data are here."""
        read = {need.kind: texts_read(config, need.kind) for need in calibrations}
        kinds: dict[tuple[str, ...], list[str]] = {}
        for name, found in read.items():
            kinds.setdefault(found, []).append(name)
        by = canonical(identity_of(bench))
        lines = (self._once(_read, found, bench, " and ".join(names), by=(by, found)) for found, names in kinds.items())
        return next(filter(None, lines), None)

    def fetches(self, config: RunConfig) -> tuple[Fetch, Fetch]:
        """What a cell needs besides this package: its weights and its data."""
        from moend.models import load as models

        spec, _, bench = parts.parts(config)
        return (
            Fetch(
                f"model {spec.label}",
                canonical(config.model),
                models.available(spec, config.cache),
                lambda: models.fetch(spec, config.cache),
            ),
            Fetch(
                f"data {bench.name}",
                canonical(config.benchmark),
                bench.available() or bench.absent(),
                bench.fetch,
            ),
        )

    def _once(self, make: Callable[..., Any], *args: Any, by: Any = None, **kwargs: Any) -> Any:
        """A call's result, made once for all cells of a plan. by: what it depends on, where `args` cannot be hashed."""
        name = (make.__name__, args if by is None else by)
        if name not in self._memo:
            self._memo[name] = make(*args, **kwargs)
        return self._memo[name]

    def _arch(self, spec: ModelSpec, cache: Path, missing: str | None, network: bool) -> tuple[Arch | None, str | None]:
        """The architecture, and why it is not to be had. Without network both may be unknown until a run asks."""
        from moend.models import load as models

        if spec.pinned_arch is not None:
            return spec.pinned_arch, None
        if missing and not network:
            return None, None
        try:
            return models.read_arch(spec, cache), None
        except Blocked as e:
            return None, str(e)

    def _infeasible(self, config: RunConfig, method: Method, arch: Arch, length: int, new: int) -> str | None:
        """Whether the budget can be met: that depends on bytes only, so a table of zeros stands for any other."""
        by = canonical([method.settings, arch.__dict__, config.calibration])
        zeros = self._once(_zeros, target(config), arch, by=by)
        bound = bind_method(config, method, arch, length, new, zeros)
        try:
            if not bound.fits(length, new):
                bound.plan(length, new)
        except Infeasible as e:
            return f"{e}; the smallest budget it can meet is {_smallest(e, bound.budget, arch, length)}"
        return None


@functools.lru_cache(maxsize=64)
def _benchmark_identity(bench: Benchmark) -> str:
    return canonical(bench.identity())


def identity_of(bench: Benchmark) -> dict[str, Any]:
    return json.loads(_benchmark_identity(bench))


def _expected(
    bench: Benchmark, network: bool
) -> tuple[tuple[tuple[str, str], ...], tuple[int, ...], str | None, str | None]:
    """(task, id) of every example, how many share each context, why there are none here, what a run will fetch.

    Without the data only the number of examples is right.
    """
    reason, absent = bench.available(), bench.absent()
    if reason is None and (network or absent is None):
        try:
            shared = tuple(map(len, bench.contexts())) if bench.questions_per_context > 1 else ()
            return tuple((s.task, s.id) for s in bench.samples()), shared, None, None
        except Blocked as e:
            reason = str(e)
    made_up = tuple((task, f"?{i}") for task, n in bench.expected().items() for i in range(n))
    return made_up, (), reason, absent


def _read(texts: tuple[str, ...], bench: Benchmark, names: str) -> str | None:
    from moend.benchmarks.contamination import contamination

    return contamination(texts, bench.samples(), f"the calibration ({names})")


def lengths(bench: Benchmark, arch: Arch, config: RunConfig) -> tuple[int, int]:
    """The longest prompt and the most tokens fed after it, in tokens."""
    return bench.reference_length(arch), bench.fed_tokens(config.generation.max_new_tokens)


def bind_method(
    config: RunConfig, method: Method, arch: Arch, length: int, new: int, artefacts: Mapping[str, Artefact], **rest: Any
) -> BoundMethod:
    from moend.methods.bind import bind, reference_length

    budget = Budget.parse(config.budget)
    t_ref = reference_length(method, budget, length + new, new)
    rest |= {"t_ref": t_ref, "at": config.budget_at, "artefacts": dict(artefacts)}
    return bind(method, budget, config.budget_protocol, arch, **rest)


def _smallest(error: Infeasible, budget: Budget, arch: Arch, length: int) -> str:
    """The smallest feasible budget in the units that were typed."""
    need = int(Budget.parse(error.smallest).value)
    if budget.kind == "tokens":
        return f"{-(-need // arch.full_bytes(1))} tokens ({error.smallest})"
    if budget.kind == "ratio":
        return f"{math.ceil(need / arch.full_bytes(length) * 1000) / 10:g}% ({error.smallest})"
    return error.smallest


def _zeros(asked: Target, arch: Arch) -> dict[str, Artefact]:
    """Calibrations of a model that does not mind anything: enough to know whether a budget can be met.

    They hold what the calibration's own would, as far as that bounds the budgets that can be met.
    """
    from moend.calibration import Artefact, kind

    return {name: Artefact(name, {}, kind(name).zeros(asked, arch)) for name in asked.method.calibrations}


def on_gpu(config: RunConfig) -> bool:
    """Whether the work will be done on a GPU: of this machine, or of a cluster's nodes."""
    device = str(config.model.get("device", "auto"))
    if device != "auto":
        return not device.startswith("cpu")
    if config.cluster.name == "slurm":
        return config.cluster.gpus != 0
    import torch

    return torch.cuda.is_available()


def _dtype(config: RunConfig) -> str:
    """The type that a model computes in where none was asked for."""
    from moend.models import load as models

    spec, _, _ = parts.parts(config)
    return models.resolve_dtype(spec, config.cache, gpu=on_gpu(config))
