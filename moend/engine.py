"""The engine: one prefill per example, a fork per cell, and all cells decode together.

The prompt's last token is always fed after compression, so that the first answer token already comes from what a
method kept. Where the question is unseen, all of it is fed after compression.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moend.benchmarks import Rendered
from moend.cache import CompressedCache, Prefilled, attention_of, cache_argument, prefill
from moend.errors import UserError
from moend.methods import BoundMethod
from moend.models import LoadedModel
from moend.plan import Arch, eq1_bytes
from moend.rope import Rotary, rotary


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
    """What one cell did with one example. Bytes are held bytes: after the prompt, at the end, at the peak between."""

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
    eq1_bytes: int = 0
    full_bytes: int = 0
    entries: list[int] = field(default_factory=list)
    effective_keep: list[float] = field(default_factory=list)
    k_bits: list[int] = field(default_factory=list)
    v_bits: list[int] = field(default_factory=list)
    answer_nll: float | None = None
    token_accuracy: float | None = None
    fused_rows: int = 1
    prefill_seconds: float = 0.0
    select_seconds: float = 0.0
    decode_seconds: float = 0.0
    peak_bytes: int = 0


def stable_seed(*parts: Any) -> int:
    """63 bits from the canonical JSON of `parts`: the same on every machine and in every order of examples."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def attention_scaling(model: Any) -> list[float]:
    """What each layer multiplies q . k with, read from its attention module."""
    found = {
        m.layer_idx: float(m.scaling) for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling")
    }
    layers = model.config.num_hidden_layers
    if sorted(found) != list(range(layers)):
        raise UserError(f"cannot read the attention scaling of all {layers} layers of {type(model).__name__}")
    return [found[i] for i in range(layers)]


def rotations(model: Any) -> list[Rotary]:
    """Each layer's rotary frequencies, read after the prefill: dynamic scaling changes them with the length."""
    return [rotary(model, layer) for layer in range(model.config.num_hidden_layers)]


@dataclass
class _Sequence:
    """A row while it decodes."""

    job: Job
    out: Outcome
    cache: CompressedCache
    generator: torch.Generator | None
    logits: Tensor | None = None


class Engine:
    """Runs examples through a model for many cells at once.

    chunk: prompt tokens per forward pass. max_bytes: bound on the bytes of caches that decode together (None: none).
    fuse: decode the cells of an example as one batch; False decodes them one by one, for honest speeds.
    """

    def __init__(self, loaded: LoadedModel, *, chunk: int = 1024, max_bytes: int | None = None, fuse: bool = True):
        if chunk < 1:
            raise UserError(f"engine.chunk must be at least 1, got {chunk}")
        self.loaded, self.model, self.arch = loaded, loaded.model, loaded.arch
        self.chunk, self.max_bytes, self.fuse = chunk, max_bytes, fuse
        self.scaling = attention_scaling(loaded.model)
        self.eos = _eos_ids(loaded)

    @torch.no_grad()
    def run(
        self,
        rendered: Rendered,
        jobs: Sequence[Job],
        generation: Generation = GREEDY,
        *,
        question_visible: bool = True,
        seed: int = 0,
    ) -> list[Outcome]:
        """Outcomes of `jobs` on one example, in order, from one prefill."""
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
            prefilled = self._prefill(ids[:cut], jobs)
            prefill_seconds = time.perf_counter() - begin
            sequences = self._fork(prefilled, jobs, rendered, new, generation, seed)
            prefill_bytes = sum(
                t.nbytes for x in prefilled.layers for t in (x.keys, x.values, x.queries) if t is not None
            )
            del prefilled
            held = sum(s.out.resident_bytes for s in sequences)
            for batch in self._batches(sequences):
                self._decode(batch, ids[cut:], gold, limit, rendered, generation)
        for s in sequences:
            s.out.prompt_tokens, s.out.compressed_tokens = len(ids), cut
            s.out.prefill_seconds, s.out.peak_bytes = prefill_seconds, prefill_bytes + held
        return [s.out for s in sequences]

    def _prefill(self, ids: list[int], jobs: Sequence[Job]) -> Prefilled:
        wanted = [made.last_queries for j in jobs if (made := j.method.method.make_scorer()) is not None]
        tokens = torch.tensor([ids], device=self.loaded.device)
        return prefill(self.model, tokens, last_queries=max(wanted, default=0), chunk=self.chunk)

    def _fork(
        self,
        prefilled: Prefilled,
        jobs: Sequence[Job],
        rendered: Rendered,
        new: int,
        generation: Generation,
        seed: int,
    ) -> list[_Sequence]:
        made: dict[int, CompressedCache] = {}
        out = []
        tokens = prefilled.tokens()
        for job in jobs:
            begin = time.perf_counter()
            method = job.method
            if id(method) not in made:
                made[id(method)] = method.fork(
                    prefilled,
                    new,
                    seed=stable_seed(seed, rendered.sample.id),
                    rotary=rotations(self.model) if method.needs_rotary else None,
                    scaling=self.scaling,
                )
            cache = made[id(method)].fork()
            rows = [layer[0] for layer in cache.rows]
            full = self.arch.full_bytes(tokens)
            result = Outcome(
                compressed=any(r.n < tokens or r.storage.quantised for r in rows),
                resident_bytes=cache.resident_bytes(),
                eq1_bytes=sum(_eq1(r.n, r.storage.k_bits, r.storage.v_bits, self.arch) for r in rows),
                full_bytes=full,
                entries=[r.n for r in rows],
                effective_keep=[r.n / tokens for r in rows],
                k_bits=[r.storage.k_bits for r in rows],
                v_bits=[r.storage.v_bits for r in rows],
                select_seconds=time.perf_counter() - begin,
            )
            result.resident_bytes_peak = result.resident_bytes
            generator = None
            if generation.temperature > 0:
                generator = torch.Generator().manual_seed(stable_seed(seed, rendered.sample.id, job.draw))
            out.append(_Sequence(job, result, cache, generator))
        return out

    def _batches(self, sequences: list[_Sequence]) -> list[list[_Sequence]]:
        batches: list[list[_Sequence]] = []
        size = 0
        for s in sequences:
            more = s.out.resident_bytes
            if batches and self.fuse and (self.max_bytes is None or size + more <= self.max_bytes):
                batches[-1].append(s)
                size += more
            else:
                batches.append([s])
                size = more
        return batches

    def _decode(
        self,
        batch: list[_Sequence],
        rest: list[int],
        gold: list[int],
        limit: int,
        rendered: Rendered,
        generation: Generation,
    ) -> None:
        begin = time.perf_counter()
        cache = CompressedCache.join([s.cache for s in batch])
        logits = self._feed(cache, batch, rest)[:, -1]
        if gold:
            fork = cache.fork() if limit else cache
            self._judge(fork, [] if limit else batch, batch, logits, gold)
        live = list(range(len(batch)))
        for step in range(limit):
            picked = [_pick(row, batch[i].generator, generation) for row, i in zip(logits, live, strict=True)]
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
                    continue
                s.out.resident_bytes_end = cache.resident_bytes(slot)
            if len(going) < len(live):
                cache, live = cache.take(going), [live[g] for g in going]
            if not live:
                break
            feed = torch.tensor([[batch[i].out.token_ids[-1]] for i in live], device=self.loaded.device)
            logits = self._forward(cache, [batch[i] for i in live], feed)[:, -1]
        if not limit:
            for slot, s in enumerate(batch):
                s.out.resident_bytes_end = cache.resident_bytes(slot)
        seconds = time.perf_counter() - begin
        for s in batch:
            s.out.new_tokens, s.out.fused_rows = len(s.out.token_ids), len(batch)
            s.out.decode_seconds = seconds / len(batch)
            s.out.text = self._text(s.out.token_ids)
            for stop in rendered.stop:
                s.out.text = s.out.text.split(stop)[0] if stop in s.out.text else s.out.text

    def _feed(self, cache: CompressedCache, batch: list[_Sequence], tokens: list[int]) -> Tensor:
        """Feed the same tokens to all rows, as many at a time as every row has room for: logits (B, len, V)."""
        out, start = [], 0
        while start < len(tokens):
            room = cache.room()
            stop = len(tokens) if room is None else min(start + room, len(tokens))
            stop = min(stop, start + self.chunk)
            part = torch.tensor([tokens[start:stop]], device=self.loaded.device)
            out.append(self._forward(cache, batch, part.expand(len(cache.rows[0]), -1)))
            start = stop
        return torch.cat(out, dim=1)

    def _forward(self, cache: CompressedCache, batch: list[_Sequence], ids: Tensor) -> Tensor:
        seen = cache.get_seq_length()
        positions = torch.arange(seen, seen + ids.shape[1], device=ids.device)[None].expand(ids.shape)
        logits: Tensor = self.model(
            input_ids=ids, position_ids=positions, use_cache=True, **{cache_argument(self.model): cache}
        ).logits
        for slot, s in enumerate(batch):
            s.out.resident_bytes_peak = max(s.out.resident_bytes_peak, cache.resident_bytes(slot))
        return logits

    def _judge(
        self, cache: CompressedCache, tracked: list[_Sequence], batch: list[_Sequence], first: Tensor, gold: list[int]
    ) -> None:
        """Teacher-forced: mean negative log-likelihood of the gold tokens, and the share that greedy would hit."""
        logits = first[:, None]
        if len(gold) > 1:
            logits = torch.cat([logits, self._feed(cache, tracked, gold[:-1])], dim=1)
        target = torch.tensor(gold, device=logits.device)
        for s, row in zip(batch, logits.float(), strict=True):
            s.out.answer_nll = float(torch.nn.functional.cross_entropy(row, target))
            s.out.token_accuracy = float((row.argmax(-1) == target).float().mean())

    def _stopped(self, s: _Sequence, rendered: Rendered) -> bool:
        text = self._text(s.out.token_ids)
        return any(stop in text for stop in rendered.stop)

    def _text(self, ids: list[int]) -> str:
        return str(self.loaded.tokenizer.decode([i for i in ids if i not in self.eos], skip_special_tokens=True))


def _eq1(n: int, k_bits: int, v_bits: int, arch: Arch) -> int:
    return eq1_bytes(n, arch.kv_heads, arch.head_dim, k_bits, v_bits)


def _pick(logits: Tensor, generator: torch.Generator | None, generation: Generation) -> int:
    """Greedy, or one draw from the smallest set of tokens whose probability reaches top_p."""
    if generator is None:
        return int(logits.argmax())
    probs = torch.softmax(logits.double().cpu() / generation.temperature, dim=-1)
    ordered, index = probs.sort(descending=True, stable=True)
    ordered[ordered.cumsum(0) - ordered >= generation.top_p] = 0.0
    return int(index[torch.multinomial(ordered, 1, generator=generator)])


def _eos_ids(loaded: LoadedModel) -> frozenset[int]:
    declared = getattr(loaded.model.generation_config, "eos_token_id", None)
    if declared is None:
        declared = loaded.tokenizer.eos_token_id
    return frozenset([declared] if isinstance(declared, int) else declared or [])
