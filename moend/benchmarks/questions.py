"""Several questions of one context: which samples share one, and the prompts that ask them.

Either each question is asked by itself (forks of one compressed cache), or they follow each other in one chat (turns).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

from moend.benchmarks.base import Rendered, Sample
from moend.benchmarks.prompts import SENTINEL, chat_text, encode, switches
from moend.errors import UserError

END = 8  # tokens by which two cuts of a context are known to be of the same one


def numbered(samples: Sequence[Sample], most: int) -> list[Sample]:
    """The samples by shared context, at most `most` of each, with `context_id` and `question` (from 1) in their meta.

    Samples share a context by the `context_id` of their meta, else by task and text. Contexts, and the questions of
    each, are in order of their first appearance; a context with more questions counts as several.
    """
    contexts: dict[str, list[Sample]] = {}
    for sample in samples:
        told = sample.meta.get("context_id")
        text = hashlib.sha256(sample.context.encode()).hexdigest()[:12]
        contexts.setdefault(str(told) if told is not None else f"{sample.task}-{text}", []).append(sample)
    made = []
    for name, mine in contexts.items():
        for i, sample in enumerate(mine):
            part = f"-{i // most}" if len(mine) > most else ""
            own = {"context_id": name + part, "question": i % most + 1}
            made.append(dataclasses.replace(sample, meta={**sample.meta, **own}))
    return made


def prompts(rendered: Sequence[Rendered], tokenizer: Any, *, visible: bool, turns: bool) -> list[Rendered]:
    """The prompts that ask the questions of one context, from each question's own prompt.

    All have the context of the one that was cut most. turns: the first is a whole prompt, the ids of each later one are
    what the conversation goes on with after the answer before. Else each is a whole prompt: the context and its own
    question; visible: after the first question and its gold answer, as its cache was compressed with that question.
    """
    if len(rendered) == 1:
        return list(rendered)
    shortest = min(rendered, key=lambda r: r.context_tokens)
    context, lead = shortest.ids[: shortest.context_tokens], shortest.ids[: shortest.context_start]
    whole = []
    for r in rendered:
        name, end = r.sample.id, r.ids[r.context_tokens - min(END, len(context)) : r.context_tokens]
        if r.ids[: r.context_start] != lead or end != context[len(context) - len(end) :]:
            raise UserError(f"{name} does not have the context of {rendered[0].sample.id}: they cannot share a prefill")
        cut = r.truncated + r.context_tokens - len(context)
        ids = (*context, *r.ids[r.context_tokens :])
        whole.append(dataclasses.replace(r, ids=ids, context_tokens=len(context), truncated=cut))
    first = whole[0]
    if turns:
        return [first, *(dataclasses.replace(r, ids=following(r, tokenizer), context_tokens=0) for r in whole[1:])]
    if visible:
        before = (*first.ids, *first.gold_ids)
        return [first, *(dataclasses.replace(r, ids=(*before, *following(r, tokenizer))) for r in whole[1:])]
    return whole


def following(rendered: Rendered, tokenizer: Any) -> tuple[int, ...]:
    """What follows an answer where the conversation goes on with this prompt's question: its words, and in a chat what
    the template puts between an answer and the next turn."""
    if not rendered.chat:
        return rendered.ids[rendered.context_tokens :]
    question, prefix = rendered.asked
    talk = [{"role": "user", "content": SENTINEL[::-1]}, {"role": "assistant", "content": SENTINEL}]
    told = switches(tokenizer, rendered.told, chat=True, answer_prefix=prefix)
    text = chat_text(tokenizer, [*talk, {"role": "user", "content": question.strip()}], **told)
    _, found, after = text.rpartition(SENTINEL)
    if not found:
        raise UserError("the chat template does not show an earlier answer: benchmark.turns needs chat_template=none")
    return tuple(encode(tokenizer, after + prefix)[0])
