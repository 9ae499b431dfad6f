"""A bundle carries finished cells to another store; one that is not what it says adds nothing."""

from __future__ import annotations

import hashlib
import json
import shutil
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines import bundle, run, status
from pipelines.store import provenance
from pipelines.store.cells import Store
from tests.pipelines import stub

Contents = dict[str, bytes]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, no_figures: Any) -> tuple[Store, Path]:
    """A store with a finished sweep of three cells, and its bundle."""
    folder = tmp_path_factory.mktemp("packed")
    store = Store(folder / "store")
    with pytest.MonkeyPatch.context() as patch, no_figures():
        stub.install(patch)
        patch.chdir(folder)
        args = ("method=full,1d,2d", "budget=10%", "-m")
        assert run.main([f"paths.store={store.root}", "tracking=none", *args]) == 0
        (calibration,) = (p for p in (store.root / "calibration").iterdir() if p.is_dir())
        _artefact(store, calibration.name)
        assert bundle.main(["pack", f"paths.store={store.root}", "file=all.zip"]) == 0
    return store, folder / "all.zip"


def _artefact(store: Store, key: str) -> None:
    """A real artefact in place of the stub's, under a key of its own that the cell is made to name."""
    import torch

    from moend.calibration.artefact import Artefact

    made = Artefact("sensitivity", {"model": "stub"}, {"table": torch.zeros(2)})
    made.save(store.calibration(made.key))
    shutil.rmtree(store.calibration(key))
    for path in store.root.rglob("*.json"):
        path.write_text(path.read_text().replace(key, made.key))
    for old in list((store.root / "cells").iterdir()):
        from pipelines.store.payload import key as key_of

        new = key_of(json.loads((old / "payload.json").read_text())["payload"])
        if new != old.name:
            old.rename(old.with_name(new))
            for path in store.root.rglob("*.json"):
                path.write_text(path.read_text().replace(old.name, new))


def add(file: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = bundle.main(["add", str(file), f"paths.store={store}"])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_cells_join_another_store(
    packed: tuple[Store, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, file = packed
    ours = Store(tmp_path / "ours")
    code, said = add(file, ours.root, capsys)
    assert code == 0 and said.count("added: ") == 3 + 1 + 1
    name = theirs.sweep_names()[-1]
    assert ours.sweep_names() == [name]
    for cell in ours.read_manifest(name)["cells"]:
        mine, other = ours.cell(cell["key"]), theirs.cell(cell["key"])
        assert mine.records() == other.records() and mine.payload() == other.payload()
        result = mine.result()
        assert result is not None
        source = result.pop("source")
        assert result == other.result()
        assert source["bundle"] == "all.zip" and source["commit"] == provenance.commit()
        assert source["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    names = {p.relative_to(theirs.root) for p in theirs.root.glob("calibration/*/*")}
    assert {p.relative_to(ours.root) for p in ours.root.glob("calibration/*/*")} == names
    assert status.main([f"paths.store={ours.root}"]) == 0
    code, said = add(file, ours.root, capsys)  # again: nothing is twice
    assert code == 0 and said.count("there already") == 3 and "added" not in said
    monkeypatch.chdir(tmp_path)  # and what was added can be handed on
    assert bundle.main(["pack", f"paths.store={ours.root}"]) == 0
    assert add(tmp_path / f"{name}.zip", tmp_path / "third", capsys)[0] == 0
    assert not [i.filename for i in zipfile.ZipFile(file).infolist() if i.filename.endswith((".pkl", ".pt", ".py"))]


def test_a_bundle_holds_finished_cells_only(
    packed: tuple[Store, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(shutil.copytree(packed[0].root, tmp_path / "store"))
    first, *others = (store.cell(c["key"]) for c in store.read_manifest("latest")["cells"])
    (first.folder / "result.json").unlink()
    monkeypatch.chdir(tmp_path)
    assert bundle.main(["pack", f"paths.store={store.root}", "file=some.zip"]) == 0
    assert "packed 2 of 3 cells" in capsys.readouterr().out
    assert add(tmp_path / "some.zip", tmp_path / "ours", capsys)[0] == 0
    assert len(list((tmp_path / "ours" / "cells").iterdir())) == 2
    code, said = add(packed[1], store.root, capsys)  # one that is begun here is left to whoever began it
    assert code == 0 and f"[{first.key}] is begun here" in said and first.result() is None
    for cell in others:
        (cell.folder / "result.json").unlink()
    assert bundle.main(["pack", f"paths.store={store.root}"]) == 2
    assert "nothing to pack" in capsys.readouterr().err


def rewritten(file: Path, to: Path, change: Callable[[Contents], None], index: bool = True) -> Path:
    """A bundle with other contents; index: which its list of files knows."""
    contents = {i.filename: zipfile.ZipFile(file).read(i) for i in zipfile.ZipFile(file).infolist()}
    change(contents)
    if index:
        listed = json.loads(contents["bundle.json"])
        listed["files"] = [
            {"path": n, "sha256": hashlib.sha256(d).hexdigest(), "bytes": len(d)}
            for n, d in contents.items()
            if n != "bundle.json"
        ]
        contents["bundle.json"] = json.dumps(listed).encode()
    with zipfile.ZipFile(to, "w") as made:
        for name, data in contents.items():
            made.writestr(name, data)
    return to


def first(contents: Contents, end: str) -> str:
    return next(n for n in contents if n.endswith(end))


def flip(end: str) -> Callable[[Contents], None]:
    def change(contents: Contents) -> None:
        data = bytearray(contents[first(contents, end)])
        data[len(data) // 2] ^= 1
        contents[first(contents, end)] = bytes(data)

    return change


def edit(end: str, **fields: Any) -> Callable[[Contents], None]:
    def change(contents: Contents) -> None:
        name = first(contents, end)
        contents[name] = json.dumps({**json.loads(contents[name]), **fields}).encode()

    return change


def fewer(contents: Contents) -> None:
    name = first(contents, ".jsonl")
    contents[name] = contents[name].split(b"\n", 1)[1]


@pytest.mark.parametrize(
    ("change", "index", "message"),
    [
        (flip(".jsonl"), False, "is damaged: its size or SHA-256"),
        (flip("data.safetensors"), False, "is damaged: its size or SHA-256"),
        (lambda c: c.update({first(c, ".jsonl"): b""}), False, "is damaged: its size or SHA-256"),
        (lambda c: c.pop(first(c, ".jsonl")), False, "is listed and not there"),
        (lambda c: c.update({"cells/0123456789abcdef/plan.json": b"{}"}), False, "there and not listed"),
        (edit("payload.json", payload={"a": 1}), True, "is not what its key says"),
        (edit("result.json", key="0" * 16), True, "is not what its key says"),
        (lambda c: c.pop(first(c, "result.json")), True, "result.json is missing"),
        (fewer, True, "has 5 of 6 records"),
        (lambda c: c.update({first(c, ".jsonl"): b"nonsense\n"}), True, "line 1, is not a record"),
        (flip("data.safetensors"), True, "calibration"),
        (edit("artefact.json", identity={"model": "other"}), True, "is not what its key says"),
        (edit("bundle.json", schema=2), False, "has schema 2; this version reads 1"),
        (lambda c: c.update({"bundle.json": b"[]"}), False, "is not a JSON object"),
        (lambda c: c.pop("bundle.json"), False, "it has no bundle.json"),
        (lambda c: c.update({"../../evil.json": b"{}"}), True, "'../../evil.json' has no place in a store"),
        (lambda c: c.update({"/etc/evil": b"{}"}), True, "has no place in a store"),
        (lambda c: c.update({"cells/../x/result.json": b"{}"}), True, "has no place in a store"),
        (lambda c: c.update({"sweeps/../manifest.json": b"{}"}), True, "has no place in a store"),
        (lambda c: c.update({"cells/0123456789abcdef/x.pkl": b""}), True, "has no place in a store"),
        (lambda c: c.update({"sweeps/a/code/x.py": b""}), True, "has no place in a store"),
    ],
)
def test_a_bundle_that_is_not_what_it_says_adds_nothing(
    packed: tuple[Store, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Contents], None],
    index: bool,
    message: str,
) -> None:
    file = rewritten(packed[1], tmp_path / "bad.zip", change, index)
    code, said = add(file, tmp_path / "ours", capsys)
    assert code == 2 and message in said and said.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["bad.zip"]


def test_links_and_what_is_no_archive_are_refused(
    packed: tuple[Store, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "link.zip"
    shutil.copy(packed[1], file)
    link = zipfile.ZipInfo("cells/0123456789abcdef/plan.json")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(file, "a") as made:
        made.writestr(link, "/etc/passwd")
    assert "has no place in a store" in add(file, tmp_path / "ours", capsys)[1]
    for data in (b"nothing", packed[1].read_bytes()[:2000]):
        file.write_bytes(data)
        assert "is not a bundle" in add(file, tmp_path / "ours", capsys)[1]
    assert add(tmp_path / "gone.zip", tmp_path / "ours", capsys)[0] == 2
    assert bundle.main(["unpack"]) == bundle.main(["add"]) == bundle.main(["add", "x", "sweep=a"]) == 2


def test_another_payload_under_the_same_key_is_refused_by_field(
    packed: tuple[Store, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = Store(tmp_path / "ours")
    key = packed[0].read_manifest("latest")["cells"][0]["key"]
    described = packed[0].cell(key).payload()
    assert described is not None
    ours.cell(key).create({**described["payload"], "seed": 9}, described["info"])
    code, said = add(packed[1], ours.root, capsys)
    assert code == 2 and "seed: has 9, needs 0" in said
    assert [p.name for p in ours.root.iterdir()] == ["cells"] and len(list((ours.root / "cells").iterdir())) == 1
