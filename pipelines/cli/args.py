"""The arguments of programs without Hydra: key=value pairs, help, and every mistake as one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moend.errors import UserError, unknown

FLAGS = ("true", "false")


def program(argv: Sequence[str] | None, usage: str, body: Callable[[list[str]], int]) -> int:
    """Run a program of key=value arguments. Returns its exit code; a user's mistake is one line and 2."""
    from pipelines.cli.hydra import code_of, explain, read_enough

    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if {"-h", "--help"} & set(args):
            print(usage, flush=True)
            return 0
        return body(args)
    except BrokenPipeError:
        return read_enough()
    except Exception as e:
        if (line := explain(e, args)) is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        return code_of(e)


def parse(argv: Sequence[str], defaults: Mapping[str, str]) -> dict[str, str]:
    """The values of key=value arguments. An unknown key is refused with the nearest one.

    A default `true` or `false` says that the argument takes these two only.
    """
    values = dict(defaults)
    for argument in argv:
        name, equals, value = argument.partition("=")
        if name in defaults and not equals:
            raise UserError(f"{name} needs a value: {name}={defaults[name]}")
        if name not in defaults:
            raise unknown("argument", name, defaults)
        if defaults[name] in FLAGS and value not in FLAGS:
            raise UserError(f"{name} is true or false, got '{value}'")
        values[name] = value
    return values


def store_default() -> dict[str, str]:
    """The argument `paths.store` with its default: MOEND_STORE, or `outputs`."""
    return {"paths.store": os.environ.get("MOEND_STORE", "outputs")}


def store_path(values: Mapping[str, str]) -> Path:
    """The folder that `paths.store` names."""
    return Path(values["paths.store"]).expanduser().absolute()
