"""Prefill with scoring and packing against a plain prefill, and how peak memory grows with the prompt.

    python -m perf.prefill [--lengths 2048 4096 8192] [--repeats 3] [--threads 1]

Time: CPU seconds of alternating runs in this process (on a GPU the clock's), ratios formed within a round. Memory: the
high-water mark of a fresh process per length, the loaded model subtracted. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from perf.meter import peak_of, positive, spread, taken

METHODS = ("1d", "2d_uniform", "SnapKV", "H2O")


class Bench:
    """The embedded model, a prompt, and the two ways to prefill it."""

    def __init__(self, threads: int):
        import torch

        from moend.calibration.artefact import Artefact
        from moend.calibration.queries import TrigStatistics
        from moend.engine import attention_scaling
        from moend.models import load as models

        torch.set_num_threads(threads)
        self.torch = torch
        self.loaded = models.load(models.spec("smollm2_135m"), Path.home() / ".cache" / "moend")
        ids = torch.tensor([models.calibration_ids(self.loaded)], device=self.loaded.device)
        queries = TrigStatistics.measure(self.loaded.model, ids).tensors()
        self.artefacts = {"queries": Artefact("queries", {}, queries, {})}
        self.scaling = attention_scaling(self.loaded.model)

    def prompt(self, length: int) -> Any:
        generator = self.torch.Generator().manual_seed(length)
        return self.torch.randint(100, 40000, (1, length), generator=generator).to(self.loaded.device)

    def plain(self, ids: Any) -> None:
        """transformers alone: SDPA and its DynamicCache."""
        with self.torch.no_grad():
            self.loaded.model.base_model(input_ids=ids, use_cache=True)

    def ours(self, ids: Any, name: str) -> None:
        """Prefill, score, select and pack one cell at 25 %."""
        from moend.budget import Budget
        from moend.cache import attention_of, prefill
        from moend.engine import rotations
        from moend.methods.bind import bind
        from moend.methods.spec import method

        model = self.loaded.model
        bound = bind(
            method(name),
            Budget.parse("25%"),
            "matched",
            self.loaded.arch,
            t_ref=None,
            artefacts=self.artefacts,
            store_dtype=self.loaded.store_dtype,
        )
        made = bound.method.make_scorer()
        with self.torch.no_grad(), attention_of(model):
            done = prefill(
                model, ids, last_queries=made.last_queries if made else 0, observe=made.observes if made else ()
            )
            rotary = rotations(model) if bound.needs_rotary else None
            bound.fork(done, 16, rotary=rotary, scaling=self.scaling)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=positive, nargs="+", default=[2048, 4096, 8000])
    parser.add_argument("--time-at", type=positive, default=4096, help="tokens of the prompts that are timed")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    bench = Bench(args.threads)
    if args.peak:
        kind, length = args.peak.split(":")
        ids = bench.prompt(int(length))
        bench.plain(ids[:, :64])
        print(json.dumps(peak_of(lambda: bench.plain(ids) if kind == "plain" else bench.ours(ids, kind))))
        return
    ids = bench.prompt(args.time_at)
    bench.plain(ids[:, :256])
    times: dict[str, list[float]] = {k: [] for k in ("plain", *METHODS)}
    for _ in range(args.repeats):
        times["plain"].append(taken(lambda: bench.plain(ids)))
        for name in METHODS:
            times[name].append(taken(lambda name=name: bench.ours(ids, name)))  # type: ignore[misc]
    ratios = {k: spread([x / p for x, p in zip(v, times["plain"], strict=True)], 3) for k, v in times.items()}
    peaks = {
        f"{kind}:{n}": json.loads(
            subprocess.run(
                [sys.executable, "-W", "ignore", "-m", "perf.prefill", "--peak", f"{kind}:{n}"],
                check=True,
                capture_output=True,
                text=True,
            ).stdout.splitlines()[-1]
        )
        for kind in ("plain", "1d", "H2O")
        for n in args.lengths
    }
    print(
        json.dumps(
            {
                "tokens": args.time_at,
                "threads": args.threads,
                "seconds": times,
                "ratio_to_plain": ratios,
                "peak_mib": {k: round(v / 2**20, 1) for k, v in peaks.items()},
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
