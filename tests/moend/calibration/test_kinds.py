"""The kinds of calibration that there are, and one of one's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moend.calibration import Artefact, Bench, Calibration, Target, figure, kind, kinds
from moend.errors import UserError

OWN = """
from dataclasses import dataclass
import torch
from moend.calibration.base import Kind, whole

@dataclass(frozen=True)
class Settings:
    times: int = 3

    def __post_init__(self):
        whole(self, "calibration.own.norms", times=1)

class Norms(Kind):
    version = 4
    settings = Settings

    def identity(self, target):
        return {"times": target.calibration.of("own.norms").times}

    def measure(self, target, bench):
        norms = bench.prompt.float().norm(dim=-1) * target.calibration.of("own.norms").times
        return {"norms": norms}, {"tokens": bench.prompt.numel()}

    def figure(self, artefact):
        return {"largest": float(artefact.tensors["norms"].max())}

KIND = Norms()
"""


def test_names_and_what_they_say_of_themselves() -> None:
    assert kinds() == ("agreement", "damage", "kl", "queries", "ripple", "sensitivity")
    assert all(kind(name).name == name for name in kinds())
    assert [name for name in kinds() if kind(name).makes_plans] == ["damage", "kl", "ripple", "sensitivity"]
    assert [name for name in kinds() if kind(name).vouches] == ["agreement"]
    with pytest.raises(UserError, match=r"unknown calibration 'rippel'\. Did you mean 'ripple'"):
        kind("rippel")


def test_one_of_ones_own_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings, identity, measurement and figure of a module outside the package."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "norms.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    made, name = kind("own.norms"), "own.norms"
    settings = Calibration.from_fields({name: {"times": 2}, "seeds": [1]})
    target = Target(settings, SimpleNamespace(), SimpleNamespace(calibration_text="x", chat_template=None))
    assert made.identity(target) == {"times": 2} and made.version == 4
    assert made.texts(target) == {"text": "x", "chat_template": None}
    tensors, info = made.measure(target, Bench(SimpleNamespace(), torch.tensor([[3, 4]])))
    Artefact(name, made.identity(target), tensors, info).save(tmp_path / "x")
    assert figure(tmp_path / "x", name) == {"largest": 10.0}
    with pytest.raises(UserError, match=r"calibration\.own\.norms\.times must be a whole number >= 1, got 0"):
        Calibration.from_fields({name: {"times": 0}})
    with pytest.raises(UserError, match=r"unknown calibration\.own\.norms field 'time'\. Did you mean 'times'"):
        Calibration.from_fields({name: {"time": 1}})
