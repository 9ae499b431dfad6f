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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from moend.budget import Storage, v_group
from moend.cache.decode import groups
from moend.cache.decode.ledger import Ledger
from moend.cache.layer_kv import Chooser, LayerKV, Schedule
from moend.cache.packed_store import PackedStore
from moend.cache.packing import Packed, quantise_k, quantise_v
from moend.kernels import Entries, Held

SPARE = 32  # free columns of a new tail
PADDING = 2**15  # elements a row may be padded by before strands of its kind get a bank of their own
NEVER = 2**62


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
    span: int = 0  # columns up to the cursor among which its residual window lies, where it evicts and packs

    def touch(self, clock: int) -> Part:
        """Bring the counters up to `clock`."""
        passed, self.clock = clock - self.clock, clock
        self.n, self.tail, self.seen, self.steps = (x + passed for x in (self.n, self.tail, self.seen, self.steps))
        self.span += passed
        return self

    @property
    def flat(self) -> bool:
        """Whether it evicts what it has packed (`moend.cache.decode.groups`)."""
        return self.storage.scales > 0

    @property
    def columns(self) -> int:
        """Columns up to the cursor that may hold its residual window."""
        return self.span if self.flat else self.tail

    def bytes_of(self, n: int, tail: int, dim: int, size: int) -> tuple[int, int]:
        """Bytes of n entries per head, `tail` of them at 16 bit, and of one more of these; scales and such are extra.

        size: bytes of a number at 16 bit.
        """
        st, number = self.storage, dim * size
        k = dim * st.k_bits // 8 if st.k_bits < 16 else number
        v = dim * st.v_bits // 8 + 4 * dim // v_group(dim, st.channels) if st.v_bits < 16 else number
        beside = {"none": 0, "shared": 4, "per_head": 4 * self.heads}[st.positions] + 4 * self.heads * self.summed
        entries = self.heads * ((n - tail) * (k + v) + tail * 2 * number)
        return entries + n * beside, self.heads * 2 * number + beside

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
    if row.sizes is not None:
        return 0, groups.lay_out(row.sizes.long(), groups.block_of(row.storage.k_bits))[0].shape[1]
    old = row.n - row.tail if row.storage.quantised else row.n
    if not row.k_packed:
        return old, old
    first = row.k_packed[0].codes.shape[-2]
    return first, -(-first // group) * group + sum(-(-p.codes.shape[-2] // group) * group for p in row.k_packed[1:])


Kind = tuple[int, int, int]


def _kind(storage: Storage, side: str, dim: int) -> Kind:
    """(bits, group, scales per head where they are so many) of the bank that one side goes to."""
    if side == "v":
        return storage.v_bits, v_group(dim, storage.channels), 0
    if storage.k_bits == 16:
        return 16, 1, 0
    return storage.k_bits, groups.BLOCK if storage.scales else storage.group, storage.scales


def _piece(row: LayerKV, side: str, slots: int) -> Packed | Tensor | None:
    """One side of a row's older entries where they fill `slots` in one piece: a bank of their own needs no copy."""
    bits = row.storage.k_bits if side == "k" else row.storage.v_bits
    if row.sizes is not None:
        return None
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


def _layout(rows: Sequence[tuple[int, int, Storage]], side: str, dim: int) -> list[tuple[Kind, list[int]]]:
    """Banks of one side as (kind, indices of rows); a row here is (heads, slots, storage)."""
    kinds: dict[Kind, list[int]] = {}
    for i, (_, _, storage) in enumerate(rows):
        kinds.setdefault(_kind(storage, side, dim), []).append(i)
    return [
        (kind, sorted(members[j] for j in bucket))
        for kind, members in kinds.items()
        for bucket in buckets([rows[i][1] for i in members], PADDING // (dim * max(rows[i][0] for i in members)))
    ]


def _columns(rows: Sequence[LayerKV]) -> int:
    """Where the cursor of a new tail stands: room for every tail there is."""
    return max([r.tail for r in rows if r.storage.quantised], default=0)


def allocation(rows: Sequence[tuple[LayerKV, ...]]) -> int:
    """Bytes that a `Layout` of these rows (see there) will allocate when it is made."""
    flat = [r for parts in rows for r in parts]
    if not flat:
        return 0
    dim, size = flat[0].k_tail.shape[-1], flat[0].dtype.itemsize
    shapes = [(r.heads, _first(r)[1], r.storage) for r in flat]
    strands = sum(r.heads for r in flat)
    total, longest = 0, 0
    for side in ("k", "v"):
        for (bits, group, own), members in _layout(shapes, side, dim):
            heads, slots = sum(shapes[i][0] for i in members), max(shapes[i][1] for i in members)
            longest = max(longest, slots)
            if bits == 16:
                total += heads * slots * dim * size
            else:
                scales = (own or slots // group) * dim if side == "k" else slots * (dim // group)
                total += heads * (slots // group * 4 + dim) if own else 0  # whose scale blocks have, and the archive's
                total += heads * (slots * dim * bits // 8 + scales * 4)
    columns = _columns(flat) + SPARE
    beside = 5 if any(r.accumulated is not None for r in flat) else 1  # the mask, and the accumulated attention
    positions = sum(r.positions.nbytes for r in flat if r.positions is not None and r.sizes is None)
    if any(r.sizes is not None for r in flat):
        beside += 4  # the position of each slot and column
    most = max((r.queries.shape[1] * r.queries.shape[2] for r in flat if r.queries is not None), default=0)
    total += strands * most * dim * size
    return total + 2 * strands * columns * dim * size + strands * (longest + columns) * beside + positions


class Layout:
    """Rows of one layer: for each sequence its LayerKV, or the rows of its heads where these hold different numbers."""

    def __init__(self, rows: Sequence[tuple[LayerKV, ...]]):
        flat = [r for parts in rows for r in parts]
        first = flat[0].k_tail
        if any(r.dtype != first.dtype for r in flat):
            raise ValueError(f"rows of a batch are stored alike, got {sorted({str(r.dtype) for r in flat})}")
        self.heads = sum(r.heads for r in rows[0])
        self.dim, self.sequences = first.shape[-1], len(rows)
        self.clock = 0  # tokens taken in
        self.parts: list[Part] = []
        for i, parts in enumerate(rows):
            at = i * self.heads
            for row in parts:
                self.parts.append(self._part(row, i, at))
                at += row.heads
        self.ledger = Ledger(len(rows))
        for part, row in zip(self.parts, flat, strict=True):
            self.ledger.base[part.sequence] += row.bytes
            self.ledger.per_token[part.sequence] += row.bytes_per_token
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
        self.where: Tensor | None = None  # (S, slots + columns) int32: positions, right where part.flat
        if any(p.flat for p in self.parts):
            self.where = torch.zeros(self.hidden.shape, dtype=torch.int32, device=first.device)
        self.queries: Tensor | None = None  # (S, G, w, d): the last w queries, right-aligned, where any part asks
        self.every = torch.arange(total)
        for part, row in zip(self.parts, flat, strict=True):
            self.lay(part, row)
            if row.queries is not None:
                if self.queries is None:
                    wide = max(r.queries.shape[2] for r in flat if r.queries is not None)
                    self.queries = first.new_zeros(total, row.queries.shape[1], wide, self.dim)
                self.queries[part.strands, :, self.queries.shape[2] - part.asked :] = row.queries
        self.look_ahead()

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
        for number, ((bits, group, scales), members) in enumerate(layout):
            strands: list[int] = []
            for i in members:
                part = self.parts[i]
                setattr(part, side, (number, len(strands)))
                strands += range(part.at, part.at + part.heads)
            slots, per = max(self.parts[i].slots for i in members), "channel" if side == "k" else "token"
            piece = _piece(rows[members[0]], side, slots) if len(members) == 1 else None
            if piece is None:
                banks.append(PackedStore(strands, slots, bits, group, per, like, self.dim, scales))
            else:
                banks.append(PackedStore.of(strands, piece, bits, group, per, self.dim))
        return banks

    def lay(self, part: Part, row: LayerKV) -> None:
        """Lay a row's entries down where its part says; `first` and `slots` are set, and there is room for them."""
        if part.flat:
            groups.lay(self, part, row)
            return
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
        held = [*(p.positions for p in self.parts), self._where, self.where]
        banks = sum(b.nbytes for b in (*self.k_banks, *self.v_banks))
        return self.tail_bytes + sum(t.nbytes for t in held if t is not None) + banks

    @property
    def tail_bytes(self) -> int:
        """Bytes of the tail, the mask, the accumulated attention and the queries."""
        own = self.k_tail, self.v_tail, self.hidden, self.accumulated, self.queries
        return sum(t.nbytes for t in own if t is not None)

    @property
    def longest(self) -> int:
        """Tokens seen by the longest sequence."""
        return self.ahead + self.clock

    def count(self, sequence: int) -> list[int]:
        """Entries of each KV head."""
        return [p.touch(self.clock).n for p in self.parts if p.sequence == sequence for _ in range(p.heads)]

    def rows(self) -> list[tuple[LayerKV, ...]]:
        """What is held, as rows at rest."""
        made: list[list[LayerKV]] = [[] for _ in range(self.sequences)]
        for part in self.parts:
            made[part.sequence].append(self.row(part.touch(self.clock)))
        return [tuple(x) for x in made]

    def positions_of(self, part: Part) -> Tensor | None:
        """Original positions of all entries: those laid down, then one after the other."""
        known = part.positions
        if known is None:
            return None
        new = part.n - known.shape[-1]
        after = torch.arange(part.seen - new, part.seen, dtype=torch.int32, device=known.device)
        return torch.cat([known, after.expand(*known.shape[:-1], new)], dim=-1)

    def stores(self, part: Part) -> tuple[tuple[PackedStore, int], tuple[PackedStore, int]]:
        """The stores of a part's older keys and values, and its first strand in each."""
        return (self.k_banks[part.k[0]], part.k[1]), (self.v_banks[part.v[0]], part.v[1])

    def row(self, part: Part) -> LayerKV:
        """What a part holds, at rest."""
        if part.flat:
            return groups.row(self, part)
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
            self.positions_of(part),
            s,
            seen=part.seen,
            schedule=part.schedule,
            choose=part.choose,
            steps=part.steps,
            accumulated=accumulated,
            queries=queries,
        )

    # Other selections of the same sequences

    def pick(self, sequences: Sequence[int]) -> Self:
        """These sequences, in this order, with repetition."""
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
        twin.where = self.where[index] if self.where is not None and any(p.flat for p in twin.parts) else None
        twin.k_banks, twin.v_banks = (self._picked(sources, twin.parts, side) for side in ("k", "v"))
        twin.look_ahead()
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

    # What changes

    def look_ahead(self) -> None:
        """What holds until the next event.

        When a row must evict before a token comes (_full), and when one packs or evicts after it (_due); which slots
        (`_lengths`, each bank's `lengths`, in all `_used`) and columns of the tail (from `_begin` on) hold something;
        whether any of these is hidden.
        """
        self.full_at, self.due_at = NEVER, NEVER
        self.ahead = max(p.seen - p.clock for p in self.parts)
        self.begin = self.cursor
        self.reindexed = [p for p in self.parts if p.schedule.reindex is not None]
        self.lengths = torch.zeros_like(self.every)  # slots of each strand
        for part in self.parts:
            if part.touch(self.clock).full:
                self.full_at = self.clock
            self.due_at = min(self.due_at, self.clock + part.room())
            self.begin = min(self.begin, self.cursor - part.columns)
            self.lengths[part.strands] = part.slots
        for bank in (*self.k_banks, *self.v_banks):
            bank.fill(self.lengths[bank.strands])
        self.used = max(b.used for b in self.k_banks)
        old, new = self.hidden[:, : self.used], self.hidden[:, self.slots + self.begin : self.slots + self.cursor]
        self.old_hidden, self.new_hidden = bool(old.any()), bool(new.any())
        self.known_entries: Held | None = None
        ahead = [p.seen - p.clock for p in self.parts for _ in range(p.heads)]
        self.ahead_of = torch.tensor(ahead, device=self.hidden.device)  # (S,) positions ahead of the clock

    def pack(self, part: Part, count: int) -> None:
        """Move a part's oldest `count` entries from the tail to its banks."""
        if part.flat:
            before = self.bytes_of(part)
            groups.pack(self, part)
            part.tail -= count
            self.ledger.base[part.sequence] += self.bytes_of(part) - before
            self._where = None
            return
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
        self.reserve(part, slot + count)
        self.k_banks[part.k[0]].write(part.k[1], slot, k)
        self.v_banks[part.v[0]].write(part.v[1], slot, v)
        self.hidden[part.strands, slot : slot + count] = False
        self.hidden[part.strands, self.slots + begin : self.slots + begin + count] = True
        if self.accumulated is not None:
            moved = self.accumulated[part.strands, self.slots + begin : self.slots + begin + count]
            self.accumulated[part.strands, slot : slot + count] = moved
            moved.zero_()
        part.slots, part.tail = slot + count, part.tail - count
        self.ledger.base[part.sequence] -= saved
        self._where = None

    def bytes_of(self, part: Part) -> int:
        """Bytes of a part's entries, without scales and queries; of a row that evicts and packs."""
        return part.bytes_of(part.n, part.tail, self.dim, self.k_tail.itemsize)[0]

    def reserve(self, part: Part, slots: int) -> None:
        """Room for `slots` of a part in its banks, and in the mask."""
        banks = self.k_banks[part.k[0]], self.v_banks[part.v[0]]
        for bank in banks:
            bank.reserve(slots)
        if (more := max(b.slots for b in banks) - self.slots) > 0:
            unused = self.hidden.new_ones(self.hidden.shape[0], more)
            self.hidden = torch.cat([self.hidden[:, : self.slots], unused, self.hidden[:, self.slots :]], dim=1)
            for name in ("accumulated", "where"):
                if (x := getattr(self, name)) is not None:
                    pieces = x[:, : self.slots], x.new_zeros(unused.shape), x[:, self.slots :]
                    setattr(self, name, torch.cat(pieces, dim=1))
            self.slots += more

    def shift(self, new: int) -> None:
        """Make `new` free columns: rows that never pack lay their tail down, the others' moves to the left end."""
        for part in self.parts:
            if not part.touch(self.clock).storage.quantised and part.tail:
                self.pack(part, part.tail)
            if part.flat:
                groups.align(self, part)
        keep = max(p.columns for p in self.parts)
        begin, size = self.cursor - keep, self.k_tail.shape[1]
        spare = max(SPARE, new) if size < keep + new else size - keep
        hidden = self.hidden[:, self.slots + begin : self.slots + self.cursor]
        free = hidden.new_zeros(hidden.shape[0], spare)
        self.hidden = torch.cat([self.hidden[:, : self.slots], hidden, free], dim=1)
        for name in ("accumulated", "where"):
            if (x := getattr(self, name)) is not None:
                kept = x[:, self.slots + begin : self.slots + self.cursor]
                setattr(self, name, torch.cat([x[:, : self.slots], kept, x.new_zeros(free.shape)], dim=1))
        for name in ("k_tail", "v_tail"):
            x = getattr(self, name)
            setattr(self, name, torch.cat([x[:, begin : self.cursor], x.new_zeros(x.shape[0], spare, self.dim)], dim=1))
        self.cursor, self._where = keep, None
        self.look_ahead()

    def entries(self) -> Held:
        """What is held, as kernels read it; kept until rows pack or evict."""
        if self.known_entries is None:
            keys, values = ([b.entries() for b in banks if b.used] for banks in (self.k_banks, self.v_banks))
            newest = []
            for side, x in (("k", self.k_tail), ("v", self.v_tail)):
                none, ends = x.new_empty(0), torch.full_like(self.every, self.cursor)
                newest.append(Entries(side, x, none, none, 16, 1, range(len(x)), ends, self.begin, self.used))
            gap, some = self.slots + self.begin - self.used, (self.old_hidden, self.new_hidden)
            k, v = newest
            self.known_entries = Held(keys, values, (k, v), self.hidden, self.lengths, self.used, gap, some)
        for entries in self.known_entries.newest:
            entries.extend(self.cursor)
        return self.known_entries

    def __getstate__(self) -> dict[str, Any]:
        """What a copy starts from: its tensors lie elsewhere."""
        return self.__dict__ | {"known_entries": None}

    def places(self) -> tuple[Tensor, Tensor]:
        """True positions (S, slots + columns) of what lies where, and (S,) how far each strand is ahead of the clock.

        Kept until rows pack or evict: a column to come holds the position to come.
        """
        if self._where is None:
            device = self.hidden.device
            columns = torch.arange(self.k_tail.shape[1], device=device) + (self.clock - self.cursor)
            where = torch.zeros(self.hidden.shape, dtype=torch.int64, device=device)
            where[:, self.slots :] = self.ahead_of[:, None] + columns
            for part in self.parts:
                part.touch(self.clock)
                if part.flat and self.where is not None:
                    end = self.slots + self.cursor
                    where[part.strands, :end] = self.where[part.strands, :end]
                    continue
                known = self.positions_of(part)
                known = torch.arange(part.n, device=device) if known is None else known.long()
                old, end, mine = part.n - part.tail, self.slots + self.cursor, where[part.strands]
                mine[:, : part.first] = known[..., : part.first]
                if old > part.first:
                    mine[:, part.slots - (old - part.first) : part.slots] = known[..., part.first : old]
                mine[:, end - part.tail : end] = known[..., old:]
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
