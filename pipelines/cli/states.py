"""Where a cell can stand, and the exit code that tells it: one vocabulary for all programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

State = Literal["done", "run", "running", "pending", "failed", "blocked", "stopped", "infeasible"]
# done: its result is there. run: this program computes it. running, pending: a job does or will. stopped: its jobs are
# gone. failed: our fault, with a traceback in its log. blocked: something it needs is missing. infeasible: no plan
# meets its budget.
UNFINISHED = frozenset({"run", "running", "pending", "stopped"})


def exit_code(states: Iterable[str]) -> int:
    """1 a cell failed, 2 one is blocked, 3 something is not finished, 0 all are done (infeasible ones included)."""
    found = set(states)
    return 1 if "failed" in found else 2 if "blocked" in found else 3 if found & UNFINISHED else 0
