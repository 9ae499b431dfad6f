"""cluster=local with real workers and the fixture model: killed, cancelled, resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.cluster import cancel, status
from pipelines.cluster.jobs import Submitted
from pipelines.store.cells import Store
from tests import ROOT

pytestmark = pytest.mark.process

PATIENCE_S = 240.0
SWEEP = (
    "cluster=local", "model=recall_moe", "benchmark=recall", "benchmark.tasks=[num]", "benchmark.rows=60",
    "method=SnapKV,2d_hetero", "budget=25%", "seed=0,1", "tracking=none", "-m",
)  # fmt: skip


PLANTED = "a-key-that-nobody-may-find"  # in the environment of the command and so of its workers

# Loaded by every Python that finds it on its path: records take a moment, so that faults find workers at work.
SLOW = """
import os, time
real = os.fsync
def fsync(fd):
    real(fd)
    time.sleep(0.1)
os.fsync = fsync
"""


def run(store: Path, *args: str, slow: bool = False) -> tuple[int, str]:
    folder = store.parent / "slow"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(SLOW)
    more = {"OMP_NUM_THREADS": "1", "HF_TOKEN": PLANTED, **({"PYTHONPATH": str(folder)} if slow else {})}
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.run", f"paths.store={store}", *SWEEP, *args], cwd=ROOT, text=True,
        env={**os.environ, **more}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=PATIENCE_S,
    )  # fmt: skip
    return done.returncode, done.stdout


def until(ready: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := ready()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return found


def records(store: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in sorted(store.glob("cells/*/records/*.jsonl")):
        rows = path.read_bytes().split(b"\n")[:-1]
        found.setdefault(path.parents[1].name, []).extend(json.loads(x)["id"] for x in rows)
    return found


def workers(sweep: Submitted) -> list[Any]:
    return [s for s in sweep.started().values() if s.kind == "run" and s.ended is None and s.process.alive()]


@pytest.mark.req(15)
def test_workers_are_killed_and_cancelled_and_nothing_is_lost_or_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(tmp_path / "store")
    code, out = run(store.root, "cluster.workers=2", "cluster.wait=false", slow=True)
    assert code == 0 and "started local-" in out, out
    (name,) = store.sweep_names()
    sweep = Submitted(store.sweep(name))

    # One of two workers is killed: the other goes on with what it had in hand
    until(lambda: len(workers(sweep)) == 2 and records(store.root), "two workers")
    os.kill(workers(sweep)[0].process.pid, signal.SIGKILL)
    before = sum(map(len, records(store.root).values()))
    until(lambda: sum(map(len, records(store.root).values())) > before, "the other worker goes on")
    assert {c.state for c in status.collect(store, name).cells} <= {"running", "pending", "done"}

    # Cancelled: nobody is left, what is there stays
    assert cancel.main([f"paths.store={store.root}", "sweep=latest"]) == 0
    assert "cancelled local-" in capsys.readouterr().out
    assert not workers(sweep)
    kept = records(store.root)
    assert sum(map(len, kept.values())) > 0
    assert status.main([f"paths.store={store.root}"]) == 3
    assert "stopped" in capsys.readouterr().out
    torn = next(store.root.glob("cells/*/records/*.jsonl"))
    with torn.open("ab") as f:
        f.write(b'{"task": "num", "id"')

    # The same command finishes the rest and shows the table; a different number of workers takes other shards
    code, out = run(store.root, "cluster.workers=1")
    assert code == 0, out
    assert "95 % interval" in out
    found = records(store.root)
    assert len(found) == 4
    for key, lines in found.items():
        assert len(lines) == len(set(lines)) == 60
        assert set(kept.get(key, ())) <= set(lines)
        result = store.cell(key).result()
        assert result is not None and result["n"] == 60
    assert (store.report(name) / "table.csv").exists()
    assert status.main([f"paths.store={store.root}"]) == 0
    assert "4 cells: 4 done" in capsys.readouterr().out
    holding = [p for p in store.root.rglob("*") if p.is_file() and PLANTED.encode() in p.read_bytes()]
    assert not holding and len(list(store.root.rglob("*"))) > 50


def test_a_worker_that_dies_alone_leaves_a_failure_with_its_log(tmp_path: Path, capsys: Any) -> None:
    store = Store(tmp_path / "store")
    assert run(store.root, "cluster.workers=1", "cluster.wait=false", "method=SnapKV", "seed=0", slow=True)[0] == 0
    (name,) = store.sweep_names()
    sweep = Submitted(store.sweep(name))
    (worker,) = until(lambda: workers(sweep) if records(store.root) else None, "the worker")
    os.kill(worker.process.pid, signal.SIGKILL)
    view = until(lambda: v if not (v := status.collect(store, name)).live else None, "the supervisor ends")
    (cell,) = view.cells
    assert cell.state == "failed" and "was killed" in cell.detail and cell.log == worker.log
    assert status.main([f"paths.store={store.root}"]) == 1
    assert f"(log: {worker.log})" in capsys.readouterr().out
    assert (store.report(name) / "table.csv").exists()  # the report came all the same
