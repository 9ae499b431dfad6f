"""Official prompts, lengths, truncation and scoring; the official rows are read in place where they are."""

from __future__ import annotations

import hashlib
import json
import zipfile

import pytest

from moend.benchmarks import benchmark, longbench
from moend.benchmarks.longbench import TABLE
from moend.errors import Blocked, UserError
from moend.plan import Arch
from tests.moend.benchmarks.conftest import CHATML, LONGBENCH, byte_tokenizer, needs_longbench

CHAT = byte_tokenizer(bos=False, template=CHATML)
ARCH = Arch(2, 2, 1, 8, 8192)


def row(**changes):
    base = {
        "input": "What?",
        "context": "Some context.",
        "answers": ["Yes"],
        "length": 3,
        "dataset": "x",
        "language": "en",
        "all_classes": None,
        "_id": "1",
    }
    return {**base, **changes}


def folder(tmp_path, **tasks):
    for task, rows in tasks.items():
        lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in rows]
        (tmp_path / f"{task}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return benchmark("longbench", data_dir=str(tmp_path), tasks=list(tasks))


@needs_longbench
def test_prompts_and_lengths_are_the_official_ones():
    prompts = json.loads((LONGBENCH / "config" / "dataset2prompt.json").read_text(encoding="utf-8"))
    lengths = json.loads((LONGBENCH / "config" / "dataset2maxlen.json").read_text(encoding="utf-8"))
    for task, entry in TABLE.items():
        assert entry["prompt"] == prompts[task]
        assert entry["max_new_tokens"] == lengths[task]


def test_table():
    assert hashlib.sha256(json.dumps(TABLE, sort_keys=True).encode()).hexdigest()[:16] == "13e612f6b568924e"
    for entry in TABLE.values():
        assert entry["prompt"].count("{context}") == 1
        assert entry["prompt"].count("{input}") <= 1
        assert "\\n" not in entry["prompt"]
    plain = {t for t, e in TABLE.items() if not e["chat"]}
    assert plain == {"trec", "triviaqa", "samsum"} == {t for t, e in TABLE.items() if e["first_line"]}


@needs_longbench
@pytest.mark.req(11)
@pytest.mark.parametrize("length", [2048, None])
def test_official_rows_fit(length):
    tasks = [t for t in TABLE if (LONGBENCH / f"{t}.jsonl").is_file()]
    assert len(tasks) == 9
    b = benchmark("longbench", data_dir=str(LONGBENCH), tasks=tasks, length=length, limit=2)
    limit = length or ARCH.max_positions
    cut = 0
    for s in b.samples():
        r = b.render(s, CHAT, ARCH, chat=True)
        assert r.prompt_tokens + r.max_new_tokens <= limit
        text = CHAT.decode(r.ids)
        head, tail = TABLE[s.task]["prompt"].split("{context}")
        tail = tail.replace("{input}", s.question)
        assert head in text
        # at most one token over the boundary belongs to the question
        assert CHAT.decode(r.ids[r.context_tokens :]).endswith(
            tail + ("<|im_end|>\n<|im_start|>assistant\n" if TABLE[s.task]["chat"] else "")
        )
        assert text.startswith("<|im_start|>user\n") == TABLE[s.task]["chat"]
        assert (r.truncated > 0) == (r.prompt_tokens + r.max_new_tokens > limit - 8)
        cut += r.truncated > 0
    assert cut > 3
    assert b.expected()["hotpotqa"] == 1


@needs_longbench
def test_official_rows_are_read_in_file_order(caplog):
    b = benchmark("longbench_moend", data_dir=str(LONGBENCH))
    rows = [json.loads(x) for x in (LONGBENCH / "narrativeqa.jsonl").read_text(encoding="utf-8").split("\n") if x]
    mine = [s for s in b.samples() if s.task == "narrativeqa"]
    assert [(s.id, s.context, list(s.gold)) for s in mine] == [(r["_id"], r["context"], r["answers"]) for r in rows]
    assert b.expected() == {"narrativeqa": 8, "hotpotqa": 1, "trec": 1, "passage_retrieval_en": 1}
    assert "longbench_moend: trec has 1 of 50 rows" in caplog.text


@needs_longbench
def test_gold_answers_score_one():
    tasks = [t for t in TABLE if (LONGBENCH / f"{t}.jsonl").is_file()]
    b = benchmark("longbench", data_dir=str(LONGBENCH), tasks=tasks)
    for s in b.samples():
        assert b.score(s, s.gold[0])["score"] == pytest.approx(1, abs=1e-6)


def test_boundary_and_gold(tmp_path):
    b = folder(tmp_path, hotpotqa=[row()])
    r = b.render(b.samples()[0], CHAT, ARCH, chat=False)
    assert CHAT.decode(r.ids[: r.context_tokens]).endswith("passages.\nSome context")  # ".\n" straddles
    assert CHAT.decode(r.ids).endswith("Question: What?\nAnswer:")
    assert CHAT.decode(r.gold_ids) == " Yes"
    assert r.max_new_tokens == 32
    assert b.render(b.samples()[0], CHAT, ARCH, chat=False, max_new_tokens=512).max_new_tokens == 512


def test_braces_in_rows_are_left_alone(tmp_path):
    b = folder(tmp_path, hotpotqa=[row(context="{input} {x}", input="{context}?")])
    text = CHAT.decode(b.render(b.samples()[0], CHAT, ARCH, chat=False).ids)
    assert "passages.\n{input} {x}\n\n" in text
    assert "Question: {context}?\n" in text


def test_chat_template_rule(tmp_path):
    rows = [row(all_classes=["Yes", "No"])]
    for rule, task, want in [
        ("official", "trec", False),
        ("official", "hotpotqa", True),
        ("all", "trec", True),
        ("none", "hotpotqa", False),
    ]:
        (tmp_path / f"{task}.jsonl").write_text(json.dumps(rows[0]) + "\n")
        b = benchmark("longbench", data_dir=str(tmp_path), tasks=task, chat_template=rule)
        r = b.render(b.samples()[0], CHAT, ARCH, chat=True)
        assert (r.ids[0] == CHAT.convert_tokens_to_ids("<|im_start|>")) == want


def test_scores(tmp_path):
    b = folder(
        tmp_path,
        trec=[row(answers=["Date"], all_classes=["Date", "City"])],
        narrativeqa=[row(answers=["in Rome", "the city of Rome"])],
        samsum=[row(answers=["a b"])],
        passage_retrieval_en=[row(answers=["Paragraph 7"])],
    )
    trec, story, samsum, passage = b.samples()
    assert b.score(trec, "\n\nDate\nCity") == {"score": 1.0, "answer": "Date"}
    assert b.score(trec, "x</think>\nDate City")["score"] == 0.5
    assert b.score(story, "City of Rome")["score"] == 1  # the best of several answers
    assert b.score(story, "\nRome\nmore")["score"] == 0.5  # no first-line rule: one of two words on both sides
    assert b.score(samsum, "a b\nc d")["score"] == pytest.approx(1)
    assert b.score(passage, "Paragraph 7") == {"score": 1.0, "answer": "Paragraph 7"}
    assert b.score(passage, " \n") == {"score": 0.0, "answer": None}
    assert b.render(samsum, CHAT, ARCH, chat=False).stop == ("\n",)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "trec.jsonl:2 is not a LongBench row"),
        ("[]", "trec.jsonl:2 has no field"),
        (json.dumps({"input": ""}), "trec.jsonl:2 has no field 'context'"),
        (json.dumps(row(_id="1", all_classes=["Yes"])), "trec.jsonl:2 repeats _id 1"),
        (json.dumps(row(_id="2", answers=[])), "trec.jsonl:2 has no answers"),
        (json.dumps(row(_id="2")), "trec.jsonl:2: all_classes"),
    ],
)
def test_malformed_rows(tmp_path, bad, message):
    b = folder(tmp_path, trec=[row(all_classes=["Yes"]), bad])
    with pytest.raises(UserError, match=message):
        b.samples()


def test_odd_files(tmp_path):
    with pytest.raises(UserError, match="Paragraph N"):
        folder(tmp_path, passage_retrieval_en=[row()]).samples()
    with pytest.raises(UserError, match="no rows"):
        folder(tmp_path, trec=[]).samples()
    b = folder(tmp_path, hotpotqa=[row(context="one\u2028two\x85three")])  # line ends to Python, not to JSON lines
    assert b.samples()[0].context == "one\u2028two\x85three"
    empty = folder(tmp_path, hotpotqa=[row(context=" ")])
    with pytest.raises(UserError, match="context is empty"):
        empty.render(empty.samples()[0], CHAT, ARCH, chat=False)
    b = benchmark("longbench", data_dir=str(tmp_path), tasks=["hotpotqa", "musique"])
    assert "no musique.jsonl" in b.available()
    with pytest.raises(Blocked, match=r"no musique\.jsonl"):
        b.samples()


@pytest.mark.req(11)
def test_no_room(tmp_path):
    b = benchmark("longbench", data_dir=str(tmp_path), length=100)
    with pytest.raises(UserError, match="narrativeqa: 128 new tokens leave no room"):
        b.check(ARCH)
    b = benchmark("longbench", data_dir=str(tmp_path), length=200)
    b.check(ARCH)
    assert b.reference_length(ARCH) == 200
    assert benchmark("longbench_moend").reference_length(ARCH) == 8192
    (tmp_path / "narrativeqa.jsonl").write_text(json.dumps(row()))
    b = benchmark("longbench", data_dir=str(tmp_path), tasks="narrativeqa", length=200)
    with pytest.raises(UserError, match="without its context takes"):
        b.render(b.samples()[0], CHAT, ARCH, chat=False)


def test_hub_needs_no_network_for_its_identity():
    b = benchmark("longbench_moend")
    assert b.expected() == dict.fromkeys(
        (*longbench.LongBench.all_tasks[:1], "hotpotqa", "trec", "passage_retrieval_en"), 50
    )
    assert benchmark("longbench", tasks="multifieldqa_en").expected() == {"multifieldqa_en": 150}
    assert benchmark("longbench", tasks="trec", limit=500).expected() == {"trec": 200}
    assert b.identity()["data"] == benchmark("longbench").fingerprint()
    assert b.fingerprint() != benchmark("longbench", revision="0" * 40).fingerprint()


def test_hub_archive(tmp_path, monkeypatch):
    """Rows come from the archive's data/<task>.jsonl; a hub that cannot be reached blocks with one line."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as z:
        z.writestr("data/trec.jsonl", json.dumps(row(all_classes=["Yes"])) + "\n")
    asked = []

    def download(repo, name, **kwargs):
        asked.append((repo, name, kwargs["revision"]))
        return str(archive)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    b = benchmark("longbench", tasks="trec")
    assert b.samples()[0].context == "Some context."
    assert asked == [("THUDM/LongBench", "data.zip", b.revision)]

    def fail(*args, **kwargs):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(Blocked, match="cannot be fetched") as e:
        benchmark("longbench", tasks="trec").samples()
    assert "\n" not in str(e.value)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "the hub is off" in benchmark("longbench", tasks="trec").available()
