"""Attention of a few queries over what strands hold, on a CPU, compiled by Numba.

With codes c, steps s and zero points z, K per channel and group gives q . k = (q s) . c + q . z, and V per token gives
sum_t p v = sum_t (p s) c + sum_t p z: scales fold into the query and into the probabilities. A block of slots at a time
is turned into float32 in the CPU's first cache, multiplied there and dropped, whatever it is stored in. torch would
pass through memory for each of shift, mask, conversion and product, with a dozen calls for what is one here.

Everything is computed in float32 and strand by strand: what decodes beside a strand changes no more than the rounding.
Compiled code is kept in a folder (`keep_in`): only the first process waits for the compiler, about ten seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
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
    """Tensors as arrays of what they are made of, floats as integers: made once for each tensor, not at each step.

    An array shares its tensor's memory: whoever replaces a tensor also `forget`s, so that the old one goes.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Let go of all tensors."""
        self._known: dict[str, tuple[Tensor, int, Array, int]] = {}

    def __call__(self, name: str, x: Tensor) -> tuple[Array, int]:
        """The array and, for floats, which kind they are of."""
        known = self._known.get(name)
        if known is None or known[0] is not x or known[1] != x.data_ptr():
            as_integers, kind = _KINDS[x.dtype]
            known = self._known[name] = x, x.data_ptr(), x.view(as_integers).numpy(), kind
        return known[2], known[3]

    def __reduce__(self) -> tuple[type[Arrays], tuple[()]]:
        """A copy knows nothing: its arrays would not share memory with its tensors."""
        return Arrays, ()


_KINDS = {
    torch.float16: (torch.uint16, 0),
    torch.bfloat16: (torch.uint16, 1),
    torch.float32: (torch.int32, 2),
    torch.uint8: (torch.uint8, -1),
    torch.bool: (torch.bool, -1),
}


def softmax(logits: Tensor, hidden: Array, lengths: Array, used: int, gap: int, clear: bool) -> None:
    """softmax of logits (S, R, n) in place, over each strand's first `lengths` columns and those from `used` on.

    What is hidden (S, N) gets 0; column j >= used is hidden's j + gap. clear: 0 also for what lies between.
    """
    work = functools.partial(kernels().softmax, logits.numpy(), hidden, lengths, used, gap, clear)
    held = int(lengths.sum()) + len(logits) * (logits.shape[2] - used)
    _in_threads(work, len(logits), held * logits.shape[1] * 8)


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


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not come along


def keep_in(folder: Path) -> None:
    """Keep compiled code below this cache folder, or where $NUMBA_CACHE_DIR says; where it cannot be, nowhere."""
    place = folder / "compiled"
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        if os.access(place, os.W_OK) and not os.environ.get("NUMBA_CACHE_DIR"):
            os.environ["NUMBA_CACHE_DIR"] = str(place)


@functools.cache
def kernels() -> ModuleType:
    """The compiled functions. Numba is imported by whoever decodes, not by whoever plans a sweep."""
    if not os.access(os.environ.get("NUMBA_CACHE_DIR", ""), os.W_OK):
        # Numba keeps code somewhere or fails: here until the process ends
        folder = tempfile.TemporaryDirectory(prefix="moend-")
        atexit.register(folder.cleanup)
        os.environ["NUMBA_CACHE_DIR"] = folder.name
    place = os.environ["NUMBA_CACHE_DIR"]
    import numba

    numba.config.CACHE_DIR = place  # it may have been imported before the variable was set
    with (Path(place) / "lock").open("w") as lock:  # Numba's index is not safe between processes that compile
        fcntl.flock(lock, fcntl.LOCK_EX)
        from moend.cache import numba_kernels

        return numba_kernels
