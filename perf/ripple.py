"""CPU time of RippleKV's profile against one full forward pass over the same examples, in one run: prints JSON.

    python -m perf.ripple [--model smollm2_135m] [--examples 16] [--prefix 1024] [--window 128] [--naive]

Also shown: the profile with the damage at three shares (four runs per layer instead of one), and with --naive the
obvious way on one example, a full forward pass per layer. `ratio` is to the forward passes, logits of the window only.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

from moend.calibration.rerun import Evictor
from moend.calibration.ripple import Noise, profile
from moend.scoring import scorer
from perf.meter import taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2_135m")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/moend").expanduser())
    parser.add_argument("--examples", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--naive", action="store_true")
    parser.add_argument("--damage", action="store_true")
    args = parser.parse_args()
    from moend.models import load as models

    torch.set_num_threads(args.threads)
    loaded = models.load(models.spec(args.model), args.cache)
    model: Any = loaded.model
    layers = loaded.arch.layers
    generator = torch.Generator().manual_seed(0)
    top = model.config.vocab_size
    ids = torch.randint(3, top, (args.examples, args.prefix + args.window), generator=generator).to(loaded.device)
    base = Evictor(scorer("snapkv"), 0, 32)

    @torch.no_grad()
    def forward(rows: torch.Tensor) -> None:
        for row in rows:
            model(input_ids=row[None], use_cache=False, logits_to_keep=args.window)

    forward(ids[:1, :64])
    profile(model, ids[:1, -2 * args.window :], args.window, base)
    seconds = {"forward": 0.0, "profile": 0.0}
    for row in ids.split(1):  # in turn, so that a busy machine slows both
        seconds["forward"] += taken(lambda row=row: forward(row))  # type: ignore[misc]
        seconds["profile"] += taken(lambda row=row: profile(model, row, args.window, base, noises=(Noise(0.3),)))  # type: ignore[misc]
    ratio = {"profile": seconds["profile"] / seconds["forward"]}
    if args.damage:
        one = taken(lambda: profile(model, ids[:1], args.window, base, keeps=(0.1, 0.2, 0.3)))
        ratio["profile and damage at three shares"] = one / seconds["forward"] * args.examples
    if args.naive:
        one = taken(lambda: forward(ids[:1].expand(layers + 1, -1)))
        ratio["naive: a forward pass per layer"] = one / seconds["forward"] * args.examples
    print(
        json.dumps(
            {
                "model": args.model,
                "examples": args.examples,
                "prefix": args.prefix,
                "window": args.window,
                "layers": layers,
                "threads": args.threads,
                "load": round(os.getloadavg()[0], 1),
                "cpu_seconds": {k: round(v, 2) for k, v in seconds.items()},
                "ratio": {k: round(v, 2) for k, v in ratio.items()},
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
