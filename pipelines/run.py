"""python -m pipelines.run method=SnapKV budget=25%: compose cells, compute what is missing, show the table."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pipelines.cli.hydra import Point, run_hydra


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 a cell failed, 2 a mistake in the command, 130 interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)

    def program(points: list[Point]) -> int:
        from pipelines.cluster.launch import launch

        return launch(points, args)

    return run_hydra(program, args, "run")


if __name__ == "__main__":
    sys.exit(main())
