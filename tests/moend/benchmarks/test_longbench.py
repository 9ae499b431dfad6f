"""Official prompts, lengths, truncation and scoring; the official rows are read in place where they are."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zipfile

import pytest

from moend.benchmarks import benchmark, longbench, questions
from moend.benchmarks.longbench import BUCKETS, TABLE, TASKS_E, bucket, prediction_score
from moend.budget import Arch
from moend.errors import Blocked, UserError
from tests.moend.benchmarks.conftest import CHATML, LONGBENCH, STRIPPING, byte_tokenizer, needs_longbench

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
    assert {t: e["prompt"] for t, e in TABLE.items()} == prompts
    assert {t: e["max_new_tokens"] for t, e in TABLE.items()} == lengths


METRIC_OF = {
    "qa_f1": "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique triviaqa",
    "qa_f1_zh": "multifieldqa_zh",
    "rouge_l": "gov_report qmsum multi_news samsum",
    "rouge_l_zh": "dureader vcsum",
    "classification": "trec lsht",
    "retrieval": "passage_retrieval_en",
    "retrieval_zh": "passage_retrieval_zh",
    "count": "passage_count",
    "code_similarity": "lcc repobench-p",
}


def test_table():
    assert len(TABLE) == 21
    assert hashlib.sha256(json.dumps(TABLE, sort_keys=True).encode()).hexdigest()[:16] == "7f70c7a51865fa4f"
    assert {t: e["metric"] for t, e in TABLE.items()} == {t: m for m, ts in METRIC_OF.items() for t in ts.split()}
    for entry in TABLE.values():
        assert entry["prompt"].count("{context}") == 1
        assert entry["prompt"].count("{input}") <= 1
        assert "\\n" not in entry["prompt"]
    assert {t for t, e in TABLE.items() if not e["chat"]} == {
        *("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"),
    }
    assert {t for t, e in TABLE.items() if e["first_line"]} == {"trec", "triviaqa", "samsum", "lsht"}
    assert {t: e["stop"] for t, e in TABLE.items() if e["stop"]} == {"samsum": ["\n"]}
    assert sum(e["rows"] for e in TABLE.values()) == 4750
    assert sum(e.get("rows_e", 0) for e in TABLE.values()) == 3668
    assert len(TASKS_E) == 13


def test_groups():
    all_tasks = tuple(TABLE)
    english = [t for t in all_tasks if t not in METRIC_OF["rouge_l_zh"] and not t.endswith("_zh") and t != "lsht"]
    assert benchmark("longbench_all").task_names == all_tasks
    assert benchmark("longbench_en").task_names == tuple(english)  # the 16 columns of RippleKV's table
    assert benchmark("longbench_moend").task_names == ("narrativeqa", "hotpotqa", "trec", "passage_retrieval_en")
    assert benchmark("longbench_e").task_names == TASKS_E
    assert sum(benchmark("longbench_all").expected().values()) == 4750
    assert sum(benchmark("longbench_en").expected().values()) == 3750
    assert sum(benchmark("longbench_e").expected().values()) == 3668
    assert benchmark("longbench_all", limit=7).expected() == dict.fromkeys(all_tasks, 7)
    with pytest.raises(UserError, match="LongBench-E has no narrativeqa"):
        benchmark("longbench_e", tasks="narrativeqa")
    with pytest.raises(UserError, match=r"benchmark\.e=1"):
        benchmark("longbench_e", e=1)


def test_buckets():
    assert [bucket(n) for n in (0, 3999, 4000, 7999, 8000, 10**6)] == [BUCKETS[i] for i in (0, 0, 1, 1, 2, 2)]
    assert BUCKETS == ("0-4k", "4-8k", "8k+")


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
    ("task", "prediction", "answers", "classes", "want"),
    [
        # few-shot tasks: the first line after leading newlines, and blanks are no newlines
        ("trec", "\n\nDate\nCity", ["Date"], ["Date", "City"], 1),
        ("trec", " \nDate", ["Date"], ["Date", "City"], 0),
        ("lsht", "\n体育\n财经", ["体育"], ["体育", "财经"], 1),
        ("triviaqa", "Paris\nPassage: Rome", ["Paris", "paris, france"], None, 1),
        ("samsum", "Ann waits.\nDialogue: x y z", ["Ann waits."], None, 1),
        ("narrativeqa", "Paris\nRome", ["Paris"], None, 2 * 0.5 / 1.5),  # all lines
        ("hotpotqa", "x", ["y", "x z", "x"], None, 1),  # the best of the answers
        ("passage_retrieval_zh", "段落12", ["段落12"], None, 1),
        ("passage_count", "12 or 13", ["12"], None, 0.5),
        ("lcc", "\n\treturn x;\n}", ["\treturn x;"], None, 1),
        ("multifieldqa_zh", "北京。", ["北京"], None, 1),
        ("vcsum", "", ["会议"], None, 0),
        ("hotpotqa", "</think>x", ["x"], None, 0),  # a thought is text like any other: `thinkx`
    ],
)
def test_prediction_score(task, prediction, answers, classes, want):
    assert prediction_score(task, prediction, answers, classes or ()) == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "trec.jsonl:2 is not JSON"),
        ("[]", r"trec.jsonl:2 is \[\], not a JSON object"),
        (json.dumps({"input": ""}), "trec.jsonl:2 has no field 'context'"),
        (json.dumps(row(_id="1", all_classes=["Yes"])), "trec.jsonl:2 repeats '_id' '1' of line 1"),
        (json.dumps(row(_id="2", answers=[])), r"trec.jsonl:2: 'answers' cannot be \[\]"),
        (json.dumps(row(_id="2")), "trec.jsonl:2: 'all_classes' cannot be null"),
    ],
)
def test_malformed_rows(tmp_path, bad, message):
    b = folder(tmp_path, trec=[row(all_classes=["Yes"]), bad])
    with pytest.raises(UserError, match=message):
        b.samples()


def test_data_from_one_file_or_an_archive(tmp_path, caplog):
    rows = [row(_id=str(i), dataset=t) for i, t in enumerate(["hotpotqa", "musique", "hotpotqa_e", "qasper"])]
    text = "\n".join(json.dumps(r) for r in rows) + "\n"
    mixed = tmp_path / "some rows.jsonl"
    mixed.write_text(text)
    b = benchmark("longbench", data_dir=str(mixed), tasks=["musique", "hotpotqa"])
    assert [(s.task, s.id) for s in b.samples()] == [("musique", "1"), ("hotpotqa", "0"), ("hotpotqa", "2")]
    assert b.expected() == {"musique": 1, "hotpotqa": 2}
    assert benchmark("longbench", data_dir=str(mixed), tasks="hotpotqa", limit=1).expected() == {"hotpotqa": 1}
    assert "no rows of trec" in str(benchmark("longbench", data_dir=str(mixed), tasks="trec").available())

    named = tmp_path / "hotpotqa.jsonl"  # named after a task: all rows are its own, whatever they say
    named.write_text(text)
    assert benchmark("longbench", data_dir=str(named), tasks="hotpotqa").expected() == {"hotpotqa": 4}
    assert "no rows of musique" in str(benchmark("longbench", data_dir=str(named), tasks="musique").available())

    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as z:
        z.writestr("some/folder/hotpotqa.jsonl", text)
        z.writestr("data/hotpotqa_e.jsonl", text.split("\n")[2])
    assert benchmark("longbench", data_dir=str(archive), tasks="hotpotqa").expected() == {"hotpotqa": 4}
    assert benchmark("longbench_e", data_dir=str(archive), tasks="hotpotqa").expected() == {"hotpotqa": 1}
    assert "no trec.jsonl" in str(benchmark("longbench", data_dir=str(archive), tasks="trec").available())
    with zipfile.ZipFile(archive, "a") as z:
        z.writestr("hotpotqa.jsonl", text)
    with pytest.raises(UserError, match="several files"):
        benchmark("longbench", data_dir=str(archive), tasks="hotpotqa").samples()

    mixed.write_text(json.dumps(row()).replace("dataset", "data_set"))
    with pytest.raises(UserError, match=r"some rows\.jsonl:1 has no field 'dataset'"):
        benchmark("longbench", data_dir=str(mixed), tasks="hotpotqa").samples()


def test_planning_needs_no_data(tmp_path):
    """A folder that is not here blocks a cell; its size and identity are those of the data it stands for."""
    b = benchmark("longbench_moend", data_dir=str(tmp_path / "nowhere"), limit=2)
    assert "is not here" in b.available()
    assert sum(b.expected().values()) == 8
    assert b.fingerprint() == benchmark("longbench_moend").fingerprint()
    with pytest.raises(Blocked, match="is not here"):
        b.samples()


def test_fetch(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: asked.append(a) or str(tmp_path / "x.zip"))
    with pytest.raises(Blocked, match=r"no narrativeqa\.jsonl"):
        benchmark("longbench", data_dir=str(tmp_path)).fetch()
    assert not asked
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    benchmark("longbench").fetch()
    assert asked == [("THUDM/LongBench", "data.zip")]


# One made row for every task, rendered with two chat templates: ids, pinned by their digests.
MADE = {
    "context": "First line. Second line\n第三行 ends here.\n",
    "input": "Was ist das? 这是什么？",
    "answers": ["Paragraph 2 段落2"],
    "all_classes": ["Paragraph 2 段落2", "Date"],
}
GOLDEN = {"chatml": "af61fe353a6069f2", "stripping": "48bd56099cbad194"}


@pytest.mark.req(12)
@pytest.mark.parametrize("template", GOLDEN)
def test_golden_ids(tmp_path, template):
    """ChatML without BOS, and a template as Llama 3's: its own BOS, the turn stripped, a date."""
    bos = template == "stripping"
    tokenizer = byte_tokenizer(bos=bos, template=STRIPPING if bos else CHATML)
    b = folder(tmp_path, **{task: [row(**MADE)] for task in TABLE})
    ids = []
    for s in b.samples():
        r = b.render(s, tokenizer, ARCH, chat=True)
        entry = TABLE[s.task]
        user = entry["prompt"].replace("{context}", s.context).replace("{input}", s.question)
        if not entry["chat"]:
            want = ("<s>" if bos else "") + user
        elif bos:
            want = "<s>26 Jul 2024|[user]\n\n" + user.strip() + "[end][assistant]\n\n"
        else:
            want = f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(r.ids) == want
        assert list(r.ids).count(0) == bos
        assert r.truncated == 0
        assert tokenizer.decode(r.ids[: r.context_tokens]).rstrip(".\n").endswith("ends here")
        assert r.max_new_tokens == entry["max_new_tokens"]
        assert r.stop == tuple(entry["stop"])
        ids.append([s.task, *r.ids])
    assert hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16] == GOLDEN[template]


@pytest.mark.req(11)
@pytest.mark.parametrize("chat_template", ["official", "all"])
def test_every_task_fits_and_tells_what_was_cut(tmp_path, chat_template):
    tokenizer = byte_tokenizer(bos=True, template=STRIPPING)
    made = MADE | {"context": "".join(f"Line {i}. 第{i}行\n" for i in range(400))}
    folder(tmp_path, **{task: [row(**made)] for task in TABLE})
    b = benchmark("longbench_all", data_dir=str(tmp_path), length=2400, chat_template=chat_template)
    for s in b.samples():
        r, short = (b.render(x, tokenizer, ARCH, chat=True) for x in (s, dataclasses.replace(s, context="x")))
        assert 2400 - 8 <= r.prompt_tokens + r.max_new_tokens <= 2400
        assert list(r.ids).count(0) == 1
        whole = len(short.ids) - 1 + len(s.context.encode())  # a byte a token, but for merged newlines
        assert 0 <= whole - (r.prompt_tokens + r.truncated) <= 800
        text = tokenizer.decode(r.ids)
        assert "Line 0. " in text
        assert "Line 399. " in text
        assert "Line 200. " not in text  # the middle goes
        assert text.startswith("<s>26 Jul 2024|[user]") == (chat_template == "all" or TABLE[s.task]["chat"])


def test_odd_files(tmp_path):
    with pytest.raises(UserError, match="Paragraph N"):
        folder(tmp_path, passage_retrieval_en=[row()]).samples()
    with pytest.raises(UserError, match="no rows"):
        folder(tmp_path, trec=[]).samples()
    b = folder(tmp_path, hotpotqa=[row(context="one\u2028two\x85three")])  # line ends to Python, not to JSON lines
    assert b.samples()[0].context == "one\u2028two\x85three"
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


@pytest.mark.parametrize("turns", [False, True])
def test_rows_with_one_context_share_it(tmp_path, turns):
    """Also where it is cut: the context of all is the one that left room for the longest question."""
    long = " ".join(f"sentence {i}." for i in range(300))
    asked = ["Who?", "Why did the third of them never come back to the house?", "When?", "Where?"]
    rows = [row(_id=str(i), context=long if i != 2 else "Another.", input=q) for i, q in enumerate(asked)]
    folder(tmp_path, qasper=rows)
    bench = benchmark(
        "longbench", data_dir=str(tmp_path), tasks=["qasper"], length=1600, questions_per_context=2, turns=turns
    )
    contexts = bench.contexts()
    assert [[s.id for s in c] for c in contexts] == [["0", "1"], ["3"], ["2"]]
    own = [bench.render(s, CHAT, ARCH, chat=True) for s in contexts[0]]
    assert own[0].truncated and own[0].context_tokens > own[1].context_tokens
    first, second = questions.prompts(own, CHAT, visible=False, turns=turns)
    room = 1600 - bench.fed_tokens(None)
    assert first.context_tokens == own[1].context_tokens and len(first.ids) <= room
    assert first.truncated - own[0].truncated == own[0].context_tokens - own[1].context_tokens
    text = CHAT.decode(list(second.ids))
    assert asked[1] in text and asked[0] not in text
    assert (second.ids[: first.context_tokens] == first.ids[: first.context_tokens]) != turns
    assert turns or second == own[1]
