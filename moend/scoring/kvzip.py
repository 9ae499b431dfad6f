"""KVZip: what the model attends to while it repeats its context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moend.scoring.base import LayerView

QUERY_BLOCK = 256  # queries whose attention is held at a time


@dataclass(frozen=True)
class KVZip:
    """The most attention a context entry receives while the context is reconstructed (KVZip, arXiv 2505.23416).

    The scores come from one extra pass over the prompt's cache (`moend.replay`), which every cell that needs it
    shares; the largest over the queries of reconstruction prompt and repeated context and over the query heads of a
    group, in (0, 1). What precedes the context and the first entries (sinks) are 3, so that they stay. What follows it
    (the question, where it is visible) was not reconstructed and is what comes next: it lies in (1, 2], newest highest.
    """

    name = "kvzip"
    per_head = True
    last_queries = 0
    observes = ("reconstruction",)
    at_decode = False
    statistics = None

    def __call__(self, view: LayerView) -> Tensor:
        """(B, H, n) float32, -inf at padding."""
        return torch.where(view.valid, view.observed["reconstruction"], -torch.inf)


def attention_received(
    query: Tensor,
    before: Tensor,
    chunk: Tensor,
    own: Tensor,
    scaling: float,
    window: tuple[int, int, int] | None = None,
) -> Tensor:
    """The largest attention each entry of `chunk` receives from the queries of a reconstruction: (B, H, c) float32.

    query (B, H_q, q, d) are the newest q of the i repeated tokens whose keys are own (B, H, i, d), causal among
    themselves; before (B, H, s, d) are the sinks. Softmax over these three and nothing else. Memory grows with
    s + c + i times a block of queries. window: (width, first position of chunk, first position of own) of a sliding
    layer, whose queries see `width` positions; sinks are at 0 ... s - 1.
    """
    (batch, heads, c, _), s, i, q = chunk.shape, before.shape[2], own.shape[2], query.shape[2]
    keys = torch.cat([before, chunk, own], dim=2)
    grouped = query.unflatten(1, (heads, -1)) * scaling  # (B, H, G, q, d)
    mine = torch.arange(i, device=query.device)
    best = chunk.new_zeros(batch, heads, c, dtype=torch.float32)
    for start in range(0, q, QUERY_BLOCK):
        part = grouped[:, :, :, start : start + QUERY_BLOCK]
        me = mine[i - q + start : i - q + start + part.shape[3], None]
        logits = part @ keys[:, :, None].mT  # (B, H, G, b, s + c + i)
        logits[..., s + c :].masked_fill_(mine > me, -torch.inf)
        if window is not None:
            width, first, behind = window
            at = torch.cat([mine.new_tensor(range(s)), first + torch.arange(c, device=mine.device), behind + mine])
            logits.masked_fill_(behind + me - at >= width, -torch.inf)
        share = torch.softmax(logits, dim=-1, dtype=torch.float32)[..., s : s + c]
        best = torch.maximum(best, share.amax(dim=(2, 3)))
    return best


SCORER = KVZip
