"""lm-evaluation-harness on compressed caches: equal to its own `hf` model where all is kept, and a naive reference."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

import moend
from moend.errors import Blocked, UserError
from moend.interop.lm_eval import MoendLM
from moend.models import load as models
from tests.harness import evaluate, recall_tasks, scores, write_task
from tests.moend.methods.made import calibrations

PROMPT = "K01 red K02 blue K03 the a of K04 gold K05 plum to and K06 navy K07 rust in is K08 teal"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.load(models.spec("recall_moe"), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def stock(loaded: Any) -> HFLM:
    return HFLM(loaded.model, tokenizer=loaded.tokenizer, batch_size=3)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("tasks")
    return folder, recall_tasks(folder, rows=4)


def ours(loaded: Any, method: Any = "full", budget: object = "100%", **how: Any) -> MoendLM:
    how = {"batch_size": 3, "store_dtype": "float32", **how}
    return MoendLM(loaded.model, method, budget, tokenizer=loaded.tokenizer, **how)


def asked(kind: str, *arguments: Any) -> list[Instance]:
    return [Instance(kind, {}, one, i, ("t", i, 1)) for i, one in enumerate(arguments)]


@pytest.mark.parametrize("batch", [1, 4])
def test_where_all_is_kept_every_number_is_that_of_the_hf_model(loaded, stock, tasks, batch):
    folder, names = tasks
    theirs, mine = evaluate(stock, folder, names), evaluate(ours(loaded, batch_size=batch), folder, names)
    assert set(scores(mine)) == set(names)
    for name in names:
        assert scores(mine)[name] == pytest.approx(scores(theirs)[name], rel=1e-4)
        for a, b in zip(mine["samples"][name], theirs["samples"][name], strict=True):
            if name == "recall_gen":
                assert a["resps"] == b["resps"]
            elif name == "recall_choice":
                assert [x[0][1] for x in a["resps"]] == [x[0][1] for x in b["resps"]]
                assert [x[0][0] for x in a["resps"]] == pytest.approx([x[0][0] for x in b["resps"]], abs=2e-3)
    assert scores(theirs)["recall_gen"]["exact_match,first"] > 0.5, "the model can do the task, so an error would show"
    assert mine["config"]["moend"]["method"] == "full"


@pytest.mark.slow
def test_a_small_budget_loses_what_the_task_asks_for(loaded, tasks):
    folder, names = tasks
    few = scores(evaluate(ours(loaded, "StreamingLLM", "10%", rolling=32), folder, names))
    full = scores(evaluate(ours(loaded, rolling=32), folder, names))
    assert few["recall_gen"]["exact_match,first"] < full["recall_gen"]["exact_match,first"]
    assert few["recall_choice"]["acc,none"] < full["recall_choice"]["acc,none"]
    assert few["recall_rolling"]["bits_per_byte,none"] > full["recall_rolling"]["bits_per_byte,none"] * 1.001


@pytest.mark.parametrize("method", ["SnapKV", "H2O", "TOVA", "2d_hetero", "ripple_2d_head"])
def test_a_continuation_is_scored_token_by_token_after_its_context(loaded, tmp_path, method):
    """The naive reference: `moend.compress`, one context, one continuation, one token after the other."""
    for kind, artefact in calibrations(loaded.arch).items():
        artefact.save(tmp_path / kind)
    long = " ".join([PROMPT] * 4)
    texts = [(long + " ? K02", " blue"), (long + " ? K02", " gold red teal"), (long[80:] + " ? K09", " lime to and")]
    model = ours(loaded, method, "60%", calibration=str(tmp_path), batch_size=2)
    got = model.loglikelihood(asked("loglikelihood", *texts), disable_tqdm=True)
    for (context, continuation), (score, greedy) in zip(texts, got, strict=True):
        ids = loaded.tokenizer(context).input_ids
        rest = loaded.tokenizer(context + continuation).input_ids[len(ids) :]
        new = max(len(loaded.tokenizer(c + t).input_ids) for c, t in texts if c == context) - len(ids)
        total, right = 0.0, True
        how = {"calibration": tmp_path, "max_new_tokens": new, "store_dtype": torch.float32}
        with torch.no_grad(), moend.compress(loaded.model, method, "60%", **how):
            out = loaded.model(input_ids=torch.tensor([ids]), use_cache=True)
            for token in rest:
                chances = torch.log_softmax(out.logits[0, -1].double(), -1)
                total += float(chances[token])
                right &= int(chances.argmax()) == token
                out = loaded.model(input_ids=torch.tensor([[token]]), past_key_values=out.past_key_values)
        assert (score, greedy) == (pytest.approx(total, abs=2e-3), right)


def test_a_score_does_not_depend_on_the_company(loaded):
    texts = [(PROMPT[: 10 * i + 24] + " ? K01", " red" + " to" * (i % 3)) for i in range(5)]
    for method in ("SnapKV", "TOVA"):
        alone = [ours(loaded, method, "40%", batch_size=1).loglikelihood(asked("l", t), True)[0] for t in texts]
        together = ours(loaded, method, "40%", batch_size=5).loglikelihood(asked("l", *texts), True)
        assert [x for x, _ in together] == pytest.approx([x for x, _ in alone], abs=1e-3)


def test_a_rolling_window_is_scored_in_blocks_after_what_was_compressed(loaded):
    """By hand: the sum over blocks of 5 tokens, each as a continuation of all tokens before it."""
    model = ours(loaded, "StreamingLLM", "50%", rolling=5)
    (got,) = model.loglikelihood_rolling(asked("r", (PROMPT,)), disable_tqdm=True)
    ids = model.tok_encode(PROMPT)
    whole = [model.prefix_token_id, *ids]
    parts = [(None, whole[: i + 1], ids[i : i + 5]) for i in range(0, len(ids), 5)]
    blocks = [model._loglikelihood_tokens([("", *p[1:])], disable_tqdm=True)[0][0] for p in parts]
    assert got == pytest.approx(sum(blocks), abs=1e-4)
    (full,) = ours(loaded, rolling=5).loglikelihood_rolling(asked("r", (PROMPT,)), disable_tqdm=True)
    (once,) = ours(loaded, rolling=99).loglikelihood_rolling(asked("r", (PROMPT,)), disable_tqdm=True)
    assert full == pytest.approx(once, abs=1e-3) and abs(got - full) > 1e-2


def test_the_tokens_are_those_of_compress(loaded):
    model = ours(loaded, "SnapKV", "30%", store_dtype=None)
    prompts = [PROMPT + " ? K04", PROMPT[:60] + " ? K02"]
    how = {"until": ["?"], "max_gen_toks": 5}
    got = model.generate_until(asked("g", *[(p, dict(how)) for p in prompts]), disable_tqdm=True)
    for text, prompt in zip(got, prompts, strict=True):
        ids = loaded.tokenizer(prompt, return_tensors="pt").input_ids
        with moend.compress(loaded.model, "SnapKV", "30%", max_new_tokens=5):
            out = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
        assert text == loaded.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).split("?")[0]


def test_too_long_a_context_is_cut_from_the_left_as_there(loaded, stock):
    long = [(" ".join([PROMPT] * 3), " red blue")]
    theirs = HFLM(loaded.model, tokenizer=loaded.tokenizer, max_length=32).loglikelihood(asked("l", *long), True)
    mine = ours(loaded, max_length=32).loglikelihood(asked("l", *long), True)
    assert mine[0][0] == pytest.approx(theirs[0][0], abs=1e-3)


def test_it_is_registered_and_loads_a_model_of_conf_by_its_name(tasks):
    folder, names = tasks
    assert get_model("moend") is MoendLM
    arguments = "pretrained=recall_moe,method=SnapKV,budget=10%,seed=3"
    found = evaluate("moend", folder, names[:1], model_args=arguments, limit=2, batch_size=2)
    told = found["config"]["moend"]
    assert (told["method"], told["budget"], told["seed"]) == ("SnapKV", "0.1r", "3")


@pytest.mark.parametrize(
    "how, said",
    [
        ({"method": "SnapKW"}, r"unknown method 'SnapKW'. Did you mean 'SnapKV'\?"),
        ({"budget": "110%"}, "more than all of the cache"),
        ({"store_dtype": "float8"}, "unknown store_dtype 'float8'"),
        ({"rolling": 0}, "rolling=0 must be a whole number of tokens"),
        ({"method": "KVZip"}, "batch_size=3: KVZip reads each context once more"),
    ],
)
def test_what_is_not_understood_is_refused(loaded, how, said):
    with pytest.raises(UserError, match=said):
        ours(loaded, **how)


def test_a_missing_calibration_is_named(loaded):
    with pytest.raises(Blocked, match="calibrat"):
        ours(loaded, "2d_hetero", "25%").loglikelihood(asked("l", (PROMPT, " red")), True)


@pytest.mark.process
def test_the_command_line_is_lm_eval_s_own(tmp_path):
    recall_tasks(tmp_path / "tasks", rows=2, length=64)
    code = "import sys; from moend.interop.lm_eval import main; sys.exit(main())"
    given = [
        "--model",
        "moend",
        "--tasks",
        "recall_gen",
        "--include_path",
        str(tmp_path / "tasks"),
        "--batch_size",
        "2",
    ]

    def run(arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, "run", *given, "--model_args", arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    done = run("pretrained=recall_moe,method=SnapKV,budget=50%")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "recall_gen" in done.stdout and "exact_match" in done.stdout


@pytest.mark.slow
def test_the_embedded_model_on_english_tasks(tmp_path):
    """Three offline tasks of English text on the embedded model, equal to `hf` where all is kept."""
    cache = Path("~/.cache/moend").expanduser()
    loaded = models.load(models.spec("smollm2_135m"), cache)
    cities = [("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Japan", "Tokyo"), ("Egypt", "Cairo")]
    rows = [
        {"q": f"The capital of {land} is", "a": city, "options": [c for _, c in cities], "label": i}
        for i, (land, city) in enumerate(cities)
    ]
    text = {"doc_to_text": "{{q}}", "doc_to_target": "{{a}}"}
    metric = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, "ignore_case": True}]
    stops = {"until": [".", ","], "max_gen_toks": 6}
    names = [
        write_task(
            tmp_path, "gen", rows, output_type="generate_until", generation_kwargs=stops, metric_list=metric, **text
        ),
        write_task(
            tmp_path, "choice", rows, output_type="multiple_choice", doc_to_text="{{q}}", doc_to_choice="{{options}}",
            doc_to_target="label",
        ),
        write_task(
            tmp_path, "roll", [{"page": " ".join(r["q"] + " " + r["a"] + "." for r in rows)}],
            output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{page}}",
        ),
    ]  # fmt: skip
    theirs = evaluate(HFLM(loaded.model, tokenizer=loaded.tokenizer, batch_size=2), tmp_path, names)
    mine = evaluate(ours(loaded, rolling=16), tmp_path, names)
    for name in names:
        assert scores(mine)[name] == pytest.approx(scores(theirs)[name], rel=1e-3)
    assert [s["resps"] for s in mine["samples"]["gen"]] == [s["resps"] for s in theirs["samples"]["gen"]]
    assert scores(theirs)["choice"]["acc,none"] >= 0.6
