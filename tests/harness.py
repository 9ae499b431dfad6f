"""Tasks of lm-evaluation-harness that need no network: YAML files and rows written for a test."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from moend.benchmarks import benchmark

COLOURS = ("red", "teal", "blue", "pink", "gold", "grey", "lime", "navy", "plum", "rust")


def write_task(folder: Path, name: str, rows: Iterable[Mapping[str, Any]], **fields: Any) -> str:
    """A task file and its rows in a folder that `include_path` names; returns the task's name."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "metadata": {"version": 1.0},
        **fields,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return name


def recall_tasks(folder: Path, rows: int = 6, length: int = 128) -> list[str]:
    """Three tasks in the words of recall_moe: facts asked for, a choice of colours, and the likelihood of its texts."""
    bench = benchmark({"name": "recall", "type": "recall", "tasks": ["col"], "length": length, "rows": rows})
    samples, rng = bench.samples(), random.Random(0)
    asked = [{"context": s.context, "question": s.question, "answer": s.gold[0]} for s in samples]
    chosen = []
    for row in asked:
        first, second = row["answer"].split()
        options = [row["answer"], second, *(f"{a} {b}" for a, b in (rng.sample(COLOURS, 2) for _ in range(3)))]
        options.append(f"{first} {second} {second}")
        rng.shuffle(options)
        chosen.append({**row, "options": options, "label": options.index(row["answer"])})
    write_task(
        folder,
        "recall_gen",
        asked,
        output_type="generate_until",
        doc_to_text="{{context}} {{question}}",
        doc_to_target="{{answer}}",
        generation_kwargs={"until": ["?"], "max_gen_toks": 6, "do_sample": False},
        filter_list=[
            {
                "name": "first",
                "filter": [{"function": "regex", "regex_pattern": r"^\s*(\S+ \S+)"}, {"function": "take_first"}],
            }
        ],
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )
    write_task(
        folder,
        "recall_choice",
        chosen,
        output_type="multiple_choice",
        doc_to_text="{{context}} {{question}}",
        doc_to_choice="{{options}}",
        doc_to_target="label",
        metric_list=[{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")],
    )
    write_task(
        folder,
        "recall_rolling",
        [{"page": f"{row['context']} {row['question']} {row['answer']}"} for row in asked],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{page}}",
    )
    return ["recall_gen", "recall_choice", "recall_rolling"]


def answer_tasks(folder: Path, rows: int = 4, length: int = 96) -> list[str]:
    """Three tasks with answers: a regex filter, worked examples with two filters, and a metric of the whole corpus."""
    recall_tasks(folder, rows, length)
    lines = (folder / "recall_gen.jsonl").read_text(encoding="utf-8").splitlines()
    asked = [json.loads(line) for line in lines]
    shared = {
        "output_type": "generate_until",
        "doc_to_text": "{{context}} {{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["?", "\n"], "max_gen_toks": 4},
    }
    first = [{"function": "regex", "regex_pattern": r"(\S+)"}, {"function": "take_first"}]
    both = [{"function": "regex", "regex_pattern": r"^\s*(\S+ \S+)"}, {"function": "take_first"}]
    write_task(
        folder,
        "recall_shots",
        asked,
        **shared,
        fewshot_split="test",
        num_fewshot=2,
        description="the words are",
        filter_list=[{"name": "one-word", "filter": first}, {"name": "both", "filter": both}],
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )
    write_task(
        folder,
        "recall_bleu",
        asked,
        **shared,
        metric_list=[{"metric": "bleu", "aggregation": "bleu", "higher_is_better": True}],
    )
    return ["recall_gen", "recall_shots", "recall_bleu"]


def evaluate(model: Any, folder: Path, tasks: list[str], **how: Any) -> dict[str, Any]:
    """The harness' results and samples of local tasks."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    with patch("lm_eval.evaluator.add_env_info"):  # asks pip and git about the machine, for seconds
        found: dict[str, Any] = simple_evaluate(
            model=model, tasks=tasks, task_manager=manager, bootstrap_iters=0, log_samples=True, **how
        )
    return found


def scores(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The numbers of each task."""
    return {
        task: {k: v for k, v in row.items() if isinstance(v, float) and "stderr" not in k}
        for task, row in found["results"].items()
    }
