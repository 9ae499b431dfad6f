"""Time and quality of the solvers on 28 layers x 54 configurations: `python -m perf.solver` prints one JSON object.

Milliseconds are the median and the worst over tables and budgets; `excess` is how far above the optimum greedy ends.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from moend.allocation.solver import SOLVERS, Solution, solve
from moend.budget import eq1_bytes
from moend.layer_bytes import Storage, layer_bytes
from moend.plan import lattice

HEADS, DIM = 4, 128  # KV heads and head dimension of the paper's 7B model


def table(rng: np.random.Generator, layers: int) -> np.ndarray:
    """A table shaped like the paper's Table 1: eviction and K bits differ between layers by orders of magnitude."""
    evict, k4 = rng.lognormal(-0.5, 0.8, layers), rng.lognormal(-1.5, 1.0, layers)
    power = rng.uniform(0.5, 2.5, layers)
    columns = []
    for c in lattice():
        parts = (
            evict * (1 - c.keep) ** power,
            {16: 0.0, 8: 0.07, 4: 1.0}[c.k_bits] * k4,
            {16: 0, 8: 0.006, 4: 0.08}[c.v_bits],
        )
        columns.append(np.sqrt(sum(np.square(p) for p in parts)) * rng.uniform(0.98, 1.02, layers))
    return np.stack(columns, axis=1)


def costs(layers: int, t_ref: int, model: str) -> np.ndarray:
    """(L, 54) bytes by eq. (1) or as resident bytes."""
    row = []
    for c in lattice():
        n = max(1, round(c.keep * t_ref))
        storage = Storage(c.k_bits, c.v_bits, positions="none" if c.keep == 1 else "per_head")
        eq1 = eq1_bytes(c.keep * t_ref, HEADS, DIM, c.k_bits, c.v_bits)
        row.append(eq1 if model == "eq1" else int(layer_bytes(n, storage, HEADS, DIM)))
    return np.tile(np.array(row, dtype=np.int64), (layers, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--tables", type=int, default=10)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    out: dict[str, object] = {"layers": args.layers, "configurations": len(lattice())}
    for model in ("eq1", "resident"):
        cost = costs(args.layers, 16384, model)
        seconds: dict[str, list[float]] = {name: [] for name in SOLVERS}
        found: dict[str, list[Solution]] = {name: [] for name in SOLVERS}
        for _ in range(args.tables):
            s = table(rng, args.layers)
            for share in (0.08, 0.1, 0.15, 0.25, 0.4, 0.7):
                for name in SOLVERS:
                    start = time.perf_counter()
                    found[name].append(solve(s, cost, int(share * cost.max(axis=1).sum()), name))
                    seconds[name].append(time.perf_counter() - start)
        exact = np.array([x.objective for x in found["exact"]])
        out[model] = {
            name: {
                "ms_median": round(float(np.median(seconds[name])) * 1e3, 2),
                "ms_max": round(max(seconds[name]) * 1e3, 2),
                "gap_max": max(x.gap for x in found[name]),
                "excess_mean": float(np.mean([x.objective for x in found[name]] / exact - 1)),
                "excess_max": float(np.max([x.objective for x in found[name]] / exact - 1)),
            }
            for name in SOLVERS
        }
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
