"""RippleKV's profile: how far a disturbance of one layer's cached values reaches the model's output.

An example is a prefix and an evaluation window W. For one layer at a time v~ = v + alpha ||v||_2 eps, eps ~ N(0, I), on
the prefix positions that the base method may evict (RippleKV eq. 6); the response is the mean over W of
KL(P || Q_l) (eq. 7). The same run with the base method's eviction in place of the noise gives the damage D_l (eq. 1).
All layers are measured in one sweep (`moend.calibration.sweep`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moend.cache import Prefilled, attention_of, prefill
from moend.cache.compressed import OBSERVATIONS
from moend.cache.layer_kv import gather
from moend.cache.select import Selector
from moend.calibration.kl import Stack
from moend.calibration.sensitivity import attention_blocks, kept_tokens
from moend.calibration.sweep import Base, Change, Sweep
from moend.errors import UserError
from moend.hf.rope import depends_on_length

VERSION = 1
RESAMPLES = 2000
SPLITS = 50  # pairs of disjoint subsets of the examples


@dataclass(frozen=True)
class Noise:
    """relative = alpha sqrt(d), the expected size of the noise in units of ||v||; its seed."""

    relative: float
    seed: int = 0


@dataclass(frozen=True)
class Profile:
    """Responses of N examples in L layers, float64, to each of `noises`; D at each of `keeps`, where asked for.

    response (V, N, L): KL at the output, nats. local (V, N, L): ||a~ - a||_2 / ||a||_2 of the layer's own attention
    output, averaged over the window. damage (K, N, L): KL at the output, nats.
    """

    noises: tuple[Noise, ...]
    keeps: tuple[float, ...]
    response: Tensor
    local: Tensor
    damage: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """As an artefact stores it: the first noise is the profile, the others its stability."""
        return {
            "response": self.response[0].contiguous(),
            "local": self.local[0].contiguous(),
            "stability": self.response[1:].contiguous(),
            "damage": self.damage,
        }


@torch.no_grad()
def profile(
    model: Any,
    input_ids: Tensor,
    window: int,
    base: Base,
    *,
    noises: Sequence[Noise] = (Noise(0.3),),
    draws: int = 1,
    keeps: Sequence[float] = (),
    tokens_at_once: int = 4096,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Profile a model on input_ids (N, P + window), no padding: prefixes of P tokens and the windows that follow.

    draws: noise vectors per layer and example, averaged. keeps: shares of the prefix that the base method keeps for the
    damage. tokens_at_once bounds a sweep (rows x window). progress(done, all) is called after each example.
    """
    count, length = input_ids.shape
    prefix = length - window
    if window < 1 or prefix < 1:
        raise UserError(f"a ripple profile needs a prefix and a window, got {prefix} and {window} tokens")
    recent = base.recent if isinstance(base.recent, int) else int(base.recent * prefix)
    if prefix <= base.n_sink + recent:
        raise UserError(
            f"calibration.ripple.prefix ({prefix}) must be longer than the {base.n_sink + recent} tokens that the "
            "method protects: nothing could be evicted"
        )
    if keeps and base.scorer.statistics:
        raise UserError(f"the damage of scorer {base.scorer.name} is not measured: it needs a calibration of its own")
    if keeps and (odd := set(base.scorer.observes) - set(OBSERVATIONS)):
        raise UserError(f"the damage of scorer {base.scorer.name} is not measured: it needs {', '.join(sorted(odd))}")
    if depends_on_length(model):
        raise UserError(f"{type(model).__name__} turns keys by an angle that depends on the length: no ripple profile")
    kinds = [(v, noise) for v, noise in enumerate(noises)]
    blocks = attention_blocks(model)
    response = torch.zeros(len(noises), count, len(blocks), dtype=torch.float64)
    local, damage = torch.zeros_like(response), response.new_zeros(len(keeps), *response.shape[1:])
    layers = response.shape[2]
    wanted: dict[str, Any] = {}
    if keeps:  # nobody else asks the scorer
        wanted = {"last_queries": base.scorer.last_queries, "observe": base.scorer.observes}
    with attention_of(model):
        stack = Stack(model)
        stack.check(input_ids[:1, :16])
        for n in range(count):
            ids = input_ids[n : n + 1].to(stack.device)
            done = prefill(model, ids[:, :prefix], **wanted)
            caches = [(x.keys[0], x.values[0]) for x in done.layers]
            sweep = Sweep(stack, caches, ids[:, prefix:])
            changes: list[list[Callable[[], Change]]] = [[] for _ in range(layers)]
            targets: list[list[tuple[Tensor, int]]] = [[] for _ in range(layers)]  # where each change's KL goes
            for layer in range(layers):
                for v, noise in kinds:
                    for draw in range(draws):
                        changes[layer].append(partial(_disturb, caches[layer], base, noise, layer, n, draw))
                        targets[layer].append((response[v], v))
                for k, keep in enumerate(keeps):
                    selector = Selector(base.scorer, layer, base.n_sink, base.recent, blocks[layer].scaling, seed=n)
                    changes[layer].append(partial(_evict, done, selector, kept_tokens(keep, prefix)))
                    targets[layer].append((damage[k], -1))
            for layer, change, divergence, moved in sweep.run(changes, max(tokens_at_once // window, 1)):
                where, v = targets[layer][change]
                where[n, layer] += divergence / (draws if v >= 0 else 1)
                if v >= 0:
                    local[v, n, layer] += moved / draws
            if progress is not None:
                progress(n + 1, count)
    return Profile(tuple(noises), tuple(keeps), response, local, damage)


def _disturb(cache: tuple[Tensor, Tensor], base: Base, noise: Noise, layer: int, example: int, draw: int) -> Change:
    return Change(cache[0], disturbed(cache[1], base, noise, layer, example, draw))


def _evict(prefilled: Prefilled, selector: Selector, keep: int) -> Change:
    keys, values, _ = prefilled.entries(selector.layer, 0)
    at = torch.arange(keys.shape[1], device=keys.device)
    kept = selector.best(prefilled.scores(selector, "base", 0), at, len(at), min(keep, len(at)))
    return Change(*gather(keys, values, at, kept))


def disturbed(values: Tensor, base: Base, noise: Noise, layer: int, example: int, draw: int) -> Tensor:
    """values (H, P, d) with v + alpha ||v||_2 eps where the base method may evict; eps is drawn on the CPU, seeded."""
    _, length, dim = values.shape
    seed = ((noise.seed * 1_000_003 + layer) * 1_000_003 + example) * 1_000_003 + draw
    generator = torch.Generator().manual_seed(seed % 2**63)
    recent = base.recent if isinstance(base.recent, int) else int(base.recent * length)
    start, stop = base.n_sink, length - recent
    part = values[:, start:stop].float()
    eps = torch.randn(part.shape, generator=generator).to(values.device)
    out = values.clone()
    size = torch.linalg.vector_norm(part, dim=-1, keepdim=True)
    out[:, start:stop] = (part + noise.relative / dim**0.5 * size * eps).to(values.dtype)
    return out


def correlation(
    signal: npt.NDArray[np.float64], damage: npt.NDArray[np.float64], *, seed: int = 0
) -> dict[str, float | None]:
    """|Spearman| over layers of two signals' means over examples, (N, L) each, with a 95 % bootstrap over examples.

    A signal without examples, (1, L), as depth is, stays as it is. {"value", "low", "high"}; None where a signal is
    constant or there are fewer than 3 layers; the bounds where there is one example.
    """
    if damage.shape[1] < 3 or np.ptp(signal.mean(0)) == 0 or np.ptp(damage.mean(0)) == 0:
        return {"value": None, "low": None, "high": None}
    from scipy import stats  # slow to import, and only here and below it is needed

    value = abs(float(stats.spearmanr(signal.mean(0), damage.mean(0)).statistic))
    count = len(damage)
    if count < 2:
        return {"value": value, "low": None, "high": None}
    pick = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    a = signal[pick].mean(1) if len(signal) == count else np.broadcast_to(signal.mean(0), (RESAMPLES, signal.shape[1]))
    ra, rb = stats.rankdata(a, axis=1), stats.rankdata(damage[pick].mean(1), axis=1)
    ra, rb = ra - ra.mean(1, keepdims=True), rb - rb.mean(1, keepdims=True)
    norm = np.sqrt((ra**2).sum(1) * (rb**2).sum(1))
    found = np.abs((ra * rb).sum(1)[norm > 0] / norm[norm > 0])
    low, high = (float(x) for x in np.quantile(found, [0.025, 0.975])) if len(found) else (None, None)
    return {"value": value, "low": low, "high": high}


def summary(tensors: dict[str, Tensor], noises: Sequence[Noise], keeps: Sequence[float]) -> dict[str, Any]:
    """What an artefact's tensors say, JSON-able: rank correlations with the damage, and the profile's stability.

    damage: per keep, |Spearman| of output response, local response and depth with D. stability: Spearman of the profile
    with that under each further noise, of the profiles of the two halves of the examples, and of the profiles of n
    examples and n others, n = 1, 2, 4 ... (mean over random pairs of subsets): how many examples it takes.
    """
    response, local = tensors["response"].numpy(), tensors["local"].numpy()
    depth = np.arange(response.shape[1], dtype=np.float64)[None]
    damage = {
        f"{keep:g}": {
            "output": correlation(response, d.numpy()),
            "local": correlation(local, d.numpy()),
            "depth": correlation(depth, d.numpy()),
            "mean": [float(x) for x in d.mean(0)],
        }
        for keep, d in zip(keeps, tensors["damage"], strict=True)
    }
    stability = {
        f"noise {noise.relative:g}, seed {noise.seed}": _spearman(response.mean(0), other.numpy().mean(0))
        for noise, other in zip(noises[1:], tensors["stability"], strict=True)
    }
    if len(response) > 1:
        stability["even against odd examples"] = _spearman(response[::2].mean(0), response[1::2].mean(0))
    n = 1
    while 2 * n <= len(response):
        stability[f"{n} against {n} other example{'s' * (n > 1)}"] = _agreement(response, n)
        n *= 2
    return {"damage": damage, "stability": stability}


def _agreement(response: npt.NDArray[np.float64], n: int) -> float | None:
    """Mean Spearman of the profiles of n examples and of n others, over `SPLITS` seeded pairs of subsets."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(SPLITS):
        order = rng.permutation(len(response))
        found.append(_spearman(response[order[:n]].mean(0), response[order[n : 2 * n]].mean(0)))
    known = [r for r in found if r is not None]
    return float(np.mean(known)) if known else None


def _spearman(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float | None:
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    from scipy import stats

    return float(stats.spearmanr(a, b).statistic)
