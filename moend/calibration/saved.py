"""A long measurement saves what it has: killed at its time limit, it goes on where it was, with the same numbers.

A measurement is a row of steps (an example, a layer), each with tensors of its own that depend on no other step. In the
calibration's folder, `partial/<i>.safetensors` holds the steps of some seconds, `partial/state.json` the checksum of
each such file and what they were measured of and with. Both are written to temporary names and renamed, the JSON last.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from moend.calibration.artefact import write_whole
from moend.errors import UserError

EVERY_S = 10.0  # a kill costs so much work at most, and a short measurement writes nothing
FOLDER, STATE = "partial", "state.json"

Step = dict[str, Tensor]


class Saved:
    """The steps that a measurement has so far. Without a folder nothing is saved."""

    def __init__(
        self,
        folder: Path | None = None,
        about: Mapping[str, Any] | None = None,
        wrote: Callable[[Path], object] = lambda _: None,
    ):
        """folder: the calibration's. about: JSON-able; steps of a measurement that differs in it are not taken over.

        wrote: told of the folder `partial` after each write, to give it the rights of others.
        """
        self._folder = None if folder is None else folder / FOLDER
        self._about, self._wrote = dict(about or {}), wrote
        self._files: dict[str, str] = {}  # name -> sha256
        self._fresh: dict[str, Tensor] = {}  # "step/name", not saved yet
        self._saved_at = time.monotonic()
        self._have: dict[str, Step] = {}
        if self._folder is not None:
            self._read(self._folder)

    @property
    def found(self) -> int:
        """Steps that an earlier process has left."""
        return len(self._have)

    def steps(
        self,
        names: Sequence[str],
        measure: Callable[[list[int]], Iterator[Step]],
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Step]:
        """The tensors of every step, in order. measure(indices): yields those that are missing, each saved as it comes.

        progress(done, all): told after each step.
        """
        have = {i: self._have[name] for i, name in enumerate(names) if name in self._have}
        todo = [i for i in range(len(names)) if i not in have]
        try:
            for i, step in zip(todo, measure(todo) if todo else (), strict=True):
                have[i] = {name: t.detach().cpu().contiguous() for name, t in step.items()}
                self._fresh |= {f"{names[i]}/{name}": t for name, t in have[i].items()}
                if time.monotonic() - self._saved_at >= EVERY_S:
                    self._save()
                if progress is not None:
                    progress(len(have), len(names))
        except BaseException:  # a signal at the time limit: what there is stays
            if self._files or time.monotonic() - self._saved_at >= 1:
                self._save()
            raise
        return [have[i] for i in range(len(names))]

    def remove(self) -> None:
        """Once the artefact is written."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _save(self) -> None:
        folder, self._saved_at = self._folder, time.monotonic()
        if folder is None or not self._fresh:
            return
        data = safetensors.torch.save(self._fresh)
        name = f"{len(self._files)}.safetensors"
        files = {**self._files, name: hashlib.sha256(data).hexdigest()}
        state = json.dumps({"schema": 1, "about": self._about, "files": files}, indent=1, sort_keys=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, data)
            write_whole(folder / STATE, state.encode())
            self._wrote(folder)
        except OSError as e:
            raise UserError(f"cannot write the calibration to {folder}: {e.strerror or e}") from e
        self._files, self._fresh = files, {}

    def _read(self, folder: Path) -> None:
        """Take over what was measured of the same and with the same; another's, or a damaged file, is measured anew."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            state = json.loads((folder / STATE).read_text(encoding="utf-8"))
            if state["schema"] != 1 or state["about"] != self._about:
                return
            for name, digest in state["files"].items():
                data = (folder / name).read_bytes()
                if hashlib.sha256(data).hexdigest() != digest:
                    return
                for key, tensor in safetensors.torch.load(data).items():
                    step, _, field = key.rpartition("/")
                    self._have.setdefault(step, {})[field] = tensor
                self._files[name] = digest
