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
from moend.decoding import Generation, Job
from moend.engine import Engine, stable_seed
from moend.errors import Blocked, UserError
from moend.methods.bind import bind
from moend.methods.spec import method, method_names
from moend.models import load as models
from moend.plan import LayerPlan, RoutingPlan
from tests.moend.methods.made import calibrations, sensitivity


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
    if method(name).keeps_all:  # what keeps every token cannot go so low
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
            loaded.model,
            "2d_hetero",
            100,
            plan=plan,
            calibration=artefacts(loaded.arch),
            max_new_tokens=3,
            budget_at="peak",
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


GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


def tokens(loaded: Any, ids: torch.Tensor, budget: str = "25%", name: str = "SnapKV", **how: Any) -> torch.Tensor:
    """What the model generates after ids inside the context."""
    torch.manual_seed(0)
    with moend.compress(loaded.model, name, budget, max_new_tokens=64):
        out: torch.Tensor = loaded.model.generate(ids, **{**GREEDY, "max_new_tokens": 6, **how})
    return out[:, ids.shape[1] :]


@torch.no_grad()
@pytest.mark.parametrize("name", ["full", "SnapKV", "H2O", "TOVA", "StreamingLLM", "MiniKV"])
def test_a_second_turn_continues_the_first_cache(loaded, example, name):
    """Turn by turn through one cache gives what feeding the same tokens in one answer gives."""
    model, ids = loaded.model, torch.tensor([example.ids])
    turn = torch.tensor([example.ids[-6:]])
    long = {**GREEDY, "return_dict_in_generate": True}
    with moend.compress(model, name, "40%" if name != "full" else "100%", max_new_tokens=64):
        one = model.generate(ids, max_new_tokens=5, min_new_tokens=5, **long)
        twin = one.past_key_values.fork()
        held = one.past_key_values.counts()
        two = model.generate(
            torch.cat([one.sequences, turn], 1), past_key_values=one.past_key_values, max_new_tokens=6, **long
        )
        fed = torch.cat([one.sequences[:, -1:], turn], 1)
        logits = model(fed, past_key_values=twin, position_ids=torch.arange(7)[None] + ids.shape[1] + 4).logits[:, -1]
    assert two.past_key_values is one.past_key_values  # the same object goes on
    assert int(logits.argmax()) == int(two.sequences[0, ids.shape[1] + 5 + 6])
    assert two.past_key_values.get_seq_length() == two.sequences.shape[1] - 1
    if name in ("H2O", "TOVA", "StreamingLLM"):  # they go on evicting, and never hold more than before
        assert two.past_key_values.counts() == held
    with pytest.raises(UserError, match="moend"):
        model(fed, past_key_values=two.past_key_values)  # outside of the context


def test_two_turns_with_room_are_the_stock_model_s(loaded, example):
    ids, long = torch.tensor([example.ids]), {**GREEDY, "return_dict_in_generate": True}
    second = torch.cat([ids, ids[:, -6:]], 1)
    with moend.compress(loaded.model, "SnapKV", "100%", max_new_tokens=64):
        one = loaded.model.generate(ids, max_new_tokens=1, **long)
        two = loaded.model.generate(second, past_key_values=one.past_key_values, max_new_tokens=6, **long)
    assert torch.equal(two.sequences, loaded.model.generate(second, max_new_tokens=6, **GREEDY))


def test_sampling_beams_and_several_answers(loaded, example):
    ids = torch.tensor([example.ids])
    greedy = tokens(loaded, ids)
    assert torch.equal(tokens(loaded, ids, num_beams=1), greedy)
    several = tokens(loaded, ids, num_beams=3, num_return_sequences=3)
    assert several.shape[0] == 3 and len({tuple(x.tolist()) for x in several}) == 3
    drawn = tokens(loaded, ids, do_sample=True, temperature=3.0, num_return_sequences=4)
    assert drawn.shape[0] == 4 and len({tuple(x.tolist()) for x in drawn}) > 1
    assert torch.equal(tokens(loaded, ids, do_sample=True, temperature=3.0, num_return_sequences=4), drawn)
    cold = tokens(loaded, ids, do_sample=True, temperature=0.01, num_return_sequences=2)
    assert all(torch.equal(row, greedy[0, : len(row)]) for row in cold)


def test_a_streamer_sees_the_tokens_one_by_one(loaded, example):
    class Seen:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    ids, seen = torch.tensor([example.ids]), Seen()
    out = tokens(loaded, ids, streamer=seen)
    assert seen.tokens == [*example.ids, *out[0].tolist(), -1]


def test_a_pipeline_answers_as_generate_does(loaded, example):
    from transformers import pipeline

    text = loaded.tokenizer.decode(example.ids[1:])
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids
    answers = pipeline("text-generation", model=loaded.model, tokenizer=loaded.tokenizer)
    with moend.compress(loaded.model, "SnapKV", "25%", max_new_tokens=64):
        (got,) = answers(text, max_new_tokens=6, do_sample=False, return_full_text=False)
        pair = answers([text, text], batch_size=2, max_new_tokens=6, do_sample=False, return_full_text=False)
    expected = loaded.tokenizer.decode(tokens(loaded, ids)[0], skip_special_tokens=True)
    assert got["generated_text"] == expected and [x[0]["generated_text"] for x in pair] == [expected] * 2


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"use_cache": False}, "use_cache=False computes without a cache"),
        ({"labels": True}, "labels= asks for every position"),
        ({"output_attentions": True}, "output_attentions= asks for every position"),
    ],
)
def test_what_a_compressed_prompt_cannot_give_is_refused(loaded, example, how, told):
    ids = torch.tensor([example.ids])
    how = {"labels": ids} if "labels" in how else how
    with torch.no_grad(), moend.compress(loaded.model, "SnapKV", "25%"), pytest.raises(UserError, match=told):
        loaded.model(ids, **how)


def test_assisted_decoding_is_refused(loaded, example):
    with pytest.raises((UserError, ValueError), match="crop"):
        tokens(loaded, torch.tensor([example.ids]), prompt_lookup_num_tokens=2)


def test_a_missing_calibration_is_measured_at_once_and_found_again(loaded, example, tmp_path, capsys):
    ids, folder = torch.tensor([example.ids]), str(tmp_path / "made")
    with pytest.raises(UserError, match="tokenizer="), moend.compress(loaded.model, "2d_hetero", "25%", calibrate=True):
        pass
    outs = []
    for how in (True, folder, folder):
        with moend.compress(loaded.model, "2d_hetero", "25%", calibrate=how, tokenizer=loaded.tokenizer):
            outs.append(loaded.model.generate(ids, max_new_tokens=6, **GREEDY))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[1], outs[2])
    assert {p.name for p in (tmp_path / "made").iterdir()} == {"sensitivity", "queries"}
