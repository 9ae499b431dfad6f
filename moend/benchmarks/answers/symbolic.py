"""Whether two formulas are equal as mathematics (math-verify over SymPy), in a process of its own with a time limit.

SymPy may run for hours or take all memory on a formula that a model made up. Signals would only interrupt it on the
main thread of some platforms; a process can always be ended. It starts with the first question, answers one line of
JSON per line of JSON, ends itself when a question takes too long, and ends with its parent.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import logging
import os
import queue
import subprocess
import sys
import threading
from typing import IO, Any

LIMIT_S = 20.0  # a comparison takes a tenth of a second; a loaded machine must not change a score
GRACE_S = 5.0  # for the process to end itself
START_S = 300.0  # importing SymPy from a cold network disk
MEMORY = 4 << 30
ROUNDING = 12  # decimals: 1.414213 is not the square root of two

log = logging.getLogger(__name__)


class Worker:
    """The process. One question at a time, from any thread."""

    def __init__(self, limit: float = LIMIT_S):
        self.limit = limit
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._pid = 0
        self._lines: queue.Queue[str | None] = queue.Queue()
        atexit.register(self.close)

    def equal(self, gold: str, answer: str) -> bool:
        """Whether the formulas are equal; False, with a warning, where that is not found out within the limit."""
        with self._lock:
            if self._process is None or self._process.poll() is not None or self._pid != os.getpid():
                self._start()
            process = self._process
            assert process is not None and process.stdin is not None
            line = None
            with contextlib.suppress(OSError):  # it may have died: then there is no line
                process.stdin.write(json.dumps([gold, answer]) + "\n")
                process.stdin.flush()
                line = self._next(self.limit + GRACE_S)
            if line is None:
                self._end()
                log.warning(
                    "no verdict within %g s: is %.80r equal to %.80r? counted as different", self.limit, answer, gold
                )
                return False
            return bool(json.loads(line))

    def close(self) -> None:
        """End the process; the next question starts another."""
        with self._lock:
            self._end()

    def _start(self) -> None:
        if self._pid == os.getpid():
            self._end()
        # -P: the folder of this file is not searched for modules; own session: Ctrl-C is the parent's to handle
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(self.limit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
            start_new_session=True,
        )
        self._pid, self._lines = os.getpid(), queue.Queue()
        threading.Thread(target=_pump, args=(self._process.stdout, self._lines), daemon=True).start()
        if self._next(START_S) is None:
            self._end()
            raise RuntimeError("the process that compares formulas does not start: python -c 'import math_verify'")

    def _next(self, timeout: float) -> str | None:
        try:
            return self._lines.get(timeout=timeout)
        except queue.Empty:
            return None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._pid == os.getpid():
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError, AttributeError):
                    pipe.close()  # type: ignore[union-attr]


def _pump(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    with contextlib.suppress(ValueError, OSError):  # closed under our feet
        for line in stream:
            lines.put(line)
    lines.put(None)


_worker = Worker()


def equal(gold: str, answer: str) -> bool:
    """Whether an answer equals the gold formula: LaTeX without dollar signs, as `answers.tidy` leaves it."""
    return _worker.equal(gold, answer)


def _serve(limit: float) -> None:
    with contextlib.suppress(ImportError):  # not on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.disable()
    how = [LatexExtractionConfig(), ExprExtractionConfig()]

    def read(formula: str) -> Any:
        return parse(f"${formula}$", how, parsing_timeout=None)

    print("ready", flush=True)
    for line in sys.stdin:
        faulthandler.dump_traceback_later(limit, exit=True)  # a thread in C: it needs neither signals nor the GIL
        try:
            gold, answer = map(read, json.loads(line))
            same = bool(gold and answer and verify(gold, answer, float_rounding=ROUNDING, timeout_seconds=None))
        except Exception:  # whatever SymPy makes of it, there is no equality that it could show
            same = False
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(same), flush=True)


if __name__ == "__main__":
    _serve(float(sys.argv[1]))
