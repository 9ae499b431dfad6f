"""Long answers on disk: the state of a generation, so that a process killed in the middle of one goes on from there.

A state is one safetensors file with JSON in its header, written to a temporary name and renamed: it is whole or not
there. It says what it is the state of; where that is not what is asked for, it is removed with a word.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moend.version import ENGINE_VERSION

FORM = 1  # of the files
State = tuple[dict[str, Any], dict[str, Tensor]]


class Saved:
    """The states of the answers to one context, as files of a folder that begin with `name`.

    identity: what they belong to; a file of another identity is refused. every_s: seconds between two of them.
    tell: is told of a state that is refused, in one line. made: is called with every new file (rights, groups).
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        identity: Mapping[str, Any],
        every_s: float,
        *,
        tell: Callable[[str], None] = lambda line: None,
        made: Callable[[Path], None] = lambda path: None,
    ):
        self.folder, self.name, self.every_s, self.tell, self.made = folder, name, every_s, tell, made
        self.identity = {"form": FORM, "engine": ENGINE_VERSION, **identity}
        self.last = time.monotonic()

    def slot(self, part: str, identity: Mapping[str, Any]) -> Slot:
        """The place of one batch's state. identity: what sets it apart from others of this context."""
        return Slot(self, self.folder / f"{self.name}-{part}.safetensors", {**self.identity, **identity})


class Slot:
    """The file of one batch that answers one question."""

    def __init__(self, saved: Saved, path: Path, identity: Mapping[str, Any]):
        self.saved, self.path, self.used = saved, path, False
        text = json.dumps(identity, sort_keys=True, ensure_ascii=True, allow_nan=False)
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    @property
    def due(self) -> bool:
        """Whether the last state is as old as states may get."""
        return time.monotonic() - self.saved.last >= self.saved.every_s

    def save(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Put a state in the place of the one before. OSError where the disk is full or cannot be written."""
        whole: dict[str, Tensor] = {}
        memory: set[int] = set()
        for name, x in tensors.items():
            mine = x.detach().cpu().contiguous()
            if mine.numel() and mine.untyped_storage().data_ptr() in memory:  # two names of one tensor
                mine = mine.clone()
            memory.add(mine.untyped_storage().data_ptr())
            whole[name] = mine
        header = {"of": self.digest, "step": str(facts.get("step", 0)), "facts": json.dumps(facts, allow_nan=False)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.saved.made(self.path.parent)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        try:
            try:
                save_file(whole, temporary, header)
            except SafetensorError as e:  # what it makes of a full disk
                raise OSError(28, f"the state of an answer cannot be written: {e}", str(self.path)) from None
            self.saved.made(temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(self.path)
        finally:
            temporary.unlink(missing_ok=True)
        self.saved.last, self.used = time.monotonic(), True

    def load(self) -> State | None:
        """The state that is there, if it is of what is asked for; another or a damaged one is removed, with a word."""
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, framework="pt") as file:
                header = file.metadata() or {}
                if header.get("of") == self.digest:
                    found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
                    self.used = True
                    return json.loads(header["facts"]), found
            why = "is of another engine, other cells or another question"
        except (SafetensorError, ValueError, OSError) as e:
            why = f"cannot be read ({' '.join(str(e).split())})"
        self.path.unlink(missing_ok=True)
        self.saved.tell(f"the state of an answer {why}, and is removed: the answer begins anew ({self.path})")
        return None
