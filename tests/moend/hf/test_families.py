"""Every decoder family that transformers maps is right, or is refused in one line; and each rule left out shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moend.hf import attention as functions
from moend.hf.attention import AttentionRule
from moend.hf.probe import shape_of
from tests import ROOT
from tests.moend.hf import families

ALWAYS = {
    "llama": "right",
    "mistral": "right",
    "gemma2": "right",
    "gemma3_text": "right",
    "gpt_oss": "right",
    "llama4_text": "right",
    "cohere2": "right",
    "granite": "right",
    "qwen3_moe": "right",
    "jetmoe": "refused",
    "diffllama": "refused",
    "deepseek_v3": "refused",
    "mamba": "refused",
    "bart": "refused",
}


@pytest.mark.parametrize("family", ALWAYS)
def test_a_family_is_right_or_refused(family: str) -> None:
    verdict = families.judge(family, families.names()[family])
    assert verdict.kind == ALWAYS[family], verdict
    assert "\n" not in verdict.why


@pytest.mark.slow
@pytest.mark.parametrize("family", families.names())
def test_no_family_is_silently_different(family: str) -> None:
    verdict = families.judge(family, families.names()[family])
    assert verdict.kind in ("right", "refused", "not built"), verdict
    assert "\n" not in verdict.why


@pytest.mark.parametrize(
    ("left_out", "family"),
    [
        ({"window": None}, "mistral"),
        ({"window": None}, "gemma3_text"),
        ({"chunk": None}, "llama4_text"),
        ({"softcap": None}, "gemma2"),
        ({"sinks": None}, "gpt_oss"),
        ({"scaling": 0.25}, "granite"),
    ],
)
def test_a_rule_that_is_left_out_shows(left_out: dict[str, Any], family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.build(family, families.names()[family])
    shape_of(model)  # looked at now: a window that its config tells and its layers lack would be refused

    def without(*args: Any, **kwargs: Any) -> AttentionRule:
        return replace(AttentionRule(*args, **kwargs), **left_out)

    monkeypatch.setattr(functions, "AttentionRule", without)
    full, half = families.differences(model)
    assert min(full, half) > 5 * families.TOLERANCE


def test_the_page_has_a_place_for_the_table() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert all(page.count(mark) == 1 for mark in families.MARKS)


def test_dense_attention_is_its_own_reference() -> None:
    """The reference hides exactly what it is told to."""
    model = families.build("llama", "LlamaForCausalLM")
    ids = torch.randint(3, 89, (1, families.LENGTH), generator=torch.Generator().manual_seed(1))
    gone = torch.zeros(2, families.PREFIX, dtype=torch.bool)
    with torch.no_grad():
        same = families.dense_logits(model, ids, {0: gone})
        other = families.dense_logits(model, ids, {0: ~gone})
        stock = model(input_ids=ids, use_cache=False).logits
    assert families.off(same, stock) < 1e-4
    assert families.off(other[:, : families.PREFIX], stock[:, : families.PREFIX]) < 1e-4
    assert families.off(other[:, families.PREFIX :], stock[:, families.PREFIX :]) > 0.01
