"""The one seam between the pipelines and the library: everything the pipelines ask of moend is asked here.

`Library.facts` says what a cell is, without weights or network; `Library.calibrate` computes an artefact;
`Library.session` loads a model and answers examples. Planner, store and launcher know nothing else of moend.
moend's heavy modules are imported inside functions: help, errors and composition need none of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from moend.budget import Arch, Budget
from moend.errors import Blocked, Infeasible, UserError
from pipelines.cli import terminal
from pipelines.cli.hydra import unknown_key
from pipelines.planning.identity import canonical, key
from pipelines.planning.schema import RunConfig, mistake

if TYPE_CHECKING:
    import torch

    from moend.benchmarks import Benchmark, Sample
    from moend.calibration import AgreementSettings, Calibration, DamageSettings, RippleSettings
    from moend.calibration.artefact import Artefact
    from moend.engine import Outcome
    from moend.methods.bind import BoundMethod, Method
    from moend.models.load import LoadedModel, ModelSpec


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
    calibrations: in the order they are computed. expected: (task, id) of every example, in order; ids are made up
    where the data is not here. full_bytes, cell_bytes: estimates for the plan, of the longest prompt uncompressed and
    of the cell's own cache. arch, prompt_tokens (the longest), new_tokens (the most), reads (of the prompt: 2 where the
    model also repeats it): what time is estimated from.
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


class Session(Protocol):
    """A loaded model and the cells of one group."""

    def bind(self, key: str, config: RunConfig, facts: Facts, artefacts: dict[str, Path]) -> dict[str, Any] | None:
        """Fit a cell's method, its artefacts loaded and verified. Returns its plan as JSON, or None: there is none."""

    def run(self, jobs: list[tuple[str, int]], task: str, id: str) -> list[dict[str, Any]]:
        """One example for several (key, draw) of bound cells: one prefill, one record per job, in order."""


@dataclass(frozen=True)
class Fetch:
    """Weights or data: a name, the fields they belong to, what is missing of them here (None: nothing), how to get it.

    `bring` may be called where nothing is missing: it then checks or converts what there is. Blocked where it fails.
    """

    name: str
    fields: str
    absent: str | None
    bring: Callable[[], object] = field(compare=False)


class Library:
    """moend, as the pipelines use it. Keeps what several cells share: specs, data, one loaded model."""

    def __init__(self) -> None:
        self._loaded: tuple[str, LoadedModel] | None = None
        self._memo: dict[tuple[Any, ...], Any] = {}

    # What a cell is

    def facts(self, config: RunConfig, choices: Mapping[str, str]) -> Facts:
        """Describe a cell. UserError for values the library refuses; blocked and infeasible are told, not raised.

        A dry run asks no network: what is not here is `absent`, and named by what the configuration pins.
        """
        from moend.models import load as models

        spec, method, bench = self._parts(config)
        made = method.make_scorer()
        network, model = not config.dry_run, canonical(config.model)
        missing = self._once(models.available, spec, config.cache, by=model)
        arch, unreadable = self._once(self._arch, spec, config.cache, missing, network, by=model)
        weights = self._once(models.identity, spec, config.cache, by=model, network=network)
        if arch is not None:
            bench.check(arch, config.generation.max_new_tokens)
        expected, no_data, no_data_yet = self._once(_expected, bench, network)
        identity: dict[str, Any] = {"model": weights, "benchmark": _identity_of(bench), "method": method.version}
        if missing and spec.source == "hub" and models.hub_is_off():
            unreadable = unreadable or missing
        infeasible = None
        full = cell = length = new = 0
        if arch is not None:
            length, new = _lengths(bench, arch, config)
            full = arch.full_bytes(length)
            cell = full if method.allocator == "all" else min(Budget.parse(config.budget).to_bytes(arch, length), full)
            asked = canonical([config.method, config.calibration, config.budget, config.budget_protocol])
            infeasible = self._once(self._infeasible, config, method, arch, length, new, by=(asked, arch, length, new))
        return Facts(
            model=spec.label,
            method=method.label,
            benchmark=choices.get("benchmark", bench.name),
            identity=identity,
            calibrations=() if arch is None else self._needs(config, spec, method, arch, weights),
            expected=expected,
            metrics={task: bench.metric(task) for task in bench.task_names},
            unit=bench.unit,
            higher_is_better=bench.higher_is_better,
            is_full=method.allocator == "all" and set(method.precision.values()) == {16},
            is_nll=bench.kind == "nll",
            arch=arch,
            prompt_tokens=length,
            new_tokens=new,
            reads=2 if made is not None and "reconstruction" in made.observes else 1,
            full_bytes=full,
            cell_bytes=cell,
            blocked=unreadable or no_data,
            absent=missing,
            absent_data=no_data_yet,
            infeasible=infeasible,
            caution=bench.caution(config.generation.samples),
        )

    def fetches(self, config: RunConfig) -> tuple[Fetch, Fetch]:
        """What a cell needs besides this package: its weights and its data."""
        from moend.models import load as models

        spec, _, bench = self._parts(config)
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

    def _parts(self, config: RunConfig) -> tuple[ModelSpec, Method, Benchmark]:
        return (
            _model_spec(canonical(config.model)),
            _method(canonical(config.method)),
            _benchmark(canonical(config.benchmark), config.generation.reasoning).at(config.cache),
        )

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
        made = _calibration(canonical(config.calibration))
        measured = made.damage.configs if method.table == "damage" else tuple(made.keeps)
        zeros = self._once(_zeros, method, arch, made, by=(tuple(method.keeps), method.table, arch, measured))
        bound = _bind(config, method, arch, length, new, zeros)
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
        quantiser = ("agreement",) if method.quantises else ()
        agree = _agreement(calibration, spec)
        for kind in (*sorted(method.calibrations, key=lambda k: k != "queries"), *quantiser):
            texts = {
                "kl": lambda: {"text": _kl_text(calibration)},
                "ripple": lambda: {"texts": _example_texts(calibration.ripple, calibration.ripple.examples)},
                "damage": lambda: {"texts": _example_texts(calibration.damage, _damage_examples(calibration.damage))},
                "agreement": lambda: {"texts": _example_texts(agree, agree.examples)},
            }
            data = key(texts.get(kind, lambda: prompt)())
            settings = {"dtype": spec.dtype, **calibration.settings(kind, method.scorer)}
            if kind == "ripple":  # what the method protects is left alone
                settings |= {"n_sink": method.n_sink, "recent": method.recent}
            if kind == "damage":  # and how it stores what it keeps
                held = ("n_sink", "recent", "group", "window", "channels")
                settings |= {"method": {name: getattr(method, name) for name in held}}
                settings |= {"heads": True} if method.heads else {}
            if kind == "agreement":  # how it stores, not what it keeps
                settings |= {"store_dtype": spec.store_dtype}
                settings |= {name: getattr(method, name) for name in ("group", "channels", "window")}
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

        from moend.calibration.artefact import Artefact
        from moend.calibration.kl import kl_table, named_configs, windows
        from moend.calibration.sensitivity import lattice, measure
        from moend.calibration.trig import TrigStatistics
        from moend.models import load as models

        spec, method, _ = self._parts(config)
        loaded = self._load(spec, config.cache)
        calibration = _calibration(canonical(config.calibration))
        ids = models.calibration_ids(loaded, calibration.text)
        batch = torch.tensor([ids], device=loaded.device)
        info = {"tokens": len(ids), "text": calibration.text or spec.calibration_text}
        if need.kind == "agreement":
            return self._agreement(spec, method, loaded, calibration)
        if need.kind == "ripple":
            return self._ripple(spec, method, loaded, calibration)
        if need.kind == "queries":
            return TrigStatistics.measure(loaded.model, batch).tensors(), info
        statistics = None
        for other in facts.calibrations:
            if other.kind == "queries":
                statistics = Artefact.load(folder.parent / other.key, other.identity, other.kind).tensors
        if need.kind == "damage":
            return self._damage(spec, method, loaded, calibration, statistics)
        shared: dict[str, Any] = {
            "eviction": calibration.measured_eviction(method.scorer),
            "scorer": method.make_scorer() if calibration.eviction == "scorer" else None,
            "seeds": calibration.seeds,
            "statistics": statistics,
        }
        if need.kind == "sensitivity":
            found = measure(loaded.model, batch, lattice(calibration.keeps, calibration.bits), **shared)
            return found.tensors(), info
        kl = calibration.kl
        text = _token_ids(loaded, _kl_text(calibration), "set calibration.kl.text_file")
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

    def _ripple(
        self, spec: ModelSpec, method: Method, loaded: LoadedModel, calibration: Calibration
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        from moend.calibration.ripple import Noise, profile, summary
        from moend.calibration.sweep import Base

        s = calibration.ripple
        ids = _examples(loaded, s, s.examples, "calibration.ripple")
        a = s.relative_noise
        noises = [Noise(a, s.seed)]
        if s.stability:
            noises += [*(Noise(a * f, s.seed) for f in (1 / 3, 1 / 2, 2, 4)), Noise(a, s.seed + 1)]
        scorer = method.make_scorer()
        if scorer is None:
            raise UserError(f"{method.name} has no scorer: nothing could be evicted")
        recent = method.recent if isinstance(method.recent, int) else int(method.recent * s.prefix)
        keeps = sorted(set(s.damage))
        with terminal.progress(terminal.console(), f"ripple profile of {spec.label}") as step:
            made = profile(
                loaded.model,
                ids.to(loaded.device),
                s.window,
                Base(scorer, method.n_sink, recent),
                noises=noises,
                draws=s.draws,
                keeps=keeps,
                progress=step,
            )
        tensors = made.tensors()
        said = summary(tensors, noises, keeps)
        return tensors, {"tokens": ids.numel(), "text": s.text, "text_file": s.text_file, "keeps": keeps, **said}

    def _damage(
        self,
        spec: ModelSpec,
        method: Method,
        loaded: LoadedModel,
        calibration: Calibration,
        statistics: dict[str, Any] | None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        from moend.calibration.damage import damage_table, repeated
        from moend.calibration.sensitivity import Config
        from moend.calibration.sweep import Base

        s = calibration.damage
        scorer = method.make_scorer()
        if scorer is None:
            raise UserError(f"{method.name} has no scorer: nothing could be evicted")
        ids = _examples(loaded, s, _damage_examples(s), "calibration.damage")
        parts = {kind: ids[i :: len(s.kinds)] for i, kind in enumerate(s.kinds)}  # no kind has another's text
        examples = {k: repeated(x, s.window, s.cue) if k == "recall" else x for k, x in parts.items()}
        with terminal.progress(terminal.console(), f"damage table of {spec.label}") as step:
            made = damage_table(
                loaded.model,
                {kind: x.to(loaded.device) for kind, x in examples.items()},
                s.window,
                [Config(*c) for c in s.configs],
                Base(scorer, method.n_sink, method.recent),
                method.storage,
                every=s.every,
                heads=method.heads,
                statistics=statistics,
                progress=step,
            )
        info = {"tokens": ids.numel(), "kinds": list(s.kinds), "text": s.text, "text_file": s.text_file}
        return made.tensors(), info

    def _agreement(
        self, spec: ModelSpec, method: Method, loaded: LoadedModel, calibration: Calibration
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        from moend.calibration.agreement import BITS, token_agreement

        s = _agreement(calibration, spec)
        ids = _examples(loaded, s, s.examples, "calibration.agreement")
        with terminal.progress(terminal.console(), f"token agreement on {spec.label}") as step:
            hits = token_agreement(
                loaded.model,
                ids.to(loaded.device),
                s.window,
                method.storage,
                dtype=loaded.store_dtype,
                progress=step,
            )
        shares = {str(b): float(h.float().mean()) for b, h in zip(BITS, hits, strict=True)}
        info = {"text": s.text, "text_file": s.text_file, "tokens": hits[0].numel(), "agreement": shares}
        return {"hits": hits.to("cpu").byte()}, info

    def plan(self, config: RunConfig, facts: Facts, artefacts: Mapping[str, Path]) -> dict[str, Any] | None:
        """The cell's RoutingPlan as JSON, from its verified artefacts, without the model; None where there is none."""
        from moend.models import load as models

        spec, _, bench = self._parts(config)
        arch = facts.arch or models.read_arch(spec, config.cache)
        bound = self._bound(config, facts, artefacts, arch)
        length, new = _lengths(bench, arch, config)
        return None if facts.is_full or bound.per_sample else dataclasses.asdict(bound.plan(length, new))

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
        from moend.models import load as models

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
            loaded,
            chunk=config.engine.chunk,
            max_bytes=config.engine.max_bytes,
            fuse=config.engine.fuse,
            flips=config.engine.routing_flips,
        )
        self.generation = Generation(g.max_new_tokens, g.temperature, g.top_p, g.samples)
        self.samples = {(s.task, s.id): s for s in bench.samples()}
        self.first = next(iter(self.samples))
        self.bound: dict[str, BoundMethod] = {}

    def bind(self, key: str, config: RunConfig, facts: Facts, artefacts: dict[str, Path]) -> dict[str, Any] | None:
        bound = self.library._bound(config, facts, artefacts, self.loaded.arch, store_dtype=self.loaded.store_dtype)
        self.engine.admit(bound, question_visible=config.question_visible, asks=self.bench.kind != "nll")
        self.bound[key] = bound
        length, new = _lengths(self.bench, self.loaded.arch, config)
        if facts.is_full or bound.per_sample or bound.fits(length, new):
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
            positions=(task, id) == self.first,  # one example's are enough for a picture
        )
        records = []
        for (name, draw), out in zip(jobs, outcomes, strict=True):
            if self.bench.kind == "nll":
                scored: dict[str, Any] = {"score": out.answer_nll, "answer": None}
            else:
                finished = out.finish_reason != "length"
                scored = self.bench.score(sample, out.text, finished=finished, opened=rendered.thinking)
            fed = out.prompt_tokens - out.compressed_tokens
            new = fed + max(rendered.max_new_tokens, len(rendered.gold_ids)) - 1
            specs = self.bound[name].specs(out.compressed_tokens, new)
            records.append(
                {
                    "task": task,
                    "id": id,
                    "draw": draw,
                    "axes": sample.meta.get("axes"),
                    "gold": list(sample.gold),
                    "scored_meta": {k: sample.meta[k] for k in self.bench.scored_meta},
                    **scored,
                    "text": out.text,
                    "thinking": rendered.thinking,
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
                    "diagnostics": out.diagnostics,
                    "kept": self._kept(out, rendered.ids, sample) if out.positions else None,
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

    def _kept(self, out: Outcome, ids: Sequence[int], sample: Sample) -> dict[str, Any]:
        prompt = self.loaded.tokenizer.decode(list(ids[: out.compressed_tokens]))
        return kept_map(out.positions, out.compressed_tokens, prompt, sample.gold[0] if sample.gold else "")


KEPT_BINS = 128


def kept_map(positions: Sequence[Sequence[torch.Tensor]], tokens: int, prompt: str, gold: str) -> dict[str, Any]:
    """Where the kept entries of one sequence lie, small enough for a record.

    positions: of each layer those of each of its heads. layers: a text per layer, two hexadecimal digits for each of at
    most KEPT_BINS equal pieces of the prompt: the share of heads and entries kept there, ff for all. answer: where the
    gold answer stands in the text of those tokens, as a share of its characters, None unless it stands there once.
    """
    import torch

    bins = min(KEPT_BINS, tokens)
    room = torch.bincount(torch.arange(tokens) * bins // tokens, minlength=bins)
    layers = []
    for heads in positions:
        counts = sum(torch.bincount(p.long().cpu() * bins // tokens, minlength=bins) for p in heads)
        layers.append(bytes((255 * counts / (room * len(heads))).round().int().tolist()).hex())
    once = bool(gold) and prompt.count(gold) == 1
    answer = (prompt.index(gold) + len(gold) / 2) / len(prompt) if once else None
    return {"tokens": tokens, "layers": layers, "answer": answer}


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
    from moend.models.load import ModelSpec

    spec: ModelSpec = _typed(ModelSpec, "model", _load_json(text))
    return spec


@functools.lru_cache(maxsize=256)
def _method(text: str) -> Method:
    from moend.methods.bind import Method, from_fields

    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in _load_json(text).items()}
    _typed(Method, "method", fields)
    return from_fields(fields)


@functools.lru_cache(maxsize=64)
def _benchmark(text: str, reasoning: bool) -> Benchmark:
    from moend.benchmarks import benchmark

    fields = _load_json(text)
    if "reasoning" in fields:
        raise UserError("benchmark.reasoning is set by generation.reasoning (generation=reasoning)")
    return benchmark(fields, reasoning=reasoning)


def _load_json(text: str) -> dict[str, Any]:
    import json

    values: dict[str, Any] = json.loads(text)
    return values


@functools.lru_cache(maxsize=64)
def _benchmark_identity(bench: Benchmark) -> str:
    return canonical(bench.identity())


def _identity_of(bench: Benchmark) -> dict[str, Any]:
    return _load_json(_benchmark_identity(bench))


def _expected(bench: Benchmark, network: bool) -> tuple[tuple[tuple[str, str], ...], str | None, str | None]:
    """(task, id) of every example, why there are none here, and what a run will fetch for them.

    Without the data only the number of examples is right.
    """
    reason, absent = bench.available(), bench.absent()
    if reason is None and (network or absent is None):
        try:
            return tuple((s.task, s.id) for s in bench.samples()), None, None
        except Blocked as e:
            reason = str(e)
    return tuple((task, f"?{i}") for task, n in bench.expected().items() for i in range(n)), reason, absent


def _lengths(bench: Benchmark, arch: Arch, config: RunConfig) -> tuple[int, int]:
    """The longest prompt and the most tokens fed after it, in tokens."""
    new = max(bench.output_tokens(task, config.generation.max_new_tokens) for task in bench.task_names)
    return bench.reference_length(arch), new


def _bind(
    config: RunConfig, method: Method, arch: Arch, length: int, new: int, artefacts: Mapping[str, Artefact], **rest: Any
) -> BoundMethod:
    from moend.methods.bind import bind, reference_length

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


def _zeros(method: Method, arch: Arch, calibration: Calibration) -> dict[str, Artefact]:
    """Calibrations of a model that does not mind anything: enough to know whether a budget can be met.

    They hold what the calibration's own would, as far as that bounds the budgets that can be met.
    """
    import torch

    from moend.calibration.artefact import Artefact
    from moend.calibration.sensitivity import Config, encode, extend_lattice, lattice

    keeps = [k for k in extend_lattice(tuple(method.keeps)) if k in method.keeps or k in calibration.keeps]
    configs = lattice(tuple(keeps), (16, 8, 4, 2))
    if method.table == "damage":
        configs = tuple(Config(*c) for c in calibration.damage.configs)
    tensors = {"table": torch.zeros(arch.layers, len(configs)), "configs": encode(configs)}
    tensors["heads"] = torch.zeros(arch.layers, arch.kv_heads, len(configs))
    flat = torch.zeros(1, arch.layers)
    return {
        method.table: Artefact(method.table, {}, tensors),
        "ripple": Artefact("ripple", {}, {"response": flat, "local": flat}),
    }


def _kl_text(calibration: Calibration) -> str:
    """The calibration part of the text that KL tables are measured on; no benchmark tests on it."""
    from moend.benchmarks import text

    return text.part("calibration", calibration.kl.text_file)


def _damage_examples(s: DamageSettings) -> int:
    """Examples of all kinds."""
    return len(s.kinds) * s.examples


def _agreement(calibration: Calibration, spec: ModelSpec) -> AgreementSettings:
    """The settings of token agreement, with the text that the model knows."""
    s = calibration.agreement
    return s if s.text is not None else dataclasses.replace(s, text=spec.texts)


def _example_texts(s: RippleSettings | DamageSettings | AgreementSettings, count: int) -> list[str]:
    """What profiles and damage are measured on, never tested on: one text to cut from, or (recall) one an example."""
    from moend.benchmarks import recall, text

    if s.text == "recall":
        return recall.calibration_texts(count, s.prefix, s.window)
    return [text.part("calibration", s.text_file)]


def _examples(
    loaded: LoadedModel, s: RippleSettings | DamageSettings | AgreementSettings, count: int, name: str
) -> torch.Tensor:
    """(count, prefix + window) ids, the BOS included: disjoint windows of the calibration's text."""
    import torch

    from moend.benchmarks.base import added_bos
    from moend.calibration.kl import windows

    bos = list(added_bos(loaded.tokenizer))
    tokens = s.prefix + s.window - len(bos)
    if s.prefix + s.window > loaded.arch.max_positions:
        raise UserError(
            f"{name}: {s.prefix} + {s.window} tokens are more than the {loaded.arch.max_positions} positions of "
            f"{loaded.spec.label}"
        )
    remedy = f"set {name}.text (calibration=recall for recall_moe)"
    found = [_token_ids(loaded, text, remedy) for text in _example_texts(s, count)]
    cut = torch.tensor(found)[:, :tokens] if s.text == "recall" else windows(found[0], count, tokens)
    return torch.cat([torch.tensor([bos] * count, dtype=torch.long).view(count, -1), cut], dim=1)


def _token_ids(loaded: LoadedModel, text: str, remedy: str) -> list[int]:
    """The ids of a text as it stands; refused where a tenth of its words are unknown."""
    ids: list[int] = loaded.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    unknown_id = loaded.tokenizer.unk_token_id
    if unknown_id is not None and ids.count(unknown_id) > len(ids) // 10:
        raise UserError(f"{loaded.spec.label} does not know the words of the text: {remedy}")
    return ids


def ripple_profile(folder: Path) -> dict[str, Any]:
    """A ripple artefact for tables and figures: (N, L) response and local, damage {keep: (N, L)}, its info."""
    from moend.calibration.artefact import Artefact

    artefact = Artefact.load(folder, kind="ripple")
    t = artefact.tensors
    damage = {keep: d.numpy() for keep, d in zip(artefact.info["keeps"], t["damage"], strict=True)}
    return {"response": t["response"].numpy(), "local": t["local"].numpy(), "damage": damage, "info": artefact.info}


def damage(folder: Path) -> dict[str, Any]:
    """A damage artefact for tables and figures: table (L, C), kinds {name: (L, C)}, heads (L, H, C) or None, configs,
    examples of a kind, planned(layer, its plan): what that cut of the layer does by each kind of window, nats;
    hardest {kind: (L, H)}: the cheapest configuration, by head, or H = 1 for whole layers."""
    from moend.calibration.artefact import Artefact
    from moend.calibration.sensitivity import Config, decode

    artefact = Artefact.load(folder, kind="damage")
    t = artefact.tensors
    configs = decode(t["configs"])
    columns = {c: i for i, c in enumerate(configs)}
    names, each = list(artefact.info["kinds"]), t["per_example"].mean(1).numpy()  # (K, L, (H,) C)

    def planned(layer: int, plan: Mapping[str, Any]) -> dict[str, float]:
        parts = plan.get("heads") or [plan]
        found = [columns.get(Config(x["keep"], x["k_bits"], x["v_bits"])) for x in parts]  # None: all is kept
        own = each[:, layer] if plan.get("heads") else t["per_kind"].numpy()[:, layer, None]  # (K, parts, C)
        return {
            name: sum(float(own[k, h, c]) for h, c in enumerate(found) if c is not None) for k, name in enumerate(names)
        }

    return {
        "table": t["table"].numpy(),
        "kinds": dict(zip(names, t["per_kind"].numpy(), strict=True)),
        "heads": t["heads"].numpy() if "heads" in t else None,
        "configs": configs,
        "examples": t["per_example"].shape[1],
        "planned": planned,
        "hardest": {n: x[..., -1] if x.ndim == 3 else x[:, -1:] for n, x in zip(names, each, strict=True)},
    }


def agreement(sensitivity: Path, kl: Path) -> dict[str, Any]:
    """How well the proxy ranks what the KL table measures, over what both hold (MoE-nD, appendix B)."""
    from moend.calibration.artefact import Artefact
    from moend.calibration.kl import agreement as compare
    from moend.calibration.sensitivity import decode, table

    proxy, truth = Artefact.load(sensitivity), Artefact.load(kl)
    both = [c for c in decode(truth.tensors["configs"]) if c in set(decode(proxy.tensors["configs"]))]
    return compare(table(proxy, both), table(truth, both), both)


def _versions(kind: str) -> dict[str, int]:
    from moend.calibration import agreement, damage, kl, ripple, sensitivity
    from moend.calibration import trig as queries

    versions = {
        "sensitivity": sensitivity.VERSION,
        "queries": queries.VERSION,
        "kl": kl.VERSION,
        "ripple": ripple.VERSION,
        "damage": damage.VERSION,
        "agreement": agreement.VERSION,
    }
    return {kind: versions[kind]}


# What the report asks


def broken_quantiser(folder: Path) -> str | None:
    """Why what a quantiser stores is not to be believed, in a line, from its agreement artefact; None where it is."""
    from moend.calibration.agreement import LEAST
    from moend.calibration.artefact import Artefact

    try:
        info = Artefact.load(folder, kind="agreement").info
    except Blocked:
        return f"its token agreement with full is not in the store ({folder}): run it again"
    for bits, share in info["agreement"].items():
        if share < LEAST:
            return (
                f"with every token kept at {bits} bit, {share:.3f} of {info['tokens']} next tokens are full's, less "
                f"than {LEAST}: its quantiser does not work on this model"
            )
    return None


def single_operations(folder: Path) -> tuple[Any, list[str]]:
    """The nine single-axis operations of a sensitivity artefact: (layers, operations) and their names."""
    from moend.calibration.artefact import Artefact
    from moend.calibration.sensitivity import decode

    artefact = Artefact.load(folder, kind="sensitivity")
    names = [c.name for c in decode(artefact.tensors["single_configs"])]
    return artefact.tensors["singles"].numpy(), names


def sensitivity(folder: Path) -> dict[str, Any]:
    """A sensitivity artefact for its landscape: singles (L, 9), operations (names), pair: the errors of keep_50 and of
    k8v8, whose bytes are equal (None where the lattice lacks one), how: the eviction and the prompt in a few words."""
    from moend.calibration.artefact import Artefact
    from moend.calibration.sensitivity import Config, decode, table

    artefact = Artefact.load(folder, kind="sensitivity")
    singles, operations = single_operations(folder)
    equal = {"keep_50": Config(0.5, 16, 16), "k8v8": Config(1.0, 8, 8)}
    pair = None
    if set(equal.values()) <= set(decode(artefact.tensors["configs"])):
        pair = dict(zip(equal, table(artefact, list(equal.values())).T, strict=True))
    settings = artefact.identity["settings"]
    signal = "its own scores" if settings["eviction"] == "scorer" else "random permutations"
    how = f"eviction by {signal}, a prompt of {artefact.info['tokens']} tokens"
    return {"singles": singles, "operations": operations, "pair": pair, "how": how}


def scorer_version(cell: dict[str, Any]) -> int:
    """The version of the scorer that `rescore` uses for a cell."""
    from moend.benchmarks import implementation

    return implementation(cell["info"]["benchmark_config"]["type"]).scorer_version


def rescore(cell: dict[str, Any], records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records with their scores computed again from what they hold, without model, data or network.

    Where the data are here, UserError if they are not those that the records answer (the same id may stand for another
    question now) or if a record belongs to another cell.
    """
    generation = cell["payload"].get("generation") or {}  # a likelihood has none
    bench = _benchmark(canonical(cell["info"]["benchmark_config"]), bool(generation.get("reasoning")))
    if bench.kind == "nll":
        return list(records)
    _refuse_foreign(bench, cell, records)
    samples = {(r["task"], r["id"]): _recorded(r, cell["info"]["label"]) for r in records}
    return [
        r
        | bench.score(
            samples[r["task"], r["id"]],
            r["text"],
            finished=r["finish_reason"] != "length",
            opened=r.get("thinking", False),  # records from before this field have no reasoning protocol either
        )
        for r in records
    ]


def _refuse_foreign(bench: Benchmark, cell: dict[str, Any], records: Sequence[dict[str, Any]]) -> None:
    label = cell["info"]["label"]
    try:
        with _offline():
            known = {(s.task, s.id) for s in bench.samples()}
            need, have = cell["payload"]["facts"]["benchmark"]["data"], _identity_of(bench)["data"]
    except Blocked:
        return  # the data are not here: the records' own gold answers stand
    if have != need:
        raise UserError(f"the data of {bench.name} changed since {label} was run: has {have}, needs {need}")
    if foreign := [r for r in records if (r["task"], r["id"]) not in known]:
        raise UserError(
            f"{len(foreign)} of {len(records)} records of {label} are not of this cell, the first is"
            f" {foreign[0]['task']} {foreign[0]['id']}: its records folder holds another cell's files"
        )


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Data that are not here are not fetched."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        os.environ.pop("HF_HUB_OFFLINE")
        if before is not None:
            os.environ["HF_HUB_OFFLINE"] = before


def _recorded(record: dict[str, Any], label: str) -> Sample:
    """The part of a sample that scoring reads, as its record keeps it."""
    from moend.benchmarks import Sample

    try:
        gold = tuple(record["gold"])
        return Sample(record["task"], record["id"], "", "", "", gold, dict(record["scored_meta"]))
    except KeyError as e:
        raise UserError(
            f"the record {record['task']} {record['id']} of {label} has no {e}: it was written before records held all"
            " that scoring needs; run the cell again"
        ) from None
