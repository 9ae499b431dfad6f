"""NLL of the text that follows a compressed prefix: it ranks methods by local context, not by retrieval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from moend.benchmarks.base import Benchmark, Rendered, Sample
from moend.benchmarks.prompts import added_bos, encode
from moend.benchmarks.text import CHARS_PER_TOKEN, part
from moend.budget import Arch
from moend.errors import UserError

CONTINUED = 128


@dataclass(frozen=True, kw_only=True)
class Continuation(Benchmark):
    """Mean NLL (nats per token, lower is better) of the 128 tokens after a prefix of `length` tokens, BOS included.

    Windows are disjoint and spread over the text's test part; `split: calibration` lies in the other part.
    text_file: a UTF-8 text of the user's own.
    """

    length: int | None = 1024
    rows: int | None = 20  # examples
    text_file: str | None = None

    all_tasks: ClassVar[tuple[str, ...]] = ("continuation",)
    kind: ClassVar[Literal["generate", "nll"]] = "nll"
    unit: ClassVar[str] = "nats per token"
    higher_is_better: ClassVar[bool] = False
    run_only: ClassVar[tuple[str, ...]] = ("rows", "limit", "text_file")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length is None:
            raise UserError(f"benchmark.length of {self.name} must be a number of tokens")

    def data_sets(self) -> tuple[str, ...]:
        """The text's."""
        return ("own" if self.text_file else "jargon",)

    def metric(self, task: str) -> str:
        """Negative log-likelihood."""
        return "nll"

    def uses_chat(self, task: str) -> bool:
        """Never: text is continued as it stands."""
        return False

    def output_tokens(self, task: str, override: int | None = None) -> int:
        """Nothing is generated; 128 tokens are teacher-forced after the prompt."""
        return CONTINUED

    def new_tokens(self, task: str) -> int:
        """The continuation's tokens."""
        return CONTINUED

    def reference_length(self, arch: Arch) -> int:
        """All prefixes have the same length."""
        return self.length or 0

    def make_samples(self) -> list[Sample]:
        """Disjoint windows in a fixed order that a larger limit only extends."""
        text = part(self.split, self.text_file)
        size = int(((self.length or 0) + CONTINUED) * CHARS_PER_TOKEN)
        room = len(text) // size
        wanted = self.limit or min(self.rows or room, room)
        if not 1 <= wanted <= room:
            raise UserError(
                f"{self.name}: {max(wanted, 1)} samples of benchmark.length={self.length} asked for; the {self.split}"
                f" part of {self.text_file or 'the bundled text'} holds {room}"
            )
        # slot i * step visits every slot once: step is coprime with the number of slots and spreads the first ones
        step = next(s for s in range(max(1, round(room * 0.618)), room + 2) if math.gcd(s, room) == 1)
        samples = []
        for i in range(wanted):
            slot = (i * step + self.seed) % room
            window = text[slot * size : (slot + 1) * size]
            name = f"continuation-{self.split}-{self.length}-{slot}"
            samples.append(Sample("continuation", name, window, "", "", (), {"slot": slot}))
        return samples

    def render(
        self, sample: Sample, tokenizer: Any, arch: Arch, *, chat: bool, max_new_tokens: int | None = None
    ) -> Rendered:
        """The window's first `length` tokens as prompt (all of it context), the next 128 as gold_ids."""
        self.check(arch)
        bos = added_bos(tokenizer)
        ids = [*bos, *encode(tokenizer, sample.context.lstrip())[0]]
        length = self.length or 0
        if len(ids) < length + CONTINUED:
            raise UserError(f"sample {sample.id} has {len(ids)} tokens, {length + CONTINUED} are needed")
        return Rendered(
            sample=sample,
            ids=tuple(ids[:length]),
            context_tokens=length,
            max_new_tokens=0,
            gold_ids=tuple(ids[length : length + CONTINUED]),
        )

    def score(self, sample: Sample, text: str, *, finished: bool = True, opened: bool = False) -> dict[str, Any]:
        """Not from text: the engine's answer_nll is the score."""
        raise TypeError("continuation is scored by answer_nll, not by generated text")


BENCHMARK = Continuation
