"""How the residual window of a layer moves on: its oldest entries are packed, its columns are freed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moend.cache.decode import groups
from moend.cache.decode.part import Part
from moend.cache.decode.stores import SPARE
from moend.cache.packing import Packed, quantise_k, quantise_v

if TYPE_CHECKING:
    from moend.cache.decode.layout import Layout


def pack(held: Layout, part: Part, count: int) -> None:
    """Move the oldest `count` entries of a part from the residual window to its stores, and pack them."""
    if part.flat:
        before = held.bytes_of(part)
        groups.pack(held, part)
        part.window_len -= count
        held.ledger.base[part.sequence] += held.bytes_of(part) - before
        held._where = None
        return
    st, begin = part.storage, held.cursor - part.window_len
    old = slice(begin, begin + count)
    saved = 0
    k: Packed | Tensor = held.k_window[part.kv_heads, old]
    v: Packed | Tensor = held.v_window[part.kv_heads, old]
    if st.k_bits < 16:
        packed = quantise_k(held.k_window[part.kv_heads, old], st.k_bits, st.group)
        saved += held.k_window[part.kv_heads, old].nbytes - sum(t.nbytes for t in packed.tensors())
        k = packed
    if st.v_bits < 16:
        packed = quantise_v(held.v_window[part.kv_heads, old], st.v_bits, st.channels)
        saved += held.v_window[part.kv_heads, old].nbytes - sum(t.nbytes for t in packed.tensors())
        v = packed
    slot = part.slots
    if part.n - part.window_len == part.first == slot:  # the first run ends on a whole group: it goes on
        part.first += count
    held.reserve(part, slot + count)
    held.k_stores[part.k[0]].write(part.k[1], slot, k)
    held.v_stores[part.v[0]].write(part.v[1], slot, v)
    held.hidden[part.kv_heads, slot : slot + count] = False
    held.hidden[part.kv_heads, held.slots + begin : held.slots + begin + count] = True
    if held.accumulated is not None:
        moved = held.accumulated[part.kv_heads, held.slots + begin : held.slots + begin + count]
        held.accumulated[part.kv_heads, slot : slot + count] = moved
        moved.zero_()
    part.slots, part.window_len = slot + count, part.window_len - count
    held.ledger.base[part.sequence] -= saved
    held._where = None


def shift(held: Layout, new: int) -> None:
    """Free at least `new` columns of the residual window.

    Parts at 16 bit move all of their window to the stores. The windows of the others move to the left end.
    """
    for part in held.parts:
        if not part.touch(held.clock).storage.quantised and part.window_len:
            pack(held, part, part.window_len)
        if part.flat:
            groups.align(held, part)
    keep = max(p.columns for p in held.parts)
    begin, size = held.cursor - keep, held.k_window.shape[1]
    spare = max(SPARE, new) if size < keep + new else size - keep
    hidden = held.hidden[:, held.slots + begin : held.slots + held.cursor]
    free = hidden.new_zeros(hidden.shape[0], spare)
    held.hidden = torch.cat([held.hidden[:, : held.slots], hidden, free], dim=1)
    for name in ("accumulated", "where"):
        if (x := getattr(held, name)) is not None:
            kept = x[:, held.slots + begin : held.slots + held.cursor]
            setattr(held, name, torch.cat([x[:, : held.slots], kept, x.new_zeros(free.shape)], dim=1))
    for name in ("k_window", "v_window"):
        x = getattr(held, name)
        setattr(held, name, torch.cat([x[:, begin : held.cursor], x.new_zeros(x.shape[0], spare, held.dim)], dim=1))
    held.cursor, held._where = keep, None
    held.look_ahead()
