"""RippleKV's profile of a model: each layer's response and damage, and the budgets that follow (RippleKV, figure 1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipelines.reporting.figures import Picture, safe, style

if TYPE_CHECKING:
    from pipelines.results.sweep import Sweep

ORDER = 55
Values = npt.NDArray[np.float64]
RESAMPLES = 1000


def pictures(sweep: Sweep) -> Iterator[Picture]:
    """One picture per profile. The budgets in it are those of the cell whose layers differ most.

    At a small budget all layers may get the same, which would show nothing.
    """
    from moend.calibration import figure

    for key, (_, folder) in sweep.artefacts("ripple").items():
        users = [r for r in sweep.measured if r.payload["calibrations"].get("ripple") == key]
        shared = [(r, entries(plan)) for r in users if (plan := sweep.plan(r)) is not None]
        if not shared:
            continue
        row, tokens = max(shared, key=lambda pair: max(pair[1]) - min(pair[1]))
        p, title = figure(folder, "ripple"), f"{row.info['method']} at {row.columns[3]}, {row.info['model']}"
        yield Picture(
            safe("ripple_profile", row.info["model"], key[:6]),
            f"RippleKV's profile and budgets: {row.info['model']}",
            f"{len(p['response'])} examples; means with 95 % bootstrap intervals over examples. The output's response "
            "decides how many entries each layer gets.",
            partial(draw, p["response"], p["local"], p["damage"], tokens, title),
        )


def of_plan(plan: dict[str, Any], found: Mapping[str, Mapping[str, Any]], title: str, model: str) -> Iterator[Picture]:
    """The profile that a plan comes from, with its budgets."""
    if (p := found.get("ripple")) is not None:
        show = partial(draw, p["response"], p["local"], p["damage"], entries(plan), title)
        yield Picture("ripple_profile", f"RippleKV's profile: {model}", "", show)


def entries(plan: dict[str, Any]) -> list[int]:
    """Entries per layer at a plan's reference length."""
    t = plan["t_ref"]
    return [round(x["keep"] * t) if x["tokens"] is None else min(x["tokens"], t) for x in plan["layers"]]


def draw(
    response: Values, local: Values, damage: Mapping[float, Values], tokens: Sequence[int], title: str, path: Path
) -> bool:
    """Panels over layers: output response, local response, damage per keep (all (N, L), mean and 95 % over examples),
    and the entries each layer gets beside the mean."""
    layers = response.shape[1]
    if not layers:
        return False
    signals = [("response: KL at the output", response, style.BLUE), ("local: change of own output", local, style.SKY)]
    shades = (style.RED, style.ORANGE, style.PURPLE, style.GREEN)
    width, rows = max(5.0, 0.2 * layers + 1.6), 3 + bool(damage)
    with style.figure(path, width, 1.35 * rows + 0.5, nrows=rows, sharex=True) as (fig, axes):
        panels = [a[0] for a in axes]
        for axis, (name, values, colour) in zip(panels, signals, strict=False):
            _bars(axis, values, colour)
            axis.set_ylabel("nats" if values is response else "relative L2")
            axis.set_title(name)
        if damage:
            for (keep, values), colour in zip(sorted(damage.items()), shades * len(damage), strict=False):
                mean, low, high = _interval(values)
                panels[2].plot(range(layers), mean, marker="o", ms=3.5, lw=1.2, color=colour, label=f"{keep:.0%} kept")
                panels[2].fill_between(range(layers), low, high, color=colour, alpha=0.2, lw=0)
            _log(panels[2], np.concatenate([v.mean(0) for v in damage.values()]))
            panels[2].set_ylabel("nats")
            panels[2].set_title("damage: KL with this layer alone compressed")
            panels[2].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0)
        budget = panels[-1]
        budget.bar(range(layers), tokens, color=style.GREEN, width=0.82)
        mean_tokens = sum(tokens) / layers
        budget.axhline(mean_tokens, color=style.BLACK, lw=0.9, ls=(0, (4, 2)))
        budget.text(layers - 0.4, mean_tokens, f" mean {mean_tokens:.0f}", va="center", ha="left", fontsize=7.5)
        budget.set_ylabel("entries")
        budget.set_title("budget")
        budget.set_xlabel("layer")
        budget.set_xlim(-0.6, layers - 0.4)
        budget.set_xticks(range(0, layers, 1 if layers <= 12 else 5))
        fig.suptitle(title, fontsize=10, x=0.01, ha="left")
    return True


def _bars(axis: Any, values: Values, colour: str) -> None:
    """Bars from zero; points where a log scale leaves bars no foot to stand on."""
    mean, low, high = _interval(values)
    if _log(axis, mean):
        axis.plot(range(len(mean)), mean, ls="", marker="o", color=colour)
    else:
        axis.bar(range(len(mean)), mean, color=colour, width=0.82)
    axis.vlines(range(len(mean)), low, high, color=style.BLACK, lw=0.8)


def _log(axis: Any, mean: Values) -> bool:
    """A log scale where the values span more than a decade."""
    positive = mean[mean > 0]
    wide = bool(positive.size) and bool(positive.max() / positive.min() > 10)
    if wide:
        axis.set_yscale("log")
    return wide


def _interval(values: Values) -> tuple[Values, Values, Values]:
    """Mean over examples (N, L) and its 95 % bootstrap bounds."""
    pick = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[pick].mean(1), [0.025, 0.975], axis=0)
    return values.mean(0), low, high
