"""From a command line to composed points: Hydra's part of every program, and its errors as single lines."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moend import paths
from moend.errors import UserError, unknown
from moend.version import warn_untested

Program = Callable[[list["Point"]], int]


@dataclass(frozen=True)
class Point:
    """One composed point of a sweep: its overrides as typed, the option chosen in each group, and the plain config."""

    index: int
    overrides: tuple[str, ...]
    choices: dict[str, str]
    config: dict[str, Any]


def run_hydra(program: Program, argv: Sequence[str] | None = None, name: str = "run") -> int:
    """Compose `argv` and run `program` on all points. Returns the exit code; a user's mistake is one line and 2.

    Hydra's own main prints errors in its way and ends with 1. HYDRA_FULL_ERROR=1 makes it raise them instead, so
    that they are told here; where a person has set it, the traceback is shown as well.
    """
    import hydra

    warn_untested("hydra-core")
    warn_untested("omegaconf")
    args = list(sys.argv[1:] if argv is None else argv)
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    started = False

    def start(points: list[Point]) -> int:
        nonlocal started
        started = True
        return program(points)

    entry = hydra.main(version_base="1.3", config_path=str(paths.folder("conf")), config_name="run")(start)
    flags = [a for a in args if a in ("-m", "--multirun")]  # Hydra's parser takes them first or last only
    ordered = [*flags, *open_parts([a for a in args if a not in flags])]
    if {"-h", "--help"} & set(args) and (paths.folder("conf") / "hydra" / "help" / f"{name}.yaml").is_file():
        ordered.append(f"hydra/help={name}")
    with _environment(ordered, name), termination():
        try:
            _check_arguments(ordered)
            entry()
            return 0
        except SystemExit as e:
            return e.code if isinstance(e.code, int) else 0 if e.code is None else 1
        except KeyboardInterrupt as e:
            print(
                f"interrupted. What is finished is kept; the same command goes on: {command(args, name)}",
                file=sys.stderr,
            )
            return 143 if isinstance(e, Terminated) else 130
        except BrokenPipeError:
            if started:
                raise
            return read_enough()
        except Exception as e:
            line = explain(e, args)
            if line is None and not started:  # Hydra meets some mistakes with an assertion or a bare ValueError
                line = f"cannot compose this command ({type(e).__name__}: {_one_line(e)})".replace(": )", ")")
            if line is None or wants_traceback:
                traceback.print_exc()
            if line is None:
                return 1
            print(f"error: {line}", file=sys.stderr)
            return code_of(e)


PART = re.compile(r"\+*method\.(scorer|allocator)(\.[\w.]+)?=")


def open_parts(arguments: Sequence[str]) -> list[str]:
    """Arguments that Hydra takes although a method's file does not have their keys: settings of scorer and allocator.

    What settings there are depends on the part's name, which another argument may change (`planning.points`).
    """
    return [f"++{a.lstrip('+')}" if PART.match(a) else a for a in arguments]


def read_enough() -> int:
    """The exit code where the reader of the output, `head` say, has read enough: nothing is left to flush."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def command(args: Sequence[str], name: str) -> str:
    """The command line that does the same again."""
    import shlex

    return shlex.join(["python", "-m", f"pipelines.{name}", *args])


class Terminated(KeyboardInterrupt):
    """SIGTERM: ends a run as an interrupt does, with 143."""


@contextlib.contextmanager
def termination() -> Iterator[None]:
    """Raise Terminated on SIGTERM, so that leases are given back and the person is told how to go on."""

    def terminate(number: int, frame: object) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():  # Python sets handlers only there
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


# There is one launcher and it gets all points: with another, Hydra would run something else or nothing, and say nothing
_FIXED = ("hydra/launcher", "hydra/sweeper", "hydra.launcher", "hydra.sweeper._target_", "hydra.mode")


_HEEDED = ("hydra.sweeper.params", "hydra.sweeper.grids", "hydra.verbose", "hydra.searchpath", "hydra/help")


def _check_arguments(args: Sequence[str]) -> None:
    """What Hydra's parser refuses, as one line without the usage; and overrides that would go past this program."""
    from hydra._internal.utils import get_args_parser

    def refuse(message: str) -> None:
        raise UserError(f"{message} (options such as -m or --cfg job stand before or after all key=value)")

    parser = get_args_parser()
    parser.error = refuse
    for override in parser.parse_args(list(args)).overrides:
        if (key := override.lstrip("+~").partition("=")[0]) in _FIXED or key.startswith("hydra.launcher."):
            raise UserError(f"{key} cannot be changed; where a run takes place is said by cluster=")
        if key.startswith(("hydra.", "hydra/")) and not key.startswith(_HEEDED):
            raise UserError(
                f"{key} has no effect here: results lie in paths.store=, and the working folder never changes "
                f"(of Hydra's own settings {', '.join(_HEEDED)} are heeded)"
            )


@contextlib.contextmanager
def _environment(args: list[str], name: str) -> Iterator[None]:
    """Hydra reads sys.argv; set it, and HYDRA_FULL_ERROR, for the length of one call."""
    before, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = [f"pipelines.{name}", *args], "1"
    try:
        yield
    finally:
        sys.argv = before
        if full is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full


def explain(error: BaseException, args: Sequence[str]) -> str | None:
    """One line for a mistake in the command or its surroundings, or None where the fault is ours."""
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, MissingConfigException) and error.missing_cfg_file and "/" in error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return str(unknown(group, option, error.options or _options(group)))
    if isinstance(error, UserError):
        return _one_line(error)
    if isinstance(error, OverrideParseException):
        key, _, value = str(error.override).partition("=")
        if "LexerNoViableAlt" in str(error) and value and not {"'", '"'} & set(value):
            return f"cannot read '{error.override}': put the value in quotes of its own: \"{key}='{value}'\""
        return f"cannot read '{error.override}': {_one_line(error).partition(' expecting ')[0]}"
    if isinstance(error, HydraException | OmegaConfBaseException):
        cause = error.__cause__ or error
        if match := re.match(r"Could not override '([^']+)'", str(error)):
            if match[1] == "sweep":
                return "sweeps are added: +sweep=<name>, with the plus sign"
            if (moved := _moved(match[1])) is not None:
                return moved
            known, others = _keys(args), _keys_of_options(match[1].partition(".")[0])
            if match[1] in known:
                return _one_line(error)
            if option := others.get(match[1]):
                return f"there is no configuration key '{match[1]}' here; with {option} there is"
            return unknown_key(match[1], [*known, *others])
        return _one_line(error if str(error) else cause)
    if isinstance(error, OSError) and error.errno in _WRITING:
        path = error.filename or "the output"
        unread = error.errno in (errno.EACCES, errno.EPERM) and Path(path).is_file() and not os.access(path, os.R_OK)
        return f"cannot {'read' if unread else 'write'} {path}: {error.strerror}"
    return None


def code_of(error: BaseException) -> int:
    """The exit code of an error that is told in one line: 1 for a full disk, which is nobody's mistake, else 2."""
    return 1 if isinstance(error, OSError) and error.errno in _FULL else 2


_FULL = (errno.ENOSPC, errno.EDQUOT)


_WRITING = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM),
    *(errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG),
)


def _moved(key: str) -> str | None:
    """Where a key of the method is now, if it stood there before its part had settings of its own."""
    if not key.startswith("method."):
        return None
    from moend.methods.spec import MOVED

    new = MOVED.get(key.removeprefix("method."))
    return None if new is None else f"{key} has another place now: {new}"


def unknown_key(key: str, choices: Sequence[str]) -> str:
    """The line for a key that the configuration does not have, with its nearest neighbour."""
    name = key.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(key, choices, n=1, cutoff=0.6)
    near = near or [c for c in choices if difflib.get_close_matches(name, [c.rsplit(".", 1)[-1]], n=1, cutoff=0.75)]
    near = near or ["+sweep=<name>"] * bool(difflib.get_close_matches(key, ["sweep"], n=1, cutoff=0.6))
    hint = f" Did you mean '{near[0]}'?" if near else " `python -m pipelines.run --help` lists all keys."
    return f"there is no configuration key '{key}'.{hint}"


def leaves(config: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted path in a nested mapping, groups and leaves."""
    if isinstance(config, dict):
        for key, value in config.items():
            yield prefix + str(key)
            yield from leaves(value, f"{prefix}{key}.")


def _options(group: str) -> list[str]:
    return sorted(p.stem for p in paths.folder("conf", group).glob("*.yaml"))


def _keys_of_options(group: str) -> dict[str, str]:
    """Keys that some option of a group has -> the last such option."""
    from omegaconf import OmegaConf

    found: dict[str, str] = {}
    for option in _options(group):
        config = OmegaConf.to_container(OmegaConf.load(paths.folder("conf") / group / f"{option}.yaml"))
        found |= {key: f"{group}={option}" for key in leaves(config, f"{group}.") if "defaults" not in key}
    return found


def _keys(args: Sequence[str]) -> list[str]:
    """All keys of the configuration that `args` would compose, leaving out what does not compose."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf

    chosen = []
    for arg in args:
        group, _, option = arg.partition("=")
        if option in _options(group):
            chosen.append(arg)
    with initialize_config_dir(str(paths.folder("conf")), version_base="1.3"):
        config = hydra_compose("run", overrides=chosen)
    return list(leaves(OmegaConf.to_container(config)))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
