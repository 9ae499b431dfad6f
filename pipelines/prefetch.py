"""python -m pipelines.prefetch +sweep=moend_table2: fetch models and data of all points into paths.cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pipelines.cli.hydra import Point, run_hydra


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 all is there, 1 something cannot be fetched, 2 a mistake, 3 it is missing (dry run)."""

    def program(points: list[Point]) -> int:
        from pipelines.execution.prefetch import prefetch

        return prefetch(points)

    return run_hydra(program, argv, "prefetch")


if __name__ == "__main__":
    sys.exit(main())
