"""A measurement that is interrupted goes on where it was, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moend.calibration import saved as module
from moend.calibration.agreement import token_agreement
from moend.calibration.damage import damage_table
from moend.calibration.kl import kl_table
from moend.calibration.rerun import Evictor
from moend.calibration.ripple import Noise, profile
from moend.calibration.saved import Saved
from moend.calibration.sensitivity import measure
from moend.layer_bytes import Storage
from moend.plan import Config
from moend.scoring import scorer
from tests.tiny import tiny

CONFIGS = (Config(0.5, 16, 16), Config(1.0, 4, 4))
BASE = Evictor(scorer("snapkv", window=4), 2, 4)


def draw_ids(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, 90, (rows, length), generator=torch.Generator().manual_seed(seed))


def storage(cap: int, k_bits: int, v_bits: int) -> Storage:
    return Storage(k_bits, v_bits, group=4, window=4)


def sensitivity(saved: Saved) -> dict[str, torch.Tensor]:
    return measure(tiny("llama"), draw_ids(1, 30), CONFIGS, scorer=BASE.scorer, saved=saved).tensors()


def kl(saved: Saved) -> dict[str, torch.Tensor]:
    return kl_table(tiny("llama"), draw_ids(2, 30), CONFIGS, positions=5, scorer=BASE.scorer, saved=saved).tensors()


def damage(saved: Saved) -> dict[str, torch.Tensor]:
    texts = {"text": draw_ids(2, 36), "recall": draw_ids(2, 36, seed=1)}
    return damage_table(tiny("llama"), texts, 6, CONFIGS, BASE, storage, saved=saved).tensors()


def ripple(saved: Saved) -> dict[str, torch.Tensor]:
    noises = (Noise(0.3), Noise(0.1, 1))
    return profile(tiny("llama"), draw_ids(3, 36), 6, BASE, noises=noises, keeps=(0.4,), saved=saved).tensors()


def agreement(saved: Saved) -> dict[str, torch.Tensor]:
    return {"hits": token_agreement(tiny("llama"), draw_ids(3, 30), 6, storage, dtype=torch.float32, saved=saved)}


@pytest.fixture
def each_step_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.0)


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """A signal once so many steps are written."""
    plain, count = Saved._save, 0

    def save(self: Saved) -> None:
        nonlocal count
        plain(self)
        count += 1
        if count == after:
            raise KeyboardInterrupt

    monkeypatch.setattr(Saved, "_save", save)


@pytest.mark.req(16)
@pytest.mark.usefixtures("each_step_is_written")
@pytest.mark.parametrize("kind", [sensitivity, kl, damage, ripple, agreement])
def test_an_interrupted_measurement_goes_on_bit_for_bit(
    tmp_path: Path, kind: Callable[[Saved], dict[str, torch.Tensor]]
) -> None:
    whole = kind(Saved())
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, 2)
        kind(Saved(tmp_path, {"of": 1}))
    rest = Saved(tmp_path, {"of": 1})
    assert rest.found == 2
    resumed = kind(rest)
    assert resumed.keys() == whole.keys() and all(torch.equal(resumed[k], whole[k]) for k in whole)
    all_there = Saved(tmp_path, {"of": 1})
    again = kind(all_there)
    assert all(torch.equal(again[k], whole[k]) for k in whole)
    rest.remove()
    assert not list(tmp_path.iterdir())


def numbers(saved: Saved, measured: list[int], stop: int | None = None) -> list[float]:
    def run(todo):
        for i in todo:
            if i == stop:
                raise RuntimeError("stop")
            measured.append(i)
            yield {"x": torch.tensor([i / 3])}

    return [step["x"].item() for step in saved.steps([str(i) for i in range(4)], run)]


@pytest.mark.usefixtures("each_step_is_written")
def test_what_was_measured_of_something_else_or_is_damaged_is_measured_anew(tmp_path: Path) -> None:
    measured: list[int] = []
    with pytest.raises(RuntimeError):
        numbers(Saved(tmp_path, {"engine": 3}), measured, stop=3)
    assert Saved(tmp_path, {"engine": 4}).found == 0
    assert Saved(tmp_path, {"engine": 3}).found == 3
    file = tmp_path / "partial" / "1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    whole = numbers(Saved(tmp_path, {"engine": 3}), measured)
    assert measured == [0, 1, 2, 1, 2, 3] and whole == numbers(Saved(), [])


def test_a_short_measurement_writes_nothing(tmp_path: Path) -> None:
    numbers(Saved(tmp_path), [])
    assert not list(tmp_path.iterdir())
