"""MoEZip: entries that uncertain routers look at, kept in every layer and head, over a base scorer's own choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from moend.errors import UserError, unknown
from moend.scoring.base import LayerView, Scorer

SHARE, SLOPE = 0.05, 0.20  # rho = SHARE + SLOPE * Gamma
THRESHOLD = 0.85  # of the largest possible trace
QUERY_BLOCK = 32  # queries whose attention over the whole context is held at a time
MODES = ("query", "recon")


def fisher_trace(gates: Tensor, kind: str) -> Tensor:
    """Trace of the Fisher information of the gates (..., E) in their logits: (...), float32 (MoEZip).

    Softmax: tr(diag(g) - g g^T) = 1 - sum g^2. Sigmoid, E independent gates: sum g (1 - g). For gates that sum to 1
    the two are equal; for the same logits they are not. ValueError where a gate is NaN or not in [0, 1].
    """
    g = gates.float()
    if not bool(((g >= 0) & (g <= 1)).all()):
        raise ValueError("gates must be numbers in [0, 1]")
    return 1 - g.square().sum(-1) if kind == "softmax" else (g * (1 - g)).sum(-1)


def largest_trace(experts: int, kind: str) -> float:
    """What `fisher_trace` is at most: 1 - 1/E (softmax), E/4 (sigmoid)."""
    return 1 - 1 / experts if kind == "softmax" else experts / 4


def strongest_attention(query: Tensor, keys: Tensor, entries: int, scaling: float, window: int | None = None) -> Tensor:
    """Attention of the last q of t tokens to each of the first `entries`, the largest over all heads: (q, entries).

    query (H_q, q, d), keys (H, t, d); causal softmax over all that a query sees. Memory is q x entries.
    """
    (heads, t, _), q = keys.shape, query.shape[1]
    grouped = query.unflatten(0, (heads, -1)) * scaling
    at = torch.arange(t, device=keys.device)
    out = []
    for start in range(0, q, QUERY_BLOCK):
        part = grouped[:, :, start : start + QUERY_BLOCK]
        me = at[t - q + start : t - q + start + part.shape[2], None]
        hidden = at > me if window is None else (at > me) | (me - at >= window)
        logits = (part @ keys[:, None].mT).masked_fill_(hidden, -torch.inf)
        share = torch.softmax(logits, dim=-1, dtype=torch.float32)
        out.append(share[..., :entries].amax(dim=(0, 1)))
    return torch.cat(out)


class Propagation:
    """Sums r_i and Gamma layer by layer while tokens are fed: no layer's attention outlives the layer.

    r_i = sum over MoE layers l and instruction tokens t of max_h attention(t, l, h, i) f(t, l);
    Gamma = share of (l, t) with f > 0.85 of its maximum.
    """

    def __init__(self, entries: int, kind: str):
        self.entries, self.kind = entries, kind
        self.received: Tensor | None = None
        self.above = self.count = 0

    def add(self, attention: Tensor, gates: Tensor) -> None:
        """One MoE layer: attention (q, entries), gates (q, E) of q instruction tokens."""
        if not bool((attention >= 0).all()):
            raise ValueError("attention must be numbers >= 0")
        f = fisher_trace(gates, self.kind)
        self.above += int((f > THRESHOLD * largest_trace(gates.shape[-1], self.kind)).sum())
        self.count += f.numel()
        part = f @ attention
        self.received = part if self.received is None else self.received + part

    def result(self) -> Tensor:
        """(2, entries) float32: r, and Gamma at every entry. UserError where no instruction token was routed."""
        if self.received is None or not self.count:
            raise UserError("MoEZip has no instruction token to go by: the question after the context is empty")
        return torch.stack([self.received, torch.full_like(self.received, self.above / self.count)])


def anchor_count(budget: int, gamma: float, least: int = 32, most: int = 128) -> int:
    """B_f = clip(floor(B rho), least, most), never above B; rho = 0.05 + 0.20 Gamma (MoEZip, appendix C)."""
    return int(anchor_counts(torch.tensor([budget]), gamma, least, most))


def anchor_counts(budgets: Tensor, gamma: float, least: int, most: int) -> Tensor:
    """`anchor_count` of many budgets at once."""
    # the small number is for products such as 40 x 0.25 that floating point leaves just below the whole number
    share = torch.floor(budgets.double() * (SHARE + SLOPE * gamma) + 1e-9).long()
    return torch.minimum(share.clamp(least, most), budgets)


def ranking(base: Tensor, received: Tensor, counts: Tensor) -> Tensor:
    """For each head the order in which entries enter as its budget grows from 1 to n: (H, n), 0 enters first.

    base (H, n) scores; received (n,), -inf where an entry cannot be an anchor; counts (n,): B_f for B = 1 ... n.
    The choice A_{B_f} + base's best B - B_f outside A_{B_f} only grows with B: a larger budget adds either the next
    anchor, or, where that was chosen already or B_f stays, base's next best. So one order holds the choice of every
    budget, which is what a scorer is. Ties go to the earlier entry.
    """
    heads, n = base.shape
    device = base.device
    places = base.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)  # of each entry in base's order
    order = received.argsort(descending=True, stable=True)[: int(counts[-1])]
    order = order[received[order] > -torch.inf]
    # budgets[j]: the budget with which anchor j is due
    budgets = torch.searchsorted(counts.cpu(), torch.arange(1, len(order) + 1)) + 1
    mine = places[:, order].cpu()
    fresh = torch.zeros_like(mine, dtype=torch.bool)  # not chosen by base before
    for j, due in enumerate(budgets.tolist()):  # at most anchor_max steps, of all heads at once
        earlier = fresh[:, :j]
        ahead = (earlier & (mine[:, :j] < mine[:, j : j + 1])).sum(1)
        fresh[:, j] = mine[:, j] - ahead >= due - 1 - earlier.sum(1)
    fresh, budgets = fresh.to(device), budgets.to(device)
    anchored = torch.zeros(heads, n, dtype=torch.bool, device=device)
    anchored[:, order] = fresh
    taken = torch.zeros(heads, n, dtype=torch.bool, device=device)
    taken[:, budgets - 1] = fresh
    # base's others fill, in its order, the places that anchors leave
    left = torch.where(anchored, n + places, places).argsort(dim=-1)
    free = torch.where(taken, n, 0).add(torch.arange(n, device=device)).argsort(dim=-1)
    rank = torch.empty_like(places).scatter_(1, left, free)
    due_at = (budgets - 1).expand(heads, -1)
    rank[:, order] = torch.where(fresh, due_at, rank[:, order])
    return rank


@dataclass(frozen=True)
class MoEZip(Scorer):
    """Anchors that every layer and head keeps, over the choice of a base scorer (MoEZip, arXiv 2610.30206).

    mode `query`: instruction tokens are the question after the context, as far as it is read before compression (its
    last token is not). `recon`: they are the tokens of the reconstruction prompt, the question is not looked at.
    """

    mode: str = "query"  # which tokens are the instruction: query or recon
    anchor_min: int = 32  # bounds of B_f, in entries
    anchor_max: int = 128  # the upper bound of B_f, in entries
    base: Mapping[str, Any] = field(default_factory=lambda: {"name": "kvzip"})  # scorer of the others: name, settings

    at_decode = False
    comparable = False  # a score is a place in its head's own order

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise unknown("method.scorer.mode", str(self.mode), MODES)
        for setting in ("anchor_min", "anchor_max"):
            if not isinstance(value := getattr(self, setting), int) or value < 0:
                raise UserError(f"{setting} of scorer moezip must be a whole number >= 0, got {value!r}")
        if self.anchor_min > self.anchor_max:
            raise UserError(f"anchor_min={self.anchor_min} of scorer moezip is above anchor_max={self.anchor_max}")
        if self.scorer.statistics is not None or self.scorer.name == self.name:
            raise UserError(f"scorer {self.scorer.name} cannot be the base of moezip")

    @cached_property
    def scorer(self) -> Scorer:
        """The base scorer."""
        from moend.scoring import scorer

        params = dict(self.base)
        if "name" not in params:
            raise UserError("base of scorer moezip has no name")
        return scorer(str(params.pop("name")), **params)

    @property
    def last_queries(self) -> int:
        """What the base needs."""
        return self.scorer.last_queries

    @property
    def observes(self) -> tuple[str, ...]:
        """The routing, and what the base observes."""
        return (*self.scorer.observes, self.routing)

    @property
    def routing(self) -> str:
        """The name of the observation that holds r and Gamma."""
        return f"routing_{self.mode}"

    def __call__(self, view: LayerView) -> Tensor:
        """(H, n) float32: minus the place in `ranking`, so that the best B are the paper's choice for every B."""
        heads, n, _ = view.keys.shape
        received, gamma = view.observed[self.routing]
        budgets = torch.arange(1, n + 1, device=view.keys.device)
        counts = anchor_counts(budgets, float(gamma[0]), self.anchor_min, self.anchor_max)
        return -ranking(self.scorer(view).expand(heads, -1), received, counts).float()

    def diagnostics(self, routing: Tensor, kept: list[Tensor], base_kept: list[Tensor]) -> dict[str, Any]:
        """Gamma, anchors kept, and the share of base's choice that anchors replaced; of one sequence.

        routing (2, n); kept and base_kept: per layer the indices (H, B) that moezip and base alone keep.
        """
        gamma = float(routing[1, 0])
        counts = [anchor_count(k.shape[-1], gamma, self.anchor_min, self.anchor_max) for k in kept]
        possible = int((routing[0] > -torch.inf).sum())
        anchors = min(max(counts, default=0), possible)
        n = routing.shape[-1]
        gone = total = 0
        for mine, base in zip(kept, base_kept, strict=True):
            held = torch.zeros(mine.shape[0], n, dtype=torch.bool, device=mine.device).scatter_(1, mine, True)
            gone += int((~held.gather(1, base.expand(mine.shape[0], -1))).sum())
            total += base.shape[-1] * mine.shape[0]
        found: dict[str, Any] = {
            "gamma": gamma,
            "anchors": anchors,
            "replaced": gone / total if total else 0.0,
        }
        if counts and all(c == k.shape[-1] for c, k in zip(counts, kept, strict=True)):
            found["note"] = "anchors only"
        return found


SCORER = MoEZip
