"""What holds for every test."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collection: looking through torch and Hydra again and again takes a sixth
    of the suite. A test that is about memory collects itself."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
