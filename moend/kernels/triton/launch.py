"""Flash-decoding over packed K and V as Triton kernels: one new token per sequence, KV heads of unequal length.

Each program takes SPLIT slots of one KV head, multiplies a block of codes at a time and keeps a running softmax (Dao et
al. 2023, flash-decoding): partial outputs sum_t exp(l_t - m) v_t with m = max l_t, and sum_t exp(l_t - m). A second
kernel puts the parts of a KV head together: sum_i exp(m_i - M) acc_i / sum_i exp(m_i - M) s_i.

Codes are read once and multiplied as 16-bit numbers on tensor cores, with sums in float32. A block lies inside one
scale group of K, so K's scale is one vector: it is folded into the query, and its zero point becomes a bias q . zero in
float32. V's scale belongs to a slot and is folded into the probabilities. Both factors are divided by their largest
value first, so that float16 loses no more than its 11 digits. Logits are float32.

Needs triton, which comes with torch's CUDA builds; `available` and `unreadable` say why a call cannot run. On a CPU the
kernels run in Triton's interpreter only (TRITON_INTERPRET=1), for tests.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moend.kernels.entries import Entries, Held

SPLIT = 512  # slots of one KV head that one program takes
LEAST = 16  # slots that a tensor core instruction takes at least
PIECES = 4  # parts of V's channels that a program sums at most

CPU = False  # whether tensors on a CPU take the kernels as well: only tests do, the interpreter is slow


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def available(device: torch.device) -> str | None:
    """Why the kernels cannot run there, or None where they can."""
    if not _installed():
        return "triton is not installed"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return None if major >= 8 else f"compute capability {major}.{minor} is below 8.0"
    if device.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1":
        return f"triton does not run on {device.type}"
    return None if CPU else "triton's interpreter is for tests"


def unreadable(held: Held) -> str | None:
    """Why the kernels cannot read these entries, or None where they can."""
    if "unreadable" not in held.memo:
        held.memo["unreadable"] = next(filter(None, map(_unreadable, (*held.keys, *held.values))), None)
    reason: str | None = held.memo["unreadable"]
    return reason


def _unreadable(e: Entries) -> str | None:
    if e.side == "k" and e.quantised and e.group % LEAST:
        return f"K groups of {e.group} tokens are no multiple of {LEAST}"
    if e.side == "v" and _pieces(e)[0] > PIECES:
        return f"V of {e.dim} channels in groups of {e.group} at {e.bits} bits makes more than {PIECES} pieces"
    return None


SHARED = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228}  # KiB of shared memory per multiprocessor, by capability


@dataclass(frozen=True)
class Tile:
    """How a program works."""

    block: int  # slots at a time
    warps: int  # warps of a program
    stages: int  # loads that are under way at once
    registers: int  # per thread at most


def tile(capability: int, dim: int, k_bits: int, k_group: int, v_bits: int) -> Tile:
    """The tile for a compute capability (80, 86, 89, 90, 100): at least two programs fit into a multiprocessor.

    Numbers take two bytes per channel, slot and stage of shared memory; codes take half of that or less, but their
    arithmetic takes registers, of which 168 a thread leave room for three programs of four warps, and 255 for two.
    """
    registers = 168 if dim <= 128 and k_bits > 2 else 255
    if k_bits < 16 or v_bits < 16:
        return Tile(math.gcd(k_group, 32) if k_bits < 16 else 32, 4, 2, registers)
    room = SHARED[max((x for x in SHARED if x <= capability), default=80)] * 1024 // 3
    return Tile(64 if 2 * 2 * 2 * dim * 64 <= room else 32, 4, 2, registers)


@dataclass(frozen=True)
class Run:
    """KV heads `at` of the query whose entries lie in rows `k_rows` and `v_rows` of two stores: one launch."""

    k: Entries  # keys
    v: Entries  # values
    at: Tensor  # int32 (r,)
    k_rows: Tensor  # int32 (r,)
    v_rows: Tensor  # int32 (r,)
    lengths: Tensor  # int32 (r,): slots in use
    meta: dict[str, Any]  # the kernel's constants

    @property
    def splits(self) -> int:
        """Programs per KV head."""
        return -(-(self.k.end - self.k.begin) // SPLIT)


@dataclass(frozen=True)
class Plan:
    """What a layer's launches are, for as long as its `Held` lives."""

    older: list[Run]  # launches over older entries
    newest: Run  # the launch over the residual window
    splits: Tensor  # int32 (S,): programs of older entries that each KV head fills


def plan(held: Held, rows: int) -> Plan:
    """The launches for all that is held, made once."""
    if "triton" not in held.memo:
        device, capability = held.hidden.device, _capability(held.hidden.device)
        older = [
            _run(k, v, rows, capability) for k in held.keys for v in held.values if not set(k.heads).isdisjoint(v.heads)
        ]
        splits = torch.zeros(len(held.hidden), dtype=torch.int32, device=device)
        for run in older:
            splits[run.at.long()] = -(-run.lengths // SPLIT)
        held.memo["triton"] = Plan(older, _run(*held.newest, rows, capability), splits)
    made: Plan = held.memo["triton"]
    return made


def _capability(device: torch.device) -> int:
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _run(k: Entries, v: Entries, rows: int, capability: int) -> Run:
    places = {head: i for i, head in enumerate(v.heads)}
    index = [
        (head, i, places[head], min(int(k.lengths[i]), int(v.lengths[places[head]])))
        for i, head in enumerate(k.heads)
        if head in places
    ]
    at, k_rows, v_rows, lengths = torch.tensor(index, dtype=torch.int32).T.contiguous().to(k.x.device)
    return Run(k, v, at, k_rows, v_rows, lengths, constants(k, v, rows, capability))


def constants(k: Entries, v: Entries, rows: int, capability: int) -> dict[str, Any]:
    """The kernel's constants and launch options for two sides of entries."""
    chosen = tile(capability, k.dim, k.bits, k.group, v.bits)
    _, piece = _pieces(v)
    return {
        "K_BITS": k.bits, "K_GROUP": k.group, "K_W": k.x.shape[2], "K_PAD": _power(k.x.shape[2]),
        "MOVED": k.scale_of is not None, "V_BITS": v.bits, "V_GROUP": v.group, "V_W": v.x.shape[2],
        "V_PIECE": piece, "V_PAD": _power(piece), "R": _power(rows), "BLOCK": chosen.block,
        "num_warps": chosen.warps, "num_stages": chosen.stages, "maxnreg": chosen.registers,
    }  # fmt: skip


def _pieces(v: Entries) -> tuple[int, int]:
    """How many pieces V is summed in, each of one bit field and one scale, and the channels of one."""
    piece = math.gcd(v.x.shape[2], v.group) if v.quantised else v.dim
    return v.dim // piece, piece


def decode(query: Tensor, held: Held) -> Tensor:
    """Scaled queries (S, G, d) of one new token over all that is held: (S, G, d)."""
    heads, rows, dim = query.shape
    query, made = query.contiguous(), plan(held, rows)
    splits = max((run.splits for run in made.older), default=0) + made.newest.splits
    acc, top, total = _workspace(query.device, heads * splits * rows, dim)
    out = torch.empty_like(query)
    partial, combine = _kernels()
    for run in (*made.older, made.newest):
        k, v, newest = run.k, run.v, run is made.newest
        first = splits - run.splits if newest else 0  # a KV head lies in one run of older entries
        k_scales, v_scales = ((e.step, e.zero) if e.quantised else (e.x, e.x) for e in (k, v))
        scale_of = run.at if k.scale_of is None else k.scale_of
        hidden = held.hidden[:, held.used + held.gap :] if newest else held.hidden
        partial[(len(run.at), run.splits)](
            query, k.x[:, k.begin :], *k_scales, scale_of, v.x[:, v.begin :], *v_scales,
            run.at, run.k_rows, run.v_rows, run.lengths, hidden, acc, top, total,
            k.x.stride(0), k.x.stride(1), k_scales[0].stride(0), v.x.stride(0), v.x.stride(1),
            v_scales[0].stride(0), v_scales[0].stride(1), scale_of.stride(0), hidden.stride(0),
            first, splits, rows, dim, k.end - k.begin, EVEN=newest, SPLIT=SPLIT, **run.meta,
        )  # fmt: skip
    combine[(heads,)](
        acc, top, total, made.splits, out, splits, made.newest.splits, rows, dim, R=_power(rows), D=_power(dim)
    )
    return out


_workspaces: dict[tuple[torch.device, int], Tensor] = {}  # by device and stream, whose kernels run one after the other


def _workspace(device: torch.device, parts: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for `parts` partial outputs, maxima and sums in float32; layers share it and write it before they read."""
    stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
    room = _workspaces.get((device, stream))
    if room is None or len(room) < parts * (dim + 2):
        room = _workspaces[device, stream] = torch.empty(parts * (dim + 2), dtype=torch.float32, device=device)
    return room, room[parts * dim :], room[parts * (dim + 1) :]


def _power(n: int) -> int:
    """The power of two above n, 16 at least."""
    return max(1 << (n - 1).bit_length(), LEAST)


@functools.cache
def _kernels() -> tuple[Any, Any]:
    """The two kernels; triton is imported only where they are used."""
    from moend.kernels.triton import kernels as triton_kernels

    return triton_kernels.partial, triton_kernels.combine
