"""python -m tests.oldest: ends with 1 where other versions than those of constraints-oldest.txt are installed."""

from __future__ import annotations

import sys
from importlib.metadata import version

from tests import ROOT


def main() -> int:
    lines = (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8").splitlines()
    wanted = dict(line.split("==") for line in lines if not line.startswith("#"))
    other = {name: version(name) for name, pin in wanted.items() if version(name) != pin}
    print(f"oldest versions: {', '.join(f'{name} {pin}' for name, pin in wanted.items())}")
    if other:
        print(f"other versions are installed: {other}", file=sys.stderr)
    return bool(other)


if __name__ == "__main__":
    sys.exit(main())
