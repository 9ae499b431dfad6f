"""`pipelines.results.load`: frames of a store, and every recipe of docs/results.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas
import pytest

from moend.errors import UserError
from perf.report import build
from pipelines.results import load
from pipelines.results.deltas import Delta
from pipelines.results.sweep import compared, rows
from pipelines.store.cells import Store
from tests import ROOT

DOCS = ROOT / "docs" / "results.md"
CELLS = [
    {"method": m, "budget": b, "benchmark": "text"}
    for m in ("full", "2d", "2d_hetero", "SnapKV")
    for b in ((None,) if m == "full" else ("0.1r", "0.25r"))
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("store"))
    build(store, [*CELLS, {"method": "H2O", "budget": "0.1r", "benchmark": "text", "state": "run"}], name="one")
    build(store, [{"method": "full", "budget": None, "benchmark": "more"}], name="two", tasks=("a", "b"))
    return store


def test_cells(store: Store) -> None:
    cells = load(store.root).cells
    assert len(cells) == 9 and cells.index.is_unique
    waiting = cells[cells.state != "done"]
    assert list(waiting.method) == ["H2O"] and waiting.score.isna().all()
    done = cells[cells.state == "done"]
    assert done.score.between(done.score_low, done.score_high).all()
    assert set(done.budget) == {"full", "0.1r", "0.25r"}
    assert list(load(store.root, "two").cells.benchmark) == ["more"]


def test_records(store: Store) -> None:
    found = load(str(store.root))
    assert len(found.records) == 7 * 20 + 40  # no record of a cell that is not complete
    means = found.records.groupby("key").score.mean()
    done = found.cells[found.cells.state == "done"]
    assert means[done.index].to_numpy() == pytest.approx(done.score.to_numpy())
    assert not {"entries", "timing"} & set(found.records)


def test_differences_are_those_of_the_report(store: Store) -> None:
    found = load(store.root, "one").differences
    want: list[Delta] = compared(store, rows(store, store.read_manifest("one")))
    assert len(found) == len(want) > 5
    assert list(found.value) == [d.score.value for d in want]
    assert list(found.p_holm) == [d.p for d in want]
    assert list(found.nll) == [d.nll.value for d in want if d.nll]


def test_mistakes(tmp_path: Path, store: Store) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no sweep was run into"):
        load(tmp_path)
    with pytest.raises(UserError, match="Did you mean 'one'"):
        load(store.root, "on")


RECIPES = re.findall(r"^## (.+?)\n+```python\n(.*?)^```", DOCS.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize(("title", "code"), RECIPES, ids=[title for title, _ in RECIPES])
def test_recipes(store: Store, title: str, code: str) -> None:
    scope: dict[str, Any] = {"pandas": pandas, "found": load(store.root)}
    exec(code, scope)
    assert isinstance(scope["answer"], pandas.DataFrame | pandas.Series), title
    assert len(scope["answer"]) > 0 or "survive" in title


def test_there_are_five_recipes() -> None:
    assert len(RECIPES) == 5
