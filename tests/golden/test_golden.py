"""The committed golden records hold: see tests/golden/records.py."""

from __future__ import annotations

import pytest

from tests.golden import records


def test_records_are_of_this_engine() -> None:
    version, _ = records.read()
    assert version == records.engine_version(), (
        f"tests/golden/records.json is of engine version {version}, the engine is {records.engine_version()}: "
        "run python -m tests.golden.records"
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", records.MODELS)
def test_records_did_not_change(model: str) -> None:
    """Every method generates, holds and keeps on this model what the records say.

    On another CPU a few scores that are nearly equal may change places.
    """
    _, old = records.read()
    old = {key: r for key, r in old.items() if key.split(" | ")[0] == model}
    new = records.compute(model)
    changes = records.changed(old, new)
    equal = records.ties(old, new, changes)
    if len(equal) <= records.TIES * len(old):
        changes = {key: fields for key, fields in changes.items() if key not in equal}
    if changes:
        pytest.fail(
            f"{len(changes)} of {len(old)} golden records of {model} changed, by method | schedule | bits (if that is "
            f"meant: python -m tests.golden.records):\n{records.grouped(changes)}",
            pytrace=False,
        )


def test_changes_are_named() -> None:
    """A changed field, a new and a missing case are named; a rounding of the likelihood is not a change."""
    key = "m | short | H2O | every | K16/V16 | 25% | matched | seen"
    old = {key: {"tokens": [1], "nll": 0.5, "peak": 10}, key + "a": {"tokens": []}}
    new = {key: {"tokens": [1], "nll": 0.5001, "peak": 12}, key + "b": {"tokens": []}}
    changes = records.changed(old, new)
    assert changes == {key: ["peak"], key + "a": ["case is gone"], key + "b": ["new case"]}
    assert "H2O | every | K16/V16: 3 cases (peak, case is gone, new case)" in records.grouped(changes)
    assert records.table(changes).splitlines()[1].split()[-1] == "peak"
    assert not records.changed(old, old)


def test_a_tie_is_one_layer_at_the_end_of_the_answer() -> None:
    """Another first token, and two layers that end otherwise, are no ties."""
    old = {c: {"tokens": [1], "kept_end": ["a", "b"]} for c in "xyz"}
    new = {
        "x": {"tokens": [1], "kept_end": ["a", "c"]},
        "y": {"tokens": [2], "kept_end": ["a", "c"]},
        "z": {"tokens": [1], "kept_end": ["c", "c"]},
    }
    assert records.ties(old, new, records.changed(old, new)) == {"x"}
