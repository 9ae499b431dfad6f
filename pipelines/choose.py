"""python -m pipelines.choose benchmark=longbench_en loss=5: the smallest cache that loses at most so many points."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pipelines.cli.hydra import Point, run_hydra


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 decided, 1 a cell failed, 2 a mistake in the command, 3 not decided, 130 interrupted."""
    from pipelines.execution import choice

    args = list(sys.argv[1:] if argv is None else argv)
    own, rest = choice.split(args)

    def program(points: list[Point]) -> int:
        return choice.choose(points, args, own)

    return run_hydra(program, rest, "choose")


if __name__ == "__main__":
    sys.exit(main())
