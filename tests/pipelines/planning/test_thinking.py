"""A model that thinks and limits that end inside its thought: said while planning, without weights or tokenizer."""

from __future__ import annotations

import pytest

from moend.errors import UserError
from pipelines.planning import parts, schema, thinking
from tests.moend.benchmarks.conftest import CHATML, byte_tokenizer
from tests.moend.benchmarks.test_competition import SWITCH
from tests.pipelines.conftest import compose_points, sweep_points


def said(*args: str) -> str | None:
    (point,) = compose_points(["dry_run=true", *args])
    config = schema.validate(point)
    spec, _, bench = parts.parts(config)
    return thinking.check(spec, bench, config.generation)


LONG, QWEN, R1 = "benchmark=longbench_en", "model=qwen3_30b_a3b", "model=deepseek_r1_distill_qwen_7b"


def test_short_limits_of_a_model_that_thinks_are_a_caution() -> None:
    told = said(QWEN, LONG)
    assert told == (
        "qwen3_30b_a3b thinks before it answers, and 32 to 512 new tokens of longbench_en may end inside the thought:"
        " generation.thinking=off or generation=reasoning"
    )
    assert str(said(R1, LONG)).endswith("may end inside the thought: generation=reasoning")
    assert said(R1, LONG, "generation=reasoning") is None
    assert said(QWEN, LONG, "generation.thinking=off") is None
    assert said(QWEN, LONG, "generation.max_new_tokens=4096") is None
    assert said("model=llama3.1_8b_instruct", LONG) is None
    assert said(QWEN, "benchmark=niah") is None  # its prompts begin the answer
    assert said(QWEN, LONG, "model.chat_template=false") is None
    assert said(QWEN, "benchmark=continuation") is None
    assert "its limits are those of a thought" in str(
        said(QWEN, LONG, "generation=reasoning", "generation.thinking=off")
    )


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ((QWEN, "benchmark=longbench_moend", "generation.thinking=on"), "of trec is plain text"),
        ((QWEN, LONG, "benchmark.chat_template=all", "generation.thinking=on"), "thinking=on: .* 32 to 512 new tokens"),
        (("model=smollm2_135m", "benchmark=math500", "generation.thinking=on"), "no thinking to switch on"),
        ((R1, "benchmark=math500", "generation.thinking=off"), "opens a thought and has no switch"),
    ],
)
def test_what_cannot_be_is_refused(args: tuple[str, ...], match: str) -> None:
    with pytest.raises(UserError, match=match):
        said(*args)


def test_the_sweep_of_a_model_that_thinks_says_off() -> None:
    for point in sweep_points("moezip_table1"):
        config = schema.validate(point)
        assert config.generation.thinking == "off"
        spec, _, bench = parts.parts(config)
        assert thinking.check(spec, bench, config.generation) is None


def test_a_template_that_says_otherwise_is_refused_when_it_is_loaded() -> None:
    (point,) = compose_points(["dry_run=true", QWEN, LONG])
    spec, _, bench = parts.parts(schema.validate(point))
    thinking.confirm(spec, bench, byte_tokenizer(bos=False, template=SWITCH))
    with pytest.raises(UserError, match=r"model\.thinks=switch: the chat template of qwen3_30b_a3b says never"):
        thinking.confirm(spec, bench, byte_tokenizer(bos=False, template=CHATML))
