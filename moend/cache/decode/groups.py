"""Packed entries of sequences that evict while decoding: an entry keeps its codes for as long as it is held.

V has a scale per token, so an eviction changes nothing about the entries that stay. K has a scale per group of tokens.
A group that loses entries keeps its scale, so its codes stay exact as well. An eviction therefore only hides slots.
When the residual window packs its oldest entries, hidden slots are closed up, and empty groups give their scale back.

A KV head has a fixed number of scales (`Storage.scales`), and sparse groups may use them up. Then the two oldest groups
merge into the **archive**, which is the oldest group from then on. Its range spans the ranges of all groups that exist
when it begins. A group that enters it later is quantised to its range. If the group exceeds that range in a channel,
the range of the channel at least doubles, and the archive's codes in the channel are made anew. This happens at most
WIDENINGS times per channel; later values are clipped. So a number of K is requantised at most REQUANTISATIONS times,
however long the answer: once when its group enters the archive, and once for each time that the range of its channel
grows. Each growth at least doubles the rounding error, so the errors of all earlier ones together are smaller than the
last.

Each group takes whole blocks of BLOCK slots, so that kernels find one scale per block. The rest of its last block is
hidden.

Here C is the number of scales, H the KV heads of a part and `live` the places in use, as indices of `Layout.hidden`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moend.cache.layer_kv import LayerKV
from moend.cache.packing import Packed, encode, quantise_k, quantise_v, span, unpack
from moend.cache.packing import pack as pack_codes

if TYPE_CHECKING:
    from moend.cache.decode.layout import Layout
    from moend.cache.decode.part import Part
    from moend.cache.packed_store import PackedStore

BLOCK = 16  # neighbouring slots that share a scale: the least that tensor cores take
WIDENINGS = 3  # how often a channel of the archive may widen its range
REQUANTISATIONS = 1 + WIDENINGS  # how often a number of K is requantised at most


def block_of(k_bits: int) -> int:
    """Slots of a block: BLOCK if K is packed, 1 if it is not."""
    return BLOCK if k_bits < 16 else 1


def lay_out(sizes: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Lay groups of sizes (H, C) out in whole blocks of slots.

    Returns (group, taken), both (H, slots): the group of each slot, and whether an entry lies there.
    """
    blocks = -(-sizes // block)
    ends = blocks.cumsum(1) * block
    slot = torch.arange(int(ends[:, -1].max()), device=sizes.device).repeat(len(sizes), 1)
    group = torch.searchsorted(ends, slot, right=True).clamp_(max=sizes.shape[1] - 1)
    begin = (ends - blocks * block).gather(1, group)
    return group, slot - begin < sizes.gather(1, group)


def lay(held: Layout, part: Part, kv: LayerKV) -> None:
    """Write the entries of a flat LayerKV (`LayerKV.sizes`) to the stores and window of a part, which have room."""
    assert kv.sizes is not None and held.where is not None
    sizes, (k, v) = kv.sizes.long(), held.stores(part)
    group, taken = lay_out(sizes, block_of(kv.storage.k_bits))
    slots, window = group.shape[1], kv.n - sizes.sum(1)
    most = int(window.max())
    new = torch.arange(most, device=taken.device) >= most - window[:, None]  # (H, most): the residual window
    old = torch.arange(kv.n, device=taken.device) < sizes.sum(1)[:, None]  # (H, n): the packed entries come first
    flat = [kv.k_packed[0] if kv.k_packed else kv.k_window[old], kv.v_packed or kv.v_window[old]]
    for (store, start), entries in zip((k, v), flat, strict=True):
        store.fill_in(start, taken, entries.tensors() if isinstance(entries, Packed) else (entries,))
    if kv.k_packed and kv.widened is not None:
        store, start = k
        rows = slice(start, start + part.heads)
        store.step[rows], store.zero[rows] = kv.k_packed[0].step, kv.k_packed[0].zero
        assert store.scale_of is not None and store.widened is not None
        store.scale_of[rows, : slots // BLOCK], store.widened[rows] = group[:, ::BLOCK].int(), kv.widened
    at = slice(held.cursor - most, held.cursor)
    held.k_window[part.kv_heads, at][new] = kv.k_window if kv.storage.k_bits < 16 else kv.k_window[~old]
    held.v_window[part.kv_heads, at][new] = kv.v_window if kv.storage.v_bits < 16 else kv.v_window[~old]
    hidden = held.hidden[part.kv_heads]
    hidden[:, : held.slots + held.cursor] = True
    hidden[:, :slots] = ~taken
    hidden[:, held.slots + at.start : held.slots + at.stop] = ~new
    live = ~hidden[:, : held.slots + held.cursor]
    positions = kv.true_positions().expand(part.heads, -1).int()
    held.where[part.kv_heads, : held.slots + held.cursor][live] = positions.flatten()
    if held.accumulated is not None and kv.accumulated is not None:
        held.accumulated[part.kv_heads].zero_()
        held.accumulated[part.kv_heads, : held.slots + held.cursor][live] = kv.accumulated.flatten()
    part.n, part.window_len, part.span, part.slots, part.storage = kv.n, kv.window_len, most, slots, kv.storage
    part.positions = None


def at_rest(held: Layout, part: Part) -> LayerKV:
    """The entries of a part as a LayerKV."""
    assert held.where is not None
    st, ((k, k_start), (v, v_start)) = part.storage, held.stores(part)
    k_rows, v_rows = slice(k_start, k_start + part.heads), slice(v_start, v_start + part.heads)
    live = ~held.hidden[part.kv_heads, : held.slots + held.cursor]
    old, new = live[:, : part.slots], live[:, held.slots :]
    both = torch.cat([old, new], dim=1)
    sizes, order = _sizes(held, part, old)
    windows = []
    for store, rows, window, bits in ((k, k_rows, held.k_window, st.k_bits), (v, v_rows, held.v_window, st.v_bits)):
        window = window[part.kv_heads, : held.cursor]
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
    positions = held.where[part.kv_heads, : held.slots + held.cursor][live].view(part.heads, part.n)
    sums = queries = None
    if held.accumulated is not None and part.summed:
        sums = held.accumulated[part.kv_heads, : held.slots + held.cursor][live].view(part.heads, part.n)
    if held.queries is not None and part.asked:
        queries = held.queries[part.kv_heads, :, held.queries.shape[2] - part.asked :].clone()
    return LayerKV.of(
        k_packed, v_packed, *windows,
        {"none": None, "shared": positions[0].clone(), "per_head": positions}[st.positions], st,
        tokens_seen=part.tokens_seen, schedule=part.schedule, choose=part.choose, steps=part.steps, accumulated=sums,
        queries=queries, sizes=sizes.gather(1, order).int(), widened=widened, window_len=part.window_len,
    )  # fmt: skip


def dense(held: Layout, part: Part, live: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (H, n, d) float32 of the entries at live (H, n)."""
    begin = held.cursor - part.span
    at = torch.where(live < part.slots, live, live - held.slots - begin + part.slots)
    sides = []
    for (store, start), window in zip(held.stores(part), (held.k_window, held.v_window), strict=True):
        numbers = store.numbers(slice(start, start + part.heads), part.slots)
        numbers = torch.cat([numbers, window[part.kv_heads, begin : held.cursor].float()], dim=1)
        sides.append(numbers[torch.arange(part.heads, device=at.device)[:, None], at])
    return sides[0], sides[1]


def drop(held: Layout, part: Part, live: Tensor, index: Tensor) -> None:
    """Hide the entries at live (H, n), except those whose number along n is in index (H or 1, keep)."""
    hidden = held.hidden[part.kv_heads]
    gone = torch.ones_like(live, dtype=torch.bool).scatter_(1, index.expand(len(live), -1), False)
    heads, places = gone.nonzero()[:, 0], live[gone]
    hidden[heads, places] = True
    old = places < held.slots
    # hidden values must be finite: 0 (their probability) times infinity is not a number
    held.v_window[part.at + heads[~old], places[~old] - held.slots] = 0
    store, start = held.stores(part)[1]
    if store.bits == 16 and bool(old.any()):
        store.own()
        store.x[start + heads[old], places[old]] = 0
    if part.slots - int((~hidden[:, : part.slots]).sum(1).max()) > part.slots // 4:
        close_up(held, part)


def close_up(held: Layout, part: Part) -> Tensor:
    """Close the gaps between packed entries, and return the sizes (H, C) of their groups, empty ones last."""
    assert held.where is not None
    hidden = held.hidden[part.kv_heads, : part.slots]
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
            mine = x[part.kv_heads, : part.slots]
            kept = mine[live]
            mine.zero_()
            mine[:, :slots][taken] = kept
    hidden.fill_(True)
    hidden[:, :slots] = ~taken
    part.slots = slots
    return sizes


def _sizes(held: Layout, part: Part, live: Tensor) -> tuple[Tensor, Tensor]:
    """Entries that each group has left (H, C), and the order of groups (H, C) that puts empty ones last."""
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
    """Pack all but the newest `storage.window` entries of the residual window, as one more group in each KV head."""
    assert held.where is not None
    st, sizes = part.storage, close_up(held, part)
    cols = ~held.hidden[part.kv_heads, held.slots + held.cursor - part.span : held.slots + held.cursor]
    moved = (cols.sum(1) - st.window).clamp(min=0)  # (H,) entries that leave the window
    if most := int(moved.max()):
        block, each = block_of(st.k_bits), torch.arange(most, device=cols.device)
        begin = (-(-sizes // block)).sum(1) * block  # (H,) the first free slot
        held.reserve(part, int((begin + -(-moved // block) * block).max()))
        # columns of the entries that move, in order; heads that move fewer repeat their last, which changes no range
        order = torch.argsort((~cols).int(), dim=1, stable=True) + held.cursor - part.span
        column = order.gather(1, torch.minimum(each, (moved[:, None] - 1).clamp(min=0)))
        heads, at = (each < moved[:, None]).nonzero(as_tuple=True)
        slot, column_of = begin[heads] + at, column[heads, at]
        (k, k_start), (v, v_start) = held.stores(part)
        kv_head = torch.arange(part.at, part.at + part.heads, device=cols.device)[:, None]
        keys, values = held.k_window[kv_head, column], held.v_window[kv_head, column]
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
    cols = ~held.hidden[part.kv_heads, held.slots + held.cursor - part.span : held.slots + held.cursor]
    part.span -= int(cols.any(0).int().argmax()) if bool(cols.any()) else part.span


def align(held: Layout, part: Part) -> None:
    """Close the gaps of a part's residual window: it then takes as many columns as the longest of its KV heads."""
    assert held.where is not None
    begin = held.cursor - part.span
    live = ~held.hidden[part.kv_heads, held.slots + begin : held.slots + held.cursor]
    most = int(live.sum(1).max()) if part.span else 0
    if most == part.span:
        return
    order = torch.argsort(live.int(), dim=1, stable=True)[:, part.span - most :]
    beside = held.hidden, held.where, held.accumulated
    for x, first in ((held.k_window, 0), (held.v_window, 0), *((x, held.slots) for x in beside)):
        if x is not None:
            mine = x[part.kv_heads, first + begin : first + held.cursor]
            at = order if x.ndim == 2 else order[..., None].expand(-1, -1, x.shape[2])
            mine[:, part.span - most :] = mine.gather(1, at)
            mine[:, : part.span - most] = 1 if x is held.hidden else 0
    part.span = most


def _archive(store: PackedStore, head: int, sizes: Tensor) -> None:
    """Merge the two oldest groups of one KV head into the archive, and update its group sizes (C,)."""
    assert store.scale_of is not None and store.widened is not None
    bits, (n, m) = store.bits, sizes[:2].tolist()
    first = -(-n // BLOCK) * BLOCK  # slot of the second group
    step, zero, grown = store.step[head].float(), store.zero[head].float(), store.widened[head]
    top = zero + step * (2**bits - 1)
    codes = unpack(store.x[head, :n], bits)
    old = zero[0] + codes * step[0]
    new = zero[1] + unpack(store.x[head, first : first + m], bits) * step[1]
    scale = store.step[head, 0].clone(), store.zero[head, 0].clone()
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
    store.x[head, :n] = pack_codes(codes, bits)
    store.x[head, first : first + m] = pack_codes(encode(new, *scale, bits), bits)
    for x, mine in zip((store.step[head], store.zero[head]), scale, strict=True):
        x[:-1] = x[1:].clone()
        x[0] = mine
    sizes[:-1] = sizes[1:].clone()
    sizes[0], sizes[-1] = n + m, 0
    of = store.scale_of[head]
    of.copy_((of - 1).clamp(min=0))
