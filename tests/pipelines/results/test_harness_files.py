"""`pipelines.score benchmark=lm_eval` on files that the harness itself wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.huggingface import HFLM

from moend.models import load as models
from moend.statistics import score_interval
from pipelines.results import predictions
from tests.harness import answer_tasks, evaluate

NAMES = ["recall_gen", "recall_shots", "recall_bleu"]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of samples that the harness logged, and its own results."""
    tasks, out = tmp_path_factory.mktemp("tasks"), tmp_path_factory.mktemp("out")
    answer_tasks(tasks)
    loaded = models.load(models.spec("recall_moe"), out)
    tracker = EvaluationTracker(output_path=str(out))
    found = evaluate(HFLM(loaded.model, tokenizer=loaded.tokenizer), tasks, NAMES, evaluation_tracker=tracker)
    samples = found.pop("samples")
    tracker.save_results_aggregated(results=found, samples=samples)
    for name in NAMES:
        tracker.save_results_samples(task_name=name, samples=samples[name])
    (folder,) = {p.parent for p in out.rglob("samples_*.jsonl")}
    return folder, found["results"]


def test_the_scores_are_the_harness_own(logged: tuple[Path, Any], capsys: Any, tmp_path: Path) -> None:
    folder, theirs = logged
    assert predictions.main(["benchmark=lm_eval", f"predictions={folder}", f"out={tmp_path}"]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result["tasks"]) == {f"recall_gen {k}" for k in ("exact_match,first",)} | {
        f"recall_shots exact_match,{k}" for k in ("one-word", "both")
    }
    for name, score in result["tasks"].items():
        task, _, metric = name.partition(" ")
        assert score == pytest.approx(100 * theirs[task][metric], abs=0.005)
    assert result["tasks"]["recall_gen exact_match,first"] > 50
    assert result["unknown"] == ["recall_bleu bleu,none"] and "recall_bleu bleu,none" in capsys.readouterr().out
    (file,) = folder.glob("samples_recall_gen_*.jsonl")
    values = [json.loads(line)["exact_match"] for line in file.read_text().splitlines()]
    interval = score_interval(values, range(len(values)))
    assert result["intervals"]["recall_gen exact_match,first"] == [
        round(100 * x, 2) for x in (interval.low, interval.high)
    ]


def test_one_file_and_an_older_one(logged: tuple[Path, Any], tmp_path: Path, capsys: Any) -> None:
    (file,) = logged[0].glob("samples_recall_gen_*.jsonl")
    old = "samples_recall_gen_2020-01-01T00-00-00.000000.jsonl"
    (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / old).write_text(file.read_text().splitlines()[0] + "\n")
    assert predictions.main(["benchmark=lm_eval", f"predictions={tmp_path}"]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["rows"] == {"recall_gen exact_match,first": 4} and result["unknown"] == [old]


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("other.jsonl", "{}", "holds no samples_<task>_<date>.jsonl"),
        ("samples_t_2026-01-01T00-00-00.jsonl", "", "is empty"),
        ("samples_t_2026-01-01T00-00-00.jsonl", '{"doc_id": 0, "filter": "none"}', "has no field 'metrics'"),
        (
            "samples_t_2026-01-01T00-00-00.jsonl",
            '{"doc_id": 0, "filter": "none", "metrics": ["acc"]}',
            "has no field 'acc' although its 'metrics' name it",
        ),
        (
            "samples_t_2026-01-01T00-00-00.jsonl",
            '{"doc_id": 0, "filter": "none", "metrics": ["ppl"], "ppl": 7.5}',
            "no metric is a share between 0 and 1: t ppl,none",
        ),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, capsys: Any, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    assert predictions.main(["benchmark=lm_eval", f"predictions={tmp_path}"]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
