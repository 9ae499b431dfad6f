"""RULER (Hsieh et al. 2024, arXiv 2404.06654): 13 synthetic tasks, generated for a tokenizer, a length and a seed.

Samples are recipes that need no tokenizer; a prompt is fitted when it is rendered: the most filler (sentences, words,
documents) with which the prompt, chat template included, and the task's output still have `length` tokens.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from moend.benchmarks import rows, text
from moend.benchmarks.base import Benchmark, Rendered, Sample, log
from moend.benchmarks.niah import UNIT
from moend.benchmarks.prompts import Prompt, added_bos, assemble, encode, render_prompt
from moend.benchmarks.ruler_base import Library, Question
from moend.benchmarks.ruler_documents import Documents
from moend.benchmarks.ruler_tasks import TASKS, VERSION
from moend.budget import Arch
from moend.errors import Blocked, UserError

LEAST = 1024  # below, the descriptions and worked examples of some tasks leave no room
METRICS = {"all": "string_match_all", "part": "string_match_part"}


@dataclass(frozen=True, kw_only=True)
class Ruler(Benchmark):
    """Share of the answers that the output holds (`qa`: whether it holds any), as substrings, whatever their case.

    length: tokens of prompt and output together, as in the paper. A prompt leaves room for the task's own output limit
        or for max_new_tokens, whichever is larger, so that a smaller output limit changes no prompt.
    data_dir: a folder with squad.json (SQuAD 2.0) and hotpotqa.json (HotpotQA, distractor setting) for qa_1 and qa_2;
        null generates documents on invented people instead (their metric is named so).
    haystack_file: a UTF-8 text of the user's own instead of the bundled one.
    cache_dir: where the fitted amounts of filler are kept for the next time; null keeps none.
    """

    length: int | None = 4096
    rows: int | None = 500  # examples per task
    data_dir: str | None = None
    haystack_file: str | None = None
    cache_dir: str | None = None

    begins_answer: ClassVar[bool] = True
    all_tasks: ClassVar[tuple[str, ...]] = tuple(TASKS)
    endless: ClassVar[bool] = True
    run_only: ClassVar[tuple[str, ...]] = ("rows", "limit", "data_dir", "haystack_file", "cache_dir")
    prompt_version: ClassVar[int] = VERSION

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length is None or self.length < LEAST:
            raise UserError(f"benchmark.length={self.length} of {self.name} must be at least {LEAST} tokens")
        if self.data_dir is not None and self.split != "test":
            raise UserError("benchmark.data_dir holds evaluation rows: benchmark.split=calibration needs null")

    def data_sets(self) -> tuple[str, ...]:
        """The haystack's, and those of the documents that are read."""
        read = ("SQuAD", "HotpotQA") if self.data_dir else ()
        return ("generated", "own" if self.haystack_file else "jargon", *read)

    def metric(self, task: str) -> str:
        """Substring match of all answers, or of one of them; generated documents are no SQuAD and say so."""
        made = isinstance(TASKS[task], Documents) and self.data_dir is None
        return METRICS[TASKS[task].match] + (" (generated documents)" if made else "")

    def new_tokens(self, task: str) -> int:
        """The paper's output limits."""
        return TASKS[task].new_tokens

    def reference_length(self, arch: Arch) -> int:
        """What the task of the shortest output leaves of the length."""
        return self._total - min(TASKS[task].new_tokens for task in self.task_names)

    @property
    def _total(self) -> int:
        return self.length or 0

    def check(self, arch: Arch, max_new_tokens: int | None = None) -> None:
        """Refuse a length that the model does not have, and an output that leaves no room for a prompt."""
        if self._total > arch.max_positions:
            raise UserError(
                f"benchmark.length={self.length}, prompt and output together, is more than the model's"
                f" {arch.max_positions} positions"
            )
        for task in self.task_names:
            new, least = self.output_tokens(task, max_new_tokens), LEAST - TASKS[task].new_tokens
            if self._total - new < least:
                raise UserError(
                    f"{task}: {new} new tokens leave {max(self._total - new, 0)} of benchmark.length={self.length} for"
                    f" the prompt; it needs at least {least}"
                )

    # Data

    def _files(self) -> dict[str, Path]:
        """The files that the chosen tasks need, by name of the data set."""
        if self.data_dir is None:
            return {}
        wanted = [f.file for task in self.task_names if isinstance(f := TASKS[task], Documents)]
        return {name: Path(self.data_dir).expanduser() / f"{name}.json" for name in wanted}

    def available(self) -> str | None:
        """Missing where a folder was named that does not hold the file a task needs, or a text that is not there."""
        missing = [path for path in self._files().values() if not path.is_file()]
        if missing:
            return f"benchmark.data_dir={self.data_dir} has no {missing[0].name}"
        if self.haystack_file is not None and not Path(self.haystack_file).expanduser().is_file():
            return f"benchmark.haystack_file={self.haystack_file} is not a file"
        return None

    @cached_property
    def _read(self) -> dict[str, tuple[tuple[str, ...], list[Question]]]:
        """Documents and questions of the files."""
        if reason := self.available():
            raise Blocked(reason)
        return {name: _READERS[name](path) for name, path in self._files().items()}

    @cached_property
    def _library(self) -> Library:
        units = tuple(UNIT.findall(text.part(self.split, self.haystack_file)))
        if not units:
            raise UserError(f"benchmark.haystack_file={self.haystack_file} has no sentence")
        return Library(units, text.words(), {name: documents for name, (documents, _) in self._read.items()})

    def make_samples(self) -> list[Sample]:
        """`limit` or `rows` of each task, each from its own seed; of files, the questions in their order."""
        wanted = self.limit or self.rows or 500
        samples = []
        for task in self.task_names:
            family = TASKS[task]
            ids = [f"ruler-{self.split}-{task}-{self.length}-s{self.seed}-{i}" for i in range(wanted)]
            if isinstance(family, Documents) and family.file in self._read:
                documents, questions = self._read[family.file]
                if len(questions) < wanted:
                    log.warning("%s: %s has %d of %d questions", self.name, family.file, len(questions), wanted)
                samples += [family.read(task, id, q, documents) for id, q in zip(ids, questions, strict=False)]
            else:
                samples += [family.sample(task, id, self._total, self._library) for id in ids]
        return samples

    @cached_property
    def _fingerprint(self) -> str:
        library = self._library
        content = [super().fingerprint(), library.sentences, library.words, sorted(library.documents.items())]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def fingerprint(self) -> str:
        """Of the samples and of all that can stand around them."""
        return self._fingerprint

    # Prompts

    def render(
        self, sample: Sample, tokenizer: Any, arch: Arch, *, chat: bool, max_new_tokens: int | None = None
    ) -> Rendered:
        """The longest prompt that fits; UserError where not even the least filler does."""
        self.check(arch, max_new_tokens)
        family, chat = TASKS[sample.task], chat and self.uses_chat(sample.task)
        new, gold = self.output_tokens(sample.task, max_new_tokens), family.gold(sample)
        limit = self._total - max(new, family.new_tokens, len(encode(tokenizer, " " + gold)[0]) + 1)
        build = family.builder(sample, self._total, self._library)
        how: dict[str, Any] = {"tokenizer": tokenizer, "chat": chat, "thinking": self.thinking}

        def render(prompt: Prompt) -> Rendered:
            return render_prompt(sample, prompt, limit=limit, max_new_tokens=new, gold=gold, **how)

        kept = self._kept(sample.task, tokenizer, chat)
        if kept is not None and (fit := kept.fits.get(sample.id)) and fit["limit"] == limit:
            rendered = render(build(fit["units"]))
            if fit["sha256"] == _digest(rendered.ids) and not rendered.truncated:
                return rendered
            log.warning("%s: what it says of %s is not what is generated now: fitted again", kept.path, sample.id)

        def size(units: int) -> int:
            return _size(build(units), **how)

        if (least := size(family.least)) > limit:
            raise UserError(
                f"benchmark.length={self.length} is too short for {sample.task}: with the least context the prompt"
                f" takes {least} tokens; {limit} are left for it"
            )
        units = fitted(size, family.least, limit)
        rendered = render(build(units))
        if kept is not None:
            kept.add(
                {"id": sample.id, "limit": limit, "units": units, "tokens": len(rendered.ids)}
                | {"sha256": _digest(rendered.ids)}
            )
        return rendered

    @cached_property
    def _kept_files(self) -> dict[Path, Kept]:
        return {}

    def _kept(self, task: str, tokenizer: Any, chat: bool) -> Kept | None:
        """The fits of this task for this tokenizer; the header says all that they follow from."""
        if self.cache_dir is None:
            return None
        header = {
            "generator": VERSION,
            "task": task,
            "length": self.length,
            "seed": self.seed,
            "split": self.split,
            "tokenizer": _tokenizer_fingerprint(tokenizer),
            "chat": chat,
            **({} if self.thinking == "auto" else {"thinking": self.thinking}),
            "filler": self._filler,
        }
        name = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()[:16]
        path = Path(self.cache_dir).expanduser() / "ruler" / f"{task}-{self.length}-{name}.jsonl"
        if path not in self._kept_files:
            self._kept_files[path] = Kept(path, header)
        return self._kept_files[path]

    @cached_property
    def _filler(self) -> str:
        """Of what stands around the samples: unlike `fingerprint`, the same for any number of rows."""
        library = self._library
        content = [library.sentences, library.words, sorted(library.documents.items())]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    # Scores

    def score(self, sample: Sample, text: str, *, finished: bool = True, opened: bool = False) -> dict[str, Any]:
        """The paper's string match of the text after the last thought; a thought never closed holds no answer."""
        answer = (self.final_text(text, opened=opened) or "").strip()
        found = [gold.lower() in answer.lower() for gold in sample.gold]
        score = sum(found) / len(found) if TASKS[sample.task].match == "all" else float(any(found))
        return {"score": score, "answer": answer or None}


def fitted(size: Callable[[int], int], least: int, limit: int) -> int:
    """The largest number of units whose size is at most `limit`, for a size that never falls; `least` must fit.

    Steps go to where the line through the bracket's ends meets the limit, and to its middle after a step that gained
    little: a few calls, which tokenise a whole prompt each, where bisection needs one for every bit of the answer.
    UserError where the size no longer grows: there is no more filler.
    """
    low, at_low = least, size(least)
    high = max(2 * least, least + 8)
    while (at_high := size(high)) <= limit:
        if at_high == at_low:
            raise UserError(f"benchmark.length is too long: all there is makes {at_high} of {limit} tokens")
        rate = (at_high - at_low) / (high - low)
        low, at_low = high, at_high
        high = low + int((limit - at_low) / rate * 1.02) + 2
    halve = False
    while (width := high - low) > 1:
        line = low + int(width * (limit + 0.5 - at_low) / (at_high - at_low))
        step = min(max((low + high) // 2 if halve else line, low + 1), high - 1)
        if (at_step := size(step)) <= limit:
            low, at_low = step, at_step
        else:
            high, at_high = step, at_step
        halve = high - low > width // 4 and not halve
    return low


def _size(prompt: Prompt, tokenizer: Any, *, chat: bool, thinking: str = "auto") -> int:
    """Tokens of a rendered prompt, BOS included."""
    whole, _ = assemble(prompt, tokenizer, chat=chat, thinking=thinking)
    own = tokenizer.bos_token is not None and whole.startswith(tokenizer.bos_token)
    return len(encode(tokenizer, whole)[0]) + (0 if own else len(added_bos(tokenizer)))


def _digest(ids: tuple[int, ...]) -> str:
    return hashlib.sha256(str(ids).encode()).hexdigest()


@functools.lru_cache(maxsize=4)
def _tokenizer_fingerprint(tokenizer: Any) -> str:
    """Of all that turns a prompt into ids: the tokenizer's own file and the chat template."""
    parts = [tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, added_bos(tokenizer)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class Kept:
    """A JSONL file of fitted amounts: a header line, then {id, limit, units, tokens, sha256 of the ids} per sample.

    Only ever replaced as a whole; what other processes added meanwhile is kept.
    """

    def __init__(self, path: Path, header: dict[str, Any]):
        self.path, self.header = path, header
        self.fits = self._read()

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            lines = self.path.read_text(encoding="utf-8").split("\n")
        except FileNotFoundError:
            return {}
        try:
            header, *fits = [json.loads(line) for line in lines if line]
            if header != self.header or any(not {"id", "limit", "units", "sha256"} <= fit.keys() for fit in fits):
                raise ValueError("other content")
        except (ValueError, AttributeError) as e:
            log.warning("%s is damaged (%s) and is made again", self.path, e)
            return {}
        return {str(fit["id"]): fit for fit in fits}

    def add(self, fit: dict[str, Any]) -> None:
        """Write the file with one more fit: to a temporary name, fsync, rename."""
        self.fits = {**self._read(), **self.fits, fit["id"]: fit}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temp = self.path.with_name(f".{self.path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        try:
            with temp.open("w", encoding="utf-8") as f:
                f.writelines(json.dumps(line) + "\n" for line in [self.header, *self.fits.values()])
                f.flush()
                os.fsync(f.fileno())
            temp.replace(self.path)
        finally:
            temp.unlink(missing_ok=True)


# Data sets


_SQUAD = rows.fields(
    data=rows.listed(
        rows.fields(
            paragraphs=rows.listed(
                rows.fields(
                    context=rows.filled,
                    qas=rows.listed(
                        rows.fields(question=rows.filled, answers=rows.listed(rows.fields(text=rows.filled), least=0)),
                        least=0,
                    ),
                )
            )
        )
    )
)
_HOTPOTQA = rows.listed(
    rows.fields(
        question=rows.filled, answer=rows.filled, context=rows.listed(rows.pair(rows.text, rows.listed(rows.text)))
    )
)


def _squad(path: Path) -> tuple[tuple[str, ...], list[Question]]:
    """SQuAD 2.0: paragraphs as documents; questions with an answer; the same article's paragraphs are near."""
    articles = [article["paragraphs"] for article in rows.document(path, _SQUAD)["data"]]
    index = {d: i for i, d in enumerate(sorted({p["context"] for a in articles for p in a}))}
    questions = []
    for article in articles:
        near = list(dict.fromkeys(index[p["context"]] for p in article))
        for p in article:
            mine = index[p["context"]]
            for q in p["qas"]:
                answers = tuple(dict.fromkeys(a["text"] for a in q["answers"]))
                if not q.get("is_impossible") and answers:
                    others = tuple(i for i in near if i != mine)
                    questions.append(Question(q["question"], answers, (mine,), others))
    return tuple(index), questions


def _hotpotqa(path: Path) -> tuple[tuple[str, ...], list[Question]]:
    """HotpotQA: titled paragraphs as documents; a question needs all ten of its own."""
    found = rows.document(path, _HOTPOTQA)
    texts = [[f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]] for row in found]
    index = {d: i for i, d in enumerate(sorted({d for own in texts for d in own}))}
    questions = [
        Question(row["question"], (row["answer"],), tuple(dict.fromkeys(index[d] for d in own)))
        for row, own in zip(found, texts, strict=True)
    ]
    return tuple(index), questions


_READERS = {"squad": _squad, "hotpotqa": _hotpotqa}

BENCHMARK = Ruler
