"""What the tests of models share: a tiny llama as a local folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from moend.models import load as models
from moend.models.load import ModelSpec
from tests.tiny import tiny


def words_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {w: i for i, w in enumerate(["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(94))])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", unk_token="w0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny llama saved as a local model folder."""
    path = tmp_path / "tiny-llama"
    tiny("llama").to(torch.bfloat16).save_pretrained(path)
    words_tokenizer().save_pretrained(path)
    return path


def local(folder: Path, **changes: Any) -> ModelSpec:
    return models.spec("hf", id=str(folder), calibration_text="w1 w2 w3", **changes)
