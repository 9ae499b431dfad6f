"""Plans and the lattice that they are chosen from: what each layer keeps, and at how many bits.

A plan is a plain JSON file between calibration and evaluation. The lattice is every (kept share, K bits, V bits) that a
calibration measures and a joint allocator may give a layer (MoE-nD section 4).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moend.errors import UserError
from moend.layer_bytes import BITS

KEEPS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)  # MoE-nD's shares of tokens that stay
EXTRA_KEEPS = (0.05, 0.025, 0.0125)  # join the lattice in this order where a budget asks for it
ROUTED_BITS = (16, 8, 4)  # MoE-nD's choices for K and for V


@dataclass(frozen=True)
class Config:
    """What is done to one layer."""

    keep: float  # share of tokens that stay, in (0, 1]
    k_bits: int  # bits of a number of K
    v_bits: int  # bits of a number of V

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise UserError(f"a lattice's keep must be a share in (0, 1], got {self.keep}")
        if self.k_bits not in BITS or self.v_bits not in BITS:
            raise UserError(f"bits must be among {BITS}, got {self.k_bits} and {self.v_bits}")

    @property
    def name(self) -> str:
        """`keep_25`, `k8`, `v4`, `k8v4`, `keep_25_k8v4`, or `full`: what is done, named by what is kept."""
        keep = "" if self.keep == 1 else f"keep_{self.keep * 100:g}"
        bits = "".join(f"{side}{b}" for side, b in (("k", self.k_bits), ("v", self.v_bits)) if b != 16)
        return "_".join(x for x in (keep, bits) if x) or "full"


SINGLES = (  # the nine operations that change one axis alone
    *(Config(keep, 16, 16) for keep in KEEPS if keep < 1),
    Config(1.0, 8, 16),
    Config(1.0, 4, 16),
    Config(1.0, 16, 8),
    Config(1.0, 16, 4),
)


def lattice(keeps: Iterable[float] = KEEPS, bits: Iterable[int] = ROUTED_BITS) -> tuple[Config, ...]:
    """Every (keep, K bits, V bits): MoE-nD's 54 by default; bits may include 2."""
    choices = tuple(dict.fromkeys(bits))
    return tuple(Config(float(k), kb, vb) for k in dict.fromkeys(keeps) for kb in choices for vb in choices)


def extend_lattice(keeps: Sequence[float], steps: int = len(EXTRA_KEEPS)) -> tuple[float, ...]:
    """keeps and the first `steps` of 0.05, 0.025, 0.0125 that are below all of them."""
    return (*keeps, *(k for k in EXTRA_KEEPS[:steps] if k < min(keeps)))


@dataclass(frozen=True)
class LayerPlan:
    """One layer's share: `tokens` is its cap in entries per KV head, the newest included (null for ratio budgets).

    heads: the same for each KV head, where they differ; the layer's own values are then their means, the most bits.
    """

    keep: float  # share of t_ref entries that stay, in (0, 1]
    tokens: int | None
    k_bits: int = 16  # bits of a number of K
    v_bits: int = 16  # bits of a number of V
    head_tokens: tuple[int, ...] | None = None  # not used: a plan that sets it is refused
    heads: tuple[LayerPlan, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.keep, int | float) or not 0 < self.keep <= 1:
            raise UserError(f"a layer's keep must be a share in (0, 1], got {self.keep!r}")
        if self.tokens is not None and (not isinstance(self.tokens, int) or self.tokens < 1):
            raise UserError(f"a layer's tokens must be a whole number >= 1 or null, got {self.tokens!r}")
        if self.k_bits not in BITS or self.v_bits not in BITS:
            raise UserError(f"a layer's bits must be among {BITS}, got {self.k_bits!r} and {self.v_bits!r}")


@dataclass(frozen=True)
class RoutingPlan:
    """A plain JSON file between calibration and evaluation: what every layer keeps and at how many bits."""

    model: str  # the model's id
    revision: str  # the model's commit
    t_ref: int  # tokens that keep refers to, prompt and output together
    budget: str  # as typed
    protocol: str  # matched or paper
    solver: str  # which solver chose, or none
    objective: float | None  # summed S; None where nothing was summed
    gap: float | None  # how far the objective may be from the optimum, as a share of it; None: no solver
    layers: tuple[LayerPlan, ...]  # from the first layer to the last
    # eq1_bytes, resident_bytes after the prompt, and peak_bytes while new tokens come, of a prompt as long as t_ref
    # leaves room for
    predicted: dict[str, int] = field(default_factory=dict)
    schema: int = 1  # version of this form

    def to_json(self) -> str:
        """The file's text, stable and readable."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> RoutingPlan:
        """Read a plan; an unknown schema, a missing field or an odd one is refused by name."""
        try:
            data: dict[str, Any] = json.loads(text)
        except json.JSONDecodeError as e:
            raise UserError(f"{source} is not a plan: {e}") from None
        if not isinstance(data, dict) or data.get("schema") != 1:
            schema = data.get("schema") if isinstance(data, dict) else None
            raise UserError(f"{source} has plan schema {schema!r}; this version reads schema 1")
        try:
            layers = tuple(
                replace(_layer_plan(x), heads=None if x.get("heads") is None else tuple(map(_layer_plan, x["heads"])))
                for x in data.pop("layers")
            )
            return cls(layers=layers, **data)
        except (TypeError, KeyError, UserError) as e:
            raise UserError(f"{source} is not a plan of schema 1: {e}") from None


def _layer_plan(x: dict[str, Any]) -> LayerPlan:
    """A layer or a head of a file, without what it says of its heads."""
    tokens = x.get("head_tokens")
    return LayerPlan(**{**x, "heads": None, "head_tokens": None if tokens is None else tuple(tokens)})
