"""Processes of a test's own without the seconds that Python, torch and Hydra take to start: forks of the test process.

A fork has everything imported, a pid, leases and signals of its own; what it patches stays in it. Where the start
itself is the point (what is imported, which folder is found), a test starts an interpreter.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence

from tests import ROOT


class Forked:
    """A running program, in the words of `subprocess.Popen`: what it prints and its errors come out of `stdout`."""

    def __init__(self, code: str, args: Sequence[str], env: Mapping[str, str] | None = None):
        """Run lines of Python with `args` as its command line and `env` on top of the environment."""
        sys.stdout.flush()
        sys.stderr.flush()
        reads, writes = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _child(compile(code, "<forked>", "exec"), args, env or {}, writes)
        os.close(writes)
        self.stdout = os.fdopen(reads, encoding="utf-8", errors="replace")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        """The exit code, minus the signal's number where one ended it; None while it runs."""
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def communicate(self, timeout: float = 120) -> tuple[str, None]:
        """What was printed and not read yet, once the process has ended; one that takes longer is killed."""
        late = threading.Event()

        def end() -> None:
            late.set()
            self.send_signal(signal.SIGKILL)

        timer = threading.Timer(timeout, end)
        timer.start()
        try:
            with self.stdout:
                out = self.stdout.read()
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        finally:
            timer.cancel()
        if late.is_set():
            raise subprocess.TimeoutExpired("a fork of the test process", timeout, out)
        return out, None


def _child(code: object, args: Sequence[str], env: Mapping[str, str], writes: int) -> None:
    """The life of the fork, which never comes back."""
    end = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(writes, 1)
        os.dup2(writes, 2)
        os.close(writes)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background ignore it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(ROOT)
        os.environ.update(env)
        sys.argv = ["-c", *args]
        exec(code, {"__name__": "__main__"})  # type: ignore[call-overload]
        end = 0
    except SystemExit as e:
        end = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end)
