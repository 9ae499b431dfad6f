"""Statistics of scores: intervals of one cell, paired differences of two."""

from moend.statistics.intervals import Interval, bootstrap, score_interval, summarise, wilson
from moend.statistics.paired import (
    Difference,
    Examples,
    compare,
    examples,
    holm,
    mcnemar_exact,
    paired_bootstrap,
    paired_error,
    paired_share,
)

__all__ = [
    "Difference",
    "Examples",
    "Interval",
    "bootstrap",
    "compare",
    "examples",
    "holm",
    "mcnemar_exact",
    "paired_bootstrap",
    "paired_error",
    "paired_share",
    "score_interval",
    "summarise",
    "wilson",
]
