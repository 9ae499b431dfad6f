"""Which entries stay: protected sinks and recent tokens, then the best scores, per KV head, in order of position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moend.hf.attention import AttentionRule
from moend.hf.rope import Rotary
from moend.scoring.base import LayerView, Scorer


def select(scores: Tensor, positions: Tensor, keep: int, n_sink: int, recent: int, oldest: int = 0) -> Tensor:
    """Indices (H or 1, keep), ascending, of the entries to keep.

    scores (H or 1, n); positions (n,) or (H, n), ascending. The first `n_sink` positions and the `recent` newest
    entries are kept first; where `keep` is too small for both, sinks get at most half and the newest get the rest.
    Positions before `oldest` have left a window or chunk, no query will see them: they go before all others.
    """
    n = scores.shape[-1]
    if not 1 <= keep <= n:
        raise ValueError(f"cannot keep {keep} of {n} entries")
    if torch.isnan(scores).any():
        raise ValueError("scores contain NaN")
    sinks = min(n_sink, keep // 2)
    newest = min(recent, keep - sinks)
    at = torch.arange(n, device=scores.device)
    protected = (positions < sinks) | (at >= n - newest)
    scores = scores.float().masked_fill(protected.expand_as(scores), torch.inf)
    scores = scores.masked_fill((positions < oldest).expand_as(scores), -torch.inf)
    return scores.topk(keep, dim=-1).indices.sort(dim=-1).values


@dataclass(frozen=True)
class Selector:
    """A scorer bound to one layer and sample: chooses entries after the prompt and while decoding."""

    scorer: Scorer
    layer: int  # index of the layer
    n_sink: int  # first positions that are protected
    recent: int | float  # newest entries that are protected, or a share in (0, 1) of those that are kept
    scaling: float  # what the model multiplies q . k with
    seed: int  # of the sample
    rotary: Rotary | None = None  # for scorers that turn keys
    statistics: Mapping[str, Tensor] | None = None  # this layer's rows of the scorer's calibration
    rule: AttentionRule | None = None  # what the layer's attention asks (None: scaled products of all entries)
    head: int = 0  # the first KV head that it sees of the layer

    def of_head(self, head: int, heads: int) -> Selector:
        """The same for one of the layer's `heads` KV heads, which is then all that the scorer sees.

        Statistics and sinks are those of the query heads that share it.
        """

        def own(x: Tensor) -> Tensor:
            return x.unflatten(0, (heads, -1))[head]

        rule, statistics = self.rule, self.statistics
        if rule is not None and rule.sinks is not None:
            rule = replace(rule, sinks=own(rule.sinks))
        if statistics is not None:
            statistics = {name: own(x) for name, x in statistics.items()}
        return replace(self, head=head, rule=rule, statistics=statistics)

    def scores(
        self,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        now: int,
        queries: Tensor | None = None,
        observed: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Scores (H or 1, n) of entries; the arguments are those of `LayerView`."""
        return self.scorer(
            LayerView(
                layer=self.layer,
                head=self.head,
                keys=keys,
                values=values,
                positions=positions.long(),
                now=now,
                queries=queries,
                scaling=self.scaling,
                rotary=self.rotary,
                statistics=self.statistics,
                seed=self.seed,
                observed=observed or {},
                rule=self.rule,
            )
        )

    def best(self, scores: Tensor, positions: Tensor, now: int, keep: int) -> Tensor:
        """Indices (H or 1, keep) of the entries to keep, `now` the position of the next query; see `select`."""
        oldest = 0 if self.rule is None else self.rule.oldest(now)
        recent = self.recent if isinstance(self.recent, int) else int(self.recent * keep)
        return select(scores, positions, keep, self.n_sink, recent, oldest)

    def __call__(
        self,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        now: int,
        keep: int,
        observed: Mapping[str, Tensor],
        queries: Tensor | None,
    ) -> Tensor:
        """Indices to keep while decoding (a `LayerKV`'s chooser)."""
        return self.best(self.scores(keys, values, positions, now, queries, observed), positions, now, keep)
