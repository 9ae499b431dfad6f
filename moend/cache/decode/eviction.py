"""The sequences of one layer while they decode: they take in tokens, attend, pack and evict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, Self

import torch
from torch import Tensor

from moend.cache.decode import groups
from moend.cache.decode.attend import attention
from moend.cache.decode.layout import Layout, Part, _first
from moend.cache.decode.ledger import Ints
from moend.cache.layer_kv import LayerKV, gather
from moend.hf.attention import AttentionRule

PIECE = 256  # tokens taken in at once: bounds the tail of rows that never pack


class DecodingLayer(Layout):
    """Rows of one layer: for each sequence its LayerKV, or the rows of its heads where these hold different numbers."""

    @property
    def held(self) -> Ints:
        """Bytes of the entries of each sequence."""
        return self.ledger.held(self.clock)

    @property
    def trace(self) -> Ints:
        """(tokens of the last feed, sequences): bytes held after each token."""
        return self.ledger.trace(self.clock)

    @property
    def area(self) -> Ints:
        """The sum of the bytes held after each token, by sequence."""
        return self.ledger.area(self.clock)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """Take in q tokens, keys, values (B, H, q, d), and attend from query (B, H_q, q, d): (B, H_q, q, d)."""
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
        """Append keys, values (B, H, q, d) piece by piece; yields the length of each piece while it is the newest.

        Within a piece nothing packs or evicts; both happen when the next piece is asked for.
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
            if self.cursor + taken > self.k_tail.shape[1]:
                self.shift(taken)
            at = slice(self.cursor, self.cursor + taken)
            self.k_tail[:, at] = keys[:, done : done + taken]
            self.v_tail[:, at] = values[:, done : done + taken]
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
        """Pack the groups that left the window, evict what is over its cap after beta tokens ("paper")."""
        for part in self.parts:
            s = part.touch(self.clock).schedule
            due = s.cap is not None and s.overshoot == "paper" and part.steps >= s.beta
            if due and s.cap is not None and part.n > s.cap:
                self.evict(part, s.cap)
            part.steps = 0 if due else part.steps
            st = part.storage
            if st.quantised and (count := max(part.tail - st.window, 0) // st.group * st.group):
                self.pack(part, count)
        self.look_ahead()

    def evict(self, part: Part, keep: int) -> None:
        """Keep `keep` entries per head, chosen by the method's own scorer from what is still held."""
        if keep >= part.n:
            return
        if part.choose is None:
            raise RuntimeError("a row with a cap needs a scorer that can score while decoding")
        if part.flat:
            self._drop(part, keep)
            return
        old = self.row(part)
        keys, values = old.dense(torch.float32)
        observed = {} if old.accumulated is None else {"accumulated": old.accumulated}
        asked = None
        if old.queries is not None:  # those before the first token are none
            asked = old.queries[:, :, max(part.asked - part.seen, 0) :].flatten(0, 1)
        index = part.choose(keys, values, old.true_positions(), part.seen, keep, observed, asked)
        accumulated = (
            None if old.accumulated is None else old.accumulated.gather(1, index.expand(len(old.accumulated), -1))
        )
        keys, values, kept = gather(keys, values, old.true_positions(), index)
        form: Literal["shared", "per_head"] = "per_head" if index.shape[0] > 1 else "shared"
        storage = replace(part.storage, positions=form)
        row = LayerKV(
            keys, values, kept, storage, seen=part.seen, dtype=old.dtype, accumulated=accumulated, queries=old.queries
        )
        part.first, part.slots = _first(row)
        part.steps = 0
        self.reserve(part, part.slots)
        self.lay(part, row)
        rate = row.bytes_per_token - old.bytes_per_token
        self.ledger.per_token[part.sequence] += rate
        self.ledger.base[part.sequence] += row.bytes - old.bytes - rate * self.clock

    def _drop(self, part: Part, keep: int) -> None:
        """`evict` of a row that has packed entries: what goes is hidden, what stays is not touched."""
        assert self.where is not None and part.choose is not None
        live = (~self.hidden[part.strands, : self.slots + self.cursor]).nonzero()[:, 1].view(part.heads, part.n)
        positions = self.where[part.strands].gather(1, live)
        if part.storage.positions != "per_head":
            positions = positions[0]
        keys, values = groups.dense(self, part, live)
        observed: dict[str, Tensor] = {}
        if self.accumulated is not None and part.summed:
            observed["accumulated"] = self.accumulated[part.strands].gather(1, live)
        asked = None
        if self.queries is not None and part.asked:
            first = self.queries.shape[2] - part.asked + max(part.asked - part.seen, 0)
            asked = self.queries[part.strands, :, first:].flatten(0, 1)
        index = part.choose(keys, values, positions, part.seen, keep, observed, asked)
        before, rate = part.bytes_of(part.n, part.tail, self.dim, self.k_tail.itemsize)
        per_head = index.shape[0] > 1 or positions.ndim == 2
        part.storage = replace(part.storage, positions="per_head" if per_head else "shared")
        groups.drop(self, part, live, index)
        part.n, part.tail, part.steps = keep, min(part.tail, keep), 0
        after, new_rate = part.bytes_of(part.n, part.tail, self.dim, self.k_tail.itemsize)
        self.ledger.per_token[part.sequence] += new_rate - rate
        self.ledger.base[part.sequence] += after - before - (new_rate - rate) * self.clock
        self._where = None

    def fork(self) -> Self:
        """An independent twin; banks are shared until either writes to them."""
        return self.pick(range(self.sequences))
