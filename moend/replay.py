"""Replays: a few more tokens read on top of a prefilled prompt, to see what reading the prompt itself does not show.

A scorer names what it wants of them in `Scorer.observes`:

    reconstruction   the most attention that context entries receive while the model repeats its context (KVZip)
    routing_recon    what uncertain routers look at while they read the request for that repetition (MoEZip, mode recon)
    routing_query    the same while they read the question after the context (MoEZip, mode query)

A replay leaves the prefill as it was, and all cells that need an observation share it. The first two come from the same
replay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from moend.cache.compressed import CompressedCache
from moend.cache.prefill import LayerCapture, Prefilled
from moend.cache.select import Selector
from moend.errors import Infeasible, UserError
from moend.hf.attention import AttentionRule, attention_of, causal
from moend.hf.cache_layers import CacheLayer
from moend.hf.config import cache_argument, decoder_of
from moend.hf.rope import depends_on_length
from moend.hf.routers import Routed, Routing
from moend.scoring.base import Scorer
from moend.scoring.kvzip import attention_received
from moend.scoring.moezip import MoEZip, Propagation, strongest_attention

RECONSTRUCTING = frozenset({"reconstruction", "routing_recon"})  # these ask the model to repeat the context
ROUTING = frozenset({"routing_recon", "routing_query"})  # these listen to its routers
OBSERVATIONS = RECONSTRUCTING | ROUTING
SINKS = 4  # first entries, which stay: they take part in every softmax and are not scored
CHUNK = 2048  # context tokens that are repeated at a time
CARRY = 8  # tokens of the chunk before that say where to go on
PIECE = 256  # instruction tokens fed at a time: their attention to the whole context is held, of one layer
ALL = "1r"  # the only budget at which nothing has to be chosen
# The wording is that of KVZip's published implementation, without the chat template's turn around it.
FIRST = "\n\nRepeat the previous context exactly."
NEXT = "\n\nRepeat the part of the previous context exactly, starting with"

# What a layer shows while it is fed: queries (H_q, q, d) of the newest q tokens, keys (H, t, d) of all, scaling, window
See = Callable[[Tensor, Tensor, float, int | None], None]


@dataclass(frozen=True)
class Request:
    """Token ids that ask the model to repeat the context."""

    first: tuple[int, ...]  # from its start
    later: tuple[int, ...]  # from a later chunk on, whose last tokens follow


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


class _Layer(CacheLayer):
    """One layer's first `length` prefilled entries, which are only read, and behind them those of the tokens fed."""

    def __init__(self, captured: LayerCapture, length: int):
        super().__init__()
        self.captured, self.length = captured, length
        self.own: tuple[Tensor, Tensor] | None = None  # keys and values fed so far (1, H, i, d)
        self.see: See | None = None

    def take(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take in q more tokens (1, H, q, d)."""
        if self.own is not None:
            keys, values = torch.cat([self.own[0], keys], dim=2), torch.cat([self.own[1], values], dim=2)
        self.own = keys, values
        return keys, values

    def answer(self, query: Tensor, rule: AttentionRule) -> Tensor:
        """query (1, H_q, q, d) of the newest q tokens -> (1, H_q, q, d)."""
        assert self.own is not None
        keys = torch.cat([self.captured.keys[:, :, : self.length], self.own[0]], dim=2)
        values = torch.cat([self.captured.values[:, :, : self.length], self.own[1]], dim=2)
        if self.see is not None:
            rule.plain("an extra pass over the prompt")
            self.see(query[0], keys[0], rule.scaling, rule.window)
        return causal(query, keys, values, None, rule)

    def get_seq_length(self) -> int:
        """The next token's position."""
        return self.length + (0 if self.own is None else self.own[0].shape[2])


def feed(model: Any, layers: list[_Layer], tokens: Sequence[int], piece: int) -> None:
    """Feed tokens to the model on top of the layers, `piece` at a time."""
    cache, at, device = Cache(layers=layers), layers[0].get_seq_length(), layers[0].captured.keys.device
    with attention_of(model), torch.no_grad():
        for start in range(0, len(tokens), piece):
            part = torch.tensor([list(tokens[start : start + piece])], device=device)
            decoder_of(model)(
                input_ids=part,
                position_ids=torch.arange(at + start, at + start + part.shape[1], device=device)[None],
                use_cache=True,
                **{cache_argument(model): cache},
            )


class Replay:
    """Replays prompts through one model. What it has to know of tokenizer and routers it finds out when asked."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        max_positions: int,
        *,
        wording: str = "",
        piece: int = 1024,
        chunk: int = CHUNK,
    ):
        """max_positions: of the model. wording: see `request`. piece: tokens per forward pass. chunk: context tokens
        that are repeated at a time.
        """
        self.model, self.tokenizer, self.max_positions = model, tokenizer, max_positions
        self.wording, self.piece, self.chunk = wording, piece, chunk
        self._routing: Routing | None = None
        self.shortened: int | None = None  # context tokens repeated at a time last, where the chunk found no room

    @cached_property
    def request(self) -> Request:
        """How this model is asked to repeat the context; UserError without a tokenizer that knows the words."""
        if self.tokenizer is None:
            raise UserError("KVZip asks the model to repeat the context, and for that needs its tokenizer")
        return request(self.tokenizer, self.wording)

    def routing(self, ids: Sequence[int]) -> Routing:
        """The model's routers, understood once from the start of a prompt; UserError for a dense model."""
        if self._routing is None:
            self._routing = Routing.of(self.model, torch.tensor([list(ids[:64])], device=self.model.device))
        return self._routing

    def observe(
        self, prefilled: Prefilled, names: Collection[str], ids: Sequence[int], context: tuple[int, int]
    ) -> Prefilled:
        """The prefill, with the named OBSERVATIONS added. Each is one tensor (1, ..., T) per layer.

        ids: the T prefilled tokens, one sequence without padding. context (start, stop): which of them are the context.
        Before `start` lies what is no part of it (BOS, a system prompt), behind `stop` the question.

        Raises UserError where the model has no routers, Infeasible where there is no question, or no room to repeat the
        context.
        """
        start, stop = context
        if prefilled.valid is not None or prefilled.positions.shape[0] != 1:
            raise ValueError("a replay works on one sequence without padding")
        if not 0 <= start < stop <= len(ids) == prefilled.length:
            raise ValueError(f"context {context} does not lie in {prefilled.length} prefilled tokens")
        found: dict[str, list[Tensor]] = {}
        if "reconstruction" in names:
            found["reconstruction"] = self._reconstruct(prefilled, ids, context)
        if "routing_recon" in names:
            self._room(context)
            found["routing_recon"] = self._instruct(prefilled, context, self.request.first, ids)
        if "routing_query" in names:
            if stop == len(ids):
                raise Infeasible(
                    "MoEZip goes by the question after the context, and there is none: method.scorer.mode=recon", ALL
                )
            found["routing_query"] = self._instruct(prefilled, context, ids[stop:], ids)
        return replace(prefilled, observed=prefilled.observed | found)

    def _instruct(
        self, prefilled: Prefilled, context: tuple[int, int], instruction: Sequence[int], ids: Sequence[int]
    ) -> list[Tensor]:
        """What uncertain routers look at in the context while they read the instruction behind it.

        What precedes the context (BOS, a template) is never an anchor: the base keeps it anyway.
        """
        start, stop = context
        routing, seen = self.routing(ids), {}
        total = Propagation(stop, routing.kind)
        layers = [_Layer(captured, stop) for captured in prefilled.layers]

        def look(layer: int) -> See:
            def see(query: Tensor, keys: Tensor, scaling: float, window: int | None) -> None:
                seen[layer] = strongest_attention(query, keys, stop, scaling, window)

            return see

        def routed(by: Routed) -> None:
            total.add(seen.pop(by.layer), by.gates)

        for index in routing.modules:
            layers[index].see = look(index)
        with routing.recording(routed):
            feed(self.model, layers, instruction, min(self.piece, PIECE))
        found = total.result()
        found[0, :start] = -torch.inf
        behind = torch.tensor([-torch.inf, float(found[1, 0])], device=found.device)  # what follows is never an anchor
        both = torch.cat([found, behind[:, None].expand(-1, prefilled.length - stop)], dim=1)
        return [both[None]] * len(layers)

    def _room(self, context: tuple[int, int]) -> int:
        """Context tokens that can be repeated at a time; Infeasible where there are none."""
        stop = context[1]
        if depends_on_length(self.model):
            raise Infeasible(
                f"KVZip reads the context twice, and the rotary frequencies of {type(self.model).__name__} change with "
                "the length: its second reading would not meet the keys of the first",
                ALL,
            )
        asks = max(len(self.request.first), len(self.request.later) + CARRY)
        room = min(self.chunk, self.max_positions - stop - asks)
        if room < 1:
            raise Infeasible(
                f"a context that ends at token {stop} leaves no room for its repetition: the model has "
                f"{self.max_positions} positions",
                ALL,
            )
        return room

    def _reconstruct(self, prefilled: Prefilled, ids: Sequence[int], context: tuple[int, int]) -> list[Tensor]:
        """The context is repeated chunk by chunk on top of the prefilled entries up to its end.

        Whatever lies behind the context is not there for this replay, so the scores do not depend on the question.
        """
        (start, stop), length = context, prefilled.length
        room, sinks = self._room(context), min(max(SINKS, start), stop)
        self.shortened = room if room < min(self.chunk, stop - start) else None
        scores = [x.keys.new_full((x.keys.shape[1], length), 3.0, dtype=torch.float32) for x in prefilled.layers]
        for rows in scores:  # behind the context: in (1, 2], the newest highest
            rows[:, stop:] = 1 + torch.arange(1, length - stop + 1, device=rows.device) / max(length - stop, 1)
        for first in range(start, stop, room):
            last, begin = min(first + room, stop), max(first, sinks)
            layers = [_Layer(captured, stop) for captured in prefilled.layers]
            for layer, rows in zip(layers, scores, strict=True):
                rows[:, begin:last] = 0
                if begin < last:
                    layer.see = _keep_largest(rows, sinks, begin, last, stop)
            carried = ids[max(first - CARRY, start) : first]
            feed(
                self.model,
                layers,
                self.request.first if first == start else (*self.request.later, *carried),
                self.piece,
            )
            feed(self.model, layers, ids[first:last], self.piece)
        return [rows[None] for rows in scores]


def _keep_largest(rows: Tensor, sinks: int, first: int, last: int, stop: int) -> See:
    """Keep in rows[:, first:last] the largest attention that these entries receive from tokens fed behind `stop`."""

    def see(query: Tensor, keys: Tensor, scaling: float, window: int | None) -> None:
        far = None if window is None else (window, first, stop)
        received = attention_received(query, keys[:, :sinks], keys[:, first:last], keys[:, stop:], scaling, far)
        rows[:, first:last] = torch.maximum(rows[:, first:last], received)

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
        base.append(selector.best(scores, torch.arange(scores.shape[-1], device=scores.device), row.tokens_seen, row.n))
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
        feed(model, layers, tokens, len(tokens))
    at = torch.arange(prefilled.length, prefilled.length + len(tokens), device=prefilled.positions.device)
    mine: list[Tensor] = []
    with attention_of(model), routing.recording(lambda by: mine.append(by.chosen)):
        decoder_of(model)(
            input_ids=torch.tensor([list(tokens)], device=at.device),
            position_ids=at[None],
            use_cache=True,
            **{cache_argument(model): cache.fork()},
        )
    differs = [(a.sort(-1).values != b.sort(-1).values).any(-1) for a, b in zip(full, mine, strict=True)]
    return float(torch.stack(differs).float().mean())
