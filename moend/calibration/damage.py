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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moend.budget import Storage
from moend.cache import Prefilled, attention_of, prefill
from moend.cache.compressed import OBSERVATIONS
from moend.cache.layer_kv import LayerKV, gather
from moend.cache.select import Selector
from moend.calibration.kl import Stack
from moend.calibration.sensitivity import Config, attention_blocks, encode, kept_tokens
from moend.calibration.sweep import Base, Change, Sweep
from moend.errors import UserError
from moend.hf.rope import depends_on_length, rotary
from moend.hf.shape import arch_of

VERSION = 1
TOKENS = 2048  # of windows under way at once
EDGE = 8  # a repeated passage keeps off the first and the last 1/8 of its prefix


@dataclass(frozen=True)
class DamageTable:
    """per_example float64 in nats, over `kinds` of window, examples, layers, (heads,) `configs`: (K, N, L, (H,) C)."""

    kinds: tuple[str, ...]
    configs: tuple[Config, ...]
    per_example: Tensor

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
    base: Base,
    storage: Callable[[int, int, int], Storage],
    *,
    every: int = 1,
    heads: bool = False,
    statistics: Mapping[str, Tensor] | None = None,
    tokens_at_once: int = TOKENS,
    progress: Callable[[int, int], None] | None = None,
) -> DamageTable:
    """D of a model on examples {kind: ids (N, P + window)}, no padding; KL at every `every`-th window position.

    storage(cap, K bits, V bits): how the method stores a layer of that cap (`Method.storage`). heads: each KV head by
    itself; for scorers per head. statistics: of scorers that need them, (L, ...) by name. tokens_at_once bounds a sweep
    (rows x window). progress(done, all): examples.
    """
    count, length = next(iter(examples.values())).shape
    prefix = length - window
    if window < 1 or prefix < 1 or every < 1:
        raise UserError(f"a damage table needs a prefix and a window, got {prefix} and {window} tokens, every {every}")
    if odd := set(base.scorer.observes) - set(OBSERVATIONS):
        raise UserError(f"the damage of scorer {base.scorer.name} is not measured: it needs {', '.join(sorted(odd))}")
    if depends_on_length(model):
        raise UserError(f"{type(model).__name__} turns keys by an angle that depends on the length: no damage table")
    if heads and not base.scorer.per_head:
        raise UserError(f"scorer {base.scorer.name} ranks entries for all heads of a layer alike: no damage per head")
    blocks = attention_blocks(model)
    configs = tuple(configs)
    kept = [min(kept_tokens(c.keep, prefix), prefix) for c in configs]
    # what changes nothing is not run: its damage is exactly 0
    run = [i for i, c in enumerate(configs) if kept[i] < prefix or min(c.k_bits, c.v_bits) < 16]
    units: list[slice | None] = [slice(h, h + 1) for h in range(arch_of(model.config).kv_heads)] if heads else [None]
    out = torch.zeros(len(examples), count, len(blocks), len(units), len(configs), dtype=torch.float64)
    with attention_of(model):
        stack = Stack(model)
        stack.check(next(iter(examples.values()))[:1, :16])
        for k, ids_of_kind in enumerate(examples.values()):
            for n in range(count):
                ids = ids_of_kind[n : n + 1].to(stack.device)
                done = prefill(
                    model, ids[:, :prefix], last_queries=base.scorer.last_queries, observe=base.scorer.observes
                )
                caches = [(x.keys[0], x.values[0]) for x in done.layers]
                sweep = Sweep(stack, caches, ids[:, prefix:], range(0, window, every))
                changes: list[list[Callable[[], Change]]] = []
                for layer, block in enumerate(blocks):
                    selector = Selector(
                        base.scorer,
                        layer,
                        base.n_sink,
                        base.recent,
                        block.scaling,
                        seed=n,
                        rotary=rotary(model, layer) if base.scorer.statistics else None,
                        statistics=None if statistics is None else {a: t[layer] for a, t in statistics.items()},
                        rule=done.layers[layer].rule,
                    )
                    stored = [storage(kept[i], configs[i].k_bits, configs[i].v_bits) for i in run]
                    changes.append(
                        [
                            partial(_compressed, done, selector, kept[i], s, unit)
                            for unit in units
                            for i, s in zip(run, stored, strict=True)
                        ]
                    )
                for layer, change, divergence, _ in sweep.run(changes, max(tokens_at_once // window, 1)):
                    out[k, n, layer, change // len(run), run[change % len(run)]] = divergence
                if progress is not None:
                    progress(k * count + n + 1, len(examples) * count)
    return DamageTable(tuple(examples), configs, out if heads else out[:, :, :, 0].clone())


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
    row = LayerKV(keys, values, None, storage, seen=prefilled.length, dtype=keys.dtype)
    return Change(*row.dense(keys.dtype), at, heads)
