"""What a scorer sees, what it gives, and the attention of the last queries that several scorers go by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moend.hf.attention import AttentionRule
from moend.hf.rope import Rotary


@dataclass(frozen=True)
class LayerView:
    """What a scorer sees of one layer of one sequence.

    The layer has H KV heads. G query heads share each of them and lie next to each other, so H_q = H * G.
    """

    layer: int  # index of the layer
    keys: Tensor  # (H, n, d): n entries, after RoPE
    values: Tensor  # (H, n, d)
    positions: Tensor  # (n,) or (H, n) int64, ascending: where the entries stand in the sequence
    now: int  # position of the next query
    queries: Tensor | None = None  # (H_q, w, d), after RoPE: those at positions now - w ... now - 1
    scaling: float = 1.0  # what the model multiplies q . k with
    head: int = 0  # the first of the KV heads among those of the layer: not 0 where a head is scored alone
    rule: AttentionRule | None = None  # windows, soft cap and sinks of the layer's attention; None: it has none
    rotary: Rotary | None = None  # how the layer turns queries and keys
    statistics: Mapping[str, Tensor] | None = None  # this layer's rows of the calibration `Scorer.statistics`
    seed: int = 0  # of the sample, for scorers that draw
    observed: Mapping[str, Tensor] = field(default_factory=dict)  # by name what `Scorer.observes` asks for, (..., n)

    @property
    def at(self) -> Tensor:
        """(1 or H, n) positions, to broadcast over KV heads."""
        return torch.atleast_2d(self.positions)


class Scorer:
    """Ranks the entries of one layer: the base of all scorers.

    A scorer is a frozen dataclass of its settings with a formula, `__call__`. It overrides those of the properties
    below (a class attribute is enough) that differ for it. It never changes what it sees and keeps nothing between
    calls.
    """

    @property
    def name(self) -> str:
        """Its name in configurations and messages: that of its file."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def version(self) -> int:
        """Goes up when the formula changes: a part of the keys of the cells that use it."""
        return 1

    @property
    def per_head(self) -> bool:
        """Whether KV heads have scores of their own. False: one score per token."""
        return True

    @property
    def comparable(self) -> bool:
        """Whether scores of different KV heads and layers can be compared. False: only their order in a head counts."""
        return True

    @property
    def reindex(self) -> bool:
        """Whether positions count inside the cache instead of in the text (StreamingLLM's original)."""
        return False

    @property
    def last_queries(self) -> int:
        """How many of the last queries it needs. While decoding they are kept beside the entries, and counted."""
        return 0

    @property
    def observes(self) -> tuple[str, ...]:
        """What it needs that only a pass over the prompt shows.

        "accumulated" (H, n) float32 is the attention an entry received, summed over all queries so far and the query
        heads that share a KV head. The others are those of `moend.replay`.
        """
        return ()

    @property
    def at_decode(self) -> bool:
        """Whether it can score again while decoding, when nothing of the prompt's pass is at hand."""
        return True

    @property
    def statistics(self) -> str | None:
        """The kind of calibration it needs."""
        return None

    def __call__(self, view: LayerView) -> Tensor:
        """Scores (H, n) float32, or (1, n) where all KV heads share them. Entries with higher scores are kept."""
        raise NotImplementedError


def last_logits(view: LayerView, window: int) -> Tensor:
    """Logits (H, G, w, n) float32 of the last `window` queries, capped where the model caps them; -inf where a query
    does not see an entry: it is later than the query, or has left the layer's window or chunk.

    w is smaller than `window` where the sequence is. Memory is w x n per query head.
    """
    if view.queries is None:
        raise ValueError("this scorer needs the last queries")
    heads, n, _ = view.keys.shape
    queries = view.queries[:, -window:].float() * view.scaling  # (H_q, w, d)
    width = queries.shape[1]
    asked = torch.arange(view.now - width, view.now, device=view.keys.device)
    logits = queries.reshape(heads, -1, queries.shape[-1]) @ view.keys.float().mT  # (H, G * w, n)
    rule = AttentionRule(view.scaling) if view.rule is None else view.rule
    logits = rule.cap(logits).view(heads, -1, width, n)
    first = 0 if rule.reach is not None else max(n - width, 0)  # only the newest entries can be later than a query
    hidden = rule.unseen(asked, view.at[:, first:])  # (1 or H, w, n - first)
    logits[..., first:].masked_fill_(hidden[:, None], -torch.inf)
    return logits


def attention(logits: Tensor, rule: AttentionRule | None = None) -> Tensor:
    """Softmax over the last dimension of logits, (H, G, w, n) where there is a rule; zeros where a query sees no entry.

    Where the rule has attention sinks, they take their share of each query head's softmax.
    """
    shares = torch.softmax(logits, dim=-1).nan_to_num_(0.0)
    if rule is None or rule.sinks is None:
        return shares
    sinks = rule.sinks.float().view(*logits.shape[:2], 1, 1)
    return shares.mul_(torch.sigmoid(torch.logsumexp(logits, dim=-1, keepdim=True) - sinks))


def mean_attention(logits: Tensor, rule: AttentionRule | None = None) -> Tensor:
    """The mean of `attention` over queries: (H, G, n); it overwrites logits (H, G, w, n).

    The shares are never written out: normalising and the mean are one weight per query, so the mean is a product of
    these weights with the exponentials.
    """
    top = logits.amax(-1, keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)  # finite where a query sees nothing
    sums = logits.sub_(top).exp_().sum(-1, keepdim=True)  # (H, G, w, 1)
    weights = torch.where(sums > 0, 1 / (logits.shape[2] * sums), 0.0)
    if rule is not None and rule.sinks is not None:
        weights *= torch.sigmoid(sums.log() + top - rule.sinks.float().view(*logits.shape[:2], 1, 1))
    return (weights.mT @ logits)[:, :, 0]


def window_first(view: LayerView, window: int, scores: Tensor) -> Tensor:
    """Scores (H, n), which are at most 1, with those of the last `window` positions in (1, 2], the newest highest."""
    newest = 2.0 + (view.at - view.now + 1).float() / (window + 1)
    return torch.where(view.at >= view.now - window, newest, scores)
