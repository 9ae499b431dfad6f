"""One `LayerKV` while it decodes: how much it holds now, and when it next packs or evicts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moend.cache.layer_kv import Chooser, Schedule
from moend.layer_bytes import Storage, v_group

NEVER = 2**62  # a token that no layer reaches


@dataclass
class Part:
    """The entries of one sequence that a few neighbouring KV heads hold: all KV heads, or one where heads differ.

    A layer numbers the KV heads of all its sequences through, S in all. A part owns the KV heads at ... at + heads.
    n, window_len, tokens_seen, steps and span grow with every token. They hold as of `clock`; `touch` brings them up
    to date.
    """

    sequence: int  # the sequence it belongs to
    at: int  # its first KV head among the S of the layer
    heads: int  # KV heads
    storage: Storage  # how entries are held
    schedule: Schedule  # when it evicts
    choose: Chooser | None  # what picks the entries to keep (None: it never evicts)
    n: int  # entries per KV head
    window_len: int  # entries per KV head in the residual window, at 16 bit; if `flat`, the most that a head may have
    tokens_seen: int  # tokens of the sequence so far, evicted ones included
    steps: int  # tokens since the last eviction
    clock: int  # the layer's token count for which the counters hold
    positions: Tensor | None  # (m,) or (H, m) int32, of the m entries laid down; later ones follow on. None: 0 ... n-1
    first: int  # entries of the first run in its stores: packed K leaves a gap between that and the next group
    slots: int  # slots in use in its stores, per KV head
    summed: bool = False  # whether it sums the attention that its entries receive (`LayerKV.accumulated`)
    asked: int = 0  # how many of its last queries are kept (`LayerKV.queries`)
    k: tuple[int, int] = (0, 0)  # where its keys lie: (index of the store, its first KV head in that store)
    v: tuple[int, int] = (0, 0)  # the same of its values
    span: int = 0  # columns before the cursor in which its residual window lies, gaps included; only if `flat`

    def touch(self, clock: int) -> Part:
        """Bring the counters up to `clock`."""
        passed, self.clock = clock - self.clock, clock
        self.n, self.window_len, self.steps = self.n + passed, self.window_len + passed, self.steps + passed
        self.tokens_seen, self.span = self.tokens_seen + passed, self.span + passed
        return self

    @property
    def flat(self) -> bool:
        """Whether it evicts what it has packed (`moend.cache.decode.groups`)."""
        return self.storage.scales > 0

    @property
    def columns(self) -> int:
        """Columns before the cursor that may hold its residual window."""
        return self.span if self.flat else self.window_len

    @property
    def kv_heads(self) -> slice:
        """Its KV heads among the S of the layer."""
        return slice(self.at, self.at + self.heads)

    @property
    def full(self) -> bool:
        """Whether it must evict before the next token (strict schedule)."""
        s = self.schedule
        return s.cap is not None and s.kind == "strict" and self.n >= s.cap > max(s.cap - max(s.reserve, 1), 1)

    def bytes_of(self, n: int, window_len: int, dim: int, size: int) -> tuple[int, int]:
        """Bytes of n entries per KV head with `window_len` of them at 16 bit, and bytes of one more at 16 bit.

        size: bytes of a 16-bit number. Not counted: scales of K, group sizes, queries.
        """
        st, number = self.storage, dim * size
        k = dim * st.k_bits // 8 if st.k_bits < 16 else number
        v = dim * st.v_bits // 8 + 4 * dim // v_group(dim, st.channels) if st.v_bits < 16 else number
        beside = {"none": 0, "shared": 4, "per_head": 4 * self.heads}[st.positions] + 4 * self.heads * self.summed
        entries = self.heads * ((n - window_len) * (k + v) + window_len * 2 * number)
        return entries + n * beside, self.heads * 2 * number + beside

    def room(self) -> int:
        """Tokens that it can take in before it packs or evicts, at least 1."""
        s, st, rooms = self.schedule, self.storage, [NEVER]
        if s.cap is not None and s.kind == "periodic":
            rooms.append(s.beta - self.steps)
        elif s.cap is not None:
            rooms.append(s.cap - self.n if self.n < s.cap else max(s.reserve, 1))
        if st.quantised:
            rooms.append(st.window + st.group - self.window_len)
        return max(min(rooms), 1)
