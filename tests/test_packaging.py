"""The wheel holds everything a run needs, and works from another folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


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


def test_the_wheel_is_complete(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in ("moend", "pipelines", "hydra_plugins", "conf", "sweeps"):
        wanted = {
            str(p.relative_to(ROOT))
            for p in (ROOT / package).rglob("*")
            if p.is_file() and "__pycache__" not in p.parts and not p.name.startswith(".")
        }
        assert wanted and not wanted - names
    assert "moend/fixtures/recall_moe/model.safetensors" in names
    assert not [n for n in names if n.startswith(("tests/", "docs/", "perf/"))]


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


def test_constraints_pin_every_dependency_and_fit_any_torch_build() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert all("+" not in version for version in pins.values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [x for group in project["optional-dependencies"].values() for x in group]
    pinned = {name.lower().replace("_", "-") for name in pins}
    for requirement in [*project["dependencies"], *extras]:
        name = requirement.split(">")[0].split("<")[0].split("=")[0].lower().replace("_", "-")
        assert name in pinned, requirement
