"""Whether a model thinks before it answers, against how much room its answer has: told before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moend.errors import UserError

if TYPE_CHECKING:
    from moend.benchmarks import Benchmark
    from moend.models.load import ModelSpec
    from pipelines.planning.schema import GenerationConfig

THOUGHT = 1024  # new tokens: fewer than these often end inside the thought


def check(spec: ModelSpec, bench: Benchmark, generation: GenerationConfig) -> str | None:
    """What a person should know of thinking in these cells, in one line; None: nothing.

    UserError where the template cannot do what is asked, or where a thought was asked for and has no room.
    """
    asked, kind = generation.thinking, spec.thinks
    tasks = [t for t in bench.task_names if spec.chat_template and bench.uses_chat(t)]
    if bench.kind != "generate":
        return None
    if asked == "on" and (left := [t for t in bench.task_names if t not in tasks]):
        raise UserError(
            f"generation.thinking=on: the prompt of {left[0]} is plain text and asks for no thought:"
            " benchmark.chat_template=all"
        )
    if asked == "on" and bench.begins_answer:
        raise UserError(f"generation.thinking=on: prompts of {bench.name} begin the answer, so no thought comes first")
    if asked == "on" and kind == "never":
        raise UserError(f"generation.thinking=on: the chat template of {spec.label} has no thinking to switch on")
    if asked == "off" and kind == "always" and tasks:
        raise UserError(
            f"generation.thinking=off: the chat template of {spec.label} opens a thought and has no switch for it:"
            " generation=reasoning gives it room, model.chat_template=false leaves the template out"
        )
    thinks = asked == "on" or (asked == "auto" and kind in ("switch", "always"))
    limits = [bench.output_tokens(t, generation.max_new_tokens) for t in tasks]
    if thinks and limits and min(limits) < THOUGHT and not bench.reasoning and not bench.begins_answer:
        room = f"{min(limits)}" if min(limits) == max(limits) else f"{min(limits)} to {max(limits)}"
        line = (
            f"{spec.label} thinks before it answers, and {room} new tokens of {bench.name} may end inside the thought"
        )
        off = "generation.thinking=off or " if kind == "switch" else ""
        if asked == "on":
            raise UserError(f"generation.thinking=on: {line}: generation=reasoning gives it room")
        return f"{line}: {off}generation=reasoning"
    if asked == "off" and bench.reasoning:
        return f"generation.thinking=off: {spec.label} is not asked to think, and its limits are those of a thought"
    return None


def confirm(spec: ModelSpec, bench: Benchmark, tokenizer: Any) -> None:
    """UserError where the loaded chat template does otherwise than the configuration says."""
    from moend.benchmarks.prompts import habit

    if spec.thinks is None or bench.kind != "generate" or not spec.chat_template or not tokenizer.chat_template:
        return
    if (found := habit(tokenizer)) != spec.thinks:
        raise UserError(
            f"model.thinks={spec.thinks}: the chat template of {spec.label} says {found}: model.thinks={found}"
        )
