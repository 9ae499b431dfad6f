"""A method on a model, a budget and its calibrations: gives each sample its plan and forks its cache from a prefill."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from moend.allocation import CostModel, Division, Task
from moend.allocation.windows import allocate
from moend.budget import Arch, Budget, eq1_bytes
from moend.cache import PROMPT_ONLY, CompressedCache, LayerSpec, Prefilled, Reindex, Schedule, Selector, compress
from moend.calibration.artefact import Artefact
from moend.errors import Blocked, Infeasible, UserError, unknown
from moend.hf.rope import Rotary
from moend.layer_bytes import (
    Storage,
    layer_bytes,
    peak_layer_bytes,
    sliding,
    visible,
)
from moend.methods import paper, predicted
from moend.methods.spec import Method
from moend.plan import LayerPlan, RoutingPlan
from moend.scoring import scorer

Protocol = Literal["matched", "paper"]
Moment = Literal["prompt", "peak"]
Ints = npt.NDArray[np.int64]
EVERYTHING = 2**40  # a cap that is never reached


def reference_length(method: Method, budget: Budget, length: int, new_tokens: int) -> int | None:
    """Tokens that keep ratios refer to, prompt and output together; None: each sample's own.

    `auto`: `length` (the benchmark's truncation length) for prompt compression; four times a token budget where the
    output is longer than the prompt may be, since caps are then re-applied all the time. Ratio budgets follow samples.
    """
    t_ref = method.make_allocator().t_ref
    if isinstance(t_ref, int):
        return t_ref
    if t_ref == "sample" or budget.kind == "ratio":
        return None
    if budget.kind == "tokens" and new_tokens > length - new_tokens:
        return min(4 * int(budget.value), length)
    return length


@dataclass(frozen=True)
class BoundMethod:
    """A method fitted to a model, a budget and its calibrations."""

    method: Method
    budget: Budget
    protocol: Protocol  # what a budget means: equal bytes, or the papers' exchange rate
    arch: Arch  # layers and heads of the model
    t_ref: int | None  # tokens that keep ratios refer to (`reference_length`); None: each sample's own
    at: Moment = "prompt"  # when the budget binds: after the prompt, or at every step
    artefacts: Mapping[str, Artefact] = field(default_factory=dict, repr=False)  # calibrations by kind
    store_dtype: torch.dtype = torch.bfloat16  # what entries at 16 bit are stored in
    model_id: str = ""  # of the model, for plans and messages
    revision: str = ""  # of the model, for plans
    given: RoutingPlan | None = None  # a plan to follow instead of solving for one
    _plans: dict[tuple[int, int, int], RoutingPlan] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.given is not None:
            if len(self.given.layers) != self.arch.layers:
                raise UserError(f"the plan has {len(self.given.layers)} layers, the model has {self.arch.layers}")
            if any(x.head_tokens is not None for x in self.given.layers):
                raise UserError("the plan sets head_tokens; a plan per head sets heads")
            if any(x.heads is not None and len(x.heads) != self.arch.kv_heads for x in self.given.layers):
                raise UserError(f"the plan has layers of other than the model's {self.arch.kv_heads} KV heads")
        for kind, artefact in self.artefacts.items():
            made_for = {k: v for k, v in artefact.identity.get("arch", {}).items() if k != "max_positions"}
            if wrong := [f"{k}: has {v}, needs {n}" for k, v in made_for.items() if v != (n := getattr(self.arch, k))]:
                raise UserError(f"the {kind} calibration is of another model: {'; '.join(wrong)}")

    @property
    def least(self) -> int:
        """The smallest cap: a layer that never passes its cap while decoding holds an old entry and the new one."""
        return 2 if self.method.evicts and self._bounded else 1

    @property
    def _bounded(self) -> bool:
        """Whether a layer that evicts never passes its cap; if not, it holds up to `beta` entries more."""
        return self.at == "peak" or self.method.schedule == "full"

    @property
    def per_sample(self) -> bool:
        """Whether each sample's own scores say what layers and heads keep: its plan is an average then, and no more."""
        return self.method.make_allocator().averages

    def reserve(self, cap: int, new: int) -> int:
        """Entries of a cap that an eviction leaves free for the tokens to come."""
        return min(self._beta(cap), cap // 2, new) if self.method.evicts and self._bounded else 0

    def _after(self, cap: int, new: int) -> int:
        """Entries after the prompt: the cap, less what must stay free for the first tokens of the output."""
        return cap - self.reserve(cap, new) if self.at == "peak" else cap

    def _beta(self, cap: int) -> int:
        """Tokens between two evictions of a layer with this cap."""
        beta = self.method.beta
        return beta if isinstance(beta, int) else max(int(beta * cap), 1)

    def storage(self, cap: int, k_bits: int, v_bits: int) -> Storage:
        """`Method.storage` on this model; while decoding also the last queries that its scorer goes by."""
        stored, made = self.method.storage(cap, k_bits, v_bits), self.method.make_scorer()
        if made is None or not self.method.evicts:
            return stored
        return replace(stored, queries=made.last_queries * self.arch.q_heads // self.arch.kv_heads)

    def plan(self, tokens: int, new: int) -> RoutingPlan:
        """The plan for a sample of `tokens` prompt tokens, with up to `new` fed afterwards (question and output)."""
        if self.given is not None:
            return self.given
        reference = paper.length(self, tokens, new) if self.t_ref is None else self.t_ref
        if self.method.keeps_all:
            reference = max(reference, tokens + new)  # no cap holds it at t_ref
        at = (reference, new, self.budget.to_bytes(self.arch, tokens))
        if at not in self._plans:
            self._plans[at] = self._solve(*at)
        return self._plans[at]

    def _solve(self, reference: int, new: int, total: int) -> RoutingPlan:
        m, arch, allocator, bits = self.method, self.arch, self.method.make_allocator(), self.method.bit_choices()
        b = total / arch.full_bytes(1)  # the budget in tokens per layer at 16 bit
        costs = CostModel(
            arch=arch,
            reference=reference,
            exact=self.t_ref is None and not paper.of_prompt(self),
            least=self.least,
            total=paper.total(m, total) if self.protocol == "paper" else total,
            cost="eq1" if self.protocol == "paper" or allocator.cost == "eq1" else "resident",
            storage=self.storage,
            reserve=lambda cap: self.reserve(cap, new),
            new=new,
            evicts=m.evicts,
            at=self.at,
        )
        task = Task(
            costs,
            bits,
            protected=m.n_sink + (m.recent if isinstance(m.recent, int) else 0),
            fixed=paper.entries(m, b) if self.protocol == "paper" else None,
            artefact=self.artefact,
        )
        try:
            made = allocate(allocator, task)
        except Infeasible as e:
            grows = ""
            if self.at == "peak" and not m.evicts and not m.keeps_all:
                grows = (
                    f" (its {new} new tokens stay, and budget_at=peak counts them; {m.name}+decode evicts them too: "
                    "method.schedule=every)"
                )
            raise Infeasible(f"{m.name} cannot meet the budget {self.budget}: {e}{grows}", e.smallest) from None
        layers, solved, top = made.layers, made.solution, costs.top
        ratio, dim = self.t_ref is None, arch.head_dim
        resident = eq1 = 0
        for x in layers:
            for part in x.heads or (x,):
                held, count = min(part.tokens or 0, reference), 1 if x.heads else arch.kv_heads
                whole = costs.exact and held >= top
                left = max(reference - new, 1) if whole else self._after(held, new)
                resident += int(layer_bytes(left, self._stored(part.tokens or 0, part, full=whole), count, dim))
                eq1 += eq1_bytes(held, count, dim, part.k_bits, part.v_bits)
        plan = RoutingPlan(
            model=self.model_id,
            revision=self.revision,
            t_ref=reference,
            budget=str(self.budget),
            protocol=self.protocol,
            solver=solved.solver if solved else "none",
            objective=solved.objective if solved else None,
            gap=solved.gap if solved else None,
            layers=tuple(map(_shares, layers)) if ratio else tuple(layers),
        )
        tokens = reference if paper.of_prompt(self) else max(reference - new, 1)
        specs = self._specs(plan, tokens, new)
        after, peak = predicted.held(specs, arch, tokens, new)
        if arch.windows is not None:
            eq1, resident = predicted.codes(plan.layers, specs, arch, tokens), after
        return replace(plan, predicted={"eq1_bytes": eq1, "resident_bytes": resident, "peak_bytes": peak})

    def _stored(self, cap: int, layer: LayerPlan, full: bool) -> Storage:
        storage = self.storage(cap, layer.k_bits, layer.v_bits)
        return storage.whole if full else storage

    def artefact(self, kind: str) -> Artefact:
        """The calibration of that kind; a missing one is an error that names the command."""
        if kind not in self.artefacts:
            raise Blocked(
                f"{self.method.name} needs a {kind} calibration and has none: "
                f"python -m pipelines.calibrate method={self.method.name} model={self.model_id or '...'}, or in Python "
                "moend.compress(..., calibrate=True, tokenizer=...)"
            )
        return self.artefacts[kind]

    def fits(self, tokens: int, new: int) -> bool:
        """Whether all of prompt and output at 16 bit fits the budget, or it is 100 %: then nothing is compressed."""
        if self.method.keeps_all and not self.method.quantises:
            return True
        room = self.budget.to_bytes(self.arch, tokens)
        if self.arch.windows is None:
            needed = self.arch.full_bytes(tokens + new)
        else:  # a layer that slides has positions, and some entries to spare
            _, needed = predicted.held(self._everything(tokens, new), self.arch, tokens, new)
        everything = self.budget == Budget("ratio", 1.0) or needed <= room
        return everything and not self.method.always_quantise

    @property
    def needs_rotary(self) -> bool:
        """Whether its scorer works with un-rotated keys and needs the model's frequencies."""
        made = self.method.make_scorer()
        return self.method.reindexes or (made is not None and made.statistics is not None)

    def specs(self, tokens: int, new: int) -> list[LayerSpec]:
        """What each layer holds of a prompt of `tokens`, with up to `new` tokens to come."""
        if self.fits(tokens, new):
            return self._everything(tokens, new)
        return self._specs(self.plan(tokens, new), tokens, new)

    def _everything(self, tokens: int, new: int) -> list[LayerSpec]:
        return self._sliding([LayerSpec(EVERYTHING, Storage())] * self.arch.layers, tokens, new)

    def _sliding(self, specs: Sequence[LayerSpec], tokens: int, new: int) -> list[LayerSpec]:
        """Specs in which a layer that holds its window to the end, whatever comes, does not slide."""
        return [
            s if w is None else replace(s, slides=min(s.tokens, visible(tokens, w)) + new > sliding(w)[0])
            for s, w in zip(specs, self.arch.each_window, strict=True)
        ]

    def _specs(self, plan: RoutingPlan, tokens: int, new: int) -> list[LayerSpec]:
        specs = []
        for layer, window in zip(plan.layers, self.arch.each_window, strict=True):
            if layer.heads is not None:
                heads = tuple(self._spec(x, tokens, new, 1) for x in layer.heads)
                mean = round(sum(min(x.tokens, tokens) for x in heads) / len(heads))
                specs.append(LayerSpec(mean, heads[0].storage, heads=heads))
            elif window is not None and window < plan.t_ref and layer.keep == 1:  # holds its window whole
                storage = self.storage(self._cap(layer, tokens, new), layer.k_bits, layer.v_bits)
                specs.append(LayerSpec(EVERYTHING, storage.whole))
            else:
                specs.append(self._spec(layer, tokens, new, self.arch.kv_heads))
        return self._sliding(specs, tokens, new)

    def _spec(self, plan: LayerPlan, tokens: int, new: int, heads: int) -> LayerSpec:
        """What a layer of this many KV heads holds, or one KV head with a plan of its own."""
        cap = self._cap(plan, tokens, new)
        storage = self.storage(cap, plan.k_bits, plan.v_bits)
        if plan.keep == 1 and paper.keeps_whole(self):
            cap = EVERYTHING
        if self.method.evicts and self.at == "peak":
            cap = self._growth(cap, tokens, new, storage, heads)
        if self.method.keeps_all or cap >= tokens + (new if self.method.evicts else 0):
            return LayerSpec(EVERYTHING, storage.whole)
        return self._capped(cap, storage, tokens, new)

    def _capped(self, cap: int, storage: Storage, tokens: int, new: int) -> LayerSpec:
        """What holds `cap` entries after the prompt, or never more while decoding, as the schedule asks."""
        if not self.method.evicts:
            return LayerSpec(cap, storage)
        kind: Literal["strict", "periodic"] = "strict" if self._bounded else "periodic"
        schedule = Schedule(cap, self.reserve(cap, new), self._beta(cap), kind)
        return LayerSpec(min(self._after(cap, new), tokens), storage.evicting(cap), schedule)

    def held(self, tokens: int, new: int) -> tuple[int, int]:
        """Bytes after a prompt of `tokens`, and the most until `new` more have come, by what is planned."""
        return predicted.held(self.specs(tokens, new), self.arch, tokens, new)

    def _cap(self, plan: LayerPlan, tokens: int, new: int) -> int:
        """Entries that a layer or a head may hold."""
        return max(plan.tokens or round(plan.keep * paper.length(self, tokens, new)), self.least)

    def _growth(self, cap: int, tokens: int, new: int, storage: Storage, heads: int) -> int:
        """The cap of a prompt so short that it reaches it by growing.

        A layer packs its residual window at intervals. When such a prompt reaches the cap, more entries may be waiting
        in the window, at 16 bits, than after an eviction. So this cap is lowered until the bytes are the planned ones.
        """
        dim = self.arch.head_dim
        reserve, top = self.reserve(cap, new), min(cap, tokens + new)
        whole = self.t_ref is None and self.given is None and cap >= tokens + new  # was costed as it will grow
        if whole or not storage.quantised or tokens >= cap - reserve:
            return cap
        planned = peak_layer_bytes(cap, reserve, storage, heads, dim, new=new)

        def grown(cap: int) -> int:
            return peak_layer_bytes(cap, self.reserve(cap, new), storage, heads, dim, start=tokens, new=new)

        while top > tokens and grown(top) > planned:
            top -= 1
        return cap if top == tokens + new else top

    def fork(
        self,
        prefilled: Prefilled,
        new: int,
        *,
        seed: int = 0,
        row: int = 0,
        rotary: Sequence[Rotary] | None,
        scaling: Sequence[float],
    ) -> CompressedCache:
        """The cache this method keeps of a prefilled prompt, ready to decode up to `new` tokens."""
        made = self.method.make_scorer()
        statistics, calibrated = None, ""
        if made is not None and made.statistics:
            artefact = self.artefact(made.statistics)
            statistics, calibrated = artefact.tensors, artefact.key

        def selector(layer: int) -> Selector:
            return Selector(
                scorer=made if made is not None else scorer("streaming"),  # never asked: every layer keeps all
                layer=layer,
                n_sink=self.method.n_sink,
                recent=self.method.recent,
                scaling=scaling[layer],
                seed=seed,
                rotary=None if rotary is None else rotary[layer],
                statistics=None if statistics is None else {k: v[layer] for k, v in statistics.items()},
            )

        tokens, key = prefilled.tokens(row), (repr(made), calibrated, seed)
        specs = self.specs(tokens, new)
        if self.method.make_allocator().divides_heads and any(s.heads is None and s.tokens < tokens for s in specs):
            scores = [prefilled.scores(selector(layer), key, row) for layer in range(self.arch.layers)]
            division, stored = self._division(scores, specs, tokens, new)
            if (counts := self.method.make_allocator().divide(division)) is not None:
                specs = [
                    replace(s, heads=tuple(self._capped(n, own, tokens, new) for n in c), schedule=PROMPT_ONLY)
                    for s, c, own in zip(specs, counts, stored, strict=True)
                ]
        if self.method.reindexes:
            if rotary is None:
                raise ValueError("a re-indexed cache needs the model's rotary")
            specs = [
                replace(s, schedule=replace(s.schedule, reindex=Reindex(self.method.n_sink, rotary[i])))
                for i, s in enumerate(specs)
            ]
        return compress(prefilled, specs, selector, score_key=key, dtype=self.store_dtype, row=row)

    def _division(
        self, scores: list[torch.Tensor], specs: Sequence[LayerSpec], tokens: int, new: int
    ) -> tuple[Division, list[Storage]]:
        """What an allocator divides among heads by a sample's scores, and how the heads of each layer are stored.

        An entry to divide is one that a head holds after the prompt, or one of its cap where it evicts while decoding.
        """
        heads, dim, evicts = self.arch.kv_heads, self.arch.head_dim, self.method.evicts
        stored = [replace(s.storage, positions="per_head") for s in specs]
        grows = new if self.at == "peak" else 0  # entries that come to those of the prompt

        def price(layer: int, counts: Ints) -> int:
            if self.protocol == "paper":  # eq. (1) counts codes only
                return eq1_bytes(int(counts.sum()), 1, dim, stored[layer].k_bits, stored[layer].v_bits)
            if evicts:
                return sum(_evicting(int(n), self.reserve(int(n), new), grows, stored[layer], dim) for n in counts)
            if grows:
                return sum(_grown(int(n), grows, stored[layer], dim) for n in counts)
            return int(layer_bytes(counts, stored[layer], 1, dim).sum())

        entries = [min(s.schedule.cap or s.tokens, tokens) for s in specs]
        rooms = [price(i, np.full(heads, n)) for i, n in enumerate(entries)]
        total = self.budget.to_bytes(self.arch, tokens)
        return Division(scores, entries, rooms, total, price, self.least), stored


@functools.lru_cache(maxsize=4096)
def _grown(n: int, new: int, storage: Storage, dim: int) -> int:
    """The most bytes of one head that holds n entries after the prompt and all `new` ones."""
    return peak_layer_bytes(n + new, new, storage, 1, dim)


@functools.lru_cache(maxsize=4096)
def _evicting(cap: int, reserve: int, new: int, storage: Storage, dim: int) -> int:
    """Bytes of one head with this cap after the prompt (new: 0), or the most that it holds with `new` to come."""
    storage = storage.evicting(cap)
    if new:
        return peak_layer_bytes(cap, reserve, storage, 1, dim, new=new if storage.scales else None)
    return int(layer_bytes(cap, storage, 1, dim))


def _shares(layer: LayerPlan) -> LayerPlan:
    """A plan for a budget that follows each sample: shares, no numbers of entries."""
    heads = None if layer.heads is None else tuple(map(_shares, layer.heads))
    return replace(layer, tokens=None, heads=heads)


def bind(method: Method, budget: Budget, protocol: Protocol, arch: Arch, **rest: Any) -> BoundMethod:
    """Fit a method to a budget and a model; see `BoundMethod`."""
    if protocol not in ("matched", "paper"):
        raise unknown("budget_protocol", protocol, ("matched", "paper"))
    if (at := rest.get("at", "prompt")) not in ("prompt", "peak"):
        raise unknown("budget_at", at, ("prompt", "peak"))
    if (protocol, at) == ("paper", "peak"):
        raise UserError("budget_protocol=paper is stated for what is held after the prompt: budget_at must be prompt")
    return BoundMethod(method, budget, protocol, arch, **rest)
