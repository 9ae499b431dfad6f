"""What compressing one layer's cache does to the model's output: D[l, c], the table that `ripple_2d` routes by.

RippleKV's damage (eq. 1) for configurations of MoE-nD's lattice. An example is a prefix and a window. For layer l and
configuration c = (keep, K bits, V bits) the prefix's cache in layer l alone becomes what the method would hold after
that prompt, the window runs on top, and D[l, c] = mean over window positions of KL(full || compressed), in nats. A KL
table (`moend.calibration.kl`) compresses a text as it is read; this is the method's own cut: its scorer at the prompt's
end, sinks, newest tokens, 16-bit window.

Two kinds of window, added: `text` is what follows the prefix in a text; `recall` is a passage of the prefix once more,
so that what the model looks back for counts too: the prefix ends with the passage's first words again, as a cue.

Per head, D[l, h, c] is the same with the cache of KV head h of layer l alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from moend.budget import Arch
from moend.cache import Prefilled, attention_of
from moend.cache.layer_kv import LayerKV, gather
from moend.cache.select import Selector
from moend.calibration.artefact import Artefact
from moend.calibration.base import Bench, Examples, Report, Target, Values, choice, whole
from moend.calibration.rerun import Change, Evictor, Observe, reruns
from moend.calibration.saved import Saved
from moend.calibration.sensitivity import TableKind, decode, encode, kept_tokens
from moend.errors import UserError
from moend.layer_bytes import Storage
from moend.plan import Config

TOKENS = 2048  # of windows under way at once
EDGE = 8  # a repeated passage keeps off the first and the last 1/8 of its prefix


@dataclass(frozen=True)
class DamageTable:
    """KL at the output, in nats."""

    kinds: tuple[str, ...]  # K kinds of window
    configs: tuple[Config, ...]  # C of them
    per_example: Tensor  # (K, N, L, C) or, of KV heads, (K, N, L, H, C), float64

    @property
    def heads(self) -> Tensor | None:
        """(L, H, C): means over examples, summed over kinds; None where whole layers were measured."""
        return self.per_example.mean(1).sum(0) if self.per_example.dim() == 5 else None

    @property
    def per_kind(self) -> Tensor:
        """(K, L, C): means over examples, summed over heads."""
        mean = self.per_example.mean(1)
        return mean.sum(2) if mean.dim() == 4 else mean

    @property
    def table(self) -> Tensor:
        """(L, C): the sum over kinds."""
        return self.per_kind.sum(0)

    def tensors(self) -> dict[str, Tensor]:
        """As an artefact stores it."""
        stored = {
            "table": self.table,
            "per_kind": self.per_kind,
            "per_example": self.per_example,
            "configs": encode(self.configs),
        }
        return stored if self.heads is None else stored | {"heads": self.heads}


def repeated(ids: Tensor, window: int, cue: int) -> Tensor:
    """Rows (N, P + window) of a text as examples of `recall`, of the same shape, a seeded passage each.

    The first P - cue tokens stay; then a passage of cue + window tokens out of them follows again.
    """
    body = ids.shape[1] - window - cue
    low, high = body // EDGE, body - body // EDGE - cue - window
    if cue < 1 or high < low:
        raise UserError(
            f"calibration.damage.prefix ({body + cue}) is too short to repeat a passage of cue + window "
            f"({cue + window}) tokens from its middle"
        )
    rows = []
    for n, row in enumerate(ids):
        start = random.Random(f"damage-recall-{n}").randint(low, high)
        rows.append(torch.cat([row[:body], row[start : start + cue + window]]))
    return torch.stack(rows)


@torch.no_grad()
def damage_table(
    model: Any,
    examples: Mapping[str, Tensor],
    window: int,
    configs: Sequence[Config],
    evictor: Evictor,
    storage: Callable[[int, int, int], Storage],
    *,
    every: int = 1,
    heads: bool = False,
    statistics: Mapping[str, Tensor] | None = None,
    observe: Observe | None = None,
    tokens_at_once: int = TOKENS,
    saved: Saved | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DamageTable:
    """D of a model on examples {kind: ids (N, P + window)}, no padding; KL at every `every`-th window position.

    storage(cap, K bits, V bits): how the method stores a layer of that cap (`Method.storage`). heads: each KV head by
    itself; for scorers per head. statistics: of scorers that need them, (L, ...) by name. observe: `Replay.observe`,
    for scorers that replay the prefix, once per example. tokens_at_once bounds the windows under way. saved:
    examples are its steps. progress(done, all): examples.
    """
    count, length = next(iter(examples.values())).shape
    prefix = length - window
    if heads and not evictor.scorer.per_head:
        raise UserError(
            f"scorer {evictor.scorer.name} ranks entries for all heads of a layer alike: no damage per head"
        )
    configs = tuple(configs)
    kept = [min(kept_tokens(c.keep, prefix), prefix) for c in configs]
    # what changes nothing is not run: its damage is exactly 0
    run = [i for i, c in enumerate(configs) if kept[i] < prefix or min(c.k_bits, c.v_bits) < 16]
    stored = [storage(kept[i], configs[i].k_bits, configs[i].v_bits) for i in run]
    steps = [(kind, n) for kind in examples for n in range(count)]

    def measure(todo: list[int]) -> Iterator[dict[str, Tensor]]:
        ids = torch.cat([examples[kind][n : n + 1] for kind, n in (steps[i] for i in todo)])
        again = reruns(model, ids, window, scorer=evictor.scorer, observe=observe, every=every)
        for i, rerun in zip(todo, again, strict=True):
            layers, kv_heads = len(rerun.caches), len(rerun.caches[0][0])
            units = [slice(h, h + 1) for h in range(kv_heads)] if heads else [None]
            changes = [
                [
                    partial(_compressed, rerun.prefilled, selector, kept[i], s, unit)
                    for unit in units
                    for i, s in zip(run, stored, strict=True)
                ]
                for selector in evictor.selectors(rerun, statistics, seed=steps[i][1])
            ]
            out = torch.zeros(layers, len(units), len(configs), dtype=torch.float64)
            for layer, change, divergence, _ in rerun.run(changes, tokens_at_once):
                out[layer, change // len(run), run[change % len(run)]] = divergence
            yield {"damage": out if heads else out[:, 0]}

    with attention_of(model):
        found = (saved or Saved()).steps([f"{kind}-{n}" for kind, n in steps], measure, progress)
    per_example = torch.stack([step["damage"] for step in found]).unflatten(0, (len(examples), count))
    return DamageTable(tuple(examples), configs, per_example)


def _compressed(prefilled: Prefilled, selector: Selector, keep: int, storage: Storage, heads: slice | None) -> Change:
    """What `compress` would make of these heads, as it is read: 16-bit entries in the model's own type."""
    keys, values, _ = prefilled.entries(selector.layer, 0)
    at = torch.arange(keys.shape[1], device=keys.device)
    if heads is not None:
        keys, values = keys[heads], values[heads]
    if keep < len(at):
        scores = prefilled.scores(selector, "base", 0)
        kept = selector.best(scores if heads is None else scores[heads], at, len(at), keep)
        keys, values, at = gather(keys, values, at, kept)
    row = LayerKV(keys, values, None, storage, tokens_seen=prefilled.length, dtype=keys.dtype)
    return Change(*row.dense(keys.dtype), at, heads)


@dataclass(frozen=True, kw_only=True)
class DamageSettings(Examples):
    """`calibration.damage`. keeps x bits are measured; what changes nothing costs nothing, without being among them."""

    kinds: tuple[str, ...] = ("text", "recall")  # of window: the text that follows, a passage of the prefix once more
    examples: int = 4  # of each kind
    window: int = 24  # tokens after the prefix that the model's outputs are compared on
    every: int = 3  # KL is taken at every so many positions of the window
    cue: int = 16  # first tokens of a repeated passage, which end the prefix
    keeps: tuple[float, ...] = (0.025, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0)  # shares of the prefix
    bits: tuple[tuple[float, ...], ...] = ((8, 4, 0.35), (4, 4))  # K, V, and the least share they are measured at

    where: ClassVar[str] = "calibration.damage"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self, self.where, every=1, cue=1)
        if not self.kinds or len(set(self.kinds)) < len(self.kinds):
            raise UserError(f"{self.where}.kinds must be different kinds, at least one, got {list(self.kinds)}")
        for kind in self.kinds:
            choice(f"{self.where}.kinds", kind, ("text", "recall"))
        if not self.keeps or not all(isinstance(k, int | float) and 0 < k <= 1 for k in self.keeps):
            raise UserError(f"{self.where}.keeps must be shares in (0, 1], at least one, got {list(self.keeps)}")
        if not self.bits or not all(
            len(b) in (2, 3) and set(b[:2]) <= {16, 8, 4, 2} and all(0 < k <= 1 for k in b[2:]) for b in self.bits
        ):
            raise UserError(
                f"{self.where}.bits must be [K, V] or [K, V, least share] with bits of 16, 8, 4 and 2, at least one, "
                f"got {[list(b) for b in self.bits]}"
            )
        if not self.configs:
            raise UserError(f"{self.where}.keeps has no share that any of {self.where}.bits is measured at")

    @property
    def configs(self) -> tuple[tuple[float, int, int], ...]:
        """(keep, K bits, V bits) that are measured, each once, from the dearest to the cheapest."""
        found = {(float(k), int(b[0]), int(b[1])) for k in self.keeps for b in self.bits if all(k >= x for x in b[2:])}
        return tuple(sorted(found, reverse=True))

    @property
    def count(self) -> int:
        """Examples of all kinds."""
        return len(self.kinds) * self.examples


class Damage(TableKind):
    """The table of ripple_2d, and of ripple_2d_head."""

    settings = DamageSettings

    def identity(self, target: Target) -> dict[str, Any]:
        """What is measured, and how the method drops and stores."""
        s: DamageSettings = target.examples(self.name)
        names = ("examples", "prefix", "window", "every", *(["cue"] if "recall" in s.kinds else []))
        own = {name: getattr(s, name) for name in names}
        own |= {"kinds": list(s.kinds), "configs": [list(c) for c in s.configs]}
        own |= {"scorer": target.scorer, "method": target.held("n_sink", "recent", "group", "window", "channels")}
        if target.replays:
            own["reconstruction"] = target.model.reconstruction  # the words that ask for it
        return own | ({"heads": True} if target.heads else {})

    def texts(self, target: Target) -> dict[str, Any]:
        """Those that examples are cut from."""
        return {"texts": target.examples(self.name).texts()}

    def work(self, target: Target, arch: Arch) -> float:
        """A pass, and the window once more from each layer, or head, on for every configuration."""
        s: DamageSettings = target.examples(self.name)
        units = arch.layers * (arch.kv_heads if target.heads else 1)
        return s.count * (s.prefix + s.window * (1 + units * len(s.configs) / 2))

    def measure(self, target: Target, bench: Bench) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A window run again for each layer (and head) and configuration."""
        s: DamageSettings = target.examples(self.name)
        ids, method = s.ids(bench.loaded), target.method
        parts = {kind: ids[i :: len(s.kinds)] for i, kind in enumerate(s.kinds)}  # no kind has another's text
        examples = {k: repeated(x, s.window, s.cue) if k == "recall" else x for k, x in parts.items()}
        with bench.progress(f"damage table of {bench.loaded.spec.label}") as progress:
            made = damage_table(
                bench.model,
                {kind: bench.on(x) for kind, x in examples.items()},
                s.window,
                [Config(*c) for c in s.configs],
                Evictor(method.make_scorer(), method.n_sink, method.recent),
                method.storage,
                every=s.every,
                heads=target.heads,
                statistics=bench.statistics,
                observe=bench.observe,
                saved=bench.saved,
                progress=progress,
            )
        return made.tensors(), s.said(ids) | {"kinds": list(s.kinds)}

    def zeros(self, target: Target, arch: Arch) -> dict[str, Tensor]:
        """The configurations that would be measured."""
        configs = [Config(*c) for c in target.examples(self.name).configs]
        tables = {"table": (arch.layers,), "heads": (arch.layers, arch.kv_heads)}
        return {n: torch.zeros(*shape, len(configs)) for n, shape in tables.items()} | {"configs": encode(configs)}

    def figure(self, artefact: Artefact) -> dict[str, Any]:
        """table (L, C), kinds {name: (L, C)}, heads (L, H, C) or None, configs, examples of a kind.

        each {name: (L, H or 1, C)}: heads, or whole layers. hardest {name: (L, H or 1)}: the cheapest configuration.
        """
        t, names = artefact.tensors, artefact.info["kinds"]
        each = t["per_example"].mean(1).numpy()
        each = each if each.ndim == 4 else each[:, :, None]  # (K, L, H or 1, C)
        return {
            "table": t["table"].numpy(),
            "kinds": dict(zip(names, t["per_kind"].numpy(), strict=True)),
            "heads": t["heads"].numpy() if "heads" in t else None,
            "configs": decode(t["configs"]),
            "examples": t["per_example"].shape[1],
            "each": dict(zip(names, each, strict=True)),
            "hardest": dict(zip(names, each[..., -1], strict=True)),
        }

    def report(self, artefact: Artefact, plan: Values) -> Report | None:
        """What the plan's cut of each layer alone does to the output, beside the cheapest cut that was measured."""
        found = self.figure(artefact)
        cheapest, kinds = found["configs"][-1].name, found["kinds"]
        planned = [cut_of(found, i, x) for i, x in enumerate(plan["layers"])]
        rows = [
            (str(i), *(f"{v:.2g}" for name, kind in kinds.items() for v in (own[name], kind[i, -1])))
            for i, own in enumerate(planned)
        ]
        each = ", ".join(f"{name} {sum(own[name] for own in planned):.4f}" for name in kinds)
        line = f"damage in nats, mean of {found['examples']} examples a kind; summed over layers as planned: {each}"
        return Report(("layer", *(f"{k}, {what}" for k in kinds for what in ("planned", cheapest))), rows, (line,))


def cut_of(found: Values, layer: int, plan: Values) -> dict[str, float]:
    """What a plan's cut of a layer does by each kind of window, in nats; found: `Damage.figure`.

    Between the shares that were measured at the plan's bits the damage is interpolated, as the allocator does.
    """
    parts = plan.get("heads") or [plan]
    out = {}
    for name, kind in found["kinds"].items():
        own = found["each"][name][layer] if plan.get("heads") else kind[layer][None]  # (parts, C)
        out[name] = float(sum(_damage(found["configs"], own[h], x) for h, x in enumerate(parts)))
    return out


def _damage(configs: Sequence[Config], measured: Any, cut: Values) -> float:
    """The damage of one cut {keep, k_bits, v_bits}, from those of the measured configurations (C,)."""
    keep, bits = cut["keep"], (cut["k_bits"], cut["v_bits"])
    points = sorted((c.keep, float(measured[i])) for i, c in enumerate(configs) if (c.k_bits, c.v_bits) == bits)
    if bits == (16, 16) and keep == 1.0:
        return 0.0  # nothing is dropped or rounded
    if bits == (16, 16) and (not points or points[-1][0] < 1.0):
        points.append((1.0, 0.0))
    if not points:
        raise UserError(
            f"the damage calibration measured nothing at K{bits[0]}/V{bits[1]}: set calibration.damage.configs"
        )
    keeps, damages = zip(*points, strict=True)
    return float(np.interp(keep, keeps, damages))


KIND = Damage()
