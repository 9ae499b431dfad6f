"""The version of what the engine computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Goes up by one whenever a golden record changes (tests/golden): it is a part of every cell's key, so that numbers of
# two versions never stand in one table. CHANGELOG.md says what each version changed.
ENGINE_VERSION = 3


def _quantises(method: Mapping[str, Any]) -> bool:
    return any(bits != 16 for bits in method["precision"].values())


def _evicts(method: Mapping[str, Any]) -> bool:
    """Whether it evicts while decoding; `full` has no schedule in a key."""
    return method.get("schedule") not in (None, "prompt")


def _moment_or_steps(method: Mapping[str, Any]) -> bool:
    """Whether `budget_at` or what a budget buys below 16 bit changed a method's numbers.

    It did for methods that evict while decoding (their budget binds after the prompt now), for joint bits (entries
    between the lattice's shares), and for those that drop entries of the prompt and quantise the rest: PyramidKV and
    RippleKV spend more of the budget, and no layer stores positions whose cap reaches the prompt. A method does not
    say how long the prompt was, so all of the last kind count. `full`, 16-bit methods that compress the prompt only,
    and KIVI (every entry at fixed bits) are as they were.
    """
    joint = not {"joint", "routed"}.isdisjoint(method["precision"].values())  # routed: its name before
    return _evicts(method) or joint or (_quantises(method) and method.get("scorer") is not None)


# Which methods (by the fields of conf/method) have other numbers since a version; its line in CHANGELOG.md says why.
CHANGED: Mapping[int, Callable[[Mapping[str, Any]], bool]] = {
    2: lambda method: _evicts(method) and _quantises(method),
    3: _moment_or_steps,
}


def numbers_stand(made: int, method: Mapping[str, Any]) -> bool:
    """Whether the numbers of a method's cell by engine version `made` are still those of this version."""
    later = range(made + 1, ENGINE_VERSION + 1)
    return not any(CHANGED.get(version, lambda method: True)(method) for version in later)
