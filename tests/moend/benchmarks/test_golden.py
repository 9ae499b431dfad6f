"""Prompts of the embedded model, pinned by their token ids: its chat template, one BOS, real newlines."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from moend.benchmarks import benchmark
from moend.budget import Arch
from moend.models import load as models
from tests.moend.benchmarks.conftest import CHATML, LONGBENCH, STRIPPING, byte_tokenizer, needs_longbench

pytestmark = pytest.mark.req(12)
slow = pytest.mark.slow  # needs the embedded model's tokenizer
ARCH = Arch(30, 9, 3, 64, 8192)
# <|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\n
CHAT_START = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
CHAT_START += [2, 198, 1, 4093, 198]
CHAT_END = [2, 198, 1, 520, 9531, 198]  # <|im_end|>\n<|im_start|>assistant\n


@pytest.fixture(scope="module")
def tokenizer():
    cache = Path(os.environ.get("MOEND_CACHE", "~/.cache/moend")).expanduser()
    return AutoTokenizer.from_pretrained(models.fetch(models.spec("smollm2_135m"), cache))


def digest(ids) -> str:
    return hashlib.sha256(str(tuple(ids)).encode()).hexdigest()[:16]


def render(tokenizer, name, **fields):
    b = benchmark(name, limit=1, **fields)
    return b.render(b.samples()[0], tokenizer, ARCH, chat=True)


@slow
def test_niah(tokenizer):
    r = render(tokenizer, "niah", phrasing=0)
    assert list(r.ids[:24]) == CHAT_START
    assert list(r.ids[-12:]) == [*CHAT_END, 504, 1594, 2909, 327, 22422, 314]  # The access code for helmet is
    assert r.gold_ids == (216, 41, 39, 37, 38, 35, 41, 38)
    assert (len(r.ids), r.context_tokens, digest(r.ids)) == (1005, 971, "f170fe28ea41b6d6")


@slow
def test_niah_multikey(tokenizer):
    r = render(tokenizer, "niah_multikey", phrasing=0)
    assert (len(r.ids), r.context_tokens, digest(r.ids)) == (1015, 981, "12a74772abe59042")


@slow
def test_continuation(tokenizer):
    r = render(tokenizer, "continuation")
    assert (len(r.ids), len(r.gold_ids), digest(r.ids + r.gold_ids)) == (1024, 128, "4998b8fbbf5ca382")


@slow
@needs_longbench
@pytest.mark.parametrize(
    ("task", "tokens", "context", "truncated", "want"),
    [
        ("hotpotqa", 3620, 3564, 0, "4cfeaab26a71b861"),
        ("trec", 2189, 2176, 0, "cb8bcd5656f99d49"),
        ("narrativeqa", 8064, 8011, 25242, "9036f7949727ef7a"),
    ],
)
def test_longbench(tokenizer, task, tokens, context, truncated, want):
    r = render(tokenizer, "longbench", data_dir=str(LONGBENCH), tasks=task)
    chat = task != "trec"
    assert (list(r.ids[:24]) == CHAT_START) == chat
    assert (list(r.ids[-6:]) == CHAT_END) == chat
    assert (len(r.ids), r.context_tokens, r.truncated, digest(r.ids)) == (tokens, context, truncated, want)


RULER = {
    "niah_single_1": (3963, 3927, "d3402d75486dd0cf"),
    "niah_single_2": (3962, 3928, "ef1cbcd5c54edfcd"),
    "niah_single_3": (3941, 3907, "b4af9bcf9659e8e4"),
    "niah_multikey_1": (3942, 3906, "effbf9d2b5450a22"),
    "niah_multikey_2": (3967, 3931, "166204b651198564"),
    "niah_multikey_3": (3922, 3828, "b30214408800c000"),
    "niah_multivalue": (3944, 3905, "cf4ad57b2aa361e6"),
    "niah_multiquery": (3951, 3878, "728b735badcab687"),
    "vt": (4043, 3995, "fa5d89e2ea80d5f1"),
    "cwe": (3967, 3928, "590dd0ea5d5646fd"),
    "fwe": (4042, 3997, "7d877c3369541cf7"),
    "qa_1": (3990, 3947, "61231a845b22d81b"),
    "qa_2": (4034, 3988, "52c2633d042f1090"),
}


@slow
def test_ruler(tokenizer):
    b = benchmark("ruler_own", length=4096, limit=1)
    got = {}
    for s in b.samples():
        r = b.render(s, tokenizer, ARCH, chat=True)
        assert list(r.ids[:24]) == CHAT_START
        got[s.task] = (len(r.ids), r.context_tokens, digest(r.ids + r.gold_ids))
    assert got == RULER


# A template without BOS, and one that writes its own and strips the turn; a token a byte
TEMPLATES = {"chatml": (CHATML, False), "stripping": (STRIPPING, True)}
BYTES = {
    "chatml": {
        "niah": (952, 821, "58bd81f158036f56"),
        "niah_1000@0": (981, 850, "7bc46e013bb0bfa2"),
        "niah_1000@1": (956, 827, "6efc32ff97af0c4a"),
        "niah_2000@0": (1881, 1750, "bb3d78bf9e2a35ea"),
        "niah_2000@1": (1811, 1680, "493ea627050dd1ec"),
        "niah_single_1": (8775, 8644, "3ef86fb404cda823"),
        "niah_single_2": (8834, 8703, "e87800e169b13260"),
        "niah_single_3": (8867, 8736, "3e1084192486ddde"),
        "niah_multikey_1": (8715, 8586, "9c3d0e0522a5eb5e"),
        "niah_multikey_2": (8852, 8723, "8cdad949bd6fd42e"),
        "niah_multikey_3": (8820, 8647, "7e56c0e85906c715"),
        "niah_multivalue": (8811, 8659, "603564da2ccf1345"),
        "niah_multiquery": (8781, 8537, "e0bc361a6fc9d56f"),
        "vt": (8913, 8755, "68ab9ebcf2d48181"),
        "cwe": (8866, 8731, "be898e56aef5d057"),
        "fwe": (8948, 8762, "2babb29cbecc9785"),
        "qa_1": (8909, 8755, "70a740017ba54c42"),
        "qa_2": (8809, 8627, "64c92db6a8ba98ad"),
    },
    "stripping": {
        "niah": (970, 835, "9d8cbf384f3a2b71"),
        "niah_1000@0": (999, 864, "3b0681841b8dc439"),
        "niah_1000@1": (974, 841, "b4a91fca6456369f"),
        "niah_2000@0": (1899, 1764, "12dcc490d7f3435e"),
        "niah_2000@1": (1829, 1694, "a24d08033f277b9a"),
        "niah_single_1": (8793, 8658, "d8443b6e46f7b352"),
        "niah_single_2": (8852, 8717, "b504b58b51eeb747"),
        "niah_single_3": (8846, 8711, "ea1a958e520b5b56"),
        "niah_multikey_1": (8733, 8600, "969baca33e92d620"),
        "niah_multikey_2": (8870, 8737, "9caa367c6378246a"),
        "niah_multikey_3": (8838, 8661, "b9f508ea17d7726c"),
        "niah_multivalue": (8829, 8673, "2708858af039f33b"),
        "niah_multiquery": (8799, 8551, "f8ed8d5f894bdc2f"),
        "vt": (8931, 8769, "b4816073de9fefbe"),
        "cwe": (8851, 8712, "25cb00910099a44f"),
        "fwe": (8944, 8754, "d6643391d7dd6471"),
        "qa_1": (8927, 8769, "a404e61ff00934b4"),
        "qa_2": (8827, 8641, "ac4ec2804d0a41ba"),
    },
}


@pytest.mark.parametrize("which", TEMPLATES)
def test_needles_and_ruler_in_two_chat_templates(which):
    template, bos = TEMPLATES[which]
    tok, got = byte_tokenizer(bos=bos, template=template), {}
    grid = benchmark("niah_grid", lengths=[1000, 2000], depths=[0, 1], limit=1, phrasing=0)
    ruler = benchmark("ruler_own", length=9000, limit=1)
    for b in (benchmark("niah", length=1000, limit=1, phrasing=0), grid, ruler):
        for s in b.samples():
            r = b.render(s, tok, Arch(2, 2, 1, 8, 10_000), chat=True)
            assert list(r.ids).count(tok.bos_token_id) == bos and (r.ids[0] == tok.bos_token_id) == bos
            text = tok.decode(r.ids)
            assert "\\n" not in text and "\n" in text and r.truncated == 0
            name = f"{s.task}@{s.meta['axes']['depth']}" if "axes" in s.meta else s.task
            got[name] = (len(r.ids), r.context_tokens, digest(r.ids + r.gold_ids))
    assert got == BYTES[which]
