"""A window run again above a changed prefix: what a change of one layer's cache does to the model's output.

The prefix is computed once. Of the layers only the window is run again, all changes in one sweep up the stack: layer l
takes the rows changed below it and, for each of its own changes, one more, which starts from the unchanged window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moend.calibration.kl import Stack
from moend.calibration.sensitivity import attention_blocks
from moend.hf.attention import AttentionRule
from moend.hf.layers import marked
from moend.scoring import Scorer


@dataclass(frozen=True)
class Base:
    """The method that is measured, or whose budgets will follow: its scorer, and what it protects (see `select`)."""

    scorer: Scorer
    n_sink: int
    recent: int | float


@dataclass(frozen=True)
class Change:
    """What one layer's prefix becomes: keys, values (H, n, d) at positions (n,) or (H, n), None: 0 ... n - 1.

    heads: the KV heads that this is of, H of them, where not of all; the layer's others stay as they are.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor | None = None
    heads: slice | None = None


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
        scaling, window = rule.scaling, rule.window
        assert self.own is not None
        rows, _, w, dim = query.shape
        heads, start = self.own[0].shape[1], self.whole.keys.shape[1]
        q = (query.float() * scaling).reshape(rows, heads, -1, dim).transpose(0, 1)  # (H, rows, G * w, d)
        k, v = (x.float().transpose(0, 1) for x in self.own)
        at = torch.arange(w, device=query.device)
        me = at.repeat(q.shape[2] // w)[:, None]  # a row of a group of heads is one query
        sees = at <= me
        if window is not None:
            sees &= me - at < window
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
            if window is not None:
                n = change.keys.shape[1]
                old = torch.arange(n, device=query.device) if change.positions is None else change.positions
                gone = (start + me - old[..., None, :] >= window).view(-1, 1, *me.shape[:1], n)
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


class Sweep:
    """A window above an unchanged prefix, ready to be run again with any layer changed."""

    def __init__(
        self,
        stack: Stack,
        caches: Sequence[tuple[Tensor, Tensor]],
        ids: Tensor,
        positions: Sequence[int] | None = None,
    ):
        """caches: keys and values (H, P, d) of each layer. ids (1, w): the window. positions: where in the window KL is
        taken (None: everywhere); the projection onto the vocabulary is most of the cost."""
        self.stack, self.caches = stack, caches
        self.start = caches[0][0].shape[1]
        self.blocks = attention_blocks(stack.model)
        self.positions = torch.tensor(list(range(ids.shape[1])) if positions is None else positions, device=ids.device)
        self.inputs = [stack.base.embed_tokens(ids)]
        self.attention: list[Tensor] = []  # each layer's own attention output (w, hidden)
        for layer in range(len(caches)):
            states, attended = self._layer(layer, self.inputs[-1], ())
            self.inputs.append(states)
            self.attention.append(attended[0].float())
        self.reference = stack.log_probabilities(self.inputs[-1][0, self.positions], len(self.positions))

    def run(
        self, changes: Sequence[Sequence[Callable[[], Change]]], rows: int
    ) -> Iterator[tuple[int, int, float, float]]:
        """Yield (layer, index of the change, KL at the output, relative change of the layer's attention output).

        changes: for each layer, made when their turn comes. At most `rows` windows are under way at once.
        """
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
