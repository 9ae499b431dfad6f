"""The rows of one layer side by side while they decode: how they take in tokens, attend, pack and evict.

A strand is one KV head of one sequence. All strands share a **tail**, the newest entries at 16 bit, right-aligned: a
new token is one slice write, whatever the strands hold. Older entries lie in **banks** (`moend.cache.packed_store`),
K and V apart: strands of one kind (bits, group) and of similar length share a bank. Logits of all strands lie in one
matrix (strands, queries, slots + tail), whose unused places are masked once, so that a step costs a handful of batched
operations per bank and layer, and no Python work that grows with the rows.

What falls due for one row (a group leaves the window, a cap is reached) is computed ahead as a point of the layer's
clock, counted in tokens; only there rows are looked at one by one. More tokens than fit before it are taken in pieces,
so packing and eviction fall on the same token however tokens come.

Memory. Padding in a bank is at most what its strands hold, or 2^15 elements a row where that is more; a bank that
grows takes an eighth to spare; the tail has SPARE columns to spare beside the longest window and group. All of it is in
`allocated`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moend.budget import Storage, v_group
from moend.cache.layer_kv import Chooser, LayerKV, Schedule, gather
from moend.cache.packed_store import PackedStore
from moend.cache.packing import Packed, quantise_k, quantise_v
from moend.hf.rope import back
from moend.kernels.cpu import compiled
from moend.kernels.triton import launch as kernel

SPARE = 32  # free columns of a new tail
PIECE = 256  # tokens taken in at once: bounds the tail of rows that never pack
PADDING = 2**15  # elements a row may be padded by before strands of its kind get a bank of their own
LOGITS = 2**24  # logits computed at a time
NEVER = 2**62

Ints = npt.NDArray[np.int64]


@dataclass
class Part:
    """A LayerKV while it decodes: the counters of its strands `at` ... at + heads. Counters hold as of `clock`."""

    sequence: int
    at: int
    heads: int
    storage: Storage
    schedule: Schedule
    choose: Chooser | None
    n: int
    tail: int
    seen: int
    steps: int
    clock: int
    positions: Tensor | None  # of the entries there were when it was laid down; those since then follow on
    first: int  # entries of the first run: packed K leaves a gap between it and the next group
    slots: int  # slots used
    summed: bool = False  # whether the attention its entries receive is summed (`LayerKV.accumulated attention`)
    asked: int = 0  # how many of its last queries are kept (`LayerKV.queries`)
    k: tuple[int, int] = (0, 0)  # (bank, first strand in it)
    v: tuple[int, int] = (0, 0)

    def touch(self, clock: int) -> Part:
        """Bring the counters up to `clock`."""
        passed, self.clock = clock - self.clock, clock
        self.n, self.tail, self.seen, self.steps = (x + passed for x in (self.n, self.tail, self.seen, self.steps))
        return self

    @property
    def strands(self) -> slice:
        """Its strands."""
        return slice(self.at, self.at + self.heads)

    @property
    def full(self) -> bool:
        """Whether it must evict before the next token ("counted")."""
        s = self.schedule
        return s.cap is not None and s.overshoot == "counted" and self.n >= s.cap > max(s.cap - max(s.reserve, 1), 1)

    def room(self) -> int:
        """Tokens until it packs or evicts."""
        s, st, rooms = self.schedule, self.storage, [NEVER]
        if s.cap is not None and s.overshoot == "paper":
            rooms.append(s.beta - self.steps)
        elif s.cap is not None:
            rooms.append(s.cap - self.n if self.n < s.cap else max(s.reserve, 1))
        if st.quantised:
            rooms.append(st.window + st.group - self.tail)
        return max(min(rooms), 1)


def buckets(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Indices of sizes in buckets whose longest pads none by more than its own size or `limit`, whichever is more."""
    made: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if made and sizes[made[-1][0]] - sizes[i] <= max(sizes[i], limit):
            made[-1].append(i)
        else:
            made.append([i])
    return made


def _first(row: LayerKV) -> tuple[int, int]:
    """Entries in the first run of a row's older entries, and the slots that all of them take."""
    group = row.storage.group
    old = row.n - row.tail if row.storage.quantised else row.n
    if not row.k_packed:
        return old, old
    first = row.k_packed[0].codes.shape[-2]
    return first, -(-first // group) * group + sum(-(-p.codes.shape[-2] // group) * group for p in row.k_packed[1:])


def _kind(storage: Storage, side: str, dim: int) -> tuple[int, int]:
    """(bits, group) of the bank that one side goes to."""
    if side == "k":
        return storage.k_bits, storage.group if storage.k_bits < 16 else 1
    return storage.v_bits, v_group(dim, storage.channels)


def _piece(row: LayerKV, side: str, slots: int) -> Packed | Tensor | None:
    """One side of a row's older entries where they fill `slots` in one piece: a bank of their own needs no copy."""
    bits = row.storage.k_bits if side == "k" else row.storage.v_bits
    if row.n - (row.tail if row.storage.quantised else 0) != slots or not slots:
        return None
    pieces: Sequence[Packed | Tensor]
    if bits == 16:
        pieces = [row.k_tail if side == "k" else row.v_tail]
    else:
        pieces = row.k_packed if side == "k" else [row.v_packed] if row.v_packed else []
    held = [p.tensors() if isinstance(p, Packed) else (p,) for p in pieces]
    whole = len(held) == 1 and held[0][0].shape[1] == slots and all(t.is_contiguous() for t in held[0])
    return pieces[0] if whole else None


def _layout(rows: Sequence[tuple[int, int, Storage]], side: str, dim: int) -> list[tuple[tuple[int, int], list[int]]]:
    """Banks of one side as (kind, indices of rows); a row here is (heads, slots, storage)."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for i, (_, _, storage) in enumerate(rows):
        kinds.setdefault(_kind(storage, side, dim), []).append(i)
    return [
        (kind, sorted(members[j] for j in bucket))
        for kind, members in kinds.items()
        for bucket in buckets([rows[i][1] for i in members], PADDING // (dim * max(rows[i][0] for i in members)))
    ]


def _columns(rows: Sequence[LayerKV]) -> int:
    """Where the cursor of a new tail stands: room for every tail there is, and for the windows of rows that evict."""
    tails = [r.tail for r in rows if r.storage.quantised]
    windows = [r.storage.window for r in rows if r.storage.quantised and r.schedule.cap is not None]
    return max([*tails, *windows, 0])


def allocation(rows: Sequence[tuple[LayerKV, ...]]) -> int:
    """Bytes that `Strands` of these rows (see there) will allocate when it is made."""
    flat = [r for parts in rows for r in parts]
    if not flat:
        return 0
    dim, size = flat[0].k_tail.shape[2], flat[0].dtype.itemsize
    shapes = [(r.heads, _first(r)[1], r.storage) for r in flat]
    strands = sum(r.heads for r in flat)
    total, longest = 0, 0
    for side in ("k", "v"):
        for (bits, group), members in _layout(shapes, side, dim):
            heads, slots = sum(shapes[i][0] for i in members), max(shapes[i][1] for i in members)
            longest = max(longest, slots)
            if bits == 16:
                total += heads * slots * dim * size
            else:
                scales = slots // group * dim if side == "k" else slots * (dim // group)
                total += heads * (slots * dim * bits // 8 + scales * 4)
    columns = _columns(flat) + SPARE
    beside = 5 if any(r.accumulated is not None for r in flat) else 1  # the mask, and the accumulated attention
    positions = sum(r.positions.nbytes for r in flat if r.positions is not None)
    most = max((r.queries.shape[1] * r.queries.shape[2] for r in flat if r.queries is not None), default=0)
    total += strands * most * dim * size
    return total + 2 * strands * columns * dim * size + strands * (longest + columns) * beside + positions


class Strands:
    """Rows of one layer: for each sequence its LayerKV, or the rows of its heads where these hold different numbers."""

    def __init__(self, rows: Sequence[tuple[LayerKV, ...]]):
        flat = [r for parts in rows for r in parts]
        first = flat[0].k_tail
        if any(r.dtype != first.dtype for r in flat):
            raise ValueError(f"rows of a batch are stored alike, got {sorted({str(r.dtype) for r in flat})}")
        self.heads = sum(r.heads for r in rows[0])
        self.dim, self.sequences = first.shape[2], len(rows)
        self.clock = 0  # tokens taken in
        self.parts: list[Part] = []
        for i, parts in enumerate(rows):
            at = i * self.heads
            for row in parts:
                self.parts.append(self._part(row, i, at))
                at += row.heads
        # Bytes held by each sequence: base + one x clock. Only events change either; nothing is counted per step.
        self.base, self.one = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
        self._area, self._counted = np.zeros(len(rows), dtype=np.int64), 0  # of the tokens before the last event
        self._spans: list[tuple[int, Ints, Ints]] = []  # the last feed: from which token on which base and one hold
        for part, row in zip(self.parts, flat, strict=True):
            self.base[part.sequence] += row.bytes
            self.one[part.sequence] += row.bytes_per_token
        self.cursor = _columns(flat)  # the tail's next free column
        self._where: Tensor | None = None
        total = self.sequences * self.heads
        self.k_tail = first.new_zeros(total, self.cursor + SPARE, self.dim)
        self.v_tail = torch.zeros_like(self.k_tail)
        self.k_banks, self.v_banks = self._banks(flat, "k", first), self._banks(flat, "v", first)
        self.slots = max(b.slots for b in self.k_banks)
        self.hidden = torch.ones(total, self.slots + self.k_tail.shape[1], dtype=torch.bool, device=first.device)
        self.hidden[:, self.slots + self.cursor :] = False
        self.accumulated = (
            torch.zeros(self.hidden.shape, device=first.device) if any(p.summed for p in self.parts) else None
        )
        self.queries: Tensor | None = None  # (S, G, w, d): the last w queries, right-aligned, where any part asks
        self._all = torch.arange(total)
        for part, row in zip(self.parts, flat, strict=True):
            self._lay(part, row)
            if row.queries is not None:
                if self.queries is None:
                    wide = max(r.queries.shape[2] for r in flat if r.queries is not None)
                    self.queries = first.new_zeros(total, row.queries.shape[1], wide, self.dim)
                self.queries[part.strands, :, self.queries.shape[2] - part.asked :] = row.queries
        self._look_ahead()

    def _part(self, row: LayerKV, sequence: int, at: int) -> Part:
        first, slots = _first(row)
        return Part(
            sequence, at, row.heads, row.storage, row.schedule, row.choose,
            n=row.n, tail=0, seen=row.seen, steps=row.steps, clock=0, positions=None, first=first, slots=slots,
            summed=row.accumulated is not None, asked=0 if row.queries is None else row.queries.shape[2],
        )  # fmt: skip

    def _banks(self, rows: Sequence[LayerKV], side: Literal["k", "v"], like: Tensor) -> list[PackedStore]:
        banks = []
        layout = _layout([(p.heads, p.slots, p.storage) for p in self.parts], side, self.dim)
        for number, ((bits, group), members) in enumerate(layout):
            strands: list[int] = []
            for i in members:
                part = self.parts[i]
                setattr(part, side, (number, len(strands)))
                strands += range(part.at, part.at + part.heads)
            slots, per = max(self.parts[i].slots for i in members), "channel" if side == "k" else "token"
            piece = _piece(rows[members[0]], side, slots) if len(members) == 1 else None
            if piece is None:
                banks.append(PackedStore(strands, slots, bits, group, per, like, self.dim))
            else:
                banks.append(PackedStore.of(strands, piece, bits, group, per, self.dim))
        return banks

    def _lay(self, part: Part, row: LayerKV) -> None:
        """Lay a row's entries down where its part says; `first` and `slots` are set, and there is room for them."""
        s, group = row.storage, row.storage.group
        tail = row.tail if s.quantised else 0
        old = row.n - tail
        gap = part.slots - old if len(row.k_packed) > 1 else 0  # between the first run and the groups after it
        bank, start = self.k_banks[part.k[0]], part.k[1]
        slot = 0
        for piece in row.k_packed:
            bank.write(start, slot, piece)
            slot += -(-piece.codes.shape[-2] // group) * group
        if s.k_bits == 16 and old:
            bank.write(start, 0, row.k_tail[:, :old])
        values = row.v_packed if s.v_bits < 16 else row.v_tail[:, :old]
        if values is not None and old:
            bank, start = self.v_banks[part.v[0]], part.v[1]
            bank.write(start, 0, _cut(values, 0, part.first))
            if gap:
                bank.write(start, part.first + gap, _cut(values, part.first, old))
            if (end := part.slots - (old - part.first)) > part.first:
                bank.clear(start, part.heads, part.first, end)  # what was evicted
        mine, at = self.hidden[part.strands], self.slots + self.cursor
        mine[:, :at] = True
        mine[:, : part.first] = False
        if gap:
            mine[:, part.first + gap : part.slots] = False
        if tail:
            mine[:, at - tail : at] = False
            self.k_tail[part.strands, self.cursor - tail : self.cursor] = row.k_tail[:, row.k_tail.shape[1] - tail :]
            self.v_tail[part.strands, self.cursor - tail : self.cursor] = row.v_tail[:, row.v_tail.shape[1] - tail :]
        if self.accumulated is not None and row.accumulated is not None:
            sums = self.accumulated[part.strands].zero_()
            sums[:, : part.first] = row.accumulated[:, : part.first]
            if gap:
                sums[:, part.first + gap : part.slots] = row.accumulated[:, part.first : old]
            sums[:, at - tail : at] = row.accumulated[:, old:]
        part.n, part.tail, part.storage, part.positions = row.n, tail, s, row.positions
        self._where = None

    # What is held

    @property
    def allocated(self) -> int:
        """Bytes of every tensor, padding and spare room included."""
        held = [*(p.positions for p in self.parts), self._where]
        banks = sum(b.nbytes for b in (*self.k_banks, *self.v_banks))
        return self.tail_bytes + sum(t.nbytes for t in held if t is not None) + banks

    @property
    def tail_bytes(self) -> int:
        """Bytes of the tail, the mask, the accumulated attention and the queries."""
        own = self.k_tail, self.v_tail, self.hidden, self.accumulated, self.queries
        return sum(t.nbytes for t in own if t is not None)

    @property
    def held(self) -> Ints:
        """Bytes of the entries of each sequence."""
        return self.base + self.one * self.clock

    @property
    def trace(self) -> Ints:
        """(tokens of the last feed, sequences): bytes held after each token."""
        ends = [begin for begin, _, _ in self._spans[1:]] + [self.clock + 1]
        spans = [
            base + one * np.arange(begin, end)[:, None]
            for (begin, base, one), end in zip(self._spans, ends, strict=True)
        ]
        return np.concatenate([np.zeros((0, self.sequences), dtype=np.int64), *spans])

    @property
    def area(self) -> Ints:
        """The sum of the bytes held after each token, by sequence."""
        return self._area + self._held_until(self.clock)

    def _held_until(self, clock: int) -> Ints:
        """Bytes held summed over the tokens since the last event, up to token `clock`."""
        tokens = clock - self._counted
        return self.base * tokens + self.one * (tokens * (self._counted + 1 + clock) // 2)

    def _change(self, token: int) -> None:
        """What is held may change from `token` on, counted from 1."""
        self._area = self._area + self._held_until(token - 1)
        self._counted, self.base, self.one = token - 1, self.base.copy(), self.one.copy()
        self._spans.append((token, self.base, self.one))

    @property
    def longest(self) -> int:
        """Tokens seen by the longest sequence."""
        return self._ahead + self.clock

    def count(self, sequence: int) -> list[int]:
        """Entries of each KV head."""
        return [p.touch(self.clock).n for p in self.parts if p.sequence == sequence for _ in range(p.heads)]

    def rows(self) -> list[tuple[LayerKV, ...]]:
        """What is held, as rows at rest."""
        made: list[list[LayerKV]] = [[] for _ in range(self.sequences)]
        for part in self.parts:
            made[part.sequence].append(self._row(part.touch(self.clock)))
        return [tuple(x) for x in made]

    def _positions(self, part: Part) -> Tensor | None:
        """Original positions of all entries: those laid down, then one after the other."""
        known = part.positions
        if known is None:
            return None
        new = part.n - known.shape[-1]
        after = torch.arange(part.seen - new, part.seen, dtype=torch.int32, device=known.device)
        return torch.cat([known, after.expand(*known.shape[:-1], new)], dim=-1)

    def _row(self, part: Part) -> LayerKV:
        s, old = part.storage, part.n - part.tail
        runs = [(0, part.first)]
        if old > part.first:
            runs.append((part.slots - (old - part.first), part.slots))
        sides: list[list[Packed | Tensor]] = []
        for bank, start in ((self.k_banks[part.k[0]], part.k[1]), (self.v_banks[part.v[0]], part.v[1])):
            sides.append([bank.read(start, part.heads, a, b) for a, b in runs if b > a])
        tails = []
        for x, pieces in zip((self.k_tail, self.v_tail), sides, strict=True):
            kept = [p for p in pieces if isinstance(p, Tensor)]
            tails.append(torch.cat([*kept, x[part.strands, self.cursor - part.tail : self.cursor]], dim=1))
        k = tuple(p for p in sides[0] if isinstance(p, Packed))
        v = [p for p in sides[1] if isinstance(p, Packed)]
        accumulated = None
        if self.accumulated is not None and part.summed:
            runs.append((self.slots + self.cursor - part.tail, self.slots + self.cursor))
            accumulated = torch.cat([self.accumulated[part.strands, a:b] for a, b in runs], dim=1)
        queries = None
        if self.queries is not None and part.asked:
            queries = self.queries[part.strands, :, self.queries.shape[2] - part.asked :].clone()
        return LayerKV.of(
            k,
            _join(v) if v else None,
            *tails,
            self._positions(part),
            s,
            seen=part.seen,
            schedule=part.schedule,
            choose=part.choose,
            steps=part.steps,
            accumulated=accumulated,
            queries=queries,
        )

    # Other selections of the same sequences

    def fork(self) -> Strands:
        """An independent twin; banks are shared until either writes to them."""
        return self.pick(range(self.sequences))

    def pick(self, sequences: Sequence[int]) -> Strands:
        """These sequences, in this order, with repetition."""
        twin = copy.copy(self)
        order = list(sequences)
        twin.sequences, twin.parts = len(order), []
        twin._all = torch.arange(len(order) * self.heads)
        for name in ("base", "one", "_area"):
            setattr(twin, name, getattr(self, name)[order])
        twin._spans = [(begin, base[order], one[order]) for begin, base, one in self._spans]
        sources: list[Part] = []
        for new, old in enumerate(order):
            for part in (p for p in self.parts if p.sequence == old):
                at = new * self.heads + part.at - old * self.heads
                sources.append(part)
                twin.parts.append(replace(part, sequence=new, at=at))
        strands = [old * self.heads + h for old in order for h in range(self.heads)]
        index = torch.tensor(strands, device=self.k_tail.device)
        twin.k_tail, twin.v_tail, twin.hidden = self.k_tail[index], self.v_tail[index], self.hidden[index]
        twin.accumulated = (
            self.accumulated[index] if self.accumulated is not None and any(p.summed for p in twin.parts) else None
        )
        if self.queries is not None:
            wide = max(p.asked for p in twin.parts)
            twin.queries = self.queries[index][:, :, self.queries.shape[2] - wide :].clone() if wide else None
        twin._where = None
        twin.k_banks, twin.v_banks = (self._picked(sources, twin.parts, side) for side in ("k", "v"))
        twin._look_ahead()
        return twin

    def _picked(self, sources: list[Part], parts: list[Part], side: str) -> list[PackedStore]:
        members: dict[int, list[int]] = {}
        for i, part in enumerate(sources):
            members.setdefault(getattr(part, side)[0], []).append(i)
        banks = []
        for number, (old, inside) in enumerate(members.items()):
            local: list[int] = []
            strands: list[int] = []
            for i in inside:
                start, heads = getattr(sources[i], side)[1], parts[i].heads
                setattr(parts[i], side, (number, len(strands)))
                local += range(start, start + heads)
                strands += range(parts[i].at, parts[i].at + heads)
            bank: PackedStore = getattr(self, f"{side}_banks")[old]
            banks.append(bank.pick(local, strands, max(parts[i].slots for i in inside)))
        return banks

    # Taking in tokens

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, window: int | None) -> Tensor:
        """Take in q tokens, keys, values (B, H, q, d), and attend from query (B, H_q, q, d): (B, H_q, q, d)."""
        if keys.shape != (self.sequences, self.heads, query.shape[2], self.dim) or query.shape[3] != self.dim:
            raise ValueError(f"{self.sequences} sequences of {self.heads} heads of {self.dim}, got {tuple(keys.shape)}")
        grouped = (query * scaling).reshape(self.sequences * self.heads, -1, *query.shape[2:])
        parts, done = [], 0
        for taken in self.feed(keys, values):
            parts.append(self._attention(grouped[:, :, done : done + taken], window))
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
        self._spans = [(self.clock + 1, self.base, self.one)]
        while done < q:
            if self.clock >= self._full:
                self._change(self.clock + 1)
                for part in self.parts:
                    if part.touch(self.clock).full:
                        cap, reserve = part.schedule.cap or 1, part.schedule.reserve
                        self.evict(part, max(cap - max(reserve, 1), 1))
                self._look_ahead()
            taken = min(q - done, self._due - self.clock, PIECE)
            if self.cursor + taken > self.k_tail.shape[1]:
                self._shift(taken)
            at = slice(self.cursor, self.cursor + taken)
            self.k_tail[:, at] = keys[:, done : done + taken]
            self.v_tail[:, at] = values[:, done : done + taken]
            self.cursor, self.clock, done = self.cursor + taken, self.clock + taken, done + taken
            yield taken
            if self.clock >= self._due:
                self._change(self.clock)
                self._settle()

    def _look_ahead(self) -> None:
        """What holds until the next event.

        When a row must evict before a token comes (_full), and when one packs or evicts after it (_due); which slots
        (`_lengths`, each bank's `lengths`, in all `_used`) and columns of the tail (from `_begin` on) hold something;
        whether any of these is hidden.
        """
        self._full, self._due = NEVER, NEVER
        self._ahead = max(p.seen - p.clock for p in self.parts)
        self._begin = self.cursor
        self._reindexed = [p for p in self.parts if p.schedule.reindex is not None]
        self._lengths = torch.zeros_like(self._all)  # slots of each strand
        for part in self.parts:
            if part.touch(self.clock).full:
                self._full = self.clock
            self._due = min(self._due, self.clock + part.room())
            self._begin = min(self._begin, self.cursor - part.tail)
            self._lengths[part.strands] = part.slots
        for bank in (*self.k_banks, *self.v_banks):
            bank.fill(self._lengths[bank.strands])
        self._used = max(b.used for b in self.k_banks)
        old, new = self.hidden[:, : self._used], self.hidden[:, self.slots + self._begin : self.slots + self.cursor]
        self._old_hidden, self._new_hidden = bool(old.any()), bool(new.any())
        self._runs: list[kernel.Run] | None = None
        self._tails: tuple[compiled.Entries, compiled.Entries] | None = None

    def _settle(self) -> None:
        """Pack the groups that left the window, evict what is over its cap after beta tokens ("paper")."""
        for part in self.parts:
            s = part.touch(self.clock).schedule
            due = s.cap is not None and s.overshoot == "paper" and part.steps >= s.beta
            if due and s.cap is not None and part.n > s.cap:
                self.evict(part, s.cap)
                continue
            part.steps = 0 if due else part.steps
            st = part.storage
            if st.quantised and (count := max(part.tail - st.window, 0) // st.group * st.group):
                self._pack(part, count)
        self._look_ahead()

    def _pack(self, part: Part, count: int) -> None:
        """Move a part's oldest `count` entries from the tail to its banks."""
        st, begin = part.storage, self.cursor - part.tail
        old = slice(begin, begin + count)
        saved = 0
        k: Packed | Tensor = self.k_tail[part.strands, old]
        v: Packed | Tensor = self.v_tail[part.strands, old]
        if st.k_bits < 16:
            packed = quantise_k(self.k_tail[part.strands, old], st.k_bits, st.group)
            saved += self.k_tail[part.strands, old].nbytes - sum(t.nbytes for t in packed.tensors())
            k = packed
        if st.v_bits < 16:
            packed = quantise_v(self.v_tail[part.strands, old], st.v_bits, st.channels)
            saved += self.v_tail[part.strands, old].nbytes - sum(t.nbytes for t in packed.tensors())
            v = packed
        slot = part.slots
        if part.n - part.tail == part.first == slot:  # the first run goes on where it ends on a whole group
            part.first += count
        self._reserve(part, slot + count)
        self.k_banks[part.k[0]].write(part.k[1], slot, k)
        self.v_banks[part.v[0]].write(part.v[1], slot, v)
        self.hidden[part.strands, slot : slot + count] = False
        self.hidden[part.strands, self.slots + begin : self.slots + begin + count] = True
        if self.accumulated is not None:
            moved = self.accumulated[part.strands, self.slots + begin : self.slots + begin + count]
            self.accumulated[part.strands, slot : slot + count] = moved
            moved.zero_()
        part.slots, part.tail = slot + count, part.tail - count
        self.base[part.sequence] -= saved
        self._where = None

    def _reserve(self, part: Part, slots: int) -> None:
        """Room for `slots` of a part in its banks, and in the mask."""
        banks = self.k_banks[part.k[0]], self.v_banks[part.v[0]]
        for bank in banks:
            bank.reserve(slots)
        if (more := max(b.slots for b in banks) - self.slots) > 0:
            unused = self.hidden.new_ones(self.hidden.shape[0], more)
            self.hidden = torch.cat([self.hidden[:, : self.slots], unused, self.hidden[:, self.slots :]], dim=1)
            if self.accumulated is not None:
                parts = (
                    self.accumulated[:, : self.slots],
                    self.accumulated.new_zeros(unused.shape),
                    self.accumulated[:, self.slots :],
                )
                self.accumulated = torch.cat(parts, dim=1)
            self.slots += more

    def _shift(self, new: int) -> None:
        """Make `new` free columns: rows that never pack lay their tail down, the others' moves to the left end."""
        for part in self.parts:
            if not part.touch(self.clock).storage.quantised and part.tail:
                self._pack(part, part.tail)
        evicting = [p.storage.window for p in self.parts if p.storage.quantised and p.schedule.cap is not None]
        keep = min(max([0, *(p.tail for p in self.parts), *evicting]), self.cursor)
        begin, size = self.cursor - keep, self.k_tail.shape[1]
        spare = max(SPARE, new) if size < keep + new else size - keep
        hidden = self.hidden[:, self.slots + begin : self.slots + self.cursor]
        free = hidden.new_zeros(hidden.shape[0], spare)
        self.hidden = torch.cat([self.hidden[:, : self.slots], hidden, free], dim=1)
        if self.accumulated is not None:
            sums = self.accumulated[:, self.slots + begin : self.slots + self.cursor]
            self.accumulated = torch.cat(
                [self.accumulated[:, : self.slots], sums, self.accumulated.new_zeros(free.shape)], dim=1
            )
        for name in ("k_tail", "v_tail"):
            x = getattr(self, name)
            setattr(self, name, torch.cat([x[:, begin : self.cursor], x.new_zeros(x.shape[0], spare, self.dim)], dim=1))
        self.cursor, self._where = keep, None
        self._look_ahead()

    def evict(self, part: Part, keep: int) -> None:
        """Keep `keep` entries per head, chosen by the method's own scorer from what is still held."""
        if keep >= part.n:
            return
        if part.choose is None:
            raise RuntimeError("a row with a cap needs a scorer that can score while decoding")
        old = self._row(part)
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
        self._reserve(part, part.slots)
        self._lay(part, row)
        rate = row.bytes_per_token - old.bytes_per_token
        self.one[part.sequence] += rate
        self.base[part.sequence] += row.bytes - old.bytes - rate * self.clock

    # Attention

    @property
    def path(self) -> str:
        """What computes a step of one token: "triton" on GPUs that have it, "compiled" on a CPU, "torch" otherwise."""
        if self.accumulated is None and not self._reindexed and kernel.usable(self.k_tail.device):
            return "triton"
        return "compiled" if compiled.usable(self.k_tail, 1) else "torch"

    def runs(self) -> list[kernel.Run]:
        """What is held as the kernel reads it: strands that share both banks together, then the tail of all."""
        if self._runs is None:
            self._runs = []
            pairs: dict[tuple[int, int], list[Part]] = {}
            for part in self.parts:
                if part.slots:
                    pairs.setdefault((part.k[0], part.v[0]), []).append(part)
            for (k, v), parts in pairs.items():
                index = [
                    [first + h for p, first in zip(parts, firsts, strict=True) for h in range(p.heads)]
                    for firsts in ([p.at for p in parts], [p.k[1] for p in parts], [p.v[1] for p in parts])
                ]
                index.append([p.slots for p in parts for _ in range(p.heads)])
                at, k_rows, v_rows, lengths = torch.tensor(index, dtype=torch.int32, device=self.k_tail.device)
                sides = kernel.Side.of(self.k_banks[k]), kernel.Side.of(self.v_banks[v])
                longest = max(p.slots for p in parts)
                self._runs.append(kernel.Run(*sides, at, k_rows, v_rows, lengths, longest, self.hidden))
        begin, columns = self._begin, self.cursor - self._begin
        every = torch.arange(len(self.k_tail), dtype=torch.int32, device=self.k_tail.device)
        lengths = torch.full_like(every, columns)
        tails = kernel.Side.plain(self.k_tail[:, begin:]), kernel.Side.plain(self.v_tail[:, begin:])
        hidden = self.hidden[:, self.slots + begin :]
        return [*self._runs, kernel.Run(*tails, every, every, every, lengths, columns, hidden)]

    def _attention(self, query: Tensor, window: int | None) -> Tensor:
        """Scaled queries (S, G, p, d) of the newest p tokens over all that is held, themselves included."""
        strands, group, p, dim = query.shape
        if p == 1 and window is None and self.path == "triton":
            return kernel.decode(query[:, :, 0], self.runs())[:, :, None]
        used, n = self._used, self._used + self.cursor - self._begin
        size, out = max(LOGITS // (strands * group * n), 1), []
        for start in range(0, p, size):
            part = query[:, :, start : start + size]
            q = part.shape[2]
            flat = part.reshape(strands, group * q, dim)
            fast = compiled.usable(flat, group * q)
            if flat.is_cpu:
                flat = flat.float().contiguous()
            logits = self._logits(flat, fast)
            for row in self._reindexed:
                self._bring_near(row, flat, logits)
            if p > 1 or window is not None:
                self._hide(logits.view(strands, group, q, n), start, p, window)
            probs = self._softmax(logits, fast)
            if self.accumulated is not None:
                received = probs.sum(1)
                self.accumulated[:, :used] += received[:, :used]
                self.accumulated[:, self.slots + self._begin : self.slots + self.cursor] += received[:, used:]
            out.append(self._mixed(probs, flat, fast).view(strands, group, q, dim).to(query.dtype))
        return torch.cat(out, dim=2) if len(out) > 1 else out[0]

    def _bring_near(self, part: Part, query: Tensor, logits: Tensor) -> None:
        """Logits of a re-indexed row's sinks again, as if they stood right before its newest entries (`Reindex`)."""
        reindex, known = part.schedule.reindex, part.positions
        part.touch(self.clock)
        if reindex is None or known is None or part.seen == part.n:
            return
        first = known[: reindex.sinks]
        sinks = int((first == torch.arange(len(first), device=first.device)).sum())
        bank, start = self.k_banks[part.k[0]], part.k[1]
        keys = bank.x[start : start + part.heads, :sinks].to(query.dtype)
        nearer = back(query[part.strands], part.seen - part.n, reindex.rotary).to(query.dtype)
        logits[part.strands, :, :sinks] = torch.bmm(nearer, keys.mT)

    def _logits(self, flat: Tensor, fast: bool) -> Tensor:
        """Scaled queries (S, R, d) times all keys: (S, R, used slots + columns); unused slots are arbitrary."""
        logits = flat.new_empty(*flat.shape[:2], self._used + self.cursor - self._begin)
        if fast:
            compiled.score(flat, self._newest()[0], logits)
        else:
            keys = self.k_tail[:, self._begin : self.cursor].to(flat.dtype)
            logits[:, :, self._used :] = torch.bmm(flat, keys.mT)
        for bank in self.k_banks:
            if bank.used:
                bank.score(flat, logits)
        return logits

    def _softmax(self, logits: Tensor, fast: bool) -> Tensor:
        """softmax(logits) without what is hidden, in float32 where its sums are wanted."""
        used, first = self._used, self.slots + self._begin
        if fast:
            compiled.softmax(logits, self.hidden, self._lengths, used, first - used, self.accumulated is not None)
            return logits
        if self._old_hidden:
            logits[:, :, :used].masked_fill_(self.hidden[:, None, :used], -torch.inf)
        if self._new_hidden:
            hidden = self.hidden[:, None, first : self.slots + self.cursor]
            logits[:, :, used:].masked_fill_(hidden, -torch.inf)
        return torch.softmax(logits, dim=-1, dtype=None if self.accumulated is None else torch.float32)

    def _mixed(self, probs: Tensor, flat: Tensor, fast: bool) -> Tensor:
        """All values weighted by probs (S, R, n): (S, R, d)."""
        if fast:
            mixed = torch.zeros_like(flat)
            compiled.mix(probs, self._newest()[1], mixed)
        else:
            values = self.v_tail[:, self._begin : self.cursor].to(flat.dtype)
            mixed = torch.bmm(probs[:, :, self._used :].to(flat.dtype), values)
        for bank in self.v_banks:
            if bank.used:
                bank.mix(probs, mixed)
        return mixed

    def _newest(self) -> tuple[compiled.Entries, compiled.Entries]:
        """The tail's K and V as compiled code reads them, with one end for all."""
        if self._tails is None:
            none, ends = self.k_tail.new_empty(0), torch.full_like(self._all, self.cursor)
            rest = none, none, 16, 1, ends, self._all, self._begin, self._used
            self._tails = compiled.Entries(self.k_tail, *rest), compiled.Entries(self.v_tail, *rest)
        for side in self._tails:
            side.reach(self.cursor)
        return self._tails

    def __getstate__(self) -> dict[str, Any]:
        """What a copy starts from: its tensors lie elsewhere."""
        return self.__dict__ | {"_tails": None}

    def _hide(self, logits: Tensor, start: int, p: int, window: int | None) -> None:
        """Mask what queries start, start + 1 ... of the newest p may not see: later tokens, and what left `window`."""
        q, n = logits.shape[2:]
        me = torch.arange(start, start + q, device=logits.device)
        later = torch.arange(p, device=logits.device) > me[:, None]
        logits[..., n - p :].masked_fill_(later, -torch.inf)
        if window is not None:
            where, ahead = self._places()
            where = torch.cat(
                [where[:, : self._used], where[:, self.slots + self._begin : self.slots + self.cursor]], dim=1
            )
            at = (ahead[:, None] + (self.clock - p) + me)[..., None]  # (S, q, 1): the queries' own positions
            logits.masked_fill_((at - where[:, None] >= window)[:, None], -torch.inf)

    def _places(self) -> tuple[Tensor, Tensor]:
        """True positions (S, slots + columns) of what lies where, and (S,) how far each strand is ahead of the clock.

        Kept until rows pack or evict: a column to come holds the position to come.
        """
        if self._where is None:
            device = self.hidden.device
            ahead = [p.touch(self.clock).seen - self.clock for p in self.parts for _ in range(p.heads)]
            self._ahead_of = torch.tensor(ahead, device=device)
            columns = torch.arange(self.k_tail.shape[1], device=device) + (self.clock - self.cursor)
            where = torch.zeros(self.hidden.shape, dtype=torch.int64, device=device)
            where[:, self.slots :] = self._ahead_of[:, None] + columns
            for part in self.parts:
                known = self._positions(part)
                known = torch.arange(part.n, device=device) if known is None else known.long()
                old, end, mine = part.n - part.tail, self.slots + self.cursor, where[part.strands]
                mine[:, : part.first] = known[..., : part.first]
                if old > part.first:
                    mine[:, part.slots - (old - part.first) : part.slots] = known[..., part.first : old]
                mine[:, end - part.tail : end] = known[..., old:]
            self._where = where
        return self._where, self._ahead_of


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
