"""Points composed from shared bases are what Hydra composes, point by point, errors included; grids are unions."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from moend import paths
from pipelines.cli.hydra import Point, leaves, open_parts
from pipelines.planning import points
from tests.pipelines import composing
from tests.pipelines.conftest import compose_points

pytestmark = pytest.mark.usefixtures("hydra_itself")


@pytest.fixture(scope="module")
def hydra() -> tuple[Any, Any]:
    """Hydra's loader and the master configuration of a sweep."""
    with initialize_config_dir(str(paths.folder("conf")), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        return loader, loader.load_configuration("run", [], run_mode=RunMode.MULTIRUN)


def outcome(compose: Any) -> tuple[Any, ...]:
    """What came out: the point, or the error as a person would meet it."""
    try:
        point: Point = compose()
    except Exception as e:
        cause = None if e.__cause__ is None else (type(e.__cause__), str(e.__cause__))
        return type(e), str(e), cause
    return list(leaves(point.config)), point.config, point.choices, point.overrides


GROUPS = {
    folder.name: sorted(p.stem for p in folder.glob("*.yaml"))
    for folder in sorted(paths.folder("conf").iterdir())
    if folder.is_dir() and folder.name != "hydra"
} | {"sweep": ["quickstart", "nope"], "benchmark": ["niah", "longbench", "nope"]}
KEYS = [
    "budget", "seed", "dry_run", "question_visible", "method.beta", "method.window", "method.precision.k_bits",
    "method.precision", "method.recent", "method.group", "method",
    "model.arch",
    "model.arch.layers", "model.id", "model.revision", "benchmark.tasks", "benchmark.length", "benchmark.limit",
    "calibration.kl.tokens", "calibration.kl", "calibration.text", "generation.temperature", "paths.store", "paths",
    "engine.max_bytes", "cluster.wait", "tracking.project", "hydra.verbose", "hydra.job.name", "budgett", "method.nope",
    "budget.deep", "nothing.here", "method.precision.0", "sweep", "model.arch.layers.x",
]  # fmt: skip
VALUES = [
    "1", "0", "-3", "2.5", "1e3", "nan", "inf", "true", "False", "null", "abc", "'abc'", '"1"', "''", "10%", "a b",
    "???", "'???'", "[]", "[1,2]", "[a,'b c',null]", "[1,[2]]", "{}", "{a:1}", "{k_bits:4}", "{name:trig,window:3}",
    "${seed}", "'${seed}'", "${oc.env:HOME}", "[${seed}]", "x${seed}y", r"\${seed}", "${nope}", "${hydra:job.num}",
    "${oc.env:NO_SUCH_VARIABLE}", "int(3)", "str(3)", "a,b", "", "/a/b", "64MiB", "[???]", "'a,b=c'", "0x10", "1_000",
]  # fmt: skip
OVERRIDES = st.builds(
    lambda prefix, key, value: f"{prefix}{key}={value}",
    st.sampled_from(["", "", "", "", "", "+", "++", "~"]),
    st.sampled_from(KEYS),
    st.sampled_from(VALUES),
)
CHOICES = st.sampled_from(sorted(GROUPS)).flatmap(
    lambda group: st.sampled_from(GROUPS[group]).map(
        lambda option: f"{'+' if group == 'sweep' else ''}{group}={option}"
    )
)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(["method=1d", "budget=10%", "seed=3", "method.group=32", "benchmark.tasks=[niah]"])
@example(["method.beta=2", "+method.beta=3"])
@example(["method.new=2", "+method.new=3"])
@example(["+method.new=3", "method.new=2"])
@example(["seed=1", "budget=${seed}"])
@example(["paths.store=x", "paths.cache=${paths.store}"])
@example(["method={scorer: null}", "method=1d"])
@example(["model.arch=null", "model.arch.layers=3"])
@example(["model.arch=[1]", "model.arch=2"])
@given(st.lists(CHOICES | OVERRIDES | OVERRIDES, max_size=4))
def test_a_point_is_what_hydra_composes(hydra: tuple[Any, Any], overrides: list[str]) -> None:
    ours = outcome(lambda: points.compose(*hydra, [overrides])[0])
    theirs = outcome(lambda: points.by_hydra(*hydra, 0, overrides))
    assert repr(ours) == repr(theirs)  # repr: a nan equals itself, and 1, 1.0 and True differ


def test_points_share_nothing_and_stand_in_order(hydra: tuple[Any, Any]) -> None:
    wanted = [[f"method={m}", f"budget={b}"] for m in ("1d", "SnapKV") for b in (1, 2)]
    made = points.compose(*hydra, wanted)
    assert [list(p.overrides) for p in made] == wanted
    assert [p.index for p in made] == [0, 1, 2, 3]
    made[0].config["method"]["precision"]["k_bits"] = 2
    assert made[1].config["method"]["precision"]["k_bits"] == 16


@pytest.mark.parametrize(
    "args",
    [
        ["method=full,SnapKV", "budget=10%,512", "seed=1", "-m"],
        ["-m", "+sweep=quickstart", "budget=5%", "paths.store=/a b"],
        ["method=RippleKV", "method.scorer.name=tova", "++method.allocator.r=1", "benchmark.tasks=[a,b]"],
    ],
)
def test_what_the_tests_compose_is_what_hydra_hands_over(args: list[str]) -> None:
    """Most tests of the programs take the short way of tests/pipelines/composing.py."""
    ordered = [*(a for a in args if a == "-m"), *open_parts([a for a in args if a != "-m"])]
    ours, theirs = composing.composed(ordered), compose_points(args)
    assert ours == theirs and len(theirs) > 0
    assert [list(leaves(p.config)) for p in ours] == [list(leaves(p.config)) for p in theirs]


JOINT = {"name": "joint"}
RIPPLE = {"name": "ripple", "r": 1.5, "gamma": 4.0, "signal": "output"}
SNAP = {"name": "snapkv", "window": 32, "pool": "avg", "kernel": 5}


@pytest.mark.parametrize(
    ("overrides", "scorer", "allocator"),
    [
        (["method=SnapKV"], SNAP, {"name": "uniform"}),
        (["method=SnapKV", "method.scorer.window=8"], SNAP | {"window": 8}, {"name": "uniform"}),
        (["method=SnapKV", "method.scorer.name=snapkv"], SNAP, {"name": "uniform"}),
        (["method=SnapKV", "method.scorer.name=kvzip"], {"name": "kvzip"}, {"name": "uniform"}),
        (["method.scorer.mode=recon", "method.scorer.name=moezip"], {"name": "moezip", "mode": "recon"}, JOINT),
        (["method=SnapKV", "method.scorer={name:tova}"], {"name": "tova"}, {"name": "uniform"}),
        (["method=SnapKV", "method.scorer=null", "method.allocator=all"], None, {"name": "all"}),
        (["method=RippleKV", "method.allocator.r=1"], SNAP, RIPPLE | {"r": 1}),
        (["method=RippleKV", "method.allocator=adaptive"], SNAP, {"name": "adaptive"}),
        (["method=2d_hetero", "method.allocator.keeps=[0.5,1]"], {"name": "trig"}, JOINT | {"keeps": [0.5, 1]}),
        (["method=full", "method.scorer.name=tova", "method.allocator=uniform"], {"name": "tova"}, {"name": "uniform"}),
    ],
)
def test_another_name_replaces_a_part_with_its_settings(overrides: list[str], scorer: Any, allocator: Any) -> None:
    (point,) = compose_points(overrides)
    assert (point.config["method"]["scorer"], point.config["method"]["allocator"]) == (scorer, allocator)
    assert list(point.overrides) == overrides


def test_options_are_composed_once(hydra: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    loader, master = hydra
    real, calls = loader.load_sweep_config, []
    monkeypatch.setattr(loader, "load_sweep_config", lambda m, o: calls.append(list(o)) or real(m, o))
    made = points.compose(loader, master, [[f"method={m}", f"seed={s}"] for m in ("1d", "2d") for s in range(50)])
    assert len(made) == 100
    assert calls == [["method=1d"], ["method=2d"]]
    calls.clear()
    points.compose(loader, master, [["seed=1", "budget=${seed}"], ["seed=2", "budget=${seed}"]])
    assert calls.count(["seed=1", "budget=${seed}"]) == 1  # what is not plain goes to Hydra as it is


def test_grids_are_joined_and_typed_values_replace_an_axis_in_all() -> None:
    params = {"benchmark": "niah"}
    grids = [{"method": "1d,2d", "budget": "10%,20%"}, {"method": "full", "seed": "range(2)"}, {"method": "2d"}]
    made = [set(p) for p in points.expand(params, grids, [])]
    assert len(made) == 7
    assert {"benchmark=niah", "method=2d", "budget=20%"} in made
    assert {"benchmark=niah", "method=full", "seed=1"} in made
    typed = [set(p) for p in points.expand(params, grids, ["budget=5%", "benchmark=niah,recall"])]
    assert {frozenset(x for x in p if x.startswith("budget")) for p in typed} == {frozenset({"budget=5%"})}
    assert len(typed) == 8  # 1d and 2d, two seeds of full, for two benchmarks; 2d once more is there already
    assert points.expand({}, [], []) == [[]]
    assert points.expand({"method.window": None}, [], []) == [["method.window=null"]]


def test_a_mistake_in_any_grid_is_told() -> None:
    with pytest.raises(OverrideParseException):
        points.expand({}, [{"budget": "10%,"}], [])
    with pytest.raises(HydraException, match=re.escape("deleting keys (~key)")):
        points.expand({}, [{"method": "1d"}], ["~seed"])


def test_the_command_line_goes_through_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = points.by_hydra
    monkeypatch.setattr(points, "by_hydra", lambda *a: calls.append(a) or real(*a))
    assert len(compose_points(["+sweep=demo", "-m"])) == 56
    assert not calls
    assert [p.config["budget"] for p in compose_points(["seed=1,2", "budget='${seed}'", "-m"])] == [1, 2]
    assert len(calls) == 2


def test_references_are_followed_while_nobody_touches_them(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").write_text("a: 1\nb: ${a}\nc: {d: '${oc.env:HOME}', e: '${c.d}'}\nf: ${c}\ng: 7\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        master = loader.load_configuration("run", [], run_mode=RunMode.MULTIRUN)
    real, calls = points.by_hydra, []
    for overrides, shared in {
        (): True, ("g=8",): True, ("b=3",): True, ("c.e=5",): False, ("a=2",): False, ("c.d=4",): False,
        ("f=6",): True, ("f.d=9",): False, ("g=1", "a=2", "b=3"): False, ("c={d: 1}",): False,
    }.items():  # fmt: skip
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(points, "by_hydra", lambda *a: calls.append(a) or real(*a))
            ours = outcome(lambda o=overrides: points.compose(loader, master, [o])[0])
        assert ours == outcome(lambda o=overrides: real(loader, master, 0, o))
        assert not calls if shared else calls, overrides


@pytest.mark.process
def test_help_that_is_not_read_to_its_end_is_no_mistake() -> None:
    code = "import sys; from pipelines.run import main; print('x' * 100_000); sys.exit(main(['--help']))"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        cwd=paths.folder("conf").parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None and run.stderr is not None
        run.stdout.read(100_001)
        run.stdout.close()
        assert run.stderr.read() == ""
    assert run.returncode == 141
