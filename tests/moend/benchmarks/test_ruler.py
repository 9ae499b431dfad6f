"""RULER: answers follow from the rendered text, prompts are as long as fits, fits are kept and checked."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moend.benchmarks import benchmark, ruler
from moend.benchmarks.niah import NOISE
from moend.benchmarks.ruler_documents import INSTRUMENTS, TRADES
from moend.benchmarks.ruler_tasks import ADJECTIVES, NOUNS, TASKS, VERSION
from moend.benchmarks.text import words
from moend.budget import Arch
from moend.errors import Blocked, UserError
from tests.moend.benchmarks.conftest import CHATML, byte_tokenizer

PLAIN = byte_tokenizer(bos=True)
CHAT = byte_tokenizer(bos=False, template=CHATML)
ARCH = Arch(2, 2, 1, 8, 200_000)
NIAH = [t for t in TASKS if t.startswith("niah")]
LENGTH = 10_000  # of one-byte tokens


def texts(task: str, *, length: int = LENGTH, limit: int = 3, **fields: Any) -> list[tuple[Any, str, Any]]:
    """(sample, context as fed, rendered) of a task's samples; the context has no description or worked example."""
    b = benchmark("ruler_own", tasks=[task], length=length, limit=limit, **fields)
    out = []
    for s in b.samples():
        r = b.render(s, PLAIN, ARCH, chat=False)
        head = TASKS[task].builder(s, length, b._library)(TASKS[task].least).head
        fed = PLAIN.decode(r.ids[: r.context_tokens]).removeprefix("<s>")
        assert fed.startswith(head)
        out.append((s, fed.removeprefix(head), r))
    return out


# The answers, found in the text by the plainest program


@pytest.mark.parametrize("task", NIAH)
def test_needles_say_the_answer_once(task):
    keys, values, queries = {
        "niah_multikey_1": (4, 1, 1),
        "niah_multivalue": (1, 4, 1),
        "niah_multiquery": (4, 1, 4),
    }.get(task, (1, 1, 1))
    for s, context, r in texts(task):
        facts = re.findall(r"A secret (?:number|code) of (\S+) is: ([0-9a-f-]+)\.?", context)
        asked = [k for k, _ in facts if k in s.question]
        assert len(set(asked)) == queries and len(asked) == values * queries
        assert sorted(v for k, v in facts if k in s.question) == sorted(s.gold)
        assert len(s.gold) == values * queries
        if "multikey_2" in task or "multikey_3" in task:
            assert len(facts) > 20 and len(dict(facts)) == len(facts) == len({v for _, v in facts})
        else:
            assert len(facts) == keys * values
        pattern = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}" if TASKS[task].value == "uuid" else r"[1-9]\d{6}"
        assert all(re.fullmatch(pattern, v) for v in s.gold)
        assert all(v in PLAIN.decode(r.gold_ids) for v in s.gold)


def test_needles_stand_at_their_depths():
    for s, context, _ in texts("niah_multiquery", length=20_000, limit=10):
        for key, value, depth in s.meta["needles"]:
            at = context.index(f"of {key} is: {value}") / len(context)
            assert abs(at - depth) < 0.12
    depths = {
        n[2] for s in benchmark("ruler_own", tasks=["niah_single_2"], limit=300).samples() for n in s.meta["needles"]
    }
    assert len(depths) == 40 and {min(depths), max(depths)} == {0, 1}


def test_variables_have_the_value():
    for s, context, r in texts("vt"):
        value: dict[str, str] = {}
        for name, other in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", context):
            value[name] = value.get(other, other)
        (asked,) = re.findall(r"\d{5}", s.question)
        assert len(s.gold) == 5
        assert sorted(n for n, v in value.items() if v == asked) == sorted(s.gold)
        example = PLAIN.decode(r.ids).removesuffix(context + "\n" + s.question)
        assert not any(name in example.split("VAR " + s.gold[0])[0] for name in s.gold)


@pytest.mark.parametrize(("length", "often", "seldom"), [(3000, 6, 1), (20_000, 30, 3)])
def test_common_words_are_the_ten_most_common(length, often, seldom):
    for s, context, r in texts("cwe", length=length, limit=2):
        entries = context.split()
        assert entries[::2] == [f"{i}." for i in range(1, len(entries) // 2 + 1)]
        counts = Counter(entries[1::2])
        assert sorted(w for w, _ in counts.most_common(10)) == sorted(s.gold)
        assert set(counts.values()) == {often, seldom}
        assert PLAIN.decode(r.gold_ids).split()[1::2] == list(s.gold)


def test_echoing_the_question_names_no_common_word():
    b = benchmark("ruler_own", tasks=["cwe"], limit=300)
    for s in b.samples():
        assert b.score(s, f"{s.question} {s.answer_prefix}")["score"] == 0


def test_no_answer_on_invented_people_is_inside_another():
    for answers in (TRADES, INSTRUMENTS):
        assert not [(x, y) for x in answers for y in answers if x != y and x in y]


def test_frequent_words_follow_a_zeta_distribution():
    for s, context, _ in texts("fwe", length=30_000):
        counts = Counter(context.split()[:-1]).most_common()  # the last dot may share a token with the question
        assert counts[0][0] == "..."
        assert tuple(w for w, _ in counts[1:4]) == s.gold
        assert counts[3][1] > counts[4][1]
        for rank in range(2, 6):
            assert counts[0][1] / counts[rank - 1][1] == pytest.approx(rank**2, rel=0.1)
        assert len({len(w) for w, _ in counts[1:]}) == 1


def test_the_least_text_of_frequent_words_has_one_answer():
    family = TASKS["fwe"]
    b = benchmark("ruler_own", tasks=["fwe"], length=1024, limit=1)
    (s,) = b.samples()
    for n in range(family.least, family.least + 200):
        counts = [n for _, n in Counter(family.builder(s, 1024, b._library)(n).context.split()).most_common(5)]
        assert counts == sorted(set(counts), reverse=True)


@pytest.mark.parametrize(("task", "hops"), [("qa_1", 1), ("qa_2", 2)])
def test_generated_documents_answer_the_question(task, hops):
    forms = {
        r"In which town was (.+) born\?": r"{} was born in (\w+) and",
        r"What was the trade of (.+)\?": r"{} opened a workshop as a (\w+)\.",
        r"Which instrument did (.+) play\?": r"{} played the (\w+) for",
        r"In which year did (.+) open a workshop\?": r"In (\d+), after some years of travel, {} opened",
    }
    seen = set()
    for s, context, r in texts(task, limit=12):
        ((pattern, who),) = [(answer, m[1]) for ask, answer in forms.items() if (m := re.fullmatch(ask, s.question))]
        if hops == 2:
            pupil = who.removeprefix("the person who taught ")
            (who,) = re.findall(rf"{pupil} was born in \w+ and was taught by ([\w ]+)\.", context)
        assert re.findall(pattern.format(who), context) == list(s.gold)
        titles = re.findall(r"Document \d+:\n([\w ]+)\n", context)
        assert len(set(titles)) == len(titles) > 10
        assert context.count("Document ") == len(titles)
        assert PLAIN.decode(r.ids).endswith(f"Question: {s.question}\nAnswer:")
        seen.add(pattern)
    assert len(seen) > 1


# Lengths


@pytest.mark.req(11)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("tokenizer", "chat"), [(PLAIN, False), (CHAT, True)])
def test_prompts_fit_and_one_more_unit_does_not(task, tokenizer, chat, tmp_path):
    b = benchmark("ruler_own", tasks=[task], length=LENGTH, limit=2, cache_dir=str(tmp_path))
    for s in b.samples():
        r = b.render(s, tokenizer, ARCH, chat=chat)
        assert r.truncated == 0
        assert r.prompt_tokens + max(b.new_tokens(task), r.max_new_tokens, len(r.gold_ids)) <= LENGTH
        assert r.prompt_tokens <= b.reference_length(ARCH)
        question, context = tokenizer.decode(r.ids[r.context_tokens :]), tokenizer.decode(r.ids[: r.context_tokens])
        assert s.question in question and s.question not in context.rpartition("\n\n")[2]
        assert question.endswith(s.answer_prefix)
    (file,) = (tmp_path / "ruler").iterdir()
    for line, s in zip(file.read_text().splitlines()[1:], b.samples(), strict=True):
        fit, build = json.loads(line), TASKS[task].builder(s, LENGTH, b._library)
        now, more = (ruler._size(build(fit["units"] + i), tokenizer, chat=chat) for i in (0, 1))
        assert now == fit["tokens"] <= fit["limit"] < more


@given(st.lists(st.integers(0, 9), min_size=60, max_size=200), st.integers(0, 700), st.integers(1, 5))
def test_fitted_is_the_largest_that_fits(steps, limit, least):
    sizes = [10 + sum(steps[:n]) + n for n in range(len(steps) + 1)]  # grows by at least one

    def size(n: int) -> int:
        return sizes[n] if n < len(sizes) else sizes[-1] + 10 * (n - len(sizes) + 1)

    if size(least) > limit:
        return
    best = least
    while size(best + 1) <= limit:
        best += 1
    assert ruler.fitted(size, least, limit) == best


def test_fitted_takes_few_steps_and_says_where_the_filler_ends():
    calls = []

    def size(n: int) -> int:
        calls.append(n)
        return 300 + 23 * n + n // 7

    assert size(ruler.fitted(size, 1, 131_000)) <= 131_000 < size(calls[-1] + 1)
    assert len(calls) < 12
    with pytest.raises(UserError, match="all there is makes 700 of 5000 tokens"):
        ruler.fitted(lambda n: min(100 + 10 * n, 700), 1, 5000)


def test_long_texts_begin_again():
    b = benchmark("ruler_own", tasks=["niah_single_2"], length=1024, limit=1)
    (s,) = b.samples()
    n = len(b._library.sentences)
    context = TASKS["niah_single_2"].builder(s, 1024, b._library)(2 * n).context
    assert context.count(b._library.sentences[0].strip()) == 2
    assert sum(context.count(g) for g in s.gold) == 1


def test_prompts_do_not_depend_on_a_smaller_output_limit():
    a, b = (benchmark("ruler_own", tasks=["vt"], length=LENGTH, limit=1, max_new_tokens=n) for n in (None, 5))
    (s,) = a.samples()
    assert a.render(s, PLAIN, ARCH, chat=False).ids == b.render(s, PLAIN, ARCH, chat=False).ids
    long = a.render(s, PLAIN, ARCH, chat=False, max_new_tokens=1000)
    assert long.prompt_tokens <= LENGTH - 1000


@pytest.mark.req(11)
def test_lengths_that_cannot_fit_are_refused_while_composing():
    for length in (1023, None):
        with pytest.raises(UserError, match="must be at least 1024"):
            benchmark("ruler_own", length=length)
    with pytest.raises(UserError, match="more than the model's 8192 positions"):
        benchmark("ruler_own", length=8193).check(Arch(2, 2, 1, 8, 8192))
    benchmark("ruler_own", length=8192).check(Arch(2, 2, 1, 8, 8192))
    with pytest.raises(UserError, match=r"niah_single_1: 4000 new tokens leave 96 of benchmark\.length=4096"):
        benchmark("ruler_own").check(ARCH, 4000)
    b = benchmark("ruler_own", tasks=["cwe"], length=1024, limit=1)
    with pytest.raises(UserError, match="too short for cwe: with the least context the prompt takes"):
        b.render(b.samples()[0], PLAIN, ARCH, chat=False)  # a token a byte


# Samples


def test_samples_need_no_tokenizer_and_depend_on_seed_length_and_task_only():
    a = benchmark("ruler_own", limit=4)
    assert a.expected() == dict.fromkeys(TASKS, 4)
    by_task = {t: [s for s in benchmark("ruler_own", limit=2).samples() if s.task == t] for t in TASKS}
    for task in TASKS:
        assert [s for s in a.samples() if s.task == task][:2] == by_task[task]
        assert benchmark("ruler_own", tasks=[task], limit=2).samples() == by_task[task]
    ids = [s.id for s in a.samples()]
    assert len(set(ids)) == len(ids) == 52
    others = [{"seed": 1}, {"length": 8192}, {"split": "calibration"}, {"limit": 3}]
    assert len({a.fingerprint(), *(benchmark("ruler_own", **{"limit": 4, **o}).fingerprint() for o in others)}) == 5


def test_the_default_is_the_papers_500_rows():
    b = benchmark("ruler_own")
    assert b.expected() == dict.fromkeys(TASKS, 500)
    assert (b.rows, b.length, len(b.task_names)) == (500, 4096, 13)
    assert [b.new_tokens(t) for t in ("niah_single_1", "vt", "cwe", "fwe", "qa_1")] == [128, 30, 120, 50, 32]


def test_the_text_around_counts(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("\n".join(f"Line {chr(97 + i % 26)} of mine is here." for i in range(300)))
    b = benchmark("ruler_own", tasks=["niah_single_2"], length=LENGTH, limit=1, haystack_file=str(file))
    assert "of mine is here" in PLAIN.decode(b.render(b.samples()[0], PLAIN, ARCH, chat=False).ids)
    before = b.fingerprint()
    file.write_text(file.read_text().replace("mine", "ours"))
    again = benchmark("ruler_own", tasks=["niah_single_2"], length=LENGTH, limit=1, haystack_file=str(file))
    assert again.fingerprint() != before
    file.write_text("")
    with pytest.raises(UserError, match="has no sentence"):
        benchmark("ruler_own", limit=1, haystack_file=str(file)).samples()
    assert "is not a file" in str(benchmark("ruler_own", haystack_file=str(tmp_path / "no")).available())


def test_word_lists_cannot_be_taken_for_one_another():
    assert len(set(ADJECTIVES)) == len(ADJECTIVES) > 100 and len(set(NOUNS)) == len(NOUNS) > 150
    assert all(w.isalpha() and w.islower() for w in (*ADJECTIVES, *NOUNS))
    assert len(words()) > 8000 and all(4 <= len(w) <= 12 and w.isalpha() for w in words())
    assert not re.search(r"\d", NOISE)


# Scores


@pytest.mark.req(10)
def test_scores_are_the_papers_string_match():
    b = benchmark("ruler_own", tasks=["niah_multivalue", "qa_1"], limit=1)
    many, one = b.samples()
    a, c, d, e = many.gold
    assert b.score(many, f"{a}, {c}, {d} and {e}.")["score"] == 1
    assert b.score(many, f"x{a}y {c}")["score"] == 0.5
    assert b.score(many, "") == {"score": 0.0, "answer": None}
    assert b.score(many, f"{a} </think> {c}")["score"] == 0.25
    assert b.score(one, one.gold[0].upper())["score"] == 1
    assert b.score(one, "nothing")["score"] == 0
    assert b.metric("niah_multivalue") == "string_match_all"
    assert b.metric("qa_1") == "string_match_part (generated documents)"


@given(st.text())
def test_no_text_breaks_the_scorer(text):
    for s in SAMPLES:
        score = BENCH.score(s, text)["score"]
        assert 0 <= score <= 1
        gold = [g.lower() in text.rsplit("</think>", 1)[-1].strip().lower() for g in s.gold]
        assert score == (float(any(gold)) if s.task.startswith("qa") else sum(gold) / len(gold))


BENCH = benchmark("ruler_own", limit=1)
SAMPLES = BENCH.samples()


# Kept fits


def test_fits_are_kept_for_a_tokenizer_and_checked(tmp_path, caplog, monkeypatch):
    def make(**fields: Any) -> Any:
        return benchmark("ruler_own", tasks=["vt"], length=LENGTH, limit=2, cache_dir=str(tmp_path), **fields)

    b = make()
    first = [b.render(s, PLAIN, ARCH, chat=False) for s in b.samples()]
    (file,) = (tmp_path / "ruler").iterdir()
    header, *fits = [json.loads(line) for line in file.read_text().splitlines()]
    assert (header["task"], header["length"], header["seed"], header["generator"]) == ("vt", LENGTH, 0, VERSION)
    assert [f["tokens"] for f in fits] == [len(r.ids) for r in first]

    def searched(*args: Any) -> int:
        raise AssertionError("searched again")

    with monkeypatch.context() as m:
        m.setattr(ruler, "fitted", searched)
        assert [make().render(s, PLAIN, ARCH, chat=False) for s in b.samples()] == first
        with pytest.raises(AssertionError):  # another output limit
            make().render(b.samples()[0], PLAIN, ARCH, chat=False, max_new_tokens=64)
        for other in (make(seed=1), make(split="calibration")):
            with pytest.raises(AssertionError):
                other.render(other.samples()[0], PLAIN, ARCH, chat=False)
        with pytest.raises(AssertionError):
            make().render(b.samples()[0], CHAT, ARCH, chat=True)
        with pytest.raises(AssertionError):  # the same tokenizer without its template
            make().render(b.samples()[0], CHAT, ARCH, chat=False)
    assert not caplog.records
    wrong = [header, {**fits[0], "units": fits[0]["units"] - 1}, fits[1]]
    file.write_text("".join(json.dumps(x) + "\n" for x in wrong))
    assert make().render(b.samples()[0], PLAIN, ARCH, chat=False) == first[0]
    assert "is not what is generated now" in caplog.text
    for damage in (
        "not json\n",
        "[]\n",
        json.dumps({**header, "seed": 9}) + "\n",
        json.dumps(header) + '\n{"id": 1}\n',
        "",
    ):
        caplog.clear()
        file.write_text(damage)
        assert make().render(b.samples()[0], PLAIN, ARCH, chat=False) == first[0]
        assert "is damaged" in caplog.text
        assert [json.loads(x) for x in file.read_text().splitlines()][:2] == [header, fits[0]]
    assert [p.name for p in (tmp_path / "ruler").iterdir()] == [file.name]  # no temporary file is left


def test_two_processes_keep_each_others_fits(tmp_path):
    one, two = (ruler.Kept(tmp_path / "r" / "x.jsonl", {"a": 1}) for _ in range(2))
    fit = {"limit": 1, "units": 1, "tokens": 1, "sha256": ""}
    one.add({**fit, "id": "i"})
    two.add({**fit, "id": "j"})
    assert set(ruler.Kept(one.path, {"a": 1}).fits) == {"i", "j"}


# Data sets


SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": f"Paragraph {a}{i} tells of {a}{i}. " * 4,
                    "qas": [
                        {"question": f"Of what tells {a}{i}?", "answers": [{"text": f"{a}{i}"}, {"text": f"{a}{i}"}]},
                        {"question": "None?", "answers": [], "is_impossible": True},
                    ],
                }
                for i in range(20)
            ]
        }
        for a in "ab"
    ]
}
HOTPOT = [
    {
        "question": f"Who {n}?",
        "answer": f"P{n}",
        "context": [[f"T{n}{k}", [f"P{n} is in {k}. ", "x " * 40]] for k in range(3)],
    }
    for n in range(12)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "squad.json").write_text(json.dumps(SQUAD))
    (tmp_path / "hotpotqa.json").write_text(json.dumps(HOTPOT))
    return tmp_path


def test_questions_of_squad_and_hotpotqa(folder):
    b = benchmark("ruler_own", tasks=["qa_1", "qa_2"], length=3000, limit=5, data_dir=str(folder))
    assert b.metric("qa_1") == "string_match_part"
    assert [s.question for s in b.samples()[:2]] == ["Of what tells a0?", "Of what tells a1?"]
    assert b.samples()[0].gold == ("a0",)
    for s in b.samples():
        text = PLAIN.decode(b.render(s, PLAIN, ARCH, chat=False).ids)
        assert s.question in text
        if s.task == "qa_1":
            assert text.count(s.context) == 1 and "Document 10" in text
            assert len(re.findall(r"Paragraph a", text)) > 3 * len(re.findall(r"Paragraph b", text))  # the same article
        else:
            assert all(text.count(f"{d}\n{s.gold[0]}") == 1 for d in (f"T{s.gold[0][1:]}{k}" for k in range(3)))
    assert b.fingerprint() != benchmark("ruler_own", tasks=["qa_1", "qa_2"], length=3000, limit=5).fingerprint()
    before = b.fingerprint()
    (folder / "squad.json").write_text(json.dumps(SQUAD).replace("Paragraph b19", "Paragraph c19"))
    assert (
        benchmark("ruler_own", tasks=["qa_1", "qa_2"], length=3000, limit=5, data_dir=str(folder)).fingerprint()
        != before
    )


def test_data_sets_that_are_missing_short_or_wrong(folder, caplog):
    b = benchmark("ruler_own", tasks=["qa_1"], length=1024, data_dir=str(folder))
    assert b.expected() == {"qa_1": 40}  # impossible questions are none
    assert "squad has 40 of 500 questions" in caplog.text
    b = benchmark("ruler_own", tasks=["qa_1"], length=100_000, limit=1, data_dir=str(folder))
    with pytest.raises(UserError, match=r"benchmark\.length is too long: all there is makes \d+ of"):
        b.render(b.samples()[0], PLAIN, ARCH, chat=False)
    assert benchmark("ruler_own", tasks=["vt"], data_dir="nowhere").available() is None  # needs no data
    b = benchmark("ruler_own", tasks=["vt", "qa_2"], data_dir="nowhere")
    assert b.available() == "benchmark.data_dir=nowhere has no hotpotqa.json"
    with pytest.raises(Blocked):
        b.samples()
    for content, message in [
        ("{", "is not JSON"),
        ("{}", "squad.json has no field 'data'"),
        ('{"data": [{"paragraphs": [{}]}]}', "has no field 'context' in 'data"),
    ]:
        (folder / "squad.json").write_text(content)
        with pytest.raises(UserError, match=message):
            benchmark("ruler_own", tasks=["qa_1"], limit=1, data_dir=str(folder)).samples()
    (folder / "hotpotqa.json").write_text('[{"question": 1}]')
    with pytest.raises(UserError, match=r"hotpotqa.json: '\[0\].question' cannot be 1"):
        benchmark("ruler_own", tasks=["qa_2"], limit=1, data_dir=str(folder)).samples()
    with pytest.raises(UserError, match="evaluation rows"):
        benchmark("ruler_own", split="calibration", data_dir=str(folder))
