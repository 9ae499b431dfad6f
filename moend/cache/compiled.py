"""Attention of a few queries over what strands hold, on a CPU, compiled by Numba.

With codes c, steps s and zero points z, K per channel and group gives q . k = (q s) . c + q . z, and V per token gives
sum_t p v = sum_t (p s) c + sum_t p z: scales fold into the query and into the probabilities. A block of slots at a time
is turned into float32 in the CPU's first cache, multiplied there and dropped, whatever it is stored in. torch would
pass through memory for each of shift, mask, conversion and product, with a dozen calls for what is one here.

Everything is computed in float32 and strand by strand, so that no result depends on what decodes beside it. Compiled
code is kept in a folder (`keep_in`): only the first process waits for the compiler.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

ROWS = 32  # with more queries per strand than this, torch's products over dense numbers take less time
WORK = 2**16  # products below which a second thread is not worth waking

Array = npt.NDArray[Any]


def usable(device: torch.device, rows: int) -> bool:
    """Whether attention of `rows` queries per strand goes this way."""
    return device.type == "cpu" and rows <= ROWS


class Arrays:
    """Tensors as arrays of what they are made of, floats as integers: made once for each tensor, not at each step."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Tensor, Array, int]] = {}

    def __call__(self, name: str, x: Tensor) -> tuple[Array, int]:
        """The array and, for floats, which kind they are of."""
        known = self._known.get(name)
        if known is None or known[0] is not x:
            as_integers, kind = _KINDS.get(x.dtype, (x.dtype, -1))
            known = self._known[name] = x, x.view(as_integers).numpy(), kind
        return known[1], known[2]


_KINDS = {
    torch.float16: (torch.uint16, 0),
    torch.bfloat16: (torch.uint16, 1),
    torch.float32: (torch.int32, 2),
}


def softmax(logits: Tensor, hidden: Array, used: int, gap: int) -> None:
    """softmax of logits (S, R, n) in place; what is hidden (S, N) gets 0, column j >= used is hidden's j + gap."""
    _in_threads(
        functools.partial(kernels().softmax, logits.numpy(), hidden, used, gap), len(logits), logits.numel() * 8
    )


def call(name: str, x: Tensor, *args: Any, at: Array, products: int, out: Tensor) -> None:
    """A kernel that goes over the strands `at`: name(x, *args, at, first, last, out)."""
    kernel = getattr(kernels(), name)
    mine, theirs = x.numpy(), out.numpy()
    _in_threads(lambda first, last: kernel(mine, *args, at, first, last, theirs), len(at), products)


def _in_threads(work: Callable[[int, int], None], strands: int, products: int) -> None:
    """work(first, last) over all strands, cut among torch's threads where that pays."""
    threads = min(torch.get_num_threads(), strands, 1 + products // WORK)
    if threads == 1:
        work(0, strands)
        return
    ends = [strands * i // threads for i in range(threads + 1)]
    for job in [_pool().submit(work, *piece) for piece in itertools.pairwise(ends)]:
        job.result()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="moend")


def keep_in(folder: Path) -> None:
    """Keep compiled code below this cache folder, or where $NUMBA_CACHE_DIR says; where it cannot be, nowhere."""
    place = folder / "compiled"
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        if os.access(place, os.W_OK):
            os.environ.setdefault("NUMBA_CACHE_DIR", str(place))


@functools.cache
def kernels() -> ModuleType:
    """The compiled functions. Numba is imported by whoever decodes, not by whoever plans a sweep."""
    if "NUMBA_CACHE_DIR" not in os.environ:  # Numba keeps code somewhere or fails: here until the process ends
        folder = tempfile.TemporaryDirectory(prefix="moend-")
        atexit.register(folder.cleanup)
        os.environ["NUMBA_CACHE_DIR"] = folder.name
    from moend.cache import numba_kernels

    return numba_kernels
