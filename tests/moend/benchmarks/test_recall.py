"""The generator is the one recall_moe was trained on, and its rows are sound, stable and disjoint."""

from __future__ import annotations

import importlib.util
import json
import random
from collections import Counter

import pytest

from moend.benchmarks import benchmark, recall
from moend.budget import Arch
from moend.errors import Blocked, UserError
from tests import ROOT

TRAIN = ROOT / "tests" / "fixtures" / "recall_moe" / "train.py"

GOLDEN_CONTEXT = (
    "K03 6 3 pass 6 1 7 3 from so by K24 1 2 we of so K27 1 3 on K36 gold grey like this K13 teal ruby K49 5 0"
)
GOLDEN_IDS = [
    *[2, 39, 16, 13, 9, 16, 11, 17, 13, 115, 128, 113, 60, 11, 12, 126, 102, 128, 63, 11, 13, 110, 72, 24, 25],
    *[137, 116, 49, 21, 33, 85, 15, 10, 4, 5, 63],
]


@pytest.fixture(scope="module")
def train():
    spec = importlib.util.spec_from_file_location("recall_moe_train", TRAIN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("length", [256, 512])
def test_same_generator_as_the_training_script(train, length):
    """The same random stream gives the same words, questions and answers, for every task."""
    for task in recall.Recall.all_tasks:
        for seed in range(5):
            ours, theirs = random.Random(seed), random.Random(seed)
            words, facts = recall.make_context(ours, length)
            their_words, their_facts = train.make_context(theirs, length, fill=1.0)
            assert words == their_words
            mine, other = recall.make_question(ours, facts, task), train.make_question(theirs, their_facts, task)
            # a link's value is a word there and a list here: the draws and the texts agree
            assert (mine is None) == (other is None)
            if mine is not None:
                assert mine == (other[0], other[1])


def test_vocabulary(train, recall_tokenizer):
    words = {w for s in benchmark("recall").samples() for w in f"{s.context} {s.question} {s.gold[0]}".split()}
    assert words <= set(train.VOCAB)
    assert recall_tokenizer.unk_token_id not in recall_tokenizer(" ".join(words)).input_ids


def answer(context: list[str], question: list[str]) -> list[str]:
    """Look the answer up in the text, without the generator's facts."""

    def after(key, kind):
        for i, w in enumerate(context[:-1]):
            kinds = {"num": recall.DIGITS, "col": recall.COLOURS, "hop": recall.KEYS}[kind]
            if w == key and context[i + 1] in kinds and not (kind == "hop" and context[i - 1] in recall.KEYS):
                return context[i + 1 : i + (2 if kind == "hop" else 3)]
        raise AssertionError(f"{key} has no {kind}")

    task, keys = question[1], question[2:]
    if task == "pass":
        return context[context.index("pass") + 1 :][:4]
    if task == "hop":
        link = after(keys[0], "hop")
        return link + after(link[0], "num")
    if task == "both":
        return [w for k in keys for w in [k, *after(k, "num")]]
    return after(keys[0], task)


@pytest.mark.parametrize("length", [64, 256, 512])
def test_answers_are_in_the_context(length):
    for s in benchmark("recall", length=length).samples():
        context = s.context.split()
        assert len(context) == length
        assert answer(context, s.question.split()) == s.gold[0].split()


def test_rows_do_not_depend_on_the_limit():
    few, many = benchmark("recall", limit=2), benchmark("recall", limit=30)
    assert few.expected() == dict.fromkeys(recall.Recall.all_tasks, 2)
    wanted = [s for s in many.samples() if int(s.id.rsplit("-", 1)[1]) < 2]
    assert few.samples() == wanted
    assert Counter(s.task for s in many.samples()) == many.expected()


def test_seeds_splits_and_lengths_differ():
    variants = [{}, {"seed": 1}, {"split": "calibration"}, {"length": 512}]
    prints = {benchmark("recall", **v).fingerprint() for v in variants}
    contexts = {s.context for v in variants for s in benchmark("recall", **v).samples()}
    assert (len(prints), len(contexts)) == (4, 400)


@pytest.mark.req(12)
def test_golden_ids(recall_tokenizer):
    """One BOS, the context, the question; the answer and EOS as gold."""
    b = benchmark("recall", length=32, tasks="num", limit=1)
    (s,) = b.samples()
    r = b.render(s, recall_tokenizer, Arch(4, 4, 2, 32, 1024), chat=True)
    assert s.context == GOLDEN_CONTEXT
    assert list(r.ids) == GOLDEN_IDS
    assert r.gold_ids == (11, 13, recall_tokenizer.eos_token_id)
    assert (r.context_tokens, r.max_new_tokens, r.truncated, r.stop) == (33, 8, 0, ())
    assert recall_tokenizer.decode(r.ids[33:]) == s.question


def test_score():
    b = benchmark("recall", tasks="num", limit=1)
    (s,) = b.samples()
    assert b.score(s, f"  {s.gold[0]}\n") == {"score": 1.0, "answer": s.gold[0]}
    assert b.score(s, s.gold[0] + " the")["score"] == 0
    assert b.score(s, "") == {"score": 0.0, "answer": None}


@pytest.mark.req(11)
def test_too_long_for_the_model(recall_tokenizer):
    b = benchmark("recall", length=512, limit=1)
    small = Arch(4, 4, 2, 32, 512)
    with pytest.raises(UserError, match="positions"):
        b.check(small)
    with pytest.raises(UserError, match="positions"):
        b.render(b.samples()[0], recall_tokenizer, small, chat=False)


def test_rows_of_a_folder(tmp_path, train, caplog):
    rows = train.held_out(20_000, 2, lengths=(256,))
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    b = benchmark("recall", data_dir=str(tmp_path), limit=3)
    assert [(s.context, s.question, s.gold[0]) for s in b.samples()] == [
        (r["context"], r["question"], r["answer"]) for r in rows
    ]
    assert "num has 2 of 3 rows" in caplog.text
    assert b.expected()["hop"] == 2
    with pytest.raises(Blocked, match=r"no \.jsonl rows of length 512"):
        benchmark("recall", data_dir=str(tmp_path), length=512).samples()
    (tmp_path / "bad.jsonl").write_text('{"task": "num"}\n')
    with pytest.raises(UserError, match=r"bad.jsonl:1 has no field 'length'"):
        benchmark("recall", data_dir=str(tmp_path)).samples()
    missing = benchmark("recall", data_dir=str(tmp_path / "no"))
    assert "is not a folder" in missing.available()
    with pytest.raises(Blocked):
        missing.samples()


def test_calibration_texts_are_no_row_and_exact():
    from moend.benchmarks.recall import calibration_texts

    texts = calibration_texts(6, 256, 64)
    assert texts == calibration_texts(7, 256, 64)[:6] and len(set(texts)) == 6
    rows = {
        s.context
        for split in ("test", "calibration")
        for s in benchmark({"name": "recall", "type": "recall", "length": 255, "rows": 6, "split": split}).samples()
    }
    for text in texts:
        words = text.split()
        assert len(words) == 255 + 64  # and the BOS
        assert " ".join(words[:255]) not in rows
        assert "?" not in words[:255] and words[255] == "?"
        first = words[255 : words.index("<eos>")]
        if first[1] == "num":  # the answer stands in the context, after its key
            at = [i for i in range(253) if words[i : i + 3] == first[2:]]
            assert at
