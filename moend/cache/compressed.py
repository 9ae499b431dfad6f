"""The caches: one that captures a prefill, and one that holds what a method kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from moend.cache.decode.eviction import DecodingLayer
from moend.cache.decode.ledger import Ints
from moend.cache.decode.state import State, restore, state
from moend.cache.decode.stores import allocation
from moend.cache.layer_kv import LayerKV
from moend.errors import UserError
from moend.hf.attention import AttentionRule, causal, causal_and_accumulated
from moend.hf.cache_layers import CacheLayer, Running, Turn

OBSERVATIONS = ("accumulated",)


class CaptureLayer(CacheLayer):
    """Keys and values of a prefill in the model's own precision; the last queries and observations if asked for.

    observed: by name, what only the pass over the prompt shows, entries last. "accumulated" (B, H, T) float32 is the
    attention each entry received from all queries (`accumulated_attention`). rule: what the layer's attention asks.
    """

    keys: Tensor | None
    values: Tensor | None

    def __init__(
        self,
        last_queries: int = 0,
        observe: Collection[str] = (),
        turn: Turn | None = None,
        padding: Tensor | None = None,
    ):
        """padding (B, T): False at left padding of the whole prompt (None: no padding)."""
        super().__init__(turn)
        if odd := set(observe) - set(OBSERVATIONS):
            raise ValueError(f"a prefill cannot observe {', '.join(sorted(odd))}: one of {', '.join(OBSERVATIONS)}")
        self.last_queries, self.wanted, self.padding = last_queries, frozenset(observe), padding
        self.queries: Tensor | None = None
        self.observed: dict[str, Tensor] = {}
        self.rule: AttentionRule | None = None

    def take(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append a chunk (B, H, q, d); returns everything so far."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        return keys, values

    def answer(self, query: Tensor, rule: AttentionRule) -> Tensor:
        """Causal attention over everything so far; observes on the way."""
        assert self.keys is not None and self.values is not None
        self.rule = rule
        padding = None if self.padding is None else self.padding[:, : self.keys.shape[2]]
        if "accumulated" in self.wanted:
            out, accumulated = causal_and_accumulated(query, self.keys, self.values, padding, rule)
            if (before := self.observed.get("accumulated")) is not None:
                accumulated[..., : before.shape[2]] += before
            self.observed["accumulated"] = accumulated
        else:
            out = causal(query, self.keys, self.values, padding, rule)
        if w := self.last_queries:
            new = query[:, :, -w:]
            if self.queries is not None and new.shape[2] < w:
                new = torch.cat([self.queries[:, :, new.shape[2] - w :], new], dim=2)
            self.queries = new.clone()
        return out

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return 0 if self.keys is None else self.keys.shape[2]


Held = LayerKV | tuple[LayerKV, ...]


class CompressedLayer(CacheLayer):
    """One layer of a `CompressedCache`.

    It holds a LayerKV per sequence at first. When the first token comes, it lays them out as a `DecodingLayer`.
    """

    def __init__(self, held: Sequence[Held] | DecodingLayer, running: Running, turn: Turn | None = None):
        super().__init__(turn)
        self._held: list[tuple[LayerKV, ...]] | DecodingLayer
        self._held = (
            held if isinstance(held, DecodingLayer) else [(x,) if isinstance(x, LayerKV) else tuple(x) for x in held]
        )
        self.running = running

    @property
    def decoding(self) -> DecodingLayer:
        """The sequences laid out for decoding. The first access lays them out and lets go of their LayerKVs."""
        if not isinstance(self._held, DecodingLayer):
            self._held = DecodingLayer(self._held)
        return self._held

    @property
    def parts(self) -> list[tuple[LayerKV, ...]]:
        """The LayerKVs of each sequence: one for all KV heads, or several if these hold different numbers."""
        return self._held.at_rest() if isinstance(self._held, DecodingLayer) else self._held

    @property
    def layer_kv(self) -> list[LayerKV]:
        """The LayerKV of each sequence; ValueError if the KV heads of one hold different numbers of entries."""
        if any(len(x) > 1 for x in self.parts):
            raise ValueError("KV heads hold different numbers of entries: ask for parts")
        return [kv for (kv,) in self.parts]

    @property
    def held(self) -> Ints:
        """Bytes of each sequence's entries."""
        if isinstance(self._held, DecodingLayer):
            return self._held.held
        return np.array([sum(r.bytes for r in x) for x in self._held], dtype=np.int64)

    @property
    def trace(self) -> Ints:
        """Bytes held after each token of the last feed, (tokens, sequences)."""
        return self._held.trace if isinstance(self._held, DecodingLayer) else self.held[None]

    @property
    def allocated(self) -> int:
        """Bytes of all tensors."""
        return self._held.allocated if isinstance(self._held, DecodingLayer) else int(self.held.sum())

    def counts(self, sequence: int) -> list[int]:
        """Entries of each KV head."""
        if isinstance(self._held, DecodingLayer):
            return self._held.count(sequence)
        return [r.n for r in self._held[sequence] for _ in range(r.heads)]

    def take(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Remember q new tokens (B, H, q, d); `answer` takes them in."""
        self.running.check()
        self._new = keys, values
        return keys, values

    def answer(self, query: Tensor, rule: AttentionRule) -> Tensor:
        """Take in the newest q tokens and return their attention (B, H_q, q, d), from query (B, H_q, q, d)."""
        keys, values = self._new
        del self._new
        return self.decoding.attend(query, keys, values, rule)

    def get_seq_length(self) -> int:
        """Tokens so far, evicted ones included: the original position of the next query."""
        if isinstance(self._held, DecodingLayer):
            return self._held.longest
        return max(kv.tokens_seen for kvs in self._held for kv in kvs)

    def picked(self, sequences: Iterable[int], turn: Turn | None = None) -> CompressedLayer:
        """An independent layer of these sequences, in this order; a sequence may be repeated."""
        held = self._held
        rest = held.pick(list(sequences)) if isinstance(held, DecodingLayer) else [held[i] for i in sequences]
        return CompressedLayer(rest, self.running, turn)

    def pick(self, sequences: Iterable[int]) -> None:
        """Keep these sequences, in this order; a sequence may be repeated (beams, several answers)."""
        self._held = self.picked(sequences)._held

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the sequences of the beams that go on."""
        self.pick(beam_idx.tolist())

    @property
    def sequences(self) -> int:
        """How many sequences it holds."""
        return self._held.sequences if isinstance(self._held, DecodingLayer) else len(self._held)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences at these indices (B,), or where this mask (B,) is True."""
        self.pick(torch.arange(self.sequences)[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times."""
        self.pick(i for i in range(self.sequences) for _ in range(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: evicted entries cannot come back."""
        raise UserError("a compressed cache cannot be cropped (assisted decoding is not supported)")


class CompressedCache(Cache):
    """What a method kept of a prompt, layer by layer, with everything generated since; usable by `model.generate`.

    `join` puts caches side by side (cells of a sweep that decode together), `take` keeps some sequences. A sequence
    behaves the same in any company and however its tokens are fed. Works with models whose config says
    attn_implementation="moend".
    """

    def __init__(self, layers: Sequence[Sequence[Held]], config: Any):
        """layers: for each model layer and sequence, one LayerKV, or several if KV heads hold different numbers."""
        self.config, turn, running = config, Turn(), Running(config)
        super().__init__(layers=[CompressedLayer(held, running, turn) for held in layers])

    @property
    def layer_kv(self) -> list[list[LayerKV]]:
        """The LayerKV of each layer and sequence; ValueError if KV heads hold different numbers of entries."""
        return [layer.layer_kv for layer in self.layers]

    def parts(self, sequence: int = 0) -> list[tuple[LayerKV, ...]]:
        """The LayerKVs of one sequence, by layer."""
        return [layer.parts[sequence] for layer in self.layers]

    @classmethod
    def join(cls, caches: Sequence[CompressedCache]) -> CompressedCache:
        """One cache whose batch is all of theirs, one after the other."""
        return cls(
            [[x for part in layer for x in part.parts] for layer in zip(*(c.layers for c in caches), strict=True)],
            caches[0].config,
        )

    @staticmethod
    def allocation(caches: Sequence[CompressedCache]) -> int:
        """Bytes that `join` of caches at rest allocates once they decode, padding and spare room included."""
        return sum(
            allocation([x for part in layer for x in part.parts])
            for layer in zip(*(c.layers for c in caches), strict=True)
        )

    def take(self, sequences: Sequence[int]) -> CompressedCache:
        """An independent cache of these sequences. LayerKVs are shared, as they never change."""
        twin, turn = CompressedCache([], self.config), Turn()
        twin.layers = [layer.picked(sequences, turn) for layer in self.layers]
        return twin

    def fork(self) -> CompressedCache:
        """An independent cache; tensors are shared until either changes."""
        return self.take(range(self.layers[0].sequences))

    def state(self) -> State:
        """All that it holds while it decodes, to the bit: numbers that JSON can hold, and tensors by name."""
        facts: list[dict[str, Any]] = []
        tensors: dict[str, Tensor] = {}
        for i, layer in enumerate(self.layers):
            own, mine = state(layer.decoding)
            facts.append(own)
            tensors |= {f"{i}.{name}": x for name, x in mine.items()}
        return {"layers": facts}, tensors

    def restore(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Bring it to a `state`; it holds the same sequences, as the same methods made them of the same prompt."""
        by_layer: list[dict[str, Tensor]] = [{} for _ in self.layers]
        for name, x in tensors.items():
            number, _, rest = name.partition(".")
            by_layer[int(number)][rest] = x
        for layer, own, mine in zip(self.layers, facts["layers"], by_layer, strict=True):
            restore(layer.decoding, own, mine)

    @property
    def held(self) -> Ints:
        """Bytes of each sequence: codes, scales, zero points, 16-bit entries, positions; no padding."""
        return np.sum([layer.held for layer in self.layers], axis=0, dtype=np.int64)

    def resident_bytes(self, sequence: int | None = None) -> int:
        """Bytes held for a sequence, or for all of them (None)."""
        return int(self.held.sum() if sequence is None else self.held[sequence])

    def allocated_bytes(self) -> int:
        """Bytes of all tensors, including the padding and spare room that sequences share while they decode.

        Before the first token there is none. For the bounds see `moend.cache.decode.layout`.
        """
        return sum(layer.allocated for layer in self.layers)

    def unshared_bytes(self) -> int:
        """The bytes among them that a fork does not share."""
        return sum(layer.decoding.unshared_bytes for layer in self.layers)

    @property
    def peaks(self) -> Ints:
        """The most each sequence held after any token of the last feed, however many came at once."""
        peaks: Ints = np.sum([layer.trace for layer in self.layers], axis=0, dtype=np.int64).max(axis=0)
        return peaks

    def peak_bytes(self, sequence: int) -> int:
        """The most a sequence held after any token of the last feed."""
        return int(self.peaks[sequence])

    @property
    def mean_bytes(self) -> npt.NDArray[np.float64]:
        """Bytes held by each sequence, averaged over the tokens fed."""
        area = np.sum([layer.decoding.area for layer in self.layers], axis=0, dtype=np.int64)
        return area / max(self.layers[0].decoding.clock, 1)

    def counts(self, sequence: int = 0) -> list[list[int]]:
        """Entries of each KV head, by layer."""
        return [layer.counts(sequence) for layer in self.layers]

    def entries(self, sequence: int = 0) -> list[int]:
        """Entries per KV head in each layer, averaged and rounded where KV heads differ."""
        return [round(sum(c) / len(c)) for c in self.counts(sequence)]
