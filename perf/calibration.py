"""Time of the sensitivity table against one plain forward pass on the same prompt, in one run: prints one JSON object.

`python -m perf.calibration` uses random weights in the embedded model's shape; `--model smollm2_135m` the model itself
(any name of conf/model whose weights are here). Each ratio is table / forward: the median over rounds that time both
in turn. A table includes its prefill and, for trig, the query statistics where it says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moend.calibration.queries import TrigStatistics
from moend.calibration.sensitivity import measure
from moend.plan import KEEPS, extend_lattice, lattice
from moend.scoring import scorer
from perf.meter import taken

TOKENS = 27  # where no text of the model's own is at hand


def random_model() -> Any:
    """SmolLM2-135M's shape with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        rope_theta=1e5,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a name of conf/model (default: random weights)")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/moend").expanduser())
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if args.model:
        from moend.models import load as models

        loaded = models.load(models.spec(args.model), args.cache)
        model, ids = loaded.model, torch.tensor([models.calibration_ids(loaded)], device=loaded.device)
    else:
        model = random_model()
        ids = torch.randint(0, 49152, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    stats = TrigStatistics.measure(model, ids).tensors()
    full = lattice(extend_lattice(KEEPS))

    @torch.no_grad()
    def forward() -> None:
        model(input_ids=ids, use_cache=False)

    work: dict[str, Callable[[], object]] = {
        "54 columns, trig": lambda: measure(model, ids, scorer=scorer("trig"), statistics=stats),
        "54 columns, trig, with query statistics": lambda: measure(
            model, ids, scorer=scorer("trig"), statistics=TrigStatistics.measure(model, ids).tensors()
        ),
        "54 columns, snapkv": lambda: measure(model, ids, scorer=scorer("snapkv")),
        "54 columns, random, 1 seed": lambda: measure(model, ids, eviction="random", seeds=(0,)),
        "54 columns, random, 3 seeds": lambda: measure(model, ids, eviction="random", seeds=(0, 1, 2)),
        "81 columns (default), trig": lambda: measure(model, ids, full, scorer=scorer("trig"), statistics=stats),
    }
    for f in (forward, *work.values()):
        f()
    plain: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(args.rounds):
        for name, f in work.items():
            plain.append(taken(forward))
            ratios[name].append(taken(f) / plain[-1])
    out = {
        "model": args.model or "random weights",
        "tokens": ids.shape[1],
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "forward_ms": round(statistics.median(plain) * 1e3, 1),
        "ratio": {name: round(statistics.median(r), 2) for name, r in ratios.items()},
    }
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
