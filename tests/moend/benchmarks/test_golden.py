"""Prompts of the embedded model, pinned by their token ids: its chat template, one BOS, real newlines."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from moend import models
from moend.benchmarks import benchmark
from moend.plan import Arch
from tests.moend.benchmarks.conftest import LONGBENCH, needs_longbench

pytestmark = [pytest.mark.slow, pytest.mark.req(12)]
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


def test_niah(tokenizer):
    r = render(tokenizer, "niah")
    assert list(r.ids[:24]) == CHAT_START
    assert list(r.ids[-12:]) == [*CHAT_END, 504, 1594, 2909, 327, 22422, 314]  # The access code for helmet is
    assert r.gold_ids == (216, 41, 39, 37, 38, 35, 41, 38)
    assert (len(r.ids), r.context_tokens, digest(r.ids)) == (1005, 971, "f170fe28ea41b6d6")


def test_niah_multikey(tokenizer):
    r = render(tokenizer, "niah_multikey")
    assert (len(r.ids), r.context_tokens, digest(r.ids)) == (1015, 981, "12a74772abe59042")


def test_continuation(tokenizer):
    r = render(tokenizer, "continuation")
    assert (len(r.ids), len(r.gold_ids), digest(r.ids + r.gold_ids)) == (1024, 128, "4998b8fbbf5ca382")


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
