"""Where the kept entries of a prompt lie, as its record holds it."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Shares = npt.NDArray[np.float64]


def shares(kept: Mapping[str, Any]) -> Shares:
    """A record's `kept` as shares in [0, 1]: (1, tokens) over all layers and KV heads, (layers, tokens), or
    (layers, KV heads, tokens).

    Records from before `engine.kept` have (layers, pieces of the prompt).
    """
    if "shares" not in kept:
        return np.array([list(bytes.fromhex(line)) for line in kept["layers"]], dtype=np.float64) / 255
    shape = {"tokens": (1,), "layers": (kept["layers"],), "heads": (kept["layers"], kept["heads"])}[kept["by"]]
    flat = np.frombuffer(zlib.decompress(base64.b64decode(kept["shares"])), dtype=np.uint8)
    return flat.reshape(*shape, kept["tokens"]) / 255


def by_layer(kept: Mapping[str, Any], most: int = 128) -> Shares:
    """(layers, at most `most` equal pieces of the prompt): the share of KV heads and entries kept there, on average.

    One line where a record does not tell its layers apart.
    """
    found = shares(kept)
    found = found.mean(1) if found.ndim == 3 else found
    tokens = found.shape[1]
    bins = min(most, tokens)
    begins = np.searchsorted(np.arange(tokens) * bins // tokens, np.arange(bins))
    return np.asarray(np.add.reduceat(found, begins, axis=1) / np.diff([*begins, tokens]))


def segments(kept: Mapping[str, Any]) -> dict[str, float] | None:
    """Share of the entries that stay in each segment of a prompt, over all layers and KV heads: before, context, after.

    before: BOS, a system prompt, words of the task. after: the question, as far as it was compressed. A segment without
    tokens is left out. None where the record does not say where the context lies.
    """
    if (context := kept.get("context")) is None:
        return None
    found = shares(kept)
    start, stop = context
    ends = {"before": (0, start), "context": (start, stop), "after": (stop, found.shape[-1])}
    return {name: float(found[..., a:b].mean()) for name, (a, b) in ends.items() if b > a}
