"""What holds for every test."""

from __future__ import annotations

import gc

import pytest

# What touches private parts of transformers, Hydra, OmegaConf, pydantic, submitit and wandb: marked `versions`.
VERSIONS = (
    "tests/moend/hf/",
    "tests/pipelines/cli/test_compose.py",
    "tests/pipelines/cluster/test_submit.py",
    "tests/pipelines/planning/test_configs.py",
    "tests/pipelines/tracking/test_tracking.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(VERSIONS):
            item.add_marker("versions")


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collection: looking through torch and Hydra again and again takes a sixth
    of the suite. A test that is about memory collects itself."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
