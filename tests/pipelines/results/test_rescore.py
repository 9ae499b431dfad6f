"""Scores made again from records: no model, no data, no network; what changed is visible; strangers are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moend.benchmarks.recall import Recall
from moend.models import load as models
from pipelines import run
from pipelines.planning import facts, parts
from pipelines.reporting import report
from pipelines.reporting.figures import niah_heatmap
from pipelines.results import aggregate as results
from pipelines.results import rescore
from tests.pipelines.conftest import Runs


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, no_figures: Any) -> Path:
    """Two finished cells of the small trained model."""
    store = tmp_path_factory.mktemp("store")
    arguments = ["model=recall_moe", "benchmark=recall", "benchmark.limit=2", "tracking=none", f"paths.store={store}"]
    with no_figures():
        assert run.main([*arguments, "method=full,StreamingLLM", "budget=25%", "-m"]) == 0
    return store


@pytest.fixture
def store(ran: Path, tmp_path: Path, undrawn: None) -> Path:
    """A copy of it."""
    import shutil

    return shutil.copytree(ran, tmp_path / "store")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    """As in a new process."""
    for cache in (parts.benchmark, facts._benchmark_identity, rescore._benchmark, rescore._identity):
        cache.cache_clear()


def rescored(store: Path) -> dict[str, dict[str, Any]]:
    """Method -> result, after `report rescore=true`."""
    assert report.main([f"paths.store={store}", "rescore=true"]) == 0
    found = [json.loads(p.read_text()) for p in (store / "cells").glob("*/result.json")]
    return {r["method"]: r for r in found}


def test_nothing_changes_where_nothing_changed(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {p: p.read_bytes() for p in (store / "cells").glob("*/result.json")}
    assert all(json.loads(x)["scorer_version"] == 1 for x in before.values())
    rescored(store)
    assert {p: p.read_bytes() for p in before} == before
    assert "0 of 2 results changed" in capsys.readouterr().out


def test_a_new_scorer_version_is_visible(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def first_word(self: Recall, sample: Any, text: str, **kwargs: Any) -> dict[str, Any]:
        return {"score": float(text.split()[:1] == ["nothing"]), "answer": (text.split() or [None])[0]}

    old = json.loads(next((store / "cells").glob("*/result.json")).read_text())
    right = sum(r["score"] for p in (store / "cells").glob("*/records/*.jsonl") for r in map(json.loads, p.open()))
    monkeypatch.setattr(models, "load", lambda *a: pytest.fail("a model was asked for"))
    monkeypatch.setattr(Recall, "score", first_word)
    monkeypatch.setattr(Recall, "scorer_version", 2)
    found = rescored(store)
    out = capsys.readouterr().out
    assert "2 of 2 results changed" in out
    changed = 0
    for result in found.values():
        mark = result["rescored"]
        assert (result["scorer_version"], mark["from"], mark["to"], result["score"]) == (2, 1, 2, 0)
        assert mark["when"][:2] == "20"
        line = f"{mark['changed']} of 10 records changed, score"
        assert line in out and "scorer version 1 -> 2" in out
        changed += mark["changed"]
    assert changed == right > 0  # every right answer is wrong now
    again = rescored(store)
    assert again == found and "0 of 2 results changed" in capsys.readouterr().out
    monkeypatch.undo()
    back = rescored(store)
    assert all("rescored" not in r and r["scorer_version"] == 1 for r in back.values())
    assert back[old["method"]] == old


@pytest.mark.usefixtures("undrawn")
def test_records_are_enough_where_the_data_are_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    data.mkdir()
    row = {"task": "num", "length": 256, "context": "K01 4 1", "question": "? num K01", "answer": "4 1"}
    (data / "rows.jsonl").write_text(json.dumps(row))
    store = tmp_path / "store"
    extra = ["benchmark=recall", "benchmark.tasks=[num]", f"benchmark.data_dir={data}", f"paths.store={store}"]
    assert run.main(["model=recall_moe", "method=full", "tracking=none", *extra]) == 0
    (data / "rows.jsonl").unlink()
    data.rmdir()
    (path,) = (store / "cells").glob("*/records/*.jsonl")
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "text": "nothing"}) + "\n")
    rescore._benchmark.cache_clear()
    assert rescored(store)["full"]["score"] == 0
    assert record["score"] == 1 and record["gold"] == ["4 1"]


def test_foreign_records_are_one_clear_error(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = (store / "cells").glob("*/records/*.jsonl")
    lines = path.read_text().splitlines()
    stranger = {**json.loads(lines[0]), "id": "recall-of-another-run"}
    path.write_text("\n".join([json.dumps(stranger), *lines[1:]]) + "\n")
    before = {p: p.read_bytes() for p in (store / "cells").glob("*/result.json")}
    assert report.main([f"paths.store={store}", "rescore=true"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "1 of 10 records of" in err and "the first is num recall-of-another-run" in err
    assert {p: p.read_bytes() for p in before} == before


def test_records_from_before_are_one_clear_error(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = next((store / "cells").glob("*/records/*.jsonl"))
    old = [{k: v for k, v in json.loads(line).items() if k != "gold"} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(r) + "\n" for r in old))
    assert report.main([f"paths.store={store}", "rescore=true"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "has no 'gold'" in err and "run the cell again" in err


@pytest.mark.req(6)
def test_an_incomplete_cell_stays_incomplete(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = next(p.parent for p in (store / "cells").glob("*/result.json"))
    (folder / "result.json").unlink()
    path = next((folder / "records").glob("*.jsonl"))
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    monkeypatch.setattr(Recall, "scorer_version", 2)
    assert report.main([f"paths.store={store}", "rescore=true"]) == 3
    assert not (folder / "result.json").exists()
    assert sum(1 for _ in (store / "cells").glob("*/result.json")) == 1


# Grids


def place(length: int, depth: float, score: float) -> dict[str, Any]:
    return {"axes": {"length": length, "depth": depth}, "score": score}


def test_the_grid_of_a_result_is_the_mean_at_every_place() -> None:
    records = [place(1000, 0.5, 1), place(1000, 0.5, 0), place(500, 1, 1), {"axes": None, "score": 1}, {"score": 1}]
    assert results._grid(records) == [
        {"length": 500, "depth": 1, "score": 1, "n": 1},
        {"length": 1000, "depth": 0.5, "score": 0.5, "n": 2},
    ]
    assert results._grid([{"score": 1}]) is None


@pytest.mark.slow
def test_a_sweep_with_grids_draws_a_heatmap(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.drawn = True
    assert runs("method=1d,full", "question_visible=true,false", "-m") == 0
    (folder,) = (runs.store / "reports").iterdir()
    assert not list(folder.glob("niah*"))
    for path in (runs.store / "cells").glob("*/result.json"):
        grid = [{"length": n, "depth": d, "score": 0.25, "n": 1} for n in (1024, 2048) for d in (0, 1)]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"grid": grid}))
    drawn: dict[str, Any] = {}
    draw = niah_heatmap.draw

    def keep(panels: Any, path: Path) -> bool:
        drawn[path.name] = panels
        return draw(panels, path)

    monkeypatch.setattr(niah_heatmap, "draw", keep)
    assert report.main([f"paths.store={runs.store}", "figures=all"]) == 0
    assert set(drawn) == {f"niah_smollm2_135m_{asked}.png" for asked in ("visible", "unseen")}
    assert all((folder / name).stat().st_size > 5_000 for name in drawn)
    assert [title for title, _ in drawn["niah_smollm2_135m_unseen.png"]] == ["1d 512", "full"]


def test_a_heatmap_says_its_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.axes

    said: list[str] = []
    real = matplotlib.axes.Axes.text

    def text(self: Any, x: Any, y: Any, s: str, *args: Any, **kwargs: Any) -> Any:
        said.append(s)
        return real(self, x, y, s, *args, **kwargs)

    monkeypatch.setattr(matplotlib.axes.Axes, "text", text)
    cells = [place(1024, 0, 1), place(1024, 1, 0), place(4096, 0, 0.254)]
    grid = [{**c["axes"], "score": c["score"], "n": 1} for c in cells]
    assert niah_heatmap.draw([("full", grid), ("nothing", [])], tmp_path / "x.png")
    assert sorted(said) == [".25", "0", "1"]
    assert not niah_heatmap.draw([("nothing", [])], tmp_path / "y.png") and not (tmp_path / "y.png").exists()


@pytest.mark.slow
def test_a_grid_runs_end_to_end(tmp_path: Path) -> None:
    extra = ["benchmark=niah_grid", "benchmark.lengths=[256,384]", "benchmark.depths=[0,1]", "benchmark.limit=1"]
    arguments = [*extra, "method=full,StreamingLLM", "budget=25%", "tracking=none", f"paths.store={tmp_path}", "-m"]
    assert run.main(arguments) == 0
    (picture,) = (tmp_path / "reports").glob("*/niah_grid_smollm2_135m_visible.png")
    assert picture.stat().st_size > 10_000
    for path in (tmp_path / "cells").glob("*/result.json"):
        result = json.loads(path.read_text())
        assert [(c["length"], c["depth"], c["n"]) for c in result["grid"]] == [
            (n, d, 1) for n in (256, 384) for d in (0, 1)
        ]
        assert set(result["tasks"]) == {"niah_256", "niah_384"}
        for line in next((path.parent / "records").glob("*.jsonl")).read_text().splitlines():
            record = json.loads(line)
            assert record["prompt_tokens"] <= record["axes"]["length"]
