"""Budgets as people type them, the shape of a model's cache, and MoE-nD eq. (1), which counts codes only.

What a layer really holds, with scales, residual window and positions, is in `moend.layer_bytes`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from moend.errors import UserError


@dataclass(frozen=True)
class Arch:
    """The shape of a model's cache. `max_positions` is the longest context the model was made for.

    windows: for each layer the newest positions that a query sees, itself included, or None where it sees all; None
    instead of the tuple: no layer slides. Chunked layers count as layers that grow.
    """

    layers: int
    q_heads: int  # query heads of a layer
    kv_heads: int  # KV heads of a layer
    head_dim: int  # dimensions of a head
    max_positions: int
    windows: tuple[int | None, ...] | None = None

    @property
    def each_window(self) -> tuple[int | None, ...]:
        """The window of each layer, None where it sees all."""
        return self.windows or (None,) * self.layers

    def full_bytes(self, tokens: int) -> int:
        """Bytes at 16 bit, without positions, of `tokens` entries in every layer, or of its window where it slides."""
        entries = sum(tokens if w is None else min(tokens, w) for w in self.each_window)
        return entries * self.kv_heads * self.head_dim * 4


def eq1_bytes(n: int | float, kv_heads: int, head_dim: int, k_bits: int, v_bits: int) -> int:
    """MoE-nD eq. (1) for one layer: n entries, codes only."""
    return round(n * kv_heads * head_dim * (k_bits + v_bits) / 8)


@dataclass(frozen=True)
class Budget:
    """A KV budget as typed: tokens per layer at 16 bit, a share of the sample's own full bytes, or bytes in all."""

    kind: Literal["tokens", "ratio", "bytes"]  # what the number counts: tokens, a share of full bytes, or bytes
    value: float  # tokens, share in (0, 1], or bytes

    _UNITS: ClassVar[dict[str, int]] = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

    @classmethod
    def parse(cls, text: object) -> Budget:
        """Read `512`, `1e9`, `0.1`, `10%` or `64MiB`; anything else is a UserError."""
        allowed = "use tokens per layer (512), a share (10% or 0.1) or bytes (64MiB)"
        raw = str(text).strip()
        number = r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?"
        if isinstance(text, bool) or not (match := re.fullmatch(rf"({number})\s*(%|KiB|MiB|GiB|t|r|B)?", raw)):
            raise UserError(f"budget '{raw}' is not understood: {allowed}")
        value, unit = float(match[1]), match[5]
        if not math.isfinite(value) or value <= 0:
            raise UserError(f"budget '{raw}' must be positive: {allowed}")
        if unit in cls._UNITS or unit == "B":
            size = value * cls._UNITS.get(unit, 1)
            if size < 1:
                raise UserError(f"budget '{raw}' is less than a byte: {allowed}")
            return cls("bytes", float(math.floor(size)))
        if unit == "%" or unit == "r" or (unit is None and value < 1):
            share = value / 100 if unit == "%" else value
            if share > 1:
                raise UserError(f"budget '{raw}' is more than all of the cache: a share is at most 100%")
            return cls("ratio", share)
        if value != int(value):
            raise UserError(f"budget '{raw}' is not a whole number of tokens: {allowed}")
        return cls("tokens", value)

    def __str__(self) -> str:
        """The canonical form that enters a cell's key: 512t, 0.1r or 67108864B."""
        if self.kind == "ratio":
            return f"{self.value:.12g}r"
        return f"{int(self.value)}{'t' if self.kind == 'tokens' else 'B'}"

    def to_bytes(self, arch: Arch, tokens: int) -> int:
        """Bytes for the whole cache of a sample of `tokens` prompt tokens."""
        if self.kind == "bytes":
            return int(self.value)
        if self.kind == "tokens":
            return arch.full_bytes(int(self.value))
        return int(self.value * arch.full_bytes(tokens) + 1e-6)
