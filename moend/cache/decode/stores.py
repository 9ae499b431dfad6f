"""Which KV heads share a store, how many slots they need, and what a layer allocates for them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moend.cache.decode import groups
from moend.cache.layer_kv import LayerKV
from moend.cache.packing import Packed
from moend.layer_bytes import Storage, v_group

SPARE = 32  # free columns of a new residual window
PADDING = 2**15  # numbers that a part may be padded by before its KV heads get a store of their own

Kind = tuple[int, int, int]  # bits, group, and K scales per KV head (0: one per group of slots)


def buckets(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Sort sizes into buckets and return the indices in each.

    All of a bucket are padded to its longest. None is padded by more than the larger of its own size and `limit`.
    """
    made: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if made and sizes[made[-1][0]] - sizes[i] <= max(sizes[i], limit):
            made[-1].append(i)
        else:
            made.append([i])
    return made


def first_run(kv: LayerKV) -> tuple[int, int]:
    """Length of the first run of packed entries, and the slots that all packed entries take, per KV head.

    A run is a stretch of entries in neighbouring slots. Packed K starts a new run after a group that is not full.
    """
    group = kv.storage.group
    if kv.sizes is not None:
        return 0, groups.lay_out(kv.sizes.long(), groups.block_of(kv.storage.k_bits))[0].shape[1]
    old = kv.n - kv.window_len if kv.storage.quantised else kv.n
    if not kv.k_packed:
        return old, old
    first = kv.k_packed[0].codes.shape[-2]
    return first, -(-first // group) * group + sum(-(-p.codes.shape[-2] // group) * group for p in kv.k_packed[1:])


def _kind(storage: Storage, side: str, dim: int) -> Kind:
    """The kind of store that one side ("k" or "v") goes to."""
    if side == "v":
        return storage.v_bits, v_group(dim, storage.channels), 0
    if storage.k_bits == 16:
        return 16, 1, 0
    return storage.k_bits, groups.BLOCK if storage.scales else storage.group, storage.scales


def whole_piece(kv: LayerKV, side: str, slots: int) -> Packed | Tensor | None:
    """One side of the older entries as one tensor, if it fills `slots` exactly; None if it must be copied.

    A store that holds nothing else then takes the tensor over (`PackedStore.of`).
    """
    bits = kv.storage.k_bits if side == "k" else kv.storage.v_bits
    if kv.sizes is not None:
        return None
    if kv.n - (kv.window_len if kv.storage.quantised else 0) != slots or not slots:
        return None
    pieces: Sequence[Packed | Tensor]
    if bits == 16:
        pieces = [kv.k_window if side == "k" else kv.v_window]
    else:
        pieces = kv.k_packed if side == "k" else [kv.v_packed] if kv.v_packed else []
    held = [p.tensors() if isinstance(p, Packed) else (p,) for p in pieces]
    whole = len(held) == 1 and held[0][0].shape[1] == slots and all(t.is_contiguous() for t in held[0])
    return pieces[0] if whole else None


def sharing(shapes: Sequence[tuple[int, int, Storage]], side: str, dim: int) -> list[tuple[Kind, list[int]]]:
    """The stores of one side ("k" or "v"): for each its kind and the indices of the parts that share it.

    shapes: (KV heads, slots, storage) of each part. Parts share a store if they have one kind and similar lengths.
    """
    kinds: dict[Kind, list[int]] = {}
    for i, (_, _, storage) in enumerate(shapes):
        kinds.setdefault(_kind(storage, side, dim), []).append(i)
    return [
        (kind, sorted(members[j] for j in bucket))
        for kind, members in kinds.items()
        for bucket in buckets([shapes[i][1] for i in members], PADDING // (dim * max(shapes[i][0] for i in members)))
    ]


def window_columns(kvs: Sequence[LayerKV]) -> int:
    """Columns that a new residual window needs: the longest window of any sequence."""
    return max([x.window_len for x in kvs if x.storage.quantised], default=0)


def allocation(held: Sequence[tuple[LayerKV, ...]]) -> int:
    """Bytes that `Layout(held)` will allocate; held: for each sequence, its LayerKVs."""
    flat = [kv for kvs in held for kv in kvs]
    if not flat:
        return 0
    dim, size = flat[0].k_window.shape[-1], flat[0].dtype.itemsize
    shapes = [(r.heads, first_run(r)[1], r.storage) for r in flat]
    total_heads = sum(r.heads for r in flat)
    total, longest = 0, 0
    for side in ("k", "v"):
        for (bits, group, own), members in sharing(shapes, side, dim):
            heads, slots = sum(shapes[i][0] for i in members), max(shapes[i][1] for i in members)
            longest = max(longest, slots)
            if bits == 16:
                total += heads * slots * dim * size
            else:
                scales = (own or slots // group) * dim if side == "k" else slots * (dim // group)
                total += heads * (slots // group * 4 + dim) if own else 0  # whose scale blocks have, and the archive's
                total += heads * (slots * dim * bits // 8 + scales * 4)
    columns = window_columns(flat) + SPARE
    beside = 5 if any(r.accumulated is not None for r in flat) else 1  # the mask, and the accumulated attention
    positions = sum(r.positions.nbytes for r in flat if r.positions is not None and r.sizes is None)
    if any(r.sizes is not None for r in flat):
        beside += 4  # the position of each slot and column
    most = max((r.queries.shape[1] * r.queries.shape[2] for r in flat if r.queries is not None), default=0)
    total += total_heads * most * dim * size
    return total + 2 * total_heads * columns * dim * size + total_heads * (longest + columns) * beside + positions
