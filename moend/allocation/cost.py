"""What an allocator is asked for: a budget in bytes, and what a layer with a given cap costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from moend.budget import Arch, eq1_bytes
from moend.layer_bytes import Storage, layer_bytes, peak_layer_bytes, sliding, sliding_bytes, visible


@dataclass(frozen=True)
class CostModel:
    """Bytes of a layer with a given cap, at the moment that the budget is compared at."""

    arch: Arch  # layers and heads of the model
    reference: int  # tokens of prompt and output together
    exact: bool  # whether no sample is longer than `reference`, so that a layer with such a cap never evicts
    least: int  # the smallest cap
    new: int  # tokens of `reference` that arrive after compression
    total: int  # bytes for all layers
    cost: Literal["resident", "eq1"]  # bytes held, or codes alone by eq. (1)
    storage: Callable[[int, int, int], Storage]  # (cap, K bits, V bits) -> how a layer is stored
    reserve: Callable[[int], int]  # cap -> entries that an eviction leaves free (`at` peak)
    evicts: bool = False  # whether layers evict while decoding; if not, they grow by what is new
    at: Literal["prompt", "peak"] = "peak"  # the budget holds after the prompt, or at every step

    @property
    def top(self) -> int:
        """The most entries that a layer can use."""
        return max(self.reference - self.new, 1) if self.exact and not self.evicts else self.reference

    @property
    def of_one_head(self) -> CostModel:
        """The same for single KV heads: `layer_cost` is then what one head costs."""
        return replace(self, arch=replace(self.arch, kv_heads=1))

    def layer_cost(self, cap: int, k_bits: int, v_bits: int) -> int:
        """Bytes of one layer with this cap: eq. (1), or what it holds after the prompt, or the most until the end.

        Where layers slide, the most that any of them holds.
        """
        most = self._growing(cap, k_bits, v_bits)
        if self.cost == "eq1" or self.evicts or not self.arch.windows:
            return most
        slide = (w for w in set(self.arch.windows) if w is not None and min(cap, w - 1) + self.new > sliding(w)[0])
        return max([most, *(self._sliding(min(cap, w - 1), w, self.storage(cap, k_bits, v_bits)) for w in slide)])

    def window_cost(self, window: int, k_bits: int, v_bits: int) -> int:
        """Bytes of a layer that holds all of its window, which is less than `reference`."""
        entries = self.reference - self.new if self.exact else window
        return self._sliding(entries, window, self.storage(self.reference, k_bits, v_bits).whole)

    def _sliding(self, entries: int, window: int, storage: Storage) -> int:
        after = replace(storage, positions="shared" if storage.positions == "none" else storage.positions)
        n, heads, dim = visible(max(entries, 1), window), self.arch.kv_heads, self.arch.head_dim
        if n + self.new <= sliding(window)[0]:  # it need not let go of anything
            most = peak_layer_bytes(n + self.new, self.new, after, heads, dim)
            return int(layer_bytes(n, after, heads, dim)) if self.at == "prompt" else most
        return sliding_bytes(n, self.new, window, after, heads, dim, after)[self.at == "peak"]

    def _growing(self, cap: int, k_bits: int, v_bits: int) -> int:
        heads, dim = self.arch.kv_heads, self.arch.head_dim
        if self.cost == "eq1":
            return eq1_bytes(cap, heads, dim, k_bits, v_bits)
        storage = self.storage(cap, k_bits, v_bits)
        whole = self.exact and cap >= self.top  # never evicts: no positions, nothing kept for choosing
        if whole:
            storage = storage.whole
        held = min(cap, max(self.reference - self.new, 1)) if whole else cap  # after the prompt
        if self.at == "prompt":
            return int(layer_bytes(held, storage, heads, dim))
        if whole or not self.evicts:
            return peak_layer_bytes(held + self.new, self.new, storage, heads, dim)
        reserve, prompt = self.reserve(cap), self.reference - self.new
        start = min(cap - reserve, max(prompt, 1)) if self.exact else cap - reserve
        return peak_layer_bytes(
            cap, reserve, storage, heads, dim, start=start, new=self.new if storage.scales else None
        )
