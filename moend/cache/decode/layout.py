"""The entries of one layer while it decodes: where they lie, and how sequences are picked from it.

A layer numbers the KV heads of all its sequences through, S in all. The newest entries of all of them form the
residual window at 16 bit, two tensors (S, columns, d) that are filled up to a common cursor: a new token is one slice
write, however much each KV head holds. Older entries lie in stores (`moend.cache.packed_store`), K and V apart. KV
heads share a store if they have the same bits and group and similar lengths. The logits of a step form one matrix
(S, queries, slots + columns), whose unused places a mask hides. A step therefore costs a few batched operations per
store and layer, and its Python work does not grow with the number of sequences.

A sequence packs when a group has left its residual window, and it evicts when it reaches its cap. The layer computes
ahead after which token the next of these events falls (`look_ahead`), and only then looks at sequences one by one. If
more tokens come than fit before an event, the layer takes them in pieces. So packing and eviction fall on the same
token, however tokens come.

Memory. A store pads a KV head by no more than the head holds, or by PADDING numbers per sequence if that is more. A
store that grows takes an eighth to spare. The residual window has SPARE free columns beside the longest window and
group. `allocated` counts all of it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from moend.cache.decode import groups
from moend.cache.decode.ledger import Ledger
from moend.cache.decode.part import NEVER, Part
from moend.cache.decode.stores import SPARE, first_run, sharing, whole_piece, window_columns
from moend.cache.layer_kv import LayerKV
from moend.cache.packed_store import PackedStore
from moend.cache.packing import Packed
from moend.kernels import Entries, Held


class Layout:
    """Several sequences of one layer, laid out for decoding.

    heads: KV heads of a sequence. dim: head dimension d. sequences: how many. clock: tokens taken in so far.
    parts: what each sequence holds, one `Part` per LayerKV. ledger: bytes held.
    k_window, v_window (S, columns, d): the residual window. cursor: its next free column. begin: its first one in use.
    k_stores, v_stores: older entries. slots: slots of the largest store. used: the most of them in use.
    hidden (S, slots + columns) bool: places that no query may see.
    accumulated (S, slots + columns) float32: attention that entries received; None if no sequence sums it.
    where (S, slots + columns) int32: position of the entry in each place, for parts that are `flat`; None without them.
    queries (S, G, w, d): the last w queries of each KV head's group of G, right-aligned; None if no scorer asks.
    """

    def __init__(self, held: Sequence[tuple[LayerKV, ...]]):
        """held: for each sequence its LayerKVs, one for all KV heads or one for each."""
        flat = [kv for kvs in held for kv in kvs]
        first = flat[0].k_window
        if any(r.dtype != first.dtype for r in flat):
            raise ValueError(f"sequences of a batch share one dtype, got {sorted({str(r.dtype) for r in flat})}")
        self.heads = sum(r.heads for r in held[0])
        self.dim, self.sequences = first.shape[-1], len(held)
        self.clock = 0
        self.parts: list[Part] = []
        for i, kvs in enumerate(held):
            at = i * self.heads
            for kv in kvs:
                self.parts.append(self._part(kv, i, at))
                at += kv.heads
        self.ledger = Ledger(len(held))
        for part, kv in zip(self.parts, flat, strict=True):
            self.ledger.base[part.sequence] += kv.bytes
            self.ledger.per_token[part.sequence] += kv.bytes_per_token
        self.cursor = window_columns(flat)
        self._where: Tensor | None = None
        total = self.sequences * self.heads
        self.k_window = first.new_zeros(total, self.cursor + SPARE, self.dim)
        self.v_window = torch.zeros_like(self.k_window)
        self.k_stores, self.v_stores = self._make_stores(flat, "k", first), self._make_stores(flat, "v", first)
        self.slots = max(b.slots for b in self.k_stores)
        self.hidden = torch.ones(total, self.slots + self.k_window.shape[1], dtype=torch.bool, device=first.device)
        self.hidden[:, self.slots + self.cursor :] = False
        self.accumulated = (
            torch.zeros(self.hidden.shape, device=first.device) if any(p.summed for p in self.parts) else None
        )
        self.where: Tensor | None = None
        if any(p.flat for p in self.parts):
            self.where = torch.zeros(self.hidden.shape, dtype=torch.int32, device=first.device)
        self.queries: Tensor | None = None
        self.every = torch.arange(total)
        for part, kv in zip(self.parts, flat, strict=True):
            self.lay(part, kv)
            if kv.queries is not None:
                if self.queries is None:
                    wide = max(r.queries.shape[2] for r in flat if r.queries is not None)
                    self.queries = first.new_zeros(total, kv.queries.shape[1], wide, self.dim)
                self.queries[part.kv_heads, :, self.queries.shape[2] - part.asked :] = kv.queries
        self.look_ahead()

    def _part(self, kv: LayerKV, sequence: int, at: int) -> Part:
        first, slots = first_run(kv)
        return Part(
            sequence, at, kv.heads, kv.storage, kv.schedule, kv.choose,
            n=kv.n, window_len=0, tokens_seen=kv.tokens_seen, steps=kv.steps, clock=0, positions=None,
            first=first, slots=slots, summed=kv.accumulated is not None,
            asked=0 if kv.queries is None else kv.queries.shape[2],
        )  # fmt: skip

    def _make_stores(self, kvs: Sequence[LayerKV], side: Literal["k", "v"], like: Tensor) -> list[PackedStore]:
        stores = []
        shared = sharing([(p.heads, p.slots, p.storage) for p in self.parts], side, self.dim)
        for number, ((bits, group, scales), members) in enumerate(shared):
            heads: list[int] = []
            for i in members:
                part = self.parts[i]
                setattr(part, side, (number, len(heads)))
                heads += range(part.at, part.at + part.heads)
            slots, per = max(self.parts[i].slots for i in members), "channel" if side == "k" else "token"
            piece = whole_piece(kvs[members[0]], side, slots) if len(members) == 1 else None
            if piece is None:
                stores.append(PackedStore(heads, slots, bits, group, per, like, self.dim, scales))
            else:
                stores.append(PackedStore.of(heads, piece, bits, group, per, self.dim))
        return stores

    def lay(self, part: Part, kv: LayerKV) -> None:
        """Write the entries of `kv` where `part` says. Its `first` and `slots` are set, and its stores have room."""
        if part.flat:
            groups.lay(self, part, kv)
            return
        s, group = kv.storage, kv.storage.group
        recent = kv.window_len if s.quantised else 0
        old = kv.n - recent
        gap = part.slots - old if len(kv.k_packed) > 1 else 0  # between the first run and the groups after it
        store, start = self.k_stores[part.k[0]], part.k[1]
        slot = 0
        for piece in kv.k_packed:
            store.write(start, slot, piece)
            slot += -(-piece.codes.shape[-2] // group) * group
        if s.k_bits == 16 and old:
            store.write(start, 0, kv.k_window[:, :old])
        values = kv.v_packed if s.v_bits < 16 else kv.v_window[:, :old]
        if values is not None and old:
            store, start = self.v_stores[part.v[0]], part.v[1]
            store.write(start, 0, _cut(values, 0, part.first))
            if gap:
                store.write(start, part.first + gap, _cut(values, part.first, old))
            if (end := part.slots - (old - part.first)) > part.first:
                store.clear(start, part.heads, part.first, end)  # evicted entries
        mine, at = self.hidden[part.kv_heads], self.slots + self.cursor
        mine[:, :at] = True
        mine[:, : part.first] = False
        if gap:
            mine[:, part.first + gap : part.slots] = False
        if recent:
            mine[:, at - recent : at] = False
            columns = slice(self.cursor - recent, self.cursor)
            self.k_window[part.kv_heads, columns] = kv.k_window[:, kv.k_window.shape[1] - recent :]
            self.v_window[part.kv_heads, columns] = kv.v_window[:, kv.v_window.shape[1] - recent :]
        if self.accumulated is not None and kv.accumulated is not None:
            sums = self.accumulated[part.kv_heads].zero_()
            sums[:, : part.first] = kv.accumulated[:, : part.first]
            if gap:
                sums[:, part.first + gap : part.slots] = kv.accumulated[:, part.first : old]
            sums[:, at - recent : at] = kv.accumulated[:, old:]
        part.n, part.window_len, part.storage, part.positions = kv.n, recent, s, kv.positions
        self._where = None

    # What is held

    @property
    def allocated(self) -> int:
        """Bytes of every tensor, padding and spare room included."""
        held = [*(p.positions for p in self.parts), self._where, self.where]
        stores = sum(b.nbytes for b in (*self.k_stores, *self.v_stores))
        return self.unshared_bytes + sum(t.nbytes for t in held if t is not None) + stores

    @property
    def unshared_bytes(self) -> int:
        """Bytes that a fork has of its own: residual window, mask, accumulated attention, queries."""
        own = self.k_window, self.v_window, self.hidden, self.accumulated, self.queries
        return sum(t.nbytes for t in own if t is not None)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence so far, evicted ones included."""
        return self.ahead + self.clock

    def count(self, sequence: int) -> list[int]:
        """Entries of each KV head."""
        return [p.touch(self.clock).n for p in self.parts if p.sequence == sequence for _ in range(p.heads)]

    def at_rest(self) -> list[tuple[LayerKV, ...]]:
        """For each sequence, its LayerKVs as of now."""
        made: list[list[LayerKV]] = [[] for _ in range(self.sequences)]
        for part in self.parts:
            made[part.sequence].append(self.part_at_rest(part.touch(self.clock)))
        return [tuple(x) for x in made]

    def positions_of(self, part: Part) -> Tensor | None:
        """Original positions (n,) or (H, n) of all entries; None: 0 ... n-1."""
        known = part.positions
        if known is None:
            return None
        new = part.n - known.shape[-1]
        after = torch.arange(part.tokens_seen - new, part.tokens_seen, dtype=torch.int32, device=known.device)
        return torch.cat([known, after.expand(*known.shape[:-1], new)], dim=-1)

    def stores(self, part: Part) -> tuple[tuple[PackedStore, int], tuple[PackedStore, int]]:
        """The stores of a part's older keys and values, and the index of its first KV head in each."""
        return (self.k_stores[part.k[0]], part.k[1]), (self.v_stores[part.v[0]], part.v[1])

    def part_at_rest(self, part: Part) -> LayerKV:
        """The entries of a part as a LayerKV."""
        if part.flat:
            return groups.at_rest(self, part)
        old = part.n - part.window_len
        runs = [(0, part.first)]
        if old > part.first:
            runs.append((part.slots - (old - part.first), part.slots))
        sides: list[list[Packed | Tensor]] = []
        for store, start in self.stores(part):
            sides.append([store.read(start, part.heads, a, b) for a, b in runs if b > a])
        windows = []
        for x, pieces in zip((self.k_window, self.v_window), sides, strict=True):
            kept = [p for p in pieces if isinstance(p, Tensor)]
            windows.append(torch.cat([*kept, x[part.kv_heads, self.cursor - part.window_len : self.cursor]], dim=1))
        k = tuple(p for p in sides[0] if isinstance(p, Packed))
        v = [p for p in sides[1] if isinstance(p, Packed)]
        accumulated = None
        if self.accumulated is not None and part.summed:
            runs.append((self.slots + self.cursor - part.window_len, self.slots + self.cursor))
            accumulated = torch.cat([self.accumulated[part.kv_heads, a:b] for a, b in runs], dim=1)
        queries = None
        if self.queries is not None and part.asked:
            queries = self.queries[part.kv_heads, :, self.queries.shape[2] - part.asked :].clone()
        return LayerKV.of(
            k,
            _join(v) if v else None,
            *windows,
            self.positions_of(part),
            part.storage,
            tokens_seen=part.tokens_seen,
            schedule=part.schedule,
            choose=part.choose,
            steps=part.steps,
            accumulated=accumulated,
            queries=queries,
        )

    # Other selections of the same sequences

    def pick(self, sequences: Sequence[int]) -> Self:
        """A layer of these sequences, in this order; a sequence may be repeated."""
        twin = copy.copy(self)
        order = list(sequences)
        twin.sequences, twin.parts = len(order), []
        twin.every = torch.arange(len(order) * self.heads)
        twin.ledger = self.ledger.pick(order)
        sources: list[Part] = []
        for new, old in enumerate(order):
            for part in (p for p in self.parts if p.sequence == old):
                at = new * self.heads + part.at - old * self.heads
                sources.append(part)
                twin.parts.append(replace(part, sequence=new, at=at))
        heads = [old * self.heads + h for old in order for h in range(self.heads)]
        index = torch.tensor(heads, device=self.k_window.device)
        twin.k_window, twin.v_window, twin.hidden = self.k_window[index], self.v_window[index], self.hidden[index]
        twin.accumulated = (
            self.accumulated[index] if self.accumulated is not None and any(p.summed for p in twin.parts) else None
        )
        if self.queries is not None:
            wide = max(p.asked for p in twin.parts)
            twin.queries = self.queries[index][:, :, self.queries.shape[2] - wide :].clone() if wide else None
        twin._where = None
        twin.where = self.where[index] if self.where is not None and any(p.flat for p in twin.parts) else None
        twin.k_stores, twin.v_stores = (self._picked(sources, twin.parts, side) for side in ("k", "v"))
        twin.look_ahead()
        return twin

    def _picked(self, sources: list[Part], parts: list[Part], side: str) -> list[PackedStore]:
        members: dict[int, list[int]] = {}
        for i, part in enumerate(sources):
            members.setdefault(getattr(part, side)[0], []).append(i)
        stores = []
        for number, (old, inside) in enumerate(members.items()):
            local: list[int] = []
            heads: list[int] = []
            for i in inside:
                start, count = getattr(sources[i], side)[1], parts[i].heads
                setattr(parts[i], side, (number, len(heads)))
                local += range(start, start + count)
                heads += range(parts[i].at, parts[i].at + count)
            store: PackedStore = getattr(self, f"{side}_stores")[old]
            stores.append(store.pick(local, heads, max(parts[i].slots for i in inside)))
        return stores

    # What changes

    def look_ahead(self) -> None:
        """Compute what holds until the next sequence packs or evicts.

        full_at: the token before which a sequence must evict (strict schedule). due_at: the token after which one packs
        or evicts. lengths (S,): slots in use; each store gets those of its KV heads. used: the most slots in use.
        begin: the first column in use. old_hidden, new_hidden: whether any slot or column among these is hidden.
        ahead_of (S,): the next position of each KV head's sequence, less the clock; ahead: the most of these.
        """
        self.full_at, self.due_at = NEVER, NEVER
        self.ahead = max(p.tokens_seen - p.clock for p in self.parts)
        self.begin = self.cursor
        self.reindexed = [p for p in self.parts if p.schedule.reindex is not None]
        self.lengths = torch.zeros_like(self.every)
        for part in self.parts:
            if part.touch(self.clock).full:
                self.full_at = self.clock
            self.due_at = min(self.due_at, self.clock + part.room())
            self.begin = min(self.begin, self.cursor - part.columns)
            self.lengths[part.kv_heads] = part.slots
        for store in (*self.k_stores, *self.v_stores):
            store.fill(self.lengths[store.heads])
        self.used = max(b.used for b in self.k_stores)
        old, new = self.hidden[:, : self.used], self.hidden[:, self.slots + self.begin : self.slots + self.cursor]
        self.old_hidden, self.new_hidden = bool(old.any()), bool(new.any())
        self.known_entries: Held | None = None
        ahead = [p.tokens_seen - p.clock for p in self.parts for _ in range(p.heads)]
        self.ahead_of = torch.tensor(ahead, device=self.hidden.device)

    def bytes_of(self, part: Part) -> int:
        """Bytes of the entries of a `flat` part, without scales of K, group sizes and queries."""
        return part.bytes_of(part.n, part.window_len, self.dim, self.k_window.itemsize)[0]

    def reserve(self, part: Part, slots: int) -> None:
        """Make room for `slots` slots of a part in its stores, and in the mask."""
        stores = self.k_stores[part.k[0]], self.v_stores[part.v[0]]
        for store in stores:
            store.reserve(slots)
        if (more := max(b.slots for b in stores) - self.slots) > 0:
            unused = self.hidden.new_ones(self.hidden.shape[0], more)
            self.hidden = torch.cat([self.hidden[:, : self.slots], unused, self.hidden[:, self.slots :]], dim=1)
            for name in ("accumulated", "where"):
                if (x := getattr(self, name)) is not None:
                    pieces = x[:, : self.slots], x.new_zeros(unused.shape), x[:, self.slots :]
                    setattr(self, name, torch.cat(pieces, dim=1))
            self.slots += more

    def entries(self) -> Held:
        """All entries as kernels read them; remembered until a sequence packs or evicts."""
        if self.known_entries is None:
            keys, values = ([b.entries() for b in stores if b.used] for stores in (self.k_stores, self.v_stores))
            newest = []
            for side, x in (("k", self.k_window), ("v", self.v_window)):
                none, ends = x.new_empty(0), torch.full_like(self.every, self.cursor)
                newest.append(Entries(side, x, none, none, 16, 1, range(len(x)), ends, self.begin, self.used))
            gap, some = self.slots + self.begin - self.used, (self.old_hidden, self.new_hidden)
            k, v = newest
            self.known_entries = Held(keys, values, (k, v), self.hidden, self.lengths, self.used, gap, some)
        for entries in self.known_entries.newest:
            entries.extend(self.cursor)
        return self.known_entries

    def __getstate__(self) -> dict[str, Any]:
        """The state that a copy starts from, without what names tensors of this object."""
        return self.__dict__ | {"known_entries": None}

    def places(self) -> tuple[Tensor, Tensor]:
        """Original position (S, slots + columns) of the entry in each place, and `ahead_of` (S,).

        A free column has the position of the token that it will hold, so both are remembered until a sequence packs or
        evicts.
        """
        if self._where is None:
            device = self.hidden.device
            columns = torch.arange(self.k_window.shape[1], device=device) + (self.clock - self.cursor)
            where = torch.zeros(self.hidden.shape, dtype=torch.int64, device=device)
            where[:, self.slots :] = self.ahead_of[:, None] + columns
            for part in self.parts:
                part.touch(self.clock)
                if part.flat and self.where is not None:
                    end = self.slots + self.cursor
                    where[part.kv_heads, :end] = self.where[part.kv_heads, :end]
                    continue
                known = self.positions_of(part)
                known = torch.arange(part.n, device=device) if known is None else known.long()
                old, end, mine = part.n - part.window_len, self.slots + self.cursor, where[part.kv_heads]
                mine[:, : part.first] = known[..., : part.first]
                if old > part.first:
                    mine[:, part.slots - (old - part.first) : part.slots] = known[..., part.first : old]
                mine[:, end - part.window_len : end] = known[..., old:]
            self._where = where
        return self._where, self.ahead_of


def _cut(side: Packed | Tensor, begin: int, end: int) -> Packed | Tensor:
    """Entries begin ... end of values, packed or not."""
    if isinstance(side, Tensor):
        return side[:, begin:end]
    return replace(side, codes=side.codes[:, begin:end], step=side.step[:, begin:end], zero=side.zero[:, begin:end])


def _join(pieces: list[Packed]) -> Packed:
    """Packed values one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    codes, step, zero = (torch.cat(x, dim=1) for x in zip(*(p.tensors() for p in pieces), strict=True))
    return replace(pieces[0], codes=codes, step=step, zero=zero)
