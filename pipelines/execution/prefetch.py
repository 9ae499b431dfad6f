"""Brings the models and data of all points to this machine."""

from __future__ import annotations

from moend.errors import UserError
from pipelines.cli import terminal
from pipelines.cli.hydra import Point
from pipelines.cli.terminal import say
from pipelines.execution import session as evaluate
from pipelines.planning import schema


def prefetch(points: list[Point]) -> int:
    """Fetch what each distinct model and benchmark lacks; one that fails does not keep the others away."""
    console, library = terminal.console(), evaluate.Library()
    configs = [schema.validate(p) for p in points]
    dry, failed, missing = configs[0].dry_run, 0, 0
    needs = dict.fromkeys(need for config in configs for need in library.fetches(config))
    for need in needs:
        if dry:
            missing += need.absent is not None
            say(console, f"missing: {need.absent}" if need.absent else f"there: {need.name}")
            continue
        if need.absent:
            say(console, f"fetching: {need.name}")
        try:
            need.bring()
        except UserError as e:
            failed += 1
            say(console, f"failed: {need.name}: {' '.join(str(e).split())}")
        else:
            say(console, f"{'fetched' if need.absent else 'there'}: {need.name}")
    if dry:
        return 3 if missing else 0
    counted = f"{len(needs) - failed} of {len(needs)} models and data sets are in {configs[0].cache}"
    say(console, f"{counted}; the same command again fetches the rest" if failed else counted)
    return 1 if failed else 0
