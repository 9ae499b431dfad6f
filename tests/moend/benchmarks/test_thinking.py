"""`generation.thinking` in prompts: pinned by token ids for each kind of template, refused where a template cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moend.benchmarks import benchmark
from moend.benchmarks.prompts import Prompt, habit, render_prompt, switches
from moend.benchmarks.questions import prompts
from moend.errors import UserError
from tests.moend.benchmarks.conftest import CHATML, byte_tokenizer
from tests.moend.benchmarks.test_competition import LARGE, OPENING, SWITCH, digest

# as Qwen3: told not to think, the answer begins after an empty thought; as DeepSeek-V3.1: another name of the switch
CLOSED = (
    CHATML
    + "{% if add_generation_prompt %}{% if thinking is defined and thinking %}<think>{% else %}</think>{% endif %}"
    "{% endif %}"
)
TEMPLATES = {"never": CHATML, "switch": SWITCH, "other": CLOSED, "always": OPENING}
QUESTION = "<|im_start|>user\nFind $1+1$.\nX<|im_end|>\n<|im_start|>assistant\n"
ENDS = {  # template and what it is told -> what stands after the turn
    ("never", "auto"): "",
    ("never", "off"): "",
    ("switch", "auto"): "",
    ("switch", "on"): "",
    ("switch", "off"): "<think>\n\n</think>\n\n",
    ("other", "auto"): "</think>",
    ("other", "on"): "<think>",
    ("other", "off"): "</think>",
}


def rendered(which: str, thinking: str, prefix: str = "") -> tuple[Any, Any]:
    tokenizer = byte_tokenizer(bos=False, template=TEMPLATES[which])
    sample = benchmark("niah", length=400, limit=1).samples()[0]
    prompt = Prompt("", "Find $1+1$.", "\nX", prefix)
    r = render_prompt(sample, prompt, tokenizer, chat=True, limit=400, max_new_tokens=4, thinking=thinking)
    return r, tokenizer


@pytest.mark.req(12)
@pytest.mark.parametrize(("which", "thinking"), ENDS)
def test_a_prompt_says_what_was_asked(which: str, thinking: str) -> None:
    r, tokenizer = rendered(which, thinking)
    assert tokenizer.decode(r.ids) == QUESTION + ENDS[which, thinking]
    assert r.thinking == ((which != "never" and thinking == "on") or (which, thinking) == ("switch", "auto"))


def test_what_a_template_says_of_thinking() -> None:
    found = {name: habit(byte_tokenizer(bos=False, template=t)) for name, t in TEMPLATES.items()}
    assert found == {"never": "never", "switch": "switch", "other": "switch", "always": "always"}


def test_what_a_template_cannot_is_refused() -> None:
    with pytest.raises(UserError, match=r"thinking=on: the model's chat template has no thinking to switch on"):
        rendered("never", "on")
    with pytest.raises(UserError, match=r"thinking=off: the model's chat template opens a thought and has no switch"):
        rendered("always", "off")
    assert rendered("always", "on")[0].thinking
    with pytest.raises(UserError, match=r"the prompt begins the answer \('It is'\)"):
        rendered("switch", "on", prefix="It is ")
    assert not rendered("switch", "off", prefix="It is ")[0].thinking
    tokenizer = byte_tokenizer(bos=False)
    with pytest.raises(UserError, match="needs a chat template"):
        switches(tokenizer, "on", chat=False)
    assert switches(tokenizer, "off", chat=False) == {}


@pytest.mark.req(12)
def test_golden_ids_of_every_benchmark_with_the_switch_off(tmp_path: Path) -> None:
    rows = {"aime24": [{"id": "a", "problem": "Find $1+1$.", "answer": "2"}]}
    row = {"input": "Who?", "context": "It was Ada. " * 9, "answers": ["Ada"], "all_classes": None, "_id": "h"}
    rows["hotpotqa"] = [{**row, "length": 27, "dataset": "hotpotqa", "language": "en"}]
    for task, found in rows.items():
        (tmp_path / f"{task}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in found))
    tokenizer, got = byte_tokenizer(bos=False, template=SWITCH), {}
    for name, fields in {
        "aime24": {"data_dir": str(tmp_path)},
        "longbench": {"data_dir": str(tmp_path), "tasks": "hotpotqa"},
        "niah": {"length": 600, "limit": 1, "phrasing": 0},
        "ruler_own": {"length": 3000, "limit": 1, "tasks": "vt"},
    }.items():
        for thinking in ("auto", "off"):
            b = benchmark(name, thinking=thinking, **fields)
            assert b.identity() == benchmark(name, **fields).identity()  # the key has it with the generation
            r = b.render(b.samples()[0], tokenizer, LARGE, chat=True, max_new_tokens=16)
            text = tokenizer.decode(r.ids)
            assert ("<think>\n\n</think>\n\n" in text) == (thinking == "off")
            got[name, thinking] = digest(r.ids)
    assert len(set(got.values())) == 8
    assert got == GOLDEN


GOLDEN = {
    ("aime24", "auto"): "9f2ec3d7da6ff2bf",
    ("aime24", "off"): "ae8406d5a4093e33",
    ("longbench", "auto"): "55dc5371a71cde7b",
    ("longbench", "off"): "df5a516ef7b22101",
    ("niah", "auto"): "0257f7f2ae215d78",
    ("niah", "off"): "68578f617b7a5e8c",
    ("ruler_own", "auto"): "f92064530dc25687",
    ("ruler_own", "off"): "36b36348214b1768",
}


def test_later_turns_of_a_chat_say_it_again() -> None:
    (first, tokenizer), (second, _) = rendered("switch", "off"), rendered("switch", "off")
    _, later = prompts([first, second], tokenizer, visible=True, turns=True)
    assert tokenizer.decode(later.ids).endswith("X<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
