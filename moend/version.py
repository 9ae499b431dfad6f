"""The version of what the engine computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# Goes up by one whenever a golden record changes (tests/golden): it is a part of every cell's key, so that numbers of
# two versions never stand in one table. CHANGELOG.md says what each version changed.
ENGINE_VERSION = 3


def _evicts_codes(method: Mapping[str, Any]) -> bool:
    return method.get("schedule") == "every" and any(bits != 16 for bits in method["precision"].values())


# Which methods (by the fields of conf/method) have other numbers since a version; its line in CHANGELOG.md says why.
CHANGED: Mapping[int, Callable[[Mapping[str, Any]], bool]] = {2: _evicts_codes}


def numbers_stand(made: int, method: Mapping[str, Any]) -> bool:
    """Whether the numbers of a method's cell by engine version `made` are still those of this version."""
    later = range(made + 1, ENGINE_VERSION + 1)
    return not any(CHANGED.get(version, lambda method: True)(method) for version in later)
