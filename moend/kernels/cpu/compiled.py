"""Attention of a few queries over what strands hold, on a CPU, compiled by LLVM.

With codes c, steps s and zero points z, K per channel and group gives q . k = (q s) . c + q . z, and V per token gives
sum_t p v = sum_t (p s) c + sum_t p z: scales fold into the query and into the probabilities. What is stored becomes
float32 in the CPU's registers, is multiplied there by all queries of its strand and dropped. torch would pass through
memory for each of shift, mask, conversion and product, with a dozen calls for what is one here.

Everything is computed in float32 and strand by strand: what decodes beside a strand changes no more than the rounding
of its softmax. A function is written for what it meets (how entries are stored, their width, group and number of
queries) when it first meets it, which takes a tenth of a second (`moend.kernels.cpu.products`).
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moend.kernels.cpu import products, vectors

ROWS = 32  # with more queries per strand than this, torch's products over dense numbers take less time
TOGETHER = 4  # queries that share a pass over the entries: as many as registers hold the sums of
WORK = 2**16  # products below which a second thread is not worth waking


def usable(x: Tensor, rows: int) -> bool:
    """Whether attention of `rows` queries per strand goes this way; x: of where they are computed."""
    return x.is_cpu and rows <= ROWS and not x.requires_grad


@dataclass
class Entries:
    """Slots begin ... lengths[i] of x (s, M, numbers or bytes), of the strands `at` of all, with scales if codes.

    bits, group, step, zero: as in `moend.cache.packed_store.PackedStore`; lengths, at int64 (s,). Slot t is column
    to + t - begin of logits and probabilities; codes begin at 0, lengths of packed K are whole groups. Made once and
    asked many times: it remembers where its tensors lie, and how far they go.
    """

    x: Tensor
    step: Tensor
    zero: Tensor
    bits: int
    group: int
    lengths: Tensor
    at: Tensor
    begin: int = 0
    to: int = 0

    def __post_init__(self) -> None:
        tensors = self.x, self.step, self.zero, self.lengths, self.at
        _check(tensors)
        codes = self.x.dtype is torch.uint8
        if not codes and self.x.dtype not in _KINDS:
            raise ValueError(f"entries are codes, float16, bfloat16 or float32, got {self.x.dtype}")
        self.places = tuple(t.data_ptr() for t in tensors)
        self.kind: tuple[int | str, int | None] = (self.bits, self.group) if codes else (_KINDS[self.x.dtype], None)
        self.strands, self.slots = self.x.shape[:2]
        self.names = int(self.at.max()) + 1
        self.dim = self.x.shape[2] * 8 // self.bits if codes else self.x.shape[2]
        _fits(not codes or (self.begin == 0 and self.step.shape == self.zero.shape))
        _fits(self.lengths.dtype is self.at.dtype is torch.int64, self.strands == len(self.at) == len(self.lengths))
        self.end = int(self.lengths.max())
        _fits(self.end <= self.slots)

    def reach(self, end: int) -> None:
        """What every strand holds ends there from now on."""
        _fits(end <= self.slots)
        self.lengths.fill_(end)
        self.end = end


def score(query: Tensor, keys: Entries, logits: Tensor) -> None:
    """q . k of query (S, R, d) into logits (S, R, n), both float32."""
    _product("score", query, keys, logits, query.shape[2], logits.shape[2])


def mix(probs: Tensor, values: Entries, out: Tensor) -> None:
    """Add the values weighted by probs (S, R, n) to out (S, R, d), both float32."""
    _product("mix", probs, values, out, out.shape[2], probs.shape[2])


def softmax(logits: Tensor, hidden: Tensor, lengths: Tensor, used: int, gap: int, clear: bool) -> None:
    """softmax of logits (S, R, n) in place, over each strand's first `lengths` columns and those from `used` on.

    What is hidden (S, N) gets 0; column j >= used is hidden's j + gap. clear: 0 also for what lies between.
    """
    strands, rows, n = logits.shape
    _check((logits, hidden, lengths), logits)
    _fits(hidden.dtype is torch.bool, lengths.dtype is torch.int64, len(hidden) == len(lengths) == strands)
    _fits(used <= n, n + gap <= hidden.shape[1], not strands or int(lengths.max()) <= used)
    places = logits.data_ptr(), hidden.data_ptr(), lengths.data_ptr()
    sizes = rows, n, hidden.shape[1], used, gap, int(clear)
    _in_threads(_softmax(), places, sizes, strands, strands * rows * n * 8, (logits, hidden, lengths))


def _product(verb: Literal["score", "mix"], mine: Tensor, e: Entries, theirs: Tensor, dim: int, wide: int) -> None:
    _check((mine, theirs), mine, theirs)
    _fits(e.names <= len(mine) == len(theirs), e.to + e.end - e.begin <= wide, mine.shape[1] == theirs.shape[1])
    _fits(e.dim == dim)
    (kind, group), rows, asking, answer = e.kind, mine.shape[1], mine.data_ptr(), theirs.data_ptr()
    passes = -(-rows // TOGETHER)
    for i in range(passes):
        begin, end = rows * i // passes, rows * (i + 1) // passes
        kernel = _kernel(verb, kind, dim, group or dim, end - begin)
        before = asking + 4 * begin * mine.shape[2], *e.places
        after = e.slots, e.begin, e.to, rows, wide, answer + 4 * begin * theirs.shape[2]
        _in_threads(kernel, before, after, e.strands, e.strands * e.slots * dim * (end - begin), (mine, e, theirs))


_KINDS = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


def _check(tensors: Sequence[Tensor], *floats: Tensor) -> None:
    """Compiled code reads memory as it is told: nothing may lie otherwise."""
    for x in tensors:
        if not (x.is_contiguous() and x.is_cpu):
            raise ValueError(f"expected numbers in a row, got strides {x.stride()} on {x.device}")
    for x in floats:
        if x.dtype is not torch.float32:
            raise ValueError(f"expected float32, got {x.dtype}")


def _fits(*true: bool) -> None:
    if not all(true):
        raise ValueError("tensors of one call do not fit together: numbers would be read or written beside them")


@functools.cache
def _kernel(verb: str, kind: int | str, dim: int, group: int, rows: int) -> Callable[..., None]:
    write = getattr(products, verb)(kind, dim, group, rows)
    return vectors.compiled(write, **products.product_arguments(kind))


@functools.cache
def _softmax() -> Callable[..., None]:
    return vectors.compiled(products.softmax, **products.SOFTMAX)


def _in_threads(
    kernel: Callable[..., None], before: tuple[int, ...], after: tuple[int, ...], strands: int, work: int, held: object
) -> None:
    """kernel(*before, first, last, *after) over all strands, cut among torch's threads where that pays.

    held: whose memory it is. A thread keeps it until it is done, also when the caller is interrupted and lets it go.
    """
    threads = min(torch.get_num_threads(), strands, 1 + work // WORK)
    if threads <= 1:
        kernel(*before, 0, strands, *after)
        return
    ends = [strands * i // threads for i in range(threads + 1)]
    jobs = [_pool().submit(_run, kernel, (*before, *piece, *after), held) for piece in itertools.pairwise(ends)]
    for job in jobs:
        job.result()


def _run(kernel: Callable[..., None], arguments: tuple[int, ...], held: object) -> None:
    kernel(*arguments)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="moend")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not come along
