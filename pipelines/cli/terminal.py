"""What all programs print with: tables that fit a terminal and are whole in a log, bytes and budgets for people."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

EVERY = 30  # seconds between progress lines in a log
SETTLED = 5  # seconds after the first record from which on a pace is told
WIDE = 200  # columns where no terminal limits them: a log or a pipe gets whole rows


def console() -> Console:
    """A console on standard output. Brackets and colons are text: `[no interval]`, a folder `a:100:`, no markup."""
    return Console(markup=False, emoji=False, width=None if sys.stdout.isatty() else WIDE)


@contextmanager
def progress(to: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields step(done, all): a bar with its ETA on a terminal; in a log a line now and then.

    Records come in bursts, one per cell of a group, and the first one waits for the model: the time left is told from
    the pace since the first record, once that is some seconds ago.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    last = time.monotonic()
    first: tuple[float, int] | None = None
    with Progress(*columns, console=to, disable=not to.is_terminal) as bar:
        task = bar.add_task(what, total=None, left="")

        def step(done: int, total: int) -> None:
            nonlocal first, last
            now = time.monotonic()
            first = first or (now, done)
            left = remaining(now - first[0], done - first[1], total - done)
            bar.update(task, completed=done, total=total, left=left)
            if not to.is_terminal and now - last >= EVERY and 0 < done < total:
                say(to, f"{what}: {done} of {total}{', ' * bool(left)}{left}")
                last = now

        yield step


def remaining(passed: float, done: int, todo: int) -> str:
    """The time left at the pace of `done` in `passed` seconds; nothing before that pace means anything."""
    if passed < SETTLED or done < 1:
        return ""
    return f"about {duration(passed / done * todo)} left"


def fit(titles: Sequence[str], lines: Sequence[Sequence[str]], width: int, spare: Sequence[str]) -> list[int]:
    """Columns of a table that a terminal shows whole: those of `spare` go first to last until the rest fits."""
    widths = [max(map(len, column)) + 2 for column in zip(titles, *lines, strict=True)]
    kept = list(range(len(titles)))
    for title in spare:
        if sum(widths[i] for i in kept) <= width:
            break
        kept.remove(list(titles).index(title))
    return kept


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


def duration(seconds: float) -> str:
    """Seconds for people."""
    for unit, length, until in (("s", 1, 90), ("min", 60, 5400), ("h", 3600, 172_800)):
        if seconds < until:
            return f"{seconds / length:.2g} {unit}" if seconds < 10 * length else f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86_400:.1f} days"


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
