"""A record says where it was made, and records of one cell that were made differently are told."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipelines.store import provenance


def made(**values: Any) -> dict[str, Any]:
    same = {"device": "cpu", "dtype": "float32", "kernel": "cpu", "commit": "a" * 40, "dirty": False}
    return {"id": "x", "provenance": {**same, **values}}


def test_what_a_record_says() -> None:
    model = SimpleNamespace(dtype=torch.float32)
    loaded = SimpleNamespace(model=model, device=torch.device("cpu"), store_dtype=torch.bfloat16)
    said = provenance.provenance(SimpleNamespace(engine=SimpleNamespace(chunk=512)), loaded)
    assert said["device"] == "cpu" and said["dtype"] == "float32" and said["store_dtype"] == "bfloat16"
    assert said["kernel"] in ("cpu", "torch") and said["chunk"] == 512
    assert said["versions"]["torch"] == torch.__version__ and "python" in said["versions"]
    assert (said["commit"], said["dirty"]) == provenance.checkout()
    assert not any(str(provenance.machine()["host"]) == str(x) for x in said.values())


@pytest.mark.parametrize(
    ("field", "other", "line"),
    [
        ("device", "NVIDIA H200", "device: cpu (2), NVIDIA H200 (1)"),
        ("dtype", "bfloat16", "dtype: float32 (2), bfloat16 (1)"),
        ("kernel", "triton", "kernel: cpu (2), triton (1)"),
        ("commit", "b" * 40, "commit: aaaaaaaaaaaa (2), bbbbbbbbbbbb (1)"),
        ("dirty", True, "commit: aaaaaaaaaaaa (2), aaaaaaaaaaaa-dirty (1)"),
        ("commit", None, "commit: aaaaaaaaaaaa (2), unknown (1)"),
    ],
)
def test_records_that_were_made_differently_are_told(field: str, other: Any, line: str) -> None:
    assert provenance.mixed([made(), made(), made(**{field: other})]) == [line]


def test_records_that_agree_or_are_older_than_provenance_are_not_mixed() -> None:
    assert provenance.mixed([]) == provenance.mixed([made(), made()]) == provenance.mixed([{"id": "a"}] * 2) == []
    assert provenance.mixed([made(), {"id": "old"}])[0] == "device: cpu (1), unknown (1)"
    assert provenance.mixed([made(versions={"torch": "1"}), made()]) == []


def test_marks_of_a_result() -> None:
    source = {"bundle": "a.zip", "sha256": "0", "commit": "c" * 40, "created": "2026-01-02T03:04:05+0000"}
    lines = ["device: cpu (1), NVIDIA H200 (1)", "0-of-1.jsonl: 1 of 2 records were there already, left out"]
    told = [*lines, "from a.zip, packed 2026-01-02 by cccccccccccc"]
    assert provenance.marks({"mixed": lines[:1], "repeated": lines[1:], "source": source}) == told
    assert provenance.marks({"mixed": []}) == provenance.marks({}) == []


@pytest.mark.process
def test_untracked_files_make_a_checkout_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*args: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *args], cwd=tmp_path, check=True)

    module = tmp_path / "pipelines" / "store" / "provenance.py"
    module.parent.mkdir(parents=True)
    module.write_text("")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    monkeypatch.setattr(provenance, "__file__", str(module))
    look = provenance.checkout.__wrapped__
    commit, dirty = look()
    assert commit and not dirty
    (tmp_path / "plugin.py").write_text("")
    assert look() == (commit, True)
    (tmp_path / "plugin.py").unlink()
    module.write_text("changed")
    assert look() == (commit, True)
    (tmp_path / provenance.COMMIT_FILE).write_text(f"{commit}-dirty\n")
    assert look() == (commit, True)
