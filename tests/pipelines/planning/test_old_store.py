"""A store that the code before engine versions made: read, listed, and kept apart from cells of a newer engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from moend import version
from moend.methods.spec import method, method_names
from pipelines import report
from pipelines.planning import identity, planner
from pipelines.planning.facts import Planner
from pipelines.results import load, sweep
from pipelines.results.aggregate import aggregate
from pipelines.store.cells import Store
from tests import ROOT
from tests.pipelines import stub
from tests.pipelines.conftest import Runs, compose_points

OLD = ROOT / "tests" / "fixtures" / "store_engine_1"
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


def test_version_4_changed_moezip_and_the_papers_protocol() -> None:
    def changed(protocol: str) -> set[str]:
        cell = {"budget_protocol": protocol}
        return {n for n in method_names() if not version.numbers_stand(3, method(n).settings, cell)}

    assert changed("matched") == {"MoEZip"}
    assert changed("paper") >= {"MoEZip", "MiniKV", "KIVI", "2d", "2d_hetero"}
    assert not changed("paper") & {"full", "1d", "2d_uniform", "SnapKV", "RippleKV"}


def test_version_5_changed_quantised_cells_that_evict_where_the_budget_binds_at_the_peak() -> None:
    def changed(at: str) -> set[str]:
        return {n for n in method_names() if not version.numbers_stand(4, method(n).settings, {"budget_at": at})}

    assert not changed("prompt")
    assert changed("peak") >= {"2d_uniform", "2d_hetero"} and not changed("peak") & {"1d", "H2O", "SnapKV", "KIVI"}


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


# Payloads of schema 1: the fields that came with schema 2 have the value they had implicitly


NEEDLE = ("benchmark=niah", "benchmark.phrasing=0")  # schema 1 had no other wording


def _finish(store: Store, cell: planner.Cell, payload: dict[str, Any]) -> str:
    """The stub's finished cell under the key of another payload."""
    folder = store.cell(identity.key(payload))
    folder.create(payload, cell.info)
    with folder.shard() as shard:
        for task, id, draw in cell.expected:
            shard.append(stub.record(cell.facts, cell.key, cell.payload["budget"], task, id, draw))
    described = {"key": folder.key, "payload": payload, "info": cell.info}
    assert folder.finish(cell.expected, lambda records: aggregate(described, records))
    return folder.key


def _plan(store: Store, *args: str) -> list[planner.Cell]:
    library: Any = stub.Library()
    return planner.make_plan(compose_points([f"paths.store={store.root}", "tracking=none", *args]), library).cells


def test_upgrade_and_former_are_inverse(tmp_path: Path) -> None:
    for args in (["benchmark=niah", "benchmark.phrasing=0"], ["benchmark=recall"], ["benchmark=continuation"]):
        (cell,) = _plan(Store(tmp_path), "method=1d", *args)
        (before,) = [p for p in identity.former(cell.payload) if p["facts"]["engine"] == version.ENGINE_VERSION]
        assert before["schema"] == 1
        assert "phrasing" not in before["facts"]["benchmark"] and "turns" not in before["facts"]["benchmark"]
        assert identity.upgrade(before) == cell.payload
        assert identity.upgrade(cell.payload) is cell.payload


def test_finished_cells_are_not_computed_again_because_fields_were_added(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (new,) = _plan(store, "method=SnapKV", *NEEDLE)
    old = next(p for p in identity.former(new.payload) if p["schema"] == 1)
    key = _finish(store, new, old)
    (found,) = _plan(store, "method=SnapKV", *NEEDLE)
    assert (found.state, found.key, found.payload) == ("done", key, old) and key != new.key
    (other,) = _plan(store, "method=SnapKV", *NEEDLE, "generation.max_new_tokens=9")
    assert other.state == "run"


def test_a_field_with_another_value_is_another_cell(tmp_path: Path) -> None:
    (cell,) = _plan(Store(tmp_path), "method=SnapKV", *NEEDLE)
    for path, value in {
        ("facts", "benchmark", "phrasing"): "mix",
        ("facts", "benchmark", "turns"): True,
        ("generation", "thinking"): "off",
    }.items():
        changed = identity._with(cell.payload, path, value)
        assert not [p for p in identity.former(changed) if p["schema"] == 1]


def test_cells_of_an_earlier_engine_stay_where_their_numbers_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now = Store(tmp_path), version.ENGINE_VERSION
    (new,) = _plan(store, "method=SnapKV", *NEEDLE)
    key = _finish(store, new, new.payload)
    for module in (version, stub):
        monkeypatch.setattr(module, "ENGINE_VERSION", now + 1)
    monkeypatch.setattr(version, "CHANGED", {**version.CHANGED, now + 1: lambda method: method["name"] == "1d"})
    (found,) = _plan(store, "method=SnapKV", *NEEDLE)
    assert (found.state, found.key) == ("done", key)
    monkeypatch.setattr(version, "CHANGED", {**version.CHANGED, now + 1: lambda method: method["name"] == "SnapKV"})
    (found,) = _plan(store, "method=SnapKV", *NEEDLE)
    assert found.state == "run" and found.key != key


def test_superseded_cells_are_never_averaged_with_new_ones(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same two cells by two engines, of which the second gives one of them other numbers, in one store."""
    args = ("method=1d,SnapKV", "budget=10%", *NEEDLE, "-m")
    assert runs(*args) == 0
    now = version.ENGINE_VERSION
    for module in (version, stub, sweep):
        monkeypatch.setattr(module, "ENGINE_VERSION", now + 1)
    monkeypatch.setattr(version, "CHANGED", {**version.CHANGED, now + 1: lambda method: method["name"] == "1d"})
    before = runs.library.prefills
    assert runs(*args) == 0
    assert runs.library.prefills - before == runs.library.n  # one cell was computed again, the other was there
    found = load(runs.store)
    states = found.cells.groupby("method").state.apply(lambda s: sorted(x.partition(":")[0] for x in s)).to_dict()
    assert states == {"1d": ["done", "superseded"], "SnapKV": ["done"]}
    assert len(found.records) == 2 * runs.library.n  # none of the superseded cell
    assert len(found.differences) == 1
