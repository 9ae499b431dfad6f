"""The second fixture is what its README says: small, accurate at 1,024 tokens, all experts in use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moend.benchmarks import benchmark
from moend.budget import Budget
from moend.decoding import Job
from moend.engine import Engine
from moend.hf.routers import Routing
from moend.methods.bind import bind
from moend.methods.spec import method
from moend.models import load as models
from moend.models.spec import PACKAGE

FOLDER = PACKAGE / "fixtures" / "recall_moe_v2"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.load(models.spec("recall_moe_v2"), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def rendered(loaded: Any) -> Any:
    bench = benchmark({"name": "recall", "type": "recall", "length": 1024, "rows": 2})
    return [(bench, s, bench.render(s, loaded.tokenizer, loaded.arch, chat=False)) for s in bench.samples()]


@pytest.mark.req(5)
def test_it_is_small():
    assert sum(p.stat().st_size for p in FOLDER.iterdir()) < 4 * 2**20


@pytest.mark.req(5)
def test_it_answers_and_repeats(loaded, rendered):
    full = bind(method("full"), Budget.parse("100%"), "matched", loaded.arch, t_ref=None)
    scores = []
    for bench, sample, example in rendered:
        out = Engine(loaded).run(example, [Job(full)])[0]
        scores.append(bench.score(sample, out.text)["score"])
    assert sum(scores) >= 9  # of 10
    context = list(rendered[0][2].ids[1:501])
    ids = [loaded.tokenizer.bos_token_id, *context, *loaded.tokenizer("? all", add_special_tokens=False).input_ids]
    with torch.no_grad():
        logits = loaded.model(input_ids=torch.tensor([[*ids, *context]])).logits[0]
    hits = logits[len(ids) - 1 : -1].argmax(-1) == torch.tensor(context)
    assert float(hits.float().mean()) > 0.9


@pytest.mark.req(5)
def test_every_expert_of_every_layer_is_used(loaded, rendered):
    routing = Routing.of(loaded.model, torch.tensor([rendered[0][2].ids[:64]]))
    used = torch.zeros(4, 8)
    with (
        torch.no_grad(),
        routing.recording(lambda by: used[by.layer].add_(torch.bincount(by.chosen.flatten(), minlength=8))),
    ):
        for _, _, example in rendered[:5]:
            loaded.model(input_ids=torch.tensor([example.ids]))
    assert float((used / used.sum(1, keepdim=True)).min()) > 0.02
