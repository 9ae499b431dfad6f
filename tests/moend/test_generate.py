"""`moend.compress` on a trained model: the tokens of the engine, with calibrations from a folder or in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import moend
from moend.benchmarks import benchmark
from moend.budget import Arch, Budget
from moend.calibration.artefact import Artefact
from moend.engine import Engine, Generation, Job, stable_seed
from moend.errors import Blocked, UserError
from moend.methods.bind import bind, method, method_names
from moend.models import load as models
from moend.plan import LayerPlan, RoutingPlan
from tests.moend.test_methods import calibrations, sensitivity


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.load(models.spec("recall_moe"), tmp_path_factory.mktemp("cache"))


def artefacts(arch: Arch) -> dict[str, Artefact]:
    return calibrations(arch)


@pytest.fixture(scope="module")
def example(loaded: Any) -> Any:
    bench = benchmark({"name": "recall", "type": "recall", "length": 256, "rows": 1})
    return bench.render(bench.samples()[0], loaded.tokenizer, loaded.arch, chat=False)


@pytest.mark.parametrize("name", method_names())
@pytest.mark.parametrize("budget", ["15%", "40%"])
def test_generate_gives_the_engine_s_tokens(loaded, example, name, budget):
    new = 12
    if method(name).allocator == "all":  # what keeps every token cannot go so low
        budget = "80%" if budget == "15%" else "90%"
    made = artefacts(loaded.arch)
    bound = bind(
        method(name),
        Budget.parse(budget),
        "matched",
        loaded.arch,
        t_ref=None,
        artefacts=made,
        store_dtype=loaded.store_dtype,
    )
    ours = Engine(loaded).run(example, [Job(bound)], Generation(max_new_tokens=new))[0]
    ids, seed = torch.tensor([example.ids]), stable_seed(0, example.sample.id)
    reading = {
        "tokenizer": loaded.tokenizer,
        "context": (example.context_start, example.context_tokens),
        "reconstruction": loaded.spec.reconstruction,
    }
    with moend.compress(loaded.model, name, budget, calibration=made, max_new_tokens=new, seed=seed, **reading):
        out = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    assert out[0, ids.shape[1] :].tolist() == ours.token_ids


def test_calibrations_come_from_a_folder(loaded, example, tmp_path: Path):
    for kind, artefact in artefacts(loaded.arch).items():
        artefact.save(tmp_path / kind)
    ids = torch.tensor([example.ids])
    outs = []
    for calibration in (tmp_path, artefacts(loaded.arch)):
        with moend.compress(loaded.model, "2d_hetero", "25%", calibration=calibration):
            outs.append(loaded.model.generate(ids, max_new_tokens=6, do_sample=False))
    assert torch.equal(*outs)
    (tmp_path / "another").mkdir()
    sensitivity(loaded.arch, seed=1).save(tmp_path / "another")
    with (
        pytest.raises(UserError, match="several"),
        moend.compress(loaded.model, "2d_hetero", "25%", calibration=tmp_path),
    ):
        pass


@pytest.mark.req(24)
def test_a_missing_calibration_is_told_before_anything_runs(loaded):
    with pytest.raises(Blocked, match=r"pipelines\.calibrate"), moend.compress(loaded.model, "2d_hetero", "25%"):
        pass
    with (
        pytest.raises(UserError, match="no calibration in"),
        moend.compress(loaded.model, "2d_hetero", "25%", calibration="/nowhere"),
    ):
        pass


def test_a_given_plan_is_followed(loaded, example):
    """A plan by hand: what each layer keeps is what the plan says."""
    layers = tuple(
        LayerPlan(keep=min(n / 300, 1), tokens=n, k_bits=k) for n, k in ((30, 16), (60, 8), (10**6, 16), (45, 4))
    )
    plan = RoutingPlan("m", "r", 300, "100t", "matched", "hand", None, None, layers)
    ids = torch.tensor([example.ids])
    held: list[list[int]] = []

    def look(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        cache = getattr(output, "cache", None) or output.past_key_values
        held.append(cache.entries())

    handle = loaded.model.register_forward_hook(look, with_kwargs=True)
    try:
        with moend.compress(
            loaded.model, "2d_hetero", 100, plan=plan, calibration=artefacts(loaded.arch), max_new_tokens=3
        ):
            loaded.model.generate(ids, max_new_tokens=3, do_sample=False)
    finally:
        handle.remove()
    n = len(example.ids)
    assert held[0][2] == n
    assert all(have <= cap for have, cap in zip(held[-1], (30, 60, n + 3, 45), strict=True))


def test_methods_that_read_twice_need_a_tokenizer_and_one_prompt(loaded, example):
    with (
        pytest.raises(UserError, match=r"KVZip asks the model to repeat the context: moend.compress needs tokenizer="),
        moend.compress(loaded.model, "KVZip", "20%"),
    ):
        pass
    ids = torch.tensor([example.ids]).repeat(2, 1)
    with (
        pytest.raises(UserError, match="one prompt at a time"),
        moend.compress(loaded.model, "KVZip", "20%", tokenizer=loaded.tokenizer, reconstruction="? all"),
    ):
        loaded.model.generate(ids, max_new_tokens=2, do_sample=False)
