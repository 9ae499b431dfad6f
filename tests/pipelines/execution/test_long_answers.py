"""A run that is killed in the middle of an answer goes on there; what it kept for that is gone afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moend.decoding import Decoder
from moend.saved import Saved
from pipelines import run
from pipelines.cluster import worker
from pipelines.cluster.jobs import Submitted
from pipelines.planning import planner
from pipelines.planning.facts import Planner
from pipelines.store.cells import CellStore, Store, state_name
from tests.pipelines.cluster.test_worker import frozen
from tests.pipelines.conftest import compose_points

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [
    *("model=recall_moe", "benchmark=recall", "benchmark.tasks=[num]", "benchmark.length=96", "benchmark.limit=2"),
    *("budget=50%", "tracking=none", "method=SnapKV,H2O", "generation.temperature=40", "generation.max_new_tokens=48"),
    "-m",
]
KILLED = """
import os, signal, sys
from moend.decoding import Decoder
from pipelines import run
plain, passes = Decoder._forward, [0]
def forward(self, *args, **how):
    passes[0] += 1
    if passes[0] == int(os.environ["KILL_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(self, *args, **how)
Decoder._forward = forward
run.main(sys.argv[1:])
"""


def cells(store: Path, *args: str) -> list[planner.Cell]:
    return planner.make_plan(compose_points([f"paths.store={store}", *COMMAND, *args]), Planner()).cells


def outcomes(store: Path) -> list[list[dict[str, Any]]]:
    """The records of both cells, without times and places."""
    left_out = ("timing", "provenance", "peak_bytes")
    found = [Store(store).cell(c.key).records() for c in cells(store)]
    return [[{k: v for k, v in r.items() if k not in left_out} for r in records] for records in found]


@pytest.mark.process
def test_a_run_killed_in_an_answer_goes_on_there(
    tmp_path: Path, undrawn: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    passes, plain = [0], Decoder._forward

    def counted(self: Any, *args: Any, **how: Any) -> Any:
        passes[0] += 1
        return plain(self, *args, **how)

    monkeypatch.setattr(Decoder, "_forward", counted)
    assert run.main([f"paths.store={tmp_path / 'alone'}", *COMMAND, "engine.save_every_s=0"]) == 0
    alone, passes[0] = passes[0], 0
    store = tmp_path / "killed"
    often = "engine.save_every_s=0.0001"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, f"paths.store={store}", *COMMAND, often],
        cwd=ROOT,
        env={**os.environ, "KILL_AT": "30"},
        capture_output=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    states = sorted(store.glob("cells/*/state/*"))
    assert len(states) == 1 and Store(store).cell(states[0].parents[1].name).tokens_saved() > 0
    assert run.main([f"paths.store={store}", *COMMAND, often]) == 0
    assert passes[0] <= alone - 30 + 3  # what was fed and generated before the kill is not fed again
    assert outcomes(store) == outcomes(tmp_path / "alone")
    assert not list(store.glob("cells/*/state"))
    assert "is removed" not in capsys.readouterr().out


def test_the_state_of_another_engine_is_removed_with_a_word(
    tmp_path: Path, undrawn: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = cells(tmp_path)[0]
    folder = Store(tmp_path).cell(first.key)
    folder.create(first.payload, first.info)
    name = state_name(first.facts.contexts[0])
    Saved(folder.state, name, {"engine": "of another kind"}, 0).slot("0-0-0", {}).save({}, {})
    assert folder.state.is_dir()
    assert run.main([f"paths.store={tmp_path}", *COMMAND]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "is of another engine, other cells or another question, and is removed" in told
    assert not folder.state.exists()


def test_the_plan_counts_the_disk_that_states_need(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [f"paths.store={tmp_path}", *COMMAND, "dry_run=true", "generation.max_new_tokens=600"]
    line = "disk for the state of long answers"
    assert run.main(args) == 0 and line not in capsys.readouterr().out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "LONG", 500)
        assert run.main(args) == 0 and f"{line} while they run: up to " in capsys.readouterr().out
        for off in ("null", "0"):
            assert run.main([*args, f"engine.save_every_s={off}"]) == 0
            assert line not in capsys.readouterr().out


def test_how_often_states_are_saved_is_no_part_of_a_cell(tmp_path: Path) -> None:
    keys = {tuple(c.key for c in cells(tmp_path, f"engine.save_every_s={s}")) for s in ("300", "0", "null")}
    assert len(keys) == 1


def test_tokens_of_damaged_states_count_nothing(tmp_path: Path) -> None:
    folder = CellStore(tmp_path)
    folder.state.mkdir()
    (folder.state / "a-0.safetensors").write_bytes(b"xx")
    header = json.dumps({"__metadata__": {"step": "7"}}).encode()
    (folder.state / "b-0.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert folder.tokens_saved() == 7
    folder.forget("a")
    assert [p.name for p in folder.state.iterdir()] == ["b-0.safetensors"]
    folder.forget("b")
    assert not folder.state.exists()


def test_an_answer_longer_than_the_time_limit_goes_on_while_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that ends without a record is queued again as long as the state of an answer grows."""
    path, _, plan = frozen(tmp_path)
    for name, value in {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "5", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SUBMITIT_FOLDER", str(tmp_path))
    monkeypatch.setattr(worker, "refuse_other_code", lambda *args: None)
    cell = plan.cells[0]
    folder, step = plan.store.cell(cell.key), [0, 50]
    folder.create(cell.payload, cell.info)

    def limited(self: worker.Run, *args: Any) -> bool:
        """As many tokens as the time limit lets through; then submitit asks Slurm for another start."""
        step[0] += step[1]
        Saved(folder.state, "a", {}, 0).slot("0", {}).save({"step": step[0]}, {})
        raise SystemExit(0)

    monkeypatch.setattr(worker.Run, "work", limited)
    sweep, work = Submitted(path.parents[1]), worker.Run(str(path), (cell.key,))
    for restarts in range(6):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        with pytest.raises(SystemExit):
            work()
        assert sweep.started()["5"].barren == 0
    step[1] = 0
    for barren in (0, 1, 2):
        with pytest.raises(SystemExit) as how:
            work()
        assert sweep.started()["5"].barren == barren
    assert how.value.code == 1 and "2 starts in a row ended without anything new" in capsys.readouterr().err
