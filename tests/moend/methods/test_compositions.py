"""The composition is free: any scorer x allocator x precision x schedule runs within its bytes, or says why not."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Mapping
from typing import Any

import pytest

from moend.allocation import names as allocators
from moend.benchmarks.base import Rendered, Sample
from moend.budget import Budget
from moend.calibration.artefact import Artefact
from moend.decoding import Generation, Job
from moend.engine import Engine
from moend.errors import Infeasible, UserError
from moend.methods.bind import BoundMethod, bind, reference_length
from moend.methods.spec import from_fields
from moend.scoring import names as scorers
from tests.golden.records import CALIBRATIONS, load, prompts, tensors

TOGETHER = 120  # compositions that share a prefill
NEW = 24
# All that a composition may be refused for, and nothing else.
REASONS = (
    r"needs a table of what fewer bits do",
    r"drops entries, and method\.scorer=null ranks none",
    r"keeps every entry here, so scorer \w+ has nothing to rank",
    r"gives all heads of a layer the same scores",
    r"places in each head's own order",
    r"goes by what only the prompt's pass shows",
    r"goes by the question, which question_visible=false hides",
    r"needs table=damage: \w+ is measured on the output of a whole layer",
    r"calibration \w+ has no column for",  # bits that nobody measured
    r"calibration \S* ?measured none of method\.allocator\.keeps x bits",
)
JOINT: list[dict[str, Any]] = [
    {},
    {"table": "kl"},
    {"table": "damage"},
    {"table": "damage", "unit": "head"},
    {"unit": "head"},
    {"common_keep": True},
    {"keeps": [1.0]},
    {"solver": "greedy"},
    {"t_ref": "sample", "extend_lattice": False},
]
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "joint": JOINT,
    "adaptive": [{}, {"floor": 0.5}],
    "ripple": [{}, {"signal": "local", "r": 1.25}],
    "moezip": [{}, {"mode": "recon"}],
    "snapkv": [{}, {"window": 8}],
}


def part(rng: random.Random, names: tuple[str, ...]) -> dict[str, Any]:
    """A part and some of its settings."""
    name = rng.choice(names)
    return {"name": name, **rng.choice(SETTINGS.get(name, [{}]))}


def draw(rng: random.Random) -> tuple[dict[str, Any], str, str]:
    """A composition, its budget, and the moment at which the budget binds."""
    bits = [16, 16, 8, 4, 2, "joint"]
    fields = {
        "name": "drawn",
        "scorer": part(rng, scorers()) if rng.random() < 0.9 else None,
        "allocator": part(rng, (*allocators(), "joint")),
        "precision": {"k_bits": rng.choice(bits), "v_bits": rng.choice(bits)},
        "schedule": rng.choice(["prompt", "prompt", "every", "full"]),
        "beta": rng.choice([1, 7, 0.3, 128]),
        "n_sink": rng.choice([0, 4]),
        "recent": rng.choice([0, 10, 0.5]),
    }
    budget = rng.choice(["3%", "10%", "25%", "60%", "90%", "16", "48", "120", "40KiB"])
    return fields, budget, rng.choice(["prompt", "peak"])


@functools.cache
def model(name: str) -> tuple[Any, dict[str, Artefact], Rendered]:
    """A fixture, its calibrations, and a prompt of 163 tokens."""
    held = {k: tensors(CALIBRATIONS / name / f"{k}.safetensors") for k in ("queries", "sensitivity", "kl", "ripple")}
    held["damage"] = tensors(CALIBRATIONS / name / "damage-ripple_2d_head.safetensors")
    asked, sample = prompts()["long"], Sample("compositions", "long", "", "", "", ())
    prompt = Rendered(sample, asked.ids, asked.context_tokens, NEW, gold_ids=asked.gold_ids[:4], context_start=1)
    return load(name), {k: Artefact(k, {}, v) for k, v in held.items()}, prompt


def fitted(loaded: Any, artefacts: Mapping[str, Artefact], cell: Any, engine: Engine, visible: bool) -> BoundMethod:
    """The composition on the model; raises what the library raises where it refuses."""
    fields, typed, at = cell
    method, budget = from_fields(fields), Budget.parse(typed)
    t_ref = reference_length(method, budget, 256, NEW)
    how = {"t_ref": t_ref, "at": at, "artefacts": artefacts, "store_dtype": loaded.store_dtype}
    made = bind(method, budget, "matched", loaded.arch, **how)
    engine.admit(made, question_visible=visible)
    return made


@pytest.mark.req(4)
@pytest.mark.parametrize(("name", "seed"), [("recall_moe", 0), ("recall_moe", 1), ("recall_moe_v2", 2)])
def test_a_composition_runs_within_its_bytes_or_says_why_not(name: str, seed: int) -> None:
    loaded, artefacts, prompt = model(name)
    rng, engine, visible = random.Random(seed), Engine(loaded), seed % 2 == 0
    engine.decoder.eos = frozenset()  # all tokens are generated
    cut = len(prompt.ids) - 1 if visible else prompt.context_tokens
    new = len(prompt.ids) + NEW - cut - 1
    ran = []
    for cell in [draw(rng) for _ in range(TOGETHER)]:
        total = Budget.parse(cell[1]).to_bytes(loaded.arch, cut)
        try:
            made = fitted(loaded, artefacts, cell, engine, visible)
            made.specs(cut, new)
        except Infeasible as e:
            assert "cannot meet the budget" in str(e)
            assert Budget.parse(e.smallest).value > total, cell
        except UserError as e:
            assert any(re.search(reason, str(e)) for reason in REASONS), (str(e), cell)
        else:
            ran.append((cell, made, loaded.arch.full_bytes(cut + new) if made.fits(cut, new) else total))
    assert len(ran) > TOGETHER / 5
    jobs = [Job(b) for _, b, _ in ran]
    outs = engine.run(prompt, jobs, Generation(max_new_tokens=NEW), question_visible=visible)
    for (cell, made, limit), out in zip(ran, outs, strict=True):
        assert len(out.token_ids) == NEW
        assert out.resident_bytes <= limit, cell
        assert cell[2] == "prompt" or out.resident_bytes_peak <= limit, cell
        if made.method.allocator["name"] not in ("adaptive", "global_topk"):  # there a sample's scores decide
            after, peak = made.held(cut, new)
            assert out.resident_bytes == after, cell
            assert out.resident_bytes_peak <= peak, cell
