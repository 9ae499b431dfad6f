"""Every YAML composes and binds; every mistake is one line and exit code 2, with nothing written."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moend import paths
from moend.methods import spec as methods
from pipelines import run
from pipelines.cli.hydra import Point
from pipelines.planning import identity
from pipelines.planning.parts import parts
from pipelines.planning.schema import validate
from tests import ROOT
from tests.pipelines.conftest import Runs, compose_points

OPTIONS = [
    f"{folder.name}={path.stem}"
    for folder in sorted(paths.folder("conf").iterdir())
    if folder.is_dir() and folder.name != "hydra"
    for path in sorted(folder.glob("*.yaml"))
]


@functools.cache
def group_points(group: str) -> dict[str, Point]:
    """The point of each option of a group, composed by one command; `model=hf` needs a name beside it."""
    options = [o.partition("=")[2] for o in OPTIONS if o.startswith(f"{group}=") and o != "model=hf"]
    found = compose_points([f"{group}={','.join(options)}", "dry_run=true", "-m"])
    if group == "model":
        found += compose_points(["model=hf", "model.id=owner/name", "dry_run=true"])
    return {f"{group}={point.choices[group]}": point for point in found}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes_and_binds(option: str) -> None:
    point = group_points(option.partition("=")[0])[option]
    config = validate(point)
    spec, method, bench = parts(config)
    assert (spec.name, method.name, bench.name) == tuple(point.choices[g] for g in ("model", "method", "benchmark"))
    identity.canonical(config.model_dump())


def test_run_yaml_lists_every_method_field_with_its_default() -> None:
    (point,) = compose_points(["method=full"])
    fields = {f.name: f for f in dataclasses.fields(methods.Method)}
    assert set(point.config["method"]) == set(fields)
    plain = methods.Method(name="full", allocator="all")
    composed = methods.from_fields(point.config["method"])
    assert composed == dataclasses.replace(plain, version=composed.version)


BAD = {
    "hydra.job.chdir=true": "hydra.job.chdir has no effect here",
    "hydra.sweep.dir=/tmp/x": "hydra.sweep.dir has no effect here",
    "dry_run=ful": "unknown dry_run 'ful'. Did you mean 'full'?",
    "method=Snapkv": "unknown method 'Snapkv'. Did you mean 'SnapKV'?",
    "method=2d_heter": "Did you mean '2d_hetero'?",
    "model=smollm": "unknown model 'smollm'. Did you mean 'smollm2_135m'?",
    "benchmark=naih": "unknown benchmark 'naih'. Did you mean 'niah'?",
    "+swep=quickstart": "there is no configuration key 'swep'. Did you mean '+sweep=<name>'?",
    "swep=quickstart": "there is no configuration key 'swep'. Did you mean '+sweep=<name>'?",
    "+sweep=quickstrat": "unknown sweep 'quickstrat'. Did you mean 'quickstart'?",
    "sweep=quickstart": "sweeps are added: +sweep=<name>",
    "budget=0": "budget '0' must be positive",
    "budget=-1": "budget '-1'",
    "budget=abc": "budget 'abc' is not understood",
    "budget=": "budget ''",
    "budget=512,abc": "budget 'abc'",
    "budget=true": "budget 'True'",
    "cluster.gpu=1": "there is no configuration key 'cluster.gpu'. Did you mean 'cluster.gpus'?",
    "cluster.gpus=1": "there is no configuration key 'cluster.gpus' here; with cluster=slurm there is",
    "budgett=3": "there is no configuration key 'budgett'. Did you mean 'budget'?",
    "+bugdet=5": "there is no configuration key 'bugdet'. Did you mean 'budget'?",
    "benchmrk=niah": "Did you mean 'benchmark'?",
    "generation.temprature=1": "Did you mean 'generation.temperature'?",
    "+generation.temprature=1": "Did you mean 'generation.temperature'?",
    "method.allocator.slver=exact": "unknown setting of allocator joint 'slver'. Did you mean 'solver'?",
    "method.allocator.solver=exakt": "unknown method.allocator.solver 'exakt'. Did you mean 'exact'?",
    "method.beta=abc": "method.beta: input should be a valid number",
    "model.dtype=int3": "unknown model.dtype 'int3'",
    "generation.samples=0": "generation.samples: input should be greater than or equal to 1, got 0",
    "generation.thinking=of": "unknown generation.thinking 'of'. Did you mean 'off'?",
    "generation.thinking=on": "generation.thinking=on: prompts of niah begin the answer",
    "benchmark.phrasing=99": "unknown benchmark.phrasing '99'",
    "benchmark.split=calibration": "wordings and topics are for tests only",
    "benchmark.questions_per_context=0": "benchmark.questions_per_context=0 must be a whole number of at least 1",
    "benchmark.questions_per_context=2": "asks for more needles than benchmark.keys=1 hides",
    "benchmark.turns=true": "benchmark.turns=true needs benchmark.questions_per_context of at least 2",
    "question_visible=1": "question_visible: input should be a valid boolean, got 1",
    "budget_protocol=mached": "unknown budget_protocol 'mached'. Did you mean 'matched'?",
    "seed=${oc.env:NO_SUCH_VARIABLE}": "NO_SUCH_VARIABLE",
    "~method": "deleting keys",
    "budget=10%,": "cannot read 'budget=10%,'",
    "benchmark.length=9000": "the model has 8192",
    "benchmark.limit=0": "benchmark.limit=0",
    "model=hf": "needs model.id=",
    "method.n_sink=-1": "method.n_sink must be a whole number >= 0",
    "budget=1": "the smallest budget it can meet is",
    "=3": "cannot compose this command (ValueError: ",
    "method=1e3": "cannot compose this command (ValueError: Config group override must be a string",
    "method={a: 1}": "Could not override 'method'",
    "hydra/launcher=basic": "hydra/launcher cannot be changed",
    "hydra.mode=RUN": "hydra.mode cannot be changed",
    "--foo": "unrecognized arguments: --foo",
    "paths.cache=~/c": "put the value in quotes of its own: \"paths.cache='~/c'\"",
}


@pytest.mark.req(11)
@pytest.mark.parametrize("argument", BAD)
def test_a_mistake_is_one_line_and_writes_nothing(
    argument: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    assert run.main([f"paths.store={store}", "tracking=none", argument]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert BAD[argument] in err
    assert not out
    assert not store.exists()


def test_a_large_budget_is_allowed(runs: Runs) -> None:
    assert runs("budget=1e9", "method=1d") == 0


@pytest.mark.req(16)
def test_unwritable_places_are_one_line(runs: Runs, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    runs.store = blocker / "store"
    assert runs("method=1d") == 2
    assert runs.err.startswith(f"error: cannot write {blocker}")
    if os.geteuid() != 0:  # root writes everywhere
        locked = tmp_path / "locked"
        locked.mkdir(mode=0o500)
        runs.store = locked / "store"
        assert runs("method=1d") == 2


def test_a_full_disk_is_one_line_and_resumes(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    real, count = os.write, [0]

    def write(fd: int, data: bytes) -> int:
        count[0] += data.startswith(b'{"task"')
        if count[0] > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    assert runs("method=1d") == 1
    assert "No space left on device" in runs.err
    assert runs.err.count("\n") == 1
    monkeypatch.setattr(os, "write", real)
    before = runs.library.prefills
    assert runs("method=1d") == 0
    assert runs.library.prefills - before == 4


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--help"]) == 0
    out = capsys.readouterr().out
    for word in ("method: ", "2d_hetero", "budget: ", "+sweep=quickstart", "Exit codes"):
        assert word in out


@pytest.mark.parametrize("verb", ["run", "calibrate", "prefetch"])
def test_each_program_has_a_help_of_its_own(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module(f"pipelines.{verb}").main
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"^ *python -m pipelines\.{verb} ", out, re.M)
    assert "method: " in out
    assert "Exit codes" in out


@pytest.mark.process
def test_help_and_mistakes_import_no_torch() -> None:
    code = (
        "import sys; from pipelines import run; "
        "assert run.main(['method=nope']) == 2 and run.main(['budgett=1']) == 2 and run.main(['--help']) == 0; "
        "assert 'torch' not in sys.modules and 'wandb' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)


@pytest.mark.process
def test_status_is_light_and_planning_needs_no_compiler() -> None:
    """What is slow to import is left to those who use it."""
    light = (
        "import sys, pipelines.status, pipelines.cluster.worker; "
        "assert not {'torch', 'scipy', 'matplotlib'} & set(sys.modules)"
    )
    plan = "import sys, moend.methods.bind; assert not {'torch._dynamo', 'scipy.stats'} & set(sys.modules)"
    for code in (light, plan):
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)


def test_no_litter(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert runs("method=1d,full", "-m") == 0
    assert runs("method=1d", "dry_run=true") == 0
    assert [p.name for p in tmp_path.iterdir()] == ["store"]
    assert sorted(p.name for p in runs.store.iterdir()) == ["cells", "reports", "sweeps"]


def test_relative_paths_from_any_folder(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs.store = Path("here")
    assert runs("method=1d") == 0
    assert (tmp_path / "here" / "cells").is_dir()
