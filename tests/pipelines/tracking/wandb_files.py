"""Reads what wandb 0.31 wrote offline: `.wandb` is a LevelDB log of protobuf records, after a header of seven bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 32 * 1024
PIECE = struct.Struct("<IHB")  # checksum, length, kind: 1 whole, 2 first, 3 middle, 4 last
WHOLE, FIRST, LAST = 1, 2, 4


@dataclass
class Run:
    """One offline run as a reader of the file sees it."""

    folder: Path
    about: Any = None
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    artifacts: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None

    def table(self, name: str) -> tuple[list[str], list[list[Any]]]:
        """A table that was logged."""
        stored = json.loads((self.folder / "files" / self._last(name)["path"]).read_text())
        return stored["columns"], stored["data"]

    def image(self, name: str) -> bytes:
        """A picture that was logged."""
        return (self.folder / "files" / self._last(name)["path"]).read_bytes()

    def _last(self, name: str) -> dict[str, Any]:
        (step,) = (s for s in self.steps if name in s)
        value: dict[str, Any] = step[name]
        return value

    def files(self, artifact: str) -> dict[str, bytes]:
        """The files of an artifact, as an upload would read them."""
        contents = self.artifacts[artifact].manifest.contents
        return {entry.path: Path(entry.local_path).read_bytes() for entry in contents}


def pieces(data: bytes) -> Iterator[bytes]:
    """The records of the log, put together where they span blocks."""
    assert data[:4] == b":W&B"
    at, begun = 7, b""
    while at + PIECE.size <= len(data):
        room = BLOCK - at % BLOCK
        if room < PIECE.size:
            at += room
            continue
        _, length, kind = PIECE.unpack_from(data, at)
        piece = data[at + PIECE.size : at + PIECE.size + length]
        assert len(piece) == length, "torn"
        at += PIECE.size + length
        begun = piece if kind in (WHOLE, FIRST) else begun + piece
        if kind in (WHOLE, LAST):
            yield begun


def read(folder: Path) -> Run:
    """One run folder."""
    from wandb.proto import wandb_internal_pb2 as schema

    run = Run(folder)
    (path,) = folder.glob("*.wandb")
    for piece in pieces(path.read_bytes()):
        record = schema.Record.FromString(piece)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.about = record.run
            _update(run.config, record.run.config.update)
        elif kind == "config":
            _update(run.config, record.config.update)
        elif kind == "summary":
            _update(run.summary, record.summary.update)
        elif kind == "history":
            run.steps.append({})
            _update(run.steps[-1], record.history.item)
        elif kind == "artifact":
            run.artifacts[record.artifact.name] = record.artifact
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


def _update(into: dict[str, Any], items: Any) -> None:
    for item in items:
        *path, last = list(item.nested_key) or [item.key]
        node = into
        for name in path:
            node = node.setdefault(name, {})
        node[last] = json.loads(item.value_json)


def runs(store: Path) -> dict[str, Run]:
    """All runs in a store's tracker folder, by id."""
    found = [read(p) for p in sorted((store / "wandb" / "wandb").glob("offline-run-*"))]
    assert len({r.about.run_id for r in found}) == len(found), "two folders of one run"
    return {r.about.run_id: r for r in found}
