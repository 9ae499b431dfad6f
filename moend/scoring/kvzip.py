"""KVZip: what the model attends to while it repeats its context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moend.scoring.base import LayerView, Scorer

QUERY_BLOCK = 256  # queries whose attention is held at a time


@dataclass(frozen=True)
class KVZip(Scorer):
    """The most attention a context entry receives while the context is reconstructed (KVZip, arXiv 2505.23416).

    One replay of the prompt (`moend.replay`) gives the scores; all cells that need it share it. They are the largest
    attention over the queries of reconstruction prompt and repeated context and over the query heads that share a KV
    head, in (0, 1). What precedes the context and the first entries (sinks) score 3, so that they stay. What follows
    the context (the question, where it is visible) is not reconstructed and comes next: (1, 2], the newest highest.
    """

    observes = ("reconstruction",)
    at_decode = False

    def __call__(self, view: LayerView) -> Tensor:
        """(H, n) float32."""
        return view.observed["reconstruction"]


def attention_received(
    query: Tensor,
    before: Tensor,
    chunk: Tensor,
    own: Tensor,
    scaling: float,
    window: tuple[int, int, int] | None = None,
) -> Tensor:
    """The largest attention each entry of `chunk` receives from the queries of a reconstruction: (H, c) float32.

    query (H_q, q, d) are the newest q of the i repeated tokens whose keys are own (H, i, d), causal among themselves;
    before (H, s, d) are the sinks; chunk (H, c, d). Softmax over these three and nothing else. Memory grows with
    s + c + i times a block of queries. window: (width, first position of chunk, first position of own) of a sliding
    layer, whose queries see `width` positions; sinks are at 0 ... s - 1.
    """
    (heads, c, _), s, i, q = chunk.shape, before.shape[1], own.shape[1], query.shape[1]
    keys = torch.cat([before, chunk, own], dim=1)
    grouped = query.unflatten(0, (heads, -1)) * scaling  # (H, G, q, d)
    mine = torch.arange(i, device=query.device)
    best = chunk.new_zeros(heads, c, dtype=torch.float32)
    for start in range(0, q, QUERY_BLOCK):
        part = grouped[:, :, start : start + QUERY_BLOCK]
        me = mine[i - q + start : i - q + start + part.shape[2], None]
        logits = part @ keys[:, None].mT  # (H, G, b, s + c + i)
        logits[..., s + c :].masked_fill_(mine > me, -torch.inf)
        if window is not None:
            width, first, behind = window
            at = torch.cat([mine.new_tensor(range(s)), first + torch.arange(c, device=mine.device), behind + mine])
            logits.masked_fill_(behind + me - at >= width, -torch.inf)
        share = torch.softmax(logits, dim=-1, dtype=torch.float32)[..., s : s + c]
        best = torch.maximum(best, share.amax(dim=(1, 2)))
    return best


SCORER = KVZip
