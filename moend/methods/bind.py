"""Methods are compositions: scorer (which tokens) x allocator (how many) x precision (how many bits) x schedule.

`Method` is what a file of conf/method says, `bind` fits it to a model, a budget and calibrations, and a `BoundMethod`
gives each sample its plan and forks its cache from a prefill.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from moend.allocation import CostModel, adaptive, head_tokens, headed, pyramid, ripple, routed, shaped, uniform
from moend.allocation.shares import Shape
from moend.budget import BITS, Arch, Budget, Storage, eq1_bytes, layer_bytes, peak_layer_bytes
from moend.cache import CompressedCache, LayerSpec, Prefilled, Reindex, Schedule, Selector, compress
from moend.calibration.artefact import Artefact
from moend.errors import Blocked, Infeasible, UserError, unknown
from moend.hf.rope import Rotary
from moend.plan import LayerPlan, RoutingPlan
from moend.scoring import Scorer, scorer

Protocol = Literal["matched", "paper"]
EVERYTHING = 2**40  # a cap that is never reached


@dataclass(frozen=True)
class Method:
    """The fields of a conf/method file.

    scorer: {name, parameters} or None (all tokens). allocator: all | uniform | adaptive | threshold | pyramid | ripple
    | routed. precision: {k_bits, v_bits}, each a number or `routed`. schedule: prompt (compress once) | every (again
    while decoding, every `beta` tokens). heads: a routed method gives each KV head its own entries and bits.
    """

    name: str
    version: int = 1
    scorer: Mapping[str, Any] | None = None
    allocator: Literal["all", "uniform", "adaptive", "threshold", "pyramid", "ripple", "routed"] = "uniform"
    precision: Mapping[str, int | str] = field(default_factory=lambda: {"k_bits": 16, "v_bits": 16})
    schedule: Literal["prompt", "every"] = "prompt"
    beta: int | float = 128  # tokens; a share in (0, 1): of a layer's cap
    overshoot: Literal["auto", "counted", "paper"] = "auto"
    n_sink: int = 4
    recent: int | float = 32  # entries; a share in (0, 1): of what a layer keeps
    group: int = 64
    channels: int = 64  # that share one V scale
    window: int | None = None  # None: one group, at most an eighth of the cap
    cost: Literal["resident", "eq1"] = "resident"
    solver: Literal["exact", "greedy", "greedy_paper"] = "exact"
    table: Literal["sensitivity", "kl", "damage"] = "sensitivity"
    t_ref: int | str = "auto"
    keeps: Sequence[float] = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
    bits: Sequence[int] = (16, 8, 4)
    heads: bool = False
    extend_lattice: bool = True
    always_quantise: bool = False
    r: float = 1.5  # ripple: the budgets of the most and the least sensitive layer are as r to 1
    gamma: float = 4.0  # ripple: multipliers are clipped to [1 / gamma, gamma]
    signal: Literal["output", "local"] = "output"  # ripple: the response that budgets follow
    mode: str | None = None  # of a scorer that has modes (moezip: query | recon)
    anchor_min: int | None = None  # of scorer moezip
    reindex: bool = False  # of scorer streaming: positions count inside the cache, as in the original

    def __post_init__(self) -> None:
        choices: dict[str, Sequence[str]] = {
            "allocator": ("all", "uniform", "adaptive", "threshold", "pyramid", "ripple", "routed"),
            "schedule": ("prompt", "every"),
            "overshoot": ("auto", "counted", "paper"),
            "cost": ("resident", "eq1"),
            "solver": ("exact", "greedy", "greedy_paper"),
            "table": ("sensitivity", "kl", "damage"),
            "signal": ("output", "local"),
        }
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise unknown(f"method.{key}", str(getattr(self, key)), allowed)
        for key, low in {"n_sink": 0, "group": 1, "channels": 1}.items():
            value = getattr(self, key)
            if not isinstance(value, int) or value < low:
                raise UserError(f"method.{key} must be a whole number >= {low}, got {value!r}")
        for key, low, of in (("recent", 0, "what is kept"), ("beta", 1, "a layer's cap")):
            value = getattr(self, key)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not (value >= low if whole else 0 < value < 1):
                raise UserError(
                    f"method.{key} must be a whole number >= {low} or a share in (0, 1) of {of}, got {value!r}"
                )
        if self.window is not None and self.window < 0:
            raise UserError(f"method.window must be >= 0 or null, got {self.window}")
        if not all(0 < k <= 1 for k in self.keeps) or not self.keeps:
            raise UserError(f"method.keeps must be shares in (0, 1], got {list(self.keeps)}")
        if self.t_ref not in ("auto", "sample") and (not isinstance(self.t_ref, int) or self.t_ref < 2):
            raise UserError(f"method.t_ref must be auto, sample or a number of tokens >= 2, got {self.t_ref!r}")
        if set(self.precision) != {"k_bits", "v_bits"}:
            raise UserError(f"method.precision has the keys k_bits and v_bits, got {sorted(self.precision)}")
        for side, value in self.precision.items():
            if value != "routed" and value not in BITS:
                raise UserError(f"method.precision.{side} must be one of {BITS} or routed, got {value!r}")
        if not self.bits or not set(self.bits) <= set(BITS):
            raise UserError(f"method.bits must be among {BITS}, at least one, got {list(self.bits)}")
        for key in ("r", "gamma"):
            if not getattr(self, key) >= 1:
                raise UserError(f"method.{key} must be a number >= 1, got {getattr(self, key)!r}")
        if self.allocator in ("pyramid", "ripple") and "routed" in self.precision.values():
            raise UserError(f"method.allocator '{self.allocator}' divides tokens only: precision cannot be routed")
        if (self.allocator == "all") != (self.scorer is None):
            raise UserError("method.scorer must be null exactly where method.allocator is 'all'")
        made = self.make_scorer()
        if self.allocator in ("threshold", "adaptive") and not (
            made is not None and made.per_head and self.schedule == "prompt" and set(self.precision.values()) == {16}
        ):
            raise UserError(f"method.allocator={self.allocator} needs a scorer per head, 16 bit and schedule=prompt")
        if self.allocator == "threshold" and made is not None and made.name == "moezip":
            raise UserError(
                "method.allocator=threshold compares the scores of heads, and those of scorer moezip are places in "
                "each head's own order: set allocator=uniform"
            )
        if self.heads and not (
            made is not None
            and made.per_head
            and (self.allocator, self.schedule, self.table) == ("routed", "prompt", "damage")
        ):
            raise UserError(
                "method.heads=true needs a scorer per head, allocator=routed, table=damage and schedule=prompt"
            )
        if self.reindex and not (
            made is not None and made.name == "streaming" and self.schedule == "every" and not self.quantises
        ):
            raise UserError("method.reindex needs scorer streaming, schedule=every and 16 bit")
        if self.schedule == "every" and made is not None and not made.at_decode:
            raise UserError(f"scorer {made.name} cannot score while decoding: method.schedule must be prompt")

    @property
    def label(self) -> str:
        """Its name in tables: a variant that is another method says so."""
        return self.name + (" (reindexed)" if self.reindex else "")

    @property
    def quantises(self) -> bool:
        """Whether it may store anything at fewer than 16 bits."""
        return set(self.precision.values()) != {16}

    @property
    def routes_bits(self) -> bool:
        """Whether bits are chosen per layer."""
        return "routed" in self.precision.values()

    @property
    def calibrations(self) -> tuple[str, ...]:
        """Kinds of calibration it needs."""
        kinds: set[str] = {self.table} if self.routes_bits or self.allocator == "routed" else set()
        if self.allocator == "ripple":
            kinds.add("ripple")
        made = self.make_scorer()
        if made is not None and made.statistics:
            kinds.add(made.statistics)
        return tuple(sorted(kinds))

    def make_scorer(self) -> Scorer | None:
        """The scorer object, or None where all tokens are kept."""
        if self.scorer is None:
            return None
        params = dict(self.scorer)
        if "name" not in params:
            raise UserError(f"method.scorer of {self.name} has no name")
        own = {key: value for key in ("mode", "anchor_min") if (value := getattr(self, key)) is not None}
        return scorer(params.pop("name"), **{**params, **own})

    def storage(self, cap: int, k_bits: int, v_bits: int) -> Storage:
        """How a layer with this cap is stored: K groups of 32 tokens where the cap is below 256.

        The 16-bit window is one group, but at most an eighth of the cap: it is paid for in tokens.
        """
        group = min(self.group, 32) if cap < 256 else self.group
        window = min(group, cap // 8) if self.window is None else self.window
        form: Literal["none", "shared", "per_head"] = "none"
        accumulated = False
        if (made := self.make_scorer()) is not None:
            form = "per_head" if made.per_head else "shared"
            accumulated = self.schedule == "every" and "accumulated" in made.observes
        return Storage(k_bits, v_bits, group, window, form, accumulated, channels=self.channels)


METHOD_FOLDERS = (Path(__file__).parents[2] / "conf" / "method",)


def method_names() -> list[str]:
    """Names of the packaged methods."""
    return sorted(p.stem for folder in METHOD_FOLDERS for p in folder.glob("*.yaml"))


def from_fields(fields: Mapping[str, Any]) -> Method:
    """A Method from a file's or a config's fields; an unknown field is refused with the nearest one."""
    known = {f.name for f in dataclasses.fields(Method)}
    for key in fields:
        if key not in known:
            raise unknown("method field", str(key), known)
    values = dict(fields)
    for key in ("keeps", "bits"):
        if key in values:
            values[key] = tuple(values[key])
    return Method(**values)


def method(name: str, **overrides: Any) -> Method:
    """The packaged method of that name, `moend.method("SnapKV")`, with fields overridden."""
    for folder in METHOD_FOLDERS:
        path = folder / f"{name}.yaml"
        if path.is_file() and path.stem in method_names():
            return from_fields({**yaml.safe_load(path.read_text()), **overrides})
    raise unknown("method", name, method_names())


def reference_length(method: Method, budget: Budget, length: int, new_tokens: int) -> int | None:
    """Tokens that keep ratios refer to, prompt and output together; None: each sample's own.

    `auto`: `length` (the benchmark's truncation length) for prompt compression; four times a token budget where the
    output is longer than the prompt may be, since caps are then re-applied all the time. Ratio budgets follow samples.
    """
    if isinstance(method.t_ref, int):
        return method.t_ref
    if method.t_ref == "sample" or budget.kind == "ratio":
        return None
    if budget.kind == "tokens" and new_tokens > length - new_tokens:
        return min(4 * int(budget.value), length)
    return length


@dataclass(frozen=True)
class BoundMethod:
    """A method fitted to a model, a budget and its calibrations."""

    method: Method
    budget: Budget
    protocol: Protocol
    arch: Arch
    t_ref: int | None
    artefacts: Mapping[str, Artefact] = field(default_factory=dict, repr=False)
    store_dtype: torch.dtype = torch.bfloat16
    model_id: str = ""
    revision: str = ""
    given: RoutingPlan | None = None
    _plans: dict[tuple[int, int, int], RoutingPlan] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.given is not None:
            if len(self.given.layers) != self.arch.layers:
                raise UserError(f"the plan has {len(self.given.layers)} layers, the model has {self.arch.layers}")
            if any(x.head_tokens is not None for x in self.given.layers):
                raise UserError("the plan sets head_tokens; a plan per head sets heads")
            headed = [x.heads for x in self.given.layers if x.heads is not None]
            if any(len(heads) != self.arch.kv_heads for heads in headed):
                raise UserError(f"the plan has layers of other than the model's {self.arch.kv_heads} KV heads")
            if headed and self.method.schedule != "prompt":
                raise UserError("a plan per head needs method.schedule=prompt: heads do not evict while decoding")
        for kind, artefact in self.artefacts.items():
            made_for = {k: v for k, v in artefact.identity.get("arch", {}).items() if k != "max_positions"}
            if wrong := [f"{k}: has {v}, needs {n}" for k, v in made_for.items() if v != (n := getattr(self.arch, k))]:
                raise UserError(f"the {kind} calibration is of another model: {'; '.join(wrong)}")

    @property
    def overshoot(self) -> Literal["counted", "paper"]:
        """The eviction schedule in force: the protocol's, unless the method says otherwise."""
        if self.method.overshoot != "auto":
            return self.method.overshoot
        return "counted" if self.protocol == "matched" else "paper"

    @property
    def least(self) -> int:
        """The smallest cap: a layer that never passes its cap while decoding holds an old entry and the new one."""
        return 2 if self.method.schedule == "every" and self.overshoot == "counted" else 1

    @property
    def per_sample(self) -> bool:
        """Whether each sample's own scores say what layers and heads keep: its plan is an average then, and no more."""
        return self.method.allocator == "threshold"

    def reserve(self, cap: int, new: int) -> int:
        """Entries of a cap left free after an eviction for the tokens to come ("counted")."""
        if self.method.schedule == "prompt" or self.overshoot == "paper":
            return 0
        return min(self._beta(cap), cap // 2, new)

    def _beta(self, cap: int) -> int:
        """Tokens between two evictions of a layer with this cap."""
        beta = self.method.beta
        return beta if isinstance(beta, int) else max(int(beta * cap), 1)

    def storage(self, cap: int, k_bits: int, v_bits: int) -> Storage:
        """`Method.storage` on this model; while decoding also the last queries that its scorer goes by."""
        stored, made = self.method.storage(cap, k_bits, v_bits), self.method.make_scorer()
        if made is None or self.method.schedule == "prompt":
            return stored
        return replace(stored, queries=made.last_queries * self.arch.q_heads // self.arch.kv_heads)

    def plan(self, tokens: int, new: int) -> RoutingPlan:
        """The plan for a sample of `tokens` prompt tokens, with up to `new` fed afterwards (question and output)."""
        if self.given is not None:
            return self.given
        reference = tokens + new if self.t_ref is None else self.t_ref
        if self.method.allocator == "all":
            reference = max(reference, tokens + new)  # no cap holds it at t_ref
        at = (reference, new, self.budget.to_bytes(self.arch, tokens))
        if at not in self._plans:
            self._plans[at] = self._solve(*at)
        return self._plans[at]

    def _solve(self, reference: int, new: int, total: int) -> RoutingPlan:
        m, arch = self.method, self.arch
        paper = self.protocol == "paper"
        b = total / arch.full_bytes(1)  # the budget in tokens per layer at 16 bit
        demand = CostModel(
            arch=arch,
            reference=reference,
            exact=self.t_ref is None,
            least=self.least,
            total=round(total * 4 / 1.5) if paper and m.routes_bits else total,
            cost="eq1" if paper else m.cost,
            storage=self.storage,
            reserve=lambda cap: self.reserve(cap, new),
            new=new,
        )
        fixed = None if m.routes_bits else (int(m.precision["k_bits"]), int(m.precision["v_bits"]))
        tokens = reference if m.allocator == "all" else None
        if paper and m.allocator == "uniform":
            tokens = max(int(b if fixed == (16, 16) else b * 4 / 1.5), 1)
        top = reference - new if demand.exact and m.schedule == "prompt" else reference
        solved = None
        try:
            if fixed is not None and m.allocator in ("pyramid", "ripple"):
                recent = m.recent if isinstance(m.recent, int) else 0
                layers = shaped(demand, fixed, self._shape(), m.n_sink + recent, top)
            elif fixed is not None and m.allocator != "routed":
                layers = uniform(demand, fixed, tokens)
            elif m.heads:
                layers, solved = headed(
                    demand, self.artefact(m.table), keeps=m.keeps, bits=self._bit_choices(), solver=m.solver
                )
            else:
                layers, solved = routed(
                    demand,
                    self.artefact(m.table),
                    keeps=m.keeps,
                    bits=self._bit_choices(),
                    solver=m.solver,
                    common=m.allocator == "uniform",
                    tokens=tokens,
                    extend=m.extend_lattice,
                )
        except Infeasible as e:
            raise Infeasible(f"{m.name} cannot meet the budget {self.budget}: {e}", e.smallest) from None
        ratio, dim = self.t_ref is None, arch.head_dim
        resident = eq1 = 0
        for x in layers:
            for part in x.heads or (x,):
                held, count = min(part.tokens or 0, reference), 1 if x.heads else arch.kv_heads
                whole = demand.exact and held >= top
                left = reference - new if whole else held - self.reserve(held, new)
                resident += int(layer_bytes(left, self._stored(part.tokens or 0, part, full=whole), count, dim))
                eq1 += eq1_bytes(held, count, dim, part.k_bits, part.v_bits)
        return RoutingPlan(
            model=self.model_id,
            revision=self.revision,
            t_ref=reference,
            budget=str(self.budget),
            protocol=self.protocol,
            solver=m.solver if solved else "none",
            objective=solved.objective if solved else None,
            gap=solved.gap if solved else None,
            layers=tuple(map(_shares, layers)) if ratio else tuple(layers),
            predicted={"eq1_bytes": eq1, "resident_bytes": resident},
        )

    def _shape(self) -> Shape:
        """How the allocator divides entries among layers."""
        m = self.method
        if m.allocator == "pyramid":
            recent = m.recent if isinstance(m.recent, int) else 0
            return functools.partial(pyramid, layers=self.arch.layers, window=m.n_sink + recent)
        measured = self.artefact("ripple").tensors["response" if m.signal == "output" else "local"]
        profile = measured.double().mean(0).numpy()  # over examples
        return functools.partial(ripple, profile=profile, r=m.r, gamma=m.gamma)

    def _stored(self, cap: int, layer: LayerPlan, full: bool) -> Storage:
        storage = self.storage(cap, layer.k_bits, layer.v_bits)
        return storage.whole if full else storage

    def artefact(self, kind: str) -> Artefact:
        """The calibration of that kind; a missing one is an error that names the command."""
        if kind not in self.artefacts:
            raise Blocked(
                f"{self.method.name} needs a {kind} calibration and has none: "
                f"python -m pipelines.calibrate method={self.method.name} model={self.model_id or '...'}"
            )
        return self.artefacts[kind]

    def fits(self, tokens: int, new: int) -> bool:
        """Whether all of prompt and output at 16 bit fits the budget, or it is 100 %: then nothing is compressed."""
        if self.method.allocator == "all" and not self.method.quantises:
            return True
        room = self.budget.to_bytes(self.arch, tokens)
        everything = self.budget == Budget("ratio", 1.0) or self.arch.full_bytes(tokens + new) <= room
        return everything and not self.method.always_quantise

    def _bit_choices(self) -> tuple[Sequence[int], Sequence[int]]:
        k, v = (self.method.precision[side] for side in ("k_bits", "v_bits"))
        return (
            self.method.bits if k == "routed" else (int(k),),
            self.method.bits if v == "routed" else (int(v),),
        )

    @property
    def needs_rotary(self) -> bool:
        """Whether its scorer works with un-rotated keys and needs the model's frequencies."""
        made = self.method.make_scorer()
        return self.method.reindex or (made is not None and made.statistics is not None)

    def specs(self, tokens: int, new: int) -> list[LayerSpec]:
        """What each layer holds of a prompt of `tokens`, with up to `new` tokens to come."""
        if self.fits(tokens, new):
            return [LayerSpec(EVERYTHING, Storage())] * self.arch.layers
        plan = self.plan(tokens, new)
        specs = []
        for layer in plan.layers:
            if layer.heads is not None:
                specs.append(self._headed(layer.heads, tokens, new))
                continue
            cap = self._cap(layer, tokens, new)
            storage = self.storage(cap, layer.k_bits, layer.v_bits)
            if self.method.schedule == "every" and self.overshoot == "counted":
                cap = self._growth(cap, tokens, new, storage)
            if cap >= tokens + new or self.method.allocator == "all":
                specs.append(LayerSpec(EVERYTHING, storage.whole))
            elif self.method.schedule == "prompt":
                specs.append(LayerSpec(cap, storage))
            else:
                reserve = self.reserve(cap, new)
                schedule = Schedule(cap, reserve, self._beta(cap), self.overshoot)
                specs.append(LayerSpec(cap - reserve if tokens > cap - reserve else tokens, storage, schedule))
        return specs

    def _cap(self, plan: LayerPlan, tokens: int, new: int) -> int:
        """Entries that a layer or a head may hold."""
        return max(plan.tokens if plan.tokens is not None else round(plan.keep * (tokens + new)), self.least)

    def _headed(self, heads: Sequence[LayerPlan], tokens: int, new: int) -> LayerSpec:
        """What a layer holds whose heads differ."""
        caps = [self._cap(x, tokens, new) for x in heads]
        storages = tuple(self._stored(n, x, full=n >= tokens) for n, x in zip(caps, heads, strict=True))
        held = tuple(min(n, tokens) for n in caps)
        return LayerSpec(round(sum(held) / len(held)), storages[0], heads=held, storages=storages)

    def _growth(self, cap: int, tokens: int, new: int, storage: Storage) -> int:
        """The cap of a prompt so short that it reaches it by growing.

        Its 16-bit tail is then at another point of its cycle than after an eviction and may be longer: the cap gives
        way until the bytes are those that were planned.
        """
        heads, dim = self.arch.kv_heads, self.arch.head_dim
        reserve, top = self.reserve(cap, new), min(cap, tokens + new)
        whole = self.t_ref is None and self.given is None and cap >= tokens + new  # was costed as it will grow
        if whole or not storage.quantised or tokens >= cap - reserve:
            return cap
        planned = peak_layer_bytes(cap, reserve, storage, heads, dim)
        while top > tokens and peak_layer_bytes(top, top - tokens, storage, heads, dim) > planned:
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
        if self.method.allocator in ("threshold", "adaptive") and any(s.tokens < tokens for s in specs):
            scores = [prefilled.scores(selector(layer), key, row) for layer in range(self.arch.layers)]
            if self.method.allocator == "threshold":
                counts = head_tokens(scores, self._entries(tokens), 1)
            else:
                counts = [adaptive(s, min(spec.tokens, tokens)) for s, spec in zip(scores, specs, strict=True)]
            specs = [replace(s, heads=tuple(c)) for s, c in zip(specs, counts, strict=True)]
        if self.method.reindex:
            if rotary is None:
                raise ValueError("a re-indexed cache needs the model's rotary")
            specs = [
                replace(s, schedule=replace(s.schedule, reindex=Reindex(self.method.n_sink, rotary[i])))
                for i, s in enumerate(specs)
            ]
        return compress(
            prefilled,
            specs,
            selector,
            score_key=key,
            dtype=self.store_dtype,
            row=row,
        )

    def _entries(self, tokens: int) -> int:
        """Entries of single heads that the budget holds, each with a position of its own."""
        position = 0 if self.protocol == "paper" else 4  # eq. (1) counts codes only
        return self.budget.to_bytes(self.arch, tokens) // (4 * self.arch.head_dim + position)


def _shares(layer: LayerPlan) -> LayerPlan:
    """A plan for a budget that follows each sample: shares, no numbers of entries."""
    heads = None if layer.heads is None else tuple(map(_shares, layer.heads))
    return replace(layer, tokens=None, heads=heads)


def bind(method: Method, budget: Budget, protocol: Protocol, arch: Arch, **rest: Any) -> BoundMethod:
    """Fit a method to a budget and a model; see `BoundMethod`."""
    if protocol not in ("matched", "paper"):
        raise unknown("budget_protocol", protocol, ("matched", "paper"))
    return BoundMethod(method, budget, protocol, arch, **rest)
