"""The hub, without a hub: what is said when it cannot be reached or refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from moend.errors import Blocked, UserError
from moend.models import hub
from moend.models import load as models


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without network and with an empty Hugging Face cache; returns our cache folder."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    def nothing(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("cannot reach the hub. More text\nand more.")

    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", nothing)
    hub.ask.cache_clear()
    return tmp_path / "cache"


def test_an_unreachable_hub_is_one_line(offline: Path) -> None:
    spec = models.spec("qwen3_8b")
    with pytest.raises(Blocked) as e:
        models.load(spec, offline)
    for text in (str(e.value), str(models.available(spec, offline))):
        assert "\n" not in text and str(spec.revision) in text and str(offline / "hub") in text
    with pytest.raises(Blocked, match="Qwen/Qwen3-8B@main is not on this machine"):
        models.read_arch(models.spec("hf", id="Qwen/Qwen3-8B"), offline)


def test_a_snapshot_in_the_cache_needs_no_network(folder: Path, offline: Path) -> None:
    commit = "ab" * 20
    repo = offline / "hub" / "models--someone--tiny"
    (repo / "snapshots").mkdir(parents=True)
    spec = models.spec("hf", id="someone/tiny")
    assert models.identity(spec, offline) == {"id": "someone/tiny", "revision": "main"}
    folder.rename(repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    assert models.identity(spec, offline) == {"id": "someone/tiny", "revision": commit}
    assert models.available(spec, offline) is None
    assert models.load(spec, offline).weights == commit
    (repo / "snapshots" / commit / "model.safetensors").unlink()
    assert "not on this machine" in str(models.available(spec, offline))


@pytest.mark.parametrize(
    ("refusal", "kind", "text"),
    [("GatedRepoError", Blocked, "licence"), ("RepositoryNotFoundError", UserError, "is not on the hub")],
)
def test_what_the_hub_refuses(
    refusal: str, kind: type[Exception], text: str, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import errors

    def refuse(*_: object, **__: object) -> str:
        cls = getattr(errors, refusal)
        raise cls.__new__(cls)  # its constructor wants a real response

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(kind, match=text):
        models.load(models.spec("llama3.1_8b_instruct"), offline)
