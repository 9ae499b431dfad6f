"""The whole command on a stub library: planning, sharing, resuming, failing, and two processes at once."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from moend.benchmarks import benchmark
from moend.errors import UserError
from pipelines import calibrate
from pipelines.execution import runner as launcher
from pipelines.planning import planner
from pipelines.reporting import report
from pipelines.results import rescore as rescoring
from pipelines.store import provenance
from pipelines.store.cells import Store
from pipelines.store.lease import Lease, LeaseLost
from tests.forked import Forked
from tests.pipelines import stub
from tests.pipelines.conftest import Runs, compose_points, sweep_points

SWEEP = ("method=full,1d,2d,2d_hetero", "budget=10%,25%", "-m")
STUB_MAIN = """
import sys
from pipelines import run
from moend import calibration
from pipelines.execution import session as evaluate
from pipelines.reporting import figures
from tests.pipelines import stub
figures.first = lambda sweep, most: ([], [])  # drawing is slow, and nobody looks at them
evaluate.Library, calibration.figure = stub.Library, stub.figure
sys.exit(run.main())
"""


def cells(store: Path) -> dict[str, dict[str, Any]]:
    return {p.parent.name: json.loads(p.read_text()) for p in store.glob("cells/*/result.json")}


def process(store: Path, *args: str, **env: str) -> Forked:
    """The run program on a stub library, in a process of its own."""
    return Forked(STUB_MAIN, [f"paths.store={store}", "tracking=none", *args], env)


@pytest.mark.req(7)
def test_a_sweep_is_deduplicated_shared_and_never_run_twice(runs: Runs) -> None:
    assert runs(*SWEEP) == 0
    assert "7 cells: 7 run (1 more points name a cell that is there already)" in runs.out
    assert "prefills: 6 planned, 36 saved by sharing" in runs.out
    assert runs.library.prefills == 6
    assert len(cells(runs.store)) == 7
    assert len(runs.library.calibrated) == 1
    before = {p: p.stat().st_mtime_ns for p in runs.store.glob("cells/*/*")}
    assert runs(*SWEEP) == 0
    assert "7 done" in runs.out
    assert runs.library.prefills == 6
    assert before == {p: p.stat().st_mtime_ns for p in runs.store.glob("cells/*/*")}
    assert runs(*SWEEP[:1], "budget=10%,25%,50%", "-m") == 0
    assert runs.library.prefills == 12  # three new cells, one more pass
    assert len(cells(runs.store)) == 10


def test_the_plan_is_printed_and_dry_run_writes_nothing(runs: Runs) -> None:
    assert runs("+sweep=demo", "dry_run=true", "-m") == 0
    assert "39 cells: 39 run (17 more points" in runs.out
    assert "prefills: 18 planned, 216 saved by sharing" in runs.out
    assert not runs.store.exists()


def test_demo_is_what_the_design_says() -> None:
    points = sweep_points("demo")
    assert {p.choices["benchmark"] for p in points} == {"niah", "continuation"}
    papers = {"full", "1d", "2d_uniform", "2d", "2d_hetero", "SnapKV"}
    assert {p.choices["method"] for p in points} == papers | {"ripple_2d_head"}
    assert {p.config["budget"] for p in points} == {"10%", "25%"}
    assert {p.config["question_visible"] for p in points} == {True, False}


def test_quickstart_s_calibrations_come_with_the_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A change of what calibrations depend on fails here: make them again (docs/adding.md) and commit them."""
    from pipelines import run

    assert run.main(["+sweep=quickstart", "dry_run=true", f"paths.store={tmp_path}"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "4 cells: 4 run" in out
    assert "prefills: 10 planned, 30 saved by sharing" in out  # full has no scorer, and shares its prefill all the same
    assert "calibrations to compute: none" in out and "come with the package)" in out


@pytest.mark.process
@pytest.mark.req(15)
def test_kill_9_in_the_middle_loses_nothing_and_repeats_nothing(runs: Runs) -> None:
    killed = process(runs.store, *SWEEP, STUB_KILL_AFTER="3")
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    kept = {p: p.read_bytes() for p in runs.store.glob("cells/*/records/*.jsonl")}
    assert sum(data.count(b"\n") for data in kept.values()) == 3 * 7
    assert not cells(runs.store)
    torn = next(iter(kept))
    torn.write_bytes(kept[torn] + b'{"task": "needle", "id"')
    assert runs(*SWEEP) == 0
    assert runs.library.prefills == 3
    for path, data in kept.items():
        assert path.read_bytes().startswith(data)
    for key, result in cells(runs.store).items():
        ids = [r["id"] for r in Store(runs.store).cell(key).records()]
        assert sorted(ids) == [f"s{i}" for i in range(6)]
        assert result["n"] == result["n_expected"] == 6


@pytest.mark.process
def test_two_processes_share_the_work_and_both_end_well(tmp_path: Path) -> None:
    args = ("method=full,1d,2d", "budget=10%", "seed=0,1", "-m")
    both = [process(tmp_path, *args, STUB_DELAY="0.05") for _ in range(2)]
    outputs = [p.communicate()[0] for p in both]
    assert [p.returncode for p in both] == [0, 0], outputs
    assert len(cells(tmp_path)) == 6
    for key in cells(tmp_path):
        lines = [json.loads(x)["id"] for x in (tmp_path / f"cells/{key}/records/0-of-1.jsonl").read_text().splitlines()]
        assert sorted(lines) == [f"s{i}" for i in range(6)]


@pytest.mark.process
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_says_how_to_go_on(tmp_path: Path, number: int, code: int) -> None:
    running = process(tmp_path, "method=1d", STUB_DELAY="0.3")
    records = tmp_path.glob("cells/*/records/*.jsonl")
    for _ in range(300):
        if any(p.stat().st_size for p in tmp_path.glob("cells/*/records/*.jsonl")):
            break
        time.sleep(0.05)
    running.send_signal(number)
    out, _ = running.communicate()
    assert running.returncode == code, out
    assert all(json.loads(p.read_text())["released"] for p in tmp_path.glob("cells/*/records/*.lease.*"))
    assert "goes on: python -m pipelines.run" in out
    assert "Traceback" not in out
    assert list(records)


@pytest.mark.process
def test_any_number_of_shards_resumes_any_other(runs: Runs) -> None:
    killed = process(runs.store, *SWEEP, "cluster.shards=3", STUB_KILL_AFTER="3")
    killed.communicate()
    assert runs(*SWEEP, "cluster.shards=2") == 0
    assert runs.library.prefills == 3
    assert all(r["n"] == 6 for r in cells(runs.store).values())


def test_a_failing_cell_fails_alone(runs: Runs) -> None:
    runs.library.fail_method = "2d"
    assert runs(*SWEEP) == 1
    assert len(cells(runs.store)) == 5
    assert runs.out.count("failed: ") >= 2
    log = next(runs.store.glob("cells/*/log.txt")).read_text()
    assert "RuntimeError: this method breaks at s0" in log
    assert "Traceback" in log
    assert "again, for what is missing: python -m pipelines.run" in runs.out
    runs.library.fail_method = None
    assert runs(*SWEEP) == 0
    assert len(cells(runs.store)) == 7


def test_infeasible_in_a_sweep_is_a_state_and_alone_an_error(runs: Runs) -> None:
    assert runs("method=full,1d,2d", "budget=2,512", "-m") == 0
    assert "2 infeasible" in runs.out
    assert "the smallest is 4t" in runs.out
    assert runs("method=1d", "budget=2") == 2
    assert runs.err == "error: 1d cannot meet 2t: the smallest is 4t\n"
    assert runs("method=1d", "budget=1MiB") == 2  # found only when the method is bound
    assert runs.err == "error: bytes are too small here\n"


@pytest.mark.req(24)
@pytest.mark.req(18)
def test_a_foreign_calibration_blocks_its_cells_only(runs: Runs) -> None:
    assert runs("method=2d") == 0
    artefact = next(runs.store.glob("calibration/*/artefact.json"))
    artefact.write_text("{}")
    assert runs("method=2d,1d", "budget=10%", "-m") == 2
    assert f"{artefact} is not a calibration" in runs.out
    assert len(cells(runs.store)) == 2  # the old one, and 1d, which needs none
    assert runs("method=2d", "budget=25%") == 2
    assert "is not a calibration" in runs.err


@pytest.mark.req(23)
def test_question_visibility_is_a_key_and_a_column(runs: Runs) -> None:
    assert runs("method=1d", "question_visible=true,false", "-m") == 0
    found = cells(runs.store)
    assert sorted(r["question_visible"] for r in found.values()) == [False, True]
    table = (next(runs.store.glob("reports/*/table.csv"))).read_text().splitlines()
    assert table[0].split(",")[2] == "question"
    assert sorted(line.split(",")[2] for line in table[1:]) == ["unseen", "visible"]


@pytest.mark.req(14)
def test_draws_are_separate_records_with_one_prefill(runs: Runs) -> None:
    assert runs("method=1d", "generation=sampled", "generation.samples=3") == 0
    assert runs.library.prefills == 6
    (result,) = cells(runs.store).values()
    assert (result["n"], result["n_records"], result["samples"]) == (6, 18, 3)
    assert result["score_low"] <= result["score"] <= result["score_high"]


def test_a_payload_that_was_changed_is_refused_by_field(runs: Runs) -> None:
    assert runs("method=1d") == 0
    path = next(runs.store.glob("cells/*/payload.json"))
    described = json.loads(path.read_text())
    described["payload"]["seed"] = 7
    path.write_text(json.dumps(described))
    assert runs("method=1d") == 2
    assert "seed: has 7, needs 0" in runs.err


@pytest.mark.process
def test_corrupt_records_fail_their_cell_with_file_and_line(runs: Runs) -> None:
    killed = process(runs.store, *SWEEP, STUB_KILL_AFTER="2")
    killed.communicate()
    path = next(runs.store.glob("cells/*/records/*.jsonl"))
    path.write_text("nonsense\n" + path.read_text())
    assert runs(*SWEEP) == 1
    assert f"{path}, line 1, is not a record" in runs.out
    assert len(cells(runs.store)) == 6


def test_names_of_sweeps() -> None:
    points, keys = list(sweep_points("quickstart")), ["k"]
    assert planner.sweep_name(points, keys) == "quickstart"
    quiet = [dataclasses.replace(p, overrides=(*p.overrides, "tracking=none", "paths.store=x")) for p in points]
    assert planner.sweep_name(quiet, keys) == "quickstart"
    other = [dataclasses.replace(p, overrides=(*p.overrides, "model=recall_moe")) for p in points]
    fewer = [p for p in points if p.choices["method"] != "full"]
    for changed in (other, fewer):
        name, _, digest = planner.sweep_name(changed, keys).rpartition("-")
        assert (name, len(digest)) == ("quickstart", 8)
    (single,) = compose_points(["method=1d"])
    assert len(planner.sweep_name([single], ["k"])) == 8
    assert planner.sweep_name([single], ["k"]) != planner.sweep_name([single], ["l"])


def test_latest_is_the_newest_sweep(runs: Runs) -> None:
    assert runs("method=1d") == 0
    assert runs("method=1d", "seed=3") == 0
    store = Store(runs.store)
    first, last = store.sweep_names()
    assert store.read_manifest("latest")["name"] == last
    assert runs("method=1d") == 0
    assert store.read_manifest("latest")["name"] == first


def test_what_was_dropped_is_said(runs: Runs) -> None:
    assert runs("method=1d", "budget=1e9") == 0
    assert "nothing was dropped in this run" in runs.out
    assert runs("method=1d", "budget=10%") == 0
    assert "nothing was dropped" not in runs.out


def test_report_rebuilds_everything_from_files(runs: Runs) -> None:
    runs.drawn = True
    assert runs(*SWEEP) == 0
    (folder,) = (runs.store / "reports").iterdir()
    made = sorted(p.name for p in folder.iterdir())
    assert {"index.html", "table.csv", "table.md", "tables.tex", "accuracy_memory.png"} < set(made)
    for path in folder.iterdir():
        path.unlink()
    arguments = [f"paths.store={runs.store}", "sweep=latest"]
    assert report.main(arguments) == 0
    assert sorted(p.name for p in folder.iterdir()) == made
    assert (folder / "accuracy_memory.png").stat().st_size > 10_000
    runs.drawn = False
    key = next(iter(cells(runs.store)))
    (runs.store / "cells" / key / "result.json").unlink()
    assert report.main(arguments) == 3
    assert "incomplete: 6 of 6 records" in runs.capsys.readouterr().out
    assert runs(*SWEEP) == 0
    assert runs.library.prefills == 6  # the result was made again from the records
    assert report.main([arguments[0], f"sweep={folder.name[:-1]}"]) == 2
    assert f"Did you mean '{folder.name}'?" in runs.capsys.readouterr().err
    assert report.main(["swep=latest"]) == 2


def test_scores_are_recomputed_from_records_without_a_model(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs("method=1d") == 0
    monkeypatch.setattr(rescoring, "rescore", lambda cell, records: [{**r, "score": 0.5} for r in records])
    assert report.main([f"paths.store={runs.store}", "rescore=true"]) == 0
    (result,) = cells(runs.store).values()
    assert result["score"] == 0.5
    assert result["rescored"]


def test_scores_computed_again_are_those_of_the_differences_too(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs("method=1d,SnapKV", "budget=10%", "-m") == 0

    def again(cell: dict[str, Any], records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**r, "score": 0.75 if cell["info"]["method"] == "1d" else 0.25} for r in records]

    monkeypatch.setattr(rescoring, "rescore", again)
    arguments = [f"paths.store={runs.store}", "rescore=true"]
    assert report.main(arguments) == 0
    assert "2 of 2 results changed" in runs.capsys.readouterr().out
    (table,) = (runs.store / "reports").glob("*/deltas.csv")
    header, line = (x.split(",") for x in table.read_text().splitlines())
    assert line[header.index("method")] == "1d"
    assert float(line[header.index("score")]) == 0.5
    assert report.main(arguments) == 0
    assert "0 of 2 results changed" in runs.capsys.readouterr().out


def test_scores_are_not_computed_again_from_other_data(tmp_path: Path) -> None:
    row = {"task": "num", "length": 256, "context": "K01 4 1", "question": "? num K01", "answer": "4 1"}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    config = {"name": "recall", "type": "recall", "tasks": ["num"], "data_dir": str(tmp_path)}
    data = benchmark(config).fingerprint()
    cell = {"info": {"benchmark_config": config, "label": "1d"}, "payload": {"facts": {"benchmark": {"data": data}}}}
    kept = {"text": "4 1", "gold": ["4 1"], "scored_meta": {}, "finish_reason": "eos"}
    (record,) = ({"task": s.task, "id": s.id, **kept} for s in benchmark(config).samples())
    rescoring._benchmark.cache_clear()
    assert rescoring.rescore(cell, [record])[0]["score"] == 1
    path.write_text(json.dumps({**row, "answer": "9 9"}))
    for cache in (rescoring._benchmark, rescoring._identity):
        cache.cache_clear()
    with pytest.raises(UserError, match="the data of recall changed since 1d was run"):
        rescoring.rescore(cell, [record])


@pytest.mark.parametrize("content", ["[]", ""])
def test_a_damaged_file_is_one_line(runs: Runs, content: str) -> None:
    assert runs("method=1d") == 0
    for pattern in ("cells/*/result.json", "cells/*/payload.json", "sweeps/*/manifest.json"):
        (path,) = runs.store.glob(pattern)
        before = path.read_text()
        path.write_text(content)
        if path.name == "manifest.json":
            assert report.main([f"paths.store={runs.store}"]) == 2
            err = runs.capsys.readouterr().err
        else:
            assert runs("method=1d") == 2
            err = runs.err
        assert err.startswith(f"error: {path} is damaged (")
        assert err.count("\n") == 1
        path.write_text(before)
    (path,) = runs.store.glob("sweeps/*/manifest.json")
    path.write_text("{}")
    assert report.main([f"paths.store={runs.store}"]) == 2
    assert f"{path} is damaged" in runs.capsys.readouterr().err


def test_brackets_and_blanks_are_told_as_they_are(runs: Runs) -> None:
    runs.library.n = 1
    runs.store = runs.store / "with blanks"
    assert runs("method=1d", "generation=sampled") == 0
    assert "[no interval]" in runs.out  # one example says nothing about the spread
    assert f"'paths.store={runs.store}'" in runs.out.splitlines()[-1]


def test_who_lost_a_lease_waits_for_the_other(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    real, lost = Lease.check, [True]

    def check(self: Lease) -> None:
        if lost:
            lost.clear()
            raise LeaseLost("taken over")
        real(self)

    monkeypatch.setattr(Lease, "check", check)
    monkeypatch.setattr(launcher, "POLL_S", 0.01)
    assert runs("method=1d") == 0
    assert "waiting for another process" in runs.out
    assert len(cells(runs.store)) == 1


def test_a_result_has_what_the_design_asks_for(runs: Runs) -> None:
    assert runs("method=1d") == 0
    (result,) = cells(runs.store).values()
    wanted = """key status model method budget budget_protocol benchmark question_visible seed n n_expected score
        score_low score_high metric eq1_bytes resident_bytes full_bytes compression entries_per_head k_bits v_bits
        prefill_seconds decode_seconds tokens_per_second peak_bytes extraction_rate truncated finish_reasons versions
        commit tasks higher_is_better unit samples n_records resident_bytes_end resident_bytes_peak timing"""
    assert not [name for name in wanted.split() if name not in result]
    assert set(result["tasks"]["needle"]) == {"score", "score_low", "score_high", "n", "metric"}


def test_calibrate_shows_and_writes_the_plan(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [{"keep": 0.5, "tokens": None, "k_bits": 8, "v_bits": 4, "head_tokens": None}] * 3
    plan = {
        "schema": 1, "t_ref": 100, "budget": "0.1r", "protocol": "matched", "solver": "exact", "objective": 1.5,
        "gap": 0.0, "layers": layers, "predicted": {"eq1_bytes": 2048, "resident_bytes": 4096},
    }  # fmt: skip
    monkeypatch.setattr(stub.Library, "plan", lambda self, config, facts, folders: plan, raising=False)
    assert runs("method=2d_hetero", "budget=10%", main=calibrate.main) == 0
    assert "predicted: 2.0 KiB by eq. 1, 4.0 KiB resident" in runs.out
    (folder,) = (runs.store / "reports").iterdir()
    pictures = [f"{name}.{kind}" for name in ("routing_map", "sensitivity") for kind in ("pdf", "png")]
    made = sorted(["plan.json", "sensitivity", *pictures])  # the artefact, for use in a script
    assert sorted(p.name for p in folder.iterdir()) == made
    assert runs("method=2d_hetero", "budget=2", main=calibrate.main) == 2
    assert "the smallest is 4t" in runs.err


def test_the_commit_is_known_or_absent() -> None:
    commit = provenance.commit()
    assert commit is None or len(commit.removesuffix("-dirty")) == 40
