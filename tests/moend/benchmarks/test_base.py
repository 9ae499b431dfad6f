"""Rendering: one tokenisation, one BOS, the boundary, the cut, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moend.benchmarks import Sample, benchmark, names, overlap, require_disjoint
from moend.benchmarks.prompts import Prompt, added_bos, assemble, encode, render_prompt
from moend.budget import Arch
from moend.errors import UserError
from tests.moend.benchmarks.conftest import CHATML, STRIPPING, byte_tokenizer

SAMPLE = Sample("t", "s1", "", "", "", ())
TOKENIZERS = {
    "plain": (byte_tokenizer(bos=False), False),
    "bos": (byte_tokenizer(bos=True), False),
    "chatml": (byte_tokenizer(bos=False, template=CHATML), True),
    "chatml_bos": (byte_tokenizer(bos=True, template=CHATML), True),
    "stripping": (byte_tokenizer(bos=True, template=STRIPPING), True),
}


def render(prompt: Prompt, which: str = "plain", limit: int = 10_000, **kwargs):
    tokenizer, chat = TOKENIZERS[which]
    return render_prompt(SAMPLE, prompt, tokenizer, chat=chat, limit=limit, max_new_tokens=4, **kwargs)


def text_of(ids, which: str = "plain") -> str:
    return TOKENIZERS[which][0].decode(ids)


def test_boundary_is_the_end_of_the_context():
    r = render(Prompt("Head: ", "context", "? why"))
    assert text_of(r.ids[: r.context_tokens]) == "Head: context"
    assert text_of(r.ids[r.context_tokens :]) == "? why"
    assert r.truncated == 0
    assert r.prompt_tokens == len(r.ids)


def test_a_token_over_the_boundary_belongs_to_the_question():
    r = render(Prompt("", "The end.", "\nWhy?"))  # ".\n" is one token
    assert text_of(r.ids[: r.context_tokens]) == "The end"
    assert text_of(r.ids[r.context_tokens :]) == ".\nWhy?"


@pytest.mark.req(12)
@pytest.mark.parametrize("which", TOKENIZERS)
def test_exactly_one_bos(which):
    r = render(Prompt("a ", "b", " c"), which)
    bos = TOKENIZERS[which][0].bos_token_id
    assert list(r.ids).count(bos) == (0 if which in ("plain", "chatml") else 1)
    assert which in ("plain", "chatml") or r.ids[0] == bos


@pytest.mark.parametrize("which", ["chatml", "chatml_bos", "stripping"])
def test_boundary_inside_a_chat_turn(which):
    r = render(Prompt("\n\nHead: ", "context", " why?  ", "Because"), which)
    assert text_of(r.ids[: r.context_tokens], which).endswith("Head: context")
    rest = text_of(r.ids[r.context_tokens :], which)
    assert rest.startswith(" why?")
    assert rest.endswith("Because")


def test_date_of_a_template_is_pinned():
    text, _ = assemble(Prompt("", "x", ""), TOKENIZERS["stripping"][0], chat=True)
    assert text.startswith("<s>26 Jul 2024|[user]\n\nx[end]")


def test_boundary_when_a_template_strips_the_context():
    r = render(Prompt("", "  context \n", ""), "stripping")
    assert text_of(r.ids[: r.context_tokens], "stripping").endswith("[user]\n\ncontext")


def test_whole_prompt_is_tokenised_at_once():
    r = render(Prompt("x.", "\n\ny", "z"), "bos")
    tokenizer = TOKENIZERS["bos"][0]
    assert list(r.ids) == tokenizer("x.\n\nyz").input_ids


@pytest.mark.req(11)
def test_the_middle_of_the_context_is_cut():
    context = "".join(chr(ord("a") + i % 26) for i in range(100))
    r = render(Prompt("HEAD ", context, " TAIL"), limit=40)
    assert text_of(r.ids) == "HEAD " + context[:15] + context[85:] + " TAIL"
    assert (len(r.ids), r.truncated) == (40, 70)
    assert text_of(r.ids[r.context_tokens :]) == " TAIL"


@pytest.mark.req(11)
def test_only_the_context_is_cut():
    """The half-way point lies in a long question: the cut stays inside the context."""
    r = render(Prompt("H", "0123456789", "?" * 50), limit=55)
    assert text_of(r.ids) == "H" + "0123" + "?" * 50
    with pytest.raises(UserError, match=r"takes 51 tokens; 51 are left"):
        render(Prompt("H", "0123456789", "?" * 50), limit=51)


def test_a_seam_that_tokenises_longer_still_fits():
    context = ".\n" * 50  # the cut may part or join a pair
    for limit in range(8, 50):
        assert render(Prompt("a", context, "b"), limit=limit).prompt_tokens <= limit


@pytest.mark.req(11)
def test_empty_prompts_are_refused():
    for prompt in (Prompt("", "", ""), Prompt(" ", "\n", "\t")):
        for which in TOKENIZERS:
            with pytest.raises(UserError, match="empty"):
                render(prompt, which)


def test_refusals():
    with pytest.raises(UserError, match="chat_template=none"):
        assemble(Prompt("", "x", ""), TOKENIZERS["plain"][0], chat=True)
    rewriting = byte_tokenizer(bos=False, template="{{ messages[0]['content'] | upper }}")
    with pytest.raises(UserError, match="rewrites"):
        assemble(Prompt("", "x", ""), rewriting, chat=True)
    with pytest.raises(UserError, match="fast tokenizer"):
        encode(object(), "x")


def test_gold_ids_continue_the_prompt():
    r = render(Prompt("", "c", "q:"), gold="42")
    assert text_of(r.gold_ids) == " 42"
    r = render(Prompt("", "c", "q:\n"), gold="42", gold_eos=True)
    assert text_of(r.gold_ids) == "42</s>"
    r = render(Prompt("", "c", "q", "It is"), "chatml", gold="42")
    assert text_of(r.gold_ids) == " 42"
    r = render(Prompt("", "c", "q"), "stripping", gold="42")
    assert text_of(r.gold_ids) == "42"
    assert render(Prompt("", "c", "q")).gold_ids == ()


def test_gold_that_merges_with_the_prompt_is_tokenised_alone():
    r = render(Prompt("", "c", "end\n"), gold="\nx")  # "\n\n" would be one token
    assert text_of(r.gold_ids) == "\nx"


TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.mark.req(11)
@settings(max_examples=150, deadline=None)
@given(TEXT, TEXT, TEXT, st.integers(1, 120), st.sampled_from(sorted(TOKENIZERS)))
def test_rendering_never_exceeds_the_limit(head, context, tail, limit, which):
    tokenizer, chat = TOKENIZERS[which]
    try:
        r = render(Prompt(head, context, tail), which, limit=limit)
    except UserError:
        return
    assert 1 <= len(r.ids) <= limit
    assert 0 <= r.context_tokens <= len(r.ids)
    assert r.truncated >= 0
    bos = added_bos(tokenizer)
    if bos and not (head + context + tail).startswith("<s>"):
        assert r.ids[0] == bos[0]
        assert r.ids[1:2] != bos
    text, (start, end) = assemble(Prompt(head, context, tail), tokenizer, chat=chat)
    decoded = tokenizer.decode(r.ids[len(bos) :] if not text.startswith("<s>") else r.ids)
    assert decoded.startswith(text[:start])
    assert decoded.endswith(text[end:])
    if not r.truncated:
        assert decoded == text


def test_golden_identity_fields():
    """The number of samples is in the identity, not the limit or the folder it came from."""
    a, b = benchmark("niah"), benchmark("niah", limit=20)
    assert a.identity() == b.identity()
    assert benchmark("niah", limit=19).identity() != a.identity()
    assert benchmark("niah", seed=1).identity() != a.identity()
    assert benchmark("niah", length=512).identity() != a.identity()


def test_every_yaml_builds_and_says_what_it_is(arch):
    for name in names():
        b = benchmark(name)
        assert b.name == name
        assert b.kind in ("generate", "nll")
        assert all(b.metric(t) for t in b.task_names)
        assert all(n > 0 for n in b.expected().values()) or b.available() or b.absent()
        assert len(b.fingerprint()) == 64
        big = Arch(2, 2, 1, 8, 32_768)
        b.check(big)
        assert b.reference_length(big) + b.output_tokens(b.task_names[0]) <= 32_768 + 512


def test_user_mistakes():
    cases = [
        (("nih",), {}, "Did you mean 'niah'"),
        (("niah",), {"lenght": 3}, "Did you mean 'length'"),
        (("niah",), {"length": 0}, "length=0"),
        (("niah",), {"length": 10.5}, "length=10.5"),
        (("niah",), {"length": None}, "length"),
        (("niah",), {"limit": -1}, "limit=-1"),
        (("niah",), {"limit": "ten"}, "limit=ten"),
        (("niah",), {"limit": True}, "limit=True"),
        (("niah",), {"keys": 0}, "keys=0"),
        (("niah",), {"keys": 1000}, "key words"),
        (("niah",), {"haystack": "txt"}, "Did you mean 'text'"),
        (("niah",), {"haystack": "noise", "haystack_file": "x"}, "haystack=text"),
        (("niah",), {"seed": None}, "seed=None"),
        (("niah",), {"split": "train"}, "split"),
        (("niah",), {"chat_template": "yes"}, "chat_template"),
        (("recall",), {"tasks": ["numb"]}, "Did you mean 'num'"),
        (("recall",), {"tasks": []}, "at least one task"),
        (("recall",), {"tasks": ["num", "num"]}, "each once"),
        (("recall",), {"length": 3}, "at least 32"),
        (("recall",), {"split": "calibration", "data_dir": "x"}, "generator"),
        (("longbench",), {"split": "calibration"}, "no calibration split"),
        (("longbench",), {"revision": None}, "revision"),
        (({"name": "x", "type": "nia"},), {}, "Did you mean 'niah'"),
        (({"name": "x", "type": "base"},), {}, "unknown benchmark type"),
        (({"type": "niah"},), {}, "'name'"),
    ]
    for args, fields, message in cases:
        with pytest.raises(UserError, match=message) as e:
            benchmark(*args, **fields)
        assert "\n" not in str(e.value)


def test_whole_floats_are_numbers():
    assert benchmark("niah", length=1e3).length == 1000


def test_overlap():
    a = [dataclasses.replace(SAMPLE, id="1", context="one  two"), dataclasses.replace(SAMPLE, id="2", context="three")]
    assert overlap([dataclasses.replace(SAMPLE, id="2", context="other")], a) == ["2"]
    assert overlap([dataclasses.replace(SAMPLE, id="9", context="one two\n")], a) == ["1"]
    assert overlap(["zero one two three four"], a) == ["1", "2"]
    assert overlap(["unrelated"], a) == []
    with pytest.raises(UserError, match="share 1 samples, the first is 1"):
        require_disjoint(["one two"], a)


@pytest.mark.parametrize("name", ["recall", "niah", "niah_multikey", "niah_grid", "ruler_own", "continuation"])
def test_calibration_and_evaluation_are_disjoint(name):
    rows = {"limit": 20} if name == "ruler_own" else {}
    old = {"phrasing": 0} if name.startswith("niah") else {}
    calibration = benchmark(name, split="calibration", limit=5, **old)
    require_disjoint(calibration.samples(), benchmark(name, **rows, **old).samples())
    with pytest.raises(UserError):
        require_disjoint(benchmark(name, limit=5).samples(), benchmark(name).samples())


def test_a_path_that_was_read_as_a_number_is_refused() -> None:
    for name, key in (
        ("recall", "data_dir"),
        ("niah", "haystack_file"),
        ("continuation", "text_file"),
        ("ruler_own", "cache_dir"),
    ):
        with pytest.raises(UserError, match=rf"benchmark\.{key}=2024 must be text"):
            benchmark(name, **{key: 2024})
