"""Plans: what each layer keeps, and at how many bits; a plain JSON file between calibration and evaluation."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field, replace
from typing import Any

from moend.errors import UserError
from moend.layer_bytes import BITS


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
