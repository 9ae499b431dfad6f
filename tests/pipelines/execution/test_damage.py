"""ripple_2d through the programs: its damage table on the small trained model, plan, pictures and cells."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moend.benchmarks import text
from moend.calibration.damage import DamageSettings, repeated
from moend.models import load as models
from pipelines import calibrate, run
from pipelines.planning.facts import Facts, Planner
from pipelines.planning.schema import validate
from tests.pipelines.conftest import compose_points

SMALL = [
    "model=recall_moe",
    "benchmark=recall",
    "benchmark.limit=1",
    "benchmark.tasks=[num,pass]",
    "tracking=none",
    "calibration=recall",
    "calibration.damage.examples=2",
]


@pytest.mark.slow
@pytest.mark.req(20)
def test_a_table_is_measured_shown_drawn_and_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = [f"paths.store={tmp_path}", *SMALL, "budget=25%"]
    assert calibrate.main([*store, "method=ripple_2d"]) == 0
    out = capsys.readouterr().out
    assert "damage in nats, mean of 2 examples a kind" in out
    assert "summed damage " in out
    (folder,) = (tmp_path / "reports").iterdir()
    assert {"plan.json", "damage", "damage.png", "routing_map.png"} <= {p.name for p in folder.iterdir()}
    meta = json.loads((folder / "damage" / "artefact.json").read_text())
    chosen = meta["identity"]["settings"]
    assert chosen["scorer"]["name"] == "snapkv"
    assert chosen["method"] == {"channels": 64, "group": 64, "n_sink": 4, "recent": 32, "window": None}
    assert len(chosen["configs"]) == 10 and chosen["configs"][0] == [1.0, 8, 4]
    plan = json.loads((folder / "plan.json").read_text())["layers"]
    assert plan[2]["keep"] == 1.0 > plan[1]["keep"]  # layer 2 does the retrieval

    assert run.main([*store, "method=full,SnapKV,ripple_2d", "-m"]) == 0
    results = [json.loads(p.read_text()) for p in (tmp_path / "cells").glob("*/result.json")]
    held = {r["method"]: r["resident_bytes"] for r in results}
    assert set(held) == {"full", "SnapKV", "ripple_2d"}
    assert held["ripple_2d"] <= held["full"] / 4
    made = [json.loads(p.read_text())["kind"] for p in (tmp_path / "calibration").glob("*/artefact.json")]
    assert sorted(made) == ["agreement", "damage"]  # the same table serves both programs


@pytest.mark.slow
@pytest.mark.req(20)
def test_heads_are_measured_shown_and_routed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = [f"paths.store={tmp_path}", *SMALL, "budget=10%"]
    assert calibrate.main([*store, "method=ripple_2d_head"]) == 0
    out = capsys.readouterr().out
    assert "its heads" in out
    (folder,) = (tmp_path / "reports").iterdir()
    assert "damage_map.png" in {p.name for p in folder.iterdir()}
    meta = json.loads((folder / "damage" / "artefact.json").read_text())
    assert meta["identity"]["settings"]["heads"] is True
    layers = json.loads((folder / "plan.json").read_text())["layers"]
    assert [len(x["heads"]) for x in layers] == [2] * 4
    one, other = (x["keep"] for x in layers[2]["heads"])
    assert other == 1.0 and one < 0.3  # one head of layer 2 does the retrieval
    planned = float(out.split("summed damage ")[1].split(",")[0])
    text, recall = (float(out.split("as planned: ")[1].split(f"{kind} ")[1].split()[0].strip(",")) for kind in KINDS)
    assert text + recall == pytest.approx(planned, abs=1e-3)  # the objective lies between measured shares

    assert run.main([*store, "method=full,ripple_2d_head", "-m"]) == 0
    (result,) = (
        r for p in (tmp_path / "cells").glob("*/result.json") if (r := json.loads(p.read_text()))["method"] != "full"
    )
    assert result["resident_bytes"] <= result["full_bytes"] / 10
    assert facts("method=ripple_2d_head").calibrations[0].key != facts().calibrations[0].key


KINDS = ("text", "recall")


def facts(*args: str) -> Facts:
    (point,) = compose_points([*SMALL, "method=ripple_2d", *args])
    return Planner().facts(validate(point), point.choices)


def test_every_setting_enters_the_identity() -> None:
    one = facts().calibrations[0]
    for other in (
        "method.n_sink=0",
        "method.recent=8",
        "method.group=32",
        "method.window=0",
        "method.scorer.window=16",
    ):
        assert facts(other).calibrations[0].key != one.key
    for other in ("calibration.damage.keeps=[0.5,1]", "calibration.damage.kinds=[text]", "calibration.damage.every=1"):
        assert facts(other).calibrations[0].key != one.key
    for same in (
        "budget=40%",
        "calibration.ripple.examples=3",
        "calibration.kl.tokens=100",
        "method.allocator.solver=greedy",
    ):
        assert facts(same).calibrations[0].key == one.key


def test_a_plan_knows_what_the_calibration_measures() -> None:
    assert facts("budget=25%").infeasible is None
    told = facts("budget=1%").infeasible
    assert told is not None and "the smallest budget it can meet is 1.3%" in told
    assert facts("budget=1%", "calibration.damage.keeps=[0.0125,0.025,1]").infeasible is None
    told = facts("budget=25%", "calibration.damage.keeps=[0.6,1]").infeasible
    assert told is not None and "the smallest budget it can meet is 26.8%" in told


class Letters:
    """A token for every character, and a BOS."""

    unk_token_id = None
    bos_token_id = 0

    def __call__(self, text: str, add_special_tokens: bool = True, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [0] * add_special_tokens + [ord(c) for c in text]}


def test_no_window_is_of_the_test_split() -> None:
    spec = models.spec("smollm2_135m")
    loaded = SimpleNamespace(tokenizer=Letters(), spec=spec, arch=SimpleNamespace(max_positions=8192))
    s = DamageSettings(examples=4)
    ids = s.ids(loaded)
    assert ids.shape == (8, s.prefix + s.window)
    assert (ids[:, 0] == 0).all()
    own, other = text.part("calibration"), text.part("test")
    again = repeated(ids, s.window, s.cue)
    assert torch.equal(again[:, : s.prefix - s.cue], ids[:, : s.prefix - s.cue])
    starts = set()
    for tokens in [*ids, *(x[: s.prefix - s.cue] for x in again), *(x[s.prefix - s.cue :] for x in again)]:
        words = "".join(chr(c) for c in tokens.tolist() if c)
        assert words in own and words not in other
        starts.add(own.index(words) if len(tokens) == s.prefix + s.window else -1)
    starts.discard(-1)
    assert len(starts) == 8 and min(b - a for a, b in pairwise(sorted(starts))) >= s.prefix + s.window - 1
