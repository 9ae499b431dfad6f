"""Every sweep file runs end to end in small, its report included: the fixture model, two examples, few tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moend import paths
from pipelines import calibrate, run
from pipelines.reporting import figures

NAMES = sorted(p.stem for p in paths.folder("sweeps", "sweep").glob("*.yaml"))
FIXTURE = ["model=recall_moe", "benchmark=recall", "benchmark.tasks=[num]", "benchmark.length=96", "benchmark.limit=2"]
MEASURED = ["calibration=recall", "calibration.ripple.examples=1", "calibration.ripple.prefix=64"]
MEASURED += ["calibration.ripple.window=8", "calibration.damage.examples=1", "calibration.damage.prefix=64"]
SHORT = ["generation=standard", "generation.samples=1"]
# the embedded model, where a sweep sets fields that only niah has
NIAH = ["model=smollm2_135m", "benchmark.length=160", "benchmark.rows=1", "generation.max_new_tokens=3"]
RIPPLE = ["calibration.ripple.examples=1", "calibration.ripple.prefix=128", "calibration.ripple.window=16"]
SMALL = {
    "moend_overhead": [*NIAH, "budget=64"],
    "moend_long": [*NIAH, "budget=64"],
    "ripple_table3": [*NIAH, *RIPPLE, "budget=50%"],
    "quickstart": ["benchmark.limit=2", "benchmark.length=256"],
    "long_output": ["benchmark.limit=1", "benchmark.words=8", "generation.max_new_tokens=4", "budget=90%"],
    "demo": ["benchmark.limit=1", "benchmark.length=192", "budget=50%"],
    "moezip_table1": ["model=recall_moe_v2", *FIXTURE[1:], "benchmark.length=256", "budget=50%"],
    "moend_klcheck": ["model=smollm2_135m", "calibration.kl.sequences=1", "calibration.kl.tokens=48",
        "calibration.kl.configs=paper",
        "calibration.kl.positions=16",
    ],
}  # fmt: skip
CALIBRATED = ("moend_fig2", "moend_klcheck", "ripple_table1")  # nothing is evaluated: that has a page, too


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_sweep_runs_and_is_reported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = SMALL.get(name, [*FIXTURE, *MEASURED, *SHORT, "budget=40%"])
    if name not in CALIBRATED:
        monkeypatch.setattr(figures, "first", lambda sweep, most: ([], []))  # drawing is slow; others draw
    main = calibrate.main if name in CALIBRATED else run.main
    assert main([f"+sweep={name}", *args, "tracking=none", f"paths.store={tmp_path}", "-m"]) == 0
    (manifest,) = (json.loads(p.read_text()) for p in tmp_path.glob("sweeps/*/manifest.json"))
    assert manifest["name"].startswith(name)
    folder = tmp_path / "reports" / manifest["name"]
    page = (folder / "index.html").read_text(encoding="utf-8")
    states = {c["state"] for c in manifest["cells"]}
    assert states <= ({"calibrated"} if name in CALIBRATED else {"done", "infeasible"})
    assert states & {"calibrated", "done"}
    assert all((folder / file).exists() for file in ("table.csv", "table.md", "tables.tex"))
    assert "incomplete" not in page
    for cell in [c for c in manifest["cells"] if c["state"] == "done"]:
        result = json.loads((tmp_path / "cells" / cell["key"] / "result.json").read_text())
        assert result["n_records"] == result["n_expected"] > 0
