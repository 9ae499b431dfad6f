"""docs/adding.md does what it says: its files are written out and run as they stand."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import moend.allocation
import moend.scoring
from moend.benchmarks import benchmark, implementation
from moend.errors import Infeasible, UserError
from perf.report import build
from pipelines import run
from pipelines.reporting import figures
from pipelines.results.sweep import Sweep, rows
from pipelines.store.cells import Store
from tests import ROOT
from tests.moend.methods.made import bound
from tests.moend.scoring import test_scorers

TEXT = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL)
FILES = {m[1]: body for _, body in BLOCKS if (m := re.match(r"# (\S+\.(?:py|yaml))\n", body))}
COMMANDS = [body.strip() for language, body in BLOCKS if language == "sh"]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A folder with the files of the text."""
    for name, body in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(body, encoding="utf-8")
    return tmp_path


def test_the_text_has_the_files_it_speaks_of() -> None:
    assert set(FILES) == {
        "my_benchmarks/lookup.py",
        "my_conf/benchmark/lookup.yaml",
        "my_conf/method/KeyNorm.yaml",
        "moend/scoring/keynorm.py",
        "moend/allocation/front.py",
        "tests/moend/scoring/test_keynorm.py",
        "pipelines/reporting/figures/extraction.py",
    }
    assert len(COMMANDS) == 1
    for path in re.findall(r"`((?:conf|moend|sweeps|tests)/[\w/]+\.(?:py|yaml))`", TEXT):
        assert (ROOT / path).is_file(), path


def test_the_figure_is_drawn(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "__path__", [*figures.__path__, str(written / "pipelines" / "reporting" / "figures")])
    store = Store(written / "store")
    build(store, [{"method": m, "budget": "0.1r", "benchmark": "text"} for m in ("1d", "SnapKV")], examples=3)
    found = rows(store, store.read_manifest("latest"))
    picture = figures.pictures(Sweep(store, store.read_manifest("latest"), found, []))[-1]
    assert picture.name == "extraction" and picture.draw(written / "extraction.png")
    assert (written / "extraction.pdf").stat().st_size > 1000
    sys.modules.pop("pipelines.reporting.figures.extraction")


@pytest.mark.process
def test_the_benchmark_runs_from_another_folder(written: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "MOEND_STORE": str(written / "store"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *shlex.split(COMMANDS[0])[1:], "tracking=none", "benchmark.limit=12"]
    done = subprocess.run(command, cwd=written, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (table,) = (written / "store" / "reports").glob("*/table.csv")
    with table.open() as f:
        rows = {row["method"]: row for row in csv.DictReader(f)}
    assert set(rows) == {"full", "StreamingLLM"}
    assert float(rows["full"]["score"]) >= 0.75  # the model was trained for it
    assert float(rows["StreamingLLM"]["score"]) <= 0.5  # four of five entries are gone
    assert rows["full"]["metric"] == "exact_match" and rows["full"]["n"] == "12"
    record = json.loads(next((written / "store" / "cells").glob("*/records/*.jsonl")).read_text().split("\n")[0])
    assert record["prompt_tokens"] == 4 * 30 + 4 and record["truncated"] == 0
    again = subprocess.run(command, cwd=written, env=env, capture_output=True, text=True, check=False)
    assert again.returncode == 0 and "2 cells: 2 done" in again.stdout


def test_the_scorer_and_the_method_run(
    written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(moend.scoring, "__path__", [*moend.scoring.__path__, str(written / "moend" / "scoring")])
    test_scorers.test_contract("keynorm")
    test_scorers.test_memory_is_linear_in_length("keynorm")
    spec = importlib.util.spec_from_file_location("adding", written / "tests/moend/scoring/test_keynorm.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    module.test_the_smallest_key_ranks_first()
    common = ["--config-dir", str(written / "my_conf"), "model=recall_moe", "benchmark=recall", "benchmark.limit=1"]
    store = [f"paths.store={written / 'store'}", "tracking=none"]
    assert run.main([*common, *store, "method=KeyNorm", "budget=50%"]) == 0
    assert "KeyNorm" in capsys.readouterr().out
    monkeypatch.delitem(sys.modules, "moend.scoring.keynorm")


def test_the_allocator_meets_its_duties(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moend.allocation, "__path__", [*moend.allocation.__path__, str(written / "moend/allocation")])
    for budget in ("10%", "30%", "400KiB"):
        for bits in (16, 4):
            for at in ("prompt", "peak"):
                fields = {"allocator": {"name": "front", "more": 3}, "precision": {"k_bits": bits, "v_bits": bits}}
                b = bound("Random", budget, t_ref=None, at=at, schedule="every", **fields)
                first, *rest = [s.schedule.cap or s.tokens for s in b.specs(1000, 16)]
                assert all(first > n for n in rest)
                assert b.held(1000, 16)[at == "peak"] <= b.budget.to_bytes(b.arch, 1000)
    with pytest.raises(Infeasible) as e:
        bound("Random", "100B", t_ref=None, allocator="front").specs(1000, 16)
    assert bound("Random", e.value.smallest, t_ref=None, allocator="front").specs(1000, 16)
    with pytest.raises(UserError, match=r"Did you mean 'more'"):
        bound("Random", "10%", allocator={"name": "front", "mor": 3})
    monkeypatch.delitem(sys.modules, "moend.allocation.front")


def test_mistakes_in_a_type_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "no_benchmark.py").write_text("x = 1\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "empty.py").write_text("BENCHMARK = 3\n")
    (tmp_path / "own" / "needs.py").write_text("import not_installed_here\n")
    with pytest.raises(UserError, match=r"'nobody\.here' is not a module that Python finds"):
        benchmark({"name": "x", "type": "nobody.here"})
    with pytest.raises(UserError, match=r"'own\.nothing' is not a module that Python finds"):
        implementation("own.nothing")
    with pytest.raises(UserError, match="must name its class BENCHMARK"):
        implementation("own.empty")
    with pytest.raises(ModuleNotFoundError, match="not_installed_here"):
        implementation("own.needs")
    with pytest.raises(UserError, match="unknown benchmark type 'no_benchmark'"):  # no dot: a type of the package
        implementation("no_benchmark")
