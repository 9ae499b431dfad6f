"""Compiled code is kept from one run of the tests to the next."""

from pathlib import Path

from moend.cache import compiled

compiled.keep_in(Path.home() / ".cache" / "moend")
