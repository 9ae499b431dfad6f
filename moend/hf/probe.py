"""What a loaded model's attention really asks of its cache.

`shape_of` runs two tokens through the model with layers that only look. What cannot be compressed is refused here,
while binding, by name and with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from moend.budget import Arch
from moend.errors import UserError
from moend.hf.attention import AttentionRule, attention_of, causal
from moend.hf.cache_layers import CacheLayer, Turn
from moend.hf.config import arch_of, cache_argument, decoder_of


@dataclass(frozen=True)
class Shape:
    """What a model's cache looks like, seen on the model itself."""

    arch: Arch  # layers, heads and positions of the model
    rules: tuple[AttentionRule, ...]  # of each layer


class _Look(CacheLayer):
    """Attends to a few tokens and remembers what it was asked."""

    def __init__(self, turn: Turn):
        super().__init__(turn)
        self.held: tuple[Tensor, Tensor] | None = None
        self.heads = 0
        self.rule: AttentionRule | None = None

    def take(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the only keys and values there are."""
        if self.held is not None:
            raise UserError("it runs its layers several times for each token")
        self.held = keys, values
        return keys, values

    def answer(self, query: Tensor, rule: AttentionRule) -> Tensor:
        """Plain attention."""
        assert self.held is not None
        self.rule, self.heads = rule, query.shape[1]
        return causal(query, *self.held, None, rule)

    def get_seq_length(self) -> int:
        """Nothing came before."""
        return 0


_seen: WeakKeyDictionary[Any, Shape] = WeakKeyDictionary()


def shape_of(model: Any) -> Shape:
    """What each layer of a loaded model asks of its cache; looked at once per model.

    UserError, one line with the model's name and the reason, for a model whose cache moend cannot hold.
    """
    if model not in _seen:
        _seen[model] = _look(model)
    return _seen[model]


@torch.no_grad()
def _look(model: Any) -> Shape:
    name, arch, turn = type(model).__name__, arch_of(model.config), Turn()
    layers = [_Look(turn) for _ in range(arch.layers)]
    ids = torch.ones(1, 2, dtype=torch.long, device=model.device)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    at = torch.arange(2, device=model.device)[None]
    with attention_of(model):
        try:
            cache = {cache_argument(model): Cache(layers=layers)}
            ours = decoder_of(model)(**given, position_ids=at, use_cache=True, **cache)[0]
            turn.ended()
            own = decoder_of(model)(**given, use_cache=False)[0]
        except UserError as e:
            raise UserError(f"{name} is not supported: {e}") from None
        except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as e:
            why = (str(e).splitlines() or [type(e).__name__])[0]
            raise UserError(f"{name} is not supported: it does not run with moend's attention ({why})") from e
    if not torch.allclose(own.float(), ours.float(), atol=1e-2 * float(own.float().abs().max())):
        raise UserError(f"{name} is not supported: it does not count positions from 0")
    rules = []
    for index, layer in enumerate(layers):
        if layer.held is None or layer.rule is None:
            raise UserError(f"{name} is not supported: layer {index} keeps no keys and values of its own")
        keys, values = layer.held
        found = {"q_heads": layer.heads, "kv_heads": keys.shape[1], "head_dim": keys.shape[3]}
        if wrong := [f"{k} {v} instead of {getattr(arch, k)}" for k, v in found.items() if v != getattr(arch, k)]:
            raise UserError(f"{name} is not supported: layer {index} has {', '.join(wrong)}")
        if keys.shape != values.shape:
            widths = f"{keys.shape[3]} and {values.shape[3]}"
            raise UserError(f"{name} is not supported: its keys and values have different widths ({widths})")
        rules.append(layer.rule)
    windows = tuple(r.window if r.window is not None and r.window < arch.max_positions else None for r in rules)
    if windows != arch.each_window:
        told = f"its config tells windows {arch.windows}, its layers have {windows}"
        raise UserError(f"{name} is not supported: {told}")
    return Shape(arch, tuple(rules))
