"""Attention of a few queries over packed entries on a CPU: one pass over the codes, in loops that Numba compiles.

torch forms an intermediate tensor for each of shift, mask, conversion and product. Here a block of slots becomes
float32 in the CPU's first cache, is multiplied by all queries of its KV head, and is dropped. KV heads are computed one
by one: what decodes beside a KV head changes no bit of its result.

Optional: `pip install 'moend[cpu]'`. Without Numba the torch path runs. Compiling takes some ten seconds the first
time; Numba keeps the result beside this file, or where NUMBA_CACHE_DIR says.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moend.kernels.entries import Entries, Held

ROWS = 32  # with more queries per KV head, torch's products over dense numbers take less time
WORK = 2**16  # products below which a second thread is not worth waking
_KINDS = {torch.bfloat16: 16, torch.float16: 17, torch.float32: 32}


@functools.cache
def installed() -> bool:
    """Whether Numba is there."""
    return importlib.util.find_spec("numba") is not None


def usable(device: torch.device, rows: int) -> bool:
    """Whether attention of `rows` queries per KV head goes this way."""
    return device.type == "cpu" and rows <= ROWS and installed()


def score(query: Tensor, keys: Entries, logits: Tensor) -> None:
    """Write q . k of query (S, R, d) into the columns of logits (S, R, n) that stand for these keys; float32."""
    _product("score", query, keys, logits, query, logits)


def mix(probs: Tensor, values: Entries, out: Tensor) -> None:
    """Add the values weighted by the columns of probs (S, R, n) that stand for them to out (S, R, d); float32."""
    _product("mix", probs, values, out, out, probs)


def softmax(logits: Tensor, held: Held, clear: bool = True) -> Tensor:
    """softmax of logits (S, R, n) in place over the columns that are used and not hidden.

    What is hidden gets 0. Unused columns get 0 where `clear` asks for it and are arbitrary otherwise.
    """
    heads, rows, n = logits.shape
    hidden, lengths, used, gap = held.hidden, held.lengths, held.used, held.gap
    _fits(len(hidden) == len(lengths) == heads and used <= n and n + gap <= hidden.shape[1])
    _fits(lengths.dtype is torch.int64 and (not heads or int(lengths.max()) <= used))
    arguments = _numpy(logits), hidden.numpy(), lengths.numpy(), used, gap, clear
    _in_threads(lambda *piece: _loops().softmax(*arguments, *piece), heads, heads * rows * n * 8)
    return logits


def _product(verb: str, mine: Tensor, entries: Entries, theirs: Tensor, by_channel: Tensor, by_column: Tensor) -> None:
    """One of the products; it reads and writes memory as it is told, so sizes are checked first."""
    _fits(max(entries.heads) < len(mine) == len(theirs) and mine.shape[1] == theirs.shape[1])
    _fits(by_channel.shape[2] == entries.dim and entries.to + entries.end - entries.begin <= by_column.shape[2])
    arrays = entries.memo.get("cpu")
    if arrays is None:
        arrays = entries.memo["cpu"] = _arrays(entries)
    before = _numpy(mine), *arrays[0], entries.begin, entries.to, *arrays[1]
    answer, kernel, heads = _numpy(theirs), getattr(_loops(), verb), len(entries.heads)
    work = heads * entries.end * entries.dim * mine.shape[1]
    _in_threads(lambda first, last: kernel(*before, first, last, answer), heads, work)


def _arrays(entries: Entries) -> tuple[Sequence[Any], Sequence[Any]]:
    """Entries as the loops read them; arrays share the tensors' memory and keep it."""
    step, zero = (
        x if entries.quantised else x.new_empty(0, 0, 0, dtype=torch.float16) for x in (entries.step, entries.zero)
    )
    scale_of = torch.empty(0, 0, dtype=torch.int32) if entries.scale_of is None else entries.scale_of
    kind = entries.bits if entries.quantised else _KINDS[entries.x.dtype]
    scales = (x.view(torch.uint16).numpy() for x in (step, zero))
    at = torch.tensor(list(entries.heads), dtype=torch.int64)
    stored = entries.x.view(torch.uint8).numpy(), kind, *scales, entries.group, scale_of.numpy()
    return stored, (entries.lengths.numpy(), at.numpy())


def _numpy(x: Tensor) -> Any:
    if x.dtype is not torch.float32 or not x.is_contiguous():
        raise ValueError(f"expected contiguous float32, got {x.dtype} with strides {x.stride()}")
    return x.numpy()


def _fits(true: bool) -> None:
    if not true:
        raise ValueError("sizes of one call do not fit together")


@functools.cache
def _loops() -> ModuleType:
    """The compiled functions. Only a process that decodes imports Numba."""
    from moend.kernels.cpu import loops

    return loops


def _in_threads(work: Callable[[int, int], None], heads: int, products: int) -> None:
    """work(first, last) over all KV heads, split among torch's threads where that pays."""
    threads = min(torch.get_num_threads(), heads, 1 + products // WORK)
    if threads <= 1:
        work(0, heads)
        return
    ends = [heads * i // threads for i in range(threads + 1)]
    for job in [_pool().submit(work, *piece) for piece in itertools.pairwise(ends)]:
        job.result()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="moend")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
