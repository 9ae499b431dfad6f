"""pipelines.score on made prediction files: the official arithmetic, what is listed, and mistakes as single lines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moend import benchmarks
from moend.benchmarks.longbench import TABLE, TASKS_E
from moend.statistics import score_interval, wilson
from pipelines.results import predictions as score
from tests import ROOT

GOLD = {"passage_retrieval_en": "Paragraph 2", "passage_retrieval_zh": "段落2", "trec": "Date", "lsht": "体育"}
CLASSES = {"trec": ["Date", "City"], "lsht": ["体育", "财经"]}


def line(task: str, pred: str | None = None, **changes: Any) -> str:
    """A prediction in the official format, right unless said otherwise."""
    gold = GOLD.get(task, "2")
    base = {"pred": gold if pred is None else pred, "answers": [gold], "all_classes": CLASSES.get(task), "length": 10}
    return json.dumps(base | changes, ensure_ascii=False)


class Score:
    """Runs the program on a folder; `.out`, `.err` and `.result` hold what it said and wrote."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        self.folder, self.capsys = folder, capsys
        self.out = self.err = ""

    def file(self, name: str, *lines: str) -> None:
        (self.folder / f"{name}.jsonl").write_text("".join(x + "\n" for x in lines), encoding="utf-8")

    def __call__(self, *args: str) -> int:
        self.capsys.readouterr()
        code = score.main([f"predictions={self.folder}", *args])
        self.out, self.err = self.capsys.readouterr()
        return code

    @property
    def result(self) -> dict[str, Any]:
        out: dict[str, Any] = json.loads((self.folder / "result.json").read_text(encoding="utf-8"))
        return out


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Score:
    return Score(tmp_path, capsys)


def test_all_tasks(run: Score) -> None:
    for task in TABLE:
        run.file(task, line(task), line(task, "none of it ."))
    assert run("benchmark=longbench") == 0
    r = run.result
    assert r["tasks"] == dict.fromkeys(TABLE, 50.0)
    assert list(r["tasks"]) == list(TABLE)
    assert (r["benchmark"], r["n"], r["average"], r["missing"], r["unknown"]) == ("longbench", 42, 50.0, [], [])
    assert r["rows"] == dict.fromkeys(TABLE, 2)
    assert "missing" not in run.out
    assert "2 of 200" in run.out
    assert str(run.folder / "result.json") in run.out
    assert not run.err


def test_official_arithmetic(run: Score) -> None:
    """Means in order, rounded to two decimals; the average is that of the rounded scores."""
    run.file("hotpotqa", line("hotpotqa", "x"), line("hotpotqa"), line("hotpotqa", "x"))
    run.file("passage_count", *(line("passage_count", p) for p in ("2", "2 3", "2 3 4", "3", "2", "2", "2")))
    assert run("benchmark=longbench_all") == 0
    want = round(100 * (1 + 0.5 + 1 / 3 + 0 + 1 + 1 + 1) / 7, 2)
    assert run.result["tasks"] == {"hotpotqa": 33.33, "passage_count": want}
    assert run.result["average"] == round((33.33 + want) / 2, 2)
    low, high = run.result["intervals"]["hotpotqa"]
    assert (low, high) == (round(100 * wilson(1, 3).low, 2), round(100 * wilson(1, 3).high, 2))  # type: ignore[arg-type]
    interval = score_interval([1, 0.5, 1 / 3, 0, 1, 1, 1])
    assert run.result["intervals"]["passage_count"] == [round(100 * x, 2) for x in (interval.low, interval.high)]  # type: ignore[operator]
    assert f"[{low:.2f}, {high:.2f}]" in run.out
    low, high = run.result["average_interval"]
    assert low < run.result["average"] < high


def test_the_classes_of_the_last_line_count(run: Score) -> None:
    rows = [line("trec", "Date City", all_classes=None), line("trec", "Date City", all_classes=["Date"])]
    run.file("trec", *rows)
    assert run("benchmark=longbench") == 0
    assert run.result["tasks"] == {"trec": 100.0}


def test_missing_and_unknown_tasks_are_listed(run: Score) -> None:
    run.file("trec", line("trec"))
    run.file("qasper", line("qasper"))
    run.file("squad", "not even JSON")
    assert run("benchmark=longbench_moend") == 0
    assert run.result["missing"] == ["narrativeqa", "hotpotqa", "passage_retrieval_en"]
    assert run.result["unknown"] == ["qasper.jsonl", "squad.jsonl"]
    assert "missing (3): narrativeqa, hotpotqa, passage_retrieval_en" in run.out
    assert "not a task of longbench_moend, not scored: qasper.jsonl, squad.jsonl" in run.out
    assert run("benchmark=longbench") == 0
    assert set(run.result["tasks"]) == {"trec", "qasper"}
    assert len(run.result["missing"]) == 19


def test_length_buckets(run: Score) -> None:
    lengths = (10, 3999, 4000, 7999.5, 7999)
    preds = ("2", "x", "2", "2", "x")
    rows = [line("hotpotqa", p, length=n) for p, n in zip(preds, lengths, strict=True)]
    run.file("hotpotqa", *rows)
    assert run("benchmark=longbench_e") == 0
    assert run.result["buckets"] == {
        "hotpotqa": {
            "0-4k": {"score": 50.0, "n": 2},
            "4-8k": {"score": 66.67, "n": 3},
            "8k+": {"score": None, "n": 0},
        }
    }
    assert run.result["tasks"] == {"hotpotqa": 60.0}
    assert "8k+" in run.out
    assert "5 of 300" in run.out
    first = run.result
    assert run("benchmark=longbench", "e=true") == 0
    assert run.result == first | {"benchmark": "longbench", "missing": [t for t in TASKS_E if t != "hotpotqa"]}
    assert run("benchmark=longbench") == 0
    assert "buckets" not in run.result
    run.file("hotpotqa", line("hotpotqa", length=None))
    assert run("benchmark=longbench") == 0
    assert run("benchmark=longbench_e") == 2
    assert "hotpotqa.jsonl:1: 'length' cannot be null: it must be a number" in run.err


BAD: dict[str, tuple[str, str]] = {
    "torn": ('{"pred": "a", "ans', "is not JSON"),
    "list": ("[1]", "is [1], not a JSON object"),
    "no pred": (json.dumps({"answers": ["2"]}), "has no field 'pred'"),
    "no answers": (json.dumps({"pred": "2"}), "has no field 'answers'"),
    "null": (json.dumps({"pred": None, "answers": ["2"]}), "'pred' cannot be null"),
    "text": (line("hotpotqa", answers="2"), "'answers' cannot be \"2\""),
    "none": (line("hotpotqa", answers=[]), "'answers' cannot be []"),
    "odd": (line("hotpotqa", answers=[["2"]]), "'answers[0]' cannot be"),
    "deep": ("[" * 100_000, "is not JSON"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_malformed_line_is_one_line_with_file_and_number(run: Score, bad: str) -> None:
    text, message = BAD[bad]
    run.file("hotpotqa", line("hotpotqa"), "", text, line("hotpotqa"))
    run.file("qasper", line("qasper"))
    assert run("benchmark=longbench") == 2
    assert run.err.startswith(f"error: {run.folder / 'hotpotqa.jsonl'}:3")
    assert message in run.err
    assert run.err.count("\n") == 1
    assert not (run.folder / "result.json").exists()


def test_more_malformed_files(run: Score) -> None:
    (run.folder / "hotpotqa.jsonl").write_bytes(line("hotpotqa").encode() + b"\n\xff{}\n")
    assert run("benchmark=longbench") == 2
    assert "hotpotqa.jsonl:2 is not UTF-8 (byte 0xff)" in run.err
    run.file("hotpotqa")
    assert run("benchmark=longbench") == 2
    assert "hotpotqa.jsonl is empty" in run.err
    run.file("hotpotqa", line("hotpotqa", "a\u2028b\x85 2", answers=["a\u2028b\x85 2"]))  # one line to JSON
    assert run("benchmark=longbench") == 0
    run.file("trec", line("trec"), line("trec", all_classes=None))
    assert run("benchmark=longbench") == 2
    assert "trec.jsonl:2: 'all_classes' cannot be null: it must be a list" in run.err
    (run.folder / "trec.jsonl").unlink()
    run.file("passage_retrieval_zh", line("passage_retrieval_zh", answers=["Paragraph 2"]))
    assert run("benchmark=longbench") == 2
    assert "it must be a text that reads '段落N'" in run.err


MISTAKES = {
    (): "benchmark= is missing",
    ("benchmark=longbench_mond",): "Did you mean 'longbench_moend'?",
    ("benchmark=niah",): "unknown benchmark to score 'niah'",
    ("benchmark=longbench", "ot=x"): "Did you mean 'out'?",
    ("benchmark=longbench", "e=1"): "e is true or false, got '1'",
    ("benchmark=longbench",): "holds no task of longbench",
    ("benchmark=longbench", "predictions=/no/such/folder"): "predictions=/no/such/folder is not a folder",
    ("benchmark=longbench", "predictions="): "predictions= is missing",
}


@pytest.mark.parametrize("args", MISTAKES)
def test_mistakes_are_one_line(run: Score, args: tuple[str, ...]) -> None:
    assert run(*args) == 2
    assert run.err.startswith("error: ")
    assert MISTAKES[args] in run.err
    assert run.err.count("\n") == 1
    assert not run.out
    assert not list(run.folder.iterdir())


def test_another_programs_result_is_kept_and_compared(run: Score) -> None:
    run.file("hotpotqa", line("hotpotqa"))
    run.file("qasper", line("qasper"), line("qasper", "x"))
    theirs = '{"hotpotqa": 100.0, "qasper": 49.0, "trec": 1.0}'
    (run.folder / "result.json").write_text(theirs)
    for _ in range(2):
        assert run("benchmark=longbench") == 0
        assert run.result["tasks"] == {"qasper": 50.0, "hotpotqa": 100.0}
        assert (run.folder / "result.published.json").read_text() == theirs
        assert "equal to the published result.json: 1 of 2 tasks" in run.out
        assert "49.00" in run.out


def test_out(run: Score, tmp_path: Path) -> None:
    run.file("hotpotqa", line("hotpotqa"))
    assert run("benchmark=longbench", f"out={tmp_path / 'new' / 'folder'}") == 0
    assert not (run.folder / "result.json").exists()
    assert json.loads((tmp_path / "new" / "folder" / "result.json").read_text())["n"] == 1
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert run("benchmark=longbench", f"out={blocker / 'x'}") == 2
    assert run.err.startswith("error: cannot write")


def test_one_file(run: Score) -> None:
    run.file("hotpotqa", line("hotpotqa"))
    run.file("qasper", "not read")
    assert run("benchmark=longbench", f"predictions={run.folder / 'hotpotqa.jsonl'}") == 0
    assert run.result["tasks"] == {"hotpotqa": 100.0}
    assert len(run.result["missing"]) == 20
    assert run("benchmark=longbench", f"predictions={run.folder / 'result.json'}") == 2
    assert "holds no task of longbench" in run.err


def test_the_folder_below_is_named(run: Score) -> None:
    (run.folder / "pred" / "model").mkdir(parents=True)
    run.file("pred/model/hotpotqa", line("hotpotqa"))
    assert run("benchmark=longbench") == 2
    assert f"predictions={run.folder / 'pred' / 'model'} holds some" in run.err
    assert run.err.count("\n") == 1


def test_what_a_line_lacks_is_said_with_what_it_has(run: Score) -> None:
    run.file("hotpotqa", line("hotpotqa"), '{"prediction": "2", "answers": ["2"]}')
    assert run("benchmark=longbench") == 2
    assert "hotpotqa.jsonl:2 has no field 'pred': it has 'prediction', 'answers'" in run.err
    run.file("hotpotqa", line("hotpotqa", answers="2"))
    assert run("benchmark=longbench") == 2
    assert "hotpotqa.jsonl:1: 'answers' cannot be \"2\": it must be a list" in run.err


@pytest.mark.parametrize(("name", "gold"), [("aime24", "x"), ("aime24", "1005"), ("math500", " ")])
def test_a_gold_answer_that_nothing_equals_is_a_mistake(run: Score, name: str, gold: str) -> None:
    run.file(name, json.dumps({"answer": "4", "text": r"\boxed{4}"}), json.dumps({"answer": gold, "text": "4"}))
    assert run(f"benchmark={name}") == 2
    assert f"{name}.jsonl:2: 'answer' cannot be" in run.err


def test_a_file_named_after_another_benchmark_is_not_taken_for_this_one(run: Score) -> None:
    run.file("aime24", json.dumps({"answer": "4", "text": r"\boxed{4}"}))
    assert run("benchmark=math500") == 2
    assert "holds no math500.jsonl" in run.err


class Boxed:
    """Stands for a math benchmark: right where the text ends with the answer."""

    name, scorer_version, task_names = "math500", 7, ("math500",)

    def metric(self, task: str) -> str:
        return "exact"

    def score(self, sample: benchmarks.Sample, text: str, finished: bool = True) -> dict[str, Any]:
        answer = text.split()[-1] if finished and text.split() else None
        return {"score": float(answer == sample.gold[0]), "answer": answer}


def test_math(run: Score, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score, "names", lambda: {"math500": "math", "longbench": "longbench"})
    real: Callable[..., Any] = benchmarks.benchmark
    monkeypatch.setattr(benchmarks, "benchmark", lambda n: Boxed() if n == "math500" else real(n))
    rows = [("4", "so 4"), ("5", "so 4"), (6, "6"), ("7", "")]
    run.file("math500", *(json.dumps({"answer": a, "text": t}) for a, t in rows))
    assert run("benchmark=math500") == 0
    r = run.result
    assert (r["tasks"], r["average"], r["n"]) == ({"math500": 50.0}, 50.0, 4)
    assert r["extraction_rate"] == {"math500": 0.75}
    assert r["intervals"]["math500"] == [round(100 * x, 2) for x in (wilson(2, 4).low, wilson(2, 4).high)]  # type: ignore[operator]
    assert r["scorer_version"] == 7

    run.file("math500", *(json.dumps({"answer": "4", "text": "4", "finish_reason": r}) for r in ("eos", "length")))
    assert run("benchmark=math500") == 0
    assert (run.result["average"], run.result["extraction_rate"]) == (50.0, {"math500": 0.5})

    # draws of one problem are one example; a file by itself, and the only one of a folder
    draws = [json.dumps({"id": i // 2, "answer": "4", "text": "4" if i else "x"}) for i in range(4)]
    (run.folder / "math500.jsonl").unlink()
    run.file("mine", *draws)
    for where in (run.folder, run.folder / "mine.jsonl"):
        assert run("benchmark=math500", f"predictions={where}") == 0
        assert (run.result["n"], run.result["rows"], run.result["average"]) == (2, {"math500": 4}, 75.0)
    run.file("other", *draws)
    assert run("benchmark=math500") == 2
    assert "holds no math500.jsonl" in run.err
    assert run("benchmark=math500", "e=true") == 2
    assert "e=true is for LongBench" in run.err
    run.file("math500", json.dumps({"answer": "4"}))
    assert run("benchmark=math500") == 2
    assert "math500.jsonl:1 has no field 'text'" in run.err


@pytest.mark.process
def test_help_and_mistakes_import_no_torch() -> None:
    code = (
        "import sys; from pipelines.results import predictions as score; "
        "assert score.main(['--help']) == 0 and score.main(['benchmark=nope', 'predictions=x']) == 2; "
        "assert 'torch' not in sys.modules and 'jieba' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    for word in ("pred, answers, all_classes, length", "math500", "result.json", "Exit codes"):
        assert word in done.stdout
    assert "Did you mean" in done.stderr or "Choices" in done.stderr
