"""Scorers: which entries of a layer matter. One file each, found by its name.

A scorer's module assigns its class to SCORER (see `base.Scorer`): a frozen dataclass of its settings with a formula.
It may also lie outside this package (entry point group "moend.scorers", or a dotted path). Selection (sinks, the recent
window, top-k) is not a scorer's business.
"""

from __future__ import annotations

from typing import Any, cast

from moend import registry
from moend.scoring.base import LayerView, Scorer

__all__ = ["LayerView", "Scorer", "names", "scorer"]

GROUP = "moend.scorers"


def names() -> tuple[str, ...]:
    """Names of the scorers that are found."""
    return registry.names(__name__, GROUP, "SCORER")


def scorer(name: str, **settings: Any) -> Scorer:
    """The scorer of that name with these settings; an unknown name, setting or choice is a UserError."""
    kind = registry.find(__name__, "SCORER", name, GROUP)
    return cast(Scorer, registry.build(kind, f"scorer {name}", settings))
