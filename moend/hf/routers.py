"""Routers of sparse mixture-of-experts models: which module routes in which layer, and its whole distribution.

transformers says of every MoE family which module's output holds the router's scores (`_can_record_outputs`). What it
does not say is whether they become gates by a softmax or by a sigmoid, or are gates already. The router's own outputs
tell: the weights it gives the chosen experts are, token by token, in proportion to their gates (normalised, scaled or
not), so of the readings below exactly one can fit. A router that no reading fits is refused, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moend.errors import UserError

Kind = Literal["softmax", "sigmoid"]

_READINGS: dict[str, tuple[Kind, Callable[[Tensor], Tensor]]] = {
    "softmax of logits": ("softmax", lambda x: x.softmax(-1)),
    "sigmoid of logits": ("sigmoid", torch.sigmoid),
    "probabilities": ("softmax", lambda x: x),
    "sigmoid scores": ("sigmoid", lambda x: x),
}
# Routers whose weights are not in proportion to their gates, or that return none: read off their definitions.
_KNOWN = {
    "DbrxRouter": "softmax of logits",
    "PhimoeTopKRouter": "softmax of logits",  # its weights come from a sparse mixer
    "Llama4Router": "sigmoid of logits",
}
_SETTINGS = {"softmax": "softmax of logits", "sigmoid": "sigmoid of logits"}


@dataclass(frozen=True)
class Routed:
    """What one router did with N tokens: gates (N, E) float32, before top-k, bias and normalisation; chosen (N, k)."""

    layer: int  # index of the layer
    gates: Tensor
    chosen: Tensor


@dataclass(frozen=True)
class Routing:
    """The routers of a model: by layer, and how their scores become gates."""

    modules: Mapping[int, nn.Module]  # the router of each layer that has one
    index: int  # which output holds the scores
    kind: Kind  # the function that makes gates of scores
    reading: str  # what the router's output holds
    top_k: int  # experts a token goes to, where the router itself does not say which

    @classmethod
    def of(cls, model: Any, ids: Tensor) -> Routing:
        """Find the routers and learn their reading from one pass over ids (1, t), a few dozen tokens of a real prompt.

        UserError for a dense model, for two routers in a layer, and where the reading is not certain.
        """
        modules, index = find(model)
        seen: list[tuple[Tensor, Tensor | None, Tensor | None]] = []
        hooks = [m.register_forward_hook(lambda _m, _a, out: seen.append(_parts(out, index))) for m in modules.values()]
        try:
            with torch.no_grad():
                model.base_model(input_ids=ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        router = next(iter(modules.values()))
        reading = read(seen) or _KNOWN.get(type(router).__name__) or _said(model)
        if reading is None:
            raise UserError(
                f"cannot tell how {type(router).__name__} of {type(model).__name__} turns its scores into gates: "
                "neither a softmax nor a sigmoid explains the weights it gives"
            )
        return cls(modules, index, _READINGS[reading][0], reading, _top_k(model, router))

    @contextmanager
    def recording(self, tell: Callable[[Routed], None]) -> Iterator[None]:
        """Call `tell` as each MoE layer routes, in order of layers."""
        gate = _READINGS[self.reading][1]

        def hook(layer: int) -> Callable[[nn.Module, Any, Any], None]:
            def heard(_module: nn.Module, _args: Any, out: Any) -> None:
                scores, chosen, _ = _parts(out, self.index)
                gates = gate(scores.float())
                if chosen is None:
                    chosen = gates.topk(self.top_k, dim=-1).indices
                tell(Routed(layer, gates, chosen))

            return heard

        hooks = [m.register_forward_hook(hook(layer)) for layer, m in self.modules.items()]
        try:
            yield
        finally:
            for h in hooks:
                h.remove()


def find(model: Any) -> tuple[dict[int, nn.Module], int]:
    """The router module of each MoE layer, in order, and the index of the scores in its output."""
    recorders: list[Any] = []
    for part in model.modules():
        spec = (getattr(type(part), "_can_record_outputs", None) or {}).get("router_logits")
        recorders += spec if isinstance(spec, list | tuple) else [spec] if spec is not None else []
    targets = {(getattr(r, "target_class", r), getattr(r, "index", 0)) for r in recorders}
    if not targets:
        raise UserError(
            f"{type(model).__name__} has no router that transformers can record: it is a dense model, or one whose "
            "routing cannot be read"
        )
    found: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        if not any(type(module) is target for target, _ in targets):
            continue
        if (at := re.search(r"\.(\d+)\.", f".{name}.")) is None:
            raise UserError(f"cannot tell the layer of router '{name}' of {type(model).__name__}")
        if int(at[1]) in found:
            raise UserError(f"layer {at[1]} of {type(model).__name__} has more than one router: not supported")
        found[int(at[1])] = module
    indices = {index for target, index in targets if any(type(m) is target for m in found.values())}
    if not found:
        raise UserError(f"{type(model).__name__} could have routers, but none of its layers has one")
    if len(indices) > 1 or len({type(m) for m in found.values()}) > 1:
        raise UserError(f"{type(model).__name__} has routers of several kinds: not supported")
    return dict(sorted(found.items())), indices.pop()


def read(outputs: list[tuple[Tensor, Tensor | None, Tensor | None]]) -> str | None:
    """The one reading that explains (scores (N, E), chosen (N, k), weights (N, k)) of every router, or None.

    With k >= 2 the weights must be in proportion to the gates in every token, with k = 1 equal to them. A second
    reading that fits as well (scores too small to tell) makes it None.
    """
    if any(chosen is None or weights is None for _, chosen, weights in outputs) or not outputs:
        return None
    fitting = []
    for name, (kind, gate) in _READINGS.items():
        worst = 0.0
        for scores, chosen, weights in outputs:
            assert chosen is not None and weights is not None
            gates = gate(scores.float())
            sums_to_one = float((gates.sum(-1) - 1).abs().max()) <= 1e-2
            if float(gates.min()) < 0 or float(gates.max()) > 1 or sums_to_one != (kind == "softmax"):
                worst = float("inf")
            else:
                ratio = weights.float() / gates.gather(-1, chosen).clamp(min=1e-20)
                spread = ratio.amax(-1) - ratio.amin(-1)
                off = spread / ratio.mean(-1) if ratio.shape[-1] > 1 else (ratio[:, 0] - 1).abs()
                # the weights were rounded to their own type
                worst = max(worst, float(off.max()) * 1e-3 / max(1e-3, 4 * torch.finfo(weights.dtype).eps))
        if worst <= 1e-3:
            fitting.append(name)
    return fitting[0] if len(fitting) == 1 else None


def _parts(out: Any, index: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scores (N, E), and of a router that returns them the chosen experts (N, k) and their weights (N, k)."""
    if isinstance(out, Tensor):
        return out.reshape(-1, out.shape[-1]), None, None
    scores = out[index].reshape(-1, out[index].shape[-1])
    others = [t.reshape(-1, t.shape[-1]) for i, t in enumerate(out) if i != index and isinstance(t, Tensor) and t.ndim]
    fit = [t for t in others if t.shape[0] == scores.shape[0] and t.shape[-1] <= scores.shape[-1]]
    chosen = next((t for t in fit if not t.is_floating_point() and t.dtype != torch.bool), None)
    weights = next((t for t in fit if t.is_floating_point() and chosen is not None and t.shape == chosen.shape), None)
    return scores, chosen, weights


def _top_k(model: Any, router: nn.Module) -> int:
    config = model.config.get_text_config(decoder=True)
    for part in (router, config, getattr(config, "ffn_config", None)):
        for name in ("top_k", "num_experts_per_tok", "moe_top_k", "top_k_experts", "moe_k"):
            if isinstance(k := getattr(part, name, None), int):
                return k
    raise UserError(f"cannot tell how many experts {type(router).__name__} chooses")


def _said(model: Any) -> str | None:
    """What the configuration says of the scoring function, if it does."""
    said = getattr(model.config.get_text_config(decoder=True), "scoring_func", None)
    return _SETTINGS.get(str(said))
