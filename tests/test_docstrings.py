"""Every public name says what it is, and every field of a dataclass what it means."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public(body: list[ast.stmt], within: str = "") -> Iterator[tuple[str, Documented]]:
    """Public functions and classes of a module, and the public methods of these classes, with dotted names."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield within + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{within}{node.name}.")


def needs_no_words(node: Documented) -> bool:
    """Whether a function is one of several signatures of another, whose docstring speaks for all."""
    names = {ast.unparse(x).rpartition(".")[2] for x in node.decorator_list}
    return bool(names & {"overload", "setter"})


def fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    """The public fields of a dataclass; none of any other class."""
    if not any("dataclass" in ast.unparse(x) for x in node.decorator_list):
        return []
    found = (x for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name))
    return [x for x in found if not ast.unparse(x.target).startswith("_") and "ClassVar" not in ast.unparse(x)]


def explained(lines: list[str], node: ast.ClassDef, field: ast.AnnAssign) -> bool:
    """Whether a comment stands in a field's lines or right above them, or the class's docstring names the field.

    A comment above also speaks for the fields that follow it without one of their own.
    """
    name = ast.unparse(field.target)
    if re.search(rf"\b{name}\b", ast.get_docstring(node) or ""):
        return True
    above = lines[field.lineno - 2].strip()
    own = lines[field.lineno - 1 : field.end_lineno]
    return above.startswith("#") or any(re.search(r"\s#\s*\S", x) for x in own)


def missing(path: Path) -> list[str]:
    """What a file leaves unsaid, a line each."""
    text = path.read_text(encoding="utf-8")
    lines, found = text.splitlines(), []
    for name, node in public(ast.parse(text).body):
        if not ast.get_docstring(node) and not needs_no_words(node):
            found.append(f"{path.name}:{node.lineno}: {name} has no docstring")
        if isinstance(node, ast.ClassDef):
            found += [
                f"{path.name}:{x.lineno}: nothing says what {name}.{ast.unparse(x.target)} means"
                for x in fields(node)
                if not explained(lines, node, x)
            ]
    return found


@pytest.mark.parametrize("folder", ["moend"])
def test_public_names_and_fields_are_explained(folder: str) -> None:
    found = [x for path in sorted((ROOT / folder).rglob("*.py")) for x in missing(path)]
    assert not found, "\n".join(found)


def test_what_is_missing_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        "from dataclasses import dataclass\n"
        "def _private(): ...\n"
        "def bare(): ...\n"
        "@dataclass\nclass A:\n"
        '    """Of x."""\n'
        "    x: int\n"
        "    y: int  # said\n"
        "    z: int\n"
        "    def m(self): ...\n"
    )
    assert missing(path) == [
        "a.py:3: bare has no docstring",
        "a.py:9: nothing says what A.z means",
        "a.py:10: A.m has no docstring",
    ]
