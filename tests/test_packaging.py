"""The wheel holds everything a run needs, and works from another folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel (no network: the build backend is among the development tools)."""
    out = tmp_path_factory.mktemp("dist")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(out),
        str(ROOT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(out.glob("moend-*.whl"))


@pytest.mark.process
def test_the_wheel_is_complete_and_puts_nothing_else_beside_its_packages(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, inside in (
        ("moend", ""),
        ("pipelines", ""),
        ("hydra_plugins", ""),
        ("conf", "moend/"),
        ("sweeps", "moend/"),
    ):
        wanted = {
            inside + str(p.relative_to(ROOT))
            for p in (ROOT / folder).rglob("*")
            if p.is_file() and "__pycache__" not in p.parts and not p.name.startswith(".")
        }
        assert wanted and not wanted - names
    assert "moend/fixtures/recall_moe/model.safetensors" in names
    top = {n.partition("/")[0] for n in names if ".dist-info/" not in n}
    assert top == {"moend", "pipelines", "hydra_plugins"}


@pytest.mark.process
def test_an_unpacked_wheel_works_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "from pathlib import Path; from moend.models import load as models; s = models.spec('recall_moe'); "
        "print(models.__file__, models.available(s, Path('cache')), models.identity(s, Path('cache'))['id'])"
    )
    env = os.environ | {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env, check=False
    )
    assert out.stdout.split() == [str(site / "moend" / "models" / "load.py"), "None", "recall_moe"], out.stderr


@pytest.mark.process
def test_an_unpacked_wheel_plans_and_lists(wheel: Path, tmp_path: Path) -> None:
    """Configurations, sweeps and the Hydra plugin are found where there is no checkout."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    env = os.environ | {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}

    def moend(*args: str) -> str:
        command = [sys.executable, "-m", "pipelines", *args]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "ripple_table2" in moend("list", "sweeps") and "SnapKV" in moend("list", "methods")
    assert "cells:" in moend("run", "+sweep=ripple_table5", "dry_run=true", "-m")


HEAVY = (
    *("wandb", "datasets", "submitit", "matplotlib", "hydra", "omegaconf", "pydantic", "scipy", "rich", "gguf"),
    *("jieba", "math_verify"),
)


@pytest.mark.process
def test_the_library_needs_no_package_of_the_experiments() -> None:
    """With every package of the extra `experiments` out of reach, a method is read and a model's cache compressed."""
    code = f"""
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {HEAVY} else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Without(f) for f in sys.meta_path]
import moend
assert moend.method("SnapKV").name == "SnapKV"
import torch
from tests.tiny import tiny
model = tiny("qwen3")
with moend.compress(model, "SnapKV", "25%", max_new_tokens=4):
    out = model.generate(torch.arange(117)[None] % 50 + 5, max_new_tokens=4, do_sample=False)
assert out.shape[1] >= 118
assert not set(sys.modules) & set({HEAVY})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_constraints_pin_every_dependency_and_fit_any_torch_build() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert all("+" not in version for version in pins.values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [x for group in project["optional-dependencies"].values() for x in group]
    pinned = {name.lower().replace("_", "-") for name in pins}
    for requirement in [*project["dependencies"], *extras]:
        if requirement.startswith("moend["):
            continue
        name = requirement.split(">")[0].split("<")[0].split("=")[0].lower().replace("_", "-")
        assert name in pinned, requirement


@pytest.mark.parametrize("name", ["Dockerfile", "moend.def"])
def test_a_container_installs_what_there_is(name: str) -> None:
    """Nothing is built here: what the recipe names is compared with what the project declares."""
    text = (ROOT / "containers" / name).read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    python = re.search(r"python:(3\.\d+)-slim", text)
    (extras,) = re.findall(r"pip install \S+ -c constraints\.txt -e '\.\[([\w,]+)\]'", text)
    assert python is not None and f">={python[1]}" == project["requires-python"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"]) and "moend" in project["scripts"]
    assert "gcc" in text and "git " in text
