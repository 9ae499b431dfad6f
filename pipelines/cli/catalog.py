"""What there is to choose from, with a line each: read from the first lines of files, nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from moend import paths
from moend.errors import UserError, unknown
from pipelines.cli.args import program
from pipelines.cli.terminal import console, say

USAGE = """What there is to choose from, with a line each.

  python -m pipelines.list methods|models|benchmarks|sweeps|figures

  methods, models, benchmarks   options of method=, model=, benchmark=
  sweeps                        +sweep=<name>
  figures                       what a report draws where a sweep has the results for it"""

KINDS = ("methods", "models", "benchmarks", "sweeps", "figures")


def files(kind: str) -> list[Path]:
    """The files of a kind, by name."""
    if kind == "sweeps":
        found = paths.folder("sweeps", "sweep").glob("*.yaml")
    elif kind == "figures":
        drawn = (Path(__file__).resolve().parents[1] / "reporting" / "figures").glob("*.py")
        found = (p for p in drawn if not p.stem.startswith("_") and p.stem != "style")
    else:
        found = paths.folder("conf", kind.removesuffix("s")).glob("*.yaml")
    return sorted(found, key=lambda p: p.stem.lower())


def first_line(path: Path) -> str:
    """The first sentence of a file: of a module's docstring, or of the comment that a YAML begins with."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        said = ast.get_docstring(ast.parse(text)) or ""
    else:
        lines = [line for line in text.splitlines() if not line.startswith("# @package")]
        comment = []
        for line in lines:
            if not line.startswith("#"):
                break
            comment.append(line.lstrip("# "))
        said = " ".join(comment)
    said = said.partition("\n\n")[0].replace("\n", " ")
    end = said.find(". ")
    return (said[:end] if end > 0 else said).rstrip(".")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for a kind that is not there."""
    return program(argv, USAGE, _main)


def _main(args: list[str]) -> int:
    if len(args) != 1:
        raise UserError(f"list what? One of {', '.join(KINDS)}")
    if args[0] not in KINDS:
        raise unknown("kind", args[0], KINDS)
    found = {path.stem: first_line(path) for path in files(args[0])}
    width = max(map(len, found))
    for name, line in found.items():
        say(console(), f"{name:{width}}  {line}".rstrip())
    return 0
