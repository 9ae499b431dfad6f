"""Compiled code is kept from one run of the tests to the next, and no test waits for the compiler."""

from pathlib import Path

from moend.cache import compiled

compiled.keep_in(Path.home() / ".cache" / "moend")
compiled.kernels()
