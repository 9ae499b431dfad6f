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

THINK_START, THINK_END = "<think>", "</think>"
LONGEST = 1000  # characters of an answer; a longer box is prose
LARGEST = 400  # exponent of ten in scientific notation
MANY = 64  # elements of a list


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
    text = _unit(_without_side(tidy(answer[:LONGEST]), _SIDE))[0]
    match = re.fullmatch(r"\+?0*([0-9]{1,3})(?:\.0*)?", text)
    return int(match[1]) if match else None


@lru_cache(maxsize=1 << 16)
def equal(answer: str, gold: str) -> bool:
    """Whether an answer is the gold answer, by the rules above."""
    if len(answer) > LONGEST or len(gold) > LONGEST:
        return answer.strip() == gold.strip()
    if (words := _words(gold)) is not None:
        return words == _plain(answer)
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
    (a, unit), (g, other) = _unit(a), _unit(g)
    if unit and other and unit != other:
        return False
    if a == g:
        return True
    if ("=" in a or "=" in g) and len(_split(a)) == len(_split(g)) == 1:
        return _same_equation(a, g)
    x, y = _number(a), _number(g)
    if x is not None and y is not None:
        return _same_number(x, y)
    if (letter := _choice(a)) and (right_one := _choice(g)):
        return letter == right_one
    if digits := _based(g):
        return (_based(a) or (a, digits[1])) == digits
    p, q = _split(a), _split(g)
    x_in, y_in = _bracketed(a), _bracketed(g)
    if len(p) > 1 or len(q) > 1:  # a set's braces may be left out
        return _same_elements(_of_set(x_in) or p, _of_set(y_in) or q)
    if x_in and y_in:
        return _same_brackets(x_in, y_in)
    if x_in and x_in[0] == "()" and len(x_in[1]) == 1:
        return _same(x_in[1][0], g)
    if y_in and y_in[0] == "()" and len(y_in[1]) == 1:
        return _same(a, y_in[1][0])
    m, n = _matrix(a), _matrix(g)
    if m and n:
        return m[0] == n[0] and _same_rows(m[1], n[1])
    u, v = _split(a, "\\cup"), _split(g, "\\cup")
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


# Reading formulas

_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "π": "\\pi ", "∞": "\\infty ", "≤": "\\leq ",
        "≥": "\\geq ", "∪": "\\cup ", "∈": "\\in ", "°": "", "√": "\\sqrt ",
        "±": "\\pm ", "≈": "\\approx ", "\u00a0": " ", "％": "%",
    }
)  # fmt: skip
_TEXT = r"\\(?:text|mbox|textbf|textit|textrm|mathrm|mathbf|mathit|operatorname|hbox)\s*\{([^{}]*)\}"
_SPACE = re.compile(
    r"(?<!\\)\\[!,;: ]|~|\\q?quad(?![a-zA-Z])|\\(?:displaystyle|textstyle|left|right|[bB]igg?[lr]?)(?![a-zA-Z])"
)


@lru_cache(maxsize=1 << 12)
def tidy(text: str) -> str:
    """A formula without what means nothing, written one way; white space is left only after commas and in words."""
    s = text.translate(_UNICODE).strip()
    s = re.sub(r",\s*\\!\s*|(?<=\d)\{,\}(?=\d{3})|(?<=\d)\\[,;:! ]\s*(?=\d{3}(?!\d))", "", s)  # typeset thousands
    s = s.replace("{,}", ",").replace("\\$", "").replace("$", "").replace("\\%", "%")
    s = re.sub(r"(?<=\\\\)\[[^\]\n]*\]|(?<!\\)\\[()\[\]]|\*\*|`", "", s)
    s = _SPACE.sub(" ", s)
    s = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", s)
    s = re.sub(r"\^\s*(?:\{\s*)?\\circ(?![a-zA-Z])(?:\s*\})?|\\degree(?![a-zA-Z])", "", s)
    s = re.sub(r"\\l(?:brace|vert)(?![a-zA-Z])", lambda m: "\\{" if "brace" in m[0] else "|", s)
    s = re.sub(r"\\r(?:brace|vert)(?![a-zA-Z])", lambda m: "\\}" if "brace" in m[0] else "|", s)
    s = re.sub(r"\\([lg]e|ne)(?![a-zA-Z])", r"\\\1q", s)
    s = s.replace("<=", "\\leq ").replace(">=", "\\geq ").replace("!=", "\\neq ")
    s = re.sub(r"\\text\s*\{\s*(?:or|and)\s*\}|(?<=[\s\d})])(?:or|and)(?=[\s\d\\({-])", ", ", s)
    s = re.sub(r"^\s*([+-]?\d+)\s+(\d+)/(\d+)\s*$", r"\1\\frac{\2}{\3}", s)
    s = re.sub(r"\s*\\times\s*|\s*\\cdot\s*", lambda m: "\\times" if "times" in m[0] else "\\cdot", s)
    s = _arguments(s.rstrip(" .,;"))
    s = _spell_units(s)
    s = re.sub(_TEXT, r"\1", s)
    s = re.sub(r",\s+", ",\0", s)
    s = re.sub(r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])", "\\1\1", s)  # \cot x needs its space
    return re.sub(r"\s+", "", s).replace("\0", " ").replace("\1", " ")


def _arguments(s: str) -> str:
    r"""Braces around the arguments of \frac and \sqrt that TeX does without: \frac12, \frac 59, \frac{270}7, \sqrt3."""
    s = re.sub(r"\\frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])", r"\\frac{\1}{\2}", s)
    s = re.sub(r"\\frac\s*([0-9a-zA-Z])\s*\{", r"\\frac{\1}{", s)
    s = re.sub(r"\\frac\s*\{([^{}]*)\}\s*([0-9a-zA-Z])", r"\\frac{\1}{\2}", s)
    return re.sub(r"\\sqrt\s*([0-9a-zA-Z])", r"\\sqrt{\1}", s)


_UNITS = {
    "cm": "cm centimeter centimeters centimetre centimetres", "mm": "mm millimeter millimeters",
    "m": "meter meters metre metres",
    "km": "km kilometer kilometers", "in": "inch inches",
    "ft": "ft foot feet", "yd": "yd yard yards", "mi": "mile miles",
    "kg": "kg kilogram kilograms", "g": "gram grams", "lb": "lb lbs pound pounds", "l": "liter liters litre litres",
    "s": "sec second seconds", "min": "minute minutes",
    "h": "hr hrs hour hours", "day": "day days", "year": "year years",
    "cent": "cent cents", "dollar": "dollar dollars", "degree": "degree degrees", "unit": "unit units", "mph": "mph",
    "am": "a.m. a.m am", "pm": "p.m. p.m pm",
}  # fmt: skip
_UNIT_OF = {word: unit for unit, words in _UNITS.items() for word in words.split()}
_SHORT = {"m": "m", "g": "g", "s": "s", "h": "h", "l": "l", "L": "l", "in": "in", "mi": "mi"}  # only inside \text
_POWER = r"(?:\s*\^\s*\{?\s*([23])\s*\}?)?"
_KNOWN = "|".join(re.escape(word) for word in sorted(_UNIT_OF, key=len, reverse=True))
_BARE_UNIT = re.compile(rf"(?<=[0-9}}).%])\s*((?:(?:square|sq\.?|cubic)\s+)?(?:{_KNOWN})){_POWER}\s*$")
_TEXT_UNIT = re.compile(_TEXT + _POWER + r"\s*$")
_MARK = "\2"  # before a unit in a tidy formula


def _spell_units(s: str) -> str:
    """A unit at the end as a mark and its name and power; an unknown word in \\text{} as a mark alone."""
    match = _TEXT_UNIT.search(s)
    if match is None or not s[: match.start()].strip():
        match = _BARE_UNIT.search(s)
    if match is None:
        return s
    word = match[1].strip().strip(".") if match[1].strip() not in _UNIT_OF else match[1].strip()
    power = match[2] or ""
    for prefix, exponent in (("square ", "2"), ("sq. ", "2"), ("sq ", "2"), ("cubic ", "3")):
        if word.startswith(prefix):
            word, power = word[len(prefix) :].strip(), exponent
    unit = _UNIT_OF.get(word.lower()) or _SHORT.get(word)
    if unit is None and len(word) < 2:  # \mathrm{i} is a number
        return s
    return s[: match.start()].rstrip() + _MARK + (unit + power if unit else "")


def _unit(s: str) -> tuple[str, str]:
    value, _, unit = s.partition(_MARK)
    return value, unit


_WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(
    rf"([+-]?)(?:({_DECIMAL})(?:(?:\\times|\\cdot)10\^\{{?([+-]?\d+)\}}?|[eE]([+-]?\d+))?"
    rf"|(\d*)\\frac\{{([+-]?{_DECIMAL})\}}\{{([+-]?{_DECIMAL})\}}|({_DECIMAL})/({_DECIMAL}))(%?)"
)


_REPEATING = re.compile(r"([+-]?)(\d*)\.(\d*)\\overline(?:\{(\d+)\}|(\d))")


def _number(s: str) -> tuple[Fraction, bool] | None:
    """The exact value of a number, and whether it is a percentage; None for anything else."""
    if repeating := _REPEATING.fullmatch(s):
        sign, whole, fixed, *period = repeating.groups(default="")
        again = "".join(period)
        once, nines = int(whole + fixed or 0), 10 ** len(again) - 1
        value = (once + Fraction(int(again), nines)) / 10 ** len(fixed)
        return (-value if sign == "-" else value), False
    match = _NUMBER.fullmatch(s)
    if match is None or len(s) > LARGEST:
        return None
    sign, decimal, ten, e, whole, top, bottom, num, den, percent = match.groups()
    if decimal is not None:
        exponent = int(ten or e or 0)
        if abs(exponent) > LARGEST:
            return None
        value = _exact(decimal) * Fraction(10) ** exponent
    else:
        top, bottom = top or num, bottom or den
        if _exact(bottom) == 0 or (whole and (top + bottom).strip("0123456789")):
            return None
        value = Fraction(whole or 0) + _exact(top) / _exact(bottom)
    return (-value if sign == "-" else value), bool(percent)


def _exact(decimal: str) -> Fraction:
    return Fraction(decimal.replace(",", ""))


def _choice(s: str) -> str | None:
    """The letter of a multiple choice."""
    match = re.fullmatch(r"\(?([A-Z])\)?", s)
    return match[1] if match else None


def _based(s: str) -> tuple[str, str] | None:
    """Digits and base of a number such as 2516_8."""
    match = re.fullmatch(r"([0-9A-F]+)_\{?([0-9]{1,2})\}?", s)
    return (match[1], match[2]) if match else None


def _words(gold: str) -> str | None:
    """The plain words of a gold answer that is words: wholly in \\text{}, or four letters and more; else None."""
    match = re.fullmatch(_TEXT, gold.strip())
    text = match[1].strip() if match else gold.strip()
    letters = re.fullmatch(r"[A-Za-z][A-Za-z '\-]+", text) if match else re.fullmatch(r"[A-Za-z]{4,}", text)
    return _plain(text) if letters else None


def _plain(text: str) -> str:
    text = re.sub(_TEXT, r"\1", text.replace("$", "").replace("\\ ", " ")).strip(" .\t\n*_").casefold()
    return re.sub(r"[^\w]+", " ", re.sub(r"^(?:an?|the)\s+", "", text)).strip()


_OPEN, _CLOSE = ("\\{", "(", "[", "{"), ("\\}", ")", "]", "}")
_SCAN = re.compile(r"\\[{}]|\\begin\{|\\end\{|\\[a-zA-Z]+|[()\[\]{},]|\\\\")


def _split(s: str, at: str = ",") -> list[str]:
    """Elements between top-level separators; A \\pm B is two elements."""
    depth, start, parts = 0, 0, []
    for token in _SCAN.finditer(s):
        t = token[0]
        if t in _OPEN or t == "\\begin{":
            depth += 1 + (t == "\\begin{")
        elif t in _CLOSE:
            depth -= 1
        elif t == "\\end{":
            pass  # its closing brace also closes what \\begin{ opened
        elif t == at and depth == 0:
            parts.append(s[start : token.start()])
            start = token.end()
    parts.append(s[start:])
    parts = [p.strip() for p in parts]
    if at != "," or len(parts) > MANY:
        return parts
    return [q for p in parts for q in _signs(p)]


def _signs(s: str) -> list[str]:
    left, pm, right = s.partition("\\pm")
    if not pm or "\\pm" in right or left.count("{") != left.count("}") or left.count("(") != left.count(")"):
        return [s]
    right = right.lstrip()
    return [left + ("+" if left else "") + right, f"{left}-{right}"]


def _bracketed(s: str) -> tuple[str, list[str]] | None:
    """The brackets and elements of a tuple, interval or set; None where the first bracket closes before the end."""
    start = next((o for o in _OPEN[:3] if s.startswith(o)), None)
    end = next((c for c in _CLOSE[:3] if s.endswith(c)), None)
    if start is None or end is None or len(s) < len(start) + len(end):
        return None
    depth = 0
    for token in _SCAN.finditer(s):
        depth += (token[0] in _OPEN) - (token[0] in _CLOSE)
        if depth == 0 and token.end() < len(s):
            return None
    if depth:
        return None
    return (start + end).replace("\\", ""), _split(s[len(start) : -len(end)])


def _matrix(s: str) -> tuple[str, list[list[str]]] | None:
    match = re.fullmatch(r"\\begin\{([bpvBV]?)matrix\}(.*?)(?:\\\\)?\\end\{\1matrix\}", s, re.DOTALL)
    if match is None or "\\begin" in match[2]:
        return None
    kind = "" if match[1] in ("b", "p") else match[1] or "plain"
    return kind, [row.split("&") for row in match[2].split("\\\\")]
