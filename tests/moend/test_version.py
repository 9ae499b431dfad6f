"""Versions of other libraries that moend was not tested with are told in one line, once."""

from __future__ import annotations

import importlib.metadata

import pytest

from moend.version import warn_untested

DECLARED = ["torch<2.14,>=2.13", "hydra-core<1.4,>=1.3.2; extra == 'experiments'"]


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: DECLARED)
    warn_untested.cache_clear()


@pytest.mark.parametrize(("library", "version", "fits"), [
    ("torch", "2.13.0+cpu", True), ("torch", "2.12.1", False), ("torch", "2.14.0.dev1", False),
    ("hydra-core", "1.3.8", True), ("hydra-core", "1.4.0", False), ("numpy", "9.0", True),
])  # fmt: skip
def test_the_line_names_both_versions_and_the_fix(
    library: str, version: str, fits: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    warn_untested(library)
    warn_untested(library)
    err = capsys.readouterr().err
    if fits:
        assert err == ""
    else:
        assert err.startswith(f"warning: moend is not tested with {library} {version}: pip install '{library}<")
        assert err.count("\n") == 1


def test_what_is_not_installed_is_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    warn_untested("no-such-library")
    assert capsys.readouterr().err == ""
