"""Attention of new queries over all that one layer holds."""

from __future__ import annotations

import torch
from torch import Tensor

from moend.cache.decode.layout import Layout, Part
from moend.hf.rope import back
from moend.kernels.cpu import compiled
from moend.kernels.triton import launch as kernel

LOGITS = 2**24  # logits computed at a time


def path(held: Layout) -> str:
    """What computes a step of one token: "triton" on GPUs that have it, "compiled" on a CPU, "torch" otherwise."""
    if held.accumulated is None and not held.reindexed and kernel.usable(held.k_tail.device):
        return "triton"
    return "compiled" if compiled.usable(held.k_tail, 1) else "torch"


def runs(held: Layout) -> list[kernel.Run]:
    """What is held as the kernel reads it: strands that share both banks together, then the tail of all."""
    if held.known_runs is None:
        held.known_runs = []
        pairs: dict[tuple[int, int], list[Part]] = {}
        for part in held.parts:
            if part.slots:
                pairs.setdefault((part.k[0], part.v[0]), []).append(part)
        for (k, v), parts in pairs.items():
            index = [
                [first + h for p, first in zip(parts, firsts, strict=True) for h in range(p.heads)]
                for firsts in ([p.at for p in parts], [p.k[1] for p in parts], [p.v[1] for p in parts])
            ]
            index.append([p.slots for p in parts for _ in range(p.heads)])
            at, k_rows, v_rows, lengths = torch.tensor(index, dtype=torch.int32, device=held.k_tail.device)
            sides = kernel.Side.of(held.k_banks[k]), kernel.Side.of(held.v_banks[v])
            longest = max(p.slots for p in parts)
            held.known_runs.append(kernel.Run(*sides, at, k_rows, v_rows, lengths, longest, held.hidden))
    begin, columns = held.begin, held.cursor - held.begin
    every = torch.arange(len(held.k_tail), dtype=torch.int32, device=held.k_tail.device)
    lengths = torch.full_like(every, columns)
    tails = kernel.Side.plain(held.k_tail[:, begin:]), kernel.Side.plain(held.v_tail[:, begin:])
    hidden = held.hidden[:, held.slots + begin :]
    return [*held.known_runs, kernel.Run(*tails, every, every, every, lengths, columns, hidden)]


def attention(held: Layout, query: Tensor, window: int | None) -> Tensor:
    """Scaled queries (S, G, p, d) of the newest p tokens over all that is held, themselves included."""
    strands, group, p, dim = query.shape
    if p == 1 and window is None and path(held) == "triton":
        return kernel.decode(query[:, :, 0], runs(held))[:, :, None]
    used, n = held.used, held.used + held.cursor - held.begin
    size, out = max(LOGITS // (strands * group * n), 1), []
    for start in range(0, p, size):
        part = query[:, :, start : start + size]
        q = part.shape[2]
        flat = part.reshape(strands, group * q, dim)
        fast = compiled.usable(flat, group * q)
        if flat.is_cpu:
            flat = flat.float().contiguous()
        logits = _logits(held, flat, fast)
        for row in held.reindexed:
            _bring_near(held, row, flat, logits)
        if p > 1 or window is not None:
            _hide(held, logits.view(strands, group, q, n), start, p, window)
        probs = _softmax(held, logits, fast)
        if held.accumulated is not None:
            received = probs.sum(1)
            held.accumulated[:, :used] += received[:, :used]
            held.accumulated[:, held.slots + held.begin : held.slots + held.cursor] += received[:, used:]
        out.append(_mixed(held, probs, flat, fast).view(strands, group, q, dim).to(query.dtype))
    return torch.cat(out, dim=2) if len(out) > 1 else out[0]


def _bring_near(held: Layout, part: Part, query: Tensor, logits: Tensor) -> None:
    """Logits of a re-indexed row's sinks again, as if they stood right before its newest entries (`Reindex`)."""
    reindex, known = part.schedule.reindex, part.positions
    part.touch(held.clock)
    if reindex is None or known is None or part.seen == part.n:
        return
    first = known[: reindex.sinks]
    sinks = int((first == torch.arange(len(first), device=first.device)).sum())
    bank, start = held.k_banks[part.k[0]], part.k[1]
    keys = bank.x[start : start + part.heads, :sinks].to(query.dtype)
    nearer = back(query[part.strands], part.seen - part.n, reindex.rotary).to(query.dtype)
    logits[part.strands, :, :sinks] = torch.bmm(nearer, keys.mT)


def _logits(held: Layout, flat: Tensor, fast: bool) -> Tensor:
    """Scaled queries (S, R, d) times all keys: (S, R, used slots + columns); unused slots are arbitrary."""
    logits = flat.new_empty(*flat.shape[:2], held.used + held.cursor - held.begin)
    if fast:
        compiled.score(flat, _newest(held)[0], logits)
    else:
        keys = held.k_tail[:, held.begin : held.cursor].to(flat.dtype)
        logits[:, :, held.used :] = torch.bmm(flat, keys.mT)
    for bank in held.k_banks:
        if bank.used:
            bank.score(flat, logits)
    return logits


def _softmax(held: Layout, logits: Tensor, fast: bool) -> Tensor:
    """softmax(logits) without what is hidden, in float32 where its sums are wanted."""
    used, first = held.used, held.slots + held.begin
    if fast:
        compiled.softmax(logits, held.hidden, held.lengths, used, first - used, held.accumulated is not None)
        return logits
    if held.old_hidden:
        logits[:, :, :used].masked_fill_(held.hidden[:, None, :used], -torch.inf)
    if held.new_hidden:
        hidden = held.hidden[:, None, first : held.slots + held.cursor]
        logits[:, :, used:].masked_fill_(hidden, -torch.inf)
    return torch.softmax(logits, dim=-1, dtype=None if held.accumulated is None else torch.float32)


def _mixed(held: Layout, probs: Tensor, flat: Tensor, fast: bool) -> Tensor:
    """All values weighted by probs (S, R, n): (S, R, d)."""
    if fast:
        mixed = torch.zeros_like(flat)
        compiled.mix(probs, _newest(held)[1], mixed)
    else:
        values = held.v_tail[:, held.begin : held.cursor].to(flat.dtype)
        mixed = torch.bmm(probs[:, :, held.used :].to(flat.dtype), values)
    for bank in held.v_banks:
        if bank.used:
            bank.mix(probs, mixed)
    return mixed


def _newest(held: Layout) -> tuple[compiled.Entries, compiled.Entries]:
    """The tail's K and V as compiled code reads them, with one end for all."""
    if held.known_tails is None:
        none, ends = held.k_tail.new_empty(0), torch.full_like(held.every, held.cursor)
        rest = none, none, 16, 1, ends, held.every, held.begin, held.used
        held.known_tails = compiled.Entries(held.k_tail, *rest), compiled.Entries(held.v_tail, *rest)
    for side in held.known_tails:
        side.reach(held.cursor)
    return held.known_tails


def _hide(held: Layout, logits: Tensor, start: int, p: int, window: int | None) -> None:
    """Mask what queries start, start + 1 ... of the newest p may not see: later tokens, and what left `window`."""
    q, n = logits.shape[2:]
    me = torch.arange(start, start + q, device=logits.device)
    later = torch.arange(p, device=logits.device) > me[:, None]
    logits[..., n - p :].masked_fill_(later, -torch.inf)
    if window is not None:
        where, ahead = held.places()
        where = torch.cat([where[:, : held.used], where[:, held.slots + held.begin : held.slots + held.cursor]], dim=1)
        at = (ahead[:, None] + (held.clock - p) + me)[..., None]  # (S, q, 1): the queries' own positions
        logits.masked_fill_((at - where[:, None] >= window)[:, None], -torch.inf)
