"""The engine: one prefill per example, a fork per cell, and all cells decode together.

The prompt's last token is always fed after compression, so that the first answer token already comes from what a
method kept. Where the question is unseen, all of it is fed after compression.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moend.benchmarks import Rendered
from moend.budget import Arch, eq1_bytes
from moend.cache import CompressedCache, LayerKV, Prefilled, attention_of, prefill
from moend.decoding import GREEDY, Decoder, Generation, Job, Outcome, Row, clock
from moend.errors import UserError
from moend.hf.config import text_config
from moend.hf.probe import shape_of
from moend.hf.rope import Rotary, rotary
from moend.hf.routers import find
from moend.methods.bind import BoundMethod
from moend.models.load import LoadedModel
from moend.replay import OBSERVATIONS, RECONSTRUCTING, ROUTING, Replay, diagnose, routing_flips
from moend.saved import Saved, Slot
from moend.version import ENGINE_VERSION


def stable_seed(*parts: Any) -> int:
    """63 bits from the canonical JSON of `parts`: the same on every machine and in every order of examples."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def attention_scaling(model: Any) -> list[float]:
    """What each layer multiplies q . k with, seen on the model itself."""
    return [rule.scaling for rule in shape_of(model).rules]


def rotations(model: Any) -> list[Rotary]:
    """Each layer's rotary frequencies, read after the prefill: dynamic scaling changes them with the length."""
    return [rotary(model, layer) for layer in range(text_config(model.config).num_hidden_layers)]


def _head_positions(parts: Sequence[LayerKV]) -> list[Tensor]:
    """Positions that each KV head of a layer holds."""
    return [p for row in parts for p in torch.atleast_2d(row.true_positions()).expand(row.heads, -1)]


__all__ = ["ENGINE_VERSION", "GREEDY", "Engine", "Generation", "Job", "Outcome"]


@dataclass
class _Compressed:
    """What one cell kept of the context, before any question that it does not know."""

    job: Job
    out: Outcome
    cache: CompressedCache | None
    told: list[dict[str, Any]]  # by question, what joins the outcome's diagnostics

    def ask(self, question: int, *, last: bool) -> Row:
        """A row that answers one question. Only the last one may take the cache itself."""
        assert self.cache is not None
        diagnostics = {**self.out.diagnostics, **self.told[question]}
        base = replace(self.out, diagnostics=diagnostics)
        row = Row(self.job, base.fresh(), self.cache, base)
        if last:
            self.cache = None  # it lives as long as the row
        else:
            row.cache = self.cache.fork()
        return row


class Engine:
    """Runs examples through a model for many cells at once.

    chunk: tokens per forward pass, those of all rows together. max_bytes: bound on the bytes allocated for caches that
    decode together, padding included (None: none; one cell always decodes).
    fuse: decode the cells of an example as one batch; False decodes them one by one, for honest speeds.
    timed: a measurement of speed: no token ends an answer, so that each has exactly the tokens asked for.
    flips: also measure how often compression changes the routing of the gold answer (`diagnostics`).
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        chunk: int = 1024,
        max_bytes: int | None = None,
        fuse: bool = True,
        timed: bool = False,
        flips: bool = False,
    ):
        if chunk < 1:
            raise UserError(f"engine.chunk must be at least 1, got {chunk}")
        self.loaded, self.model, self.arch = loaded, loaded.model, loaded.arch
        self.chunk, self.max_bytes, self.fuse = chunk, max_bytes, fuse
        self.scaling = attention_scaling(loaded.model)
        self.decoder = Decoder(loaded, chunk)
        if timed:
            self.decoder.eos = frozenset()
        self.flips = flips
        wording = loaded.spec.reconstruction
        self.replay = Replay(loaded.model, loaded.tokenizer, loaded.arch.max_positions, wording=wording, piece=chunk)

    def admit(self, method: BoundMethod, *, question_visible: bool, asks: bool = True) -> None:
        """UserError where a method cannot work on this model, or with these prompts; asks: they hold a question."""
        made = method.method.make_scorer()
        wanted = set(made.observes) if made is not None else set()
        if "routing_query" in wanted and not (question_visible and asks):
            what = "which question_visible=false hides" if asks else "and these prompts ask none"
            raise UserError(f"{method.method.name} goes by the question, {what}: set method.scorer.mode=recon")
        if wanted & RECONSTRUCTING:
            self.replay.request  # noqa: B018 (refuses a tokenizer that does not know its words)
        if wanted & ROUTING:
            find(self.model)

    def run(
        self, rendered: Rendered, jobs: Sequence[Job], generation: Generation = GREEDY, **how: Any
    ) -> list[Outcome]:
        """Outcomes of `jobs` on one prompt, in order. how: as for `run_questions`."""
        return self.run_questions([rendered], jobs, generation, **how)[0]

    @torch.no_grad()
    def run_questions(
        self,
        prompts: Sequence[Rendered],
        jobs: Sequence[Job],
        generation: Generation = GREEDY,
        *,
        question_visible: bool = True,
        seed: int = 0,
        positions: bool = False,
        turns: bool = False,
        saved: Saved | None = None,
    ) -> list[list[Outcome]]:
        """Outcomes of `jobs` for each of several prompts that share a context, from one prefill and one compression.

        Every cell compresses once and forks its cache for each question, so no question knows of another. question_
        visible: False compresses the context alone, which all prompts must begin with; True compresses the first
        prompt with its question (all but its last token), and all others must begin with what was compressed.
        turns: the questions follow each other in one chat: each sees what was asked and answered before, on the same
        cache. The ids of a later prompt are then what the conversation goes on with after an answer.
        seed: of methods that draw and of sampling. positions: also record which entries were kept. saved: where the
        state of long answers is kept, and gone on with after a kill: the prompt is read and compressed again, what was
        fed and generated is not.
        """
        cut, new = self._lengths(prompts, generation, question_visible, turns)
        first = prompts[0]
        ids = list(first.ids)
        with attention_of(self.model):
            if gpu := self.loaded.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.loaded.device)
            begin = clock(self.loaded.device)
            prefilled = self._observe(self._prefill(ids[:cut], jobs), ids[:cut], jobs, first, new)
            prefill_seconds = clock(self.loaded.device) - begin
            prefill_bytes = sum(
                t.nbytes for x in prefilled.layers for t in (x.keys, x.values, x.queries) if t is not None
            )
            judged = prompts[:1] if turns else prompts  # a later turn has no prompt of its own to route
            batches = self._batches(self._fork(prefilled, jobs, judged, new, seed, positions))
            del prefilled  # it goes with the last fork
            answers: list[list[Outcome]] = [[] for _ in prompts]
            most = 0
            for number, batch in enumerate(batches):
                rows: list[Row] = []
                for q, prompt in enumerate(prompts):
                    if turns and q:
                        rows = [row.next() for row in rows]
                    else:
                        rows = [s.ask(q, last=turns or q + 1 == len(prompts)) for s in batch]
                    for row in rows:
                        row.generator = generation.generator(stable_seed(seed, prompt.sample.id, row.job.draw))
                    place = (
                        None if saved is None else functools.partial(_slot, saved, f"{number}-{q}", generation, seed)
                    )
                    most = max(most, self._answer(rows, prompt, cut, generation, turns, q, place))
                    answers[q] += [row.out for row in rows]
                del batch, rows
        for outcomes in answers:
            for out in outcomes:
                out.compressed_tokens, out.fed_tokens = cut, new
                out.prefill_seconds, out.peak_bytes = prefill_seconds, prefill_bytes + most
                out.device_peak_bytes = torch.cuda.max_memory_allocated(self.loaded.device) if gpu else None
        return answers

    def _answer(
        self,
        rows: list[Row],
        prompt: Rendered,
        cut: int,
        generation: Generation,
        turns: bool,
        question: int,
        place: Callable[..., Slot] | None,
    ) -> int:
        """One question for all rows; returns the most bytes allocated for caches.

        Rows of a later turn decode together where they have seen and are fed equally many tokens: their answers to the
        turns before may differ in length.
        """
        limit = self._limit(prompt, generation)
        if not (turns and question):
            rest = list(prompt.ids[cut:])
            for row in rows:
                row.out.prompt_tokens = len(prompt.ids)
            slot = None if place is None else place(0, rows, prompt)
            return self.decoder.answer(rows, [rest] * len(rows), prompt, limit, generation, keep=turns, slot=slot)
        groups: dict[tuple[int, int], list[tuple[Row, list[int]]]] = {}
        for row in rows:
            assert row.cache is not None
            feed, seen = [*self.decoder.pending(row, prompt), *prompt.ids], row.cache.get_seq_length()
            row.out.prompt_tokens = seen + len(feed)
            groups.setdefault((seen, len(feed)), []).append((row, feed))
        most = 0
        for number, group in enumerate(groups.values()):
            mine = [row for row, _ in group]
            others = sum(r.cache.allocated_bytes() for r in rows if r.cache is not None and r not in mine)
            feeds, slot = [feed for _, feed in group], None if place is None else place(number, mine, prompt)
            held = self.decoder.answer(mine, feeds, prompt, limit, generation, keep=True, slot=slot)
            most = max(most, others + held)
        return most

    @staticmethod
    def _limit(prompt: Rendered, generation: Generation) -> int:
        """Tokens to generate at most; 0 where the benchmark scores given text."""
        own = prompt.max_new_tokens
        return own if own == 0 or generation.max_new_tokens is None else generation.max_new_tokens

    def _lengths(
        self, prompts: Sequence[Rendered], generation: Generation, visible: bool, turns: bool
    ) -> tuple[int, int]:
        """(tokens to compress, most tokens fed afterwards); UserError where prompts do not fit or do not agree."""
        first = prompts[0]
        cut = len(first.ids) - 1 if visible else min(max(first.context_tokens, 1), len(first.ids) - 1)
        new = before = 0
        for prompt in prompts:
            own, name = len(prompt.ids), prompt.sample.id
            length = before + own
            if length < 2:
                raise UserError(f"{name}: a prompt needs at least two tokens, got {length}")
            if turns and before and not own:
                raise UserError(f"{name}: a turn needs at least one token")
            if not before and (length <= cut or prompt.ids[:cut] != first.ids[:cut]):
                raise UserError(f"{name} does not begin with the {cut} tokens that {first.sample.id} has compressed")
            after = max(self._limit(prompt, generation), len(prompt.gold_ids))
            if length + after > self.arch.max_positions:
                room = self.arch.max_positions
                raise UserError(f"{name}: {length} prompt + {after} new tokens exceed the model's {room} positions")
            new = max(new, length + after - cut - 1)
            if turns:
                before = length + self._limit(prompt, generation)
        return cut, new

    def _prefill(self, ids: list[int], jobs: Sequence[Job]) -> Prefilled:
        made = [made for j in jobs if (made := j.method.method.make_scorer()) is not None]
        tokens = torch.tensor([ids], device=self.loaded.device)
        return prefill(
            self.model,
            tokens,
            last_queries=max((m.last_queries for m in made), default=0),
            observe={name for m in made for name in m.observes if name not in OBSERVATIONS},
            chunk=self.chunk,
        )

    def _observe(
        self, prefilled: Prefilled, ids: list[int], jobs: Sequence[Job], rendered: Rendered, new: int
    ) -> Prefilled:
        """The replays that cells need which drop something: each once, whoever asks."""
        wanted: set[str] = set()
        for job in jobs:
            made = job.method.method.make_scorer()
            if made is not None and not job.method.fits(len(ids), new):
                wanted |= set(made.observes) & set(OBSERVATIONS)
        if not wanted:
            return prefilled
        stop = min(max(rendered.context_tokens, 1), len(ids))
        return self.replay.observe(prefilled, wanted, ids, (min(rendered.context_start, stop - 1), stop))

    def _fork(
        self,
        prefilled: Prefilled,
        jobs: Sequence[Job],
        prompts: Sequence[Rendered],
        new: int,
        seed: int,
        positions: bool,
    ) -> Iterator[_Compressed]:
        """Compress for one job after the other, each when it is asked for."""
        tokens, full = prefilled.tokens(), self.arch.full_bytes(prefilled.tokens())
        method, rotary = None, None
        for job in jobs:
            begin = clock(self.loaded.device)
            if method is not job.method:  # the draws of one cell follow each other and share its compression
                method = job.method
                if method.needs_rotary and rotary is None:
                    rotary = rotations(self.model)
                context = prompts[0].sample.meta.get("context_id", prompts[0].sample.id)
                own = stable_seed(seed, context)
                made = method.fork(prefilled, new, seed=own, rotary=rotary, scaling=self.scaling)
            cache = made.fork()
            layers = cache.parts()
            entries, quantised = cache.entries(), any(x.storage.quantised for parts in layers for x in parts)
            held = cache.resident_bytes()
            result = Outcome(
                compressed=any(min(n) < tokens for n in cache.counts()) or quantised,
                resident_bytes=held,
                resident_bytes_peak=held,
                eq1_bytes=sum(_eq1(r, self.arch) for parts in layers for r in parts),
                full_bytes=full,
                entries=entries,
                effective_keep=[n / tokens for n in entries],
                k_bits=[max(x.storage.k_bits for x in parts) for parts in layers],
                v_bits=[max(x.storage.v_bits for x in parts) for parts in layers],
                select_seconds=clock(self.loaded.device) - begin,
                positions=[_head_positions(parts) for parts in layers] if positions and job.draw == 0 else [],
                diagnostics=self._told(method, prefilled, cache),
            )
            flips: list[dict[str, Any]] = [{} for _ in prompts]
            for told, prompt in zip(flips, prompts, strict=True):
                if self.flips and prompt.gold_ids:
                    answer = [*prompt.ids[tokens:], *prompt.gold_ids]
                    routing = self.replay.routing(prompt.ids)
                    told["routing_flips"] = routing_flips(self.model, routing, prefilled, cache, answer)
            yield _Compressed(job, result, cache, flips)

    def _told(self, method: BoundMethod, prefilled: Prefilled, cache: CompressedCache) -> dict[str, Any]:
        """What a method did to one sequence, and whether KVZip repeated the context in pieces shorter than its own."""
        made = method.method.make_scorer()
        told = diagnose(made, prefilled, cache, self.scaling)
        if made is not None and "reconstruction" in made.observes and self.replay.shortened is not None:
            told["repeated_by"] = self.replay.shortened
        return told

    def _batches(self, sequences: Iterator[_Compressed]) -> Iterator[list[_Compressed]]:
        """What decodes together: as many as fit `max_bytes`, or one. The next wait uncompressed until that is done."""
        batch: list[_Compressed] = []
        for s in sequences:
            if batch and not (self.fuse and self._fit([*batch, s])):
                yield batch
                batch = []
            batch.append(s)
        if batch:
            yield batch

    def _fit(self, batch: list[_Compressed]) -> bool:
        if self.max_bytes is None:
            return True
        return CompressedCache.allocation([s.cache for s in batch if s.cache is not None]) <= self.max_bytes


def _slot(
    saved: Saved, name: str, generation: Generation, seed: int, group: int, rows: Sequence[Row], prompt: Rendered
) -> Slot:
    """Where the state of a batch lies, and what it is the state of."""
    who = [[row.job.name, row.job.draw, list(row.said)] for row in rows]
    asked = [prompt.sample.id, prompt.max_new_tokens, list(prompt.ids), list(prompt.gold_ids)]
    return saved.slot(f"{name}-{group}", {"rows": who, "asked": asked, "generation": asdict(generation), "seed": seed})


def _eq1(row: LayerKV, arch: Arch) -> int:
    return eq1_bytes(row.n, row.heads, arch.head_dim, row.storage.k_bits, row.storage.v_bits)
