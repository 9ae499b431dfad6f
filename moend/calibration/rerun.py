"""Runs a model again with one layer's cache changed: how far does the model's output move?

An example is a prefix and a window of tokens after it. The prefix is read once. Of the layers only the window is run
again, all changes in one pass up the stack: layer l takes the rows changed below it and, for each of its own changes,
one more, which starts from the unchanged window.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moend.cache import Prefilled, cache_argument, prefill
from moend.cache.compressed import OBSERVATIONS
from moend.cache.select import Selector
from moend.calibration.sensitivity import attention_blocks
from moend.errors import UserError
from moend.hf.attention import AttentionRule
from moend.hf.cache_layers import marked
from moend.hf.rope import depends_on_length, rotary
from moend.scoring import Scorer

POSITIONS = 256  # positions whose logits are held at a time

# (prefill, names, ids of the prefix, context (start, stop)) -> the prefill with these observations: `Replay.observe`
Observe = Callable[[Prefilled, Collection[str], Sequence[int], tuple[int, int]], Prefilled]


@dataclass(frozen=True)
class Evictor:
    """What a method drops by: its scorer and what it protects (see `moend.cache.select`)."""

    scorer: Scorer
    n_sink: int  # first positions that stay
    recent: int | float  # newest entries that stay, or a share in (0, 1) of those that are kept

    def selectors(self, rerun: Rerun, statistics: Mapping[str, Tensor] | None, seed: int) -> list[Selector]:
        """One for each layer. statistics: (L, ...) by name, of scorers that need a calibration."""
        model = rerun.stack.model
        needs = self.scorer.statistics
        return [
            Selector(
                self.scorer,
                layer,
                self.n_sink,
                self.recent,
                block.scaling,
                seed=seed,
                rotary=rotary(model, layer) if needs else None,
                statistics=None if statistics is None else {name: t[layer] for name, t in statistics.items()},
                rule=rerun.prefilled.layers[layer].rule,
            )
            for layer, block in enumerate(rerun.blocks)
        ]


@dataclass(frozen=True)
class Change:
    """What one layer's prefix becomes: n entries of H KV heads."""

    keys: Tensor  # (H, n, d)
    values: Tensor  # (H, n, d)
    positions: Tensor | None = None  # (n,) or (H, n); None: 0 ... n - 1
    heads: slice | None = None  # which KV heads these are; None: all. The layer's others stay as they are


class Stack:
    """A transformers decoder that is run layer by layer. `check` refuses what is more than embedding, layers, norm and
    head."""

    def __init__(self, model: Any):
        self.model, self.base = model, model.base_model
        self.argument = cache_argument(model)
        missing = [n for n in ("embed_tokens", "layers", "norm", "rotary_emb") if not hasattr(self.base, n)]
        if missing or not hasattr(model, "lm_head"):
            raise UserError(
                f"{type(model).__name__} has no {', '.join(missing) or 'lm_head'}: its output cannot be calibrated"
            )
        self.device = self.base.embed_tokens.weight.device

    def check(self, ids: Tensor) -> None:
        """UserError where the stack's logits are not the model's own."""
        ids = ids.to(self.device)
        own = self.model(input_ids=ids, use_cache=False).logits.float()
        ours = self.model.lm_head(self.base.norm(self.hidden(ids)[-1])).float()
        if not torch.allclose(own, ours, atol=1e-3 * float(own.abs().max())):
            raise UserError(
                f"{type(self.model).__name__} is not a plain stack of layers (it scales or caps something on the way): "
                "its output cannot be calibrated"
            )

    def hidden(self, ids: Tensor) -> list[Tensor]:
        """Input of every layer and the last one's output, each (1, T, hidden)."""
        states = [self.base.embed_tokens(ids)]
        for index in range(len(self.base.layers)):
            states.append(self.layer(index, states[-1], None))
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

    def log_probabilities(self, states: Tensor) -> Tensor:
        """(n, V) float32 log p at states (n, hidden)."""
        return torch.cat([F.log_softmax(x, dim=-1).float() for x in self._logits(states)])

    def divergences(self, reference: Tensor, states: Tensor) -> list[float]:
        """Mean KL(reference || row) in nats over n positions, of each of states (rows, n, hidden)."""
        n = states.shape[1]
        if n <= POSITIONS:  # many rows in one product
            found: list[float] = []
            for part in states.split(max(POSITIONS // n, 1)):
                (logits,) = self._logits(part.flatten(0, 1))
                found += _kl(reference, logits.unflatten(0, part.shape[:2])).mean(-1).tolist()
            return found
        pieces = list(reference.split(POSITIONS))
        return [
            sum(float(_kl(p, q).sum()) for p, q in zip(pieces, self._logits(row), strict=True)) / n for row in states
        ]

    def _logits(self, states: Tensor) -> Iterator[Tensor]:
        """float64: what separates p from q is often less than float32 resolves in a sum over the vocabulary."""
        for part in states.split(POSITIONS):
            yield self.model.lm_head(self.base.norm(part)).double()


def _kl(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(p || q) of log p (n, V) and float64 logits (..., n, V) of q: (..., n)."""
    log_p = reference.double()
    p = log_p.exp()
    # sum p (log p - z) + log Z: one pass over q's logits for each term, no log-probabilities of q are stored
    return (p * log_p).sum(-1) - torch.einsum("nv,...nv->...n", p, logits) + p.sum(-1) * logits.logsumexp(-1)


class Rerun:
    """A window above an unchanged prefix, ready to be run again with any layer changed."""

    def __init__(self, stack: Stack, prefilled: Prefilled, ids: Tensor, positions: Sequence[int]):
        """ids (1, w): the window. positions: where in it KL is taken; the projection onto the vocabulary is most of the
        cost."""
        self.stack, self.prefilled = stack, prefilled
        self.caches = [(x.keys[0], x.values[0]) for x in prefilled.layers]  # (H, P, d) each
        self.start = prefilled.length
        self.blocks = attention_blocks(stack.model)
        self.positions = torch.tensor(list(positions), device=ids.device)
        self.inputs = [stack.base.embed_tokens(ids)]
        self.attention: list[Tensor] = []  # each layer's own attention output (w, hidden)
        for layer in range(len(self.caches)):
            states, attended = self._layer(layer, self.inputs[-1], ())
            self.inputs.append(states)
            self.attention.append(attended[0].float())
        self.reference = stack.log_probabilities(self.inputs[-1][0, self.positions])

    def run(
        self, changes: Sequence[Sequence[Callable[[], Change]]], tokens_at_once: int
    ) -> Iterator[tuple[int, int, float, float]]:
        """Yield (layer, index of the change, KL at the output in nats, relative change of the layer's attention
        output).

        changes: for each layer, made when their turn comes. tokens_at_once bounds the windows under way at once.
        """
        rows = max(tokens_at_once // self.inputs[0].shape[1], 1)
        flat = [(layer, i) for layer, each in enumerate(changes) for i in range(len(each))]
        for begin in range(0, len(flat), rows):
            part = flat[begin : begin + rows]
            moved: list[float] = []
            states = self.inputs[0][:0]
            for layer in range(part[0][0], len(self.caches)):
                here = [changes[layer][i]() for at, i in part if at == layer]
                states = torch.cat([states, self.inputs[layer].expand(len(here), -1, -1)])
                states, attended = self._layer(layer, states, here)
                if here:
                    own = self.attention[layer]
                    size = torch.linalg.vector_norm(own, dim=-1)
                    error = torch.linalg.vector_norm(attended[-len(here) :].float() - own, dim=-1)
                    # as in the sensitivity table: where the output is 0, any change counts as 1
                    moved += torch.where(size > 0, error / size, (error > 0).float()).mean(-1).tolist()
            found = self.stack.divergences(self.reference, states[:, self.positions])
            for (layer, i), divergence, change in zip(part, found, moved, strict=True):
                yield layer, i, divergence, change

    def _layer(self, layer: int, states: Tensor, changes: Sequence[Change]) -> tuple[Tensor, Tensor]:
        """The layer's output and its attention block's, both (rows, w, hidden); the last rows are changed."""
        seen: list[Tensor] = []
        handle = self.blocks[layer].register_forward_hook(
            lambda _m, _i, out: seen.append(out if isinstance(out, Tensor) else out[0])
        )
        try:
            out = self.stack.layer(layer, states, _Prefix(*self.caches[layer], changes), self.start)
        finally:
            handle.remove()
        return out, seen[0]


@torch.no_grad()
def reruns(
    model: Any,
    ids: Tensor,
    window: int,
    *,
    scorer: Scorer | None = None,
    observe: Observe | None = None,
    every: int = 1,
) -> Iterator[Rerun]:
    """Each example of ids (N, P + window), no padding, its prefix read and its window ready to be run again.

    To be used where `attention_of(model)` holds.

    scorer: sees the prefix too, its replays included, for which `observe` is needed. every: KL is taken at every
    `every`-th position of the window.
    """
    prefix = ids.shape[1] - window
    if window < 1 or prefix < 1 or every < 1:
        raise UserError(
            f"a calibration needs a prefix and a window, got {prefix} and {window} tokens, KL at every {every}"
        )
    if depends_on_length(model):
        raise UserError(
            f"{type(model).__name__} turns keys by an angle that depends on the length: its output cannot be calibrated"
        )
    wanted = set(scorer.observes) if scorer is not None else set()
    replayed = wanted - set(OBSERVATIONS)
    if scorer is not None and replayed and observe is None:
        raise UserError(
            f"scorer {scorer.name} needs {', '.join(sorted(replayed))}, and nothing here replays the prompt"
        )
    stack = Stack(model)
    stack.check(ids[:1, :16])
    for each in ids.split(1):
        row = each.to(stack.device)
        before = row[:, :prefix]
        queries = scorer.last_queries if scorer is not None else 0
        done = prefill(model, before, last_queries=queries, observe=wanted - replayed)
        if replayed and observe is not None:
            done = observe(done, replayed, before[0].tolist(), (0, prefix))
        yield Rerun(stack, done, row[:, prefix:], range(0, window, every))


class _Prefix:
    """Stands in for one layer's cache while a window runs: all rows see its prefix, the last ones a changed one."""

    def __init__(self, keys: Tensor, values: Tensor, changes: Sequence[Change]):
        self.whole, self.changes = Change(keys, values), changes
        self.own: tuple[Tensor, Tensor] | None = None

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """keys, values (rows, H, w, d) of the window; `moend.hf.attention` finds this object at the keys."""
        self.own = keys, values
        return marked(self, keys, values)

    def attend(self, query: Tensor, rule: AttentionRule) -> Tensor:
        """query (rows, H_q, w, d) -> (rows, H_q, w, d). Rows with the same prefix are one product."""
        rule.plain("a calibration that runs a window again")
        assert self.own is not None
        rows, _, w, dim = query.shape
        heads, start = self.own[0].shape[1], self.whole.keys.shape[1]
        q = (query.float() * rule.scaling).reshape(rows, heads, -1, dim).transpose(0, 1)  # (H, rows, G * w, d)
        k, v = (x.float().transpose(0, 1) for x in self.own)
        at = torch.arange(w, device=query.device)
        me = at.repeat(q.shape[2] // w)[:, None]  # a row of a group of heads is one query
        sees = at <= me
        if rule.window is not None:
            sees &= me - at < rule.window
        own = (q @ k.mT).masked_fill_(~sees, -torch.inf)
        same = rows - len(self.changes)
        # where a change is of some heads, the others of its row see the whole prefix: that row is computed twice there
        partly = any(c.heads is not None for c in self.changes)
        parts = [
            (slice(0, rows if partly else same), self.whole),
            *((slice(same + i, same + i + 1), c) for i, c in enumerate(self.changes)),
        ]
        out = torch.empty_like(q)
        for part, change in parts:
            if part.start == part.stop:
                continue
            of = slice(None) if change.heads is None else change.heads
            gone = None
            if rule.window is not None:
                n = change.keys.shape[1]
                old = torch.arange(n, device=query.device) if change.positions is None else change.positions
                gone = (start + me - old[..., None, :] >= rule.window).view(-1, 1, *me.shape[:1], n)
            out[of, part] = _attend(q[of, part], own[of, part], v[of, part], change, gone)
        return out.transpose(0, 1).reshape(query.shape).to(query.dtype)


def _attend(q: Tensor, own: Tensor, v: Tensor, change: Change, gone: Tensor | None) -> Tensor:
    """q (H, R, n, d), logits of the window `own` (H, R, n, w), its values v (H, R, w, d) -> (H, R, n, d)."""
    keys, values = change.keys.float(), change.values.float()
    # the rows as more queries of one product with the prefix: it is never repeated
    old = (q.flatten(1, 2) @ keys.mT).unflatten(1, q.shape[1:3])
    if gone is not None:
        old.masked_fill_(gone, -torch.inf)
    top = torch.maximum(old.amax(-1, keepdim=True), own.amax(-1, keepdim=True))
    old, own = old.sub_(top).exp_(), (own - top).exp_()
    size = old.sum(-1, keepdim=True) + own.sum(-1, keepdim=True)
    return ((old.flatten(1, 2) @ values).unflatten(1, q.shape[1:3]) + own @ v) / size
