"""CPU time of the damage tables, per layer and per head, against one full forward pass, in one run: prints JSON.

    python -m perf.damage [--model smollm2_135m] [--examples 1]

The tables are those of conf/calibration/default.yaml, on random ids; `ratio` is to a forward pass over an example's
prefix and window, logits of the window only.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moend.calibration.damage import DamageSettings, damage_table
from moend.calibration.rerun import Evictor
from moend.methods.spec import method
from moend.plan import Config
from perf.meter import taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2_135m")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/moend").expanduser())
    parser.add_argument("--examples", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    from moend.models import load as models

    torch.set_num_threads(args.threads)
    loaded = models.load(models.spec(args.model), args.cache)
    model: Any = loaded.model
    s, m = DamageSettings(), method("ripple_2d")
    made = m.make_scorer()
    assert made is not None
    base, configs = Evictor(made, m.n_sink, m.recent), [Config(*c) for c in s.configs]
    ids = torch.randint(3, model.config.vocab_size, (args.examples, s.prefix + s.window)).to(loaded.device)

    @torch.no_grad()
    def forward(row: torch.Tensor) -> None:
        model(input_ids=row, use_cache=False, logits_to_keep=s.window)

    def table(row: torch.Tensor, heads: bool) -> None:
        damage_table(model, {"text": row}, s.window, configs, base, m.storage, every=s.every, heads=heads)

    forward(ids[:1, :64])
    seconds = {"forward": 0.0, "layers": 0.0, "heads": 0.0}
    for row in ids.split(1):  # in turn, so that a busy machine slows all
        seconds["forward"] += taken(partial(forward, row))
        seconds["layers"] += taken(partial(table, row, False))
        seconds["heads"] += taken(partial(table, row, True))
    shape = {"layers": loaded.arch.layers, "kv_heads": loaded.arch.kv_heads, "configs": len(configs)}
    told = {
        "model": args.model,
        **shape,
        "examples": args.examples,
        "prefix": s.prefix,
        "window": s.window,
        "threads": args.threads,
        "load": round(os.getloadavg()[0], 1),
        "cpu_seconds": {k: round(v, 2) for k, v in seconds.items()},
        "ratio": {k: round(v / seconds["forward"], 2) for k, v in seconds.items() if k != "forward"},
    }
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
