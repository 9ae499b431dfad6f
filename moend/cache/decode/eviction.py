"""The sequences of one layer while they decode: they take in tokens, attend, pack and evict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, Self

import torch
from torch import Tensor

from moend.cache.decode import groups, window
from moend.cache.decode.attend import attention
from moend.cache.decode.layout import Layout
from moend.cache.decode.ledger import Ints
from moend.cache.decode.part import Part
from moend.cache.decode.stores import first_run
from moend.cache.layer_kv import LayerKV, gather
from moend.hf.attention import AttentionRule

PIECE = 256  # tokens taken in at once: bounds the residual window of sequences that never pack


class DecodingLayer(Layout):
    """Several sequences of one layer while they decode. See `Layout` for its attributes."""

    @property
    def held(self) -> Ints:
        """Bytes of the entries of each sequence."""
        return self.ledger.held(self.clock)

    @property
    def trace(self) -> Ints:
        """Bytes held after each token of the last feed, (tokens, sequences)."""
        return self.ledger.trace(self.clock)

    @property
    def area(self) -> Ints:
        """Bytes held after each token, summed over tokens, by sequence."""
        return self.ledger.area(self.clock)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """Take in q tokens per sequence and return their attention over all that is held, (B, H_q, q, d).

        query (B, H_q, q, d), keys and values (B, H, q, d) are turned to their positions already. rule: the layer's
        attention rule.
        """
        if keys.shape != (self.sequences, self.heads, query.shape[2], self.dim) or query.shape[3] != self.dim:
            raise ValueError(f"{self.sequences} sequences of {self.heads} heads of {self.dim}, got {tuple(keys.shape)}")
        grouped = (query * rule.scaling).reshape(self.sequences * self.heads, -1, *query.shape[2:])
        parts, done = [], 0
        for taken in self.feed(keys, values):
            parts.append(attention(self, grouped[:, :, done : done + taken], rule))
            if self.queries is not None:
                wide = self.queries.shape[2]
                new = query[:, :, max(done, done + taken - wide) : done + taken].to(self.queries.dtype)
                new = new.reshape(*self.queries.shape[:2], -1, self.dim)
                self.queries = torch.cat([self.queries, new], dim=2)[:, :, -wide:]
            done += taken
        return (torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]).view(query.shape)

    def feed(self, keys: Tensor, values: Tensor) -> Iterator[int]:
        """Append keys, values (B, H, q, d) in pieces, and yield the length of each piece once it is appended.

        Sequences pack and evict between pieces only: when the caller asks for the next one.
        """
        q, done = keys.shape[2], 0
        keys, values = keys.reshape(-1, q, self.dim), values.reshape(-1, q, self.dim)
        self.ledger.begin_feed(self.clock)
        while done < q:
            if self.clock >= self.full_at:
                self.ledger.change_from(self.clock + 1)
                for part in self.parts:
                    if part.touch(self.clock).full:
                        cap, reserve = part.schedule.cap or 1, part.schedule.reserve
                        self.evict(part, max(cap - max(reserve, 1), 1))
                self.look_ahead()
            taken = min(q - done, self.due_at - self.clock, PIECE)
            if self.cursor + taken > self.k_window.shape[1]:
                window.shift(self, taken)
            at = slice(self.cursor, self.cursor + taken)
            self.k_window[:, at] = keys[:, done : done + taken]
            self.v_window[:, at] = values[:, done : done + taken]
            if self.where is not None:
                now = torch.arange(self.clock, self.clock + taken, device=self.where.device)
                columns = slice(self.slots + self.cursor, self.slots + self.cursor + taken)
                self.where[:, columns] = self.ahead_of[:, None] + now
            self.cursor, self.clock, done = self.cursor + taken, self.clock + taken, done + taken
            yield taken
            if self.clock >= self.due_at:
                self.ledger.change_from(self.clock)
                self._settle()

    def _settle(self) -> None:
        """Pack the groups that left the residual window; evict what is over its cap after beta tokens (periodic)."""
        for part in self.parts:
            s = part.touch(self.clock).schedule
            due = s.cap is not None and s.kind == "periodic" and part.steps >= s.beta
            if due and s.cap is not None and part.n > s.cap:
                self.evict(part, s.cap)
            part.steps = 0 if due else part.steps
            st = part.storage
            if st.quantised and (count := max(part.window_len - st.window, 0) // st.group * st.group):
                window.pack(self, part, count)
        self.look_ahead()

    def evict(self, part: Part, keep: int) -> None:
        """Keep `keep` entries per KV head. The method's own scorer chooses them among those still held."""
        if keep >= part.n:
            return
        if part.choose is None:
            raise RuntimeError("a sequence with a cap needs a scorer that can score while decoding")
        if part.flat:
            self._drop(part, keep)
            return
        old = self.part_at_rest(part)
        keys, values = old.dense(torch.float32)
        observed = {} if old.accumulated is None else {"accumulated": old.accumulated}
        asked = None
        if old.queries is not None:  # leave out places before the first token
            asked = old.queries[:, :, max(part.asked - part.tokens_seen, 0) :].flatten(0, 1)
        index = part.choose(keys, values, old.true_positions(), part.tokens_seen, keep, observed, asked)
        accumulated = (
            None if old.accumulated is None else old.accumulated.gather(1, index.expand(len(old.accumulated), -1))
        )
        keys, values, kept = gather(keys, values, old.true_positions(), index)
        form: Literal["shared", "per_head"] = "per_head" if index.shape[0] > 1 else "shared"
        storage = replace(part.storage, positions=form)
        new = LayerKV(
            keys,
            values,
            kept,
            storage,
            tokens_seen=part.tokens_seen,
            dtype=old.dtype,
            accumulated=accumulated,
            queries=old.queries,
        )
        part.first, part.slots = first_run(new)
        part.steps = 0
        self.reserve(part, part.slots)
        self.lay(part, new)
        rate = new.bytes_per_token - old.bytes_per_token
        self.ledger.per_token[part.sequence] += rate
        self.ledger.base[part.sequence] += new.bytes - old.bytes - rate * self.clock

    def _drop(self, part: Part, keep: int) -> None:
        """`evict` for a `flat` part: hide what goes, and leave what stays as it is."""
        assert self.where is not None and part.choose is not None
        live = (~self.hidden[part.kv_heads, : self.slots + self.cursor]).nonzero()[:, 1].view(part.heads, part.n)
        positions = self.where[part.kv_heads].gather(1, live)
        if part.storage.positions != "per_head":
            positions = positions[0]
        keys, values = groups.dense(self, part, live)
        observed: dict[str, Tensor] = {}
        if self.accumulated is not None and part.summed:
            observed["accumulated"] = self.accumulated[part.kv_heads].gather(1, live)
        asked = None
        if self.queries is not None and part.asked:
            first = self.queries.shape[2] - part.asked + max(part.asked - part.tokens_seen, 0)
            asked = self.queries[part.kv_heads, :, first:].flatten(0, 1)
        index = part.choose(keys, values, positions, part.tokens_seen, keep, observed, asked)
        before, rate = part.bytes_of(part.n, part.window_len, self.dim, self.k_window.itemsize)
        per_head = index.shape[0] > 1 or positions.ndim == 2
        part.storage = replace(part.storage, positions="per_head" if per_head else "shared")
        groups.drop(self, part, live, index)
        part.n, part.window_len, part.steps = keep, min(part.window_len, keep), 0
        after, new_rate = part.bytes_of(part.n, part.window_len, self.dim, self.k_window.itemsize)
        self.ledger.per_token[part.sequence] += new_rate - rate
        self.ledger.base[part.sequence] += after - before - (new_rate - rate) * self.clock
        self._where = None

    def fork(self) -> Self:
        """An independent twin. Both share their stores until either writes to them."""
        return self.pick(range(self.sequences))
