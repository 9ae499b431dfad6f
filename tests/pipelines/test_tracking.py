"""The tracker is a view: offline by default, inside the store, and unable to hurt a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pipelines import tracking
from pipelines.schema import TrackingConfig
from pipelines.store import Store
from tests.pipelines.conftest import Runs

OFFLINE = TrackingConfig(mode="offline", project="moend", timeout_s=60)


@pytest.mark.req(16)
@pytest.mark.req(25)
def test_an_offline_run_lies_in_the_store_and_is_named_by_the_key(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_RUN_ID", "inherited")
    assert runs("method=1d") == 0
    (key,) = [p.name for p in (runs.store / "cells").iterdir()]
    store = Store(runs.store)
    name = store.sweep_names()[0]
    for _ in range(2):  # publishing again replaces
        assert tracking.publish(store, name, OFFLINE, [key])
        (folder,) = (runs.store / "wandb" / "wandb").glob("offline-run-*")
        assert folder.name.endswith(f"-{key}")
        data = next(folder.glob("*.wandb")).read_bytes()
        assert name.encode() in data
        assert b"resident_bytes" in data
    assert not list(home.rglob("*wandb*"))


@pytest.mark.req(25)
def test_a_tracker_that_hangs_or_fails_costs_one_warning(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert runs("method=1d") == 0
    store = Store(runs.store)
    slow, python = tmp_path / "slow.sh", sys.executable
    slow.write_text(f"#!{python}\nimport time; time.sleep(60)\n")
    slow.chmod(0o755)
    before = {p: p.read_bytes() for p in runs.store.rglob("*.json*")}
    monkeypatch.setattr(sys, "executable", str(slow))
    assert not tracking.publish(store, "latest", TrackingConfig(mode="offline", project="m", timeout_s=0.5), ["k"])
    assert runs.capsys.readouterr().err.count("warning: the tracker took longer than 0.5 s") == 1
    slow.write_text(f"#!{python}\nraise SystemExit(3)\n")
    assert not tracking.publish(store, "latest", OFFLINE, ["k"])
    assert "ended with 3" in runs.capsys.readouterr().err
    assert before == {p: p.read_bytes() for p in runs.store.rglob("*.json*")}


def test_no_tracker_writes_nothing(tmp_path: Path) -> None:
    none = TrackingConfig(mode="none", project="moend", timeout_s=1)
    assert tracking.publish(Store(tmp_path), "s", none, ["k"])
    assert not list(tmp_path.iterdir())


def test_all_paths_are_given(tmp_path: Path) -> None:
    env = tracking.environment(tmp_path, "offline")
    for name in ("DIR", "DATA_DIR", "CACHE_DIR", "CONFIG_DIR"):
        assert env[f"WANDB_{name}"].startswith(str(tmp_path))
    assert "WANDB_RUN_ID" not in env
    assert env["PATH"] == os.environ["PATH"]
