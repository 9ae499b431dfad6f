"""Errors a person can act on: each message is one line that names the value, what is allowed and the nearest choice."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """The user's mistake: programs print the message alone and exit with 2."""


class Infeasible(UserError):
    """A method cannot meet a budget. `smallest` is the smallest budget (canonical text) that it can meet."""

    def __init__(self, message: str, smallest: str):
        super().__init__(message)
        self.smallest = smallest


class Blocked(UserError):
    """Something a cell needs is not on this machine (weights, data, a calibration): the message says how to get it."""


def unknown(kind: str, name: str, choices: Iterable[str]) -> UserError:
    """A UserError for a name that is not among the choices, with the nearest of them."""
    names = sorted(choices)
    lower = {n.lower(): n for n in names}
    near = [lower[m] for m in difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)]
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return UserError(f"unknown {kind} '{name}'.{hint} Choices: {', '.join(names)}")
