"""Makes what the golden records are computed from: prompts and small calibrations of the fixture models.

    python -m tests.golden.inputs

They were made once. Made again by changed code they may differ, and move every record: do it only on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import save_file

from moend.benchmarks import benchmark
from moend.benchmarks.recall import calibration_texts
from moend.calibration.damage import DamageSettings, damage_table, repeated
from moend.calibration.kl import kl_table
from moend.calibration.queries import TrigStatistics
from moend.calibration.rerun import Evictor
from moend.calibration.ripple import Noise, profile
from moend.calibration.sensitivity import measure
from moend.methods.spec import method
from moend.models import load as models
from moend.plan import Config, extend_lattice, lattice
from moend.scoring import scorer
from tests.golden.records import CALIBRATIONS, MODELS, PROMPTS, load

KEEPS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
PREFIX, WINDOW = 128, 24


def prompts(loaded: Any) -> dict[str, Any]:
    """Make a recall prompt of 256 words with its answer, and one of 160 with the answers to many questions.

    The second's unseen part is its last 30 words and the question, and the model goes on after the end of its answer.
    """
    bench = benchmark({"name": "recall", "type": "recall", "length": 256, "rows": 1, "tasks": ["both"]})
    x = bench.render(bench.samples()[0], loaded.tokenizer, loaded.arch, chat=False)
    text = calibration_texts(1, 160, 68)[0]
    ids = loaded.tokenizer(text).input_ids
    cut = 160 + {"pass": 2, "both": 4}.get(text.split()[160], 3)  # BOS and 159 words, then `? task keys`
    return {
        "short": _prompt(x.ids, x.context_tokens, x.gold_ids, x.max_new_tokens, False),
        "long": _prompt(ids[:cut], 130, ids[cut : cut + 64], 180, True),
    }


def _prompt(ids: Sequence[int], context: int, gold: Sequence[int], new: int, past_eos: bool) -> dict[str, Any]:
    return {"ids": [*ids], "context_tokens": context, "gold_ids": [*gold], "new": new, "past_eos": past_eos}


def examples(loaded: Any, count: int) -> torch.Tensor:
    """Make (count, PREFIX + WINDOW) ids of the recall tasks, the BOS included."""
    texts = calibration_texts(count, PREFIX, WINDOW)
    return torch.tensor([loaded.tokenizer(text).input_ids[: PREFIX + WINDOW] for text in texts])


def calibrations(loaded: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Measure a model with small settings; `kind-METHOD` is what that method uses in place of `kind`."""
    model, ids = loaded.model, torch.tensor([models.calibration_ids(loaded)])
    queries = TrigStatistics.measure(model, ids).tensors()
    by_score: dict[str, Any] = {"scorer": scorer("trig"), "statistics": queries}
    configs = lattice(extend_lattice(KEEPS))
    snap = method("RippleKV")
    base = Evictor(snap.make_scorer(), snap.n_sink, snap.recent)
    texts = examples(loaded, 2)
    found = {
        "queries": queries,
        "sensitivity": measure(model, ids, configs, **by_score).tensors(),
        "sensitivity-KVTuner": measure(model, ids, configs, eviction="random", seeds=(0, 1)).tensors(),
        "kl": kl_table(model, texts, lattice(KEEPS), positions=16, **by_score).tensors(),
        "ripple": profile(model, texts, WINDOW, base, noises=[Noise(0.3, 0)]).tensors(),
    }
    kinds = {"text": texts[:1], "recall": repeated(texts[1:], WINDOW, 8)}
    for name in ("ripple_2d", "ripple_2d_head"):
        m = method(name)
        own = Evictor(m.make_scorer(), m.n_sink, m.recent)
        measured = [Config(*c) for c in DamageSettings().configs]
        made = damage_table(
            model, kinds, WINDOW, measured, own, m.storage, every=3, heads=m.make_allocator().divides_heads
        )
        found[f"damage-{name}"] = made.tensors()
    return found


def main() -> None:
    """Write all inputs."""
    torch.set_num_threads(1)
    for name in MODELS:
        loaded = load(name)
        if name == MODELS[0]:
            lines = [f"{json.dumps(k)}:{json.dumps(v, separators=(',', ':'))}" for k, v in prompts(loaded).items()]
            PROMPTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        (CALIBRATIONS / name).mkdir(parents=True, exist_ok=True)
        for kind, tensors in calibrations(loaded).items():
            held = {k: t.detach().contiguous().clone() for k, t in tensors.items()}
            save_file(held, CALIBRATIONS / name / f"{kind}.safetensors")


if __name__ == "__main__":
    main()
