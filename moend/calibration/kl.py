"""What a layer's compression does to the model's output: the KL table, and how well the local proxy S agrees with it.

KL[l, c] = mean over positions of KL(p_full || p_c) at the output, with configuration c applied to layer l alone (MoE-nD
appendix B). Layers below l are unchanged, so a run starts at layer l from stored hidden states, and configurations run
as rows of one batch. A layer is compressed by the rules of `moend.calibration.sensitivity`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from moend.budget import Arch
from moend.cache import attention_of
from moend.cache.packing import fake_quant_k, fake_quant_v
from moend.cache.prefill import LayerCapture
from moend.calibration.artefact import Artefact
from moend.calibration.base import Bench, Report, Target, choice, is_whole, token_ids, whole, windows
from moend.calibration.rerun import Stack
from moend.calibration.saved import Saved
from moend.calibration.sensitivity import (
    GROUP,
    Eviction,
    TableKind,
    attention_blocks,
    decode,
    encode,
    kept_tokens,
    random_ranks,
    scorer_ranks,
    table,
)
from moend.errors import UserError, unknown
from moend.hf.attention import AttentionRule
from moend.hf.cache_layers import marked
from moend.hf.rope import Rotary, rotary
from moend.plan import SINGLES, Config, lattice
from moend.scoring import Scorer

QUERIES = 512  # queries masked at a time

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


@dataclass(frozen=True)
class KLTable:
    """KL at the output, in nats."""

    configs: tuple[Config, ...]  # C of them
    layers: tuple[int, ...]  # L' of the model's
    table: Tensor  # (L', C)
    per_sequence: Tensor  # (N, L', C), whose mean over N the table is

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
    saved: Saved | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> KLTable:
    """KL of the model's output for input_ids (N, T), no padding, over the last `positions` positions (None: all).

    layers: which to measure (None: all). Evicted tokens are chosen once per sequence, by the scorer from the whole
    sequence or by a permutation per seed and sequence (the mean over seeds is taken), and every query sees its own.
    tokens_at_once bounds a batch of configurations (rows x T). saved: a layer of a sequence is a step.
    progress(done, all) is called after each.
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
    runs = torch.tensor([max(1, sum(i == c for _, i in variants)) for c in range(len(configs))])
    steps = [(n, index) for n in range(count) for index in wanted]

    def measure(todo: list[int]) -> Iterator[dict[str, Tensor]]:
        stack, at = Stack(model), -1
        stack.check(input_ids[:1, :16])
        for n, index in (steps[i] for i in todo):
            if n != at:
                at, hidden = n, stack.hidden(input_ids[n : n + 1].to(stack.device))
                reference = stack.log_probabilities(hidden[-1][0, -last:])
            ranks = []
            if eviction == "random":  # sequences are independent draws: each has permutations of its own
                ranks = [random_ranks(length, seed * 65_537 + n).to(stack.device)[None] for seed in seeds]
            target = _Compressed(
                layer=index,
                ranks=ranks,
                scorer=scorer if eviction == "scorer" else None,
                rotary=rotary(model, index) if eviction == "scorer" and scorer and scorer.statistics else None,
                statistics=None if statistics is None else {k: t[index] for k, t in statistics.items()},
            )
            out = torch.zeros(len(configs), dtype=torch.float64)
            for batch in batches:
                target.rows = [(s, configs[c]) for s, c in batch]
                states = hidden[index].expand(len(batch), -1, -1)
                for above in range(index, len(blocks)):
                    states = stack.layer(above, states, target if above == index else None)
                for (_, c), divergence in zip(batch, stack.divergences(reference, states[:, -last:]), strict=True):
                    out[c] += divergence
            yield {"divergence": out}

    with attention_of(model):
        found = (saved or Saved()).steps([f"{n}-{index}" for n, index in steps], measure, progress)
    out = torch.stack([step["divergence"] for step in found]).unflatten(0, (count, len(wanted)))
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


def rank_agreement(proxy: Any, kl: Any, configs: Sequence[Config]) -> dict[str, Any]:
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


@dataclass(frozen=True)
class KLSettings:
    """`calibration.kl`."""

    sequences: int = 4  # windows of the text
    tokens: int = 512  # in each
    positions: int | None = 64  # KL is averaged over the last so many of each; None: all
    configs: str = "coarse"  # all, paper or coarse
    text_file: str | None = None  # a UTF-8 text; None: the calibration part of the bundled one

    def __post_init__(self) -> None:
        whole(self, "calibration.kl", sequences=1, tokens=2)
        if self.positions is not None:
            if not is_whole(self.positions) or self.positions < 1:
                raise UserError(f"calibration.kl.positions must be a whole number >= 1, got {self.positions!r}")
            if self.positions > self.tokens:
                raise UserError(f"calibration.kl.positions ({self.positions}) is more than its tokens ({self.tokens})")
        choice("calibration.kl.configs", self.configs, tuple(NAMED))


class KL(TableKind):
    """MoE-nD's table of the model's output, of which the sensitivity is a proxy."""

    settings = KLSettings

    def identity(self, target: Target) -> dict[str, Any]:
        """All settings, and how entries go; the text enters by its hash."""
        own = dataclasses.asdict(target.calibration.of(self.name))
        del own["text_file"]
        return self.dropping(target) | own

    def texts(self, target: Target) -> dict[str, Any]:
        """The calibration part of a text; no benchmark tests on it."""
        from moend.benchmarks import text

        return {"text": text.part("calibration", target.calibration.of(self.name).text_file)}

    def work(self, target: Target, arch: Arch) -> float:
        """A pass, and one from each layer on for every configuration."""
        s: KLSettings = target.calibration.of(self.name)
        return s.sequences * s.tokens * (1 + arch.layers * len(named_configs(s.configs)) / 2)

    def measure(self, target: Target, bench: Bench) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A run of the model from each layer on, for each batch of configurations."""
        s: KLSettings = target.calibration.of(self.name)
        ids = token_ids(bench.loaded, self.texts(target)["text"], "set calibration.kl.text_file")
        with bench.progress(f"KL table of {bench.loaded.spec.label}") as progress:
            found = kl_table(
                bench.model,
                bench.on(windows(ids, s.sequences, s.tokens)),
                named_configs(s.configs),
                positions=s.positions,
                progress=progress,
                saved=bench.saved,
                **self.evicting(target, bench),
            )
        return found.tensors(), {"tokens": s.sequences * s.tokens, "text_file": s.text_file}

    def compare(self, artefact: Artefact, others: Mapping[str, Artefact]) -> Report | None:
        """How well the sensitivity ranks what this table measures (MoE-nD, appendix B)."""
        if "sensitivity" not in others:
            return None
        found = against_proxy(others["sensitivity"], artefact)
        papers = against_proxy(others["sensitivity"], artefact, "paper")
        rows = [
            (name, *("-" if r[k] is None else f"{r[k]:.2f}" for k in ("pearson", "spearman")))
            for name, r in found["per_config"].items()
        ]

        def within(r: dict[str, Any]) -> str:
            mean = ", ".join(f"{k} {v:.3f}" for k, v in r["mean"].items() if v is not None)
            return f"mean {mean}; Pearson above 0.8 in {r['above_0.8']} of {r['layers']} layers"

        lines = (
            f"within layers, the paper's configurations ({len(papers['per_config'])} of its 11): {within(papers)}",
            f"within layers, all {len(found['per_config'])} that were measured: {within(found)}",
            "published (MoE-nD, appendix B): 0.945 and 0.937, 28 of 28; over layers about 0 for eviction",
        )
        columns = ("configuration", "Pearson over layers", "Spearman")
        return Report(columns, rows, lines, title="sensitivity against KL")


def against_proxy(sensitivity: Artefact, kl: Artefact, which: str = "all") -> dict[str, Any]:
    """`rank_agreement` of a sensitivity and a KL artefact, over the configurations that both hold.

    which: `all` compares every configuration that both hold; another name, those of that set (`named_configs`).
    """
    held = set(decode(sensitivity.tensors["configs"]))
    held &= held if which == "all" else set(named_configs(which))
    both = [c for c in decode(kl.tensors["configs"]) if c in held]
    return rank_agreement(table(sensitivity, both), table(kl, both), both)


KIND = KL()
