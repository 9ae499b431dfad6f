"""Keys: canonical, stable, opt-out."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moend.errors import UserError
from pipelines.cli.hydra import leaves
from pipelines.planning import identity
from pipelines.planning.facts import Planner
from pipelines.planning.schema import validate
from tests.pipelines.conftest import compose_points

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    max_leaves=12,
)


@given(JSON)
def test_canonical_is_stable_under_a_round_trip(value: Any) -> None:
    text = identity.canonical(value)
    assert identity.canonical(json.loads(text)) == text


def test_canonical_refuses_what_it_cannot_write_twice() -> None:
    for bad in ({1, 2}, {"a": math.nan}, math.inf, {1: 2}, b"x", object(), {"a": {3}}):
        with pytest.raises(TypeError):
            identity.canonical(bad)


def test_order_and_whole_floats_do_not_matter() -> None:
    assert identity.key({"a": 1, "b": [1.0, 2]}) == identity.key({"b": [1, 2.0], "a": 1.0})
    assert identity.key({"a": True}) != identity.key({"a": 1})
    assert identity.key(None) == "74234e98afe7498f"  # pinned: a changed encoder would orphan every result


def _payload(config: dict[str, Any], **kinds: bool) -> dict[str, Any]:
    flags = {"is_full": False, "is_nll": False, **kinds}
    return identity.cell_payload(config, {"model": "m", "method": 1}, {}, **flags)


def test_every_field_enters_the_key_unless_declared_run_only() -> None:
    config = compose_points(["method=2d_hetero"])[0].config
    before = identity.key(_payload(config))
    paths = [p for p in leaves(config) if not isinstance(_get(config, p), dict)]
    assert len(paths) > 40
    for path in paths:
        changed = json.loads(json.dumps(config))
        _set(changed, path, "something else")
        run_only = any(path == r or path.startswith(r + ".") for r in identity.RUN_ONLY)
        assert (identity.key(_payload(changed)) == before) == run_only, path


def test_an_unknown_new_field_enters_the_key() -> None:
    config = compose_points([])[0].config
    assert identity.key(_payload({**config, "new_knob": 1})) != identity.key(_payload(config))


def test_what_means_nothing_to_a_cell_is_not_in_its_key() -> None:
    a, b = compose_points(["budget=512,10%"])
    assert identity.key(_payload(a.config, is_full=True)) == identity.key(_payload(b.config, is_full=True))
    seen, unseen = compose_points(["question_visible=true,false"])
    assert identity.key(_payload(seen.config, is_nll=True)) == identity.key(_payload(unseen.config, is_nll=True))
    assert identity.key(_payload(seen.config)) != identity.key(_payload(unseen.config))


def test_the_group_leaves_out_method_and_budget_only() -> None:
    points = compose_points(["method=1d,SnapKV", "budget=512,10%", "seed=0,1"])
    groups = {identity.key(identity.group_payload(_payload(p.config))) for p in points}
    assert len(groups) == 2  # one per seed


@pytest.mark.req(18)
def test_a_difference_is_told_field_by_field() -> None:
    a, b = {"x": {"y": 1, "z": 2}, "w": 0}, {"x": {"y": 3, "z": 2}, "v": 1}
    assert identity.differences(a, b) == ["v: has nothing, needs 1", "w: has 0, needs nothing", "x.y: has 1, needs 3"]
    with pytest.raises(UserError, match=r"x\.y: has 1, needs 3"):
        identity.refuse_difference(a, b, "file")
    identity.refuse_difference(a, {"w": 0.0, "x": {"z": 2, "y": 1}}, "file")


def _get(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = config[part]
    return config


def _set(config: Any, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for part in parents:
        config = config[part]
    config[last] = value


def test_a_benchmark_counts_by_its_samples_not_by_how_they_were_asked_for() -> None:
    points = compose_points(["benchmark=niah", "benchmark.length=512", "benchmark.rows=3,4", "benchmark.limit=3,4"])
    facts = [Planner().facts(validate(p), p.choices) for p in points]
    assert [len(f.expected) for f in facts] == [3, 4, 3, 4]
    assert facts[0].identity == facts[2].identity != facts[1].identity == facts[3].identity
