"""A store that the code before engine versions made: read, listed, and kept apart from cells of a newer engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from moend import version
from moend.methods.spec import method, method_names
from pipelines import report
from pipelines.planning import planner
from pipelines.planning.facts import Planner
from pipelines.results import load, sweep
from pipelines.store.cells import Store
from tests.pipelines.conftest import compose_points

OLD = Path(__file__).parents[2] / "fixtures" / "store_engine_1"
COMMAND = [
    *("model=recall_moe", "method=SnapKV,2d_uniform", "budget=25%", "benchmark=recall", "benchmark.limit=4"),
    *("calibration=recall", "tracking=none", "dry_run=true", "-m"),
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A copy of the old store."""
    shutil.copytree(OLD, tmp_path / "store")
    return Store(tmp_path / "store")


def test_old_cells_are_read_where_their_numbers_stand(
    store: Store, monkeypatch: pytest.MonkeyPatch, undrawn: None
) -> None:
    monkeypatch.setattr(version, "ENGINE_VERSION", 1)
    assert report.main([f"paths.store={store.root}"]) == 0
    found = sweep.rows(store, store.read_manifest("latest"))
    assert {r.info["method"]: r.state for r in found} == {"SnapKV": "done", "2d_uniform": "done"}
    assert all(r.result is not None and r.result["n_records"] == 20 for r in found)
    assert len(sweep.compared(store, found)) == 1
    assert len(load(store.root).cells) == 2


def test_old_cells_are_marked_where_a_number_changed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "ENGINE_VERSION", 2)
    monkeypatch.setattr(version, "CHANGED", {2: lambda method: method["name"] == "2d_uniform"})
    found = {r.info["method"]: r for r in sweep.rows(store, store.read_manifest("latest"))}
    assert found["SnapKV"].state == "done" and found["2d_uniform"].state.startswith("superseded: made by engine 1")
    assert found["2d_uniform"].result is None
    assert sweep.compared(store, list(found.values())) == []  # never compared or averaged with others


def test_version_2_changed_quantised_cells_that_evict_while_decoding() -> None:
    def stands(schedule: str | None, k_bits: int | str) -> bool:
        return version.CHANGED[2]({"schedule": schedule, "precision": {"k_bits": k_bits, "v_bits": 16}}) is False

    assert not stands("every", 8) and not stands("every", "joint")
    assert stands("every", 16) and stands("prompt", 4) and stands(None, 16)


def test_version_3_changed_what_the_changelog_says() -> None:
    """By the golden records of both versions: what was made again differed for these methods and for no other."""
    changed = {n for n in method_names() if version.CHANGED[3](method(n).settings)}
    assert changed == {
        *("1d", "2d_uniform", "2d", "2d_hetero", "ripple_2d", "ripple_2d_head", "KVTuner"),
        *("H2O", "TOVA", "StreamingLLM", "Scissorhands", "RKV", "MiniKV"),
    }
    four = {"k_bits": 4, "v_bits": 4}
    assert all(version.CHANGED[3](method(n, precision=four).settings) for n in ("SnapKV", "PyramidKV", "RippleKV"))
    assert not version.CHANGED[3]({**method("full").settings, "schedule": None})  # as it stands in a key


def test_the_cells_of_the_old_store_that_stand(store: Store) -> None:
    found = {r.info["method"]: r for r in sweep.rows(store, store.read_manifest("latest"))}
    assert found["SnapKV"].state == "done"  # 16 bit, compresses the prompt only: as it was
    assert found["2d_uniform"].state.startswith("superseded: made by engine 1")


def test_the_same_command_has_keys_of_its_own_now(store: Store) -> None:
    plan = planner.make_plan(compose_points([f"paths.store={store.root}", *COMMAND]), Planner())
    assert [c.state for c in plan.cells] == ["run", "run"]
    assert not {c.key for c in plan.cells} & {p.name for p in (store.root / "cells").iterdir()}
    for cell in plan.cells:
        assert cell.payload["facts"]["engine"] >= 1
        assert cell.payload["model"]["dtype"] == "float32"
        assert '"auto"' not in json.dumps(cell.payload["model"])
