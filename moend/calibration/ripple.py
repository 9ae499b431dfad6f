"""RippleKV's profile: how far a disturbance of one layer's cached values reaches the model's output.

An example is a prefix and an evaluation window W. For one layer at a time v~ = v + alpha ||v||_2 eps, eps ~ N(0, I), on
the prefix positions that the base method may evict (RippleKV eq. 6); the response is the mean over W of
KL(P || Q_l) (eq. 7). The same run with the base method's eviction in place of the noise gives the damage D_l (eq. 1).

The prefix is computed once. Of the layers only the window is run again, all of them in one sweep up the stack: layer l
takes the rows disturbed below it and one more, which starts from the undisturbed window and is disturbed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from moend.cache import attention_of, prefill
from moend.cache.cache import OBSERVATIONS
from moend.cache.select import Selector
from moend.calibration.kl import Stack
from moend.calibration.sensitivity import attention_blocks, kept_tokens
from moend.errors import UserError
from moend.rope import depends_on_length
from moend.scoring import Scorer

VERSION = 1
RESAMPLES = 2000


@dataclass(frozen=True)
class Base:
    """The method whose budgets will follow the profile: its scorer, and what it protects."""

    scorer: Scorer
    n_sink: int
    recent: int


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
    if prefix <= base.n_sink + base.recent:
        raise UserError(
            f"calibration.ripple.prefix ({prefix}) must be longer than the {base.n_sink + base.recent} tokens that the "
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
            sweep = _Sweep(stack, caches, ids[:, prefix:])
            changes: list[list[_Change]] = [[] for _ in range(layers)]
            targets: list[list[tuple[Tensor, int]]] = [[] for _ in range(layers)]  # where each change's KL goes
            for layer in range(layers):
                for v, noise in kinds:
                    for draw in range(draws):
                        values = disturbed(caches[layer][1], base, noise, layer, n, draw)
                        changes[layer].append(_Change(values=values))
                        targets[layer].append((response[v], v))
                for k, keep in enumerate(keeps):
                    selector = Selector(base.scorer, layer, base.n_sink, base.recent, blocks[layer].scaling, seed=n)
                    scores = done.scores(selector, repr(base), 0)
                    at = torch.arange(prefix, device=ids.device)
                    kept = selector.best(scores, at, prefix, min(kept_tokens(keep, prefix), prefix))
                    changes[layer].append(_Change(kept=kept))
                    targets[layer].append((damage[k], -1))
            for layer, change, divergence, moved in sweep.run(changes, max(tokens_at_once // window, 1)):
                where, v = targets[layer][change]
                where[n, layer] += divergence / (draws if v >= 0 else 1)
                if v >= 0:
                    local[v, n, layer] += moved / draws
            if progress is not None:
                progress(n + 1, count)
    return Profile(tuple(noises), tuple(keeps), response, local, damage)


def disturbed(values: Tensor, base: Base, noise: Noise, layer: int, example: int, draw: int) -> Tensor:
    """values (H, P, d) with v + alpha ||v||_2 eps where the base method may evict; eps is drawn on the CPU, seeded."""
    _, length, dim = values.shape
    seed = ((noise.seed * 1_000_003 + layer) * 1_000_003 + example) * 1_000_003 + draw
    generator = torch.Generator().manual_seed(seed % 2**63)
    start, stop = base.n_sink, length - base.recent
    part = values[:, start:stop].float()
    eps = torch.randn(part.shape, generator=generator).to(values.device)
    out = values.clone()
    size = torch.linalg.vector_norm(part, dim=-1, keepdim=True)
    out[:, start:stop] = (part + noise.relative / dim**0.5 * size * eps).to(values.dtype)
    return out


@dataclass(frozen=True)
class _Change:
    """What is done to one layer's prefix: other values (H, P, d), or all but the entries `kept` (H or 1, k) hidden."""

    values: Tensor | None = None
    kept: Tensor | None = None


class _Prefix:
    """Stands in for one layer's cache while a window runs: all rows see its prefix, the last ones changed."""

    def __init__(self, keys: Tensor, values: Tensor, changes: Sequence[_Change]):
        self.keys, self.values, self.changes = keys, values, changes
        self.own: tuple[Tensor, Tensor] | None = None

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """keys, values (rows, H, w, d) of the window; `moend.cache.attention` finds this object at the keys."""
        self.own = keys, values
        handed = keys.view(keys.shape)
        handed.moend_layer = self  # type: ignore[attr-defined]
        return handed, values

    def attend(self, query: Tensor, scaling: float, window: int | None) -> Tensor:
        """query (rows, H_q, w, d) -> (rows, H_q, w, d)."""
        assert self.own is not None
        rows, heads, w = query.shape[:3]
        prefix = self.keys.shape[1]
        me = torch.arange(prefix, prefix + w, device=query.device)[:, None]
        at = torch.arange(prefix + w, device=query.device)
        sees = at <= me
        if window is not None:
            sees &= me - at < window
        k = torch.cat([self.keys.expand(rows, -1, -1, -1), self.own[0]], dim=2)
        v = torch.cat([self.values.expand(rows, -1, -1, -1), self.own[1]], dim=2)
        masks = sees.expand(len(self.changes), heads, -1, -1).clone()
        for i, change in enumerate(self.changes, rows - len(self.changes)):
            if change.values is not None:
                v[i, :, :prefix] = change.values
            if change.kept is not None:
                held = torch.zeros(len(change.kept), prefix, dtype=torch.bool, device=query.device)
                held.scatter_(1, change.kept, True)
                mask = masks[i - rows + len(self.changes)]
                mask[..., :prefix] &= held.expand(len(self.keys), -1).repeat_interleave(heads // len(self.keys), 0)[
                    :, None
                ]
        same = rows - len(self.changes)
        gqa = heads != len(self.keys)
        out = [
            F.scaled_dot_product_attention(query[a:b], k[a:b], v[a:b], attn_mask=mask, scale=scaling, enable_gqa=gqa)
            for a, b, mask in ((0, same, sees), (same, rows, masks))
            if b > a
        ]
        return torch.cat(out)


class _Sweep:
    """A window above an undisturbed prefix, ready to be run again with any layer changed."""

    def __init__(self, stack: Stack, caches: Sequence[tuple[Tensor, Tensor]], ids: Tensor):
        self.stack, self.caches = stack, caches
        self.start = caches[0][0].shape[1]
        self.blocks = attention_blocks(stack.model)
        self.inputs = [stack.base.embed_tokens(ids)]
        self.attention: list[Tensor] = []  # each layer's own attention output (w, hidden)
        for layer in range(len(caches)):
            states, attended = self._layer(layer, self.inputs[-1], ())
            self.inputs.append(states)
            self.attention.append(attended[0].float())
        self.reference = stack.log_probabilities(self.inputs[-1][0], ids.shape[1])

    def run(self, changes: Sequence[Sequence[_Change]], rows: int) -> Any:
        """Yield (layer, index of the change, KL at the output, relative change of the layer's attention output).

        changes: for each layer. At most `rows` windows are under way at once.
        """
        flat = [(layer, i) for layer, each in enumerate(changes) for i in range(len(each))]
        for begin in range(0, len(flat), rows):
            part = flat[begin : begin + rows]
            moved: list[float] = []
            states = self.inputs[0][:0]
            for layer in range(part[0][0], len(self.caches)):
                here = [changes[layer][i] for at, i in part if at == layer]
                states = torch.cat([states, self.inputs[layer].expand(len(here), -1, -1)])
                states, attended = self._layer(layer, states, here)
                if here:
                    own = self.attention[layer]
                    size = torch.linalg.vector_norm(own, dim=-1)
                    error = torch.linalg.vector_norm(attended[-len(here) :].float() - own, dim=-1)
                    # as in the sensitivity table: where the output is 0, any change counts as 1
                    moved += torch.where(size > 0, error / size, (error > 0).float()).mean(-1).tolist()
            for (layer, i), final, change in zip(part, states, moved, strict=True):
                yield layer, i, self.stack.divergence(self.reference, final), change

    def _layer(self, layer: int, states: Tensor, changes: Sequence[_Change]) -> tuple[Tensor, Tensor]:
        """The layer's output and its attention block's, both (rows, w, hidden); the last rows are changed."""
        seen: list[Tensor] = []
        handle = self.blocks[layer].register_forward_hook(
            lambda _m, _i, out: seen.append(out if isinstance(out, Tensor) else out[0])
        )
        try:
            out = self.stack.layer(layer, states, _Prefix(*self.caches[layer], changes), self.start)
        finally:
            handle.remove()
        return out, seen[0]


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
    with that under each further noise, and of the profiles of the two halves of the examples.
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
    return {"damage": damage, "stability": stability}


def _spearman(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float | None:
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    from scipy import stats

    return float(stats.spearmanr(a, b).statistic)
