"""One base for the cache layers that capture, observe, compress or replay.

A layer marks the keys and values that its `update()` returns. The attention function finds the layer by that mark and
lets it compute (`attend`). Between the two calls it is this layer's turn; a model whose attention computes with
something else never comes back with the mark, and the next `update()` says so.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from moend.errors import UserError
from moend.hf.attention import NAME, AttentionRule, runs

UNATTENDED = (
    "the model's attention does not compute with the keys that its cache returned (it changes them first): "
    "moend cannot compress its cache"
)


def marked(layer: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Views of keys and values by which `moend.hf.attention` finds `layer`."""
    handed = keys.view_as(keys), values.view_as(values)
    for x in handed:
        x.moend_layer = layer  # type: ignore[attr-defined]
    return handed


class Turn:
    """Whose turn it is among the layers of one cache: the one that handed out keys and was not attended to yet."""

    def __init__(self) -> None:
        self.of: CacheLayer | None = None

    def ended(self) -> None:
        """UserError where a layer's keys were never attended to: ask after a pass."""
        if self.of is not None:
            raise UserError(UNATTENDED)


class Running:
    """A model's config, which says whether moend's attention function runs.

    A copy of a cache holds the same object, not a copy of the config: outside its context it must see that.
    """

    def __init__(self, config: Any):
        self.config = config

    def __deepcopy__(self, memo: dict[int, Any]) -> Running:
        return self

    def check(self) -> None:
        """UserError where the model runs another attention function."""
        if (found := runs(self.config)) != NAME:
            raise UserError(
                f"a compressed cache needs attn_implementation='{NAME}', the model runs '{found}': "
                "use the cache, and copies of it, inside moend.compress"
            )


class CacheLayer(CacheLayerMixin):
    """A cache layer that attends itself. Subclasses say what `take` and `answer` do, and how many tokens there are."""

    is_sliding = False

    def __init__(self, turn: Turn | None = None):
        """turn: shared by the layers of a cache (None: this layer is on its own)."""
        super().__init__()
        self.turn, self.is_initialized = Turn() if turn is None else turn, True

    @abstractmethod
    def take(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take in q new tokens (B, H, q, d); returns what the model is shown as keys and values."""

    @abstractmethod
    def answer(self, query: Tensor, rule: AttentionRule) -> Tensor:
        """query (B, H_q, q, d) of the newest q tokens -> attention output (B, H_q, q, d_v)."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate ahead."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take in q new tokens (B, H, q, d) and mark what is returned, so that attention finds this layer.

        UserError under gradients, and where the layer before was never attended to.
        """
        self.turn.ended()
        if torch.is_grad_enabled() and key_states.requires_grad:
            raise UserError("moend's caches are for inference: run the model under torch.no_grad()")
        self.turn.of = self
        return marked(self, *self.take(key_states, value_states))

    def attend(self, query: Tensor, rule: AttentionRule) -> Tensor:
        """Attention of the newest q tokens, once after each `update()`; UserError where layers share an update."""
        if self.turn.of is not self:
            raise UserError("the model attends to one cache layer several times, which moend does not support")
        self.turn.of = None
        return self.answer(query, rule)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns that the mask hook is asked for, offset)."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1
