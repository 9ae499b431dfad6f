"""Extra passes over a prefilled prompt: what a scorer wants to know that the pass over the prompt itself does not show.

    reconstruction   the attention that context entries receive while the model repeats its context (KVZip)
    routing_recon    what uncertain routers look at while they read the reconstruction prompt (MoEZip, mode recon)
    routing_query    the same while they read the question after the context (MoEZip, mode query)

A pass feeds a few tokens on top of a part of the prefill and leaves it as it was. All cells that need an observation
share it; the first two come from the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from moend.cache.compressed import CompressedCache
from moend.cache.prefill import LayerCapture, Prefilled, cache_argument
from moend.cache.select import Selector
from moend.errors import Infeasible, UserError
from moend.hf.attention import AttentionRule, attention_of, causal
from moend.hf.rope import depends_on_length
from moend.hf.routers import Routed, Routing
from moend.scoring.base import Scorer
from moend.scoring.kvzip import attention_received
from moend.scoring.moezip import MoEZip, Propagation, strongest_attention

OBSERVATIONS = ("reconstruction", "routing_recon", "routing_query")
SINKS = 4
CHUNK = 2048  # context tokens that are repeated at a time
CARRY = 8  # tokens of the chunk before that say where to go on
ALL = "1r"  # the only budget at which nothing has to be chosen
# The wording is that of KVZip's published implementation, without the chat template's turn around it.
FIRST = "\n\nRepeat the previous context exactly."
NEXT = "\n\nRepeat the part of the previous context exactly, starting with"


@dataclass(frozen=True)
class Request:
    """The ids that ask for a reconstruction: of the context from its start, and from a later chunk on."""

    first: tuple[int, ...]
    later: tuple[int, ...]


def request(tokenizer: Any, wording: str = "") -> Request:
    """KVZip's request in this tokenizer; `wording` is that of a model which knows other words (conf/model).

    UserError where the tokenizer does not know half of the words: such a request would ask for nothing.
    """
    texts = (wording, wording) if wording else (FIRST, NEXT)
    ids = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    for text, made in zip(texts, ids, strict=True):
        if not made or made.count(tokenizer.unk_token_id) * 2 > len(made):
            raise UserError(
                f"the model's tokenizer does not know the words of '{text.strip()}': set model.reconstruction to a "
                "request in its own vocabulary"
            )
    return Request(*ids)


class _Layer(CacheLayerMixin):
    """One layer's first `length` prefilled entries, which are only read, and behind them those of the tokens fed."""

    is_sliding = False

    def __init__(self, captured: LayerCapture, length: int):
        super().__init__()
        self.captured, self.length, self.is_initialized = captured, length, True
        self.own: tuple[Tensor, Tensor] | None = None  # keys and values fed so far (1, H, i, d)
        self.see: Callable[[Tensor, Tensor, float, int | None], None] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take in q more tokens (1, H, q, d) and hand attention the way to this layer."""
        if self.own is not None:
            key_states = torch.cat([self.own[0], key_states], dim=2)
            value_states = torch.cat([self.own[1], value_states], dim=2)
        self.own = (key_states, value_states)
        marked = key_states.view_as(key_states)
        marked.moend_layer = self  # type: ignore[attr-defined]
        return marked, value_states

    def attend(self, query: Tensor, rule: AttentionRule) -> Tensor:
        """query (1, H_q, q, d) of the newest q tokens -> (1, H_q, q, d)."""
        scaling, window = rule.scaling, rule.window
        assert self.own is not None
        keys = torch.cat([self.captured.keys[:, :, : self.length], self.own[0]], dim=2)
        values = torch.cat([self.captured.values[:, :, : self.length], self.own[1]], dim=2)
        if self.see is not None:
            self.see(query, keys, scaling, window)
        return causal(query, keys, values, None, scaling, window)

    def get_seq_length(self) -> int:
        """The next token's position."""
        return self.length + (0 if self.own is None else self.own[0].shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys a query may see, offset)."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1


@dataclass(frozen=True)
class Passes:
    """Runs extra passes of one model. routing: its routers (None: a dense model); piece: tokens per forward pass."""

    model: Any
    max_positions: int
    request: Request | None = None
    routing: Routing | None = None
    piece: int = 1024
    chunk: int = CHUNK

    def observe(
        self, prefilled: Prefilled, names: Collection[str], ids: Sequence[int], context: tuple[int, int]
    ) -> Prefilled:
        """The prefill with these observations added, (1, ..., T) each.

        ids: the T prefilled tokens. context (start, stop): which of them are the context; the rest after it is the
        question. Before `start` lies what is no part of it (BOS, a system prompt). One sequence, no padding.
        """
        start, stop = context
        if prefilled.valid is not None or prefilled.positions.shape[0] != 1:
            raise ValueError("extra passes work on one sequence without padding")
        if not 0 <= start < stop <= len(ids) == prefilled.length:
            raise ValueError(f"context {context} does not lie in {prefilled.length} prefilled tokens")
        found: dict[str, list[Tensor]] = {}
        recon = {"reconstruction", "routing_recon"} & set(names)
        if recon:
            found |= self._reconstruct(prefilled, ids, context, "routing_recon" in recon, "reconstruction" in recon)
        if "routing_query" in names:
            found["routing_query"] = self._question(prefilled, ids, stop)
        return replace(prefilled, observed=prefilled.observed | found)

    def _routers(self) -> Routing:
        if self.routing is None:
            raise UserError(f"MoEZip needs routers, and {type(self.model).__name__} has none")
        return self.routing

    def _feed(self, layers: list[_Layer], tokens: Sequence[int], piece: int | None = None) -> None:
        """Feed tokens on top of the layers, `piece` at a time."""
        piece, cache, at = piece or self.piece, Cache(layers=layers), layers[0].get_seq_length()
        device = layers[0].captured.keys.device
        with attention_of(self.model), torch.no_grad():
            for start in range(0, len(tokens), piece):
                part = torch.tensor([list(tokens[start : start + piece])], device=device)
                self.model.base_model(
                    input_ids=part,
                    position_ids=torch.arange(at + start, at + start + part.shape[1], device=device)[None],
                    use_cache=True,
                    **{cache_argument(self.model): cache},
                )

    def _instruct(self, layers: list[_Layer], tokens: Sequence[int], length: int) -> list[Tensor]:
        """Feed instruction tokens and sum what their routers' uncertainty makes of their attention to `length` entries.

        In pieces, so that no more than a piece x context of attention is held, and that for one layer only.
        """
        routing, seen = self._routers(), {}
        total = Propagation(layers[0].length, routing.kind)

        def look(layer: int) -> Callable[[Tensor, Tensor, float, int | None], None]:
            def see(query: Tensor, keys: Tensor, scaling: float, window: int | None) -> None:
                seen[layer] = strongest_attention(query[0], keys[0], layers[layer].length, scaling, window)

            return see

        def routed(by: Routed) -> None:
            total.add(seen.pop(by.layer), by.gates)

        before = [layer.see for layer in layers]
        for index in routing.modules:
            layers[index].see = look(index)
        with routing.recording(routed):
            self._feed(layers, tokens, min(self.piece, 256))
        for layer, see in zip(layers, before, strict=True):
            layer.see = see
        found = total.result()
        behind = torch.tensor([-torch.inf, float(found[1, 0])], device=found.device)
        both = torch.cat([found, behind[:, None].expand(-1, length - found.shape[1])], dim=1)
        return [both[None]] * len(layers)

    def _question(self, prefilled: Prefilled, ids: Sequence[int], stop: int) -> list[Tensor]:
        """routing_query: the question is read once more on top of the context."""
        if stop == len(ids):
            raise Infeasible("MoEZip goes by the question after the context, and there is none: method.mode=recon", ALL)
        layers = [_Layer(captured, stop) for captured in prefilled.layers]
        return self._instruct(layers, ids[stop:], len(ids))

    def _reconstruct(
        self, prefilled: Prefilled, ids: Sequence[int], context: tuple[int, int], routing: bool, scores: bool
    ) -> dict[str, list[Tensor]]:
        """The context is repeated chunk by chunk on top of the prefilled entries up to its end.

        Whatever lies behind the context is not there for this pass, so that the scores do not depend on the question.
        """
        if self.request is None:
            raise UserError("KVZip needs a tokenizer for its reconstruction prompt: run it with pipelines.run")
        if depends_on_length(self.model):
            raise Infeasible(
                f"KVZip reads the context twice, and the rotary frequencies of {type(self.model).__name__} change with "
                "the length: its second reading would not meet the keys of the first",
                ALL,
            )
        start, stop = context
        asks = max(len(self.request.first), len(self.request.later) + CARRY)
        room = min(self.chunk, self.max_positions - stop - asks)
        if room < 1:
            raise Infeasible(
                f"a context that ends at token {stop} leaves no room for its repetition: the model has "
                f"{self.max_positions} positions",
                ALL,
            )
        found: dict[str, list[Tensor]] = {}
        sinks, best = min(max(SINKS, start), stop), []
        for layer in prefilled.layers if scores else []:
            rows = layer.keys.new_full((1, layer.keys.shape[1], prefilled.length), 3.0, dtype=torch.float32)
            after = prefilled.length - stop  # in (1, 2], the newest highest
            rows[..., stop:] = 1 + (1 + torch.arange(after, device=rows.device)) / max(after, 1)
            best.append(rows)
        for first in range(start, stop, room):
            last = min(first + room, stop)
            asked = self.request.first
            if first > start:
                asked = (*self.request.later, *ids[max(first - CARRY, start) : first])
            layers = [_Layer(captured, stop) for captured in prefilled.layers]
            scored = max(first, sinks)
            for index, layer in enumerate(layers if scores else []):
                best[index][..., scored:last] = 0
                layer.see = self._score(layer, best[index], sinks, scored, last)
            if routing and first == start:
                found["routing_recon"] = self._instruct_scored(layers, asked, prefilled.length)
            else:
                self._feed(layers, asked)
            if not scores:
                break  # the first request has been read
            self._feed(layers, ids[first:last])
        if scores:
            found["reconstruction"] = best
        return found

    def _instruct_scored(self, layers: list[_Layer], asked: Sequence[int], length: int) -> list[Tensor]:
        """The request is both read as an instruction and scored as a part of the reconstruction: twice, it is short."""
        found = self._instruct(layers, asked, length)
        for layer in layers:
            layer.own = None
        self._feed(layers, asked)
        return found

    def _score(
        self, layer: _Layer, best: Tensor, sinks: int, first: int, last: int
    ) -> Callable[[Tensor, Tensor, float, int | None], None]:
        """Keep in best[..., first:last] the largest attention that these entries receive."""

        def see(query: Tensor, keys: Tensor, scaling: float, window: int | None) -> None:
            if first >= last:
                return
            received = attention_received(
                query[0],
                keys[0, :, :sinks],
                keys[0, :, first:last],
                keys[0, :, layer.length :],
                scaling,
                None if window is None else (window, first, layer.length),
            )
            best[..., first:last] = torch.maximum(best[..., first:last], received)

        return see


def diagnose(
    scorer: Scorer | None, prefilled: Prefilled, cache: CompressedCache, scaling: Sequence[float]
) -> dict[str, Any]:
    """What a method did to one sequence beyond its bytes; {} for most.

    Where heads hold different numbers of entries: how many. MoEZip: Gamma, anchors, the share of base's choice that
    they replaced.
    """
    layers = cache.parts()
    if any(len(parts) > 1 for parts in layers):
        return {"head_tokens": cache.counts()}
    if not isinstance(scorer, MoEZip) or any(row.positions is None for row, *_ in layers):
        return {}
    kept, base = [], []
    for layer, (row,) in enumerate(layers):
        assert row.positions is not None
        kept.append(row.positions.long())
        selector = Selector(scorer.scorer, layer, 0, 0, scaling[layer], 0)
        scores = prefilled.scores(selector, ("base", repr(scorer.scorer)), 0)
        base.append(selector.best(scores, torch.arange(scores.shape[-1], device=scores.device), row.seen, row.n))
    return scorer.diagnostics(prefilled.observed[scorer.routing][0][0], kept, base)


@torch.no_grad()
def routing_flips(
    model: Any, routing: Routing, prefilled: Prefilled, cache: CompressedCache, tokens: Sequence[int]
) -> float:
    """Share of (token, MoE layer) whose set of chosen experts differs from the full cache's: a diagnostic.

    The same tokens (the rest of the prompt and the gold answer) are fed on top of the prefill and of a fork of the
    compressed cache. Uses the answer, so it must never enter a selection.
    """
    full: list[Tensor] = []
    layers = [_Layer(captured, prefilled.length) for captured in prefilled.layers]
    with routing.recording(lambda by: full.append(by.chosen)):
        Passes(model, 0)._feed(layers, tokens, len(tokens))
    at = torch.arange(prefilled.length, prefilled.length + len(tokens), device=prefilled.positions.device)
    mine: list[Tensor] = []
    with attention_of(model), routing.recording(lambda by: mine.append(by.chosen)):
        model.base_model(
            input_ids=torch.tensor([list(tokens)], device=at.device),
            position_ids=at[None],
            use_cache=True,
            **{cache_argument(model): cache.fork()},
        )
    differs = [(a.sort(-1).values != b.sort(-1).values).any(-1) for a, b in zip(full, mine, strict=True)]
    return float(torch.stack(differs).float().mean())
