"""Rows that others wrote: every kind of damage, in every loader, is one line that names file, line and field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moend.benchmarks import Benchmark, benchmark, rows
from moend.benchmarks.text import part
from moend.errors import UserError

Row = dict[str, Any]


def longbench(i: int) -> Row:
    return {"_id": f"a{i}", "context": f"Text {i}.", "input": "Where?", "answers": ["Paris"], "all_classes": None}


def problem(i: int) -> Row:
    return {"id": f"a{i}", "problem": f"Problem {i}", "answer": str(i + 1)}


def fact(i: int) -> Row:
    return {"task": "num", "length": 32, "context": f"K0{i} 4 1", "question": f"? num K0{i}", "answer": "4 1"}


class Loader:
    """A benchmark, the file it reads and the fields its rows have."""

    def __init__(self, file: str, make: Callable[[int], Row], gold: str, context: str, **fields: Any):
        self.file, self.make, self.gold, self.context, self.fields = file, make, gold, context, fields

    def __call__(self, folder: Path, raw: bytes) -> Benchmark:
        (folder / self.file).write_bytes(raw)
        return benchmark(data_dir=str(folder), **self.fields)


LOADERS = {
    "longbench": Loader("qasper.jsonl", longbench, "answers", "context", spec="longbench", tasks="qasper"),
    "competition": Loader("aime25.jsonl", problem, "answer", "problem", spec="aime25"),
    "recall": Loader("rows.jsonl", fact, "answer", "context", spec="recall", tasks="num", length=32),
}


@pytest.fixture(params=LOADERS)
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Loader:
    found: Loader = LOADERS[request.param]
    fields = dict(found.fields)
    name = fields.pop("spec")
    made = Loader(found.file, found.make, found.gold, found.context, **fields)
    real = benchmark
    monkeypatch.setattr(f"{__name__}.benchmark", lambda **f: real(name, **f))
    return made


def dumped(*lines: Row | str) -> bytes:
    return "".join((x if isinstance(x, str) else json.dumps(x, ensure_ascii=False)) + "\n" for x in lines).encode()


def second(loader: Loader, **changes: Any) -> bytes:
    """Two rows, the second with other fields; None of a field named `without` removes one."""
    return dumped(loader.make(0), {**loader.make(1), **changes})


DAMAGE: dict[str, tuple[Callable[[Loader], bytes], str]] = {
    "gold null": (lambda x: second(x, **{x.gold: None}), "rows:2: 'GOLD' cannot be null"),
    "gold empty": (lambda x: second(x, **{x.gold: [""] if x.gold == "answers" else ""}), "rows:2: 'GOLD"),
    "gold blank": (lambda x: second(x, **{x.gold: [" "] if x.gold == "answers" else "\t"}), "rows:2: 'GOLD"),
    "gold of another type": (lambda x: second(x, **{x.gold: {"a": 1}}), "rows:2: 'GOLD' cannot be {"),
    "gold true": (lambda x: second(x, **{x.gold: [True] if x.gold == "answers" else True}), "cannot be true"),
    "context a list": (lambda x: second(x, **{x.context: ["a"]}), "rows:2: 'CONTEXT' cannot be [\"a\"]"),
    "context empty": (lambda x: second(x, **{x.context: " "}), "rows:2: 'CONTEXT' cannot be"),
    "context missing": (lambda x: dumped(x.make(0), {"other": 1}), "rows:2 has no field '"),
    "half a surrogate": (
        lambda x: dumped(x.make(0), json.dumps({**x.make(1), x.context: "a\ud800"})),
        "rows:2: 'CONTEXT' cannot be",
    ),
    "twice": (lambda x: dumped(x.make(0), x.make(1), x.make(1)), "rows:3 repeats"),
    "field twice": (
        lambda x: dumped(x.make(0), json.dumps(x.make(1))[:-1] + f', "{x.gold}": "1"}}'),
        "rows:2 is not JSON: the field 'GOLD' is there twice",
    ),
    "torn": (lambda x: dumped(x.make(0)) + dumped(x.make(1))[:-9], "rows:2 is not JSON"),
    "a list": (lambda x: dumped(x.make(0), "[1]"), "rows:2 is [1], not a JSON object"),
    "deep": (lambda x: dumped(x.make(0), "[" * 100_000), "rows:2 is not JSON"),
    "NaN": (lambda x: dumped(x.make(0), '{"length": NaN}'), "rows:2 is not JSON: NaN is no number"),
    "Latin-1": (
        lambda x: json.dumps({**x.make(0), x.context: "café"}, ensure_ascii=False).encode("latin-1"),
        "rows:1: 'CONTEXT' is not UTF-8 (byte 0xe9)",
    ),
    "UTF-16": (lambda x: dumped(x.make(0)).decode().encode("utf-16"), "rows:1 is UTF-16"),
    "UTF-16 without a mark": (lambda x: dumped(x.make(0)).decode().encode("utf-16-le"), "rows:1 is UTF-16"),
    "UTF-32": (lambda x: dumped(x.make(0)).decode().encode("utf-32"), "rows:1 is UTF-16 or UTF-32"),
    "a mark inside": (lambda x: dumped(x.make(0)) + b"\xef\xbb\xbf" + dumped(x.make(1)), "rows:2 is not JSON"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_line_with_file_line_and_field(loader: Loader, tmp_path: Path, damage: str) -> None:
    raw, message = DAMAGE[damage]
    with pytest.raises(UserError) as e:
        loader(tmp_path, raw(loader)).samples()
    told = str(e.value).replace(str(tmp_path / loader.file), "rows")
    assert message.replace("GOLD", loader.gold).replace("CONTEXT", loader.context) in told
    assert "\n" not in told
    assert len(told) < 400


SOUND: dict[str, Callable[[bytes], bytes]] = {
    "byte order mark": lambda raw: b"\xef\xbb\xbf" + raw,
    "CRLF": lambda raw: raw.replace(b"\n", b"\r\n"),
    "blank lines": lambda raw: b"\n" + raw.replace(b"\n", b"\n\n \n"),
    "no last line feed": lambda raw: raw[:-1],
    "long line": lambda raw: raw.replace(b"}\n", b', "more": "' + b"x" * 5_000_000 + b'"}\n', 1),
}


@pytest.mark.parametrize("kind", SOUND)
def test_what_is_sound_reads_the_same(loader: Loader, tmp_path: Path, kind: str) -> None:
    raw = dumped(loader.make(0), loader.make(1))
    plain = loader(tmp_path, raw)
    assert len(plain.samples()) == 2
    assert loader(tmp_path, SOUND[kind](raw)).samples() == plain.samples()


@pytest.mark.parametrize("break_", ["\u2028", "\u2029", "\x85", "\x0c", "\x1c"])
def test_no_other_character_ends_a_line(loader: Loader, tmp_path: Path, break_: str) -> None:
    row = {**loader.make(0), loader.context: f"one{break_}two"}
    shown = json.dumps(row, ensure_ascii=False) if break_ > "\x1f" else json.dumps(row)
    (sample,) = loader(tmp_path, shown.encode() + b"\n").samples()
    assert sample.context == f"one{break_}two"


def test_the_golds_of_a_text_are_not_its_letters(tmp_path: Path) -> None:
    (tmp_path / "qasper.jsonl").write_bytes(dumped({**longbench(0), "answers": "Paris"}))
    with pytest.raises(UserError, match=r"qasper\.jsonl:1: 'answers' cannot be \"Paris\": it must be a list"):
        benchmark("longbench", data_dir=str(tmp_path), tasks="qasper").samples()


def test_misspelt_tasks_are_named_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(dumped(fact(0), {**fact(1), "task": "nun"}))
    with pytest.raises(UserError, match=r"rows\.jsonl:2: 'task' cannot be \"nun\".*did you mean 'num'"):
        benchmark("recall", data_dir=str(tmp_path), length=32).samples()
    (tmp_path / "mixed.jsonl").write_bytes(dumped({**longbench(0), "dataset": "qaspr"}))
    with pytest.raises(UserError, match=r"mixed\.jsonl:1: 'dataset' cannot be \"qaspr\".*did you mean 'qasper'"):
        benchmark("longbench", data_dir=str(tmp_path / "mixed.jsonl"), tasks="qasper").samples()
    (tmp_path / "qaspr.jsonl").write_bytes(dumped(longbench(0)))
    told = benchmark("longbench", data_dir=str(tmp_path), tasks="qasper").available()
    assert told is not None
    assert "no qasper.jsonl (is it 'qaspr.jsonl'?)" in told


def test_too_many_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "qasper.jsonl").write_bytes(dumped(*map(longbench, range(201))))
    with pytest.raises(UserError, match=r"qasper\.jsonl holds 201 rows, more than the 200 of the data set"):
        benchmark("longbench", data_dir=str(tmp_path), tasks="qasper", limit=5).samples()
    (tmp_path / "aime25.jsonl").write_bytes(dumped(*map(problem, range(31))))
    with pytest.raises(UserError, match="holds 31 rows, more than the 30"):
        benchmark("aime25", data_dir=str(tmp_path)).samples()


def test_a_row_may_not_be_there_in_two_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(dumped(fact(0)))
    with pytest.raises(UserError, match=r"b\.jsonl:1 repeats the row of .*a\.jsonl:1"):
        benchmark("recall", data_dir=str(tmp_path), tasks="num", length=32).samples()


def test_rows_beyond_the_limit_are_checked(tmp_path: Path) -> None:
    (tmp_path / "qasper.jsonl").write_bytes(dumped(*map(longbench, range(3)), "{"))
    with pytest.raises(UserError, match=r"qasper\.jsonl:4 is not JSON"):
        benchmark("longbench", data_dir=str(tmp_path), tasks="qasper", limit=2).samples()


def test_documents_name_the_place_inside(tmp_path: Path) -> None:
    path = tmp_path / "squad.json"
    qa = {"question": "q", "answers": [{"text": ""}]}
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": "c", "qas": [qa]}]}]}))
    with pytest.raises(UserError, match=r"squad\.json: 'data\[0\]\.paragraphs\[0\]\.qas\[0\]\.answers\[0\]\.text'"):
        benchmark("ruler_own", tasks="qa_1", limit=1, data_dir=str(tmp_path)).samples()
    path.write_bytes(b'{\n"data": "\xe9"}')
    with pytest.raises(UserError, match=r"squad\.json: 'data' is not UTF-8 \(byte 0xe9, line 2\)"):
        benchmark("ruler_own", tasks="qa_1", limit=1, data_dir=str(tmp_path)).samples()


def test_texts_lose_their_mark_and_name_their_encoding(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\nthree\r\nfour\r\nfive\r\nsix")
    assert part("calibration", str(path)) + part("test", str(path)) == "one\ntwothree\nfour\nfive\nsix"
    path.write_bytes("café".encode("utf-16"))
    with pytest.raises(UserError, match=r"mine\.txt is UTF-16"):
        part("test", str(path))


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        list(rows.read(tmp_path, rows.fields()))
