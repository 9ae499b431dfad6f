"""What a layer's compression does to the model's output: the KL table, and how well the local proxy S agrees with it.

KL[l, c] = mean over positions of KL(p_full || p_c) at the output, with configuration c applied to layer l alone (MoE-nD
appendix B). Layers below l are unchanged, so a run starts at layer l from stored hidden states, and configurations run
as rows of one batch. A layer is compressed by the rules of `moend.calibration.sensitivity`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from moend.cache import attention_of, cache_argument
from moend.cache.packing import fake_quant_k, fake_quant_v
from moend.cache.prefill import LayerCapture
from moend.calibration.sensitivity import (
    GROUP,
    SINGLES,
    Config,
    Eviction,
    attention_blocks,
    encode,
    kept_tokens,
    lattice,
    random_ranks,
    scorer_ranks,
)
from moend.errors import UserError, unknown
from moend.hf.attention import AttentionRule
from moend.hf.layers import marked
from moend.hf.rope import Rotary, rotary
from moend.scoring import Scorer

VERSION = 1
QUERIES = 512  # queries masked at a time
POSITIONS = 256  # positions whose logits are held at a time

# The paper's eleven: its nine single operations, k8v4, and one it does not name.
PAPER = (*SINGLES, Config(1.0, 8, 4), Config(1.0, 4, 4))
# A coarse sample of the lattice: each axis alone, bits together, and both axes together.
COARSE = (
    *(Config(keep, 16, 16) for keep in (0.1, 0.25, 0.5, 0.75)),
    Config(1.0, 8, 16),
    Config(1.0, 4, 16),
    Config(1.0, 16, 4),
    Config(1.0, 8, 4),
    Config(1.0, 4, 4),
    Config(0.25, 8, 4),
)
NAMED = {"all": lattice(), "paper": PAPER, "coarse": COARSE}


def named_configs(name: str) -> tuple[Config, ...]:
    """A named set of configurations: `all` (54), `paper` (11) or `coarse` (10)."""
    if name not in NAMED:
        raise unknown("calibration.kl.configs", name, NAMED)
    return NAMED[name]


def windows(ids: Sequence[int], sequences: int, tokens: int) -> Tensor:
    """(sequences, tokens) disjoint windows of a text's ids, spread evenly over it."""
    if sequences < 1 or tokens < 2:
        raise UserError(f"a KL table needs sequences >= 1 of tokens >= 2, got {sequences} of {tokens}")
    if sequences * tokens > len(ids):
        raise UserError(f"{sequences} sequences of {tokens} tokens are more than the {len(ids)} tokens of the text")
    step = len(ids) // sequences
    return torch.tensor([list(ids[i * step : i * step + tokens]) for i in range(sequences)])


@dataclass(frozen=True)
class KLTable:
    """table (L', C) in nats over `layers` and `configs`; per_sequence (N, L', C), whose mean over N the table is."""

    configs: tuple[Config, ...]
    layers: tuple[int, ...]
    table: Tensor
    per_sequence: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """As an artefact stores it."""
        return {
            "table": self.table,
            "per_sequence": self.per_sequence,
            "configs": encode(self.configs),
            "layers": torch.tensor(self.layers),
        }


@torch.no_grad()
def kl_table(
    model: Any,
    input_ids: Tensor,
    configs: Sequence[Config] = COARSE,
    *,
    positions: int | None = 64,
    layers: Sequence[int] | None = None,
    eviction: Eviction = "scorer",
    scorer: Scorer | None = None,
    seeds: Sequence[int] = (0,),
    statistics: Mapping[str, Tensor] | None = None,
    tokens_at_once: int = 8192,
    progress: Callable[[int, int], None] | None = None,
) -> KLTable:
    """KL of the model's output for input_ids (N, T), no padding, over the last `positions` positions (None: all).

    layers: which to measure (None: all). Evicted tokens are chosen once per sequence, by the scorer from the whole
    sequence or by a permutation per seed and sequence (the mean over seeds is taken), and every query sees its own.
    tokens_at_once bounds a batch of configurations (rows x T). progress(done, all) is called after each batch.
    """
    configs = tuple(configs)
    if eviction not in ("scorer", "random"):
        raise unknown("calibration.eviction", str(eviction), ("scorer", "random"))
    if eviction == "scorer" and scorer is None:
        raise ValueError("eviction 'scorer' needs a scorer")
    if eviction == "random" and not seeds:
        raise UserError("calibration.seeds must not be empty for random eviction")
    if input_ids.dim() != 2 or input_ids.shape[1] < 2:
        raise ValueError(f"input_ids must be (N, T) with T >= 2, got {tuple(input_ids.shape)}")
    count, length = input_ids.shape
    last = length if positions is None else positions
    if not 1 <= last <= length:
        raise UserError(f"calibration.kl.positions must be between 1 and the {length} tokens, got {positions}")
    blocks = attention_blocks(model)
    wanted = tuple(range(len(blocks))) if layers is None else tuple(layers)
    if odd := [i for i in wanted if not 0 <= i < len(blocks)]:
        raise UserError(f"layer {odd[0]} is not one of the model's {len(blocks)} layers")
    variants: list[tuple[int, int]] = []  # (seed's index, configuration's index) of each row to run
    for c, config in enumerate(configs):
        chosen = range(len(seeds)) if eviction == "random" and kept_tokens(config.keep, length) < length else range(1)
        if _changes(config, length):
            variants += [(s, c) for s in chosen]
    step = max(1, tokens_at_once // length)
    batches = [variants[i : i + step] for i in range(0, len(variants), step)]
    total, done = count * len(wanted) * len(batches), 0
    out = torch.zeros(count, len(wanted), len(configs), dtype=torch.float64)
    runs = torch.tensor([max(1, sum(i == c for _, i in variants)) for c in range(len(configs))])
    with attention_of(model):
        stack = Stack(model)
        stack.check(input_ids[:1, :16])
        for n in range(count):
            ids = input_ids[n : n + 1].to(stack.device)
            hidden = stack.hidden(ids)
            reference = stack.log_probabilities(hidden[-1][0], last)
            for row, index in enumerate(wanted):
                if eviction == "random":
                    # sequences are independent draws: each has permutations of its own
                    ranks = [random_ranks(length, seed * 65_537 + n).to(stack.device)[None] for seed in seeds]
                else:
                    ranks = []
                target = _Compressed(
                    layer=index,
                    ranks=ranks,
                    scorer=scorer if eviction == "scorer" else None,
                    rotary=rotary(model, index) if eviction == "scorer" and scorer and scorer.statistics else None,
                    statistics=None if statistics is None else {k: t[index] for k, t in statistics.items()},
                )
                for batch in batches:
                    target.rows = [(s, configs[c]) for s, c in batch]
                    final = stack.resume(hidden[index], target)
                    for (_, c), states in zip(batch, final, strict=True):
                        out[n, row, c] += stack.divergence(reference, states)
                    done += 1
                    if progress is not None:
                        progress(done, total)
    per_sequence = out / runs
    return KLTable(configs, wanted, per_sequence.mean(0), per_sequence)


def _changes(config: Config, length: int) -> bool:
    return kept_tokens(config.keep, length) < length or config.k_bits < 16 or config.v_bits < 16


class _Compressed:
    """Stands in for a cache in one layer: its keys come back with an object that computes compressed attention.

    The rows of a batch hold the same sequence; each is compressed by its own (seed's index, configuration).
    """

    def __init__(
        self,
        layer: int,
        ranks: list[Tensor],
        scorer: Scorer | None,
        rotary: Rotary | None,
        statistics: Mapping[str, Tensor] | None,
    ):
        self.layer, self.ranks, self.scorer, self.rotary, self.statistics = layer, ranks, scorer, rotary, statistics
        self.rows: list[tuple[int, Config]] = []
        self.entries: tuple[Tensor, Tensor] | None = None

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """keys, values (rows, H, T, d): what `moend.hf.attention` is to call is attached to the keys."""
        self.entries = keys, values
        return marked(self, keys, values)

    def attend(self, query: Tensor, rule: AttentionRule) -> Tensor:
        """query (rows, H_q, T, d) -> (rows, H_q, T, d)."""
        rule.plain("a KL table")
        scaling, window = rule.scaling, rule.window
        assert self.entries is not None
        keys, values = self.entries
        heads, length = keys.shape[1:3]
        gqa = heads != query.shape[1]
        if window is not None and window < length:
            raise UserError(f"layer {self.layer} has a sliding window of {window} < {length} tokens: use shorter ones")
        if not self.ranks:
            assert self.scorer is not None
            capture = LayerCapture(keys[:1], values[:1], query[:1])
            self.ranks = [scorer_ranks(self.scorer, capture, self.layer, scaling, self.rotary, self.statistics)]
        k16 = {16: keys[0]} | {c.k_bits: fake_quant_k(keys[0], c.k_bits, GROUP) for _, c in self.rows}
        v16 = {16: values[0]} | {c.v_bits: fake_quant_v(values[0], c.v_bits) for _, c in self.rows}
        k = torch.stack([k16[c.k_bits] for _, c in self.rows])
        v = torch.stack([v16[c.v_bits] for _, c in self.rows])
        kept = torch.stack([(self.ranks[s] < kept_tokens(c.keep, length)).expand(heads, -1) for s, c in self.rows])
        kept = kept.to(keys.device).repeat_interleave(query.shape[1] // heads, dim=1)[:, :, None]  # (rows, H_q, 1, T)
        at, out = torch.arange(length, device=keys.device), []
        for start in range(0, length, QUERIES):
            me = at[start : start + QUERIES, None]
            sees = (kept & (at < me)) | (at == me)
            part = query[:, :, start : start + QUERIES]
            out.append(F.scaled_dot_product_attention(part, k, v, attn_mask=sees, scale=scaling, enable_gqa=gqa))
        return torch.cat(out, dim=2)


class Stack:
    """A transformers decoder run layer by layer. `check` refuses what is more than embedding, layers, norm and head."""

    def __init__(self, model: Any):
        self.model, self.base = model, model.base_model
        self.argument = cache_argument(model)
        missing = [n for n in ("embed_tokens", "layers", "norm", "rotary_emb") if not hasattr(self.base, n)]
        if missing or not hasattr(model, "lm_head"):
            raise UserError(f"{type(model).__name__} has no {', '.join(missing) or 'lm_head'}: no KL table for it")
        self.device = self.base.embed_tokens.weight.device

    def check(self, ids: Tensor) -> None:
        """The stack's logits must be the model's own."""
        ids = ids.to(self.device)
        own = self.model(input_ids=ids, use_cache=False).logits.float()
        ours = self.model.lm_head(self.base.norm(self.hidden(ids)[-1])).float()
        if not torch.allclose(own, ours, atol=1e-3 * float(own.abs().max())):
            raise UserError(
                f"{type(self.model).__name__} is not a plain stack of layers (it scales or caps something on the way): "
                "no KL table for it"
            )

    def hidden(self, ids: Tensor) -> list[Tensor]:
        """Input of every layer and the last one's output, each (1, T, hidden)."""
        states = [self.base.embed_tokens(ids)]
        for index in range(len(self.base.layers)):
            states.append(self.layer(index, states[-1], None))
        return states

    def resume(self, hidden: Tensor, target: _Compressed) -> Tensor:
        """The last layer's output (rows, T, hidden), from the target layer's input (1, T, hidden)."""
        states = hidden.expand(len(target.rows), -1, -1)
        for index in range(target.layer, len(self.base.layers)):
            states = self.layer(index, states, target if index == target.layer else None)
        return states

    def layer(self, index: int, states: Tensor, cache: Any, start: int = 0) -> Tensor:
        """One layer's output for states (rows, T, hidden) at positions start, start + 1, ..."""
        positions = torch.arange(start, start + states.shape[1], device=states.device)[None]
        out = self.base.layers[index](
            states,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=self.base.rotary_emb(states, positions),
            **{self.argument: cache},
        )
        return out if isinstance(out, Tensor) else out[0]

    def log_probabilities(self, states: Tensor, last: int) -> Tensor:
        """(last, V) float32 log p of one row's last positions."""
        parts = [F.log_softmax(x, dim=-1).float() for x in self._logits(states[-last:])]
        return torch.cat(parts)

    def divergence(self, reference: Tensor, states: Tensor) -> float:
        """Mean KL(reference || states) in nats over the reference's positions."""
        total, start = 0.0, 0
        for logits in self._logits(states[-len(reference) :]):
            total += float(_kl(reference[start : start + len(logits)], logits).sum())
            start += len(logits)
        return total / len(reference)

    def divergences(self, reference: Tensor, states: Tensor) -> list[float]:
        """The divergence of each of states (rows, positions, hidden), few positions each: many rows in one product."""
        if states.shape[1] > POSITIONS:
            return [self.divergence(reference, row) for row in states]
        found: list[float] = []
        for part in states.split(max(POSITIONS // states.shape[1], 1)):
            (logits,) = self._logits(part.flatten(0, 1))
            found += _kl(reference, logits.unflatten(0, part.shape[:2])).mean(-1).tolist()
        return found

    def _logits(self, states: Tensor) -> Any:
        """float64: what separates p from q is often less than float32 resolves in a sum over the vocabulary."""
        for part in states.split(POSITIONS):
            yield self.model.lm_head(self.base.norm(part)).double()


def _kl(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(p || q) of log p (n, V) and float64 logits (..., n, V) of q: (..., n)."""
    log_p = reference.double()
    p = log_p.exp()
    # sum p (log p - z) + log Z: one pass over q's logits for each term, no log-probabilities of q are stored
    return (p * log_p).sum(-1) - torch.einsum("nv,...nv->...n", p, logits) + p.sum(-1) * logits.logsumexp(-1)


def agreement(proxy: Any, kl: Any, configs: Sequence[Config]) -> dict[str, Any]:
    """Rank agreement of two tables (L, C), JSON-able: per layer over configurations, per configuration over layers.

    {"per_layer": {"pearson": [L], "spearman": [L]}, "mean": {...}, "layers": L, "above_0.8": layers with r > 0.8,
    "per_config": {name: {"pearson", "spearman"}}}. The uncompressed configuration, 0 in both, is left out. None where
    a correlation is undefined (constant values, fewer than two).
    """
    a, b = np.asarray(proxy, dtype=np.float64), np.asarray(kl, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 2 or a.shape[1] != len(configs):
        raise ValueError(f"tables must both be (L, {len(configs)}), got {a.shape} and {b.shape}")
    use = [i for i, c in enumerate(configs) if c.name != "full"]
    layers = [_correlations(x, y) for x, y in zip(a[:, use], b[:, use], strict=True)]
    columns = {configs[i].name: _correlations(a[:, i], b[:, i]) for i in use}
    per_layer = {kind: [x[kind] for x in layers] for kind in ("pearson", "spearman")}
    return {
        "per_layer": per_layer,
        "mean": {kind: _mean(values) for kind, values in per_layer.items()},
        "layers": len(layers),
        "above_0.8": sum(x is not None and x > 0.8 for x in per_layer["pearson"]),
        "per_config": columns,
    }


def _correlations(x: Any, y: Any) -> dict[str, float | None]:
    from scipy import stats  # slow to import, and only here it is needed

    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return {"pearson": None, "spearman": None}
    return {"pearson": float(stats.pearsonr(x, y).statistic), "spearman": float(stats.spearmanr(x, y).statistic)}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else None
