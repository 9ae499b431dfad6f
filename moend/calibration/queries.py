"""Query statistics for scorer trig: where a head's queries point before RoPE turns them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moend.budget import Arch
from moend.cache import prefill
from moend.calibration.base import Bench, Kind, Target
from moend.errors import UserError
from moend.hf.config import text_config
from moend.hf.rope import pairs, rotary, unrotate


@dataclass(frozen=True)
class TrigStatistics:
    """Means over positions of a head's complex queries before RoPE (TriAttention): E[q_f] and E|q_f| of each pair f.

    Each is (L, H_q, d/2) float32. Pairs are (i, i + r) in the model's own layout; dimensions that a partial rotary
    leaves alone follow as pairs of their own (see moend.hf.rope.pairs).
    """

    mean_real: Tensor  # real part of E[q_f]
    mean_imag: Tensor  # imaginary part of E[q_f]
    mean_abs: Tensor  # E|q_f|

    @classmethod
    def measure(
        cls, model: Any, input_ids: Tensor, attention_mask: Tensor | None = None, *, chunk: int = 1024
    ) -> TrigStatistics:
        """From one prefill of input_ids (B, T), over all positions that are not padding."""
        if input_ids.shape[-1] == 0 or (attention_mask is not None and not attention_mask.any()):
            raise UserError("query statistics need at least one token of calibration text")
        filled = prefill(model, input_ids, attention_mask, last_queries=input_ids.shape[1], chunk=chunk)
        rows: list[tuple[Tensor, ...]] = []
        for index, layer in enumerate(filled.layers):
            if layer.queries is None:
                raise RuntimeError(f"prefill captured no queries in layer {index}")
            positions = filled.positions[:, -layer.queries.shape[2] :]
            rot = rotary(model, index)
            real, imag = pairs(unrotate(layer.queries, positions, rot), rot)
            keep = (positions >= 0).to(real.dtype)
            rows.append(tuple(_mean(x, keep) for x in (real, imag, torch.hypot(real, imag))))
        return cls(*(torch.stack(column).cpu() for column in zip(*rows, strict=True)))

    def tensors(self) -> dict[str, Tensor]:
        """As an artefact stores them."""
        return {"mean_real": self.mean_real, "mean_imag": self.mean_imag, "mean_abs": self.mean_abs}

    def layer(self, index: int) -> dict[str, Tensor]:
        """One layer's rows, each (H_q, d/2): a LayerView's `statistics`."""
        return {name: tensor[index] for name, tensor in self.tensors().items()}


def _mean(x: Tensor, keep: Tensor) -> Tensor:
    """The mean of x (B, Hq, T, r) over rows and positions with keep (B, T): (Hq, r)."""
    total = torch.einsum("bhtr,bt->hr", x, keep)
    return (total / keep.sum()).float()


class Queries(Kind):
    """Query statistics of the calibration prompt."""

    def work(self, target: Target, arch: Arch) -> float:
        """A few passes over the text."""
        return 5 * len(self.texts(target)["text"]) / 4  # characters of a token, roughly

    def measure(self, target: Target, bench: Bench) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """One prefill."""
        found = TrigStatistics.measure(bench.model, bench.prompt)
        info = {"tokens": bench.prompt.numel(), "text": self.texts(target)["text"], "rotation": rotation(bench.model)}
        return found.tensors(), info


def rotation(model: Any) -> dict[str, Any] | None:
    """The model's rotation as plain JSON: inv_freq (d/2 radians per position), dim, scaling (see moend.hf.rope.Rotary).

    None where layers rotate differently. Tools that read the statistics elsewhere need it.
    """
    layers = [rotary(model, i) for i in range(text_config(model.config).num_hidden_layers)]
    first = layers[0]
    if any(x.scaling != first.scaling or not torch.equal(x.inv_freq, first.inv_freq) for x in layers):
        return None
    return {"inv_freq": first.inv_freq.tolist(), "dim": first.dim, "scaling": first.scaling}


KIND = Queries()
