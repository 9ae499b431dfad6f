"""python -m pipelines.bundle pack|add: pack finished cells of a sweep into one file, or add such a file to a store."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from moend.errors import UserError
from pipelines.cli.args import parse, program, store_default, store_path
from pipelines.store.bundle import add, pack
from pipelines.store.cells import Store

USAGE = """Finished cells, with their plans, calibrations and provenance, as one file.
  python -m pipelines.bundle pack [sweep=latest] [file=<sweep>.zip] [paths.store=outputs]
  python -m pipelines.bundle add FILE [paths.store=outputs]: checks all of it first; what is there already stays

Exit codes: 0 packed or added, 2 a mistake in the command or a bundle that is not what it says."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return program(argv, USAGE, _main)


def _main(args: list[str]) -> int:
    if args[:1] not in (["pack"], ["add"]) or (args[0] == "add" and len(args) < 2):
        raise UserError("say pack or add: bundle pack [sweep=latest], bundle add FILE")
    rest = args[1:] if args[0] == "pack" else args[2:]
    more = {"sweep": "latest", "file": ""} if args[0] == "pack" else {}
    values = parse(rest, {**more, **store_default()})
    store = Store(store_path(values))
    print(pack(store, values["sweep"], values["file"]) if args[0] == "pack" else "\n".join(add(store, Path(args[1]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
