"""Tasks of lm-evaluation-harness as a benchmark: prompts, boundaries, keys and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval.models.huggingface import HFLM

from moend.benchmarks import Benchmark, benchmark
from moend.budget import Arch
from moend.errors import Blocked, UserError
from tests.harness import answer_tasks, evaluate, recall_tasks, write_task
from tests.moend.benchmarks.conftest import CHATML, byte_tokenizer
from tests.tiny import tiny

ARCH = Arch(2, 2, 1, 8, 4096)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("tasks")
    answer_tasks(where)
    return where


def made(folder: Path, *tasks: str, **fields: Any) -> Benchmark:
    return benchmark("lm_eval", tasks=tasks, include_path=str(folder), **fields)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("room", [4096, 160])
def test_prompts_are_those_of_the_hf_model(folder: Path, chat: bool, room: int) -> None:
    """Ids that the harness' own model is fed, worked examples, chat template and the cut from the left included."""
    tokenizer = byte_tokenizer(bos=not chat, template=CHATML)
    tokenizer.pad_token = tokenizer.eos_token
    seen: list[list[int]] = []

    class Watching(HFLM):
        def _model_generate(self, context: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(context[0].tolist())
            return context

    model = Watching(tiny(vocab_size=len(tokenizer)), tokenizer=tokenizer, max_length=room)
    evaluate(model, folder, ["recall_shots"], apply_chat_template=chat)
    bench = made(folder, "recall_shots", chat_template="all" if chat else "official", length=room)
    ours = [list(bench.render(s, tokenizer, ARCH, chat=chat).ids) for s in bench.samples()]
    assert sorted(ours) == sorted(seen) and len(ours) == 4


def test_the_question_comes_after_the_worked_examples(folder: Path) -> None:
    tokenizer = byte_tokenizer(bos=True)
    bench = made(folder, "recall_shots")
    assert bench.unseen() is None
    for sample, row in zip(bench.samples(), (folder / "recall_gen.jsonl").read_text().splitlines(), strict=True):
        rendered, doc = bench.render(sample, tokenizer, ARCH, chat=False), json.loads(row)
        after = tokenizer.decode(rendered.ids[rendered.context_tokens :])
        assert after == f"{doc['context']} {doc['question']}"
        assert rendered.stop == ("?", "\n") and rendered.max_new_tokens == 4


@pytest.mark.parametrize("template", [None, CHATML])
def test_a_field_of_the_documents_is_the_context(folder: Path, template: str | None) -> None:
    tokenizer = byte_tokenizer(bos=template is None, template=template)
    how = {"chat_template": "all"} if template else {}
    bench = made(folder, "recall_gen", context_field="context", **how)
    for sample, row in zip(bench.samples(), (folder / "recall_gen.jsonl").read_text().splitlines(), strict=True):
        doc = json.loads(row)
        rendered = bench.render(sample, tokenizer, ARCH, chat=template is not None)
        before, after = (
            tokenizer.decode(x)
            for x in (rendered.ids[: rendered.context_tokens], rendered.ids[rendered.context_tokens :])
        )
        assert before.strip().endswith(doc["context"]) and after.lstrip().startswith(doc["question"])


def test_what_cannot_be_told_apart_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "recall_gen does not say where its question begins" in str(made(folder, "recall_gen").unseen())
    twice = {"output_type": "generate_until", "doc_to_text": "{{q}} {{q}}", "doc_to_target": "{{q}}"}
    write_task(tmp_path, "twice", [{"q": "a b"}], **twice)
    with pytest.raises(UserError, match=r"twice 0: benchmark\.context_field=q stands 2 times"):
        made(tmp_path, "twice", context_field="q").samples()
    with pytest.raises(UserError, match=r"context_field of recall_gen 0: 'contxt'. Did you mean 'context'\?"):
        made(folder, "recall_gen", context_field="contxt").samples()


def test_scores_are_the_harness_own(folder: Path) -> None:
    bench = made(folder, "recall_shots")
    sample = bench.samples()[0]
    first, second = sample.gold[0].split()
    right = bench.score(sample, f" {first} {second} the")
    assert right["metrics"] == {"exact_match,one-word": 0.0, "exact_match,both": 1.0}
    assert (right["score"], right["answer"]) == (0.0, first)
    chosen = made(folder, "recall_shots", metric_name="exact_match,both")
    assert (chosen.score(sample, f"{first} {second}")["score"], chosen.score(sample, second)["answer"]) == (1.0, None)
    with pytest.raises(UserError, match=r"Did you mean 'exact_match,both'\?"):
        made(folder, "recall_shots", metric_name="exact_match,bth").metric("recall_shots")


def test_the_key_knows_version_configuration_and_data_but_no_folder(folder: Path, tmp_path: Path) -> None:
    def identity(where: Path, **fields: Any) -> str:
        return json.dumps(made(where, "recall_gen", **fields).identity(), sort_keys=True)

    (one := tmp_path / "one").mkdir()
    for name in ("recall_gen.yaml", "recall_gen.jsonl"):
        (one / name).write_text((folder / name).read_text().replace(str(folder), str(one)))
    assert identity(one) == identity(folder)
    for i, (name, old, new) in enumerate(
        [
            ("recall_gen.yaml", "version: 1.0", "version: 2.0"),
            ("recall_gen.yaml", "max_gen_toks: 6", "max_gen_toks: 7"),
            ("recall_gen.jsonl", "red", "lime"),
        ]
    ):
        (other := tmp_path / str(i)).mkdir()
        for file in ("recall_gen.yaml", "recall_gen.jsonl"):
            text = (folder / file).read_text().replace(str(folder), str(other))
            (other / file).write_text(text.replace(old, new) if file == name else text)
            assert file != name or old in text
        assert identity(other) != identity(folder), new
    assert identity(folder, num_fewshot=1) != identity(folder)


def test_a_larger_limit_only_appends(folder: Path) -> None:
    few, all_of_them = made(folder, "recall_shots", limit=2).samples(), made(folder, "recall_shots").samples()
    assert few == all_of_them[:2]


def test_tasks_that_a_record_cannot_hold_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    recall_tasks(tmp_path, rows=2, length=64)
    for name, kind in (("recall_choice", "multiple_choice"), ("recall_rolling", "loglikelihood_rolling")):
        with pytest.raises(UserError, match=f"{name} is a {kind} task: .* moend-lm-eval --model moend"):
            made(tmp_path, name).samples()
    fields = {"output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{q}}"}
    write_task(tmp_path, "voting", [{"q": "a"}], **fields, repeats=3)
    with pytest.raises(UserError, match="voting votes over 3 answers"):
        made(tmp_path, "voting").samples()
    with pytest.raises(UserError, match="is not a folder"):
        made(tmp_path / "nowhere", "voting").samples()


def test_data_that_are_not_here_block_a_cell() -> None:
    bench = benchmark("lm_eval")
    if bench.absent() is None:
        pytest.skip("gsm8k is on this machine")
    with pytest.raises(Blocked, match="gsm8k"):
        bench.samples()
    assert bench.identity()["data"] and bench.task_names == ("gsm8k",)


@pytest.mark.slow
def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown lm_eval task 'gsm8kk'. Did you mean 'gsm8k'\?"):
        benchmark("lm_eval", tasks=("gsm8kk",)).samples()
