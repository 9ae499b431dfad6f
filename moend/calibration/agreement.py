"""Token agreement: whether a quantiser works on a model, before anything that it stores is believed.

All tokens are kept and stored as a method would, at 16 and at 8 bits; a model whose cache is right then says what it
says with its own cache. What a method loses by dropping entries or by fewer bits does not enter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moend.budget import Storage
from moend.cache import LayerSpec, Selector, attention_of, cache_argument, compress, prefill
from moend.scoring import scorer

VERSION = 1  # raised when the numbers change
BITS = (16, 8)
LEAST = 0.98  # a quantiser below it at any of BITS is broken


@torch.no_grad()
def token_agreement(
    model: Any,
    ids: Tensor,
    window: int,
    storage: Callable[[int, int, int], Storage],
    *,
    dtype: torch.dtype,
    bits: Sequence[int] = BITS,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """(len(bits), N, window) bool: where the most likely next token is that of the stock model.

    ids (N, prefix + window): the last `window` are fed, teacher-forced, on top of the cache of those before them.
    storage(cap, k_bits, v_bits) as `Method.storage`; dtype of 16-bit entries.
    """
    examples, length = ids.shape
    if not 1 <= window < length:
        raise ValueError(f"{length} tokens have no window of {window} with a prefix before it")
    layers, prefix = model.config.num_hidden_layers, length - window
    at = torch.arange(prefix, length, device=ids.device)[None]
    found = []
    for i in range(examples):
        one = ids[i : i + 1]
        want = model(input_ids=one, use_cache=False).logits[:, prefix:].argmax(-1)
        filled = prefill(model, one[:, :prefix])
        hits = []
        for b in bits:
            specs = [LayerSpec(length, storage(length, b, b).whole)] * layers
            cache = compress(filled, specs, _keep_all, score_key=None, dtype=dtype)
            with attention_of(model):
                said = model(
                    input_ids=one[:, prefix:], position_ids=at, use_cache=True, **{cache_argument(model): cache}
                ).logits
            hits.append((said.argmax(-1) == want)[0])
        found.append(torch.stack(hits))
        if progress is not None:
            progress(i + 1, examples)
    return torch.stack(found, dim=1)


def _keep_all(layer: int) -> Selector:
    return Selector(scorer("streaming"), layer, n_sink=0, recent=0, scaling=1.0, seed=0)
