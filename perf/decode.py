"""Decode speed and memory against transformers' DynamicCache in the same run: prints one JSON object.

    OMP_NUM_THREADS=1 python -m perf.decode [--dtypes float32 bfloat16] [--lengths 1000 2000 4000 8000]
    python -m perf.decode --fused             # 16 distinct cells as one batch against each alone
    python -m perf.decode --memory            # the system's account, one fresh process per point
    python -m perf.decode --lengths 8000 32000 128000      # where a GPU is found, it is measured

Steps of the embedded model (one sequence, one new token) on caches of `length` entries. The entries are random numbers:
neither time nor bytes depend on them, and no prefill has to be waited for (perf.prefill measures that). All caches
take turns, `rounds` times `steps` tokens each, and a ratio is formed within a round, so that a busy machine slows both
sides; 33 steps or more take packing and growing stores in. Time is CPU time, or on a GPU the clock's once it has
finished. Ours hold 16-bit entries as runs do by default, in bfloat16, also where the model computes in float32; shares
of bytes are of DynamicCache, which holds what the model computes in. "DynamicCache repeated" is SDPA with keys and
values repeated for all heads, which torch computes faster on a CPU than the grouped queries of transformers' choice.
`floor` is a step with two entries: the model's own share, which no cache can go below. `bandwidth` is how fast this
machine reads memory: what is held has to be read at each step.

Memory: each point is a process of its own, which runs the model on two entries first, then makes the cache, lets go of
what it was made from, resets the system's high-water mark and decodes. What that mark rose above the process before it
had a cache is the point's memory (VmHWM; on a GPU torch's account of it); `claimed` is what our counters, or the
tensors of DynamicCache, say.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from moend.errors import UserError
from perf.meter import bandwidth, held, peak_of, positive, release, spread, taken

BASE, EAGER, REPEATED = "DynamicCache sdpa", "DynamicCache eager", "DynamicCache repeated"
PEERS = (BASE, REPEATED, EAGER, "QuantizedCache quanto 4", "QuantizedCache hqq 4", "floor")


def bits(k: int, v: int) -> tuple[str, str, dict[str, Any]]:
    """All tokens at these bits, window 64: a variant of 2d_uniform that drops nothing."""
    fields = {"scorer": None, "allocator": "all", "schedule": "prompt", "window": 64, "always_quantise": True}
    return "2d_uniform", "100%", {**fields, "precision": {"k_bits": k, "v_bits": v}}


# name: (method, budget, fields set)
CELLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "full": ("full", "100%", {}),
    **{f"SnapKV {b} %": ("SnapKV", f"{b}%", {}) for b in (50, 25, 10, 5)},
    "K8/V8": bits(8, 8),
    "K8/V4": bits(8, 4),
    "K4/V4": bits(4, 4),
    "K2/V2": bits(2, 2),
    "2d_uniform 10 %": ("2d_uniform", "10%", {}),
    "2d_hetero 1/14": ("2d_hetero", f"{100 / 14}%", {}),
}
FUSED = [(m, f"{b}%") for m in ("SnapKV", "1d", "2d_uniform", "2d_hetero") for b in (5, 10, 15, 20)]


class Bench:
    """The embedded model, its calibration and caches of random entries."""

    def __init__(self, dtype: str):
        import torch
        from transformers.utils import logging

        from moend.calibration.artefact import Artefact
        from moend.calibration.queries import TrigStatistics
        from moend.calibration.sensitivity import measure
        from moend.engine import attention_scaling
        from moend.models import load as models
        from moend.plan import KEEPS, extend_lattice, lattice
        from moend.scoring import scorer

        logging.disable_progress_bar()
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        self.loaded = models.load(models.spec("smollm2_135m", dtype=dtype), Path.home() / ".cache" / "moend")
        self.model, self.arch, self.dtype = self.loaded.model, self.loaded.arch, getattr(torch, dtype)
        self.device = self.model.device
        ids = torch.tensor([models.calibration_ids(self.loaded)], device=self.device)
        queries = TrigStatistics.measure(self.model, ids).tensors()
        table = measure(self.model, ids, lattice(extend_lattice(KEEPS)), scorer=scorer("trig"), statistics=queries)
        self.artefacts = {
            "queries": Artefact("queries", {}, queries, {}),
            "sensitivity": Artefact("sensitivity", {}, table.tensors(), {}),
        }
        self.scaling = attention_scaling(self.model)
        self.own = self.model.config._attn_implementation

    def entries(self, length: int) -> Any:
        """What a prefill of `length` tokens would leave, with random numbers."""
        import torch

        from moend.cache import LayerCapture, Prefilled

        g, a = torch.Generator().manual_seed(length), self.arch

        def draw(heads: int, n: int) -> Any:
            return torch.randn(1, heads, n, a.head_dim, generator=g).to(self.device, self.dtype)

        layers = [
            LayerCapture(draw(a.kv_heads, length), draw(a.kv_heads, length), draw(a.q_heads, min(32, length)))
            for _ in range(a.layers)
        ]
        return Prefilled(layers, torch.arange(length, device=self.device)[None], None, self.model.config)

    def cell(self, entries: Any, name: str, budget: str, fields: dict[str, Any], new: int = 256) -> Any:
        """The cache one of our methods keeps."""
        from moend.budget import Budget
        from moend.engine import rotations
        from moend.methods.bind import bind
        from moend.methods.spec import method

        bound = bind(
            method(name, **fields),
            Budget.parse(budget),
            "matched",
            self.arch,
            t_ref=None,
            artefacts=self.artefacts,
            store_dtype=self.loaded.store_dtype,
        )
        rotary = rotations(self.model) if bound.needs_rotary else None
        return bound.fork(entries, new, rotary=rotary, scaling=self.scaling)

    def peer(self, entries: Any, name: str) -> Any:
        """A cache of transformers; ImportError where its backend is not installed."""
        from transformers import DynamicCache, QuantizedCache

        if name.startswith("QuantizedCache"):
            _, backend, width = name.split()
            cache = QuantizedCache(backend, self.model.config, nbits=int(width))
        else:
            cache = DynamicCache(config=self.model.config)
        for i, layer in enumerate(entries.layers):
            cache.update(layer.keys.clone(), layer.values.clone(), i)
        return cache

    def stepper(self, cache: Any, length: int, attention: str | None = None, rows: int = 1) -> Callable[[int], None]:
        """Feeds some tokens one by one; attention: one of transformers' or "repeated", None for ours."""
        import torch

        from moend.cache import attention_of, cache_argument

        position, argument = [length], cache_argument(self.model)
        ids = torch.randint(5, 40000, (rows, 1), generator=torch.Generator().manual_seed(0)).to(self.device)

        def run(steps: int) -> None:
            if attention is not None:
                self.model.set_attn_implementation("sdpa" if attention == "repeated" else attention)
            context = attention_of(self.model) if attention is None else nullcontext()
            try:
                with repeated() if attention == "repeated" else context:
                    for _ in range(steps):
                        at = torch.full((rows, 1), position[0], device=self.device)
                        self.model(input_ids=ids, position_ids=at, use_cache=True, **{argument: cache})
                        position[0] += 1
            finally:
                if attention is not None:
                    self.model.set_attn_implementation(self.own)

        return run


@contextmanager
def repeated() -> Iterator[None]:
    """transformers' SDPA with keys and values repeated for all heads, where it would have torch group the queries."""
    from transformers.integrations import sdpa_attention

    before = sdpa_attention.use_gqa_in_sdpa
    sdpa_attention.use_gqa_in_sdpa = lambda *_: False
    try:
        yield
    finally:
        sdpa_attention.use_gqa_in_sdpa = before


def turns(steppers: dict[str, Callable[[int], None]], rounds: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds per step, by cache and round; the caches take turns."""
    for run in steppers.values():
        run(2)
    ms: dict[str, list[float]] = {name: [] for name in steppers}
    for _ in range(rounds):
        for name, run in steppers.items():
            ms[name].append(taken(lambda run=run: run(steps)) / steps * 1e3)  # type: ignore[misc]
    return ms


def speed(bench: Bench, length: int, names: Sequence[str], rounds: int, steps: int) -> dict[str, Any]:
    """One point: every cache at this length."""
    entries, steppers, held, skipped = bench.entries(length), {}, {}, {}
    dynamic = bench.peer(entries, BASE)
    for name in PEERS:
        if name == "floor":
            steppers[name] = bench.stepper(bench.peer(bench.entries(2), BASE), 2, "sdpa")
        elif name.startswith("DynamicCache"):
            steppers[name] = bench.stepper(dynamic, length, name.split()[1])
        else:
            try:
                run = bench.stepper(bench.peer(entries, name), length, "sdpa")
                run(1)  # quanto compiles what it needs
            except ImportError:
                skipped[name] = f"{name.split()[1]}, which it works with, is not installed"
            except RuntimeError as e:
                skipped[name] = str(e).strip().splitlines()[-1]
            else:
                steppers[name] = run
    for name in names:
        cache = bench.cell(entries, *CELLS[name])
        held[name] = cache.resident_bytes()
        steppers[name] = bench.stepper(cache, length)
    del entries
    ms = turns(steppers, rounds, steps)
    whole = bench.arch.full_bytes(length) * bench.dtype.itemsize // 2

    def over(base: str) -> dict[str, Any]:
        return {n: spread([b / x for b, x in zip(ms[base], mine, strict=True)]) for n, mine in ms.items()}

    return {
        "ms": {name: spread(values) for name, values in ms.items()},
        "times_dynamic": over(BASE),
        "times_eager": over(EAGER),
        "times_repeated": over(REPEATED),
        "times_own_full": over("full") if "full" in ms else {},
        "held": held,
        "held_of_full": {name: round(n / whole, 4) for name, n in held.items()},
        "skipped": skipped,
    }


def fused(bench: Bench, length: int, rounds: int, steps: int) -> dict[str, Any]:
    """Tokens per second of all cells decoding as one over the mean of one alone, and the model's own share of both."""
    from moend.cache import CompressedCache

    entries = bench.entries(length)
    caches = {f"{m} {b}": bench.cell(entries, m, b, {}) for m, b in FUSED}
    joined, rows = CompressedCache.join([c.fork() for c in caches.values()]), len(caches)
    tiny = bench.entries(2)
    small = CompressedCache.join([bench.cell(tiny, "full", "100%", {}) for _ in range(rows)])
    steppers = {name: bench.stepper(cache, length) for name, cache in caches.items()}
    steppers["all as one"] = bench.stepper(joined, length, rows=rows)
    steppers["floor of one"] = bench.stepper(bench.cell(tiny, "full", "100%", {}), 2)
    steppers["floor of all"] = bench.stepper(small, 2, rows=rows)
    del entries
    ms = turns(steppers, rounds, steps)
    mean = [statistics.mean(x) for x in zip(*(ms[name] for name in caches), strict=True)]
    together = ms["all as one"]
    return {
        "cells": list(caches),
        "held": joined.resident_bytes(),
        "ms_one": spread(mean),
        "ms_all": spread(together),
        "ms_floor_of_one": spread(ms["floor of one"]),
        "ms_floor_of_all": spread(ms["floor of all"]),
        "ratio": spread([rows * a / b for a, b in zip(mean, together, strict=True)]),
    }


def point(name: str, length: int, dtype: str, steps: int) -> dict[str, int]:
    """Memory of one cache in this fresh process, in bytes: the system's high-water mark, and what is claimed."""
    bench = Bench(dtype)
    peer = name in PEERS
    bench.stepper(bench.peer(bench.entries(2), BASE), 2, "sdpa")(3)
    bench.stepper(bench.cell(bench.entries(2), "full", "100%", {}), 2)(3)
    release()
    before = held()
    entries = bench.entries(length)
    cache = bench.peer(entries, BASE) if peer else bench.cell(entries, *CELLS[name])
    del entries
    release()
    peak = peak_of(lambda: bench.stepper(cache, length, "sdpa" if peer else None)(steps), before)
    if peer:
        claimed = allocated = sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
    else:
        claimed, allocated = cache.resident_bytes(), cache.allocated_bytes()
    return {"system": peak, "claimed": claimed, "allocated": allocated}


def memory(lengths: Sequence[int], dtypes: Sequence[str], names: Sequence[str], steps: int) -> dict[str, Any]:
    """Points by dtype and length, and what share of the claimed fall against DynamicCache the system sees."""
    made: dict[str, Any] = {}
    for dtype in dtypes:
        for length in lengths:
            common = "--lengths", str(length), "--dtypes", dtype, "--steps", str(steps)
            points = {
                name: json.loads(
                    subprocess.run(
                        [sys.executable, "-W", "ignore", "-m", "perf.decode", "--point", name, *common],
                        check=True,
                        capture_output=True,
                        text=True,
                    ).stdout.splitlines()[-1]
                )
                for name in (BASE, *names)
            }
            base = points[BASE]
            for at in points.values():
                if (fall := base["claimed"] - at["claimed"]) > 0.05 * base["claimed"]:
                    at["seen_of_claimed_fall"] = round((base["system"] - at["system"]) / fall, 3)
                    at["seen_below_held"] = round((base["claimed"] - at["system"]) / fall, 3)
            made[f"{dtype} {length}"] = points
            print(f"{dtype} {length} done", file=sys.stderr)
    return made


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"))
    parser.add_argument("--lengths", type=positive, nargs="+", default=[1000, 2000, 4000, 8000])
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=list(CELLS), metavar="CELL")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--steps", type=positive, default=8)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        print(json.dumps(measured(args), indent=None if args.point else 1))
    except UserError as e:  # a cell that cannot be so small
        parser.error(str(e))


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """What is asked for."""
    if args.point:
        return point(args.point, args.lengths[0], args.dtypes[0], args.steps)
    out: dict[str, Any] = {"rounds": args.rounds, "steps": args.steps, "threads": 1, "load": os.getloadavg()[0]}
    if args.memory:
        out["memory"] = memory(args.lengths, args.dtypes, args.cells, max(args.steps, 80))
    else:
        for dtype in args.dtypes:
            bench = Bench(dtype)
            if args.fused:
                out["bandwidth"] = bandwidth(bench.device)
                out[dtype] = {str(n): fused(bench, n, args.rounds, args.steps) for n in args.lengths[-1:]}
                continue
            out["bandwidth"], out["device"] = bandwidth(bench.device), str(bench.device)
            out[dtype] = {}
            for length in args.lengths:
                out[dtype][str(length)] = speed(bench, length, args.cells, args.rounds, args.steps)
                print(f"{dtype} {length} done", file=sys.stderr)
    return out


if __name__ == "__main__":
    main()
