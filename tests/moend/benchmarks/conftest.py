"""Tokenizers made in the test: bytes with a few merges, with and without BOS and chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import moend
from moend.budget import Arch

ROOT = Path(moend.__file__).parent
LONGBENCH = ROOT.parent.parent / "shared" / "data" / "longbench"
needs_longbench = pytest.mark.skipif(not LONGBENCH.is_dir(), reason="official LongBench rows are not here")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# as Llama 3: writes its own BOS, strips the turn, prints a date
STRIPPING = (
    "{{ bos_token }}{{ date_string }}|"
    "{% for m in messages %}[{{ m['role'] }}]\n\n{{ m['content'] | trim }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n\n{% endif %}"
)


def byte_tokenizer(*, bos: bool, template: str | None = None) -> Any:
    """One token a byte, except for the merges `.\\n` and `\\n\\n`; `<s>` in front of plain text if bos."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    newline = "Ċ"
    merges = [(".", newline), (newline, newline)]
    tokens = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", *alphabet, *("".join(m) for m in merges)]
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True) for t in tokens[:4]])
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    out = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )
    out.chat_template = template
    return out


@pytest.fixture(scope="session")
def recall_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(ROOT / "fixtures" / "recall_moe")


@pytest.fixture
def arch() -> Arch:
    return Arch(layers=2, q_heads=2, kv_heads=1, head_dim=8, max_positions=1024)
