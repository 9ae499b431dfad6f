"""Where records were made: device, number format, kernels, code and machine. The device is no part of a cell's key.

Two records of a cell may therefore come from different devices or commits; `mixed` says so.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

COMMIT_FILE = "COMMIT"  # holds the commit in a copy of the code that was made for jobs
PACKAGES = ("moend", "torch", "transformers", "numpy")


def provenance(config: Any, loaded: Any) -> dict[str, Any]:
    """What every record says of where it was made.

    config: the cell's configuration, of which the parts count that its key leaves out; loaded: the model as it was
    loaded, with what `auto` became. device: `cpu`, or the GPU's name. dtype: of weights and arithmetic. store_dtype: of
    the entries that are kept in 16 bits. kernel: what computes attention over packed entries. chunk: tokens of a
    prompt that are read at once. commit: None where the code is not a checkout; dirty: files differ from it, or are
    there besides it. host: the kind of machine, without its name.
    """
    device = loaded.device
    return {
        "device": _gpu_name(device) if device.type == "cuda" else str(device.type),
        "dtype": _name(loaded.model.dtype),
        "store_dtype": _name(loaded.store_dtype),
        "kernel": kernel(device),
        "chunk": config.engine.chunk,
        "commit": checkout()[0],
        "dirty": checkout()[1],
        "versions": versions(),
        "host": f"{platform.system()} {platform.machine()}, {machine()['processor']}",
    }


def mixed(records: Iterable[dict[str, Any]]) -> list[str]:
    """One line for each of device, dtype, kernel and commit in which the records of a cell differ; [] where they agree.

    `device: cpu (12), NVIDIA H200 (8)`: values with numbers of records, the most frequent first. Records from before
    provenance was written are `unknown`.
    """
    found: dict[str, Counter[str]] = {name: Counter() for name in ("device", "dtype", "kernel", "commit")}
    for record in records:
        made = record.get("provenance") or {}
        for name, counts in found.items():
            value = str(made.get(name) or "unknown")
            counts[_commit(value, bool(made.get("dirty"))) if name == "commit" else value] += 1
    return [_line(name, counts) for name, counts in found.items() if len(counts) > 1]


def marks(result: dict[str, Any]) -> list[str]:
    """What a reader has to know of a result besides its numbers: mixed and repeated records, and a foreign origin."""
    lines = [*result.get("mixed", []), *result.get("repeated", [])]
    if (source := result.get("source")) is not None:
        commit = source["commit"] or "an installed package"
        lines.append(f"from {source['bundle']}, packed {source['created'][:10]} by {_commit(commit, False)}")
    return lines


def _line(name: str, counts: Counter[str]) -> str:
    ordered = sorted(counts.items(), key=lambda x: (-x[1], x[0]))
    return f"{name}: " + ", ".join(f"{value} ({n})" for value, n in ordered)


def _commit(commit: str, dirty: bool) -> str:
    return commit[:12] + ("-dirty" if dirty else "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gpu_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device)


def kernel(device: torch.device) -> str:
    """The path that computes attention over packed entries on a device: triton, cpu or torch."""
    from moend import kernels

    return kernels.path(device)


@functools.cache
def versions() -> dict[str, str]:
    """Python and the packages that the numbers come from."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "checkout"
    return found


@functools.cache
def machine() -> dict[str, Any]:
    """Where this process runs: host, operating system, processor, cores it may use, GPUs."""
    import torch

    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        named = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
        model = named[0].partition(":")[2].strip() if named else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    system = f"{platform.system()} {platform.release()}"
    return {"host": platform.node(), "system": system, "processor": model, "cores": cores, "gpus": gpus}


def commit() -> str | None:
    """The commit of the running code, `-dirty` where files differ from it; None outside of a checkout."""
    found, dirty = checkout()
    return found and found + ("-dirty" if dirty else "")


@functools.cache
def checkout() -> tuple[str | None, bool]:
    """The commit of the running code, and whether files differ from it or are untracked; (None, False) for a wheel."""
    here = Path(__file__).resolve().parents[2]
    if (frozen := here / COMMIT_FILE).is_file():
        found = frozen.read_text(encoding="utf-8").strip()
        return found.removesuffix("-dirty"), found.endswith("-dirty")
    try:
        run = functools.partial(subprocess.run, cwd=here, capture_output=True, text=True, timeout=10, check=True)
        if Path(run(["git", "rev-parse", "--show-toplevel"]).stdout.strip()) != here:
            return None, False
        head = run(["git", "rev-parse", "HEAD"]).stdout.strip()
        return head, bool(run(["git", "status", "--porcelain"]).stdout.strip())
    except (OSError, subprocess.SubprocessError):
        return None, False
