"""The console command `moend`: one verb for each door of this package, and the shell's completion of both."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from moend import __version__
from moend.errors import unknown
from pipelines.cli import catalog, completion


def verbs() -> dict[str, str]:
    """Each verb and what it does, from the first lines of the doors; none of them is imported."""
    doors = Path(__file__).resolve().parents[1].glob("*.py")
    found = {path.stem: catalog.first_line(path) for path in sorted(doors) if not path.stem.startswith("__")}
    return {verb: line.partition(": ")[2] or line for verb, line in found.items()}


def usage() -> str:
    """What `moend --help` prints."""
    known = verbs()
    width = max(map(len, known))
    lines = [f"  {verb:{width}}  {line}" for verb, line in known.items()]
    return "\n".join(
        [
            "usage: moend <verb> [key=value ...]; moend <verb> --help says more (or python -m pipelines.<verb>)",
            "",
            *lines,
            f"  {'completion':{width}}  print the completion script of a shell: {', '.join(completion.SCRIPTS)}",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb. Returns its exit code; an unknown verb is one line and 2."""
    args = list(sys.argv[1:] if argv is None else argv)
    verb, rest = (args[0], args[1:]) if args else ("--help", [])
    if verb in ("-h", "--help", "help"):
        print(usage())
        return 0 if args else 2
    if verb in ("-V", "--version"):
        print(f"moend {__version__}")
        return 0
    if verb == "completion":
        return completion.main(rest)
    if verb == completion.ASK:
        print("\n".join(completion.candidates(rest, verbs())))
        return 0
    if verb not in verbs():
        print(f"error: {unknown('verb', verb, [*verbs(), 'completion'])}", file=sys.stderr)
        return 2
    code: int = importlib.import_module(f"pipelines.{verb}").main(rest)
    return code
