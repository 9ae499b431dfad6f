"""The state of a layer that decodes, as numbers and tensors, and a layer brought back to it.

What a method chose (schedules, scorers, rotary embeddings) is no part of the state: it comes from the layer that is
brought back, which the same method made of the same prompt. Everything else is kept as it lies, padding included, so
that what is computed next is the same to the bit.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moend.cache.packed_store import PackedStore
from moend.layer_bytes import Storage

if TYPE_CHECKING:
    from moend.cache.decode.layout import Layout

State = tuple[dict[str, Any], dict[str, Tensor]]  # numbers that JSON can hold, and tensors by name
COUNTERS = (
    *(
        "sequence",
        "at",
        "n",
        "window_len",
        "tokens_seen",
        "steps",
        "clock",
        "first",
        "slots",
        "summed",
        "asked",
        "span",
    ),
)
TENSORS = ("k_window", "v_window", "hidden", "accumulated", "where", "queries")


def state(held: Layout) -> State:
    """Everything that a layer holds."""
    parts, tensors = [], {}
    for i, part in enumerate(held.parts):
        told = {name: getattr(part, name) for name in COUNTERS}
        parts.append({**told, "heads": part.heads, "k": part.k, "v": part.v, "storage": asdict(part.storage)})
        if part.positions is not None:
            tensors[f"positions.{i}"] = part.positions
    for name in TENSORS:
        if (x := getattr(held, name)) is not None:
            tensors[name] = x
    facts: dict[str, Any] = {name: getattr(held, name) for name in ("sequences", "clock", "cursor", "slots")}
    for side in ("k_stores", "v_stores"):
        stores: list[PackedStore] = getattr(held, side)
        facts[side] = []
        for i, store in enumerate(stores):
            own, mine = store.state()
            facts[side].append(own)
            tensors |= {f"{side}.{i}.{name}": x for name, x in mine.items()}
    return {**facts, "parts": parts, "ledger": held.ledger.state()}, tensors


def restore(held: Layout, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Bring a layer of the same sequences to a state; ValueError where it is of others."""
    if [p.heads for p in held.parts] != [told["heads"] for told in facts["parts"]]:
        raise ValueError("the state is of other sequences")
    device = held.k_window.device
    mine = {name: x.to(device, copy=True) for name, x in tensors.items()}
    for i, (part, told) in enumerate(zip(held.parts, facts["parts"], strict=True)):
        for name in COUNTERS:
            setattr(part, name, told[name])
        part.k, part.v = (told["k"][0], told["k"][1]), (told["v"][0], told["v"][1])
        part.storage, part.positions = Storage(**told["storage"]), mine.get(f"positions.{i}")
    for name in ("sequences", "clock", "cursor", "slots"):
        setattr(held, name, facts[name])
    for name in TENSORS:
        setattr(held, name, mine.get(name))
    for side in ("k_stores", "v_stores"):
        made = []
        for i, own in enumerate(facts[side]):
            begin = f"{side}.{i}."
            made.append(PackedStore.restored(own, {k[len(begin) :]: x for k, x in mine.items() if k.startswith(begin)}))
        setattr(held, side, made)
    held.every = torch.arange(held.sequences * held.heads)
    held.ledger.restore(facts["ledger"])
    held._where = None
    held.look_ahead()
