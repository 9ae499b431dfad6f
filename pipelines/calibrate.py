"""python -m pipelines.calibrate method=2d_hetero budget=25%: measure, solve, and show the plan of a cell."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pipelines.cli.hydra import Point, run_hydra


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 all plans are written, 2 a mistake, or something that the only cell needs is missing."""

    args = list(sys.argv[1:] if argv is None else argv)

    def program(points: list[Point]) -> int:
        from pipelines.execution.calibrate import calibrate

        return calibrate(points, args)

    return run_hydra(program, args, "calibrate")


if __name__ == "__main__":
    sys.exit(main())
