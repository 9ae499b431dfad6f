"""Uploading, by wandb's own program, to a small server of ours: all of it, once, and on after a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipelines import run
from pipelines.store.cells import Store
from pipelines.store.files import read_json, write_json
from pipelines.store.lease import Lease
from pipelines.tracking import items
from pipelines.tracking import upload as sync
from pipelines.tracking import wandb as tracking
from tests import ROOT
from tests.pipelines import stub
from tests.pipelines.conftest import KEY
from tests.pipelines.tracking import wandb_files
from tests.pipelines.tracking.wandb_server import Server

pytestmark = pytest.mark.process  # wandb's own


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cells of a library without a model, evaluated and written for wandb."""
    root = tmp_path_factory.mktemp("sync") / "store"
    with pytest.MonkeyPatch.context() as patch:
        stub.install(patch)
        assert run.main(["method=full,2d_hetero", "budget=25%", "tracking=none", f"paths.store={root}", "-m"]) == 0
    store = Store(root)
    (sweep,) = store.sweep_names()
    config = tracking.TrackingConfig(mode="offline", project="moend", timeout_s=400)
    assert tracking.publish(store, sweep, config, items.items(store, sweep))
    return root


@pytest.fixture
def store(ran: Path, tmp_path: Path) -> Path:
    """A copy of it. What wandb wrote names files of the first place, which are still there and the same."""
    copy = Path(shutil.copytree(ran, tmp_path / "store"))
    for path in (copy / "wandb" / "published").glob("*.json"):
        write_json(path, read_json(path) | {"root": str(copy)})
    return copy


def call(capsys: pytest.CaptureFixture[str], store: Path, *args: str) -> tuple[int, str, str]:
    """Exit code, output and errors of one sync."""
    capsys.readouterr()
    code = sync.main([f"paths.store={store}", *args])
    return code, *capsys.readouterr()


def ledger(store: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (store / "wandb" / "uploads.jsonl").read_text().splitlines()]


def test_everything_arrives_once(store: Path, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, store, "dry_run=true")
    assert code == 3 and f"3 of 3 runs to upload to {server.url}/moend" in out and out.count("to be uploaded: ") == 3
    assert not server.requests and not (store / "wandb" / "uploads.jsonl").exists()
    code, out, err = call(capsys, store, "parallel=2")
    assert (code, err) == (0, "") and "uploaded 3 of 3" in out and f"3 of 3 runs uploaded to {server.url}/moend" in out
    offline = wandb_files.runs(store)
    assert server.runs.keys() == offline.keys() and len(offline) == 3
    for id, seen in offline.items():
        there = server.runs[id]
        there["config"].pop("_wandb")
        assert there["config"] == {k: v for k, v in seen.config.items() if k != "_wandb" and v != {}}
        assert (there["groupName"], there["project"], there["host"]) == (seen.about.run_group, "moend", "-")
        assert there["tags"] == list(seen.about.tags) and there["exit_code"] == 0
        assert [s["_step"] for _, s in sorted(there["history"].items())] == [s["_step"] for s in seen.steps]
        summary = json.loads(server.files[f"{id}/wandb-summary.json"])
        expected = {k: v for k, v in seen.summary.items() if isinstance(v, str | int | float) and k[0] != "_"}
        assert {k: summary[k] for k in expected} == expected  # wandb leaves out what is null
        media = [p for p in (seen.folder / "files" / "media").rglob("*") if p.is_file()]
        for path in media:
            assert server.files[f"{id}/{path.relative_to(seen.folder / 'files')}"] == path.read_bytes()
        for artifact in seen.artifacts.values():
            assert artifact.digest in server.committed
            for name, data in seen.files(artifact.name).items():
                assert server.files[f"{artifact.digest}/{name}"] == data
    for part in ("media/table/layers", "media/table/records", "media/images/figures/accuracy_memory", "/artefact.json"):
        assert any(part in x for x in server.files), part
    sent = len(server.requests)
    code, out, err = call(capsys, store)
    assert code == 0 and out.strip() == f"all 3 runs are at {server.url}/moend" and len(server.requests) == sent
    assert call(capsys, store, "dry_run=true")[0] == 0
    # The key went to the server, and nowhere else.
    assert len(server.keys - {""}) == 1
    assert not [p for p in (store / "wandb").rglob("*") if p.is_file() and KEY.encode() in p.read_bytes()]
    assert not [x for x in server.requests if KEY.encode() in x or b"canary" in x]


def test_what_changed_is_uploaded_again_and_nothing_else(
    store: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(capsys, store)[0] == 0
    key = next(p.name for p in sorted((store / "cells").iterdir()))
    path = store / "cells" / key / "result.json"
    write_json(path, read_json(path) | {"score": 0.125})
    code, out, _ = call(capsys, store, "dry_run=true")
    assert code == 3 and out.count("uploaded: ") == 2 + out.count("again and uploaded: ") == 3
    code, out, _ = call(capsys, store)
    assert code == 0 and "1 of 1 runs uploaded" in out
    assert json.loads(server.files[f"{key}/wandb-summary.json"])["score"] == 0.125
    assert server.uploads[f"{key}/wandb-summary.json"] == 2 and len(ledger(store)) == 4
    lines = [s["_step"] for _, s in sorted(server.runs[key]["history"].items())]
    assert lines == list(range(len(lines)))
    # Another place is another upload, and the files say which.
    code, out, _ = call(capsys, store, "project=other", "entity=team", "sweep=latest")
    assert code == 0 and f"3 of 3 runs uploaded to {server.url}/team/other" in out
    assert {r["project"] for r in server.runs.values()} == {"other"}
    artifacts = [json.loads(x) for x in server.requests if b'"CreateArtifact"' in x][-3:]
    assert {a["variables"]["input"]["entityName"] for a in artifacts} == {"team"}
    assert call(capsys, store)[1].strip() == f"all 3 runs are at {server.url}/team/other"


def process(store: Path, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pipelines.sync", f"paths.store={store}", "parallel=1", *args],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ.copy(),
    )  # fmt: skip


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_kill_in_the_middle_goes_on_where_it_stopped(
    store: Path, server: Server, capsys: pytest.CaptureFixture[str], end: signal.Signals
) -> None:
    child = process(store)
    assert child.stdout is not None
    assert "uploaded 1 of 3" in child.stdout.readline()
    server.slow = 0.3
    time.sleep(1.0)
    child.send_signal(end)
    said = child.communicate(timeout=60)[0]
    assert child.returncode == (-end if end == signal.SIGKILL else 143)
    assert "Traceback" not in said
    server.slow = 0
    done = {e["id"] for e in ledger(store)}
    assert 1 <= len(done) < 3
    with (store / "wandb" / "uploads.jsonl").open("a") as file:
        file.write('{"id": "torn')
    code, out, _ = call(capsys, store)
    left = 3 - len(done)
    assert code == 0 and f"{left} of {left} runs uploaded" in out
    assert all(server.uploads[f"{id}/wandb-summary.json"] == 1 for id in done)
    assert all(r["exit_code"] == 0 for r in server.runs.values()) and len(server.runs) == 3
    for id, seen in wandb_files.runs(store).items():
        assert [s["_step"] for _, s in sorted(server.runs[id]["history"].items())] == [s["_step"] for s in seen.steps]
    assert "all 3 runs" in call(capsys, store)[1]


def test_a_refused_key_is_a_failure_in_one_line_each(
    store: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """wandb 0.31's program ends with 0 where the server refuses the key."""
    server.refuse = 401
    code, out, _ = call(capsys, store)
    assert code == 1 and out.count("user is not logged in") == 3
    assert out.strip().endswith(f"0 of 3 runs uploaded to {server.url}/moend; again for the rest")
    assert not (store / "wandb" / "uploads.jsonl").exists()
    server.refuse = 0
    assert call(capsys, store)[0] == 0


def test_a_server_that_hangs_is_left_after_the_time_limit(
    store: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.slow = 120
    code, out, _ = call(capsys, store, "timeout_s=6")
    assert code == 1 and out.count("took longer than 6 s") == 3


def test_without_key_or_network_one_line_says_so(
    store: Path, server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    code, _, err = call(capsys, store)
    told = f"error: no key for {server.url}: set WANDB_API_KEY or run `wandb login`; nothing was uploaded\n"
    assert (code, err) == (2, told)
    netrc = Path(os.environ["HOME"]) / ".netrc"
    netrc.write_text(f"machine 127.0.0.1 login user password {KEY}\n")
    netrc.chmod(0o600)
    assert sync.has_key(server.url) and not sync.has_key(sync.SERVER)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    code, _, err = call(capsys, store)
    assert code == 2 and err.startswith("error: http://127.0.0.1:9 cannot be reached (") and err.count("\n") == 1
    assert not server.requests and call(capsys, store, "dry_run=true")[0] == 3


def test_online_uploads_at_once_and_without_a_key_costs_a_line(
    store: Path, server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    online = tracking.TrackingConfig(mode="online", project="moend", timeout_s=400)
    (sweep,) = Store(store).sweep_names()
    found = items.items(Store(store), sweep)
    monkeypatch.delenv("WANDB_API_KEY")
    assert not tracking.publish(Store(store), sweep, online, found)
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"no key for {server.url}" in err and "(and 2 more)" in err
    assert not server.requests
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert tracking.publish(Store(store), sweep, online, found)
    assert len(server.runs) == 3 and len(ledger(store)) == 3
    assert call(capsys, store)[1].strip() == f"all 3 runs are at {server.url}/moend"


def test_only_one_sync_of_a_store_at_a_time(store: Path, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    lease = Lease(store / "wandb" / "uploads.jsonl")
    code, _, err = call(capsys, store)
    assert code == 2 and err == f"error: another sync of {store} is running\n"
    lease.release()
    assert call(capsys, store, "sweep=latest")[0] == 0


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("paralel=2", "unknown argument 'paralel'. Did you mean 'parallel'?"),
        ("parallel=0", "parallel is a whole number above zero, got '0'"),
        ("timeout_s=soon", "timeout_s is a whole number above zero, got 'soon'"),
        ("dry_run=maybe", "dry_run is true or false, got 'maybe'"),
        ("project=a/b", "project: string should match pattern"),
        ("sweep=nope", "unknown sweep 'nope'"),
    ],
)
def test_a_mistake_is_one_line(ran: Path, capsys: pytest.CaptureFixture[str], argument: str, told: str) -> None:
    code, out, err = call(capsys, ran, argument)
    assert code == 2 and err.startswith(f"error: {told}") and err.count("\n") == 1 and not out


def test_an_empty_store_and_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, tmp_path / "nothing")
    assert code == 2 and "no sweep was run into" in err
    code, out, _ = call(capsys, tmp_path, "--help")
    assert code == 0
    for word in ("dry_run", "parallel", "WANDB_API_KEY", "uploads.jsonl", "Exit codes"):
        assert word in out


def test_neither_torch_nor_wandb_is_loaded_to_list() -> None:
    code = "import sys, pipelines.sync; assert not {'torch', 'wandb', 'matplotlib'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
