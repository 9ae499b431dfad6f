"""What holds for every file of conf/benchmark: the boundary, limits, no empty prompt, scores from records alone."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import pytest

from moend.benchmarks import Benchmark, Sample, benchmark, names
from moend.budget import Arch
from moend.errors import Blocked, UserError
from tests.moend.benchmarks.conftest import CHATML, LONGBENCH, STRIPPING, byte_tokenizer

WIDE = Arch(2, 2, 1, 8, 400_000)  # in one-byte tokens
TOKENIZERS = {
    "plain": (byte_tokenizer(bos=True), False),
    "chatml": (byte_tokenizer(bos=False, template=CHATML), True),
    "stripping": (byte_tokenizer(bos=True, template=STRIPPING), True),
}
# What makes a benchmark of thousands of tokens fit tokens of one byte, and where data lie
FIELDS: dict[str, dict[str, Any]] = {
    "ruler": {"length": 16_000},
    # those tasks that need no fetched file; samples are numbers until a prompt is rendered
    "ruler_official": {"length": 16_000, "tasks": ["niah_single_1", "niah_multikey_3", "cwe", "fwe"]},
    "niah_grid": {"lengths": [2000, 4000], "depths": [0, 1]},
    "longbench": {"data_dir": str(LONGBENCH)},
    "competition": {"data_dir": str(LONGBENCH.parent / "math")},
}


@functools.cache
def made(name: str) -> Benchmark:
    """One sample of every task, where the data are here."""
    kind = benchmark(name).type
    b = benchmark(name, limit=1, **FIELDS.get(kind, {}))
    if kind == "longbench":
        here = tuple(t for t in b.task_names if (LONGBENCH / f"{t}.jsonl").is_file())
        if not here:
            pytest.skip("no official rows are here")
        b = dataclasses.replace(b, tasks=here)
    try:
        b.samples()
    except Blocked as e:
        pytest.skip(str(e))
    return b


def tokenizer_of(b: Benchmark, which: str, recall: Any) -> tuple[Any, bool]:
    return (recall, False) if b.type == "recall" else TOKENIZERS[which]


GENERATED = [n for n in names() if benchmark(n).kind == "generate"]


@pytest.mark.req(23)
@pytest.mark.req(11)
@pytest.mark.parametrize("which", TOKENIZERS)
@pytest.mark.parametrize("name", GENERATED)
def test_the_question_comes_after_what_is_compressed(name: str, which: str, recall_tokenizer: Any) -> None:
    b = made(name)
    tokenizer, chat = tokenizer_of(b, which, recall_tokenizer)
    for s in b.samples():
        r = b.render(s, tokenizer, WIDE, chat=chat)
        assert r.prompt_tokens > 0 and r.prompt_tokens + r.max_new_tokens <= WIDE.max_positions
        assert 0 <= r.context_tokens < r.prompt_tokens  # something is left to ask
        before, after = (tokenizer.decode(x) for x in (r.ids[: r.context_tokens], r.ids[r.context_tokens :]))
        assert after.strip()
        if s.question.strip():
            assert s.question.strip() in after
            assert s.question.strip() not in before or s.task == "cwe"  # its worked example asks the same
        if s.answer_prefix:
            assert after.endswith(s.answer_prefix)
        assert list(r.ids).count(tokenizer.bos_token_id) <= 1


@pytest.mark.req(11)
@pytest.mark.parametrize("name", names())
def test_limits_that_cannot_fit_are_refused_while_composing(name: str) -> None:
    b = benchmark(name)
    with pytest.raises(UserError) as e:
        b.check(Arch(2, 2, 1, 8, 16))
    assert "\n" not in str(e.value)
    if b.kind == "generate":
        with pytest.raises(UserError):
            b.check(Arch(2, 2, 1, 8, 50_000), max_new_tokens=50_000)
    b.check(Arch(2, 2, 1, 8, 131_072))


@pytest.mark.parametrize("name", GENERATED)
def test_records_hold_all_that_scoring_needs(name: str) -> None:
    b = made(name)
    for s in b.samples():
        s = s if s.gold else b.render(s, byte_tokenizer(bos=True), WIDE, chat=False).sample
        kept = json.loads(json.dumps({"gold": s.gold, "meta": {k: s.meta[k] for k in b.scored_meta}}))
        alone = Sample(s.task, s.id, "", "", "", tuple(kept["gold"]), kept["meta"])
        for text in ("", s.gold[0], f"the answer is {s.gold[0]}, not 7", f"<think>7</think>\n{s.gold[-1]}\n"):
            assert b.score(alone, text) == b.score(s, text)


@pytest.mark.parametrize("name", names())
def test_fields_of_the_file_are_all_that_can_be_set(name: str) -> None:
    """A key that is neither in the file nor in run.yaml cannot be overridden on the command line."""
    import yaml

    from moend import paths

    listed = yaml.safe_load((paths.folder("conf", "benchmark") / f"{name}.yaml").read_text())
    shared = yaml.safe_load((paths.folder("conf", "run.yaml")).read_text())["benchmark"]
    hidden = {"reasoning", "thinking", *shared}  # set by generation
    assert {f.name for f in dataclasses.fields(benchmark(name))} - hidden == set(listed)
