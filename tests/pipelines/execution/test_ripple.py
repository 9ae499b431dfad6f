"""RippleKV through the programs: a profile of the small trained model, its table, picture and cells."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipelines import calibrate, run
from pipelines.reporting import report
from pipelines.reporting.figures import ripple_profile

SMALL = [
    "model=recall_moe",
    "benchmark=recall",
    "benchmark.limit=1",
    "benchmark.tasks=[num,pass]",
    "tracking=none",
    "calibration=recall",
    "calibration.ripple.examples=2",
    "calibration.ripple.prefix=128",
    "calibration.ripple.window=32",
    "budget=30%",
]


@pytest.mark.slow
@pytest.mark.req(20)
def test_a_profile_is_measured_shown_drawn_and_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = [f"paths.store={tmp_path}", *SMALL]
    measured = [*store, "method=RippleKV", "calibration.ripple.damage=[0.2]", "calibration.ripple.stability=true"]
    assert calibrate.main(measured) == 0
    out = capsys.readouterr().out
    assert "|Spearman| with the damage at 20% kept: output " in out
    assert "Spearman of the profile with itself under: " in out
    assert all(f"{noise}, seed 0 " in out for noise in ("noise 0.1", "noise 0.15", "noise 0.6", "noise 1.2"))
    (folder,) = (tmp_path / "reports").iterdir()
    assert {"plan.json", "ripple", "ripple_profile.png"} <= {p.name for p in folder.iterdir()}
    meta = json.loads((folder / "ripple" / "artefact.json").read_text())
    assert meta["identity"]["settings"]["relative_noise"] == 0.3
    assert meta["identity"]["settings"]["recent"] == 32
    damage = meta["info"]["damage"]["0.2"]["mean"]
    assert damage.index(max(damage)) == 2  # the layer that does the retrieval
    kept = [x["keep"] for x in json.loads((folder / "plan.json").read_text())["layers"]]
    assert kept.index(max(kept)) == 2

    assert run.main([*store, "method=SnapKV,PyramidKV,RippleKV,H2O", "-m"]) == 0
    results = [json.loads(p.read_text()) for p in (tmp_path / "cells").glob("*/result.json")]
    held = {r["method"]: r["resident_bytes"] for r in results}
    assert set(held) == {"SnapKV", "PyramidKV", "RippleKV", "H2O"}
    assert held["SnapKV"] == held["PyramidKV"] == held["RippleKV"] >= held["H2O"]


def test_what_the_model_does_not_know_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["method=RippleKV", "calibration=default", "calibration.ripple.text=text", f"paths.store={tmp_path}"]
    assert calibrate.main([x for x in SMALL if "calibration" not in x] + [*wrong, "calibration.ripple.prefix=512"]) == 2
    assert "does not know the words of the text: set calibration.ripple.text" in capsys.readouterr().err
    too_long = [*SMALL, f"paths.store={tmp_path}", "method=RippleKV", "calibration.ripple.prefix=1000"]
    assert calibrate.main(too_long) == 2
    assert "1000 + 32 tokens are more than the 1024 positions" in capsys.readouterr().err


@pytest.mark.parametrize("layers", [1, 4, 64])
@pytest.mark.parametrize("measured", [True, False])
def test_pictures_of_any_profile(tmp_path: Path, layers: int, measured: bool) -> None:
    rng = np.random.default_rng(0)
    response, local = rng.lognormal(size=(5, layers)), rng.random((5, layers))
    damage = {0.1: rng.lognormal(size=(5, layers)), 0.2: np.zeros((5, layers))} if measured else {}
    path = tmp_path / "x.png"
    assert ripple_profile.draw(response, local, damage, [20] * layers, "title", path)
    assert path.stat().st_size > 5000


def test_a_sweep_that_is_only_calibrated_has_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Published ranks stand beside ours, share by share; the profile is drawn; the sweep is not called incomplete."""
    small = [x for x in SMALL if not x.startswith("budget")]
    assert calibrate.main(["+sweep=ripple_table1", *small, f"paths.store={tmp_path}", "-m"]) == 0
    (name,) = (p.name for p in (tmp_path / "sweeps").iterdir())
    folder = tmp_path / "reports" / name
    assert f"tables and figures of the sweep: {folder / 'index.html'}" in capsys.readouterr().out
    assert list(folder.glob("ripple_profile_*.png"))
    beside = (folder / "published.csv").read_text().splitlines()
    assert sum("quantity=mean" in x and "signal=output response" in x for x in beside) == 3  # a line for each share
    assert report.main([f"paths.store={tmp_path}", f"sweep={name}", "figures=none"]) == 0
    assert "calibrated only" in (folder / "index.html").read_text(encoding="utf-8")
