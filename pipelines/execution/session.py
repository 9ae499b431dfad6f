"""The model, the engine and the benchmark of a group, loaded once and asked example by example."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from moend.budget import Arch
from pipelines.execution.records import Kept, record
from pipelines.planning import parts, thinking
from pipelines.planning.facts import Facts, Planner, bind_method, lengths
from pipelines.planning.identity import canonical
from pipelines.planning.needs import CalibrationNeed
from pipelines.planning.schema import RunConfig
from pipelines.store.cells import Store, state_name
from pipelines.store.files import share
from pipelines.store.provenance import provenance

if TYPE_CHECKING:
    from moend.benchmarks import Benchmark, Rendered
    from moend.calibration.artefact import Artefact
    from moend.decoding import Job, Outcome
    from moend.methods.bind import BoundMethod
    from moend.models.load import LoadedModel, ModelSpec
    from moend.saved import Saved


class Session(Protocol):
    """A loaded model and the cells of one group."""

    def bind(self, key: str, config: RunConfig, facts: Facts, artefacts: dict[str, Path]) -> dict[str, Any] | None:
        """Fit a cell's method, its artefacts loaded and verified. Returns its plan as JSON, or None: there is none."""

    def run(
        self, jobs: list[tuple[str, int]], examples: Sequence[tuple[str, str]], tell: Callable[[str], None]
    ) -> list[dict[str, Any]]:
        """The (task, id) of one context for several (key, draw) of bound cells: one prefill.

        Returns one record per example and job: those of the first example in the order of the jobs, and so on. tell: is
        told of saved states that are of no use, in a line each.
        """


class Library(Planner):
    """moend, as a runner uses it: describes cells, computes calibrations, and keeps one loaded model."""

    def __init__(self) -> None:
        super().__init__()
        self._loaded: tuple[str, LoadedModel] | None = None

    def calibrate(self, config: RunConfig, facts: Facts, need: CalibrationNeed, folder: Path) -> Artefact:
        """Load the artefact in `folder`, verified against the identity it must have, or compute and save it there."""
        from pipelines.execution import calibrations

        spec, _, _ = parts.parts(config)
        return calibrations.calibrate(config, facts, need, folder, lambda: self._load(spec, config.cache))

    def plan(self, config: RunConfig, facts: Facts, artefacts: Mapping[str, Path]) -> dict[str, Any] | None:
        """The cell's RoutingPlan as JSON, from its verified artefacts, without the model; None where there is none."""
        from moend.models import load as models

        spec, _, bench = parts.parts(config)
        arch = facts.arch or models.read_arch(spec, config.cache)
        bound = self._bound(config, facts, artefacts, arch)
        length, new = lengths(bench, arch, config)
        return None if facts.is_full or bound.per_sample else dataclasses.asdict(bound.plan(length, new))

    def _bound(
        self, config: RunConfig, facts: Facts, artefacts: Mapping[str, Path], arch: Arch, **rest: Any
    ) -> BoundMethod:
        from moend.calibration.artefact import Artefact

        _, method, bench = parts.parts(config)
        needs = {n.kind: n for n in facts.calibrations}
        loaded = {kind: Artefact.load(folder, needs[kind].identity, kind) for kind, folder in artefacts.items()}
        weights = facts.identity["model"]
        revision = str(weights.get("revision") or weights.get("weights_sha256"))
        length, new = lengths(bench, arch, config)
        return bind_method(
            config, method, arch, length, new, loaded, model_id=str(weights["id"]), revision=revision, **rest
        )

    def session(self, config: RunConfig) -> Session:
        """Load the model of a group (kept while the next group has the same)."""
        spec, _, bench = parts.parts(config)
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
        from moend.decoding import Generation
        from moend.engine import Engine

        g = config.generation
        self.library, self.loaded, self.bench, self.config = library, loaded, bench, config
        self.engine = Engine(
            loaded,
            chunk=config.engine.chunk,
            max_bytes=config.engine.max_bytes,
            fuse=config.engine.fuse,
            timed=config.engine.timed,
            flips=config.engine.routing_flips,
        )
        self.generation = Generation(g.max_new_tokens, g.temperature, g.top_p, g.samples)
        thinking.confirm(loaded.spec, bench, loaded.tokenizer)
        self.samples = {(s.task, s.id): s for s in bench.samples()}
        self.first = next(iter(self.samples))
        self.made = provenance(config, loaded)
        self.bound: dict[str, BoundMethod] = {}
        self.warm: set[str] = set()  # timed cells that have run once, unrecorded

    def bind(self, key: str, config: RunConfig, facts: Facts, artefacts: dict[str, Path]) -> dict[str, Any] | None:
        bound = self.library._bound(config, facts, artefacts, self.loaded.arch, store_dtype=self.loaded.store_dtype)
        self.engine.admit(bound, question_visible=config.question_visible, asks=self.bench.kind != "nll")
        self.bound[key] = bound
        length, new = lengths(self.bench, self.loaded.arch, config)
        if facts.is_full or bound.per_sample or bound.fits(length, new):
            return None
        return dataclasses.asdict(bound.plan(length, new))

    def run(
        self, jobs: list[tuple[str, int]], examples: Sequence[tuple[str, str]], tell: Callable[[str], None]
    ) -> list[dict[str, Any]]:
        from moend.benchmarks import questions
        from moend.decoding import Job

        tokenizer, turns = self.loaded.tokenizer, self.bench.turns and len(examples) > 1
        visible = self.config.question_visible or self.bench.kind == "nll"
        rendered = [
            self.bench.render(
                self.samples[example],
                tokenizer,
                self.loaded.arch,
                chat=self.loaded.spec.chat_template and bool(tokenizer.chat_template),
                max_new_tokens=self.generation.max_new_tokens,
            )
            for example in examples
        ]
        prompts = questions.prompts(rendered, tokenizer, visible=visible, turns=turns)
        how: dict[str, Any] = {"question_visible": visible, "seed": self.config.seed, "turns": turns}
        made = [Job(self.bound[k], draw, k) for k, draw in jobs]
        if self.config.engine.timed:
            answers = self._timed(prompts, made, how)
        else:
            how["positions"] = self.config.engine.kept != "none"
            how["saved"] = self._saved(jobs, examples, tell)
            answers = self.engine.run_questions(prompts, made, self.generation, **how)
        return [
            record(
                out,
                self.bench,
                prompt,
                prompts[0],
                self.bound[name],
                tokenizer,
                draw,
                len(jobs),
                self.made,
                self._kept(examples) if prompt is prompts[0] else None,
            )
            for prompt, outcomes in zip(prompts, answers, strict=True)
            for (name, draw), out in zip(jobs, outcomes, strict=True)
        ]

    def _kept(self, examples: Sequence[tuple[str, str]]) -> Kept | None:
        """How the kept entries of a context are recorded: the first one layer by layer, for a picture."""
        asked = self.config.engine.kept
        if asked == "none":
            return None
        return "layers" if asked == "tokens" and examples[0] == self.first else asked

    def _timed(self, prompts: Sequence[Rendered], jobs: Sequence[Job], how: dict[str, Any]) -> list[list[Outcome]]:
        """Each job alone with its own prefill, after an unrecorded run; no gold text is fed and no string stops."""
        plain = [dataclasses.replace(p, gold_ids=(), stop=()) for p in prompts]
        answers: list[list[Outcome]] = [[] for _ in prompts]
        for job in jobs:
            if job.name not in self.warm:
                self.warm.add(job.name)
                self.engine.run_questions(plain, [job], self.generation, **how)
            for mine, out in zip(answers, self.engine.run_questions(plain, [job], self.generation, **how), strict=True):
                mine += out
        return answers

    def _saved(
        self, jobs: list[tuple[str, int]], examples: Sequence[tuple[str, str]], tell: Callable[[str], None]
    ) -> Saved | None:
        """Where the state of these answers is kept: below the first of their cells."""
        from moend.saved import Saved

        every = self.config.engine.save_every_s
        if not every or self.bench.kind == "nll":
            return None
        cell = Store(self.config.store).cell(jobs[0][0])
        settings = self.config.engine.model_dump(exclude={"save_every_s", "routing_flips"})
        return Saved(cell.state, state_name(examples), {"engine": settings}, every, tell=tell, made=share)
