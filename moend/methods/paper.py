"""What `budget_protocol: paper` means where it differs from equal bytes: MoE-nD's exchange rate, lengths and shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moend.methods.spec import Method

if TYPE_CHECKING:
    from moend.methods.bind import BoundMethod

EXCHANGE = 4 / 1.5  # entries for one at 16 bit (MoE-nD section 5.1): 32 bits for K and V over 12 of K8/V4


def exchanged(method: Method) -> bool:
    """Whether the exchange rate holds for a method: its bits are routed, or K8/V4 everywhere."""
    return method.joint_bits or dict(method.precision) == {"k_bits": 8, "v_bits": 4}


def entries(method: Method, tokens: float) -> int | None:
    """Entries per KV head that a budget of `tokens` buys; None, of any other quantised method: as many as fit."""
    if exchanged(method):
        return max(int(tokens * EXCHANGE), 1)
    return None if method.quantises else max(int(tokens), 1)


def total(method: Method, bytes_: int) -> int:
    """Bytes that routed bits are solved under: those of the exchanged entries at 16 bit."""
    return round(bytes_ * EXCHANGE) if method.joint_bits else bytes_


def of_prompt(bound: BoundMethod) -> bool:
    """Whether shares are of each prompt's length, its output left out (`t_ref: sample`)."""
    sample = bound.method.make_allocator().t_ref == "sample"
    return bound.protocol == "paper" and bound.t_ref is None and sample


def length(bound: BoundMethod, tokens: int, new: int) -> int:
    """What shares of a sample are shares of."""
    return tokens if of_prompt(bound) else tokens + new


def keeps_whole(bound: BoundMethod) -> bool:
    """Whether a layer with a share of 1 never evicts, however long the output: where shares are chosen per layer."""
    return bound.protocol == "paper" and bound.method.make_allocator().chooses_shares
