"""Dashboards and reports as specifications: every name in a panel is one that a run really logs."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines.planning import schema
from pipelines.store.cells import Store
from pipelines.store.files import read_json, write_json
from pipelines.tracking import dashboards as dashboard
from pipelines.tracking import items
from pipelines.tracking import wandb as tracking
from tests.pipelines.tracking import wandb_files
from tests.pipelines.tracking.wandb_server import Server

needs_package = pytest.mark.skipif(
    not dashboard.installed(), reason="wandb-workspaces is not installed (pip install -e '.[dev]')"
)


def walk(node: Any) -> Iterator[dict[str, Any]]:
    """All objects of a specification."""
    if isinstance(node, dict):
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from walk(child)


def named(spec: dict[str, Any]) -> dict[str, set[str]]:
    """What a specification refers to: fields of runs, of their configs, media, tables, and tags of its filters."""
    found: dict[str, set[str]] = {"run": set(), "config": set(), "media": set(), "table": set(), "tags": set()}

    def refer(name: str) -> None:
        kind, _, field = name.rpartition(":")
        found["config" if kind == "config" else "run"].add(field.removesuffix(".value"))

    for node in walk(spec):
        if "viewType" in node:
            config = node["config"]
            for name in [*config.get("metrics", []), *(config[k] for k in ("xAxis", "yAxis") if k in config)]:
                refer(name)
            if "groupBy" in config:
                refer("config:" + config["groupBy"])
            for template in re.findall(r"\$\{([^}]+)\}", config.get("legendTemplate", "")):
                refer(template)
            found["media"] |= set(config.get("mediaKeys", []))
            if node["viewType"] == "Weave":
                text = json.dumps(config)
                found["table"] |= {v for v in re.findall(r'"val": "([^"]+)"', text) if not v.startswith("_")}
        if node.get("op") == "IN" and node["key"]["name"] == "tags":
            found["tags"] |= set(node["value"])
    return found


@pytest.fixture(scope="module")
def logged(tracked: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """What runs really log: a table of the paper with one cell on a grid of needles."""
    store = Store(Path(shutil.copytree(tracked[0], tmp_path_factory.mktemp("dashboard") / "store")))
    (sweep,) = store.sweep_names()
    name = "moend_table2-0a1b2c"
    for folder in ("sweeps", "reports"):
        (store.root / folder / sweep).rename(store.root / folder / name)
    write_json(store.manifest(name), read_json(store.manifest(name)) | {"name": name})
    grid = [{"length": n, "depth": d, "score": d, "n": 1} for n in (64, 128) for d in (0.0, 1.0)]
    for cell in (store.root / "cells").iterdir():
        write_json(cell / "result.json", read_json(cell / "result.json") | {"grid": grid})
    config = tracking.TrackingConfig(mode="offline", project="moend", timeout_s=400)
    assert tracking.publish(store, name, config, items.items(store, name))
    found: dict[str, set[str]] = {"run": {"_step"}, "config": set(), "media": set(), "table": set(), "tags": set()}
    for run in wandb_files.runs(store.root).values():
        steps = {k: v for s in run.steps for k, v in s.items()}
        kinds = {k: v.get("_type") if isinstance(v, dict) else None for k, v in steps.items()}
        found["run"] |= {k for k, v in {**run.summary, **steps}.items() if isinstance(v, int | float)}
        found["config"] |= set(run.config)
        found["media"] |= {k for k, kind in kinds.items() if kind == "image-file"}
        found["table"] |= {k for k, kind in kinds.items() if kind == "table-file"}
        found["tags"] |= set(run.about.tags)
    return found


@pytest.mark.process
@needs_package
@pytest.mark.parametrize("paper", dashboard.PAPERS)
@pytest.mark.parametrize("kind", dashboard.BUILD)
def test_every_name_is_logged(paper: str, kind: str, logged: dict[str, set[str]]) -> None:
    spec = dashboard.specification(dashboard.BUILD[kind](dashboard.PAPERS[paper], "me", "moend"))
    seen = named(spec)
    for what in ("run", "config", "media", "table"):
        assert seen[what] and seen[what] <= logged[what], what
    if paper == "moend":
        wanted = {"paper:moend"} if kind == "workspace" else {f"table:{t}" for t in dashboard.PAPERS[paper].tables}
        assert seen["tags"] == wanted and seen["tags"] & logged["tags"]


@needs_package
def test_a_dashboard_has_its_sections_and_a_report_a_chapter_per_table() -> None:
    for paper in dashboard.PAPERS.values():
        spec = dashboard.specification(dashboard.workspace(paper, "me", "moend"))
        sections = spec["spec"]["section"]["panelBankConfig"]["sections"]
        assert [s["name"] for s in sections] == list(dashboard.SECTIONS)
        assert all(s["panels"] for s in sections)
        assert [s["name"] for s in sections if s["isOpen"]] == [s for s in dashboard.SECTIONS if s in paper.opened]
        spec = dashboard.specification(dashboard.report(paper, "me", "moend"))
        blocks = spec["spec"]["blocks"]
        assert [b["children"][0]["text"] for b in blocks if b["type"] == "heading"] == list(paper.tables)
        grids = [b["metadata"] for b in blocks if b["type"] == "panel-grid"]
        assert len(grids) == 2 * len(paper.tables)
        for grid in grids:
            assert grid["panelBankSectionConfig"]["panels"] and len(grid["runSets"][0]["filters"]["filters"]) == 2
        texts = [b["content"] for b in blocks if b["type"] == "markdown-block"]
        assert all(f"+sweep={t}" in "".join(texts) for t in paper.tables)


@needs_package
def test_the_same_specification_every_time_and_no_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    def refuse(*given: Any, **named: Any) -> None:
        raise AssertionError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    written = []
    for _ in range(2):
        assert dashboard.main([f"paths.store={tmp_path}"]) == 0
        files = [Path(x) for x in capsys.readouterr().out.split()]
        assert len(files) == 2 * len(dashboard.PAPERS)
        written.append([p.read_text() for p in files])
    assert written[0] == written[1]


@needs_package
def test_pushing_again_replaces(tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    command = [f"paths.store={tmp_path}", "paper=moezip", "push=true", "entity=team"]
    assert dashboard.main(command) == 0
    assert f"{server.url}/team/moend" in capsys.readouterr().out
    assert sorted(v["type"] for v in server.views.values()) == ["project-view", "runs"]
    assert {v["displayName"] for v in server.views.values()} == {"MoEZip (moend)"}
    sent = [json.loads(v["spec"]) for v in server.views.values()]
    assert any("blocks" in s for s in sent) and any("section" in s for s in sent)
    assert dashboard.main(command) == 0
    assert len(server.views) == 2
    assert dashboard.main([*command[:-1], "entity=others"]) == 0
    assert len(server.views) == 4
    server.refuse = 401
    capsys.readouterr()
    assert dashboard.main(command) == 2
    err = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert len(err) == 1 and f"{server.url}/team/moend did not take it" in err[0]


def test_every_sweep_of_a_paper_has_a_place() -> None:
    placed = {t for p in dashboard.PAPERS.values() for t in p.tables} | set(dashboard.MEASURED)
    of_papers = {s for s in schema.sweeps() if s.partition("_")[0] in dashboard.PAPERS}
    assert placed == of_papers
    for table in placed:
        assert "+sweep=" in dashboard.description(table) and "#" not in dashboard.description(table)


def test_without_the_package_one_line_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    assert dashboard.main([f"paths.store={tmp_path}"]) == 2
    assert capsys.readouterr().err == "error: wandb-workspaces is not installed: pip install wandb-workspaces\n"


@pytest.mark.parametrize(
    ("argument", "told"), [("paper=riple", "unknown paper 'riple'"), ("push=1", "push is true or false, got '1'")]
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], argument: str, told: str) -> None:
    assert dashboard.main([argument]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {told}") and err.count("\n") == 1
