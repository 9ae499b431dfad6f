"""Token agreement: whether a quantiser works on a model, before anything that it stores is believed.

All tokens are kept and stored as a method would, at 16 and at 8 bits; a model whose cache is right then says what it
says with its own cache. What a method loses by dropping entries or by fewer bits does not enter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from moend.budget import Arch
from moend.cache import LayerSpec, Selector, attention_of, cache_argument, compress, prefill
from moend.calibration.artefact import Artefact
from moend.calibration.base import Bench, Examples, Kind, Target
from moend.calibration.saved import Saved
from moend.layer_bytes import Storage
from moend.scoring import scorer

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
    saved: Saved | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """(len(bits), N, window) bool: where the most likely next token is that of the stock model.

    ids (N, prefix + window): the last `window` are fed, teacher-forced, on top of the cache of those before them.
    storage(cap, k_bits, v_bits) as `Method.storage`; dtype of 16-bit entries. saved: examples are its steps.
    """
    examples, length = ids.shape
    if not 1 <= window < length:
        raise ValueError(f"{length} tokens have no window of {window} with a prefix before it")
    layers, prefix = model.config.num_hidden_layers, length - window
    at = torch.arange(prefix, length, device=ids.device)[None]

    def measure(todo: list[int]) -> Iterator[dict[str, Tensor]]:
        for i in todo:
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
            yield {"hits": torch.stack(hits)}

    found = (saved or Saved()).steps([f"{i}" for i in range(examples)], measure, progress)
    return torch.stack([step["hits"] for step in found], dim=1)


def _keep_all(layer: int) -> Selector:
    return Selector(scorer("streaming"), layer, n_sink=0, recent=0, scaling=1.0, seed=0)


@dataclass(frozen=True, kw_only=True)
class AgreementSettings(Examples):
    """`calibration.agreement`: next tokens of the window are compared."""

    examples: int = 20  # texts
    prefix: int = 256  # tokens of each that are compressed
    window: int = 64

    where: ClassVar[str] = "calibration.agreement"
    least_prefix: ClassVar[int] = 1


class Agreement(Kind):
    """Token agreement of what a method's quantiser stores with the full cache."""

    settings = AgreementSettings
    vouches = True

    def concerns(self, method: Any) -> bool:
        """Every method that quantises."""
        return bool(method.quantises)

    def identity(self, target: Target) -> dict[str, Any]:
        """The examples, and how the method stores; not what it keeps."""
        s: AgreementSettings = target.examples(self.name)
        examples = {"examples": s.examples, "prefix": s.prefix, "window": s.window}
        return examples | {
            "method": target.held("group", "channels", "window"),
            "store_dtype": target.model.store_dtype,
        }

    def texts(self, target: Target) -> dict[str, Any]:
        """Those that examples are cut from."""
        return {"texts": target.examples(self.name).texts()}

    def measure(self, target: Target, bench: Bench) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensor hits (bits, N, window)."""
        s, loaded = target.examples(self.name), bench.loaded
        ids = s.ids(loaded)
        with bench.progress(f"token agreement on {loaded.spec.label}") as progress:
            hits = token_agreement(
                bench.model,
                bench.on(ids),
                s.window,
                target.method.storage,
                dtype=loaded.store_dtype,
                saved=bench.saved,
                progress=progress,
            )
        shares = {str(b): float(h.float().mean()) for b, h in zip(BITS, hits, strict=True)}
        return {"hits": hits.to("cpu").byte()}, s.said(ids) | {"tokens": hits[0].numel(), "agreement": shares}

    def figure(self, artefact: Artefact) -> dict[str, Any]:
        """The shares of tokens that agree, by bits."""
        return dict(artefact.info["agreement"])

    def doubt(self, artefact: Artefact) -> str | None:
        """A quantiser that does not keep what the model says."""
        for bits, share in artefact.info["agreement"].items():
            if share < LEAST:
                return (
                    f"with every token kept at {bits} bit, {share:.3f} of {artefact.info['tokens']} next tokens are "
                    f"full's, less than {LEAST}: its quantiser does not work on this model"
                )
        return None

    def work(self, target: Target, arch: Arch) -> float:
        """A pass for the full cache and one for each precision."""
        s = target.examples(self.name)
        return float(s.examples * (s.prefix + s.window) * (1 + len(BITS)))


KIND = Agreement()
