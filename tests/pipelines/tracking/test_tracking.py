"""The tracker is a view: what it shows equals the files, it lies inside the store, and it cannot hurt a run."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from pipelines import run
from pipelines.planning.schema import TrackingConfig
from pipelines.reporting import tables
from pipelines.store.cells import Store, record_key
from pipelines.store.files import read_json, write_json
from pipelines.store.lease import Lease
from pipelines.tracking import items, runs
from pipelines.tracking import wandb as tracking
from pipelines.tracking.items import Item
from tests.forked import Forked
from tests.pipelines.conftest import INHERITED, Runs
from tests.pipelines.execution.test_run import STUB_MAIN
from tests.pipelines.tracking import wandb_files

pytestmark = pytest.mark.process  # wandb's own

SECRETS = [INHERITED[k].encode() for k in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN")]
OFFLINE = TrackingConfig(mode="offline", project="moend", timeout_s=400)


def measured(store: Path) -> dict[str, list[dict[str, Any]]]:
    """The records of all cells, but for seconds and memory of the process."""
    apart = {"timing", "peak_bytes"}
    return {
        p.name: [{k: v for k, v in r.items() if k not in apart} for r in Store(store).cell(p.name).records()]
        for p in sorted((store / "cells").iterdir())
    }


@pytest.mark.req(25)
def test_a_tracker_changes_no_result_whatever_the_shell_says(tracked: tuple[Path, Path]) -> None:
    none, offline = tracked
    assert measured(none) == measured(offline) and len(measured(none)) == 2
    assert not (none / "wandb").exists()


@pytest.mark.req(16)
def test_what_was_written_offline_equals_the_files(tracked: tuple[Path, Path]) -> None:
    store = Store(tracked[1])
    (sweep,) = store.sweep_names()
    found = wandb_files.runs(store.root)
    keys = {p.name for p in (store.root / "cells").iterdir()}
    assert set(found) == keys | {f"report-{sweep}"}
    for key in keys:
        described, result = read_json(store.cell(key).folder / "payload.json"), store.cell(key).result()
        payload, info, records = described["payload"], described["info"], store.cell(key).records()
        records.sort(key=record_key)
        seen = found[key]
        assert (seen.about.run_id, seen.about.project, seen.about.run_group) == (key, "moend", sweep)
        assert (seen.about.display_name, seen.about.job_type, seen.exit_code) == (info["label"], "cell", 0)
        assert {f"sweep:{sweep}", f"method:{info['method']}", "model:recall_moe"} <= set(seen.about.tags)
        assert {k: seen.config[k] for k in payload} == payload
        assert seen.config["method_name"] == info["method"] and seen.config["sweeps"] == [sweep]
        assert result is not None and {k: seen.summary[k] for k in result} == result
        # One step per record, each once, and one for tables and pictures.
        assert [s["_step"] for s in seen.steps] == list(range(len(records) + 1))
        for record, step in zip(records, seen.steps, strict=False):
            logged = {k.removeprefix("record/"): v for k, v in step.items() if k.startswith("record/")}
            assert logged == {k: record[k] for k in runs.STEPS if record[k] is not None}
        columns, rows = seen.table("records")
        assert len(rows) == len(records) == 10
        for record, row in zip(records, rows, strict=True):
            shown = dict(zip(columns, row, strict=True))
            assert json.loads(shown.pop("gold")) == record["gold"]
            assert shown == {k: record[k] for k in shown}
            assert {"task", "id", "draw", "score", "text", "answer", "answer_nll", "resident_bytes"} <= shown.keys()
        columns, rows = seen.table("layers")
        assert [row[columns.index("k_bits")] for row in rows] == result["k_bits"]
        assert [row[columns.index("held")] for row in rows] == result["entries_per_head"]["held"]
        lines = b"".join(p.read_bytes() for p in sorted((store.cell(key).folder / "records").glob("*.jsonl")))
        assert b"".join(seen.files(f"records-{key}").values()) == lines
        for kind, artefact in payload["calibrations"].items():
            files = {p.name: p.read_bytes() for p in store.calibration(artefact).iterdir()}
            assert seen.files(f"calibration-{kind}-{artefact}") == files and "data.safetensors" in files
        has_plan = (store.cell(key).folder / "plan.json").exists()
        assert has_plan == (info["method"] == "2d_hetero") == bool(payload["calibrations"])
        if has_plan:
            plan = (store.cell(key).folder / "plan.json").read_bytes()
            assert seen.files(f"plan-{key}") == {"plan.json": plan}
            assert seen.image("figures/routing_map").startswith(b"\x89PNG")


def test_a_sweep_has_a_run_with_its_tables_and_figures(tracked: tuple[Path, Path]) -> None:
    store = Store(tracked[1])
    (sweep,) = store.sweep_names()
    seen = wandb_files.runs(store.root)[f"report-{sweep}"]
    assert (seen.about.run_group, seen.about.job_type) == (sweep, "report")
    folder = store.report(sweep)
    for name in ("table", "deltas"):
        columns, rows = seen.table(f"tables/{name}")
        lines = (folder / f"{name}.csv").read_text().splitlines()
        assert columns == lines[0].split(",") and len(rows) == len(lines) - 1 > 0
    columns, rows = seen.table("tables/table")
    scores = {r[columns.index("key")]: r[columns.index("score")] for r in rows}
    assert scores == {k: (store.cell(k).result() or {})["score"] for k in scores} and len(scores) == 2
    files = seen.files(f"tables-report-{sweep}")
    assert files == {p.name: p.read_bytes() for p in folder.glob("*.csv")}
    pictures = list(folder.glob("*.png"))
    assert len(pictures) >= 3
    for picture in pictures:
        assert seen.image(f"figures/{picture.stem}") == picture.read_bytes()


@pytest.mark.req(16)
def test_everything_lies_in_the_store_and_holds_no_secret(tracked: tuple[Path, Path]) -> None:
    files = [p for p in (tracked[1] / "wandb").rglob("*") if p.is_file()]
    assert len(files) > 20
    for path in files:
        data = path.read_bytes()
        for secret in (*SECRETS, b"canary-of-the-command", b"inherited"):
            assert secret not in data, path
    for seen in wandb_files.runs(tracked[1]).values():
        assert seen.about.host == "-" != socket.gethostname()
        assert not (seen.folder / "files" / "wandb-metadata.json").exists()
        assert not (seen.folder / "files" / "requirements.txt").exists()
        assert not (seen.about.git.remote_url or seen.about.git.commit or seen.about.sweep_id)
        assert not [k for k in seen.config if k in ("paths", "cluster", "tracking")]


def test_publishing_again_writes_nothing_and_a_new_score_replaces(tracked: tuple[Path, Path], tmp_path: Path) -> None:
    import shutil

    store = Store(Path(shutil.copytree(tracked[0], tmp_path / "store")))
    (sweep,) = store.sweep_names()
    there = items.items(store, sweep)
    assert [i.kind for i in there] == ["cell", "cell", "report"]
    assert tracking.publish(store, sweep, OFFLINE, there)
    before = {p: p.stat().st_mtime_ns for p in (store.root / "wandb" / "wandb").rglob("*")}
    assert tracking.publish(store, sweep, OFFLINE, there)
    assert before == {p: p.stat().st_mtime_ns for p in (store.root / "wandb" / "wandb").rglob("*")}
    path = store.cell(there[0].name).folder / "result.json"
    write_json(path, read_json(path) | {"score": 0.125})
    other = store.manifest("another")
    other.parent.mkdir()
    write_json(other, read_json(store.manifest(sweep)) | {"name": "another", "cells": []})
    assert tracking.publish(store, sweep, OFFLINE, there)
    found = wandb_files.runs(store.root)  # refuses two folders of one id
    assert len(found) == 3 and found[there[0].name].summary["score"] == 0.125
    kept = [p for p in before if p.exists() and p.suffix == ".wandb"]
    assert len(kept) == 2
    # A second sweep with the same cell adds its tag and leaves the group.
    write_json(other, read_json(store.manifest(sweep)) | {"name": "another"})
    assert tracking.publish(store, "another", OFFLINE, there[:1])
    seen = wandb_files.runs(store.root)[there[0].name].about
    assert seen.run_group == sweep and {f"sweep:{sweep}", "sweep:another"} <= set(seen.tags)


def test_a_kill_in_the_middle_doubles_no_step_and_loses_none(runs: Runs) -> None:
    command = [f"paths.store={runs.store}", "method=1d,2d", "budget=10%", "-m"]
    killed = Forked(STUB_MAIN, command, {"STUB_KILL_AFTER": "4"})
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert not wandb_files.runs(runs.store)
    again = Forked(STUB_MAIN, command)
    said = again.communicate()[0]
    assert again.returncode == 0, said
    cells = {k: r for k, r in wandb_files.runs(runs.store).items() if r.about.job_type == "cell"}
    assert len(cells) == 2
    for seen in cells.values():
        assert [s["_step"] for s in seen.steps] == list(range(7))
        columns, rows = seen.table("records")
        assert [r[columns.index("id")] for r in rows] == [f"s{i}" for i in range(6)]


def test_two_runs_in_one_process_and_cells_of_a_run_without_tracker(runs: Runs) -> None:
    def offline(*args: str) -> int:
        return run.main([f"paths.store={runs.store}", "tracking.timeout_s=400", *args])

    assert offline("method=1d", "budget=10%") == 0
    assert offline("method=2d", "budget=10%") == 0
    found = wandb_files.runs(runs.store)
    assert {r.config["method_name"] for r in found.values() if r.about.job_type == "cell"} == {"1d", "2d"}
    assert len(found) == 4
    assert runs("method=SnapKV", "budget=10%") == 0  # tracking=none
    assert len(wandb_files.runs(runs.store)) == 4
    assert offline("method=SnapKV", "budget=10%") == 0  # nothing to compute
    assert len(wandb_files.runs(runs.store)) == 6
    assert "warning" not in runs.capsys.readouterr().err


def test_a_grid_becomes_a_heatmap(tmp_path: Path) -> None:
    grid = [{"length": n, "depth": d, "score": d, "n": 2} for n in (256, 512) for d in (0.0, 0.5, 1.0)]
    made = runs._pictures("1d at 10%", {"grid": grid}, None, tmp_path)
    assert [p.name for p in made] == ["niah_heatmap.png"] and made[0].read_bytes().startswith(b"\x89PNG")


# A stand-in for the package `wandb` that misbehaves at one place; the child process and its limits are real.
MISBEHAVING = """
import os, signal, time
def at(place):
    if place == os.environ["STUB_PLACE"]:
        open(os.environ["STUB_PID"], "w").write(str(os.getpid()))
        how = os.environ["STUB_HOW"]
        if how == "raise":
            raise RuntimeError("the tracker is\\nunwell")
        if how == "exit":
            os._exit(9)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
at("import")
class Settings:
    def __init__(self, **given): pass
class Table(Settings):
    MAX_ROWS = 1
Image = Table
class Artifact(Table):
    def __init__(self, name, type): pass
    def add_file(self, *given, **named): pass
class Run:
    summary, dir = {}, os.environ["WANDB_DIR"] + "/wandb/offline-run-x/files"
    def define_metric(self, *given, **named): pass
    log_artifact = define_metric
    def log(self, *given, **named): at("log")
    def finish(self, **named): at("finish")
def init(**given):
    at("init")
    return Run()
"""


@pytest.fixture
def misbehaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in, first on the children's path; returns the file with the id of the process that misbehaved."""
    package = tmp_path / "site" / "wandb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(MISBEHAVING)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("STUB_PID", str(tmp_path / "pid"))
    return tmp_path / "pid"


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.req(25)
@pytest.mark.parametrize("place", ["import", "init", "log", "finish"])
def test_a_tracker_that_hangs_is_killed_and_told_in_one_line(
    runs: Runs, misbehaving: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    assert runs("method=1d,2d", "-m") == 0
    before = measured(runs.store)
    for name in ("cells", "sweeps", "reports"):
        (runs.store / name).rename(runs.store / f"{name}.before")
    monkeypatch.setenv("STUB_PLACE", place)
    monkeypatch.setenv("STUB_HOW", "hang")
    begun = time.monotonic()
    assert run.main([f"paths.store={runs.store}", "tracking.timeout_s=6", "method=1d,2d", "-m"]) == 0
    assert time.monotonic() - begun < 300  # it would hang for 600
    assert measured(runs.store) == before
    out, err = runs.capsys.readouterr()
    assert "next: python -m pipelines.report" in out
    lines = err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("warning: the tracker ") and " 6 s" in lines[0]
    assert gone(int(misbehaving.read_text()))


@pytest.mark.req(25)
def test_a_tracker_that_hangs_while_cells_are_computed_delays_none_of_them(
    runs: Runs, misbehaving: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_PLACE", "init")
    monkeypatch.setenv("STUB_HOW", "hang")
    store = Store(runs.store)
    store.prepare()
    patient = TrackingConfig(mode="offline", project="m", timeout_s=400)
    with pytest.raises(KeyboardInterrupt), tracking.Tracker(store, "s", patient) as tracker:
        begun = time.monotonic()
        for i in range(20_000):  # more than a pipe holds
            tracker.add(Item("cell", f"{i:016d}"))
        assert time.monotonic() - begun < 200 and tracker.left > 10_000
        raise KeyboardInterrupt


@pytest.mark.req(25)
@pytest.mark.parametrize(("how", "told"), [("raise", "failed: "), ("exit", "ended with 9")])
def test_a_tracker_that_fails_is_told_in_one_line(
    runs: Runs, misbehaving: Path, monkeypatch: pytest.MonkeyPatch, how: str, told: str
) -> None:
    monkeypatch.setenv("STUB_PLACE", "init")
    monkeypatch.setenv("STUB_HOW", how)
    assert run.main([f"paths.store={runs.store}", "tracking.timeout_s=60", "method=1d,2d", "-m"]) == 0
    err = runs.capsys.readouterr().err.strip()
    assert len(err.splitlines()) == 1 and told in err
    if how == "raise":
        assert "the tracker is unwell (and 2 more)" in err
        assert "RuntimeError" in (runs.store / "wandb" / "publish.log").read_text()


@pytest.mark.req(16)
def test_a_tracker_that_cannot_write_says_so_first_and_the_run_goes_on(runs: Runs) -> None:
    runs.store.mkdir()
    (runs.store / "wandb").write_text("in the way")
    assert run.main([f"paths.store={runs.store}", "method=1d"]) == 0
    err = runs.capsys.readouterr().err.strip()
    assert len(err.splitlines()) == 1 and f"cannot write {runs.store / 'wandb'}" in err
    assert len(measured(runs.store)) == 1


def test_an_interrupt_ends_the_child(runs: Runs, misbehaving: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_PLACE", "init")
    monkeypatch.setenv("STUB_HOW", "hang")
    assert runs("method=1d") == 0
    store = Store(runs.store)
    (sweep,) = store.sweep_names()
    tracker = tracking.Tracker(store, sweep, OFFLINE)
    with pytest.raises(KeyboardInterrupt), tracker:
        tracker.add(items.items(store, sweep)[0])
        while not (misbehaving.exists() and misbehaving.read_text()):
            time.sleep(0.05)
        raise KeyboardInterrupt
    assert gone(int(misbehaving.read_text())) and not runs.capsys.readouterr().err


def test_a_run_that_another_process_writes_is_left_to_it(runs: Runs) -> None:
    assert runs("method=1d") == 0
    store = Store(runs.store)
    (sweep,) = store.sweep_names()
    (cell, _) = items.items(store, sweep)
    tracking.prepare(store.root / "wandb")
    lease = Lease(store.root / "wandb" / "published" / cell.id)
    assert tracking.publish(store, sweep, OFFLINE, [cell])
    assert not wandb_files.runs(runs.store)
    lease.release()
    assert tracking.publish(store, sweep, OFFLINE, [cell])
    assert list(wandb_files.runs(runs.store)) == [cell.id]


def test_no_tracker_writes_nothing(tmp_path: Path) -> None:
    none = TrackingConfig(mode="none", project="moend", timeout_s=1)
    assert tracking.publish(Store(tmp_path), "s", none, [Item("cell", "k")])
    assert not list(tmp_path.iterdir())


def test_all_paths_are_given_and_nothing_is_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in INHERITED.items():
        monkeypatch.setenv(name, value)
    env = tracking.environment(tmp_path, "offline")
    for name in ("DIR", "DATA_DIR", "CACHE_DIR", "CONFIG_DIR", "ARTIFACT_DIR"):
        assert env[f"WANDB_{name}"].startswith(str(tmp_path))
    assert "inherited" not in env.values() and "WANDB_API_KEY" not in env and env["WANDB_MODE"] == "offline"
    assert env["PATH"] == os.environ["PATH"]
    assert tracking.environment(tmp_path, "online", key=True)["WANDB_API_KEY"] == INHERITED["WANDB_API_KEY"]


def test_ids_are_fit_for_wandb() -> None:
    assert Item("cell", "0123456789abcdef").id == "0123456789abcdef"
    assert Item("report", "moend_table2-ab12cd").id == "report-moend_table2-ab12cd"
    odd = [Item("report", name).id for name in ("a/b", "a:b", "x" * 300)]
    assert len(set(odd)) == 3 and all(len(x) < 128 and not set(x) & set("/\\#?%:,;'") for x in odd)


def test_a_csv_keeps_numbers_and_gaps(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("key,score,note\n12ab,0.5,\n13cd,,x\n")
    assert runs.csv_table(path) == (["key", "score", "note"], [["12ab", 0.5, None], ["13cd", None, "x"]])
    assert tables.HEADER.count("key") == 1
