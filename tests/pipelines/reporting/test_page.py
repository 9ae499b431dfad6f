"""The report's page: one file, whole in a browser, honest where the sweep is not complete."""

from __future__ import annotations

import html.parser
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perf import report as perf
from perf.report import build
from pipelines.reporting import report, tables
from pipelines.results.sweep import Row
from pipelines.store.cells import Store
from pipelines.store.files import read_json, write_json
from tests import browser as driver

CHAIN = ("1d", "2d_uniform", "2d", "2d_hetero", "SnapKV")


def sweep(store: Store, **rest: Any) -> list[dict[str, Any]]:
    """Five methods and the full cache at two budgets, over two tasks; one cell is incomplete, one infeasible."""
    wanted: list[dict[str, Any]] = [{"method": "full", "budget": None, "benchmark": "text"}]
    wanted += [{"method": m, "budget": b, "benchmark": "text"} for m in CHAIN for b in ("0.1r", "0.25r")]
    wanted[3] |= {"state": "run"}
    wanted[-2] |= {"state": "infeasible", "reason": "needs 12% <or more>"}
    return build(store, wanted, tasks=("one", "two"), **rest)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report's folder."""
    store = Store(tmp_path_factory.mktemp("store"))
    cells = sweep(store, name="a <b> & c")
    store.cell(cells[3]["key"]).log("Traceback: <script>alert(1)</script>")
    assert report.main([f"paths.store={store.root}"]) == 3
    return store.report("a <b> & c")


class Parsed(html.parser.HTMLParser):
    """Tags that were opened, and every reference to something outside of the text."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "data", "action")]
        self.ids |= {v or "" for k, v in attrs if k == "id"}


def test_the_page_holds_all_it_needs(made: Path) -> None:
    text = (made / "index.html").read_text(encoding="utf-8")
    page = Parsed(text)
    assert page.references
    assert all(r.startswith(("data:", "#")) for r in page.references)
    assert {r[1:] for r in page.references if r.startswith("#")} <= page.ids
    assert "@import" not in text and "url(" not in text
    assert page.tags.count("img") == len(list(made.glob("*.png"))) > 3


def test_texts_of_the_sweep_stay_texts(made: Path) -> None:
    text = (made / "index.html").read_text(encoding="utf-8")
    assert "a &lt;b&gt; &amp; c" in text and "<b> & c" not in text
    assert "alert(1)" in text and "<script>alert" not in text
    assert Parsed(text).tags.count("script") == 1


def test_a_partial_report_says_so_everywhere(made: Path) -> None:
    """requirement: nothing is averaged that is not whole."""
    text = (made / "index.html").read_text(encoding="utf-8")
    assert "1 of 11 cells are not complete" in text and "1 infeasible" in text
    assert text.count("incomplete: 1 of 40 records") >= 3  # the table, all cells, what was run
    assert "needs 12% &lt;or more&gt;" in text
    assert "Partial: 1 of 11 cells" in (made / "table.md").read_text(encoding="utf-8")
    assert "Partial: 1 of 11 cells" in (made / "tables.tex").read_text(encoding="utf-8")


@pytest.mark.usefixtures("undrawn")
def test_mixed_cells_are_marked(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.cell(sweep(store)[1]["key"]).folder / "result.json"
    write_json(path, read_json(path) | {"mixed": ["device: cpu (30), <gpu> (10)"]})
    text = report.write(store, "made_up", [])[0].read_text(encoding="utf-8")
    assert "1 of 11 cells are mixed" in text
    assert 'title="mixed: device: cpu (30), &lt;gpu&gt; (10)"' in text
    assert text.count("(mixed)") == 1  # in the list of all cells
    assert "mixed: device: cpu (30), <gpu> (10)" in (store.report("made_up") / "table.csv").read_text(encoding="utf-8")
    assert "(mixed)" in (store.report("made_up") / "table.md").read_text(encoding="utf-8")


def test_superseded_cells_are_counted() -> None:
    row = Row("k", {}, {}, "superseded: made by engine 1, this is 2; run its command again", None)
    assert tables.marked([row, row]) == "2 of 2 cells are superseded: this code gives other numbers."


@pytest.mark.slow
def test_figures_are_drawn_where_they_are_shown_or_asked_for(tmp_path: Path) -> None:
    store = Store(tmp_path)
    cells = [{"method": m, "budget": "0.1r", "benchmark": f"text{i}"} for i in range(4) for m in ("1d", "SnapKV")]
    build(store, cells, examples=3)
    folder = store.report("made_up")
    text = report.write(store, "made_up", [])[0].read_text(encoding="utf-8")
    kept = sorted(p.name for p in folder.glob("kept_tokens*.png"))
    assert len(kept) == report.SHOWN and not list(folder.glob("*.pdf"))
    assert "There are more of: pareto, kept tokens. This command draws all of them" in text and "figures=all" in text
    assert report.main([f"paths.store={store.root}", "figures=none"]) == 0
    assert not list(folder.glob("*.png"))
    report.write(store, "made_up", [], drawn="all")
    assert len(list(folder.glob("kept_tokens*.png"))) == 4
    assert len(list(folder.glob("*.pdf"))) == len(list(folder.glob("*.png")))
    assert (folder / "index.html").read_text(encoding="utf-8").count('id="figure-kept_tokens') == report.SHOWN


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_long_reports_are_folded_and_whole(tmp_path: Path) -> None:
    """Every cell and difference is on the page; tables that are long together are one archive."""
    store = Store(tmp_path)
    build(store, perf.cells(480), examples=2)
    found = report.rows(store, store.read_manifest("latest"))
    differences = report.compared(store, found)
    text = report.write(store, "latest", differences)[0].read_text(encoding="utf-8")
    assert text.count("<tr><td>text") == 480 + len(differences)
    assert f"<summary>All {len(found)} cells</summary>" in text and "tables.zip" in text
    assert len(text) < 6 * 2**20


@pytest.mark.usefixtures("undrawn")
def test_a_report_of_the_same_results_is_left_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    cells = sweep(store)
    page = report.write(store, "made_up", [])[0]
    before = page.stat().st_mtime_ns
    report.write(store, "made_up", [], again=False)
    assert page.stat().st_mtime_ns == before
    (store.cell(cells[0]["key"]).folder / "result.json").unlink()
    report.write(store, "made_up", [], again=False)
    assert page.stat().st_mtime_ns > before
    before = page.stat().st_mtime_ns
    report.write(store, "made_up", [])
    assert page.stat().st_mtime_ns > before


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[driver.Browser]:
    """A browser with an empty profile."""
    if driver.FOUND is None:
        pytest.skip("no chromium on this machine")
    with driver.browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def column(table: str, i: int) -> str:
    """JavaScript that reads a column of a table from top to bottom."""
    cell = f"r.cells[{i}]"
    return f"[...document.querySelectorAll('#{table} tbody tr')].map(r => {cell}.dataset.v ?? {cell}.textContent)"


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_in_a_browser(made: Path, chromium: driver.Browser, width: int) -> None:
    chromium.errors.clear()
    chromium.requests.clear()
    chromium.open(made / "index.html", width=width)
    images = chromium.value("[...document.images].map(i => i.complete && i.naturalWidth > 0)")
    assert len(images) > 3 and all(images)
    overflow = chromium.value("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow <= 0, "the page scrolls sideways"
    outside = [r for r in chromium.requests if not r.startswith(("data:", "file:"))]
    assert not outside and sum(r.startswith("file:") for r in chromium.requests) == 1
    # links lead to places that are there, and a figure's PNG is the picture that is shown
    anchors = chromium.value("[...document.querySelectorAll('nav a')].map(a => !!document.querySelector(a.hash))")
    assert len(anchors) >= 6 and all(anchors)
    assert chromium.value(
        "[...document.querySelectorAll('a.png')].every(a => a.href === a.closest('figure').querySelector('img').src)"
    )
    assert not chromium.errors


def test_tables_sort_by_value_and_what_is_missing_comes_last(made: Path, chromium: driver.Browser) -> None:
    chromium.open(made / "index.html")
    heads = chromium.value("[...document.querySelectorAll('#all-cells th')].map(h => h.textContent.trim())")
    at = heads.index("score [95 % interval]")
    original = chromium.value(column("all-cells", 2))
    for order in (1, -1):
        chromium.value(f"document.querySelectorAll('#all-cells th button')[{at}].click()")
        values = chromium.value(column("all-cells", at))
        numbers = [float(v) for v in values if v]
        assert len(numbers) == 9 and numbers == sorted(numbers, reverse=order < 0)
        assert values[-2:] == ["", ""]
    assert chromium.value(f"document.querySelectorAll('#all-cells th')[{at}].getAttribute('aria-sort')") == "descending"
    chromium.value("document.querySelectorAll('#all-cells th button')[2].click()")
    assert sorted(original) == sorted(chromium.value(column("all-cells", 2)))
    assert not chromium.errors


def test_rows_are_narrowed_and_figures_open(made: Path, chromium: driver.Browser) -> None:
    chromium.open(made / "index.html")
    shown = "[...document.querySelectorAll('#all-cells tbody tr')].filter(r => !r.hidden).length"
    assert chromium.value(shown) == 11
    chromium.value(
        "{ const f = document.querySelector('input[data-table=all-cells]'); f.value = 'snapkv 25%';"
        " f.dispatchEvent(new Event('input')); }"
    )
    assert chromium.value(shown) == 1
    assert chromium.value("document.getElementById('all-cells-count').textContent") == "1 of 11"
    assert not chromium.value("document.querySelector('dialog').open")
    chromium.value("document.querySelector('figure img').click()")
    assert chromium.value("document.querySelector('dialog').open && !!document.querySelector('dialog img').src")
    chromium.value("document.querySelector('dialog').click()")
    assert not chromium.value("document.querySelector('dialog').open")
    assert not chromium.errors


def test_a_page_with_a_mistake_is_noticed(tmp_path: Path, chromium: driver.Browser) -> None:
    """The driver sees what the tests above say is not there."""
    chromium.errors.clear()
    path = tmp_path / "bad.html"
    path.write_text("<img src='gone.png'><script>console.error('no'); throw new Error('broken')</script>")
    chromium.open(path)
    assert re.search("broken", " ".join(chromium.errors)) and len(chromium.errors) >= 3
    chromium.errors.clear()
