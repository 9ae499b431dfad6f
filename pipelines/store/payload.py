"""What a cell is, as text that is the same for equal contents; its hash; and what sets two apart, field by field."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

from moend.errors import UserError

KEY_LENGTH = 16


def canonical(value: Any) -> str:
    """JSON that is the same text for equal values, or a TypeError: sorted keys, exact floats, no NaN, nothing guessed.

    Whole floats are written as integers, so that `1` and `1.0` in a YAML file are one value.
    """
    return json.dumps(_plain(value, "$"), sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise TypeError(f"{where}: {value} has no canonical form")
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if isinstance(value, list | tuple):
        return [_plain(x, f"{where}[{i}]") for i, x in enumerate(value)]
    if isinstance(value, dict):
        if not all(isinstance(k, str) for k in value):
            raise TypeError(f"{where}: keys must be text")
        return {k: _plain(v, f"{where}.{k}") for k, v in value.items()}
    raise TypeError(f"{where}: {type(value).__name__} has no canonical form")


def key(payload: Any) -> str:
    """The first 16 hex digits of the SHA-256 of the canonical JSON."""
    if isinstance(payload, dict) and all(isinstance(k, str) for k in payload):
        parts = (f"{json.dumps(k, ensure_ascii=False)}:{text(payload[k])}" for k in sorted(payload))
        whole = "{" + ",".join(parts) + "}"
    else:
        whole = canonical(payload)
    return hashlib.sha256(whole.encode()).hexdigest()[:KEY_LENGTH]


_TEXTS: dict[str, str] = {}  # of mappings that many cells of a sweep have in common
_REMEMBERED = 10_000


def text(value: Any) -> str:
    """`canonical`, computed once for a mapping however many cells have an equal one."""
    if not isinstance(value, dict):
        return canonical(value)
    name = repr(value)
    if name not in _TEXTS:
        if len(_TEXTS) >= _REMEMBERED:
            _TEXTS.clear()
        _TEXTS[name] = canonical(value)
    return _TEXTS[name]


def differences(have: Any, need: Any, where: str = "") -> list[str]:
    """One line per field in which two payloads differ: `field: has X, needs Y`."""
    if isinstance(have, dict) and isinstance(need, dict):
        lines = []
        for name in sorted({*have, *need}):
            path = f"{where}.{name}" if where else name
            if name not in have:
                lines.append(f"{path}: has nothing, needs {need[name]!r}")
            elif name not in need:
                lines.append(f"{path}: has {have[name]!r}, needs nothing")
            else:
                lines += differences(have[name], need[name], path)
        return lines
    if canonical(have) != canonical(need):
        return [f"{where}: has {have!r}, needs {need!r}"]
    return []


def refuse_difference(have: Any, need: Any, source: str) -> None:
    """UserError listing every differing field, where two payloads are not the same."""
    if lines := differences(have, need):
        raise UserError(f"{source} belongs to something else: {'; '.join(lines)}")
