"""Packed entries of rows that evict while decoding: they keep their codes for as long as they live.

V has a scale per token, so what survives an eviction stays as it is. K has a scale per group of tokens: a group that
loses entries keeps its scale, so its codes stay exact as well. Evicting therefore only hides slots. When the residual
window packs its oldest entries, the slots of those that went are closed up, and groups without entries give their scale
back.

A KV head has a fixed number of scales (`Storage.scales`), and sparse groups may use them up. Then the two oldest groups
merge into the **archive**, the oldest group of all, whose range spans those of all groups there were when it began.
Later groups that enter it are quantised to its range. Where they pass it in some channel, the range of that channel at
least doubles and the archive's codes there are made anew; after WIDENINGS times values are clipped. So a number of K is
requantised at most REQUANTISATIONS times, however long the answer: once when its group enters the archive, and once for
each time that the archive's range grows in its channel. The errors of the latter halve backwards: together they are
smaller than the last.

Each group takes whole blocks of BLOCK slots, so that kernels find one scale per block; the rest of its last block is
hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moend.cache.layer_kv import LayerKV
from moend.cache.packing import Packed, encode, quantise_k, quantise_v, span, unpack
from moend.cache.packing import pack as pack_codes

if TYPE_CHECKING:
    from moend.cache.decode.layout import Layout, Part
    from moend.cache.packed_store import PackedStore

BLOCK = 16  # neighbouring slots of one group: what tensor cores take at least
WIDENINGS = 3  # how often a channel of the archive may widen its range
REQUANTISATIONS = 1 + WIDENINGS  # of any number of K


def block_of(k_bits: int) -> int:
    """Slots that belong to one group together: none have to where K is not packed."""
    return BLOCK if k_bits < 16 else 1


def lay_out(sizes: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Where groups of sizes (H, C) entries lie in slots, each in whole blocks: (group, taken), both (H, slots)."""
    blocks = -(-sizes // block)
    ends = blocks.cumsum(1) * block
    slot = torch.arange(int(ends[:, -1].max()), device=sizes.device).repeat(len(sizes), 1)
    group = torch.searchsorted(ends, slot, right=True).clamp_(max=sizes.shape[1] - 1)
    begin = (ends - blocks * block).gather(1, group)
    return group, slot - begin < sizes.gather(1, group)


def lay(held: Layout, part: Part, row: LayerKV) -> None:
    """Lay a row down whose entries are held flat; there is room for them."""
    assert row.sizes is not None and held.where is not None
    sizes, (k, v) = row.sizes.long(), held.stores(part)
    group, taken = lay_out(sizes, block_of(row.storage.k_bits))
    slots, window = group.shape[1], row.n - sizes.sum(1)
    most = int(window.max())
    new = torch.arange(most, device=taken.device) >= most - window[:, None]  # (H, most): the residual window
    old = torch.arange(row.n, device=taken.device) < sizes.sum(1)[:, None]  # (H, n): the packed entries come first
    flat = [row.k_packed[0] if row.k_packed else row.k_tail[old], row.v_packed or row.v_tail[old]]
    for (store, start), entries in zip((k, v), flat, strict=True):
        store.fill_in(start, taken, entries.tensors() if isinstance(entries, Packed) else (entries,))
    if row.k_packed and row.widened is not None:
        store, start = k
        rows = slice(start, start + part.heads)
        store.step[rows], store.zero[rows] = row.k_packed[0].step, row.k_packed[0].zero
        assert store.scale_of is not None and store.widened is not None
        store.scale_of[rows, : slots // BLOCK], store.widened[rows] = group[:, ::BLOCK].int(), row.widened
    at = slice(held.cursor - most, held.cursor)
    held.k_tail[part.strands, at][new] = row.k_tail if row.storage.k_bits < 16 else row.k_tail[~old]
    held.v_tail[part.strands, at][new] = row.v_tail if row.storage.v_bits < 16 else row.v_tail[~old]
    hidden = held.hidden[part.strands]
    hidden[:, : held.slots + held.cursor] = True
    hidden[:, :slots] = ~taken
    hidden[:, held.slots + at.start : held.slots + at.stop] = ~new
    live = ~hidden[:, : held.slots + held.cursor]
    positions = row.true_positions().expand(part.heads, -1).int()
    held.where[part.strands, : held.slots + held.cursor][live] = positions.flatten()
    if held.accumulated is not None and row.accumulated is not None:
        held.accumulated[part.strands].zero_()
        held.accumulated[part.strands, : held.slots + held.cursor][live] = row.accumulated.flatten()
    part.n, part.tail, part.span, part.slots, part.storage = row.n, row.tail, most, slots, row.storage
    part.positions = None


def row(held: Layout, part: Part) -> LayerKV:
    """The entries of a part at rest."""
    assert held.where is not None
    st, ((k, k_start), (v, v_start)) = part.storage, held.stores(part)
    k_rows, v_rows = slice(k_start, k_start + part.heads), slice(v_start, v_start + part.heads)
    live = ~held.hidden[part.strands, : held.slots + held.cursor]
    old, new = live[:, : part.slots], live[:, held.slots :]
    both = torch.cat([old, new], dim=1)
    sizes, order = _sizes(held, part, old)
    windows = []
    for store, rows, window, bits in ((k, k_rows, held.k_tail, st.k_bits), (v, v_rows, held.v_tail, st.v_bits)):
        window = window[part.strands, : held.cursor]
        if bits < 16:
            windows.append(window[new])
        else:
            x = torch.cat([store.x[rows, : part.slots], window], dim=1)
            windows.append(x[both].view(part.heads, part.n, -1))
    k_packed: tuple[Packed, ...] = ()
    v_packed = widened = None
    if k.widened is not None:
        at = order[..., None].expand(-1, -1, held.dim)
        step, zero = (x[k_rows].gather(1, at) for x in (k.step, k.zero))
        gone = sizes.gather(1, order)[..., None] == 0
        scales = step.masked_fill(gone, 0), zero.masked_fill(gone, 0)
        k_packed = (Packed(k.x[k_rows, : part.slots][old], *scales, st.k_bits, st.group, "channel"),)
        widened = k.widened[k_rows].clone()
    if st.v_bits < 16:
        codes, step, zero = (x[v_rows, : part.slots][old] for x in v.per_slot())
        v_packed = Packed(codes, step, zero, st.v_bits, v.group, "token")
    positions = held.where[part.strands, : held.slots + held.cursor][live].view(part.heads, part.n)
    sums = queries = None
    if held.accumulated is not None and part.summed:
        sums = held.accumulated[part.strands, : held.slots + held.cursor][live].view(part.heads, part.n)
    if held.queries is not None and part.asked:
        queries = held.queries[part.strands, :, held.queries.shape[2] - part.asked :].clone()
    return LayerKV.of(
        k_packed, v_packed, *windows,
        {"none": None, "shared": positions[0].clone(), "per_head": positions}[st.positions], st,
        seen=part.seen, schedule=part.schedule, choose=part.choose, steps=part.steps, accumulated=sums,
        queries=queries, sizes=sizes.gather(1, order).int(), widened=widened, tail=part.tail,
    )  # fmt: skip


def dense(held: Layout, part: Part, live: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (H, n, d) float32 of what is live (H, n), indices of `hidden`."""
    begin = held.cursor - part.span
    at = torch.where(live < part.slots, live, live - held.slots - begin + part.slots)
    sides = []
    for (store, start), window in zip(held.stores(part), (held.k_tail, held.v_tail), strict=True):
        numbers = store.numbers(slice(start, start + part.heads), part.slots)
        numbers = torch.cat([numbers, window[part.strands, begin : held.cursor].float()], dim=1)
        sides.append(numbers[torch.arange(part.heads, device=at.device)[:, None], at])
    return sides[0], sides[1]


def drop(held: Layout, part: Part, live: Tensor, index: Tensor) -> None:
    """Hide what is live (H, n), indices of `hidden`, but for that at index (H or 1, keep)."""
    hidden = held.hidden[part.strands]
    gone = torch.ones_like(live, dtype=torch.bool).scatter_(1, index.expand(len(live), -1), False)
    heads, places = gone.nonzero()[:, 0], live[gone]
    hidden[heads, places] = True
    old = places < held.slots
    # values that nobody sees must be finite: a probability of 0 times infinity is not a number
    held.v_tail[part.at + heads[~old], places[~old] - held.slots] = 0
    store, start = held.stores(part)[1]
    if store.bits == 16 and bool(old.any()):
        store.own()
        store.x[start + heads[old], places[old]] = 0
    if part.slots - int((~hidden[:, : part.slots]).sum(1).max()) > part.slots // 4:
        close_up(held, part)


def close_up(held: Layout, part: Part) -> Tensor:
    """Move packed entries together, where others went; returns the sizes (H, C) of their groups, empty ones last."""
    assert held.where is not None
    hidden = held.hidden[part.strands, : part.slots]
    live = ~hidden
    sizes, order = _sizes(held, part, live)
    sizes = sizes.gather(1, order)
    group, taken = lay_out(sizes, block_of(part.storage.k_bits))
    slots = group.shape[1]
    for store, start in held.stores(part):
        rows = slice(start, start + part.heads)
        if part.slots:
            store.fill_in(start, taken, [x[rows, : part.slots][live] for x in store.per_slot()])
        if store.scale_of is not None:
            at = order[..., None].expand(-1, -1, held.dim)
            store.step[rows], store.zero[rows] = store.step[rows].gather(1, at), store.zero[rows].gather(1, at)
            store.scale_of[rows, : slots // BLOCK] = group[:, ::BLOCK].int()
    for x in (held.where, held.accumulated):
        if x is not None:
            mine = x[part.strands, : part.slots]
            kept = mine[live]
            mine.zero_()
            mine[:, :slots][taken] = kept
    hidden.fill_(True)
    hidden[:, :slots] = ~taken
    part.slots = slots
    return sizes


def _sizes(held: Layout, part: Part, live: Tensor) -> tuple[Tensor, Tensor]:
    """Entries (H, C) that groups have left, and the order (H, C) of groups in which empty ones come last."""
    (store, start), scales = held.stores(part)[0], part.storage.scales
    sizes = torch.zeros(part.heads, scales, dtype=torch.int64, device=live.device)
    if store.scale_of is None:
        sizes[:, 0] = live.sum(1)
    else:
        rows = slice(start, start + part.heads)
        group = store.scale_of[rows, : part.slots // BLOCK].long().repeat_interleave(BLOCK, dim=1)
        sizes.scatter_add_(1, group, live.long())
    return sizes, torch.argsort((sizes == 0).int(), dim=1, stable=True)


def pack(held: Layout, part: Part) -> None:
    """Pack what is older than the newest `window` entries of the residual window: in each head one more group."""
    assert held.where is not None
    st, sizes = part.storage, close_up(held, part)
    cols = ~held.hidden[part.strands, held.slots + held.cursor - part.span : held.slots + held.cursor]
    moved = (cols.sum(1) - st.window).clamp(min=0)  # (H,) entries that leave the window
    if most := int(moved.max()):
        block, each = block_of(st.k_bits), torch.arange(most, device=cols.device)
        begin = (-(-sizes // block)).sum(1) * block  # (H,) the first free slot
        held.reserve(part, int((begin + -(-moved // block) * block).max()))
        # columns of what moves, in order; heads that move fewer repeat their last, which changes no range
        order = torch.argsort((~cols).int(), dim=1, stable=True) + held.cursor - part.span
        column = order.gather(1, torch.minimum(each, (moved[:, None] - 1).clamp(min=0)))
        heads, at = (each < moved[:, None]).nonzero(as_tuple=True)
        slot, column_of = begin[heads] + at, column[heads, at]
        (k, k_start), (v, v_start) = held.stores(part)
        strand = torch.arange(part.at, part.at + part.heads, device=cols.device)[:, None]
        keys, values = held.k_tail[strand, column], held.v_tail[strand, column]
        if k.scale_of is None:
            k.own()
            k.x[k_start + heads, slot] = keys[heads, at]
        else:
            k.own()
            for head in ((sizes[:, -1] > 0) & (moved > 0)).nonzero()[:, 0].tolist():
                _archive(k, k_start + head, sizes[head])
            packed, some = quantise_k(keys, st.k_bits, most), (moved > 0).nonzero()[:, 0]
            group = (sizes > 0).sum(1)
            k.x[k_start + heads, slot] = packed.codes[heads, at]
            k.step[k_start + some, group[some]] = packed.step[some, 0]
            k.zero[k_start + some, group[some]] = packed.zero[some, 0]
            k.scale_of[k_start + heads, slot // BLOCK] = group[heads].int()
        v.own()
        if st.v_bits == 16:
            v.x[v_start + heads, slot] = values[heads, at]
        else:
            coded = quantise_v(values, st.v_bits, st.channels)
            for there, x in zip((v.x, v.step, v.zero), coded.tensors(), strict=True):
                there[v_start + heads, slot] = x[heads, at]
        for tensor in (held.where, held.accumulated):
            if tensor is not None:
                tensor[part.at + heads, slot] = tensor[part.at + heads, held.slots + column_of]
        held.hidden[part.at + heads, slot] = False
        held.hidden[part.at + heads, held.slots + column_of] = True
        part.slots = max(part.slots, int((begin + -(-moved // block) * block).max()))
    cols = ~held.hidden[part.strands, held.slots + held.cursor - part.span : held.slots + held.cursor]
    part.span -= int(cols.any(0).int().argmax()) if bool(cols.any()) else part.span


def align(held: Layout, part: Part) -> None:
    """Close the gaps of a part's residual window, so that its columns are as many as a head has entries there."""
    assert held.where is not None
    begin = held.cursor - part.span
    live = ~held.hidden[part.strands, held.slots + begin : held.slots + held.cursor]
    most = int(live.sum(1).max()) if part.span else 0
    if most == part.span:
        return
    order = torch.argsort(live.int(), dim=1, stable=True)[:, part.span - most :]
    beside = held.hidden, held.where, held.accumulated
    for x, first in ((held.k_tail, 0), (held.v_tail, 0), *((x, held.slots) for x in beside)):
        if x is not None:
            mine = x[part.strands, first + begin : first + held.cursor]
            at = order if x.ndim == 2 else order[..., None].expand(-1, -1, x.shape[2])
            mine[:, part.span - most :] = mine.gather(1, at)
            mine[:, : part.span - most] = 1 if x is held.hidden else 0
    part.span = most


def _archive(store: PackedStore, row: int, sizes: Tensor) -> None:
    """Merge the two oldest groups of one head; sizes (C,) follows. The merged group is the archive."""
    assert store.scale_of is not None and store.widened is not None
    bits, (n, m) = store.bits, sizes[:2].tolist()
    first = -(-n // BLOCK) * BLOCK  # slot of the second group
    step, zero, grown = store.step[row].float(), store.zero[row].float(), store.widened[row]
    top = zero + step * (2**bits - 1)
    codes = unpack(store.x[row, :n], bits)
    old = zero[0] + codes * step[0]
    new = zero[1] + unpack(store.x[row, first : first + m], bits) * step[1]
    scale = store.step[row, 0].clone(), store.zero[row, 0].clone()
    if not bool(grown.any()):
        groups = int((sizes > 0).sum())
        scale = span(zero[:groups].amin(0), top[:groups].amax(0), bits)
        codes = encode(old, *scale, bits)
        grown.fill_(1)
    else:
        below, above = new.amin(0) < zero[0], new.amax(0) > top[0]
        wider = (below | above) & (grown <= WIDENINGS)
        low, high = torch.minimum(new.amin(0), zero[0]), torch.maximum(new.amax(0), top[0])
        missing = (2 * (top[0] - zero[0]) - (high - low)).clamp(min=0) / (below.float() + above.float()).clamp(min=1)
        made = span(low - missing * below, high + missing * above, bits)
        scale = torch.where(wider, made[0], scale[0]), torch.where(wider, made[1], scale[1])
        codes = torch.where(wider, encode(old, *made, bits), codes)
        grown += wider
    store.x[row, :n] = pack_codes(codes, bits)
    store.x[row, first : first + m] = pack_codes(encode(new, *scale, bits), bits)
    for x, mine in zip((store.step[row], store.zero[row]), scale, strict=True):
        x[:-1] = x[1:].clone()
        x[0] = mine
    sizes[:-1] = sizes[1:].clone()
    sizes[0], sizes[-1] = n + m, 0
    of = store.scale_of[row]
    of.copy_((of - 1).clamp(min=0))
