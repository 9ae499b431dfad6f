"""What all programs print with: tables that fit a terminal and are whole in a log, bytes and budgets for people."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

EVERY = 30  # seconds between progress lines in a log
WIDE = 200  # columns where no terminal limits them: a log or a pipe gets whole rows


def console() -> Console:
    """A console on standard output. Brackets and colons are text: `[no interval]`, a folder `a:100:`, no markup."""
    return Console(markup=False, emoji=False, width=None if sys.stdout.isatty() else WIDE)


@contextmanager
def progress(to: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields step(done, all): a bar with its ETA on a terminal; in a log a line now and then."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    begin = last = time.monotonic()
    with Progress(*columns, console=to, disable=not to.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def step(done: int, total: int) -> None:
            nonlocal last
            bar.update(task, completed=done, total=total)
            now = time.monotonic()
            if not to.is_terminal and now - last >= EVERY and 0 < done < total:
                left = (now - begin) / done * (total - done)
                say(to, f"{what}: {done} of {total}, about {timedelta(seconds=round(left))} left")
                last = now

        yield step


def say(to: Console, text: str) -> None:
    """Print one line as it is: no markup, no colouring, no wrapping inside paths and commands."""
    to.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


def size(count: float) -> str:
    """Bytes for people, in powers of two."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def budget(canonical: str | None) -> str:
    """A canonical budget as people write it: 512t is 512, 0.1r is 10%, bytes with their unit; `-` for none."""
    if canonical is None:
        return "-"
    number, kind = canonical[:-1], canonical[-1]
    if kind == "r":
        return f"{float(number) * 100:g}%"
    return number if kind == "t" else size(int(number)).replace(" ", "")


def question(visible: bool | None) -> str:
    """The question mode as a column shows it."""
    return {True: "visible", False: "unseen", None: "-"}[visible]
