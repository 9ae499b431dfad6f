"""Extracting a final answer from generated text; total on any string."""

from __future__ import annotations

import re

THINK_END = "</think>"


def after_thinking(text: str) -> str:
    """The text after the last closed thought; all of it where none was closed."""
    return text.rsplit(THINK_END, 1)[-1]


def first_line(text: str) -> str:
    """The first line after leading newlines (LongBench's rule for few-shot tasks: only newlines are stripped)."""
    return text.lstrip("\n").split("\n")[0]


def number_of_digits(text: str, digits: int) -> str | None:
    """The first run of exactly `digits` decimal digits that no other digit touches, or None."""
    match = re.search(rf"(?<![0-9])[0-9]{{{digits}}}(?![0-9])", text)
    return match[0] if match else None
