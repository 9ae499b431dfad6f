"""An outcome of the engine as a record: one line of a cell's records."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from moend.benchmarks import Benchmark, Rendered, Sample
    from moend.decoding import Outcome
    from moend.methods.bind import BoundMethod

Kept = Literal["tokens", "layers", "heads"]
LONG = 64  # generated tokens from which on a record holds how its bytes grew


def record(
    out: Outcome,
    bench: Benchmark,
    rendered: Rendered,
    first: Rendered,
    bound: BoundMethod,
    tokenizer: Any,
    draw: int,
    rows: int,
    made: dict[str, Any],
    kept: Kept | None,
) -> dict[str, Any]:
    """What a cell keeps of one example and draw.

    first: the prompt of the first question of its context. rows: cells and draws that shared its prefill. made: where
    (`store.provenance`). kept: how the shares of kept entries are recorded, None where they are not.
    """
    sample, several = rendered.sample, bench.questions_per_context > 1
    if bench.kind == "nll":
        scored: dict[str, Any] = {"score": out.answer_nll, "answer": None}
    else:
        finished = out.finish_reason != "length"
        scored = bench.score(sample, out.text, finished=finished, opened=rendered.thinking)
    specs = bound.specs(out.compressed_tokens, out.fed_tokens)
    return {
        "task": sample.task,
        "id": sample.id,
        "draw": draw,
        "context_id": sample.meta["context_id"] if several else None,
        "question": sample.meta["question"] if several else None,  # its number in the context, from 1
        "turn": sample.meta["question"] if bench.turns else None,
        "axes": sample.meta.get("axes"),
        "gold": list(sample.gold),
        "scored_meta": {k: sample.meta[k] for k in bench.scored_meta},
        **scored,
        "text": out.text,
        "thinking": rendered.thinking,
        "prompt_tokens": out.prompt_tokens,
        "compressed_tokens": out.compressed_tokens,
        "new_tokens": out.new_tokens,
        "max_new_tokens": rendered.max_new_tokens,
        "truncated": rendered.truncated,
        "finish_reason": out.finish_reason if out.new_tokens else "none",
        "answer_nll": out.answer_nll,
        "token_accuracy": out.token_accuracy,
        "compressed": out.compressed,
        "eq1_bytes": out.eq1_bytes,
        "resident_bytes": out.resident_bytes,
        "resident_bytes_end": out.resident_bytes_end,
        "resident_bytes_peak": out.resident_bytes_peak,
        "resident_bytes_mean": out.resident_bytes_mean,
        "bytes_over_tokens": {"every": out.held_every, "bytes": out.held_bytes} if out.new_tokens >= LONG else None,
        "full_bytes": out.full_bytes,
        "requested": [min(s.tokens, out.compressed_tokens) for s in specs],
        "entries": out.entries,
        "effective_keep": [round(x, 6) for x in out.effective_keep],
        "k_bits": out.k_bits,
        "v_bits": out.v_bits,
        "diagnostics": out.diagnostics,
        "kept": None if kept is None or not out.positions else _kept(out, first, sample, tokenizer, kept),
        "peak_bytes": out.peak_bytes,
        "device_peak_bytes": out.device_peak_bytes,
        "provenance": made,
        "timing": {
            "fused_rows": out.fused_rows,
            "group_prefill_seconds": out.prefill_seconds,
            "prefill_rows": rows,
            "select_seconds": out.select_seconds,
            "pack_seconds": 0.0,  # packing is part of the fork: in select_seconds
            "decode_seconds_share": out.decode_seconds,
        },
    }


def _kept(out: Outcome, first: Rendered, sample: Sample, tokenizer: Any, by: Kept) -> dict[str, Any]:
    tokens = out.compressed_tokens
    prompt = tokenizer.decode(list(first.ids[:tokens]))
    told = kept_shares(out.positions, tokens, prompt, sample.gold[0] if sample.gold else "", by)
    return {**told, "context": [min(first.context_start, tokens), min(first.context_tokens, tokens)]}


def kept_shares(
    positions: Sequence[Sequence[torch.Tensor]], tokens: int, prompt: str, gold: str, by: Kept
) -> dict[str, Any]:
    """Where the kept entries of one sequence lie, small enough for a record (`pipelines.results.kept` reads it).

    positions: of each layer those of each of its KV heads. by: what has a line of shares: all layers and KV heads
    together, each layer, or each KV head, layer by layer. shares: the lines, a byte per prompt token, 255 for all,
    compressed by zlib, as base64. answer: where the gold answer stands in the text of those tokens, as a share of its
    characters, None unless it stands there once.
    """
    import torch

    heads, lines = len(positions[0]), []
    for layer in positions:
        at = torch.cat([p.long().cpu() + h * tokens for h, p in enumerate(layer)])
        held = torch.bincount(at, minlength=heads * tokens).view(heads, tokens)
        lines.append(held if by == "heads" else held.sum(0, keepdim=True))
    counts = torch.cat(lines)
    most = {"heads": 1, "layers": heads, "tokens": heads * len(positions)}[by]
    if by == "tokens":
        counts = counts.sum(0, keepdim=True)
    shares = (255 * counts / most).round().to(torch.uint8).numpy().tobytes()
    once = bool(gold) and prompt.count(gold) == 1
    answer = (prompt.index(gold) + len(gold) / 2) / len(prompt) if once else None
    packed = base64.b64encode(zlib.compress(shares)).decode()
    return {"tokens": tokens, "by": by, "layers": len(positions), "heads": heads, "shares": packed, "answer": answer}
