"""Plans tell what a run needs and how long it takes, and what means nothing to a cell does not change it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moend.benchmarks.text import part
from moend.budget import Arch
from moend.methods.spec import Method
from pipelines import calibrate
from pipelines.cli import terminal
from pipelines.planning import estimate, identity, planner
from pipelines.planning.facts import Planner
from pipelines.store.cells import Store
from tests.pipelines.conftest import Runs, compose_points

FIXTURE = ["model=recall_moe", "benchmark=recall", "benchmark.rows=2", "benchmark.tasks=[num]"]


def plan_of(tmp_path: Path, *args: str) -> planner.Plan:
    where = [f"paths.store={tmp_path / 'store'}", f"paths.cache={tmp_path / 'cache'}"]
    return planner.make_plan(compose_points([*where, *args]), Planner())


def test_full_is_one_cell_whatever_would_be_cut(tmp_path: Path) -> None:
    (before,) = plan_of(tmp_path, *FIXTURE, "method=full").cells
    settings = ["method.beta=64", "method.n_sink=0", "method.channels=32", "method.recent=3", "method.group=32"]
    settings += ["method.always_quantise=true"]
    for setting in [*settings, "method.window=0", "budget=3", "budget_protocol=paper"]:
        (cell,) = plan_of(tmp_path, *FIXTURE, "method=full", setting).cells
        assert cell.key == before.key, setting
    for setting in ("seed=1", "method.precision.k_bits=8", "engine.fuse=false", "model.store_dtype=model"):
        (cell,) = plan_of(tmp_path, *FIXTURE, "method=full", setting).cells
        assert cell.key != before.key, setting
    one, two = plan_of(tmp_path, *FIXTURE, "method=1d", "method.beta=64,128").cells
    assert one.key != two.key


def test_a_new_field_of_a_method_counts_for_full_too() -> None:
    assert len(set(identity.CUTTING) & {f.name for f in dataclasses.fields(Method)}) >= 8
    assert not set(identity.CUTTING) & {"name", "version", "scorer", "allocator", "precision"}
    (point,) = compose_points(["method=full"])

    def key(**fields: Any) -> str:
        config = {**point.config, "method": {**point.config["method"], **fields}}
        return identity.key(identity.cell_payload(config, {"method": 1}, {}, is_full=True, is_nll=False))

    assert key() == key(beta=1)
    assert key() != key(new_field=1)


@pytest.fixture
def hub_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


def test_a_dry_run_says_what_a_run_would_fetch(hub_on: None, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "benchmark=recall", "model=smollm2_135m,qwen3_8b", "budget=10%", "dry_run=true")
    assert [c.state for c in plan.cells] == ["run", "run"]
    assert [line.partition(":")[0] for line in plan.absent] == ["model 'smollm2_135m'", "model 'qwen3_8b'"]


def test_a_model_whose_shape_is_not_known_yet_is_still_planned(hub_on: None, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "benchmark=recall", "model=hf", "model.id=owner/name", "dry_run=true")
    (cell,) = plan.cells
    assert (cell.state, cell.facts.arch, plan.prefills) == ("run", None, 100)
    assert estimate.estimate(plan).startswith("not known: the shape of name ")


def test_what_cannot_be_had_is_blocked_and_its_prompts_are_counted(
    hub_on: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    plan = plan_of(tmp_path, "benchmark=recall", "model=qwen3_8b", "method=1d,SnapKV", "budget=10%")
    assert [c.state for c in plan.cells] == ["blocked", "blocked"]
    assert not plan.groups
    assert (plan.prefills, plan.prefills_saved) == (100, 100)
    assert "not on this machine" in plan.cells[0].reason


def test_benchmarks_are_made_once_for_all_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moend.benchmarks import recall

    made = []
    real = recall.Recall.make_samples
    monkeypatch.setattr(recall.Recall, "make_samples", lambda self: made.append(1) or real(self))
    plan = plan_of(tmp_path, *FIXTURE, "benchmark.seed=77", "method=1d,SnapKV,2d_hetero", "budget=10%,20%,30%")
    assert len(plan.cells) == 9
    assert len(made) == 1


ARCH = Arch(layers=2, q_heads=4, kv_heads=2, head_dim=8, max_positions=512)


def test_the_rough_estimate_is_this_arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    (a, b) = plan_of(tmp_path, *FIXTURE, "method=1d,SnapKV", "budget=10%", "model.device=cpu").cells
    for cell in (a, b):
        cell.facts = dataclasses.replace(cell.facts, arch=ARCH, prompt_tokens=100, new_tokens=8)
    weights = 14 * 2 * 32**2
    flops = 4 * 60e9
    per_token = 2 * weights / flops
    prompt = 100 * (per_token + 2 * 2 * 32 * 100 / flops)
    step = 4 * weights / 10e9
    speed = estimate.rough(a)
    assert speed is not None
    assert estimate.seconds([a, b], speed) == pytest.approx(2 * (prompt + 8 * (step + 2 * per_token)))
    alone = a.config.engine.model_copy(update={"fuse": False})
    for cell in (a, b):
        cell.config = cell.config.model_copy(update={"engine": alone})
    assert estimate.seconds([a, b], speed) == pytest.approx(2 * (prompt + 8 * (2 * step + 2 * per_token)))


def test_a_method_that_repeats_the_prompt_is_estimated_to_read_it_twice(tmp_path: Path) -> None:
    for methods, times in (("SnapKV", 1), ("KVZip", 2), ("MoEZip,SnapKV", 2)):
        cells = plan_of(tmp_path, *FIXTURE, f"method={methods}", "budget=10%", "model.device=cpu").cells
        facts = cells[0].facts
        pace = estimate.Speed(prompt=3.0, step=0.0, token=0.0, source="")
        assert estimate.seconds(cells, pace) == 2 * times * 3.0 * facts.prompt_tokens  # two rows


def test_calibrations_are_in_the_estimate(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, *FIXTURE, "method=RippleKV,SnapKV", "budget=10%", "model.device=cpu", "calibration=recall")
    pace = estimate.Speed(prompt=3.0, step=0.0, token=0.0, source="")
    (need,) = [n for c in plan.cells for n in c.facts.calibrations]
    arch = plan.cells[0].facts.arch
    assert need.kind == "ripple" and arch is not None
    tokens = 32 * (256 + 64 * (1 + arch.layers))  # a pass over each example, its window again from every layer on
    assert estimate.calibrating(plan, lambda cell: pace) == (3.0 * tokens, [])
    folder = plan.store.calibration(need.key)
    folder.mkdir(parents=True)
    (folder / "artefact.json").touch()
    assert estimate.calibrating(plan, lambda cell: pace) == (0.0, [])


def test_a_full_dry_run_tells_all_that_a_key_holds(runs: Runs) -> None:
    assert runs("method=1d,SnapKV", "budget=10%", "dry_run=full", "-m") == 0
    (a, b) = re.findall(r"# ([0-9a-f]{16}) run: (1d|SnapKV) 10%", runs.out)
    assert (a[1], b[1]) == ("1d", "SnapKV")
    assert runs.out.count("budget_protocol: matched") == 2 and not (runs.store / "cells").exists()


def test_likelihoods_say_nothing_of_the_time_of_an_answer(runs: Runs) -> None:
    assert runs("method=1d", "budget=10%") == 0
    (cell,) = (runs.store / "cells").iterdir()
    (records,) = (cell / "records").glob("*.jsonl")
    records.write_text(re.sub(r'"new_tokens": ?\d+', '"new_tokens": 0', records.read_text()))
    speed = estimate.measured(Store(runs.store), "m", {"id": "smollm2_135m"})
    assert speed is not None and speed.token == 0


def test_earlier_cells_of_the_model_give_the_pace(runs: Runs) -> None:
    assert runs("method=1d", "budget=10%", "dry_run=true") == 0
    assert "time: not known: the shape of smollm2_135m" in runs.out  # the stub has no shapes
    assert runs("method=1d", "budget=10%") == 0
    assert runs("method=SnapKV", "budget=10%", "dry_run=true") == 0
    assert "smollm2_135m: as in 1 finished cell of this store" in runs.out
    speed = estimate.measured(Store(runs.store), "m", {"id": "smollm2_135m"})
    assert speed is not None
    assert (speed.prompt, speed.step) == (pytest.approx(0.5 / 1000), 0)  # 0.5 s for 1,000 tokens
    assert speed.token == pytest.approx(0.2 / 8)  # 0.1 s to select and 0.1 s to decode 8 tokens
    assert estimate.measured(Store(runs.store), "m", {"id": "another"}) is None
    for path in runs.store.glob("cells/*/payload.json"):
        path.write_text("[]")
    assert estimate.measured(Store(runs.store), "m", {"id": "smollm2_135m"}) is None


@given(st.floats(0, 1e7), st.integers(0, 10**6), st.integers(0, 10**6))
def test_no_time_is_told_before_there_is_a_pace(passed: float, done: int, todo: int) -> None:
    told = terminal.remaining(passed, done, todo)
    assert bool(told) == (passed >= terminal.SETTLED and done > 0)
    if told:
        assert told == f"about {terminal.duration(passed / done * todo)} left"


def test_durations_are_for_people() -> None:
    expected = {0: "0 s", 4.26: "4.3 s", 42: "42 s", 89: "89 s", 90: "1.5 min", 3000: "50 min", 5400: "1.5 h"}
    for seconds, text in {**expected, 86_400: "24 h", 172_800: "2.0 days"}.items():
        assert terminal.duration(seconds) == text


def test_a_damaged_calibration_is_one_line(runs: Runs) -> None:
    assert runs("method=2d", "budget=10%") == 0
    for path in runs.store.glob("calibration/*/artefact.json"):
        path.write_text("{")
    assert runs("method=2d", "budget=20%") == 2
    assert (runs.out + runs.err).count("is not a calibration") == 1
    assert "0 cells" not in runs.out
    assert runs("method=2d", "budget=20%", main=calibrate.main) == 2
    assert (runs.out + runs.err).count("is not a calibration") == 1
    assert runs("method=2d,2d_hetero", "budget=20%", main=calibrate.main) == 2
    assert runs.out.count("blocked: 2 cells") == 1


def test_calibrate_dry_run_says_what_is_there(runs: Runs) -> None:
    sweep = ("method=2d,full", "budget=10%", "model=smollm2_135m,recall_moe")
    assert runs(*sweep, "dry_run=true", main=calibrate.main) == 0
    assert runs.out.count("to be computed") == 2
    assert not runs.store.exists()
    assert runs("method=2d", "budget=10%") == 0
    assert runs(*sweep, "dry_run=true", main=calibrate.main) == 0
    assert runs.out.count("to be computed") == 1
    assert runs.out.count(": there") == 1


def test_calibrate_goes_on_past_a_budget_that_cannot_be_met(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [{"keep": 0.5, "tokens": None, "k_bits": 8, "v_bits": 4, "head_tokens": None}] * 3
    plan = {
        "schema": 1, "t_ref": 100, "budget": "0.1r", "protocol": "matched", "solver": "exact", "objective": 1.5,
        "gap": 0.0, "layers": layers, "predicted": {"eq1_bytes": 2048, "resident_bytes": 4096},
    }  # fmt: skip
    monkeypatch.setattr(type(runs.library), "plan", lambda self, config, facts, folders: plan, raising=False)
    assert runs("method=2d", "budget=2,10%", main=calibrate.main) == 0
    assert "infeasible: 2d 2 niah question visible: 2d cannot meet 2t" in runs.out
    assert "predicted: 2.0 KiB by eq. 1" in runs.out
    made = list(runs.store.glob("reports/plan_2d_*/plan.json"))
    assert [json.loads(p.read_text())["t_ref"] for p in made] == [100]


def test_a_calibration_that_has_read_the_benchmark_is_blocked(tmp_path: Path) -> None:
    """The benchmark's own text given as calibration text; on the calibration split it is a caution."""
    rows = ["benchmark=continuation", "benchmark.rows=2", "model=smollm2_135m", "budget=25%"]
    quoted = " ".join(re.findall(r"[A-Za-z]+", part("test")[5000:5400]))
    for method, blocked in (("2d_hetero", True), ("SnapKV", False), ("full", False)):
        (cell,) = plan_of(tmp_path, *rows, f"method={method}", f"calibration.text={quoted}").cells
        assert (cell.state == "blocked" and "has read" in cell.reason) == blocked, method
    (cell,) = plan_of(tmp_path, *rows, "method=2d_hetero").cells
    assert "has read" not in cell.reason
    own = " ".join(re.findall(r"[A-Za-z]+", part("calibration")[5000:5400]))
    (cell,) = plan_of(
        tmp_path, *rows, "method=2d_hetero", "benchmark.split=calibration", f"calibration.text={own}"
    ).cells
    assert cell.state == "run" and "has read" in str(cell.facts.caution)
