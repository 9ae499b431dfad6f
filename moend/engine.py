"""The engine: one prefill per example, a fork per cell, and all cells decode together.

The prompt's last token is always fed after compression, so that the first answer token already comes from what a
method kept. Where the question is unseen, all of it is fed after compression.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moend.benchmarks import Rendered
from moend.budget import Arch, eq1_bytes
from moend.cache import CompressedCache, LayerKV, Prefilled, attention_of, cache_argument, prefill
from moend.errors import UserError
from moend.hf.probe import shape_of
from moend.hf.rope import Rotary, rotary
from moend.hf.routers import find
from moend.hf.shape import text_config
from moend.methods.bind import BoundMethod
from moend.models.load import LoadedModel
from moend.replay import OBSERVATIONS, RECONSTRUCTING, ROUTING, Replay, diagnose, routing_flips


@dataclass(frozen=True)
class Generation:
    """How answers are generated: greedy at temperature 0, else seeded nucleus sampling. None: the benchmark's limit."""

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1


GREEDY = Generation()


@dataclass(frozen=True)
class Job:
    """One cell's draw on an example."""

    method: BoundMethod
    draw: int = 0


@dataclass
class Outcome:
    """What one cell did with one example. Bytes are held bytes: after the prompt, at the end, the most and the mean.

    k_bits, v_bits: per layer, the most of any head where these differ. positions: where asked for, the kept entries'
    positions after the prompt, for each layer those of each KV head.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "length"
    prompt_tokens: int = 0
    compressed_tokens: int = 0
    new_tokens: int = 0
    compressed: bool = False
    resident_bytes: int = 0
    resident_bytes_end: int = 0
    resident_bytes_peak: int = 0
    resident_bytes_mean: float = 0.0
    eq1_bytes: int = 0
    full_bytes: int = 0
    entries: list[int] = field(default_factory=list)
    effective_keep: list[float] = field(default_factory=list)
    k_bits: list[int] = field(default_factory=list)
    v_bits: list[int] = field(default_factory=list)
    diagnostics: dict[str, Any] = field(default_factory=dict)
    answer_nll: float | None = None
    token_accuracy: float | None = None
    fused_rows: int = 1
    prefill_seconds: float = 0.0
    select_seconds: float = 0.0
    decode_seconds: float = 0.0
    peak_bytes: int = 0
    positions: list[list[Tensor]] = field(default_factory=list)


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


@dataclass
class _Sequence:
    """A row while it decodes."""

    job: Job
    out: Outcome
    cache: CompressedCache | None  # what its method kept, until it decodes
    generator: torch.Generator | None


def _finish(batch: Sequence[_Sequence], cache: CompressedCache, slots: Sequence[int]) -> None:
    """Record what sequences of `cache` hold at the end, and whether they evicted on the way."""
    held, mean, seen = cache.held, cache.mean_bytes, cache.get_seq_length()
    for s, slot in zip(batch, slots, strict=True):
        s.out.resident_bytes_end, s.out.resident_bytes_mean = int(held[slot]), float(mean[slot])
        s.out.compressed |= any(min(c) < seen for c in cache.counts(slot))


def _head_positions(parts: Sequence[LayerKV]) -> list[Tensor]:
    """Positions that each KV head of a layer holds."""
    return [p for row in parts for p in torch.atleast_2d(row.true_positions()).expand(row.heads, -1)]


class Engine:
    """Runs examples through a model for many cells at once.

    chunk: tokens per forward pass, those of all rows together. max_bytes: bound on the bytes allocated for caches that
    decode together, padding included (None: none; one cell always decodes).
    fuse: decode the cells of an example as one batch; False decodes them one by one, for honest speeds.
    flips: also measure how often compression changes the routing of the gold answer (`diagnostics`).
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        chunk: int = 1024,
        max_bytes: int | None = None,
        fuse: bool = True,
        flips: bool = False,
    ):
        if chunk < 1:
            raise UserError(f"engine.chunk must be at least 1, got {chunk}")
        self.loaded, self.model, self.arch = loaded, loaded.model, loaded.arch
        self.chunk, self.max_bytes, self.fuse = chunk, max_bytes, fuse
        self.scaling = attention_scaling(loaded.model)
        self.eos = _eos_ids(loaded)
        self.keeps_logits = "logits_to_keep" in inspect.signature(type(loaded.model).forward).parameters
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

    @torch.no_grad()
    def run(
        self,
        rendered: Rendered,
        jobs: Sequence[Job],
        generation: Generation = GREEDY,
        *,
        question_visible: bool = True,
        seed: int = 0,
        positions: bool = False,
    ) -> list[Outcome]:
        """Outcomes of `jobs` on one example, in order, from one prefill. positions: with those of the kept entries."""
        ids, gold = list(rendered.ids), list(rendered.gold_ids)
        limit = rendered.max_new_tokens if generation.max_new_tokens is None else generation.max_new_tokens
        if rendered.max_new_tokens == 0:
            limit = 0  # nothing is generated: the benchmark scores given text
        total = len(ids) + max(limit, len(gold))
        if total > self.arch.max_positions:
            raise UserError(
                f"{rendered.sample.id}: {len(ids)} prompt + {max(limit, len(gold))} new tokens exceed the model's "
                f"{self.arch.max_positions} positions"
            )
        if len(ids) < 2:
            raise UserError(f"{rendered.sample.id}: a prompt needs at least two tokens, got {len(ids)}")
        cut = len(ids) - 1 if question_visible else min(max(rendered.context_tokens, 1), len(ids) - 1)
        new = total - cut - 1  # fed after compression: the rest of the prompt and all but the last output token
        with attention_of(self.model):
            begin = time.perf_counter()
            prefilled = self._observe(self._prefill(ids[:cut], jobs), ids[:cut], jobs, rendered, new)
            prefill_seconds = time.perf_counter() - begin
            prefill_bytes = sum(
                t.nbytes for x in prefilled.layers for t in (x.keys, x.values, x.queries) if t is not None
            )
            batches = self._batches(self._fork(prefilled, jobs, rendered, new, generation, seed, positions))
            del prefilled  # it goes with the last fork
            outcomes, held = [], 0
            for batch in batches:
                held = max(held, self._decode(batch, ids[cut:], gold, limit, rendered, generation))
                outcomes += [s.out for s in batch]
                del batch
        for out in outcomes:
            out.prompt_tokens, out.compressed_tokens = len(ids), cut
            out.prefill_seconds, out.peak_bytes = prefill_seconds, prefill_bytes + held
        return outcomes

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
        rendered: Rendered,
        new: int,
        generation: Generation,
        seed: int,
        positions: bool,
    ) -> Iterator[_Sequence]:
        """Compress for one job after the other, each when it is asked for."""
        ids, gold = list(rendered.ids), list(rendered.gold_ids)
        tokens, full = prefilled.tokens(), self.arch.full_bytes(prefilled.tokens())
        method, rotary = None, None
        for job in jobs:
            begin = time.perf_counter()
            if method is not job.method:  # the draws of one cell follow each other and share its compression
                method = job.method
                if method.needs_rotary and rotary is None:
                    rotary = rotations(self.model)
                made = method.fork(
                    prefilled,
                    new,
                    seed=stable_seed(seed, rendered.sample.id),
                    rotary=rotary,
                    scaling=self.scaling,
                )
            cache = made.fork()
            layers = cache.parts()
            entries, quantised = cache.entries(), any(x.storage.quantised for parts in layers for x in parts)
            result = Outcome(
                compressed=any(min(n) < tokens for n in cache.counts()) or quantised,
                resident_bytes=cache.resident_bytes(),
                eq1_bytes=sum(_eq1(r, self.arch) for parts in layers for r in parts),
                full_bytes=full,
                entries=entries,
                effective_keep=[n / tokens for n in entries],
                k_bits=[max(x.storage.k_bits for x in parts) for parts in layers],
                v_bits=[max(x.storage.v_bits for x in parts) for parts in layers],
                select_seconds=time.perf_counter() - begin,
            )
            result.resident_bytes_peak = result.resident_bytes
            if positions:
                result.positions = [_head_positions(parts) for parts in layers]
            result.diagnostics = diagnose(method.method.make_scorer(), prefilled, cache, self.scaling)
            if self.flips and gold:
                answer = [*ids[tokens:], *gold]
                result.diagnostics["routing_flips"] = routing_flips(
                    self.model, self.replay.routing(ids), prefilled, cache, answer
                )
            generator = None
            if generation.temperature > 0:
                generator = torch.Generator().manual_seed(stable_seed(seed, rendered.sample.id, job.draw))
            yield _Sequence(job, result, cache, generator)

    def _batches(self, sequences: Iterator[_Sequence]) -> Iterator[list[_Sequence]]:
        """What decodes together: as many as fit `max_bytes`, or one. The next wait uncompressed until that is done."""
        batch: list[_Sequence] = []
        for s in sequences:
            if batch and not (self.fuse and self._fit([*batch, s])):
                yield batch
                batch = []
            batch.append(s)
        if batch:
            yield batch

    def _fit(self, batch: list[_Sequence]) -> bool:
        if self.max_bytes is None:
            return True
        return CompressedCache.allocation([s.cache for s in batch if s.cache is not None]) <= self.max_bytes

    def _decode(
        self,
        batch: list[_Sequence],
        rest: list[int],
        gold: list[int],
        limit: int,
        rendered: Rendered,
        generation: Generation,
    ) -> int:
        """Feed the rest of the prompt, score the gold text, generate; returns the most bytes allocated for caches."""
        begin = time.perf_counter()
        cache = CompressedCache.join([s.cache for s in batch if s.cache is not None])
        for s in batch:
            s.cache = None
        for _, part in self._feed(cache, rest, batch, last=True):
            logits = part[:, -1]
        most = cache.allocated_bytes()
        if gold:
            judged = cache.fork() if limit else cache
            self._judge(judged, batch, logits, gold, count=not limit)
            most = max(most, judged.allocated_bytes() + (cache.tail_bytes() if limit else 0))
            del judged
        live = list(range(len(batch)))
        for step in range(limit):
            picked = self._pick([batch[i] for i in live], logits, generation)
            going = []
            for slot, (i, token) in enumerate(zip(live, picked, strict=True)):
                s = batch[i]
                s.out.token_ids.append(token)
                if token in self.eos:
                    s.out.finish_reason = "eos"
                elif rendered.stop and len(s.out.token_ids) > 1 and self._stopped(s, rendered):
                    s.out.finish_reason = "stop"
                elif step + 1 < limit:
                    going.append(slot)
            if len(going) < len(live):
                most = max(most, cache.allocated_bytes())
                done = sorted(set(range(len(live))) - set(going))
                _finish([batch[live[slot]] for slot in done], cache, done)
                live = [live[slot] for slot in going]
                if not live:
                    break
                cache.batch_select_indices(torch.tensor(going))
            feed = torch.tensor([[batch[i].out.token_ids[-1]] for i in live], device=self.loaded.device)
            logits = self._forward(cache, [batch[i] for i in live], feed)[:, -1]
        if not limit:
            most = max(most, cache.allocated_bytes())
            _finish(batch, cache, range(len(batch)))
        seconds = time.perf_counter() - begin
        for s in batch:
            s.out.new_tokens, s.out.fused_rows = len(s.out.token_ids), len(batch)
            s.out.decode_seconds = seconds / len(batch)
            s.out.text = self._text(s.out.token_ids)
            for stop in rendered.stop:
                s.out.text = s.out.text.split(stop)[0] if stop in s.out.text else s.out.text
        return most

    def _feed(
        self,
        cache: CompressedCache,
        tokens: list[int],
        batch: list[_Sequence],
        *,
        count: bool = True,
        last: bool = False,
    ) -> Iterator[tuple[int, Tensor]]:
        """Feed the same tokens to all rows, piece by piece: (offset in tokens, logits (rows, q, V)).

        A piece has `chunk` tokens in all. count: whether the bytes held meanwhile count for their cells. last: only the
        logits of each piece's last token are wanted.
        """
        size = max(self.chunk // len(batch), 1)
        for start in range(0, len(tokens), size):
            ids = torch.tensor([tokens[start : start + size]], device=self.loaded.device).expand(len(batch), -1)
            yield start, self._forward(cache, batch if count else [], ids, last=last)

    def _forward(
        self, cache: CompressedCache, batch: Sequence[_Sequence], ids: Tensor, *, last: bool = False
    ) -> Tensor:
        seen = cache.get_seq_length()
        positions = torch.arange(seen, seen + ids.shape[1], device=ids.device)[None].expand(ids.shape)
        wanted = {"logits_to_keep": 1} if last and self.keeps_logits else {}
        logits: Tensor = self.model(
            input_ids=ids, position_ids=positions, use_cache=True, **{cache_argument(self.model): cache}, **wanted
        ).logits
        if batch:
            for s, peak in zip(batch, cache.peaks.tolist(), strict=True):
                s.out.resident_bytes_peak = max(s.out.resident_bytes_peak, peak)
        return logits

    def _judge(
        self, cache: CompressedCache, batch: list[_Sequence], first: Tensor, gold: list[int], *, count: bool
    ) -> None:
        """Teacher-forced: mean negative log-likelihood of the gold tokens, and the share that greedy would hit."""
        target = torch.tensor(gold, device=first.device)
        loss, hits = torch.zeros(len(batch)), torch.zeros(len(batch))

        def add(logits: Tensor, start: int) -> None:
            wanted = target[start : start + logits.shape[1]].expand(len(batch), -1)
            at = logits.gather(-1, wanted[..., None])[..., 0].float()
            loss.add_((torch.logsumexp(logits.float(), dim=-1) - at).sum(1).cpu())
            hits.add_((logits.argmax(-1) == wanted).sum(1).cpu())

        add(first[:, None], 0)
        for start, logits in self._feed(cache, gold[:-1], batch, count=count):
            add(logits, start + 1)
        for s, nll, hit in zip(batch, loss.tolist(), hits.tolist(), strict=True):
            s.out.answer_nll, s.out.token_accuracy = nll / len(gold), hit / len(gold)

    def _pick(self, batch: list[_Sequence], logits: Tensor, generation: Generation) -> list[int]:
        """The next token of each row."""
        if generation.temperature <= 0:
            greedy: list[int] = logits.argmax(-1).tolist()
            return greedy
        return [_pick(row, s.generator, generation) for s, row in zip(batch, logits, strict=True)]

    def _stopped(self, s: _Sequence, rendered: Rendered) -> bool:
        text = self._text(s.out.token_ids)
        return any(stop in text for stop in rendered.stop)

    def _text(self, ids: list[int]) -> str:
        return str(self.loaded.tokenizer.decode([i for i in ids if i not in self.eos], skip_special_tokens=True))


def _eq1(row: LayerKV, arch: Arch) -> int:
    return eq1_bytes(row.n, row.heads, arch.head_dim, row.storage.k_bits, row.storage.v_bits)


def _pick(logits: Tensor, generator: torch.Generator | None, generation: Generation) -> int:
    """One draw from the smallest set of tokens whose probability reaches top_p."""
    probs = torch.softmax(logits.cpu().double() / generation.temperature, dim=-1)
    ordered, index = probs.sort(descending=True, stable=True)
    ordered[ordered.cumsum(0) - ordered >= generation.top_p] = 0.0
    return int(index[torch.multinomial(ordered, 1, generator=generator)])


def _eos_ids(loaded: LoadedModel) -> frozenset[int]:
    declared = getattr(loaded.model.generation_config, "eos_token_id", None)
    if declared is None:
        declared = loaded.tokenizer.eos_token_id
    return frozenset([declared] if isinstance(declared, int) else declared or [])
