"""RippleKV's profile: how far a disturbance of one layer's cached values reaches the model's output.

An example is a prefix and an evaluation window W. For one layer at a time v~ = v + alpha ||v||_2 eps, eps ~ N(0, I), on
the prefix positions that the base method may evict (RippleKV eq. 6); the response is the mean over W of
KL(P || Q_l) (eq. 7). The same run with the base method's eviction in place of the noise gives the damage D_l (eq. 1).
All layers are measured in one pass (`moend.calibration.rerun`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moend.budget import Arch
from moend.cache import Prefilled, attention_of
from moend.cache.layer_kv import gather
from moend.cache.select import Selector
from moend.calibration.artefact import Artefact
from moend.calibration.base import Bench, Examples, Kind, Report, Target, Values, whole
from moend.calibration.rerun import Change, Evictor, Observe, reruns
from moend.calibration.saved import Saved
from moend.calibration.sensitivity import kept_tokens
from moend.errors import UserError

RESAMPLES = 2000
SPLITS = 50  # pairs of disjoint subsets of the examples


@dataclass(frozen=True)
class Noise:
    """What cached values are disturbed with."""

    relative: float  # alpha sqrt(d): the expected size of the noise in units of ||v||
    seed: int = 0  # of the draw


@dataclass(frozen=True)
class Profile:
    """Responses of N examples in L layers to V noises, and the damage of K shares of entries; float64."""

    noises: tuple[Noise, ...]
    keeps: tuple[float, ...]  # shares of entries whose damage was measured, K of them
    response: Tensor  # (V, N, L) KL at the output, nats
    local: Tensor  # (V, N, L) ||a~ - a||_2 / ||a||_2 of the layer's own attention output, mean over the window
    damage: Tensor  # (K, N, L) KL at the output, nats

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
    evictor: Evictor,
    *,
    noises: Sequence[Noise] = (Noise(0.3),),
    draws: int = 1,
    keeps: Sequence[float] = (),
    statistics: Mapping[str, Tensor] | None = None,
    observe: Observe | None = None,
    tokens_at_once: int = 4096,
    saved: Saved | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Profile a model on input_ids (N, P + window), no padding: prefixes of P tokens and the windows that follow.

    draws: noise vectors per layer and example, averaged. keeps: shares of the prefix that the method keeps for the
    damage; only then its scorer is asked (statistics, observe: see `damage_table`). tokens_at_once bounds the windows
    under way. saved: examples are its steps. progress(done, all) is called after each.
    """
    count, length = input_ids.shape
    prefix = length - window
    protected = evictor.n_sink + (evictor.recent if isinstance(evictor.recent, int) else int(evictor.recent * prefix))
    if 1 <= prefix <= protected:
        raise UserError(
            f"calibration.ripple.prefix ({prefix}) must be longer than the {protected} tokens that the method "
            "protects: nothing could be evicted"
        )
    asked = evictor.scorer if keeps else None
    if asked is not None and asked.statistics and statistics is None:
        raise UserError(f"the damage of scorer {asked.name} needs a calibration of its own ({asked.statistics})")

    def measure(todo: list[int]) -> Iterator[dict[str, Tensor]]:
        again = reruns(model, input_ids[todo], window, scorer=asked, observe=observe)
        for n, rerun in zip(todo, again, strict=True):
            layers = len(rerun.caches)
            response = torch.zeros(len(noises), layers, dtype=torch.float64)
            local, damage = torch.zeros_like(response), response.new_zeros(len(keeps), layers)
            selectors = evictor.selectors(rerun, statistics, seed=n) if keeps else []
            changes: list[list[Callable[[], Change]]] = [
                [
                    *(
                        partial(_disturb, rerun.caches[layer], evictor, noise, layer, n, draw)
                        for noise in noises
                        for draw in range(draws)
                    ),
                    *(partial(_evict, rerun.prefilled, selectors[layer], kept_tokens(k, prefix)) for k in keeps),
                ]
                for layer in range(layers)
            ]
            for layer, change, divergence, moved in rerun.run(changes, tokens_at_once):
                v = change // draws
                if v < len(noises):
                    response[v, layer] += divergence / draws
                    local[v, layer] += moved / draws
                else:
                    damage[change - len(noises) * draws, layer] = divergence
            yield {"response": response, "local": local, "damage": damage}

    with attention_of(model):
        found = (saved or Saved()).steps([f"{n}" for n in range(count)], measure, progress)
    parts = (torch.stack([step[name] for step in found], dim=1) for name in ("response", "local", "damage"))
    return Profile(tuple(noises), tuple(keeps), *parts)


def _disturb(
    cache: tuple[Tensor, Tensor], evictor: Evictor, noise: Noise, layer: int, example: int, draw: int
) -> Change:
    return Change(cache[0], disturbed(cache[1], evictor, noise, layer, example, draw))


def _evict(prefilled: Prefilled, selector: Selector, keep: int) -> Change:
    keys, values, _ = prefilled.entries(selector.layer, 0)
    at = torch.arange(keys.shape[1], device=keys.device)
    kept = selector.best(prefilled.scores(selector, "base", 0), at, len(at), min(keep, len(at)))
    return Change(*gather(keys, values, at, kept))


def disturbed(values: Tensor, evictor: Evictor, noise: Noise, layer: int, example: int, draw: int) -> Tensor:
    """values (H, P, d) with v + alpha ||v||_2 eps where the base method may evict; eps is drawn on the CPU, seeded."""
    _, length, dim = values.shape
    seed = ((noise.seed * 1_000_003 + layer) * 1_000_003 + example) * 1_000_003 + draw
    generator = torch.Generator().manual_seed(seed % 2**63)
    recent = evictor.recent if isinstance(evictor.recent, int) else int(evictor.recent * length)
    start, stop = evictor.n_sink, length - recent
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


@dataclass(frozen=True, kw_only=True)
class RippleSettings(Examples):
    """`calibration.ripple`."""

    relative_noise: float = 0.3  # alpha sqrt(d)
    draws: int = 1  # of noise per layer and example
    seed: int = 0  # of the noise
    stability: bool = False  # also under a third, half, double and four times the noise, and another seed
    damage: tuple[float, ...] = ()  # shares of the prefix at which D is measured

    where: ClassVar[str] = "calibration.ripple"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self, self.where, draws=1, seed=0)
        noise = self.relative_noise
        if isinstance(noise, bool) or not isinstance(noise, int | float) or not 0 < noise < float("inf"):
            raise UserError(f"{self.where}.relative_noise must be a number > 0, got {noise!r}")
        if not isinstance(self.stability, bool):
            raise UserError(f"{self.where}.stability must be true or false, got {self.stability!r}")
        if not all(isinstance(k, int | float) and 0 < k < 1 for k in self.damage):
            raise UserError(f"{self.where}.damage must be shares in (0, 1), got {list(self.damage)}")

    @property
    def noises(self) -> list[Noise]:
        """The first makes the profile, the others show how stable it is."""
        a, seed = self.relative_noise, self.seed
        more = [*(Noise(a * f, seed) for f in (1 / 3, 1 / 2, 2, 4)), Noise(a, seed + 1)]
        return [Noise(a, seed), *(more if self.stability else [])]

    @property
    def shares(self) -> list[float]:
        """Those of `damage`, each once, in order."""
        return sorted(set(self.damage))


class Ripple(Kind):
    """RippleKV's profile."""

    settings = RippleSettings
    makes_plans = True

    def identity(self, target: Target) -> dict[str, Any]:
        """All settings but the text, and what the method protects."""
        s: RippleSettings = target.examples(self.name)
        own = {k: v for k, v in dataclasses.asdict(s).items() if k not in ("text", "text_file")}
        own |= {"damage": s.shares} | target.held("n_sink", "recent")
        return own | ({"scorer": target.scorer} if s.damage and target.method.scorer is not None else {})

    def texts(self, target: Target) -> dict[str, Any]:
        """Those that examples are cut from."""
        return {"texts": target.examples(self.name).texts()}

    def work(self, target: Target, arch: Arch) -> float:
        """A pass, and the window once more from each layer on for every noise and share."""
        s: RippleSettings = target.examples(self.name)
        runs = len(s.noises) * s.draws + len(s.shares)
        return float(s.examples * (s.prefix + s.window * (1 + runs * arch.layers)))

    def measure(self, target: Target, bench: Bench) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A window run again for each layer, noise and share."""
        s: RippleSettings = target.examples(self.name)
        ids, method = s.ids(bench.loaded), target.method
        assert target.scorer
        recent = method.recent if isinstance(method.recent, int) else int(method.recent * s.prefix)
        with bench.progress(f"ripple profile of {bench.loaded.spec.label}") as progress:
            made = profile(
                bench.model,
                bench.on(ids),
                s.window,
                Evictor(method.make_scorer(), method.n_sink, recent),
                noises=s.noises,
                draws=s.draws,
                keeps=s.shares,
                statistics=bench.statistics,
                observe=bench.observe,
                saved=bench.saved,
                progress=progress,
            )
        tensors = made.tensors()
        return tensors, s.said(ids) | {"keeps": s.shares, **summary(tensors, s.noises, s.shares)}

    def zeros(self, target: Target, arch: Arch) -> dict[str, Tensor]:
        """Layers that all respond alike."""
        return {name: torch.zeros(1, arch.layers) for name in ("response", "local")}

    def figure(self, artefact: Artefact) -> dict[str, Any]:
        """response and local (N, L), damage {keep: (N, L)}, info."""
        t = artefact.tensors
        damage = {keep: d.numpy() for keep, d in zip(artefact.info["keeps"], t["damage"], strict=True)}
        return {"response": t["response"].numpy(), "local": t["local"].numpy(), "damage": damage, "info": artefact.info}

    def report(self, artefact: Artefact, plan: Values) -> Report | None:
        """The profile layer by layer, what it says of the damage, and how steady it is."""
        found = self.figure(artefact)
        damage, info, reference = found["damage"], found["info"], plan["t_ref"]
        columns = [found["response"].mean(0), found["local"].mean(0), *(d.mean(0) for d in damage.values())]
        rows = []
        for i, x in enumerate(plan["layers"]):
            entries = round(x["keep"] * reference) if x["tokens"] is None else min(x["tokens"], reference)
            rows.append((str(i), *(f"{c[i]:.3g}" for c in columns), str(entries)))
        lines = [f"{len(found['response'])} examples of {info['text']}; responses and damage in nats"]
        for keep, said in info["damage"].items():
            parts = ", ".join(f"{name} {_interval(said[name])}" for name in ("output", "local", "depth"))
            lines.append(f"|Spearman| with the damage at {float(keep):.0%} kept: {parts}")
        if info["damage"]:
            lines.append("published (RippleKV, table 1): output 0.799 (0.723 to 0.857), depth 0.359 (0.218 to 0.480)")
        by_number = sorted(info["stability"].items(), key=lambda item: [int(x) for x in re.findall(r"\d+", item[0])])
        if steady := [f"{name} {r:.2f}" for name, r in by_number if r is not None]:
            lines.append(f"Spearman of the profile with itself under: {'; '.join(steady)}")
        heads = ("layer", "response", "local", *(f"damage at {k:.0%}" for k in damage), "entries")
        return Report(heads, rows, lines)


def _interval(r: dict[str, float | None]) -> str:
    if r["value"] is None:
        return "-"
    return f"{r['value']:.2f}" + ("" if r["low"] is None else f" [{r['low']:.2f}, {r['high']:.2f}]")


KIND = Ripple()
