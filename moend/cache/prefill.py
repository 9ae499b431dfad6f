"""Prefill once: run the prompt through the model in chunks and keep what any method may need to choose from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache

from moend.cache.compressed import CaptureLayer, CompressedCache
from moend.cache.layer_kv import PROMPT_ONLY, LayerKV, Schedule, gather
from moend.cache.select import Selector
from moend.errors import UserError
from moend.hf.attention import AttentionRule, attention_of
from moend.hf.cache_layers import Turn
from moend.hf.config import cache_argument, decoder_of, text_config
from moend.hf.probe import Shape
from moend.hf.rope import depends_on_length
from moend.layer_bytes import Storage, sliding
from moend.scoring import scorer

LEFT_ONLY = "only left padding is supported: the attention mask must be 0 ... 0 1 ... 1 in every row"


@dataclass
class LayerCapture:
    """One layer of a prefill, all after RoPE."""

    keys: Tensor  # (B, H, T, d)
    values: Tensor  # (B, H, T, d)
    queries: Tensor | None  # (B, H_q, w, d), the last ones; None: not asked for
    rule: AttentionRule | None = None  # what the layer's attention asks; None where no model was run


@dataclass
class Prefilled:
    """A prompt's uncompressed cache, from which every cell of a group is forked.

    valid (B, T) bool marks real tokens under left padding (None: all are); positions (B, T), -1 at padding.
    observed: what scorers asked to observe (`Scorer.observes`), by name a tensor (B, ..., T) per layer.
    """

    layers: list[LayerCapture]  # what each layer captured
    positions: Tensor
    valid: Tensor | None
    config: Any  # the model's config
    observed: dict[str, list[Tensor]] = field(default_factory=dict)
    _scores: dict[Any, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def empty(cls, shape: Shape, input_ids: Tensor, config: Any) -> Prefilled:
        """Nothing captured yet: what precedes prompts of one token, input_ids (B, 1)."""
        arch = shape.arch
        batch, device = input_ids.shape[0], input_ids.device
        nothing = torch.zeros(batch, arch.kv_heads, 0, arch.head_dim, device=device)
        asked = torch.zeros(batch, arch.q_heads, 0, arch.head_dim, device=device)
        layers = [LayerCapture(nothing, nothing, asked, rule) for rule in shape.rules]
        observed = {"accumulated": [nothing[..., 0]] * arch.layers}
        return cls(layers, torch.zeros(batch, 0, dtype=torch.long, device=device), None, config, observed)

    @property
    def length(self) -> int:
        """Columns T, padding included."""
        return self.positions.shape[1]

    def tokens(self, row: int = 0) -> int:
        """Real tokens of one sequence."""
        return self.length if self.valid is None else int(self.valid[row].sum())

    def entries(self, layer: int, row: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """keys, values (H, n, d) and queries (H_q, min(w, n), d) of one sequence, without its left padding."""
        start, captured = self.length - self.tokens(row), self.layers[layer]
        q = captured.queries
        if q is not None:
            q = q[row, :, max(q.shape[2] - self.tokens(row), 0) :]
        return captured.keys[row, :, start:], captured.values[row, :, start:], q

    def seen(self, layer: int, row: int, names: Collection[str]) -> dict[str, Tensor]:
        """These observations of one sequence in one layer, (..., n) each, without its left padding."""
        if missing := set(names) - set(self.observed):
            raise ValueError(f"this prefill did not observe {', '.join(sorted(missing))}")
        start = self.length - self.tokens(row)
        return {name: self.observed[name][layer][row][..., start:] for name in names}

    def scores(self, selector: Selector, key: Any, row: int) -> Tensor:
        """The selector's scores, computed once for all cells that share (scorer, sample): (H or 1, n).

        The scorer does not see entries that have left the layer's window or chunk: theirs is -inf.
        """
        at, selector = (key, selector.layer, row), replace(selector, rule=self.layers[selector.layer].rule)
        if at not in self._scores:
            keys, values, queries = self.entries(selector.layer, row)
            n = keys.shape[1]
            first = oldest_seen(selector.rule, n)
            positions = torch.arange(first, n, device=keys.device)
            if queries is not None:
                queries = queries[:, -selector.scorer.last_queries :] if selector.scorer.last_queries else None
            observed = self.seen(selector.layer, row, selector.scorer.observes)
            observed = {name: x[..., first:] for name, x in observed.items()}
            scores = selector.scores(keys[:, first:], values[:, first:], positions, n, queries, observed)
            self._scores[at] = F.pad(scores, (first, 0), value=-torch.inf)
        return self._scores[at]


def oldest_seen(rule: AttentionRule | None, n: int) -> int:
    """The first of n entries that the next query sees, or the last of them where it sees none."""
    return 0 if rule is None else max(min(rule.oldest(n), n - 1), 0)


@torch.no_grad()
def prefill(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    last_queries: int = 0,
    observe: Collection[str] = (),
    chunk: int = 1024,
) -> Prefilled:
    """Run input_ids (B, T) through the model and capture its cache, `chunk` tokens at a time: memory grows with T.

    attention_mask (B, T) marks left padding. last_queries: how many of the last queries to keep per layer (T: all).
    observe: what else to keep of the pass, of `cache.OBSERVATIONS`; on a CPU it may change the pass's rounding.
    """
    batch, length = input_ids.shape
    if length < 1:
        raise ValueError("an empty prompt has no cache")
    mask = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
    if mask is not None and bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise UserError(LEFT_ONLY)
    if mask is None:
        positions = torch.arange(length, device=input_ids.device).expand(batch, -1)
    else:
        positions = (mask.long().cumsum(-1) - 1).masked_fill(~mask, -1)
    if depends_on_length(model):
        chunk = length  # its rotary frequencies change with the length: chunks would be rotated differently
    turn = Turn()
    count = text_config(model.config).num_hidden_layers
    layers = [CaptureLayer(last_queries, observe, turn, mask) for _ in range(count)]
    cache = Cache(layers=layers)
    with attention_of(model):
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            decoder_of(model)(
                input_ids=input_ids[:, start:stop],
                attention_mask=None if mask is None else mask[:, :stop],
                position_ids=positions[:, start:stop].clamp(min=0),
                use_cache=True,
                **{cache_argument(model): cache},
            )
            turn.ended()
    captured = []
    for layer in layers:
        if layer.keys is None or layer.values is None or layer.keys.shape != layer.values.shape:
            raise UserError(f"{type(model).__name__} does not cache keys and values per head: moend cannot compress it")
        captured.append(LayerCapture(layer.keys, layer.values, layer.queries, layer.rule))
    observed = {name: [layer.observed[name] for layer in layers] for name in observe}
    return Prefilled(captured, positions, mask, model.config, observed)


@dataclass(frozen=True)
class LayerSpec:
    """What one layer of one sequence is to hold: `tokens` entries now, how they are stored, when it evicts later.

    heads: the same for each KV head, where they differ; `tokens` then is only what was planned, and `storage` and
    `schedule` say nothing. slides: whether a layer with a window and without a cap lets go of what has left it while
    decoding; False where so little comes that it need not.
    """

    tokens: int
    storage: Storage
    schedule: Schedule = PROMPT_ONLY
    heads: tuple[LayerSpec, ...] | None = None
    slides: bool = True

    @property
    def evicts(self) -> bool:
        """Whether it evicts while decoding."""
        return self.schedule.cap is not None


def compress(
    prefilled: Prefilled,
    specs: Sequence[LayerSpec],
    selector: Callable[[int], Selector],
    *,
    score_key: Any,
    dtype: torch.dtype,
    row: int = 0,
) -> CompressedCache:
    """Fork one sequence of a prefill into the cache a method keeps; the prefill is left as it was.

    selector(l) is the method's scorer bound to layer l; score_key names it, so that cells with the same scorer share
    its scores. dtype is what 16-bit entries are stored in.
    """
    layers = []
    for index, spec in enumerate(specs):
        choose = replace(selector(index), rule=prefilled.layers[index].rule)
        scores = functools.partial(prefilled.scores, choose, score_key, row)
        heads = [None] if spec.heads is None else range(len(spec.heads))
        own = zip(spec.heads or [spec], heads, strict=True)
        layers.append([tuple(_hold(prefilled, index, row, x, choose, scores, dtype, h) for x, h in own)])
    return CompressedCache(layers, prefilled.config)


def _hold(
    prefilled: Prefilled,
    layer: int,
    row: int,
    spec: LayerSpec,
    choose: Selector,
    scores: Callable[[], Tensor],
    dtype: torch.dtype,
    head: int | None,
) -> LayerKV:
    """What one layer keeps of one sequence, or one KV head of it (None: all)."""
    keys, values, asked = prefilled.entries(layer, row)
    of, (heads, n, _), rule = slice(None) if head is None else slice(head, head + 1), keys.shape, choose.rule
    keys, values, positions = keys[of], values[of], None
    accumulated = queries = None
    if spec.storage.accumulated:
        accumulated = prefilled.seen(layer, row, ("accumulated",))["accumulated"][of]
    if spec.storage.queries:
        queries = _latest(asked, heads, spec.storage.queries)[of]
    # a head of its own does not slide: it ranks what has left the window last, and keeps what it has room for
    visible = n - oldest_seen(rule, n) if head is None else n
    form: Literal["none", "shared", "per_head"] = "none"
    if min(spec.tokens, visible) < n or (head is not None and spec.storage.positions != "none" and not spec.evicts):
        at = torch.arange(n, device=keys.device)
        if spec.tokens < visible:
            ranks = scores()
            kept = choose.best(ranks if head is None else ranks.expand(heads, -1)[of], at, n, spec.tokens)
        else:  # all that a query will ever see
            kept = at[None, n - visible :]
        keys, values, positions = gather(keys, values, at, kept)
        accumulated = None if accumulated is None else accumulated.gather(1, kept.expand(len(accumulated), -1))
        form = "per_head" if kept.shape[0] > 1 or head is not None else "shared"
        positions = positions[None] if head is not None else positions
    schedule, chooser = spec.schedule, choose if choose.scorer.at_decode else None
    if head is None and schedule.cap is None and spec.slides and rule is not None and rule.reach is not None:
        schedule, chooser = _slide(rule.reach, schedule), newest(layer)
    elif head is not None and chooser is not None:
        chooser = chooser.of_head(head, heads)
    return LayerKV(
        keys,
        values,
        positions,
        replace(spec.storage, positions=form),
        tokens_seen=n,
        dtype=dtype,
        schedule=schedule,
        choose=chooser,
        accumulated=accumulated,
        queries=queries,
    )


def _slide(reach: int, schedule: Schedule) -> Schedule:
    """How a layer whose queries see `reach` entries lets go of older ones: an eighth of them at a time."""
    cap, spare = sliding(reach)
    return replace(schedule, cap=cap, reserve=spare, kind="strict")


def newest(layer: int) -> Selector:
    """Keeps the newest entries and nothing else."""
    return Selector(scorer("streaming"), layer, n_sink=0, recent=2**62, scaling=1.0, seed=0)


def _latest(queries: Tensor | None, heads: int, per_head: int) -> Tensor:
    """The last of queries (H_q, w, d) as a `LayerKV` holds them: per_head of them in all for each KV head's group."""
    if queries is None:
        raise ValueError("this prefill did not keep its last queries")
    grouped = queries.unflatten(0, (heads, -1))
    width = per_head // grouped.shape[1]
    grouped = grouped[:, :, -width:]
    return F.pad(grouped, (0, 0, width - grouped.shape[2], 0))
