"""The engine: one prefill per example, a fork per cell, and all cells decode together.

The prompt's last token is always fed after compression, so that the first answer token already comes from what a
method kept. Where the question is unseen, all of it is fed after compression.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
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
    """What one cell did with one example. Bytes are held bytes: after the prompt, at the end, the most and the mean."""

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

    def finish(self, cache: CompressedCache, slot: int) -> None:
        """Record what its row of `cache` holds at the end, and whether it evicted on the way."""
        self.out.resident_bytes_end = cache.resident_bytes(slot)
        rows = [layer[slot] for layer in cache.rows]
        self.out.resident_bytes_mean = sum(r.area for r in rows) / rows[0].fed
        self.out.compressed |= any(r.n < r.seen for r in rows)


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
            prefill_bytes = sum(
                t.nbytes for x in prefilled.layers for t in (x.keys, x.values, x.queries) if t is not None
            )
            batches = self._batches(self._fork(prefilled, jobs, rendered, new, generation, seed))
            del prefilled  # it goes with the last fork
            outcomes, held = [], 0
            for batch in batches:
                held = max(held, sum(s.out.resident_bytes for s in batch))
                self._decode(batch, ids[cut:], gold, limit, rendered, generation)
                outcomes += [s.out for s in batch]
                del batch
        for out in outcomes:
            out.prompt_tokens, out.compressed_tokens = len(ids), cut
            out.prefill_seconds, out.peak_bytes = prefill_seconds, prefill_bytes + held
        return outcomes

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
    ) -> Iterator[_Sequence]:
        """Compress for one job after the other, each when it is asked for."""
        tokens, method = prefilled.tokens(), None
        for job in jobs:
            begin = time.perf_counter()
            if method is not job.method:  # the draws of one cell follow each other and share its compression
                method = job.method
                made = method.fork(
                    prefilled,
                    new,
                    seed=stable_seed(seed, rendered.sample.id),
                    rotary=rotations(self.model) if method.needs_rotary else None,
                    scaling=self.scaling,
                )
            cache = made.fork()
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
            yield _Sequence(job, result, cache, generator)

    def _batches(self, sequences: Iterator[_Sequence]) -> Iterator[list[_Sequence]]:
        """What decodes together: as many as fit `max_bytes`, or one. The next wait uncompressed until that is done."""
        batch: list[_Sequence] = []
        size = 0
        for s in sequences:
            more = s.out.resident_bytes
            if batch and not (self.fuse and (self.max_bytes is None or size + more <= self.max_bytes)):
                yield batch
                batch, size = [], 0
            batch.append(s)
            size += more
        if batch:
            yield batch

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
        last: list[Tensor] = [torch.empty(0)] * len(batch)
        for slots, _, part in self._feed(cache, rest, batch):
            for slot, row in zip(slots, part, strict=True):
                last[slot] = row[-1]
        logits = torch.stack(last)
        if gold:
            self._judge(cache.fork() if limit else cache, batch, logits, gold, count=not limit)
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
                s.finish(cache, slot)
            if len(going) < len(live):
                cache, live = cache.take(going), [live[g] for g in going]
            if not live:
                break
            feed = torch.tensor([[batch[i].out.token_ids[-1]] for i in live], device=self.loaded.device)
            logits = self._forward(cache, [batch[i] for i in live], feed)[:, -1]
        if not limit:
            for slot, s in enumerate(batch):
                s.finish(cache, slot)
        seconds = time.perf_counter() - begin
        for s in batch:
            s.out.new_tokens, s.out.fused_rows = len(s.out.token_ids), len(batch)
            s.out.decode_seconds = seconds / len(batch)
            s.out.text = self._text(s.out.token_ids)
            for stop in rendered.stop:
                s.out.text = s.out.text.split(stop)[0] if stop in s.out.text else s.out.text

    def _feed(
        self, cache: CompressedCache, tokens: list[int], batch: list[_Sequence], *, count: bool = True
    ) -> Iterator[tuple[list[int], int, Tensor]]:
        """Feed the same tokens to all rows, piece by piece: (slots, offset in tokens, logits (slots, q, V)).

        Rows with room for all go together, the others alone in pieces that they have room for: what a row computes
        does not depend on its company. count: whether the bytes held meanwhile count for their cells.
        """
        rooms = [cache.room(slot) for slot in range(len(batch))]
        wide = [slot for slot, room in enumerate(rooms) if room is None or room >= len(tokens)]
        for slots in [*([wide] if wide else []), *([s] for s in range(len(batch)) if s not in wide)]:
            part, start = cache.take(slots), 0
            while start < len(tokens):
                room = part.room()
                stop = min(len(tokens), start + self.chunk, start + (len(tokens) if room is None else room))
                ids = torch.tensor([tokens[start:stop]], device=self.loaded.device).expand(len(slots), -1)
                yield slots, start, self._forward(part, [batch[s] for s in slots] if count else [], ids)
                start = stop

    def _forward(self, cache: CompressedCache, batch: list[_Sequence], ids: Tensor) -> Tensor:
        seen = cache.get_seq_length()
        positions = torch.arange(seen, seen + ids.shape[1], device=ids.device)[None].expand(ids.shape)
        logits: Tensor = self.model(
            input_ids=ids, position_ids=positions, use_cache=True, **{cache_argument(self.model): cache}
        ).logits
        for slot, s in enumerate(batch):
            s.out.resident_bytes_peak = max(s.out.resident_bytes_peak, cache.peak_bytes(slot))
        return logits

    def _judge(
        self, cache: CompressedCache, batch: list[_Sequence], first: Tensor, gold: list[int], *, count: bool
    ) -> None:
        """Teacher-forced: mean negative log-likelihood of the gold tokens, and the share that greedy would hit."""
        target = torch.tensor(gold, device=first.device)
        loss, hits = torch.zeros(len(batch)), torch.zeros(len(batch))

        def add(slots: list[int], logits: Tensor, start: int) -> None:
            for slot, row in zip(slots, logits.float(), strict=True):
                wanted = target[start : start + len(row)]
                loss[slot] += torch.nn.functional.cross_entropy(row, wanted, reduction="sum").cpu()
                hits[slot] += (row.argmax(-1) == wanted).sum().cpu()

        add(list(range(len(batch))), first[:, None], 0)
        for slots, start, logits in self._feed(cache, gold[:-1], batch, count=count):
            add(slots, logits, start + 1)
        for slot, s in enumerate(batch):
            s.out.answer_nll = float(loss[slot]) / len(gold)
            s.out.token_accuracy = float(hits[slot]) / len(gold)

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
    probs = torch.softmax(logits.cpu().double() / generation.temperature, dim=-1)
    ordered, index = probs.sort(descending=True, stable=True)
    ordered[ordered.cumsum(0) - ordered >= generation.top_p] = 0.0
    return int(index[torch.multinomial(ordered, 1, generator=generator)])


def _eos_ids(loaded: LoadedModel) -> frozenset[int]:
    declared = getattr(loaded.model.generation_config, "eos_token_id", None)
    if declared is None:
        declared = loaded.tokenizer.eos_token_id
    return frozenset([declared] if isinstance(declared, int) else declared or [])
