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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moend.kernels.entries import Entries, Held

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
class Run:
    """KV heads `at` of the query whose entries lie in rows `k_rows` and `v_rows` of two stores: one launch."""

    k: Entries
    v: Entries
    at: Tensor  # int32 (r,)
    k_rows: Tensor  # int32 (r,)
    v_rows: Tensor  # int32 (r,)
    lengths: Tensor  # int32 (r,): slots in use from `begin` on

    @property
    def splits(self) -> int:
        """Programs per KV head."""
        return -(-(self.k.end - self.k.begin) // SPLIT)


def runs(held: Held) -> list[Run]:
    """The launches for all that is held; those for older entries are remembered with it."""
    if "triton" not in held.memo:
        held.memo["triton"] = [
            _run(k, v) for k in held.keys for v in held.values if not set(k.heads).isdisjoint(v.heads)
        ]
    if "newest" not in held.memo:
        held.memo["newest"] = _run(*held.newest)
    older, newest = held.memo["triton"], held.memo["newest"]
    newest.lengths.fill_(newest.k.end - newest.k.begin)
    return [*older, newest]


def _run(k: Entries, v: Entries) -> Run:
    places = {head: i for i, head in enumerate(v.heads)}
    index = [
        (head, i, places[head], min(int(k.lengths[i]), int(v.lengths[places[head]])) - k.begin)
        for i, head in enumerate(k.heads)
        if head in places
    ]
    return Run(k, v, *torch.tensor(index, dtype=torch.int32).T.contiguous().to(k.x.device))


def decode(query: Tensor, held: Held) -> Tensor:
    """Scaled queries (S, G, d) of one new token over all that is held: (S, G, d)."""
    launches = runs(held)
    heads, rows, dim = query.shape
    query = query.contiguous()
    splits = sum(r.splits for r in launches)
    acc = query.new_empty(heads, splits, rows, dim, dtype=torch.float32)
    top = query.new_full((heads, splits, rows), -torch.inf, dtype=torch.float32)
    total = torch.empty_like(top)
    out = torch.empty_like(query)
    partial, combine = _kernels()
    r_pad, d_pad = max(_power(rows), 16), max(_power(dim), 16)
    first = 0
    for run in launches:
        k, v = run.k, run.v
        k_scale, v_scale = (e.step if e.quantised else e.x for e in (k, v))
        hidden = held.hidden if k.begin == k.to == 0 else held.hidden[:, k.to + held.gap :]
        partial[(len(run.at), run.splits)](
            query, k.x[:, k.begin :], k_scale, k.zero if k.quantised else k_scale,
            v.x[:, v.begin :], v_scale, v.zero if v.quantised else v_scale,
            run.at, run.k_rows, run.v_rows, run.lengths, hidden, acc, top, total,
            k.x.stride(0), k.x.stride(1), k_scale.stride(0), k_scale.stride(1),
            v.x.stride(0), v.x.stride(1), v_scale.stride(0), v_scale.stride(1),
            hidden.stride(0), first, splits, rows, dim,
            K_BITS=k.bits, K_GROUP=k.group, V_BITS=v.bits, V_GROUP=v.group,
            R=r_pad, D=d_pad, SPLIT=SPLIT, BLOCK=BLOCK,
        )  # fmt: skip
        first += run.splits
    combine[(heads,)](acc, top, total, out, splits, rows, dim, R=r_pad, D=d_pad)
    return out


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


@functools.cache
def _kernels() -> tuple[Any, Any]:
    """The two kernels; triton is imported only where they are used."""
    from moend.kernels.triton import kernels as triton_kernels

    return triton_kernels.partial, triton_kernels.combine
