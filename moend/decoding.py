"""Decoding: the answers of many cells to one prompt, as one batch whose rows leave when they end."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from moend.benchmarks import Rendered
from moend.cache import CompressedCache, cache_argument
from moend.methods.bind import BoundMethod
from moend.models.load import LoadedModel
from moend.saved import Slot


@dataclass(frozen=True)
class Generation:
    """How answers are generated: greedily at temperature 0, else by seeded nucleus sampling."""

    max_new_tokens: int | None = None  # None: the benchmark's own limit
    temperature: float = 0.0
    top_p: float = 1.0  # sampling draws from the smallest set of tokens with this much probability
    samples: int = 1  # draws per example

    def generator(self, seed: int) -> torch.Generator | None:
        """The random numbers of one draw; None: greedy decoding needs none."""
        return torch.Generator().manual_seed(seed) if self.temperature > 0 else None


GREEDY = Generation()


@dataclass(frozen=True)
class Job:
    """One cell's draw on an example."""

    method: BoundMethod  # the cell's method, bound to the model
    draw: int = 0  # number of the draw: part of its seed
    name: str = ""  # of the cell: saved states of its answers are known by it


@dataclass
class Outcome:
    """What one cell did with one example. Bytes are those of the entries held, padding and spare room left out."""

    token_ids: list[int] = field(default_factory=list)  # generated, the end token included
    text: str = ""  # the same as text, cut at a stop string
    finish_reason: str = "length"  # eos, stop or length
    prompt_tokens: int = 0  # tokens of the prompt
    compressed_tokens: int = 0  # the first so many of them were compressed
    fed_tokens: int = 0  # the most that could be fed after them: what a budget at its peak was made for
    new_tokens: int = 0  # tokens generated
    compressed: bool = False  # whether anything was dropped or quantised
    resident_bytes: int = 0  # after the prompt was compressed
    resident_bytes_end: int = 0  # after the last token
    resident_bytes_peak: int = 0  # the most at any token
    resident_bytes_mean: float = 0.0  # over the tokens fed after compression
    held_bytes: list[int] = field(
        default_factory=list
    )  # after 1, 1 + held_every, 1 + 2 held_every ... generated tokens
    held_every: int = 1  # generated tokens between two values of `held`
    eq1_bytes: int = 0  # by MoE-nD eq. 1, after the prompt
    full_bytes: int = 0  # of the uncompressed cache of the same tokens
    entries: list[int] = field(default_factory=list)  # per layer, mean over KV heads
    effective_keep: list[float] = field(default_factory=list)  # entries over compressed_tokens
    k_bits: list[int] = field(default_factory=list)  # per layer, the most of any head
    v_bits: list[int] = field(default_factory=list)  # the same for V
    diagnostics: dict[str, Any] = field(default_factory=dict)  # what a scorer tells of itself
    answer_nll: float | None = None  # mean negative log-likelihood of the gold tokens, teacher-forced
    token_accuracy: float | None = None  # share of the gold tokens that greedy decoding would hit
    fused_rows: int = 1  # rows that decoded together
    prefill_seconds: float = 0.0  # of the prefill that all cells share
    select_seconds: float = 0.0  # seconds of scoring and selection
    decode_seconds: float = 0.0  # this row's share of its batch
    device_peak_bytes: int | None = None  # allocated on the GPU at the most, weights included; None: there is none
    peak_bytes: int = 0  # allocated for caches at the most, by the prefill and all rows
    # where asked for, of draw 0: kept positions by layer and KV head
    positions: list[list[Tensor]] = field(default_factory=list)

    def fresh(self) -> Outcome:
        """A copy for one more answer, without lists that an answer fills."""
        return replace(self, token_ids=[], held_bytes=[])


POINTS = 64  # of `Outcome.held_bytes` at most


def note(out: Outcome, held: int) -> None:
    """Bytes held once the newest generated token was fed; every other point goes when there are too many."""
    if (len(out.token_ids) - 1) % out.held_every == 0:
        out.held_bytes.append(held)
        if len(out.held_bytes) > POINTS:
            out.held_bytes, out.held_every = out.held_bytes[::2], 2 * out.held_every


def clock(device: torch.device) -> float:
    """Seconds; on a GPU after all that was asked of it is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass
class Row:
    """One cell's draw while it decodes."""

    job: Job  # whose draw it is
    out: Outcome  # what is known of it so far
    cache: CompressedCache | None  # what its method kept of the prompt, until the row joins a batch
    base: Outcome  # what is known before any answer
    generator: torch.Generator | None = None  # None: greedy
    said: Sequence[int] = ()  # the answer of the turn before

    def next(self) -> Row:
        """The row of the next turn, on the same cache."""
        return Row(self.job, self.base.fresh(), self.cache, self.base, said=self.out.token_ids)


@dataclass
class _Going:
    """A batch between two steps."""

    cache: CompressedCache  # of the rows that go on
    logits: Tensor  # (live rows, V): of their next tokens
    live: list[int]  # the rows that go on, in the order of the cache
    step: int  # tokens generated by each of them
    most: int  # bytes allocated for caches, the most so far
    seconds: float = 0.0  # spent so far, by processes that were killed


# What decoding changes in an outcome.
DECODED = (
    *("token_ids", "finish_reason", "compressed", "answer_nll", "token_accuracy"),
    *("resident_bytes_end", "resident_bytes_peak", "resident_bytes_mean", "held_bytes", "held_every"),
)


def finish(batch: Sequence[Row], cache: CompressedCache, slots: Sequence[int]) -> None:
    """Record what sequences of `cache` hold at the end, and whether they evicted on the way."""
    held, mean, seen = cache.held, cache.mean_bytes, cache.get_seq_length()
    for s, slot in zip(batch, slots, strict=True):
        s.out.resident_bytes_end, s.out.resident_bytes_mean = int(held[slot]), float(mean[slot])
        s.out.compressed |= any(min(c) < seen for c in cache.counts(slot))


class Decoder:
    """Feeds a batch of compressed caches: what follows of the prompt, the gold text, then what the model answers.

    chunk: tokens per forward pass, those of all rows together. eos: ids that end an answer.
    """

    def __init__(self, loaded: LoadedModel, chunk: int):
        self.model, self.tokenizer, self.device, self.chunk = loaded.model, loaded.tokenizer, loaded.device, chunk
        self.eos = _eos_ids(loaded)
        self._keeps_logits = "logits_to_keep" in inspect.signature(type(loaded.model).forward).parameters

    def answer(
        self,
        batch: list[Row],
        feeds: Sequence[Sequence[int]],
        rendered: Rendered,
        limit: int,
        generation: Generation,
        *,
        keep: bool = False,
        slot: Slot | None = None,
    ) -> int:
        """Feed each row its tokens (equally many), score the gold text, generate up to `limit` tokens.

        keep: leave each row the cache that its answer ends with. slot: where the state is saved now and then, and what
        a killed process left there is gone on with. Returns the most bytes allocated for caches.
        """
        begin = clock(self.device)
        going = self._resumed(slot, batch) if slot is not None and limit else None
        if going is None:
            going = self._begun(batch, feeds, rendered, limit)
        begin -= going.seconds
        while going.live:
            self._step(going, batch, rendered, limit, generation, keep)
            if slot is not None and (slot.due or (slot.used and not going.live)):
                going.seconds = time.perf_counter() - begin
                self._save(slot, going, batch)
        if not limit:
            self._leave(going, batch, range(len(batch)), keep)
        seconds = clock(self.device) - begin
        for s in batch:
            s.out.new_tokens, s.out.fused_rows = len(s.out.token_ids), len(batch)
            s.out.decode_seconds = seconds / len(batch)
            s.out.text = self._text(s.out.token_ids)
            for stop in rendered.stop:
                s.out.text = s.out.text.split(stop)[0] if stop in s.out.text else s.out.text
        return going.most

    def _begun(self, batch: list[Row], feeds: Sequence[Sequence[int]], rendered: Rendered, limit: int) -> _Going:
        """The batch before its first generated token: the prompt is fed, the gold text judged."""
        rest, gold = torch.tensor(feeds, device=self.device), list(rendered.gold_ids)
        cache = CompressedCache.join([s.cache for s in batch if s.cache is not None])
        for s in batch:
            s.cache = None
        for _, part in self._feed(cache, rest, batch, last=True):
            logits = part[:, -1]
        most = cache.allocated_bytes()
        if gold:
            judged = cache.fork() if limit else cache
            self._judge(judged, batch, logits, gold, count=not limit)
            most = max(most, judged.allocated_bytes() + (cache.unshared_bytes() if limit else 0))
            del judged
        return _Going(cache, logits, list(range(len(batch))) if limit else [], 0, most)

    def _step(
        self, going: _Going, batch: list[Row], rendered: Rendered, limit: int, generation: Generation, keep: bool
    ) -> None:
        """One more token for each row that is still going."""
        live, stays = going.live, []
        picked = self._pick([batch[i] for i in live], going.logits, generation)
        for slot, (i, token) in enumerate(zip(live, picked, strict=True)):
            s = batch[i]
            s.out.token_ids.append(token)
            if token in self.eos:
                s.out.finish_reason = "eos"
            elif rendered.stop and len(s.out.token_ids) > 1 and self._stopped(s, rendered):
                s.out.finish_reason = "stop"
            elif going.step + 1 < limit:
                stays.append(slot)
        going.step += 1
        if len(stays) < len(live):
            self._leave(going, batch, sorted(set(range(len(live))) - set(stays)), keep)
            going.live = live = [live[slot] for slot in stays]
            if not live:
                return
            going.cache.batch_select_indices(torch.tensor(stays))
        feed = torch.tensor([[batch[i].out.token_ids[-1]] for i in live], device=self.device)
        rows = [batch[i] for i in live]
        going.logits = self._forward(going.cache, rows, feed)[:, -1]
        for s, held in zip(rows, going.cache.held.tolist(), strict=True):
            note(s.out, held)

    @staticmethod
    def _leave(going: _Going, batch: list[Row], slots: Sequence[int], keep: bool) -> None:
        """Rows end: record what they hold. slots: their places in the cache."""
        going.most = max(going.most, going.cache.allocated_bytes())
        rows = [batch[going.live[slot]] for slot in slots] if going.live else [batch[slot] for slot in slots]
        finish(rows, going.cache, slots)
        if keep:
            for s, slot in zip(rows, slots, strict=True):
                s.cache = going.cache.take([slot])

    @staticmethod
    def _save(slot: Slot, going: _Going, batch: list[Row]) -> None:
        """Put the state between two steps in its slot: caches, sampler, and what the rows say so far."""
        tensors: dict[str, Tensor] = {}
        caches = {"cache": going.cache} if going.live else {}
        caches |= {f"row{i}": s.cache for i, s in enumerate(batch) if s.cache is not None}
        held: dict[str, Any] = {}
        for name, cache in caches.items():
            held[name], mine = cache.state()
            tensors |= {f"{name}.{k}": x for k, x in mine.items()}
        if going.live:
            tensors["logits"] = going.logits
        for i, s in enumerate(batch):
            if s.generator is not None:
                tensors[f"generator{i}"] = s.generator.get_state()
        rows = [{name: getattr(s.out, name) for name in DECODED} for s in batch]
        facts = {"live": going.live, "step": going.step, "most": going.most, "seconds": going.seconds}
        slot.save({**facts, "rows": rows, "held": held}, tensors)

    def _resumed(self, slot: Slot, batch: list[Row]) -> _Going | None:
        """The batch as a killed process left it, or None. Its caches are those of `batch`, brought to their states."""
        if (found := slot.load()) is None:
            return None
        facts, tensors = found

        def brought(name: str, cache: CompressedCache) -> CompressedCache:
            cache.restore(facts["held"][name], {k.removeprefix(f"{name}."): x for k, x in tensors.items()
                                                if k.startswith(f"{name}.")})  # fmt: skip
            return cache

        fresh = [s.cache for s in batch if s.cache is not None]
        cache = CompressedCache.join(fresh)
        if facts["live"]:
            cache = brought("cache", cache.take(facts["live"]))
        for i, (s, told) in enumerate(zip(batch, facts["rows"], strict=True)):
            for name, value in told.items():
                setattr(s.out, name, value)
            if s.generator is not None:
                s.generator.set_state(tensors[f"generator{i}"])
            s.cache = brought(f"row{i}", fresh[i].take([0])) if f"row{i}" in facts["held"] else None
        logits = tensors["logits"].to(self.device, copy=True) if facts["live"] else torch.empty(0)
        return _Going(cache, logits, facts["live"], facts["step"], facts["most"], facts["seconds"])

    def pending(self, row: Row, turn: Rendered) -> list[int]:
        """What a row's answer of the turn before leaves to be fed: its last token.

        An end token is left out, as the words between two turns begin with the template's own; but not where the
        benchmark's answers end with one.
        """
        last = list(row.said[-1:])
        return [] if self.eos.issuperset(last) and not self.eos.intersection(turn.gold_ids[-1:]) else last

    def _feed(
        self,
        cache: CompressedCache,
        tokens: Tensor,
        batch: list[Row],
        *,
        count: bool = True,
        last: bool = False,
    ) -> Iterator[tuple[int, Tensor]]:
        """Feed tokens (rows, T), or (1, T) for all rows, piece by piece: (offset in tokens, logits (rows, q, V)).

        A piece has `chunk` tokens in all. count: whether the bytes held meanwhile count for their cells. last: only the
        logits of each piece's last token are wanted.
        """
        size = max(self.chunk // len(batch), 1)
        for start in range(0, tokens.shape[1], size):
            ids = tokens[:, start : start + size].expand(len(batch), -1)
            yield start, self._forward(cache, batch if count else [], ids, last=last)

    def _forward(self, cache: CompressedCache, batch: Sequence[Row], ids: Tensor, *, last: bool = False) -> Tensor:
        seen = cache.get_seq_length()
        positions = torch.arange(seen, seen + ids.shape[1], device=ids.device)[None].expand(ids.shape)
        wanted = {"logits_to_keep": 1} if last and self._keeps_logits else {}
        logits: Tensor = self.model(
            input_ids=ids, position_ids=positions, use_cache=True, **{cache_argument(self.model): cache}, **wanted
        ).logits
        if batch:
            for s, peak in zip(batch, cache.peaks.tolist(), strict=True):
                s.out.resident_bytes_peak = max(s.out.resident_bytes_peak, peak)
        return logits

    def _judge(self, cache: CompressedCache, batch: list[Row], first: Tensor, gold: list[int], *, count: bool) -> None:
        """Teacher-forced: mean negative log-likelihood of the gold tokens, and the share that greedy would hit."""
        target = torch.tensor(gold, device=first.device)
        loss, hits = torch.zeros(len(batch)), torch.zeros(len(batch))

        def add(logits: Tensor, start: int) -> None:
            wanted = target[start : start + logits.shape[1]].expand(len(batch), -1)
            at = logits.gather(-1, wanted[..., None])[..., 0].float()
            loss.add_((torch.logsumexp(logits.float(), dim=-1) - at).sum(1).cpu())
            hits.add_((logits.argmax(-1) == wanted).sum(1).cpu())

        add(first[:, None], 0)
        for start, logits in self._feed(cache, target[None, :-1].to(self.device), batch, count=count):
            add(logits, start + 1)
        for s, nll, hit in zip(batch, loss.tolist(), hits.tolist(), strict=True):
            s.out.answer_nll, s.out.token_accuracy = nll / len(gold), hit / len(gold)

    def _pick(self, batch: list[Row], logits: Tensor, generation: Generation) -> list[int]:
        """The next token of each row."""
        if generation.temperature <= 0:
            greedy: list[int] = logits.argmax(-1).tolist()
            return greedy
        return [_pick(row, s.generator, generation) for s, row in zip(batch, logits, strict=True)]

    def _stopped(self, s: Row, rendered: Rendered) -> bool:
        text = self._text(s.out.token_ids)
        return any(stop in text for stop in rendered.stop)

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode([i for i in ids if i not in self.eos], skip_special_tokens=True))


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
