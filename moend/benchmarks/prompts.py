"""Prompts as token ids: chat templates, the cut in the middle of a long context, and where the context ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moend.benchmarks.answers.extract import THINK_END, THINK_START
from moend.benchmarks.base import Rendered, Sample
from moend.errors import UserError
from moend.models.load import TEMPLATE_DATE

SENTINEL = "9c1e7d"  # stands for a turn, to find where a template puts it


def encode(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of a text as it stands, nothing added, with each token's character span."""
    if not getattr(tokenizer, "is_fast", False):
        raise UserError("the tokenizer gives no character offsets: a fast tokenizer (tokenizer.json) is needed")
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False)
    return list(out["input_ids"]), [(int(a), int(b)) for a, b in out["offset_mapping"]]


def added_bos(tokenizer: Any) -> tuple[int, ...]:
    """The BOS that the tokenizer itself puts before a plain text, or nothing."""
    bos = tokenizer.bos_token_id
    with_special = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    return (bos,) if bos is not None and with_special[:1] == [bos] and plain[:1] != [bos] else ()


@dataclass(frozen=True)
class Prompt:
    """A user turn in three pieces (before the context, the context, after it) and the start of the answer."""

    head: str  # text before the context
    context: str
    tail: str  # text after the context: the question
    answer_prefix: str = ""  # what the answer begins with, outside the user's turn


def chat_text(tokenizer: Any, turns: list[dict[str, str]], **switches: Any) -> str:
    """The turns {role, content} of a chat in the model's template, up to where its next answer begins."""
    fixed = {"tokenize": False, "add_generation_prompt": True, "date_string": TEMPLATE_DATE}
    return str(tokenizer.apply_chat_template(turns, **fixed, **switches))


def _chat(tokenizer: Any, user: str, **switches: Any) -> str:
    return chat_text(tokenizer, [{"role": "user", "content": user}], **switches)


def asks_to_think(tokenizer: Any, answer_prefix: str = "", thinking: str = "auto") -> bool:
    """Whether a chat prompt ends inside a thought, or its template has a switch for thinking that is on.

    thinking: what the template is told (auto: nothing, its own default holds).
    """
    text = _chat(tokenizer, SENTINEL, **_told(thinking))
    tail = text.rpartition(SENTINEL)[2] + answer_prefix
    started, ended = tail.rfind(THINK_START), tail.rfind(THINK_END)
    if started != ended:
        return started > ended
    return text != _chat(tokenizer, SENTINEL, **_told("off"))


def habit(tokenizer: Any) -> str:
    """What a chat template says of thinking: `never` (nothing), `switch` (it can be told), `always` (it cannot)."""
    on, off = (_chat(tokenizer, SENTINEL, **_told(x)) for x in ("on", "off"))
    return "switch" if on != off else "always" if asks_to_think(tokenizer) else "never"


def _told(thinking: str) -> dict[str, bool]:
    """The arguments of a chat template, under the two names that published templates read."""
    return {} if thinking == "auto" else dict.fromkeys(("enable_thinking", "thinking"), thinking == "on")


def switches(tokenizer: Any, thinking: str, *, chat: bool, answer_prefix: str = "") -> dict[str, bool]:
    """What the template is told so that the model thinks (on) or does not (off); UserError where it cannot be told."""
    if thinking == "auto":
        return {}
    asked = f"generation.thinking={thinking}"
    if not chat:
        if thinking == "on":
            raise UserError(f"{asked} needs a chat template that asks for a thought; the prompt is plain text")
        return {}
    if answer_prefix and thinking == "on":
        raise UserError(f"{asked}: the prompt begins the answer ('{answer_prefix.strip()}'), so no thought comes first")
    kind = habit(tokenizer)
    if kind == "never" and thinking == "on":
        raise UserError(
            f"{asked}: the model's chat template has no thinking to switch on: set generation.thinking=auto"
        )
    if kind == "always" and thinking == "off":
        raise UserError(
            f"{asked}: the model's chat template opens a thought and has no switch for it: set generation.thinking=auto"
            " (generation=reasoning gives it room)"
        )
    return _told(thinking) if kind == "switch" else {}


def assemble(prompt: Prompt, tokenizer: Any, *, chat: bool, thinking: str = "auto") -> tuple[str, tuple[int, int]]:
    """The prompt's text and the characters its context takes in it."""
    user = prompt.head + prompt.context + prompt.tail
    if not user.strip():
        raise UserError("the prompt is empty")
    start = len(prompt.head)
    if not chat:
        switches(tokenizer, thinking, chat=False)
        text = user + ("\n" + prompt.answer_prefix if prompt.answer_prefix else "")
        return text, (start, start + len(prompt.context))
    if not getattr(tokenizer, "chat_template", None):
        raise UserError("the tokenizer has no chat template: set benchmark.chat_template=none")
    told = switches(tokenizer, thinking, chat=True, answer_prefix=prompt.answer_prefix)
    text = _chat(tokenizer, user, **told)
    at = len(_chat(tokenizer, SENTINEL, **told).partition(SENTINEL)[0])
    if text.startswith(user, at):
        lead = 0
    elif text.startswith(user.strip(), at):  # some templates strip the turn
        lead = len(user) - len(user.lstrip())
    else:
        raise UserError("the chat template rewrites the prompt: set benchmark.chat_template=none")
    context_start = at + max(start - lead, 0)
    context_end = at + min(max(start + len(prompt.context) - lead, 0), len(user.strip()) if lead else len(user))
    return text + prompt.answer_prefix, (context_start, context_end)


def render_prompt(
    sample: Sample,
    prompt: Prompt,
    tokenizer: Any,
    *,
    chat: bool,
    limit: int,
    max_new_tokens: int,
    gold: str = "",
    gold_eos: bool = False,
    stop: tuple[str, ...] = (),
    thinking: str = "auto",
) -> Rendered:
    """Tokenise a prompt once, cut the middle of its context if it is longer than `limit` tokens, and find the boundary.

    The text is cut, not its ids, and then tokenised again, so the ids are always those of a text. As in LongBench, the
    first and the last half of `limit` tokens stay; here the cut never leaves the context. UserError where the prompt
    without its context is longer than `limit`.
    """
    text, (start, end) = assemble(prompt, tokenizer, chat=chat, thinking=thinking)
    bos = added_bos(tokenizer)
    if bos and text.startswith(tokenizer.bos_token):  # the template writes its own
        bos = ()
    ids, spans = encode(tokenizer, text)
    room, before = limit - len(bos), len(ids)
    if before > room:
        text, start, end, ids, spans = _cut(text, start, end, ids, spans, room, tokenizer, sample)
    if not ids:
        raise UserError(f"sample {sample.id}: the prompt is empty")
    inside = next((i for i, (_, stop_at) in enumerate(spans) if stop_at > end), len(ids))
    before_it = next((i for i, (_, stop_at) in enumerate(spans) if stop_at > start), 0)
    gold_ids: list[int] = []
    if gold:
        glue = "" if text[-1:].isspace() or (chat and not prompt.answer_prefix) else " "
        joined, _ = encode(tokenizer, text + glue + gold)
        # Where the answer's first character merges with the prompt's last token, the answer is tokenised alone.
        gold_ids = joined[len(ids) :] if joined[: len(ids)] == ids else encode(tokenizer, glue + gold)[0]
        if gold_eos and tokenizer.eos_token_id is not None:
            gold_ids.append(tokenizer.eos_token_id)
    return Rendered(
        sample=sample,
        ids=(*bos, *ids),
        context_tokens=len(bos) + inside,
        max_new_tokens=max_new_tokens,
        truncated=before - len(ids),
        gold_ids=tuple(gold_ids),
        stop=stop,
        thinking=chat and asks_to_think(tokenizer, prompt.answer_prefix, thinking),
        context_start=min(len(bos) + before_it, len(bos) + inside),
        chat=chat,
        asked=(prompt.tail, prompt.answer_prefix),
        told=thinking,
    )


def _cut(
    text: str,
    start: int,
    end: int,
    ids: list[int],
    spans: list[tuple[int, int]],
    room: int,
    tokenizer: Any,
    sample: Sample,
) -> tuple[str, int, int, list[int], list[tuple[int, int]]]:
    """Remove the middle of text[start:end] until the whole has at most `room` tokens."""
    inside = [i for i, (a, b) in enumerate(spans) if a >= start and b <= end]
    excess = len(ids) - room
    while True:
        if excess >= len(inside):
            rest = len(ids) - len(inside)
            raise UserError(
                f"sample {sample.id}: the prompt without its context takes {rest} tokens; {max(room, 0)} are left for"
                " all of it: raise benchmark.length or lower max_new_tokens"
            )
        first = min(max(room // 2, inside[0]), inside[-1] + 1 - excess)
        after = first + excess
        a, b = spans[first][0], spans[after][0] if after < len(spans) else len(text)
        shorter = text[:a] + text[b:]
        new_ids, new_spans = encode(tokenizer, shorter)
        if len(new_ids) <= room:
            return shorter, start, end - (b - a), new_ids, new_spans
        excess += len(new_ids) - room  # the seam tokenises to a little more than its parts
