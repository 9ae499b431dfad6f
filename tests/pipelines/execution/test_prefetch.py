"""Prefetch brings what the points lack, once, and says what it did."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest

from moend.benchmarks import benchmark
from moend.errors import Blocked
from moend.models import load as models
from pipelines import prefetch

HERE = ["model=recall_moe", "benchmark=recall"]
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`command("model=...")` is the exit code and what was printed, on a machine with an empty cache and no hub."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def run(*args: str) -> tuple[int, str]:
        code = prefetch.main([f"paths.cache={tmp_path / 'cache'}", f"paths.store={tmp_path / 'store'}", *args])
        captured = capsys.readouterr()
        assert not captured.err or code == 2
        return code, captured.out + captured.err

    return run


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub that has LongBench's archive and no model; the list fills with what was asked of it."""
    asked: list[str] = []

    def download(repo: str, name: str, *, revision: str, cache_dir: str | None = None, **_: object) -> str:
        asked.append(repo)
        root = Path(cache_dir or tmp_path / "hub")
        path = root / f"datasets--{repo.replace('/', '--')}" / "snapshots" / revision / name
        path.parent.mkdir(parents=True)
        row = {"input": "q", "context": "c", "answers": ["Yes"], "all_classes": ["Yes"], "_id": "1"}
        with zipfile.ZipFile(path, "w") as z:
            z.writestr("data/trec.jsonl", json.dumps(row) + "\n")
        return str(path)

    def nothing(id: str, **_: object) -> str:
        asked.append(id)
        raise huggingface_hub.errors.LocalEntryNotFoundError("no route to host")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", nothing)
    return asked


def test_what_is_in_the_package_is_there(command: Command, tmp_path: Path) -> None:
    code, out = command(*HERE, "budget=10%,20%", "method=1d,2d")
    assert code == 0
    assert out.splitlines() == [
        "there: model recall_moe",
        "there: data recall",
        f"2 of 2 models and data sets are in {tmp_path / 'cache'}",
    ]
    assert not (tmp_path / "store").exists()


def test_data_is_fetched_once_into_the_cache_and_found_there(command: Command, hub: list[str], tmp_path: Path) -> None:
    longbench = ["model=recall_moe", "benchmark=longbench", "benchmark.tasks=[trec]", "budget=1,2"]
    code, out = command(*longbench, "dry_run=true")
    assert code == 3
    assert "missing: data 'longbench': THUDM/LongBench@5e628be450b7 is not on this machine yet" in out
    assert not hub
    code, out = command(*longbench)
    assert code == 0
    assert "fetching: data longbench\nfetched: data longbench\n" in out
    assert hub == ["THUDM/LongBench"]
    code, out = command(*longbench)
    assert code == 0
    assert "there: data longbench" in out
    assert hub == ["THUDM/LongBench"]
    found = benchmark("longbench", tasks="trec").at(tmp_path / "cache")
    assert [s.id for s in found.samples()] == ["1"]
    assert found.absent() is None


def test_one_that_fails_does_not_keep_the_others_away(command: Command, hub: list[str]) -> None:
    code, out = command("model=qwen3_8b,recall_moe", "benchmark=recall,longbench", "benchmark.limit=1", "-m")
    assert code == 1
    assert "failed: model qwen3_8b: model 'qwen3_8b': Qwen/Qwen3-8B@b968826d9c46 cannot be downloaded" in out
    assert "fetched: data longbench" in out
    assert "there: model recall_moe" in out
    assert out.splitlines()[-1].startswith("3 of 4 models and data sets are in ")
    assert out.splitlines()[-1].endswith("the same command again fetches the rest")


def test_a_model_is_fetched(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(models, "fetch", lambda spec, cache: asked.append((spec.name, cache)))
    code, out = command("model=qwen3_8b", "benchmark=recall", "seed=1,2")
    assert code == 0
    assert asked == [("qwen3_8b", tmp_path / "cache")]
    assert "fetched: model qwen3_8b" in out


def test_data_that_cannot_be_fetched_fails(command: Command, tmp_path: Path) -> None:
    code, out = command("model=recall_moe", "benchmark=longbench", f"benchmark.data_dir={tmp_path}")
    assert code == 1
    assert f"failed: data longbench: benchmark.data_dir={tmp_path} has no narrativeqa.jsonl" in out
    with pytest.raises(Blocked):
        benchmark("recall", data_dir=str(tmp_path / "nowhere")).fetch()
    code, out = command("model=nope")
    assert code == 2
    assert out.startswith("error: unknown model 'nope'.")
