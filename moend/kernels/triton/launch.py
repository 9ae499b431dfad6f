"""Flash-decoding over packed K and V as a Triton kernel: one new token per sequence, strands of unequal length.

Each program takes SPLIT slots of one strand, turns BLOCK of them into numbers in registers and keeps a running softmax
(Dao et al. 2023, flash-decoding): partial outputs sum_t exp(l_t - m) v_t with m = max l_t and sum_t exp(l_t - m). A
second kernel puts the parts of a strand together: sum_i exp(m_i - M) acc_i / sum_i exp(m_i - M) s_i. Codes are read
from memory once, dense keys and values never exist there. Programs beyond a strand's own length end at once.

Needs triton, which comes with torch's CUDA builds; `available` says why it cannot be used. On a CPU it runs only in
Triton's interpreter (TRITON_INTERPRET=1), for tests.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moend.cache.packed_store import PackedStore

SPLIT = 512  # slots of one strand that one program takes
BLOCK = 64  # of them in registers at a time


CPU = False  # whether tensors on a CPU take it as well: only tests do, the interpreter is slow


@functools.cache
def available(device: torch.device) -> str | None:
    """Why the kernel cannot run there, or None where it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type != "cuda" and not (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"triton does not run on {device.type}"
    return None


def usable(device: torch.device) -> bool:
    """Whether steps on this device take the kernel."""
    return (device.type == "cuda" or CPU) and available(device) is None


@dataclass(frozen=True)
class Side:
    """One side of some strands as the kernel reads it: entries (s, M, ...), scales, and what they mean."""

    x: Tensor
    step: Tensor
    zero: Tensor
    bits: int
    group: int

    @classmethod
    def of(cls, bank: PackedStore) -> Side:
        """A bank's tensors."""
        return cls(bank.x, bank.step, bank.zero, bank.bits, bank.group) if bank.bits < 16 else cls.plain(bank.x)

    @classmethod
    def plain(cls, x: Tensor) -> Side:
        """16-bit entries (s, M, d), whole or a slice of columns."""
        return cls(x, x, x, 16, 1)


@dataclass(frozen=True)
class Run:
    """Strands `at` whose old entries lie in rows `k_rows`, `v_rows` of two sides, in their first `lengths` slots."""

    k: Side
    v: Side
    at: Tensor
    k_rows: Tensor
    v_rows: Tensor
    lengths: Tensor
    longest: int
    hidden: Tensor  # (S, >= longest) bool of all strands: what must not be seen

    @property
    def splits(self) -> int:
        """Programs per strand."""
        return -(-self.longest // SPLIT)


def decode(query: Tensor, runs: Sequence[Run]) -> Tensor:
    """Scaled queries (S, G, d) over what all runs hold: (S, G, d); every strand needs one visible entry."""
    strands, rows, dim = query.shape
    query = query.contiguous()
    splits = sum(r.splits for r in runs)
    acc = query.new_empty(strands, splits, rows, dim, dtype=torch.float32)
    top = query.new_full((strands, splits, rows), -torch.inf, dtype=torch.float32)
    total = torch.empty_like(top)
    out = torch.empty_like(query)
    partial, combine = _kernels()
    r_pad, d_pad = max(_power(rows), 16), max(_power(dim), 16)
    first = 0
    for run in runs:
        if run.longest and len(run.at):
            k, v = run.k, run.v
            partial[(len(run.at), run.splits)](
                query, k.x, k.step, k.zero, v.x, v.step, v.zero,
                run.at, run.k_rows, run.v_rows, run.lengths, run.hidden, acc, top, total,
                k.x.stride(0), k.x.stride(1), k.step.stride(0), k.step.stride(1),
                v.x.stride(0), v.x.stride(1), v.step.stride(0), v.step.stride(1),
                run.hidden.stride(0), first, splits, rows, dim,
                K_BITS=k.bits, K_GROUP=k.group, V_BITS=v.bits, V_GROUP=v.group,
                R=r_pad, D=d_pad, SPLIT=SPLIT, BLOCK=BLOCK,
            )  # fmt: skip
        first += run.splits
    combine[(strands,)](acc, top, total, out, splits, rows, dim, R=r_pad, D=d_pad)
    return out


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


@functools.cache
def _kernels() -> tuple[Any, Any]:
    """The two kernels; triton is imported only where they are used."""
    from moend.kernels.triton import kernels as triton_kernels

    return triton_kernels.partial, triton_kernels.combine
