"""Bytes that the sequences of a layer hold after every token, without any work per token."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Ledger:
    """Between two events (an eviction, a packing) each sequence's bytes grow by a constant with every token.

    A ledger therefore keeps (base, per_token) of each sequence: after token `clock` it holds base + per_token x clock.
    """

    def __init__(self, sequences: int):
        self.base = np.zeros(sequences, dtype=np.int64)  # bytes of each sequence at token 0 of the present line
        self.per_token = np.zeros(sequences, dtype=np.int64)  # bytes that one more token adds
        self._area = np.zeros(sequences, dtype=np.int64)  # bytes summed over the tokens before the last event
        self._counted = 0  # how many tokens these are
        self._spans: list[tuple[int, Ints, Ints]] = []  # of the last feed: first token, base and per_token from there

    def held(self, clock: int) -> Ints:
        """Bytes of each sequence after token `clock`."""
        return self.base + self.per_token * clock

    def trace(self, clock: int) -> Ints:
        """(tokens of the last feed, sequences): bytes held after each token."""
        ends = [begin for begin, _, _ in self._spans[1:]] + [clock + 1]
        spans = [
            base + rate * np.arange(begin, end)[:, None]
            for (begin, base, rate), end in zip(self._spans, ends, strict=True)
        ]
        return np.concatenate([np.zeros((0, len(self.base)), dtype=np.int64), *spans])

    def area(self, clock: int) -> Ints:
        """The sum of the bytes held after each token up to `clock`, by sequence."""
        tokens = clock - self._counted
        return self._area + self.base * tokens + self.per_token * (tokens * (self._counted + 1 + clock) // 2)

    def begin_feed(self, clock: int) -> None:
        """A feed starts after token `clock`: its trace starts anew."""
        self._spans = [(clock + 1, self.base, self.per_token)]

    def change_from(self, token: int) -> None:
        """What is held may change from `token` on, counted from 1."""
        self._area = self.area(token - 1)
        self._counted, self.base, self.per_token = token - 1, self.base.copy(), self.per_token.copy()
        self._spans.append((token, self.base, self.per_token))

    def state(self) -> dict[str, Any]:
        """Its numbers, as JSON can hold them; the trace of the last feed is left out."""
        lists = {name: getattr(self, name).tolist() for name in ("base", "per_token", "_area")}
        return {**lists, "counted": self._counted}

    def restore(self, told: Mapping[str, Any]) -> None:
        """Bring it to a state."""
        for name in ("base", "per_token", "_area"):
            setattr(self, name, np.array(told[name], dtype=np.int64))
        self._counted, self._spans = int(told["counted"]), []

    def pick(self, order: Sequence[int]) -> Ledger:
        """The ledger of these sequences, in this order, with repetition."""
        twin, index = copy.copy(self), list(order)
        twin.base, twin.per_token, twin._area = self.base[index], self.per_token[index], self._area[index]
        twin._spans = [(begin, base[index], rate[index]) for begin, base, rate in self._spans]
        return twin
