"""All measurements of perf/ one after the other: `python -m perf`, with a page of tables and figures at the end.

    OMP_NUM_THREADS=1 python -m perf [--only decode memory] [--out outputs/perf] [--publish] [--quick]

Each program runs in a process of its own and its JSON goes to OUT/<name>.json; one that fails is named, its last line
shown, and the others go on (exit code 1). The page is OUT/performance.md, of all that lies there. --publish writes
docs/performance.md and its figures instead, and adds what was measured, one line of ratios, to the history beside this
file. --quick, for trying out, takes the shortest lengths and one round, and is never published. --draw measures nothing
and makes the page anew. Peers that are not installed are left out (`perf/peers-requirements.txt`). On a quiet machine
all of it takes about an hour.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from perf.page import remember, write

AIMED = "full", "SnapKV 10 %", "2d_hetero 1/14", "K8/V4"
PROGRAMS: dict[str, tuple[list[str], list[str]]] = {
    "decode": (["perf.decode"], ["--lengths", "500", "1000", "--rounds", "1", "--steps", "2"]),
    "aims": (
        ["perf.decode", "--lengths", "8000", "--steps", "40", "--cells", *AIMED],
        ["--lengths", "1000", "--rounds", "1", "--steps", "2"],
    ),
    "fused": (["perf.decode", "--fused"], ["--lengths", "1000", "--rounds", "1", "--steps", "2"]),
    "memory": (["perf.decode", "--memory", "--lengths", "8000"], ["--lengths", "1000"]),
    "prefill": (["perf.prefill", "--time-at", "8000"], ["--time-at", "512", "--lengths", "512", "--repeats", "1"]),
    "fused_sweep": (["perf.fused_sweep", "--examples", "2"], ["--examples", "1", "--length", "256"]),
    "calibration": (["perf.calibration", "--model", "smollm2_135m"], ["--rounds", "1"]),
    "solver": (["perf.solver"], ["--tables", "1"]),
    "profile": (
        ["perf.ripple", "--examples", "2", "--naive"],
        ["--examples", "1", "--prefix", "128", "--window", "32"],
    ),
    "damage": (["perf.damage"], []),
    "planning": (["perf.planning"], []),
    "report": (["perf.report"], ["--cells", "20"]),
}


def main() -> int:
    """Run, collect, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--out", type=Path, default=Path("outputs/perf"))
    parser.add_argument("--publish", action="store_true", help="the page goes to docs/, the ratios into the history")
    parser.add_argument("--quick", action="store_true", help="try out: short lengths, one round")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if args.publish and args.quick:
        parser.error("--quick is for trying out: it is not published")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        parser.error(f"--out {args.out}: {e.strerror}")
    failed, done_now = 0, []
    for name in [] if args.draw else args.only:
        command, quick = PROGRAMS[name]
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", *command, *(quick if args.quick else [])],
            capture_output=True,
            text=True,
        )
        seconds = time.perf_counter() - begin
        if done.returncode:
            failed += 1
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            print(f"{name}: failed after {seconds:.0f} s: {last}", file=sys.stderr)
            continue
        json.loads(done.stdout)
        (args.out / f"{name}.json").write_text(done.stdout)
        done_now.append(name)
        print(f"{name}: {seconds:.0f} s", file=sys.stderr)
    if done_now and args.publish:
        remember(args.out, done_now)
    page = Path("docs/performance.md") if args.publish else args.out / "performance.md"
    write(args.out, page)
    print(f"page: {page}", file=sys.stderr)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
