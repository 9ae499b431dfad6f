"""Reading formulas: LaTeX written one way (`tidy`), its unit, and the number, list, interval, set or matrix it is.

`tidy` is the form that `extract.equal` compares; every reader here takes a tidy formula, `words_of` and `plain` a text.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

LARGEST = 400  # exponent of ten in scientific notation
MANY = 64  # elements of a list

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


def unit_of(s: str) -> tuple[str, str]:
    """A formula and its unit, empty where it has none."""
    value, _, unit = s.partition(_MARK)
    return value, unit


_WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(
    rf"([+-]?)(?:({_DECIMAL})(?:(?:\\times|\\cdot)10\^\{{?([+-]?\d+)\}}?|[eE]([+-]?\d+))?"
    rf"|(\d*)\\frac\{{([+-]?{_DECIMAL})\}}\{{([+-]?{_DECIMAL})\}}|({_DECIMAL})/({_DECIMAL}))(%?)"
)


_REPEATING = re.compile(r"([+-]?)(\d*)\.(\d*)\\overline(?:\{(\d+)\}|(\d))")


def number(s: str) -> tuple[Fraction, bool] | None:
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


def choice(s: str) -> str | None:
    """The letter of a multiple choice."""
    match = re.fullmatch(r"\(?([A-Z])\)?", s)
    return match[1] if match else None


def based(s: str) -> tuple[str, str] | None:
    """Digits and base of a number such as 2516_8."""
    match = re.fullmatch(r"([0-9A-F]+)_\{?([0-9]{1,2})\}?", s)
    return (match[1], match[2]) if match else None


def words_of(gold: str) -> str | None:
    """The plain words of a gold answer that is words: wholly in \\text{}, or four letters and more; else None."""
    match = re.fullmatch(_TEXT, gold.strip())
    text = match[1].strip() if match else gold.strip()
    letters = re.fullmatch(r"[A-Za-z][A-Za-z '\-]+", text) if match else re.fullmatch(r"[A-Za-z]{4,}", text)
    return plain(text) if letters else None


def plain(text: str) -> str:
    """Words without case, punctuation and article."""
    text = re.sub(_TEXT, r"\1", text.replace("$", "").replace("\\ ", " ")).strip(" .\t\n*_").casefold()
    return re.sub(r"[^\w]+", " ", re.sub(r"^(?:an?|the)\s+", "", text)).strip()


_OPEN, _CLOSE = ("\\{", "(", "[", "{"), ("\\}", ")", "]", "}")
_SCAN = re.compile(r"\\[{}]|\\begin\{|\\end\{|\\[a-zA-Z]+|[()\[\]{},]|\\\\")


def split(s: str, at: str = ",") -> list[str]:
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


def bracketed(s: str) -> tuple[str, list[str]] | None:
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
    return (start + end).replace("\\", ""), split(s[len(start) : -len(end)])


def matrix(s: str) -> tuple[str, list[list[str]]] | None:
    """The brackets (none for parentheses and square ones) and rows of a matrix."""
    match = re.fullmatch(r"\\begin\{([bpvBV]?)matrix\}(.*?)(?:\\\\)?\\end\{\1matrix\}", s, re.DOTALL)
    if match is None or "\\begin" in match[2]:
        return None
    kind = "" if match[1] in ("b", "p") else match[1] or "plain"
    return kind, [row.split("&") for row in match[2].split("\\\\")]
