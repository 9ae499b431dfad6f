"""The report's foot names the terms of the data that the sweep used, each once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from moend import paths
from pipelines import run
from pipelines.reporting import tables
from pipelines.results.sweep import Row


def row(config_name: str, **fields: Any) -> Row:
    config = yaml.safe_load((paths.folder("conf", "benchmark") / f"{config_name}.yaml").read_text(encoding="utf-8"))
    return Row("k", {"benchmark_config": config | fields}, {}, "done", None)


def test_each_data_set_once() -> None:
    lines = tables.terms([row("longbench", tasks=["samsum"]), row("niah"), row("niah"), row("aime24")])
    assert [line.partition(":")[0] for line in lines] == [
        "THUDM/LongBench on the hub",
        "SAMSum",
        "sentence patterns of our own writing",
        "HuggingFaceH4/aime_2024 and math-ai/aime25 on the hub",
    ]
    assert lines[1].endswith("CC BY-NC-ND 4.0, no commercial use")


def test_a_benchmark_that_is_not_on_this_machine_is_named() -> None:
    (line,) = tables.terms([row("niah", type="not.here", name="mine")])
    assert line.startswith("mine: its terms are not known here (benchmark type 'not.here' is not a module")


def test_they_stand_in_the_foot_of_the_page(tmp_path: Path, undrawn: None) -> None:
    fields = ["model=recall_moe", "benchmark=recall", "benchmark.tasks=[num]", "benchmark.limit=1", "method=full"]
    assert run.main([*fields, "tracking=none", f"paths.store={tmp_path}"]) == 0
    (page,) = tmp_path.rglob("index.html")
    foot = "Terms of the data</h3><ul><li>generated here: Apache-2.0, as this project</li></ul></footer>"
    assert foot in page.read_text(encoding="utf-8")
