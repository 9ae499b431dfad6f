"""KVZip and MoEZip through the engine on the small trained mixture of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moend import engine as engine_module
from moend.benchmarks import benchmark
from moend.benchmarks.base import Rendered
from moend.budget import Budget
from moend.decoding import Job
from moend.engine import Engine
from moend.errors import UserError
from moend.methods.bind import BoundMethod, bind
from moend.methods.spec import method
from moend.models import load as models
from moend.replay import Replay
from tests.tiny import tiny


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.load(models.spec("recall_moe"), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def example(loaded: Any) -> Rendered:
    bench = benchmark({"name": "recall", "type": "recall", "tasks": "both", "length": 256, "rows": 1})
    return bench.render(bench.samples()[0], loaded.tokenizer, loaded.arch, chat=False)


def cell(loaded: Any, name: str, budget: object, **fields: Any) -> BoundMethod:
    made = method(name, **fields)
    return bind(made, Budget.parse(budget), "matched", loaded.arch, t_ref=None, store_dtype=loaded.store_dtype)


def test_context_start_is_after_the_bos(example):
    assert (example.context_start, example.context_tokens) == (1, 257)


@pytest.mark.req(5)
def test_all_cells_share_one_pass_each_and_agree_with_cells_alone(loaded, example, monkeypatch):
    asked = []
    observe = Replay.observe
    monkeypatch.setattr(
        Replay, "observe", lambda self, p, names, *rest: (asked.append(set(names)), observe(self, p, names, *rest))[1]
    )
    cells = [
        cell(loaded, name, budget, scorer=scorer)
        for budget in ("20%", "40%")
        for name, scorer in (("KVZip", {}), ("KVZip_uniform", {}), ("MoEZip", {}), ("MoEZip", {"mode": "recon"}))
    ]
    together = Engine(loaded).run(example, [Job(c) for c in cells])
    assert asked == [{"reconstruction", "routing_query", "routing_recon"}]
    for c, mine in zip(cells, together, strict=True):
        alone = Engine(loaded, chunk=100).run(example, [Job(c)])[0]
        assert (alone.token_ids, alone.resident_bytes, alone.entries) == (
            mine.token_ids,
            mine.resident_bytes,
            mine.entries,
        )
        assert alone.diagnostics == pytest.approx(mine.diagnostics) if "gamma" in mine.diagnostics else True
    asked.clear()
    Engine(loaded).run(example, [Job(cell(loaded, "SnapKV", "20%")), Job(cell(loaded, "MoEZip", "100%"))])
    assert asked == []  # nobody drops anything that such a pass would choose


@pytest.mark.req(4)
@pytest.mark.req(5)
@pytest.mark.parametrize("budget", ["5%", "20%", "63%", 31, "20KiB"])
def test_the_threshold_spends_the_budget_to_the_entry(loaded, example, budget):
    c = cell(loaded, "KVZip", budget)
    out = Engine(loaded).run(example, [Job(c)])[0]
    total = c.budget.to_bytes(loaded.arch, out.compressed_tokens)
    one = 4 * loaded.arch.head_dim + 4
    whole = sum(n == out.compressed_tokens for layer in out.diagnostics["head_tokens"] for n in layer)
    assert total - one - 4 * out.compressed_tokens * whole < out.resident_bytes <= total
    counts = out.diagnostics["head_tokens"]
    assert sum(map(sum, counts)) == total // one
    assert len({n for layer in counts for n in layer}) > 1  # heads do differ
    assert out.entries == [round(sum(layer) / 2) for layer in counts]


def test_the_threshold_keeps_the_best_of_all_heads(loaded, example, monkeypatch):
    seen = {}
    diagnose = engine_module.diagnose

    def spy(scorer: Any, prefilled: Any, cache: Any, scaling: Any) -> Any:
        seen.update(scores=prefilled.observed["reconstruction"], parts=cache.parts())
        return diagnose(scorer, prefilled, cache, scaling)

    monkeypatch.setattr(engine_module, "diagnose", spy)
    Engine(loaded).run(example, [Job(cell(loaded, "KVZip", "20%"))])
    kept, dropped = [], []
    for scores, parts in zip(seen["scores"], seen["parts"], strict=True):
        assert len(parts) == 2
        for head, part in enumerate(parts):
            here = torch.zeros(scores.shape[-1], dtype=torch.bool)
            here[part.true_positions().long()] = True
            kept.append(scores[0, head][here])
            dropped.append(scores[0, head][~here])
    assert float(torch.cat(kept).min()) >= float(torch.cat(dropped).max())


@pytest.mark.req(5)
def test_moezip_records_what_it_did(loaded, example):
    runs = Engine(loaded, flips=True)
    full, tight, loose = runs.run(
        example, [Job(cell(loaded, "full", 1)), Job(cell(loaded, "MoEZip", "12%")), Job(cell(loaded, "MoEZip", "60%"))]
    )
    assert full.diagnostics == {"routing_flips": 0.0}
    assert tight.diagnostics["note"] == "anchors only"
    assert tight.diagnostics["anchors"] == tight.entries[0] <= 32
    assert "note" not in loose.diagnostics
    assert loose.diagnostics["anchors"] == 32
    assert 0 < loose.diagnostics["replaced"] < tight.diagnostics["replaced"] < 1
    assert 0 < loose.diagnostics["routing_flips"] < tight.diagnostics["routing_flips"] < 1
    few = Engine(loaded).run(example, [Job(cell(loaded, "MoEZip", "12%", scorer={"anchor_min": 8}))])[0]
    assert few.diagnostics["anchors"] == 8
    assert "note" not in few.diagnostics


def test_what_cannot_work_is_said_before_it_runs(loaded, tmp_path):
    runs = Engine(loaded)
    query, recon = cell(loaded, "MoEZip", "20%"), cell(loaded, "MoEZip", "20%", scorer={"mode": "recon"})
    runs.admit(query, question_visible=True)
    runs.admit(recon, question_visible=False)
    with pytest.raises(UserError, match=r"question_visible=false hides: set method\.scorer\.mode=recon"):
        runs.admit(query, question_visible=False)
    with pytest.raises(UserError, match="these prompts ask none"):
        runs.admit(query, question_visible=True, asks=False)
    runs.model = tiny("llama")
    runs.admit(cell(loaded, "KVZip", "20%"), question_visible=True)
    for c in (query, recon):
        with pytest.raises(UserError, match=r"LlamaForCausalLM has no router .* it is a dense model"):
            runs.admit(c, question_visible=True)


def test_a_vocabulary_without_the_words_is_refused(loaded, monkeypatch):
    monkeypatch.setattr(loaded, "spec", models.spec("recall_moe", reconstruction=""))
    runs = Engine(loaded)
    with pytest.raises(UserError, match=r"does not know the words .* set model\.reconstruction"):
        runs.admit(cell(loaded, "KVZip", "20%"), question_visible=True)
