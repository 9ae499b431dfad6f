"""What an allocator is asked for: a budget in bytes, and what a layer with a given cap costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from moend.budget import Arch, Storage, eq1_bytes, peak_layer_bytes


@dataclass(frozen=True)
class CostModel:
    """total bytes for all layers; reference: prompt and output together, of which up to `new` arrive after compression.

    exact: no sample is longer than `reference`, so that a layer with such a cap never evicts. least: the smallest cap.
    storage(cap, k_bits, v_bits) says how a layer is stored; reserve(cap) how many entries an eviction leaves free.
    """

    arch: Arch
    reference: int
    exact: bool
    least: int
    new: int
    total: int
    cost: Literal["resident", "eq1"]
    storage: Callable[[int, int, int], Storage]
    reserve: Callable[[int], int]
    evicts: bool = False

    @property
    def top(self) -> int:
        """The most entries that a layer can use."""
        return self.reference - self.new if self.exact and not self.evicts else self.reference

    @property
    def of_one_head(self) -> CostModel:
        """The same for single KV heads: `layer_cost` is then what one head costs."""
        return replace(self, arch=replace(self.arch, kv_heads=1))

    def layer_cost(self, cap: int, k_bits: int, v_bits: int) -> int:
        """Bytes of one layer with this cap: eq. (1), or the most it holds between compression and cap."""
        heads, dim = self.arch.kv_heads, self.arch.head_dim
        if self.cost == "eq1":
            return eq1_bytes(cap, heads, dim, k_bits, v_bits)
        storage = self.storage(cap, k_bits, v_bits)
        if self.exact and cap >= self.reference:  # never evicts: no positions, and it grows by all that is new
            return peak_layer_bytes(self.reference, min(self.new, self.reference - 1), storage.whole, heads, dim)
        return peak_layer_bytes(cap, self.reserve(cap), storage, heads, dim, new=self.new if storage.scales else None)
