"""Every table has a sweep file, and every file composes and plans without weights, data or network."""

from __future__ import annotations

import dataclasses
import re
import socket
from collections import Counter
from pathlib import Path

import huggingface_hub.constants
import pytest

from moend import paths
from pipelines.cli.hydra import Point, run_hydra
from pipelines.planning import planner
from pipelines.planning.facts import Planner
from tests.pipelines.conftest import Runs, compose_points, sweep_points

NAMES = sorted(p.stem for p in paths.folder("sweeps", "sweep").glob("*.yaml"))
TABLES = """
moend_fig2 moend_table2 moend_table4 moend_table6 moend_klcheck moend_overhead ripple_table1 ripple_table2 ripple_fig2
ripple_table3 ripple_table4 ripple_table5 moezip_table1 quickstart demo baselines_longbench moend_attention
moend_instruct moend_signal moend_long long_output
"""
# Sweep -> what it waits for. Such a sweep may fail for a missing option or key, and for nothing else.
WAITING: dict[str, str] = {}


def composed(name: str, capsys: pytest.CaptureFixture[str], *args: str) -> list[Point]:
    """A sweep's points; skips where it waits for something that is not there yet."""
    found: list[Point] = []

    def keep(points: list[Point]) -> int:
        found.extend(points)
        return 0

    if run_hydra(keep, [f"+sweep={name}", "dry_run=true", *args]) == 0:
        return found
    error = capsys.readouterr().err
    if name in WAITING and re.search("unknown (method|benchmark|generation) |there is no configuration key", error):
        pytest.skip(f"{name} waits for {WAITING[name]}: {error.strip()}")
    raise AssertionError(error)


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with nothing on it, where whoever opens a connection fails. Returns its cache folder."""

    def refuse(*args: object) -> None:
        raise AssertionError(f"a dry run opened a connection: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "cache"


def plan_of(points: list[Point], cold: Path) -> planner.Plan:
    paths = {"store": str(cold.parent / "store"), "cache": str(cold)}
    return planner.make_plan(
        [dataclasses.replace(p, config={**p.config, "paths": paths, "dry_run": True}) for p in points], Planner()
    )


def test_every_table_has_a_sweep_and_every_sweep_a_table() -> None:
    assert sorted(TABLES.split()) == NAMES
    assert not set(WAITING) - set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_sweep_plans_on_a_machine_with_nothing(name: str, cold: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = composed(name, capsys)
    plan = plan_of(points, cold)
    assert plan.name == name
    assert {c.state for c in plan.cells} == {"run"}, [c.reason for c in plan.cells if c.reason]
    assert plan.absent  # no weights here
    assert len({c.key for c in plan.cells}) == len(plan.cells)


@pytest.mark.parametrize("typed", [[], ["budget_protocol=matched", "calibration=default"]])
@pytest.mark.parametrize("name", ["moend_table2", "moend_table4"])
def test_no_budget_of_the_main_tables_is_out_of_reach(
    name: str, typed: list[str], cold: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(composed(name, capsys, *typed), cold)
    assert not plan.count("infeasible")
    assert re.fullmatch(rf"{name}-[0-9a-f]{{8}}", plan.name) if typed else plan.name == name


def test_a_budget_is_met_only_by_shares_that_were_measured(cold: Path) -> None:
    typed = [*SHAPE[:2], "generation.max_new_tokens=2048", "method=2d_hetero", "budget=512", "seed=0,1"]
    states = {}
    for calibration in ("default", "paper"):
        plan = plan_of(compose_points([*typed, f"calibration={calibration}"]), cold)
        states[calibration] = {c.state for c in plan.cells}
    assert states == {"default": {"run"}, "paper": {"infeasible"}}  # 0.05 and less are in one of them only


SHAPE = ["model=deepseek_r1_distill_qwen_7b", "benchmark=longbench_moend", "calibration=paper"]
TABLE2 = [*SHAPE, "method=full,1d,2d_uniform,2d,2d_hetero", "budget=512,1024,2048,4096", "budget_protocol=paper"]


def test_table_2_is_planned_without_hub_or_weights(
    runs: Runs, cold: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pipelines.execution import session as evaluate

    monkeypatch.setattr(evaluate, "Library", Planner)  # the real one
    assert runs(*TABLE2, "dry_run=true", f"paths.cache={cold}", "-m") == 0
    assert "17 cells: 17 run (3 more points" in runs.out
    assert "prefills: 200 planned, 3,200 saved by sharing\n" in runs.out
    assert "a run fetches first: model 'deepseek_r1_distill_qwen_7b'" in runs.out
    assert "a run fetches first: data 'longbench_moend': THUDM/LongBench" in runs.out
    assert "blocked" not in runs.out
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert runs(*TABLE2, "dry_run=true", f"paths.cache={cold}", "-m") == 0
    assert "17 cells: 17 blocked" in runs.out
    assert "prefills: 200 planned, 3,200 saved by sharing, blocked cells included" in runs.out
    assert len(re.findall(r"^blocked: .*\[[0-9a-f]{16}\]: ", runs.out, re.M)) == 17
    assert "calibrations to compute: queries" in runs.out
    assert not cold.exists()


def test_the_file_of_table_2_has_these_cells(cold: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(composed("moend_table2", capsys), cold)
    assert (len(plan.cells), plan.prefills, plan.prefills_saved) == (17, 200, 3200)
    methods = Counter(c.facts.method for c in plan.cells)
    assert methods == {"full": 1, "1d": 4, "2d_uniform": 4, "2d": 4, "2d_hetero": 4}


def test_names_follow_the_points(cold: Path) -> None:
    def name(points: list[Point]) -> str:
        return planner.sweep_name(points, ["k"])

    assert name(list(sweep_points("moend_overhead"))) == "moend_overhead"
    quiet = ["tracking=none", "paths.store=x", "model.device=cpu", "engine.max_bytes=9", "dry_run=true"]
    assert name(compose_points(["+sweep=moend_overhead", *quiet])) == "moend_overhead"
    same = compose_points(["+sweep=moend_overhead", "generation.max_new_tokens=256"])
    assert name(same) == "moend_overhead"  # what was typed is what the file says
    for typed in ("budget=512", "budget=512,1024", "seed=1", "benchmark=niah,niah_multikey", "method=full"):
        assert re.fullmatch("moend_overhead-[0-9a-f]{8}", name(compose_points(["+sweep=moend_overhead", typed])))
