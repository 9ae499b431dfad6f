"""The caches: one that captures a prefill, and one that holds what a method kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from moend.cache.attention import NAME, QUERY_BLOCK
from moend.cache.row import Row
from moend.errors import UserError


class CaptureLayer(CacheLayerMixin):
    """Keys and values of a prefill in the model's own precision, and the last queries if asked for."""

    is_sliding = False
    keys: Tensor | None
    values: Tensor | None

    def __init__(self, last_queries: int = 0):
        super().__init__()
        self.last_queries = last_queries
        self.queries: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate ahead."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append a chunk (B, H, q, d); returns everything so far, marked so that attention finds this layer."""
        self.is_initialized = True
        if self.keys is None or self.values is None:
            self.keys, self.values = key_states, value_states
        else:
            self.keys = torch.cat([self.keys, key_states], dim=2)
            self.values = torch.cat([self.values, value_states], dim=2)
        if self.last_queries:
            marked = self.keys.view_as(self.keys)
            marked.capture = self  # type: ignore[attr-defined]
            return marked, self.values
        return self.keys, self.values

    def observe(self, query: Tensor) -> None:
        """Remember the last queries (B, H_q, w, d) over all chunks."""
        w = self.last_queries
        new = query[:, :, -w:]
        if self.queries is not None and new.shape[2] < w:
            new = torch.cat([self.queries[:, :, new.shape[2] - w :], new], dim=2)
        self.queries = new.clone()

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return 0 if self.keys is None else self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys a query may see, offset)."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1


class CompressedLayer(CacheLayerMixin):
    """One layer of a `CompressedCache`: a row per sequence. Its attention reads what the rows hold."""

    is_sliding = False

    def __init__(self, rows: list[Row], config: Any):
        super().__init__()
        self.rows, self.config, self.is_initialized = rows, config, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Rows exist already."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take in q new tokens per row, (B, H, q, d), and hand attention the way to this layer."""
        if self.config._attn_implementation != NAME:
            raise UserError(
                f"a compressed cache needs attn_implementation='{NAME}', "
                f"the model runs '{self.config._attn_implementation}'"
            )
        for row, k, v in zip(self.rows, key_states, value_states, strict=True):
            row.make_room(k.shape[1])
            row.append(k, v)
        marked = key_states.view_as(key_states)
        marked.moend_layer = self  # type: ignore[attr-defined]
        return marked, value_states

    def attend(self, query: Tensor, scaling: float, window: int | None) -> Tensor:
        """query (B, H_q, q, d) of the newest q tokens -> (B, H_q, q, d); afterwards the rows pack and evict."""
        out = torch.stack([_attend(q, row, scaling, window) for q, row in zip(query, self.rows, strict=True)])
        for row in self.rows:
            row.settle()
        return out

    def get_seq_length(self) -> int:
        """Tokens seen, evicted ones included: the next query's true position."""
        return max(row.seen for row in self.rows)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Sizes for the mask hook; visibility follows from positions."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def pick(self, rows: Iterable[int]) -> None:
        """Keep these rows, in this order, with repetition: for beams and returned sequences."""
        self.rows = [self.rows[i].fork() for i in rows]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search."""
        self.pick(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Rows that go on."""
        self.pick(torch.arange(len(self.rows))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self.pick(i for i in range(len(self.rows)) for _ in range(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: evicted entries cannot come back."""
        raise UserError("a compressed cache cannot be cropped (assisted decoding is not supported)")


def _attend(query: Tensor, row: Row, scaling: float, window: int | None) -> Tensor:
    """Attention of q new tokens (H_q, q, d) over all that `row` holds, themselves included: (H_q, q, d)."""
    keys, values = row.dense(query.dtype)
    q = query.shape[1]
    grouped = (query * scaling).unflatten(0, (keys.shape[0], -1))  # (H, G, q, d): each KV head with its query heads
    if q == 1 and window is None:
        probs = torch.softmax(grouped.flatten(1, 2) @ keys.mT, dim=-1, dtype=torch.float32)
        return (probs.to(query.dtype) @ values).view(query.shape)
    mine = torch.arange(row.seen - q, row.seen, device=query.device)
    at = row.true_positions()
    at = at[None] if at.ndim == 1 else at
    out = []
    for start in range(0, q, QUERY_BLOCK):
        me = mine[start : start + QUERY_BLOCK]
        hidden = at[:, None, :] > me[:, None]  # (H or 1, q, n)
        if window is not None:
            hidden |= me[:, None] - at[:, None, :] >= window
        logits = grouped[:, :, start : start + QUERY_BLOCK] @ keys[:, None].mT
        logits = logits.masked_fill(hidden[:, None], -torch.inf)
        out.append(torch.softmax(logits, dim=-1, dtype=torch.float32).to(query.dtype) @ values[:, None])
    return torch.cat(out, dim=2).flatten(0, 1)


class CompressedCache(Cache):
    """What a method kept of a prompt, layer by layer, with everything generated since; usable by `model.generate`.

    Batches are lists of rows: `join` puts caches side by side (cells of a sweep that decode together), `take` keeps
    some. Works with models whose config says attn_implementation="moend".
    """

    def __init__(self, layers: Sequence[Sequence[Row]], config: Any):
        """layers: for each model layer, one Row per sequence."""
        self.config = config
        super().__init__(layers=[CompressedLayer(list(rows), config) for rows in layers])

    @property
    def rows(self) -> list[list[Row]]:
        """Rows by layer."""
        return [layer.rows for layer in self.layers]

    @classmethod
    def join(cls, caches: Sequence[CompressedCache]) -> CompressedCache:
        """One cache whose batch is all of theirs, one after the other."""
        return cls(
            [[r for part in layer for r in part] for layer in zip(*(c.rows for c in caches), strict=True)],
            caches[0].config,
        )

    def take(self, rows: Sequence[int]) -> CompressedCache:
        """A cache of these rows alone; the rows are shared, not copied."""
        return CompressedCache([[layer[i] for i in rows] for layer in self.rows], self.config)

    def fork(self) -> CompressedCache:
        """An independent cache; tensors are shared until either changes."""
        return CompressedCache([[r.fork() for r in layer] for layer in self.rows], self.config)

    def resident_bytes(self, row: int | None = None) -> int:
        """Bytes of every tensor held (codes, scales, zero points, 16-bit entries, positions), of a sequence or all."""
        return sum(r.bytes for layer in self.rows for i, r in enumerate(layer) if row is None or i == row)

    def peak_bytes(self, row: int) -> int:
        """The most a sequence held between any two tokens of the last feed, however many came at once (see `room`)."""
        return max(self.resident_bytes(row), sum(layer[row].crest for layer in self.rows))

    def entries(self, row: int = 0) -> list[int]:
        """Entries per KV head in each layer."""
        return [layer[row].n for layer in self.rows]

    def room(self, row: int | None = None) -> int | None:
        """How many tokens may be fed at once (see `Row.room`), to one sequence or to all; None: any number."""
        held = [r for layer in self.rows for i, r in enumerate(layer) if row is None or i == row]
        rooms = [room for r in held if (room := r.room()) is not None]
        return min(rooms) if rooms else None
