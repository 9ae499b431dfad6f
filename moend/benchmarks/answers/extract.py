"""Final answers: what a generated text says in the end, and whether that is the gold answer. Total on any string.

What counts as the answer (`extract`), of the text after the last `</think>`:
1. the last complete, non-empty box: `\\boxed{...}`, `\\fbox{...}`, or `\\boxed 5` up to a `$` or the line's end. A box
   that was cut off is none; the complete one before it counts.
2. only where the model ended by itself: what follows the last "answer is", "answer:" or "answer =" in its sentence.
3. nothing else. The last number of a text is never an answer.

What counts as equal (`equal`), by our rules first and math-verify (in `symbolic`) for what is neither a number, a list,
an interval, a set, a matrix nor words:
- numbers exactly: 0.5 = 1/2 = \\frac12, 1\\frac{4}{5} = 9/5, 1,234 = 1234, 6.72 \\times 10^{-5};
  0.\\overline{3} is 1/3, but 0.333 is not;
- `$`, `\\$`, degree signs, spacing, `\\left`, `\\dfrac` and trailing full stops mean nothing;
- 50 % is 50 and 1/2; a unit may be left out, but cm is not m and a.m. is not p.m.; so may the base of a number;
- `x = 5` is 5 and `x \\in S` is S; `y = 2x + 3` is 2x + 3; x = 5 is not y = 5;
- tuples and intervals keep order and brackets; sets and bare lists are unordered, and one may stand for the other;
  `\\pm` and "or" make lists;
- pmatrix and bmatrix are one, vmatrix another; words are compared without case and article; (C) is C.
AIME answers (`integer`): a whole number 0 to 999, leading zeros allowed, 25.0 too, no fraction and no percent.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from moend.benchmarks.answers import symbolic
from moend.benchmarks.answers.formula import (
    MANY,
    based,
    bracketed,
    choice,
    matrix,
    number,
    plain,
    split,
    tidy,
    unit_of,
    words_of,
)

THINK_START, THINK_END = "<think>", "</think>"
LONGEST = 1000  # characters of an answer; a longer box is prose


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


def grade(text: str, gold: str, kind: Literal["integer", "math"], *, finished: bool = True) -> tuple[bool, str | None]:
    """Whether a generated text ends in the gold answer, and the answer that it ends in (None: it has none).

    kind: "integer" for AIME, "math" for MATH-500. finished: the model ended by itself, not at the output limit.
    """
    answer = extract(text, finished=finished)
    if answer is None:
        return False, None
    if kind == "integer":
        value = integer(answer)
        return value is not None and value == integer(gold), answer
    return equal(answer, gold), answer


# Extraction

_PART = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*(\{)?|\\[\s\S]|[{}]")
_LINE_END = re.compile(r"[$\n]")
_SAID = re.compile(r"\banswer\b[ \t*_]*(?:is|are|:|=)[ \t:*_]*", re.IGNORECASE)
_SENTENCE = re.compile(r"\.(?=\s|\Z)|[;\n]|,?\s(?:because|since|so|where|which|as|for)\b", re.IGNORECASE)
_INLINE = re.compile(r"\\\((.+?)\\\)|\\\[(.+?)\\\]|\$\$((?:\\.|[^$\\])+)\$\$|\$((?:\\.|[^$\\])+)\$", re.DOTALL)


def extract(text: str, *, finished: bool = True) -> str | None:
    """The final answer of a text as it is written there, or None."""
    text = after_thinking(text)
    if (box := _last_box(text)) is not None:
        return box
    if not finished:
        return None
    said = deque(_SAID.finditer(text), maxlen=1)
    if not said:
        return None
    rest = text[said[0].end() :][:LONGEST].split("\n\n")[0]
    if math := _INLINE.match(rest):
        return next(g for g in math.groups() if g is not None).strip() or None
    return _SENTENCE.split(rest.lstrip(), maxsplit=1)[0].strip(" \t\n*_`.,") or None


def _last_box(text: str) -> str | None:
    """The content of the complete, non-empty box that starts last; one pass over the text."""
    best: tuple[int, str] | None = None
    braces: list[int | None] = []  # open braces: where the content of a box starts, or None
    for part in _PART.finditer(text):
        token = part[0]
        if token == "{":
            braces.append(None)
        elif part[1]:
            braces.append(part.end())
        elif token == "}":
            start = braces.pop() if braces else None
            if start is not None and (best is None or start > best[0]) and part.start() - start <= LONGEST:
                best = _fuller(best, start, text[start : part.start()])
        elif token.startswith(("\\boxed", "\\fbox")):
            end = _LINE_END.search(text, part.end(), part.end() + LONGEST)
            if end is not None:
                best = _fuller(best, part.end(), text[part.end() : end.start()])
    return best[1] if best else None


def _fuller(best: tuple[int, str] | None, start: int, content: str) -> tuple[int, str] | None:
    return (start, content.strip()) if content.strip(" \t\n$.") else best


# Equality


def integer(answer: str) -> int | None:
    """The whole number from 0 to 999 that an answer is, or None."""
    text = unit_of(_without_side(tidy(answer[:LONGEST]), _SIDE))[0]
    match = re.fullmatch(r"\+?0*([0-9]{1,3})(?:\.0*)?", text)
    return int(match[1]) if match else None


@lru_cache(maxsize=1 << 16)
def equal(answer: str, gold: str) -> bool:
    """Whether an answer is the gold answer, by the rules above."""
    if len(answer) > LONGEST or len(gold) > LONGEST:
        return answer.strip() == gold.strip()
    if (words := words_of(gold)) is not None:
        return words == plain(answer)
    a, g = tidy(answer), tidy(gold)
    return bool(a and g) and _same(a, g)


def _same(a: str, g: str) -> bool:
    """Whether two tidy formulas are equal."""
    if a == g:
        return True
    if "\\approx" in a:
        left, _, right = a.partition("\\approx")
        a = right if re.fullmatch(_SYMBOL, left) else left
    a, g = re.sub(r"^[a-zA-Z]\\in(?![a-z])", "", a), re.sub(r"^[a-zA-Z]\\in(?![a-z])", "", g)
    (a, unit), (g, other) = unit_of(a), unit_of(g)
    if unit and other and unit != other:
        return False
    if a == g:
        return True
    if ("=" in a or "=" in g) and len(split(a)) == len(split(g)) == 1:
        return _same_equation(a, g)
    x, y = number(a), number(g)
    if x is not None and y is not None:
        return _same_number(x, y)
    if (letter := choice(a)) and (right_one := choice(g)):
        return letter == right_one
    if digits := based(g):
        return (based(a) or (a, digits[1])) == digits
    p, q = split(a), split(g)
    x_in, y_in = bracketed(a), bracketed(g)
    if len(p) > 1 or len(q) > 1:  # a set's braces may be left out
        return _same_elements(_of_set(x_in) or p, _of_set(y_in) or q)
    if x_in and y_in:
        return _same_brackets(x_in, y_in)
    if x_in and x_in[0] == "()" and len(x_in[1]) == 1:
        return _same(x_in[1][0], g)
    if y_in and y_in[0] == "()" and len(y_in[1]) == 1:
        return _same(a, y_in[1][0])
    m, n = matrix(a), matrix(g)
    if m and n:
        return m[0] == n[0] and _same_rows(m[1], n[1])
    u, v = split(a, "\\cup"), split(g, "\\cup")
    if len(u) == len(v) > 1 and _same_elements(u, v):
        return True
    return symbolic.equal(g, a)


# a name, perhaps with an index, of an argument: x, x_1, f(x), \theta
_SYMBOL = r"\\?[a-zA-Z]+'?(?:_\{?\w+\}?)?(?:\([a-zA-Z](?:, ?[a-zA-Z])*\))?"
# what may stand left of an answer: a name, sums and products of names, or arithmetic; not x^2 = 5 nor \sqrt{x} = 5
_SIDE = rf"{_SYMBOL}|(?:(?!\\(?:sqrt|frac|log|ln|sin|cos|tan|int|sum))[^0-9=^/<>])*|[^a-zA-Z=]*"


def _same_equation(a: str, g: str) -> bool:
    if "=" not in g:
        return (bare := _without_side(a, _SIDE)) != a and _same(bare, g)
    if "=" not in a:
        return (bare := _without_side(g, _SYMBOL)) != g and _same(a, bare)
    left, right = a.partition("="), g.partition("=")
    if re.fullmatch(_SYMBOL, left[0]) and re.fullmatch(_SYMBOL, right[0]) and "=" not in left[2] + right[2]:
        return left[0] == right[0] and _same(left[2], right[2])
    return symbolic.equal(g, a)


def _without_side(text: str, side: str) -> str:
    """The right side of the last equals sign, where what stands left of each is a `side`."""
    *lefts, right = text.split("=")
    return right if lefts and re.fullmatch(side, lefts[0]) else text


def _same_elements(a: Sequence[str], g: Sequence[str]) -> bool:
    """The same elements in any order."""
    if len(a) != len(g) or len(a) > MANY:
        return False
    left = list(g)
    for x in a:
        match = next((i for i, y in enumerate(left) if _same(x, y)), None)
        if match is None:
            return False
        del left[match]
    return True


def _same_brackets(a: tuple[str, list[str]], g: tuple[str, list[str]]) -> bool:
    if a[0] != g[0]:
        return False
    if a[0] == "{}":
        return _same_elements(a[1], g[1])
    return len(a[1]) == len(g[1]) <= MANY and all(_same(x, y) for x, y in zip(a[1], g[1], strict=True))


def _of_set(brackets: tuple[str, list[str]] | None) -> list[str] | None:
    return brackets[1] if brackets and brackets[0] == "{}" else None


def _same_rows(a: list[list[str]], g: list[list[str]]) -> bool:
    shapes = [len(row) for row in a] == [len(row) for row in g] and sum(map(len, g)) <= MANY
    return shapes and all(_same(x, y) for r, s in zip(a, g, strict=True) for x, y in zip(r, s, strict=True))


def _same_number(x: tuple[Fraction, bool], y: tuple[Fraction, bool]) -> bool:
    if x[0] == y[0]:
        return True
    if x[1] == y[1]:
        return False
    return x[0] / 100 == y[0] if x[1] else x[0] == y[0] / 100  # one is a percentage: as a share
