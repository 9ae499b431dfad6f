"""A library without a model, for tests of planning, storing and resuming: answers follow from the key and the id."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moend.budget import Budget
from moend.errors import Infeasible
from moend.version import ENGINE_VERSION
from pipelines.planning import identity
from pipelines.planning.facts import Facts
from pipelines.planning.needs import CalibrationNeed
from pipelines.planning.schema import RunConfig


class Library:
    """Counts prefills. STUB_KILL_AFTER=n in the environment kills the process with -9 in the middle of record n+1."""

    n = 6

    def __init__(self) -> None:
        self.prefills = 0
        self.calibrated: list[str] = []
        self.fail_method: str | None = None
        self.delay = float(os.environ.get("STUB_DELAY", "0"))

    def resolve(self, config: RunConfig) -> RunConfig:
        return config

    def facts(self, config: RunConfig, choices: dict[str, str]) -> Facts:
        method = config.method["name"]
        nll = choices["benchmark"] == "continuation"
        calibrated = method.startswith("2d") and method != "2d_uniform"
        needs = {"model": choices["model"], "text": config.model.get("calibration_text")}
        small = config.budget.endswith("t") and int(config.budget[:-1]) < 4
        return Facts(
            model=choices["model"],
            method=method,
            benchmark=choices["benchmark"],
            identity={
                "model": {"id": choices["model"]},
                "benchmark": {**config.benchmark, "scorer_version": 1},
                "method": 1,
                "engine": ENGINE_VERSION,
            },
            calibrations=(CalibrationNeed("sensitivity", identity.key(needs), needs),) if calibrated else (),
            expected=tuple(("needle", f"s{i}") for i in range(self.n)),
            metrics={"needle": "nll" if nll else "exact"},
            unit="nats" if nll else "share",
            higher_is_better=not nll,
            is_full=method == "full",
            is_nll=nll,
            full_bytes=10_000,
            cell_bytes=1_000,
            infeasible=f"{method} cannot meet {config.budget}: the smallest is 4t"
            if small and method != "full"
            else None,
        )

    def calibrate(self, config: RunConfig, facts: Facts, need: CalibrationNeed, folder: Path) -> None:
        from moend.calibration import Artefact

        if (folder / "artefact.json").exists():
            Artefact.load(folder, need.identity, need.kind)
            return
        Artefact(need.kind, need.identity, {}, {}).save(folder)
        self.calibrated.append(need.key)

    def session(self, config: RunConfig) -> Session:
        return Session(self)


class Session:
    def __init__(self, library: Library):
        self.library = library
        self.cells: dict[str, tuple[RunConfig, Facts]] = {}

    def bind(self, key: str, config: RunConfig, facts: Facts, artefacts: dict[str, Path]) -> dict[str, Any] | None:
        if config.budget.endswith("B"):
            raise Infeasible("bytes are too small here", "64MiB")
        self.cells[key] = (config, facts)
        return None if facts.is_full else {"schema": 1, "layers": []}

    def run(self, jobs: list[tuple[str, int]], examples: Sequence[tuple[str, str]], tell: Any) -> list[dict[str, Any]]:
        ((task, id),) = examples
        self.library.prefills += 1
        time.sleep(self.library.delay)
        if any(self.cells[k][1].method == self.library.fail_method for k, _ in jobs):
            raise RuntimeError(f"this method breaks at {id}")
        if (limit := os.environ.get("STUB_KILL_AFTER")) and self.library.prefills > int(limit):
            os.kill(os.getpid(), signal.SIGKILL)
        return [record(self.cells[k][1], k, self.cells[k][0].budget, task, id, draw, len(jobs)) for k, draw in jobs]


def record(facts: Facts, key: str, budget: str, task: str, id: str, draw: int = 0, rows: int = 1) -> dict[str, Any]:
    """A record with every field of a real one."""
    chance = int(hashlib.sha256(f"{facts.method}{id}{draw}".encode()).hexdigest()[:8], 16) / 2**32
    b = Budget.parse(budget)
    keep = 1.0 if facts.is_full else min(b.value if b.kind == "ratio" else b.value / 1000, 1.0)
    return {
        "task": task, "id": id, "draw": draw, "score": 2 + chance if facts.is_nll else float(chance < keep),
        "text": "an answer", "answer": "an answer", "prompt_tokens": 1000, "new_tokens": 0 if facts.is_nll else 8,
        "truncated": 0, "finish_reason": "eos", "eq1_bytes": int(9_000_000 * keep), "resident_bytes": int(1e7 * keep),
        "resident_bytes_end": int(1e7 * keep), "resident_bytes_peak": int(1e7 * keep), "full_bytes": 10_000_000,
        "answer_nll": 1 - chance, "token_accuracy": chance, "compressed": keep < 1,
        "requested": [keep] * 3, "entries": [1000 * keep] * 3, "effective_keep": [keep] * 3,
        "k_bits": [8] * 3, "v_bits": [4] * 3, "peak_bytes": 123,
        "timing": {"fused_rows": rows, "group_prefill_seconds": 0.5, "select_seconds": 0.1, "pack_seconds": 0.0,
                   "decode_seconds_share": 0.1},
    }  # fmt: skip


def figure(folder: Path, name: str | None = None) -> dict[str, Any]:
    """Stands in for what figures read of a sensitivity artefact."""
    singles = np.geomspace(0.01, 1, 6).reshape(3, 2)
    return {"singles": singles, "operations": ["k8", "k4"], "pair": None, "how": "a stub"}


def install(monkeypatch: Any, **attributes: Any) -> Library:
    """Make the launcher use one stub library, and return it."""
    from moend import calibration
    from pipelines.execution import session as evaluate

    library = Library()
    for name, value in attributes.items():
        setattr(library, name, value)
    monkeypatch.setattr(evaluate, "Library", lambda: library)
    monkeypatch.setattr(calibration, "figure", figure)
    return library
