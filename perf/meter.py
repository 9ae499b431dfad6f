"""What perf's programs measure with: time, memory and bandwidth, on a CPU or, where there is one, a GPU."""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch


def taken(work: Callable[[], object]) -> float:
    """CPU seconds of one call, all threads together; where there is a GPU, seconds until it has finished."""
    if not torch.cuda.is_available():
        begin = time.process_time()
        work()
        return time.process_time() - begin
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def positive(text: str) -> int:
    """An argument that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def spread(values: Sequence[float], digits: int = 2) -> dict[str, float]:
    """Median, least and most over rounds."""
    return {
        "median": round(statistics.median(values), digits),
        "low": round(min(values), digits),
        "high": round(max(values), digits),
    }


def bandwidth(device: torch.device) -> float:
    """GB a second that are read from memory, by the sum of a GiB: the best of five."""
    x = torch.ones(2**28, device=device)
    x.sum()
    return round(x.nbytes / min(taken(x.sum) for _ in range(5)) / 1e9, 1)


def resident(field: str) -> int:
    """Bytes of this process by the system's account: VmRSS now, VmHWM at its highest since the last reset (Linux)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def held() -> int:
    """Bytes this process has now: by the system's account, or on a GPU by torch's."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else resident("VmRSS")


def peak_of(run: Callable[[], object], before: int | None = None) -> int:
    """How far one call raises this process's memory above what it held before."""
    before = held() if before is None else before
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    run()
    return (torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident("VmHWM")) - before


def release() -> None:
    """Give what is free back to the system, so that its account shows what is held (glibc)."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    ctypes.CDLL(None).malloc_trim(0)
