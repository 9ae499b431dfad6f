"""Questions that follow each other in one chat, on one compressed cache, and the prompts that ask them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from moend.benchmarks import benchmark, questions
from moend.benchmarks.base import Rendered, Sample
from moend.budget import Budget
from moend.cache import attention_of, cache_argument, prefill
from moend.decoding import Generation, Job
from moend.engine import Engine, rotations
from moend.errors import UserError
from moend.methods.bind import BoundMethod, bind
from moend.methods.spec import method
from moend.models import load as models


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.load(models.spec("recall_moe"), tmp_path_factory.mktemp("cache"))


FIELDS: dict[str, Any] = {"name": "recall", "type": "recall", "length": 96, "rows": 2, "questions_per_context": 3}


def rendered(loaded: Any, **fields: Any) -> list[Rendered]:
    bench = benchmark({**FIELDS, **fields})
    return [bench.render(s, loaded.tokenizer, loaded.arch, chat=False) for s in bench.contexts()[0]]


def bound(loaded: Any, name: str, **fields: Any) -> BoundMethod:
    return bind(method(name, **fields), Budget.parse("50%"), "matched", loaded.arch, t_ref=None, store_dtype=None)


@torch.no_grad()
def by_hand(loaded: Any, cell: BoundMethod, prompts: list[Rendered], cut: int, new: int, limit: int) -> list[list[int]]:
    """Greedy answers of the turns, token by token on the method's cache."""
    eos, answers = loaded.tokenizer.eos_token_id, []
    with attention_of(loaded.model):
        ids = torch.tensor([prompts[0].ids[:cut]])
        got = prefill(loaded.model, ids, last_queries=64, observe={"accumulated"})
        cache = cell.fork(got, new, seed=0, rotary=rotations(loaded.model), scaling=Engine(loaded).scaling)
        feed = list(prompts[0].ids[cut:])
        for turn in range(len(prompts)):
            answer: list[int] = []
            while True:
                at = torch.arange(cache.get_seq_length(), cache.get_seq_length() + len(feed))[None]
                named = {cache_argument(loaded.model): cache}
                out = loaded.model(input_ids=torch.tensor([feed]), position_ids=at, use_cache=True, **named)
                answer.append(int(out.logits[0, -1].argmax()))
                feed = [answer[-1]]
                if answer[-1] == eos or len(answer) == limit:
                    break
            answers.append(answer)
            if turn + 1 < len(prompts):
                feed += prompts[turn + 1].ids
    return answers


@pytest.mark.parametrize("visible", [True, False])
def test_turns_go_on_with_the_same_cache(loaded: Any, visible: bool) -> None:
    prompts = questions.prompts(rendered(loaded), loaded.tokenizer, visible=visible, turns=True)
    cells = [
        bound(loaded, "full"),
        bound(loaded, "SnapKV"),
        bound(loaded, "H2O"),
        bound(loaded, "TOVA", precision=FOUR),
    ]
    engine = Engine(loaded)
    together = engine.run_questions(prompts, [Job(c) for c in cells], question_visible=visible, turns=True)
    assert len(together) == 3
    assert all(o.prompt_tokens > len(prompts[0].ids) for outs in together[1:] for o in outs)
    for i, cell in enumerate(cells):
        one = together[0][i]
        wanted = by_hand(loaded, cell, prompts, one.compressed_tokens, one.fed_tokens, prompts[0].max_new_tokens)
        assert [outs[i].token_ids for outs in together] == wanted, cell.method.name
        alone = engine.run_questions(prompts, [Job(cell)], question_visible=visible, turns=True)
        assert [o.token_ids for (o,) in alone] == wanted


FOUR = {"k_bits": 4, "v_bits": 4}


def test_each_turn_sees_the_answers_before(loaded: Any) -> None:
    """The full cache after two turns holds the conversation: as one prompt it gives the third answer."""
    prompts = questions.prompts(rendered(loaded), loaded.tokenizer, visible=True, turns=True)
    engine, full = Engine(loaded), Job(bound(loaded, "full"))
    first, second, third = (o for (o,) in engine.run_questions(prompts, [full], turns=True))
    talk = list(prompts[0].ids)
    for out, prompt in zip((first, second), prompts[1:], strict=True):
        talk += [*out.token_ids, *prompt.ids]  # answers of this benchmark end with the end token, as in its training
    whole = dataclasses.replace(prompts[2], ids=tuple(talk), context_tokens=len(talk))
    (one,) = engine.run(whole, [full])
    assert one.token_ids == third.token_ids and third.prompt_tokens == len(talk)
    assert third.answer_nll == pytest.approx(one.answer_nll, abs=1e-5)


def test_sampled_turns_do_not_depend_on_company(loaded: Any) -> None:
    prompts = questions.prompts(rendered(loaded), loaded.tokenizer, visible=False, turns=True)
    how, cell = Generation(temperature=8.0), bound(loaded, "SnapKV")
    engine = Engine(loaded)
    jobs = [Job(cell, draw) for draw in range(3)]
    together = engine.run_questions(prompts, jobs, how, question_visible=False, turns=True, seed=3)
    for i, job in enumerate(jobs):
        alone = engine.run_questions(prompts, [job], how, question_visible=False, turns=True, seed=3)
        assert [o.token_ids for (o,) in alone] == [outs[i].token_ids for outs in together]
    assert len({tuple(o.token_ids) for o in together[0]}) > 1


def test_an_end_token_is_fed_only_where_answers_end_with_it(loaded: Any) -> None:
    engine, prompt = Engine(loaded), rendered(loaded)[1]
    eos = loaded.tokenizer.eos_token_id

    class Said:
        said = (5, eos)

    row: Any = Said()
    assert engine.decoder.pending(row, prompt) == [eos]
    assert engine.decoder.pending(row, dataclasses.replace(prompt, gold_ids=(5,))) == []
    row.said = (eos, 5)
    assert engine.decoder.pending(row, dataclasses.replace(prompt, gold_ids=(5,))) == [5]


def test_prompts_of_one_context(loaded: Any) -> None:
    own = rendered(loaded)
    unseen = questions.prompts(own, loaded.tokenizer, visible=False, turns=False)
    assert unseen == own  # nothing was cut: each question's own prompt
    seen = questions.prompts(own, loaded.tokenizer, visible=True, turns=False)
    assert seen[0] == own[0]
    tail = own[2].ids[own[2].context_tokens :]
    assert seen[2].ids == (*own[0].ids, *own[0].gold_ids, *tail)
    turns = questions.prompts(own, loaded.tokenizer, visible=True, turns=True)
    assert [p.ids for p in turns] == [own[0].ids, *(p.ids[p.context_tokens :] for p in own[1:])]
    cut = [
        own[0],
        dataclasses.replace(own[1], ids=own[1].ids[:40] + own[1].ids[50:], context_tokens=own[1].context_tokens - 10),
    ]
    shared = questions.prompts(cut, loaded.tokenizer, visible=False, turns=False)
    assert {p.ids[: p.context_tokens] for p in shared} == {cut[1].ids[: cut[1].context_tokens]}
    assert [p.truncated for p in shared] == [10, 0]
    other = dataclasses.replace(
        own[1], ids=(*own[1].ids[: own[1].context_tokens - 1], 7, *own[1].ids[own[1].context_tokens :])
    )
    with pytest.raises(UserError, match="does not have the context of"):
        questions.prompts([own[0], other], loaded.tokenizer, visible=False, turns=False)


class Chat:
    """A fast tokenizer of characters with a chat template."""

    is_fast = True

    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        return {"input_ids": [ord(c) for c in text], "offset_mapping": [(i, i + 1) for i in range(len(text))]}

    def apply_chat_template(self, turns: Any, **options: Any) -> str:
        return "".join(f"<{t['role']}>{t['content']}</>\n" for t in turns) + "<assistant>"


def test_a_later_turn_in_a_chat_is_what_the_template_puts_after_an_answer() -> None:
    sample = Sample("t", "i", "c", "Q2", "", ("g",))
    turn = Rendered(sample, (1,), 1, 4, chat=True, asked=("\n\nQ2?\n", "It is"))
    text = "".join(map(chr, questions.following(turn, Chat())))
    assert text == "</>\n<user>Q2?</>\n<assistant>It is"


def test_samples_share_a_context_by_task_and_text_or_by_what_their_meta_says() -> None:
    def sample(task: str, id: str, context: str, **meta: Any) -> Sample:
        return Sample(task, id, context, "q", "", ("a",), meta)

    made = [
        sample("t", "1", "x"),
        sample("t", "2", "y"),
        sample("t", "3", "x"),
        sample("u", "4", "x"),
        sample("t", "5", "x"),
    ]
    found = questions.numbered(made, 2)
    assert [s.id for s in found] == ["1", "3", "5", "2", "4"]
    assert [s.meta["question"] for s in found] == [1, 2, 1, 1, 1]
    assert len({s.meta["context_id"] for s in found}) == 4
    told = questions.numbered([sample("t", "1", "x", context_id="c"), sample("u", "2", "y", context_id="c")], 4)
    assert [(s.meta["context_id"], s.meta["question"]) for s in told] == [("c", 1), ("c", 2)]


def test_recall_asks_each_task_as_often_and_nothing_twice() -> None:
    bench = benchmark({**FIELDS, "rows": 6, "questions_per_context": 4})
    samples = bench.samples()
    assert bench.expected() == dict.fromkeys(bench.task_names, 6)
    assert [len(c) for c in bench.contexts()] == [4] * 7 + [2]
    for context in bench.contexts():
        assert len({s.context for s in context}) == 1 and len({s.question for s in context}) == len(context)
        for s in context:
            words = s.context.split()
            assert all(w in words for w in s.gold[0].split())
    assert len({s.id for s in samples}) == len(samples) == 30
    more = benchmark({**FIELDS, "rows": 12, "questions_per_context": 4}).samples()
    assert [s for s in more if s.id in {x.id for x in samples}][:28] == samples[:28]  # a larger limit only appends
    with pytest.raises(UserError, match="one pass to ask for"):
        benchmark({**FIELDS, "tasks": ["num", "pass"], "questions_per_context": 3})
