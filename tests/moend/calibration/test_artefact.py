from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moend.budget import Arch
from moend.calibration.artefact import (
    DATA,
    META,
    Artefact,
    artefact_key,
    canonical,
    differing,
    identity,
    token_fingerprint,
)
from moend.errors import Blocked, UserError

ARCH = Arch(layers=2, q_heads=4, kv_heads=2, head_dim=16, max_positions=4096)


def example(**settings) -> Artefact:
    ident = identity(
        "some/model", "abc123", ARCH, {"keeps": [0.1, 1.0], "eviction": "scorer"} | settings, "f00d", {"sensitivity": 1}
    )
    table = torch.arange(6.0).reshape(3, 2)
    return Artefact("sensitivity", ident, {"table": table.T, "singles": table}, {"seconds": 0.5, "names": ("a", "b")})


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_round_trip(tmp_path):
    saved = example()
    folder = tmp_path / "deep" / saved.key
    saved.save(folder)
    assert files(folder) == [META, DATA]
    loaded = Artefact.load(folder, saved.identity, kind="sensitivity")
    assert (loaded.kind, loaded.identity, loaded.key) == (saved.kind, saved.identity, saved.key)
    assert loaded.info == {"seconds": 0.5, "names": ["a", "b"]}
    assert loaded.tensors.keys() == saved.tensors.keys()
    assert all(torch.equal(loaded.tensors[k], saved.tensors[k]) for k in saved.tensors)
    saved.save(folder)  # again: replaces, still loads
    assert files(folder) == [META, DATA]
    assert Artefact.load(folder).key == saved.key


def test_the_key_is_the_identity_alone():
    a = example()
    assert len(a.key) == 16
    assert a.key == Artefact(a.kind, dict(reversed(a.identity.items())), {}, {"other": 1}).key
    assert a.key != Artefact("queries", a.identity, {}, {}).key
    assert a.key != example(eviction="random").key
    assert a.key == artefact_key(a.kind, a.identity)


@pytest.mark.req(18)
def test_every_differing_field_is_named(tmp_path):
    saved = example()
    saved.save(tmp_path)
    needs = identity("some/model", "def456", ARCH, {"keeps": [0.1, 0.5], "seeds": [0]}, "f00d", {"sensitivity": 2})
    with pytest.raises(UserError) as error:
        Artefact.load(tmp_path, needs)
    message = str(error.value)
    assert "\n" not in message
    for part in (
        'revision: has "abc123", needs "def456"',
        "settings.keeps: has [0.1,1.0], needs [0.1,0.5]",
        'settings.eviction: has "scorer", needs nothing',
        "settings.seeds: has nothing, needs [0]",
        "versions.sensitivity: has 1, needs 2",
    ):
        assert part in message
    assert "data:" not in message
    with pytest.raises(UserError, match="holds a 'sensitivity' calibration, 'kl' is needed"):
        Artefact.load(tmp_path, kind="kl")


def test_missing_is_blocked(tmp_path):
    with pytest.raises(Blocked, match="no calibration in"):
        Artefact.load(tmp_path / "nowhere")


def damage(folder: Path, what: str) -> None:
    meta, data = folder / META, folder / DATA
    if what == "flipped byte":
        content = bytearray(data.read_bytes())
        content[-1] ^= 1
        data.write_bytes(content)
    elif what == "cut data":
        data.write_bytes(data.read_bytes()[:-8])
    elif what == "no data":
        data.unlink()
    elif what == "cut json":
        meta.write_text(meta.read_text()[:40])
    elif what == "binary json":
        meta.write_bytes(b"\x80\x02\xff")
    elif what == "list":
        meta.write_text("[1, 2]")
    elif what == "other json":
        meta.write_text('{"name": "package"}')
    elif what == "schema":
        meta.write_text(meta.read_text().replace('"schema": 1', '"schema": 7'))
    elif what == "no identity":
        meta.write_text(json.dumps({"schema": 1, "kind": "kl", "key": "x", "info": {}, "data": {"sha256": ""}}))
    elif what == "edited identity":
        meta.write_text(meta.read_text().replace("abc123", "abc124"))
    else:
        raise ValueError(what)


@pytest.mark.parametrize(
    ("what", "file"),
    [
        ("flipped byte", DATA),
        ("cut data", DATA),
        ("no data", DATA),
        ("cut json", META),
        ("binary json", META),
        ("list", META),
        ("other json", META),
        ("schema", META),
        ("no identity", META),
        ("edited identity", META),
    ],
)
@pytest.mark.req(18)
def test_foreign_and_damaged_files_are_named_in_one_line(tmp_path, what, file):
    example().save(tmp_path)
    damage(tmp_path, what)
    with pytest.raises(UserError) as error:
        Artefact.load(tmp_path)
    assert str(tmp_path / file) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("before", [False, True])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, at, before):
    folder = tmp_path / "a"
    if before:
        example().save(folder)
    calls = iter(range(10))
    fsync = os.fsync

    def full(handle):
        if next(calls) == at:
            raise OSError(28, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    changed = Artefact("sensitivity", example().identity, {"table": torch.zeros(9)})
    with pytest.raises(UserError, match="No space left on device") as error:
        changed.save(folder)
    assert str(folder) in str(error.value)
    monkeypatch.undo()
    if before:
        assert files(folder) == [META, DATA]
        assert "singles" in Artefact.load(folder).tensors
    else:
        assert not folder.exists()


def test_an_unwritable_place_is_a_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the calibration to"):
        example().save(tmp_path / "file" / "a")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(), x, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_canonical_survives_json_and_order(value):
    text = canonical(value)
    assert canonical(json.loads(text)) == text
    assert canonical(dict(reversed(value.items()))) == text
    assert differing(value, json.loads(text)) == []


def test_canonical_refuses_what_has_no_one_text():
    for odd in ({1: 2}, {"a": {3, 4}}, [torch.zeros(1)], {"p": Path("x")}):
        with pytest.raises(TypeError):
            canonical(odd)
    with pytest.raises(ValueError, match="JSON"):
        canonical(float("nan"))


def test_fingerprint_sees_values_and_shape():
    ids = torch.arange(6)
    prints = {token_fingerprint(x) for x in (ids[None], ids.reshape(2, 3), ids[None].flip(1), ids[None, :5])}
    assert len(prints) == 4
    assert token_fingerprint(ids[None]) == token_fingerprint(ids[None].clone())
