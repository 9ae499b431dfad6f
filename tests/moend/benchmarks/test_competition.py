"""AIME and MATH-500: data, prompts, the two ways to ask, limits, and scores under both protocols."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from moend.benchmarks import benchmark
from moend.benchmarks.competition import INSTRUCTION
from moend.benchmarks.prompts import asks_to_think
from moend.budget import Arch
from moend.errors import Blocked, UserError
from moend.models import load as models
from tests.moend.benchmarks.conftest import CHATML, byte_tokenizer
from tests.moend.benchmarks.test_answers import MATH, needs_math

ARCH = Arch(30, 9, 3, 64, 8192)
LARGE = Arch(28, 28, 4, 128, 131_072)
# as DeepSeek-R1's distilled models: the prompt ends inside a thought
OPENING = (
    "{{ bos_token }}{% for m in messages %}<User>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<Assistant><think>\n{% endif %}"
)
# as Qwen3: a switch, on unless told otherwise
SWITCH = CHATML + (
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
ROWS = {
    "aime24": [
        {"id": "a", "problem": "Find $1+1$.", "answer": "2"},
        {"id": "b", "problem": "Find $5^2$.", "answer": "025"},
    ],
    "math500": [{"id": "m", "problem": "Halve 1.", "answer": "\\frac{1}{2}", "subject": "Algebra", "level": 1}],
}


def write(folder: Path, task: str, rows: list[Any]) -> None:
    (folder / f"{task}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for task, rows in ROWS.items():
        write(tmp_path, task, rows)
    return tmp_path


def digest(ids: tuple[int, ...]) -> str:
    return hashlib.sha256(str(tuple(ids)).encode()).hexdigest()[:16]


def render(b, tokenizer, arch=ARCH, new=64):
    return b.render(b.samples()[0], tokenizer, arch, chat=tokenizer.chat_template is not None, max_new_tokens=new)


# Data


def test_what_a_plan_needs_is_known_without_the_data() -> None:
    for name, n in (("aime24", 30), ("aime25", 30), ("math500", 500)):
        b = benchmark(name)
        assert b.expected() == {name: n}
        assert benchmark(name, limit=7).expected() == {name: 7}
        assert benchmark(name, limit=1000).expected() == {name: n}
        assert b.identity()["data"] == benchmark(name, limit=7).identity()["data"]
        assert b.fingerprint() != benchmark(name, revision="0" * 40).fingerprint()
        assert b.new_tokens(name) == 16_384
        assert "revision" not in b.identity() and "data_dir" not in b.identity()


@needs_math
@pytest.mark.parametrize(("name", "n"), [("aime24", 30), ("aime25", 30), ("math500", 500)])
def test_the_whole_sets(name: str, n: int) -> None:
    b = benchmark(name, data_dir=str(MATH))
    assert b.expected() == {name: n}
    for sample in b.samples():
        assert b.score(sample, rf"\boxed{{{sample.gold[0]}}}") == {"score": 1.0, "answer": sample.gold[0]}
        assert b.score(sample, "") == {"score": 0.0, "answer": None}


def test_a_folder_or_a_file(folder: Path) -> None:
    b = benchmark("aime24", data_dir=str(folder))
    one = benchmark("aime24", data_dir=str(folder / "aime24.jsonl"))
    assert b.samples() == one.samples()
    assert b.identity() == one.identity()
    (first, second) = b.samples()
    assert (first.task, first.id, first.context, first.question, first.gold) == (
        "aime24", "a", "Find $1+1$.", INSTRUCTION, ("2",),
    )  # fmt: skip
    assert second.gold == ("025",)
    (m,) = benchmark("math500", data_dir=str(folder)).samples()
    assert m.meta == {"subject": "Algebra", "level": 1}
    both = benchmark("aime24", tasks=("aime24", "math500"), data_dir=str(folder))
    assert both.expected() == {"aime24": 2, "math500": 1}


def test_fewer_rows_than_asked_for_is_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert benchmark("aime24", data_dir=str(folder), limit=5).expected() == {"aime24": 2}
    assert "has 2 of 5 rows" in caplog.text
    caplog.clear()
    assert benchmark("aime24", data_dir=str(folder), limit=1).expected() == {"aime24": 1}
    assert not caplog.text


BAD_ROWS = {
    "aime24.jsonl:1 has no field 'answer'": [{"id": "a", "problem": "p"}],
    "aime24.jsonl:1: 'id' cannot be null": [{"id": None, "problem": "p", "answer": 3}],
    "aime24.jsonl:1: 'problem' cannot be \" \": it must": [{"id": "a", "problem": " ", "answer": "3"}],
    "aime24.jsonl:2 repeats 'id' '1' of line 1": [
        {"id": 1, "problem": "p", "answer": 3},
        {"id": "1", "problem": "q", "answer": 3},
    ],
    "'answer' cannot be 1000: it must be a whole number from 0 to 999": [{"id": 1, "problem": "p", "answer": 1000}],
    "aime24.jsonl:1 is [1], not a JSON object": [[1]],
    "aime24 has no rows": [],
}


@pytest.mark.parametrize("message", BAD_ROWS)
def test_bad_rows_are_named(tmp_path: Path, message: str) -> None:
    write(tmp_path, "aime24", BAD_ROWS[message])
    with pytest.raises(UserError) as e:
        benchmark("aime24", data_dir=str(tmp_path)).samples()
    assert message in str(e.value)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "aime25.jsonl").write_text('{"id": 1, "problem"')
    with pytest.raises(UserError, match=r"aime25.jsonl:1 is not JSON"):
        benchmark("aime25", data_dir=str(tmp_path)).samples()


def test_missing_data_blocks(tmp_path: Path) -> None:
    b = benchmark("aime24", data_dir=str(tmp_path))
    assert "aime24.jsonl" in str(b.available())
    with pytest.raises(Blocked):
        b.samples()


def test_bad_fields() -> None:
    for fields, message in [
        ({"split": "calibration"}, "has no calibration split"),
        ({"length": None}, "must be a number of tokens"),
        ({"revision": None}, "benchmark.revision must name"),
        ({"tasks": ("aime24", "aime25")}, "one task from the hub at a time"),
        ({"tasks": ("aime26",)}, "Did you mean 'aime2"),
    ]:
        with pytest.raises(UserError, match=message):
            benchmark("aime24", **fields)


def test_the_hub_is_asked_for_the_pinned_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"id": 60, "problem": "p", "answer": "025", "year": "2024"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    (tmp_path / "test.jsonl").write_text('{"unique_id": "test/a/1.json", "problem": "q", "answer": "1"}\n')
    asked = []

    def download(repo: str, file: str, *, repo_type: str, revision: str, cache_dir: object) -> str:
        asked.append((repo, file, repo_type, revision))
        return str(tmp_path / ("train.parquet" if file.endswith("parquet") else "test.jsonl"))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    b = benchmark("aime24", limit=1)
    (sample,) = b.samples()
    assert (sample.id, sample.context, sample.gold) == ("aime24-60", "p", ("025",))
    (other,) = benchmark("math500", limit=1).samples()
    assert other.id == "test/a/1.json"
    assert asked[0] == ("HuggingFaceH4/aime_2024", "data/train-00000-of-00001.parquet", "dataset", b.revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "the hub is off" in str(benchmark("aime25").available())

    def absent(*_: Any, **__: Any) -> str:
        raise OSError("no route\nmore")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", absent)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(Blocked, match=r"math-ai/aime25 cannot be fetched \(no route\)"):
        benchmark("aime25").fetch()


# Prompts


@pytest.mark.req(12)
def test_golden_prompt_of_a_made_template(folder: Path) -> None:
    tokenizer = byte_tokenizer(bos=True, template=CHATML)
    r = render(benchmark("aime24", data_dir=str(folder)), tokenizer)
    text = f"<|im_start|>user\nFind $1+1$.\n{INSTRUCTION}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(r.ids) == "<s>" + text
    assert list(r.ids).count(tokenizer.bos_token_id) == 1
    assert (len(r.ids), r.context_tokens) == (101, 17)  # ".\n" is one token: it belongs to the question
    assert digest(r.ids) == "702cd5e8f886f7fd"
    assert tokenizer.decode(r.gold_ids) == "\\boxed{2}"
    assert not r.thinking


@pytest.mark.slow
@needs_math
@pytest.mark.req(12)
@pytest.mark.parametrize(
    ("name", "tokens", "context", "want"),
    [
        ("aime24", 182, 158, "a321d49ed1075d6e"),
        ("aime25", 80, 56, "de5952ecbee2bb08"),
        ("math500", 97, 73, "4f11d80e7514fe0b"),
    ],
)
def test_golden_prompts_of_the_embedded_model(name: str, tokens: int, context: int, want: str) -> None:
    cache = Path(os.environ.get("MOEND_CACHE", "~/.cache/moend")).expanduser()
    tokenizer = AutoTokenizer.from_pretrained(models.fetch(models.spec("smollm2_135m"), cache))
    b = benchmark(name, data_dir=str(MATH))
    r = render(b, tokenizer)
    turn = f"<|im_start|>user\n{b.samples()[0].context}\n{INSTRUCTION}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(r.ids).partition("<|im_end|>\n")[2] == turn
    assert tokenizer.decode(r.ids[r.context_tokens :]).lstrip(".$").startswith("\n" + INSTRUCTION)
    assert (len(r.ids), r.context_tokens, digest(r.ids)) == (tokens, context, want)
    assert not r.thinking
    for sample in b.samples():  # every problem fits benchmark.length
        assert b.render(sample, tokenizer, ARCH, chat=True, max_new_tokens=64).truncated == 0


@pytest.mark.req(23)
def test_the_problem_is_context_and_the_instruction_the_question(folder: Path) -> None:
    for tokenizer in (byte_tokenizer(bos=True), byte_tokenizer(bos=False, template=CHATML)):
        r = render(benchmark("math500", data_dir=str(folder)), tokenizer)
        before, after = tokenizer.decode(r.ids[: r.context_tokens]), tokenizer.decode(r.ids[r.context_tokens :])
        assert before.endswith("Halve 1")
        assert after.startswith(".\n" + INSTRUCTION)


@pytest.mark.req(11)
def test_limits_are_refused_while_composing(tmp_path: Path) -> None:
    b = benchmark("aime24")
    b.check(LARGE)
    with pytest.raises(UserError, match=r"need 18432 positions; the model has 8192: generation.max_new_tokens=6144 "):
        b.check(ARCH)
    b.check(ARCH, 6144)
    benchmark("aime24", max_new_tokens=6144).check(ARCH)
    with pytest.raises(UserError, match=r"lower benchmark.length"):
        b.check(Arch(2, 2, 1, 8, 2048), 16)
    write(tmp_path, "aime24", [{"id": "a", "problem": "x" * 3000, "answer": "1"}])
    with pytest.raises(UserError, match=r"a takes 30\d\d tokens, more than benchmark.length=2048"):
        render(benchmark("aime24", data_dir=str(tmp_path)), byte_tokenizer(bos=False))


# The reasoning protocol


def test_whether_a_prompt_opens_a_thought(folder: Path) -> None:
    found = {}
    for name, template in {"chatml": CHATML, "opening": OPENING, "switch": SWITCH}.items():
        tokenizer = byte_tokenizer(bos=True, template=template)
        found[name] = render(benchmark("aime24", data_dir=str(folder)), tokenizer).thinking
    assert found == {"chatml": False, "opening": True, "switch": True}
    assert not render(benchmark("aime24", data_dir=str(folder)), byte_tokenizer(bos=True)).thinking
    assert not asks_to_think(byte_tokenizer(bos=True, template=OPENING), "so</think>It is")
    spoken = [{"id": "a", "problem": "What does <think> mean?", "answer": "1"}]  # said by the user, not the template
    write(folder, "aime25", spoken)
    tokenizer = byte_tokenizer(bos=True, template=CHATML)
    assert not render(benchmark("aime25", data_dir=str(folder)), tokenizer).thinking


@pytest.mark.req(10)
def test_scores_under_both_protocols(folder: Path) -> None:
    for reasoning in (False, True):
        b = benchmark("aime24", data_dir=str(folder), reasoning=reasoning)
        s = b.samples()[1]
        right = {"score": 1.0, "answer": "25"}
        assert b.score(s, r"hm </think> \boxed{25}", opened=True) == right
        assert b.score(s, r"\boxed{25}") == right
        assert b.score(s, r"\boxed{25} and on and on", finished=False) == right
        assert b.score(s, "It must be 25", finished=False) == {"score": 0.0, "answer": None}
        assert b.score(s, r"\boxed{25}</think> no idea", opened=True) == {"score": 0.0, "answer": None}
        # a thought that was never closed
        assert b.score(s, r"hm \boxed{25}", opened=True)["score"] == (0.0 if reasoning else 1.0)
        assert b.score(s, r"hm \boxed{25}", opened=False) == right


def test_output_limits_of_the_reasoning_protocol() -> None:
    for name, plain, reasoning in (("aime24", 16_384, 16_384), ("math500", 16_384, 16_384), ("niah", 16, 256)):
        assert benchmark(name).output_tokens(name) == plain
        assert benchmark(name, reasoning=True).output_tokens(name) == reasoning
        assert benchmark(name, reasoning=True).output_tokens(name, 7) == 7
        assert benchmark(name, reasoning=True, max_new_tokens=9).output_tokens(name) == 9
    b = benchmark("longbench", data_dir=".", tasks=("hotpotqa", "narrativeqa", "trec", "samsum"), reasoning=True)
    assert [b.output_tokens(t) for t in b.task_names] == [512, 2048, 1024, 2048]
    assert b.stops("samsum") == ()  # a thought has line breaks
    assert benchmark("longbench", data_dir=".", tasks=("samsum",)).stops("samsum") == ("\n",)
    assert not benchmark("continuation", reasoning=True).reasoning  # nothing is generated
    assert benchmark("aime24").identity() != benchmark("aime24", reasoning=True).identity()


def test_one_draw_of_aime_is_cautioned() -> None:
    assert "generation.samples=8" in str(benchmark("aime24").caution(1))
    assert benchmark("aime24").caution(4) is None
    assert benchmark("math500").caution(1) is None
    assert benchmark("niah").caution(1) is None
