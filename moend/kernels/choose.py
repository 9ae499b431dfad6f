"""Attention of new queries over packed entries, behind one function that chooses the kernel: `attention`.

`moend.kernels.entries` is the contract between entry stores and kernels. Three paths fulfil it; `path` says which one
a call takes, by what the device can do:

- "triton" (`moend.kernels.triton`): one fused pass over codes on a CUDA GPU, for one new token per sequence.
- "cpu" (`moend.kernels.cpu`): loops that Numba compiles, where the extra `cpu` is installed.
- "torch" (`moend.kernels.torch_ops`): plain torch operations, everywhere.

Logits, softmax and sums are float32 on every path. `moend.kernels.reference` writes the same out in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from moend.kernels import cpu, torch_ops
from moend.kernels.entries import Held
from moend.kernels.triton import launch as triton

Path = Literal["triton", "cpu", "torch"]


def path(device: torch.device, rows: int = 1, fused: bool = True, held: Held | None = None) -> Path:
    """The path of `rows` queries per KV head on this device.

    fused: whether logits and probabilities may stay inside a kernel, as nobody changes or reads them. held: the
    entries, where they are known: groups too small for tensor cores take the torch path.
    """
    if fused and triton.available(device) is None and (held is None or triton.unreadable(held) is None):
        return "triton"
    return "cpu" if cpu.usable(device, rows) else "torch"


def describe(device: torch.device) -> str:
    """One line that says which path decoding takes on this device, and why."""
    taken = path(device)
    if taken == "triton":
        major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        return f"attention over packed entries: triton, compute capability {major}.{minor}"
    if taken == "cpu":
        return "attention over packed entries: loops compiled by Numba"
    missing = "numba is not installed: pip install 'moend[cpu]'" if device.type == "cpu" else triton.available(device)
    return f"attention over packed entries: torch operations ({missing})"


def attention(
    query: Tensor,
    held: Held,
    change: Callable[[Tensor, Tensor], None] | None = None,
    weights: bool = False,
    one_token: bool = True,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of scaled queries (S, R, d), R of every KV head, over all entries a layer holds: (S, R, d).

    held: the entries, and which of them no query sees; every KV head needs one that is seen.
    change: called with the float32 queries and the logits (S, R, columns) before what is hidden is masked. It alters
    the logits in place: a window, a causal mask among new tokens, other positions.
    weights: also return the probabilities (S, R, columns) in float32, 0 for whatever is unused or hidden.
    sinks: logits (S, R, 1) float32 that take their share of each softmax and have no value.
    one_token: whether all queries are of one new token per sequence, which the fused kernel needs.
    """
    rows = query.shape[1]
    fused = change is None and not weights and one_token and sinks is None
    taken: Path = "torch"  # whoever wants gradients gets them
    if not (query.requires_grad and torch.is_grad_enabled()):
        taken = path(query.device, rows, fused, held)
    if taken == "triton":
        return triton.decode(query, held), None
    flat = query.float().contiguous()
    logits = flat.new_empty(*flat.shape[:2], held.columns)
    ops = cpu if taken == "cpu" else torch_ops
    for keys in (held.newest[0], *held.keys):
        ops.score(flat, keys, logits)
    if change is not None:
        change(flat, logits)
    if sinks is None:
        probs = ops.softmax(logits, held, clear=weights)
    else:
        probs = torch_ops.softmax(logits, held, sinks=sinks)
    out = torch.zeros_like(flat)
    for values in (held.newest[1], *held.values):
        ops.mix(probs, values, out)
    return out.to(query.dtype), probs if weights else None
