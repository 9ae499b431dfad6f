"""How much each layer's attention suffers from each configuration: MoE-nD's table S[l, c], from one forward pass.

S[l, c] = mean over positions of ||a_full - a_c||_2 / ||a_full||_2, a the attention block's output after the output
projection, configuration c = (keep, K bits, V bits) applied to layer l alone (MoE-nD section 3 and appendix B). All
columns come from one capture of queries, keys and values.

Conventions of the measurement: kept tokens are max(1, round(keep * T)); every query sees its own token even where
eviction drops it; over all captured tokens, K is quantised per channel in groups of 64 (one group for a short prompt)
and V per token; no protected first tokens, no recent window, no full-precision window. What the layer's attention asks
holds for both outputs: its window or chunk, its soft cap and its attention sinks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from moend.budget import Arch
from moend.cache.packing import fake_quant_k, fake_quant_v
from moend.cache.prefill import LayerCapture, Prefilled, prefill
from moend.calibration.artefact import Artefact
from moend.calibration.base import Bench, Kind, Target
from moend.calibration.saved import Saved
from moend.errors import UserError, unknown
from moend.hf.attention import AttentionRule, accumulated_attention
from moend.hf.rope import Rotary, rotary
from moend.layer_bytes import BITS
from moend.plan import SINGLES, Config, extend_lattice, lattice
from moend.scoring import LayerView, Scorer

GROUP = 64  # tokens per K scale
BLOCK = 2**22  # attention weights held at a time, in elements: bounds memory at any T

Eviction = Literal["scorer", "random"]


@dataclass(frozen=True)
class Sensitivity:
    """table (L, C) over `configs`; singles (L, 9) over SINGLES; per_seed (S, L, C), whose mean over S the table is."""

    configs: tuple[Config, ...]
    table: Tensor
    singles: Tensor
    per_seed: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """As an artefact stores it, with `configs` (C, 3) and `single_configs` (9, 3) float64."""
        return {
            "table": self.table,
            "singles": self.singles,
            "per_seed": self.per_seed,
            "configs": encode(self.configs),
            "single_configs": encode(SINGLES),
        }


def encode(configs: Sequence[Config]) -> Tensor:
    """(C, 3) float64: keep, K bits, V bits."""
    return torch.tensor([(c.keep, c.k_bits, c.v_bits) for c in configs], dtype=torch.float64)


def decode(configs: Tensor) -> tuple[Config, ...]:
    """The inverse of `encode`."""
    return tuple(Config(keep, int(k), int(v)) for keep, k, v in configs.tolist())


def table(artefact: Artefact, configs: Sequence[Config]) -> npt.NDArray[np.float64]:
    """(L, len(configs)): a `sensitivity`, `kl` or `damage` artefact's columns for these configurations, in this order.

    What changes nothing costs nothing: the uncompressed configuration is 0 where it was not measured.
    """
    at = {c: i for i, c in enumerate(decode(artefact.tensors["configs"]))}
    values = artefact.tensors["table"].double()
    if (full := Config(1.0, 16, 16)) not in at:
        at[full] = values.shape[1]
        values = torch.cat([values, values.new_zeros(len(values), 1)], dim=1)
    if missing := [c for c in configs if c not in at]:
        where = "calibration.damage" if artefact.kind == "damage" else "calibration"
        raise UserError(
            f"the {artefact.kind} calibration {artefact.key} has no column for {missing[0].name} "
            f"({len(missing)} of {len(configs)} missing): add its keep or bits to {where}.keeps or {where}.bits"
        )
    return values[:, [at[c] for c in configs]].numpy()


@torch.no_grad()
def measure(
    model: Any,
    input_ids: Tensor,
    configs: Sequence[Config] | None = None,
    *,
    eviction: Eviction = "scorer",
    scorer: Scorer | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    statistics: Mapping[str, Tensor] | None = None,
    saved: Saved | None = None,
) -> Sensitivity:
    """The table of a transformers model on one prompt, input_ids (1, T): one prefill, then `sensitivity`.

    statistics: what the scorer's kind of calibration holds, tensors (L, ...). scorer is needed for eviction `scorer`.
    """
    filled = prefill(model, input_ids, last_queries=input_ids.shape[1])
    attention = attention_blocks(model)
    return sensitivity(
        filled,
        [block.o_proj for block in attention],
        [float(block.scaling) for block in attention],
        configs,
        eviction=eviction,
        scorer=scorer,
        seeds=seeds,
        rotary=[rotary(model, i) for i in range(len(attention))] if scorer is not None and scorer.statistics else None,
        statistics=statistics,
        saved=saved,
    )


def attention_blocks(model: Any) -> list[Any]:
    """The attention modules of a model's layers, in order; a model without the usual form is refused."""
    layers = getattr(model.base_model, "layers", None)
    blocks = [getattr(layer, "self_attn", None) for layer in layers] if layers is not None else []
    if not blocks or any(not isinstance(getattr(b, "o_proj", None), nn.Linear) for b in blocks):
        raise UserError(f"{type(model).__name__} has no layers with self_attn.o_proj: it cannot be calibrated")
    return blocks


@torch.no_grad()
def sensitivity(
    prefilled: Prefilled,
    projections: Sequence[nn.Linear],
    scaling: float | Sequence[float],
    configs: Sequence[Config] | None = None,
    *,
    eviction: Eviction = "scorer",
    scorer: Scorer | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    rotary: Sequence[Rotary] | None = None,
    statistics: Mapping[str, Tensor] | None = None,
    saved: Saved | None = None,
) -> Sensitivity:
    """The whole table from one captured prompt (one row, no padding, all T queries captured).

    projections: each layer's output projection (H_q * d -> hidden). scaling: what q . k is multiplied with, per layer
    or for all. eviction `random` drops tokens by a seeded permutation, the same in every layer and head, one table per
    seed; `scorer` by the scorer's own ranking of the prompt (one table). Memory grows with T, never with T x T x C.
    saved: layers are its steps.
    """
    configs = lattice() if configs is None else tuple(configs)
    if eviction not in ("scorer", "random"):
        raise unknown("calibration.eviction", str(eviction), ("scorer", "random"))
    if eviction == "scorer" and scorer is None:
        raise ValueError("eviction 'scorer' needs a scorer")
    if eviction == "random" and not seeds:
        raise UserError("calibration.seeds must not be empty for random eviction")
    if prefilled.positions.shape[0] != 1 or prefilled.valid is not None:
        raise ValueError("sensitivities are measured on one prompt without padding")
    length = prefilled.length
    scales = [float(scaling)] * len(projections) if isinstance(scaling, int | float) else list(scaling)
    columns = tuple(dict.fromkeys((*configs, *SINGLES)))
    grid = _Grid(columns, length)
    each = list(zip(prefilled.layers, projections, scales, strict=True))

    def measure_layers(todo: list[int]) -> Iterator[dict[str, Tensor]]:
        for i in todo:
            layer, projection, scale = each[i]
            if layer.queries is None or layer.queries.shape[2] != length:
                raise ValueError(f"layer {i}: all {length} queries must be captured")
            if eviction == "random":
                ranks = [random_ranks(length, seed).to(layer.keys.device)[None] for seed in seeds]
            else:
                assert scorer is not None
                rot = None if rotary is None else rotary[i]
                stats = None if statistics is None else {name: t[i] for name, t in statistics.items()}
                ranks = [scorer_ranks(scorer, layer, i, scale, rot, stats)]
            yield {"errors": _layer(layer, projection, _rule(layer, scale), ranks, grid)}

    found = (saved or Saved()).steps([f"{i}" for i in range(len(each))], measure_layers)
    errors = torch.stack([step["errors"] for step in found], dim=1)  # (S, L, columns)
    mean = errors.mean(0)
    return Sensitivity(
        configs=configs,
        table=mean[:, [columns.index(c) for c in configs]].contiguous(),
        singles=mean[:, [columns.index(c) for c in SINGLES]].contiguous(),
        per_seed=errors[..., [columns.index(c) for c in configs]].contiguous(),
    )


def kept_tokens(keep: float, length: int) -> int:
    """How many of `length` tokens a share keeps during calibration."""
    return max(1, round(keep * length))


def random_ranks(length: int, seed: int) -> Tensor:
    """(length,) the rank of each token in a seeded order; rank < n is kept where n are."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))


def scorer_ranks(
    scorer: Scorer,
    layer: LayerCapture,
    index: int,
    scaling: float,
    rotary: Rotary | None,
    statistics: Mapping[str, Tensor] | None,
) -> Tensor:
    """(H or 1, T) the rank of each captured token of one row by the scorer, best first, ties by position."""
    length = layer.keys.shape[2]
    view = LayerView(
        layer=index,
        keys=layer.keys[0],
        values=layer.values[0],
        positions=torch.arange(length, device=layer.keys.device),
        now=length,
        queries=layer.queries[0] if layer.queries is not None and scorer.last_queries else None,
        scaling=scaling,
        rotary=rotary,
        statistics=statistics,
        observed=_observed(scorer, layer, _rule(layer, scaling)),
        rule=layer.rule,
    )
    order = scorer(view).argsort(dim=-1, descending=True, stable=True)
    return order.argsort(dim=-1)


def _rule(layer: LayerCapture, scaling: float) -> AttentionRule:
    """What the layer's attention asks: as captured, or scaled products alone where no model was run."""
    return AttentionRule(scaling) if layer.rule is None else replace(layer.rule, scaling=scaling)


def _observed(scorer: Scorer, layer: LayerCapture, rule: AttentionRule) -> dict[str, Tensor]:
    """What the scorer observes, from a capture that holds the queries of all tokens."""
    if odd := set(scorer.observes) - {"accumulated"}:
        raise UserError(f"scorer {scorer.name} cannot rank tokens here: {', '.join(sorted(odd))} is not measured")
    if "accumulated" not in scorer.observes:
        return {}
    assert layer.queries is not None
    return {"accumulated": accumulated_attention(layer.queries, layer.keys, None, rule)[0]}


class _Grid:
    """The product of kept counts, K bits and V bits that holds all columns; the uncompressed point is its first."""

    def __init__(self, columns: Sequence[Config], length: int):
        kept = [kept_tokens(c.keep, length) for c in columns]
        # Several shares of a short prompt keep the same number of tokens: computed once.
        self.counts = sorted({length, *kept}, reverse=True)
        self.k_bits = sorted({16, *(c.k_bits for c in columns)}, reverse=True)
        self.v_bits = sorted({16, *(c.v_bits for c in columns)}, reverse=True)
        self.at = [
            (self.counts.index(n) * len(self.k_bits) + self.k_bits.index(c.k_bits)) * len(self.v_bits)
            + self.v_bits.index(c.v_bits)
            for n, c in zip(kept, columns, strict=True)
        ]


def _layer(layer: LayerCapture, projection: nn.Linear, rule: AttentionRule, ranks: list[Tensor], grid: _Grid) -> Tensor:
    """(S, columns) float32: one layer's errors for each ranking (H or 1, T)."""
    assert layer.queries is not None
    keys, values, queries = layer.keys[0].float(), layer.values[0].float(), layer.queries[0].float()
    heads, length, dim = keys.shape
    groups = queries.shape[0] // heads
    weight = projection.weight.float()
    bias = 0.0 if projection.bias is None else projection.bias.float()
    k = torch.stack([fake_quant_k(keys, bits, GROUP) for bits in grid.k_bits])  # (K, H, T, d)
    v = torch.stack([fake_quant_v(values, bits) for bits in grid.v_bits], dim=1)  # (H, V, T, d)
    queries = queries.unflatten(0, (heads, groups)) * rule.scaling
    sinks = None if rule.sinks is None else rule.sinks.float().view(heads, groups, 1, 1)
    # Projecting the values first is cheaper while there are fewer of them than dimensions in a head; it costs
    # T * hidden per query, head and V width, against T * d + d * hidden.
    early = length <= dim
    if early:
        per_head = weight.T.reshape(heads, 1, groups * dim, -1).unflatten(2, (groups, dim))  # (H, 1, G, d, hidden)
        v = (v[:, :, None] @ per_head).permute(0, 2, 3, 1, 4).flatten(3).flatten(0, 2)  # (H * G * T, V * hidden)
    else:
        v = v.transpose(1, 2).flatten(2)[:, None]  # (H, 1, T, V * d)
    kept = torch.stack([rank < n for rank in ranks for n in grid.counts])  # (S * N, H or 1, T)
    variants, at = len(kept) * len(grid.k_bits), torch.arange(length, device=keys.device)
    total = keys.new_zeros(variants, len(grid.v_bits))
    step = max(1, BLOCK // (variants * heads * groups * length))
    for start in range(0, length, step):
        me = at[start : start + step, None]
        # A query sees the kept tokens before it, as far as its window or chunk reaches, and itself.
        sees = (kept[:, None, :, None, None, :] & (at < me)) | (at == me)  # (S * N, 1, H or 1, 1, q, T)
        if rule.reach is not None:
            sees &= ~rule.unseen(me[:, 0], at)
        logits = rule.cap(queries[:, :, start : start + step] @ k[:, :, None].transpose(-1, -2))  # (K, H, G, q, T)
        logits = torch.where(sees, logits, -torch.inf)
        weights = logits.softmax(-1)
        if sinks is not None:
            weights *= torch.sigmoid(logits.logsumexp(-1, keepdim=True) - sinks)
        weights = weights.flatten(0, 1)  # (S * N * K, H, G, q, T)
        if early:
            out = weights.permute(0, 3, 1, 2, 4).flatten(2) @ v  # (S * N * K, q, V * hidden)
            out = out.unflatten(-1, (len(grid.v_bits), -1))
        else:
            out = (weights @ v).unflatten(-1, (len(grid.v_bits), dim))  # (S * N * K, H, G, q, V, d)
            out = out.permute(0, 3, 4, 1, 2, 5).flatten(3) @ weight.T
        # The uncompressed point is subtracted as it came out of the same product: its own error is exactly 0.
        full = out[0, :, 0]
        size = torch.linalg.vector_norm(full + bias, dim=-1)[:, None]
        error = torch.linalg.vector_norm(out - full[:, None], dim=-1)
        # A position whose output is 0 (values 0) has no relative error: any change there counts as 1.
        total += torch.where(size > 0, error / size, (error > 0).float()).sum(1)
    flat = (total / length).reshape(len(ranks), -1)
    return flat[:, grid.at]


class TableKind(Kind):
    """A kind whose artefact is a table (L, C) over configurations, from which plans are solved."""

    makes_plans = True

    def zeros(self, target: Target, arch: Arch) -> dict[str, Tensor]:
        """The table of the configurations that bound the budgets which can be met."""
        keeps = target.calibration.keeps
        own = tuple(target.method.make_allocator().keeps)
        configs = lattice([k for k in extend_lattice(own) if k in own or k in keeps], BITS)
        return {"table": torch.zeros(arch.layers, len(configs)), "configs": encode(configs)}

    def dropping(self, target: Target) -> dict[str, Any]:
        """Identity: how entries go while measuring."""
        calibration, scorer = target.calibration, target.method.scorer
        eviction = calibration.measured_eviction(scorer)
        if eviction == "random":
            return {"eviction": eviction, "seeds": list(calibration.seeds)}
        return {"eviction": eviction, "scorer": target.scorer}

    def evicting(self, target: Target, bench: Bench) -> dict[str, Any]:
        """The same as arguments of a measurement."""
        calibration, method = target.calibration, target.method
        return {
            "eviction": calibration.measured_eviction(method.scorer),
            "scorer": method.make_scorer() if calibration.eviction == "scorer" else None,
            "seeds": calibration.seeds,
            "statistics": bench.statistics,
        }


class SensitivityKind(TableKind):
    """MoE-nD's proxy: the relative L2 error of each layer's attention output."""

    def identity(self, target: Target) -> dict[str, Any]:
        """The lattice, in any order, and how entries go."""
        c = target.calibration
        lattice = {"keeps": sorted(set(c.keeps), reverse=True), "bits": sorted(set(c.bits), reverse=True)}
        return self.dropping(target) | lattice

    def work(self, target: Target, arch: Arch) -> float:
        """A few passes over the text."""
        return 5 * len(self.texts(target)["text"]) / 4  # characters of a token, roughly

    def measure(self, target: Target, bench: Bench) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """One prefill of the calibration prompt."""
        configs = lattice(target.calibration.keeps, target.calibration.bits)
        found = measure(bench.model, bench.prompt, configs, **self.evicting(target, bench), saved=bench.saved)
        return found.tensors(), {"tokens": bench.prompt.numel(), "text": self.texts(target)["text"]}

    def figure(self, artefact: Artefact) -> dict[str, Any]:
        """singles (L, 9) and operations (their names); pair: the errors of keep_50 and of k8v8, whose bytes are equal
        (None where the lattice lacks one); how: the eviction and the prompt in a few words.
        """
        equal = {"keep_50": Config(0.5, 16, 16), "k8v8": Config(1.0, 8, 8)}
        pair = None
        if set(equal.values()) <= set(decode(artefact.tensors["configs"])):
            pair = dict(zip(equal, table(artefact, list(equal.values())).T, strict=True))
        own = artefact.identity["settings"]["eviction"] == "scorer"
        signal = "its own scores" if own else "random permutations"
        return {
            "singles": artefact.tensors["singles"].numpy(),
            "operations": [c.name for c in decode(artefact.tensors["single_configs"])],
            "pair": pair,
            "how": f"eviction by {signal}, a prompt of {artefact.info['tokens']} tokens",
        }


KIND = SensitivityKind()
