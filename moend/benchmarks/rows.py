"""One reader for rows that others wrote: data sets and prediction files, checked line by line against a schema.

A schema is a check: a function of a value and the name of its field that raises `Wrong`. `text`, `filled` and `number`
check one value, `listed`, `optional` and `fields` build checks of lists and objects. Every message is one line that
names the file, the line and the field, so that a person can open the file there.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from moend.errors import UserError

Check = Callable[[Any, str], None]
Row = dict[str, Any]


class Wrong(Exception):
    """A value that a check refuses, in words that go on after the place."""


def text(value: Any, field: str) -> None:
    """A text that can be written as UTF-8; it may be empty."""
    if not isinstance(value, str):
        raise wrong(field, value, "a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong(field, value, "a text without halves of surrogate pairs") from None


def filled(value: Any, field: str) -> None:
    """A text of more than white space."""
    text(value, field)
    if not value.strip():
        raise wrong(field, value, "a text that is not empty")


def named(value: Any, field: str) -> None:
    """A text that is not empty, or a whole number: ids and short answers are written as both."""
    if isinstance(value, str):
        filled(value, field)
    elif isinstance(value, bool) or not isinstance(value, int):
        raise wrong(field, value, "a text or a whole number")


def whole(value: Any, field: str) -> None:
    """A whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(field, value, "a whole number")


def number(value: Any, field: str) -> None:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise wrong(field, value, "a number")


def matching(pattern: re.Pattern[str], shown: str) -> Check:
    """A text in which a pattern is found; messages show how it reads."""

    def check(value: Any, field: str) -> None:
        text(value, field)
        if not pattern.search(value):
            raise wrong(field, value, f"a text that reads {shown}")

    return check


def one_of(choices: Iterable[str]) -> Check:
    """One of some texts; another is refused with the nearest."""
    known = tuple(choices)

    def check(value: Any, field: str) -> None:
        text(value, field)
        if value not in known:
            near = difflib.get_close_matches(value, known, n=1)
            hint = f" (did you mean '{near[0]}'?)" if near else ""
            raise wrong(field, value, f"one of {', '.join(known)}{hint}")

    return check


def listed(check: Check, least: int = 1) -> Check:
    """A list of at least so many values that pass a check."""

    def each(value: Any, field: str) -> None:
        if not isinstance(value, list) or len(value) < least:
            raise wrong(field, value, "a list" + (f" of at least {least}" if isinstance(value, list) else ""))
        for i, item in enumerate(value):
            check(item, f"{field}[{i}]")

    return each


def pair(first: Check, second: Check) -> Check:
    """A list of two values."""

    def both(value: Any, field: str) -> None:
        if not isinstance(value, list) or len(value) != 2:
            raise wrong(field, value, "a list of two")
        first(value[0], f"{field}[0]")
        second(value[1], f"{field}[1]")

    return both


def optional(check: Check) -> Check:
    """Null, absent (in `fields`), or what passes the check."""

    def maybe(value: Any, field: str) -> None:
        if value is not None:
            check(value, field)

    maybe.optional = True  # type: ignore[attr-defined]
    return maybe


def fields(**checks: Check) -> Check:
    """An object with these fields; it may have more. Absent is refused unless the check is `optional`."""

    def each(value: Any, field: str) -> None:
        if not isinstance(value, dict):
            raise wrong(field, value, "a JSON object")
        for key, check in checks.items():
            if key in value:
                check(value[key], f"{field}.{key}" if field else key)
            elif not hasattr(check, "optional"):
                place = f" in '{field}'" if field else ""
                raise Wrong(f" has no field '{key}'{place}: it has {', '.join(map(repr, value)) or 'none':.200}")

    return each


def wrong(field: str, value: Any, must: str) -> Wrong:
    """What a check raises: the field, its value and what it must be."""
    shown = f"{json.dumps(value, ensure_ascii=False, default=repr):.80}".encode(errors="replace").decode()
    return Wrong(f": '{field}' cannot be {shown}: it must be {must}" if field else f" is {shown}, not {must}")


def check(value: Any, schema: Check, where: str) -> None:
    """UserError, beginning with `where`, for a value that a schema refuses."""
    try:
        schema(value, "")
    except Wrong as e:
        raise UserError(f"{where}{e}") from None


def read(
    source: Path | Iterable[bytes], schema: Check, *, unique: tuple[str, ...] = (), place: str | None = None
) -> Iterator[tuple[str, Row]]:
    """(file:line, row) of JSON lines; blank lines are skipped.

    source: a file, or the lines of one (of an archive). place: what messages call it; None: its path.
    unique: fields that together must differ from row to row, where a row has them all.
    Lines end at a line feed, a carriage return before it is white space, and no other character breaks a line: JSON
    may hold U+2028 as it is. UserError for other text than UTF-8, for what is not JSON, for a row that the schema
    refuses and for one that is there twice.
    """
    if isinstance(source, Path):
        place = place or str(source)
        try:
            with source.open("rb") as file:
                yield from read(file, schema, unique=unique, place=place)
        except OSError as e:
            raise UserError(f"{place} cannot be read: {e.strerror}") from None
        return
    seen: dict[tuple[str, ...], int] = {}
    for line, raw in enumerate(source, 1):
        where = f"{place}:{line}"
        told = decode(raw, where, first=line == 1)
        if not told.strip():
            continue
        row = parse(told, where)
        check(row, schema, where)
        if unique and all(f in row for f in unique):
            key = tuple(str(row.get(f)) for f in unique)
            if (before := seen.setdefault(key, line)) != line:
                shown = ", ".join(f"'{f}' {v!r:.80}" for f, v in zip(unique, key, strict=True))
                raise UserError(f"{where} repeats {shown} of line {before}: each row must be there once")
        yield where, row


def document(path: Path, schema: Check) -> Any:
    """A file that is one JSON value; UserError as for `read`, the field with its place in the value."""
    try:
        found = parse(decode(path.read_bytes(), str(path)), str(path))
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from None
    check(found, schema, str(path))
    return found


def require_count(n: int, most: int, what: str) -> None:
    """UserError where a file holds more rows than its data set has."""
    if n > most:
        raise UserError(f"{what} holds {n} rows, more than the {most} of the data set: remove those of another file")


def decode(raw: bytes, where: str, *, first: bool = True) -> str:
    """A text as UTF-8, without the byte order mark that may begin a file (first)."""
    if first and (raw.startswith((b"\xff\xfe", b"\xfe\xff")) or raw[1:2] == b"\0" or raw[:1] == b"\0"):
        raise UserError(f"{where} is UTF-16 or UTF-32: save the file as UTF-8")
    try:
        return raw.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        place = f", line {line}" if line > 1 else ""
        raise UserError(
            f"{where}{_field_of(raw)} is not UTF-8 (byte 0x{raw[e.start]:02x}{place}): save the file as UTF-8"
            " (from Latin-1: iconv -f LATIN1 -t UTF-8)"
        ) from None


def _field_of(raw: bytes) -> str:
    """The first field of a row in another encoding that is not ASCII, to name it."""
    try:
        row = json.loads(raw.decode("latin-1"))
        return next(f": '{k}'" for k, v in row.items() if not json.dumps(v, ensure_ascii=False).isascii())
    except (ValueError, AttributeError, RecursionError, StopIteration):
        return ""


def parse(told: str, where: str) -> Any:
    """JSON, refused where a field is there twice or a number is none."""
    try:
        return json.loads(told, object_pairs_hook=_once, parse_constant=_no_number)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{where} is not JSON: {' '.join(str(e).split())}") from None


def _once(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [k for k, _ in pairs]
        raise ValueError(f"the field '{next(k for k in names if names.count(k) > 1)}' is there twice")
    return row


def _no_number(constant: str) -> Any:
    raise ValueError(f"{constant} is no number")
