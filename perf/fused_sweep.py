"""A sweep of 20 cells decoded as one against the same 20 cells run one by one, and where the time goes.

    OMP_NUM_THREADS=1 python -m perf.fused_sweep [--examples 20] [--length 2048] [--budgets 5 10 20 40]

SnapKV, 1d, 2d_uniform, 2d and 2d_hetero at four budgets on needle examples of the embedded model, 16 new tokens, 16-bit
entries held as the model computes (fp32), calibration measured once before. For every example the fused engine runs
once and then each cell by itself with a prefill of its own; both solve their plans themselves. Wall and CPU seconds
are summed over all examples (on a shared machine CPU time is the fairer one), the tokens must be identical, and one
JSON object is printed. `speed` is issue 8's figure: tokens per second of one decode step of all cells together over
the mean of one cell's, prefill and scores of the gold answer left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

METHODS = ("SnapKV", "1d", "2d_uniform", "2d", "2d_hetero")


class Clock:
    """Wall and CPU seconds per phase; what a phase calls that is itself a phase counts for the inner one only."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._inner = [[0.0, 0.0]]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter(), time.process_time()
        self._inner.append([0.0, 0.0])
        try:
            yield
        finally:
            passed = time.perf_counter() - begin[0], time.process_time() - begin[1]
            inner = self._inner.pop()
            for i in (0, 1):
                self.spent[name][i] += passed[i] - inner[i]
                self._inner[-1][i] += passed[i]

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return run

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Everything an engine does is counted while this is open."""
        from moend.cache.prefill import Prefilled
        from moend.decoding import Decoder
        from moend.engine import Engine
        from moend.methods.bind import BoundMethod

        watched = (
            (Engine, "_prefill", "prefill"),
            (Prefilled, "scores", "score"),
            (BoundMethod, "plan", "plan"),
            (BoundMethod, "fork", "select and pack"),
            (Decoder, "_judge", "judge"),
            (Decoder, "answer", "decode"),
        )
        with ExitStack() as stack:
            for owner, name, phase in watched:
                stack.enter_context(patch.object(owner, name, self.timed(phase, getattr(owner, name))))
            with self.phase("rest"):
                yield

    def table(self) -> dict[str, dict[str, float]]:
        return {k: {"wall": round(w, 3), "cpu": round(c, 3)} for k, (w, c) in self.spent.items()}

    def total(self) -> tuple[float, float]:
        return sum(w for w, _ in self.spent.values()), sum(c for _, c in self.spent.values())


class Bench:
    """The embedded model, its calibration, and the cells."""

    def __init__(self, length: int, budgets: list[str], methods: list[str], dtype: str):
        import torch

        from moend.benchmarks import benchmark
        from moend.calibration.artefact import Artefact
        from moend.calibration.queries import TrigStatistics
        from moend.calibration.sensitivity import measure
        from moend.models import load as models
        from moend.plan import KEEPS, extend_lattice, lattice
        from moend.scoring import scorer

        torch.set_num_threads(1)
        self.loaded = models.load(
            models.spec("smollm2_135m", dtype=dtype, store_dtype="model"), Path.home() / ".cache" / "moend"
        )
        ids = torch.tensor([models.calibration_ids(self.loaded)])
        queries = TrigStatistics.measure(self.loaded.model, ids).tensors()
        table = measure(
            self.loaded.model, ids, lattice(extend_lattice(KEEPS)), scorer=scorer("trig"), statistics=queries
        )
        self.artefacts = {
            "queries": Artefact("queries", {}, queries, {}),
            "sensitivity": Artefact("sensitivity", {}, table.tensors(), {}),
        }
        self.bench = benchmark({"name": "niah", "type": "niah", "length": length})
        self.budgets, self.methods = budgets, methods

    def examples(self, count: int) -> Iterator[Any]:
        for sample in self.bench.samples()[:count]:
            yield self.bench.render(sample, self.loaded.tokenizer, self.loaded.arch, chat=True)

    def jobs(self) -> list[Any]:
        """The cells, bound anew so that neither side finds the other's plans."""
        from moend.budget import Budget
        from moend.decoding import Job
        from moend.methods.bind import bind
        from moend.methods.spec import method

        return [
            Job(
                bind(
                    method(m),
                    Budget.parse(f"{b}%"),
                    "matched",
                    self.loaded.arch,
                    t_ref=None,
                    artefacts=self.artefacts,
                    store_dtype=self.loaded.store_dtype,
                )
            )
            for m in self.methods
            for b in self.budgets
        ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=20)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--budgets", nargs="+", default=["5", "10", "20", "40"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--only-fused", action="store_true", help="leave the singles out (for profiling)")
    args = parser.parse_args()

    from moend.engine import Engine

    bench = Bench(args.length, args.budgets, args.methods, args.dtype)
    engine = Engine(bench.loaded)
    together, alone = Clock(), Clock()
    same = different = steps = 0
    jobs_fused, jobs_single = bench.jobs(), bench.jobs()
    engine.run(next(bench.examples(1)), jobs_fused[:1])  # imports and first allocations are nobody's
    for example in bench.examples(args.examples):
        with together.watching():
            fused = engine.run(example, jobs_fused)
        steps += sum(o.new_tokens for o in fused)
        if args.only_fused:
            continue
        for job, mine in zip(jobs_single, fused, strict=True):
            with alone.watching():
                single = engine.run(example, [job])[0]
            same += single.token_ids == mine.token_ids
            different += single.token_ids != mine.token_ids
        (fw, fc), (sw, sc) = together.total(), alone.total()
        print(f"wall {sw / fw:.2f} cpu {sc / fc:.2f} same {same} different {different}", file=sys.stderr)
    (fw, fc), (sw, sc) = together.total(), alone.total()
    fd, sd = together.spent["decode"], alone.spent["decode"]
    report = {
        "examples": args.examples,
        "length": args.length,
        "cells": len(jobs_fused),
        "dtype": args.dtype,
        "threads": 1,
        "ratio": {"wall": round(sw / fw, 2), "cpu": round(sc / fc, 2)},
        "identical": same,
        "different": different,
        "new_tokens": steps,
        "fused": {"wall": round(fw, 2), "cpu": round(fc, 2), **together.table()},
        "single": {"wall": round(sw, 2), "cpu": round(sc, 2), **alone.table()},
        "speed": {"wall": round(sd[0] / fd[0], 2), "cpu": round(sd[1] / fd[1], 2)},
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
