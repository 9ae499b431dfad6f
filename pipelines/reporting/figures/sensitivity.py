"""The sensitivity landscape: how much each operation disturbs each layer's attention output (MoE-nD, figure 2)."""

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

ORDER = 50
Values = npt.NDArray[np.float64]


def pictures(sweep: Sweep) -> Iterator[Picture]:
    """Every sensitivity artefact in four panels, every damage table as a heatmap."""
    from moend.calibration import figure

    for key, (row, folder) in sweep.artefacts("sensitivity").items():
        found, model = figure(folder, "sensitivity"), row.info["model"]
        yield Picture(
            safe("sensitivity", model, key[:6]),
            f"Sensitivity landscape: {model}",
            f"Relative L2 error of a layer's attention output when one operation is done to it alone ({found['how']}). "
            "A: all layers, logarithmic colour, and the spread over them; B: the same as boxes; C: eviction's error "
            "less quantisation's, for the paper's pair (50 % against 62.5 % of the bytes) and for one of exactly equal "
            "bytes: above zero a layer prefers quantisation; D: the two layers that differ most in that.",
            partial(landscape, found["singles"], found["operations"], equal=found["pair"], title=model),
        )
    for key, (row, folder) in sweep.artefacts("damage").items():
        table, model = figure(folder, "damage"), row.info["model"]
        names = [c.name for c in table["configs"]]
        yield Picture(
            safe("damage", model, key[:6]),
            f"Damage at the output: {model}",
            f"KL at the model's output when one layer alone is cut, mean of {table['examples']} examples a kind.",
            partial(draw, table["table"], names, f"damage, {model}", unit="KL at the output, nats (log)"),
        )


def of_plan(
    plan: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]], title: str, model: str
) -> Iterator[Picture]:
    """The tables that a plan comes from, as heatmaps."""
    if (s := found.get("sensitivity")) is not None:
        name = f"sensitivity, {model}"
        yield Picture("sensitivity", name, "", partial(draw, s["singles"], s["operations"], name))
    if (d := found.get("damage")) is not None:
        names, name = [c.name for c in d["configs"]], f"damage, {model}"
        yield Picture("damage", name, "", partial(draw, d["table"], names, name, unit="KL at the output, nats (log)"))


def draw(
    singles: npt.NDArray[Any], operations: Sequence[str], title: str, path: Path, unit: str = "relative L2 error (log)"
) -> bool:
    """Heatmap of singles (layers, operations) on a log colour scale, with each operation's max/min ratio beside it."""
    values = np.asarray(singles, dtype=float)
    if not (values > 0).any():
        return False
    layers, n = values.shape
    width, ratios = max(5.5, 0.25 * layers + 2.6), [max(layers, 8), 7]
    with style.figure(path, width, 0.33 * n + 1.5, ncols=2, width_ratios=ratios) as (fig, axes):
        _heat(fig, axes[0][0], axes[0][1], values, operations, unit)
        axes[0][0].set_title(title)
    return True


def landscape(
    singles: npt.NDArray[Any],
    operations: Sequence[str],
    path: Path,
    equal: Mapping[str, npt.NDArray[Any]] | None = None,
    title: str = "",
) -> bool:
    """Four panels of singles (layers, operations). equal: errors (layers) of keep_50 and k8v8, which cost the same."""
    values = np.asarray(singles, dtype=float)
    if not (values > 0).any():
        return False
    layers = len(values)
    grid: dict[str, Any] = {"nrows": 2, "ncols": 3, "width_ratios": [10, 3.4, 8], "height_ratios": [1.15, 1]}
    with style.figure(path, 11.2, 7.2, **grid) as (fig, axes):
        _heat(fig, axes[0][0], axes[0][1], values, operations, "relative L2 error (log)")
        axes[0][0].set_title(f"A  {title}".rstrip())
        _boxes(axes[0][2], values, operations)
        pairs = _preferences(values, operations, equal)
        wide = _span(axes[1][0], axes[1][1])
        chosen = _bars(wide, pairs, layers)
        _head_to_head(axes[1][2], values, operations, chosen)
    return True


def _span(first: Any, second: Any) -> Any:
    """One axis over the places of two neighbours."""
    spec, fig = first.get_subplotspec(), first.figure
    second.remove()
    first.remove()
    return fig.add_subplot(spec.get_gridspec()[spec.rowspan.start, spec.colspan.start : spec.colspan.start + 2])


def _heat(fig: Any, heat: Any, strip: Any, values: Values, operations: Sequence[str], unit: str) -> None:
    from matplotlib.colors import LogNorm

    positive = values[values > 0]
    floor = float(positive.min())
    shown = np.maximum(values, floor)
    layers, n = values.shape
    image = heat.imshow(shown.T, aspect="auto", cmap="cividis", norm=LogNorm(floor, max(positive.max(), floor * 1.01)))
    heat.set_yticks(range(n), operations)
    heat.set_xticks(range(0, layers, 1 if layers <= 12 else 5))
    heat.set_xlabel("layer")
    heat.grid(visible=False)
    fig.colorbar(image, ax=heat, pad=0.01, fraction=0.04).set_label(unit)
    spread = shown.max(axis=0) / shown.min(axis=0)
    strip.barh(range(n), spread, color=style.SKY, height=0.7)
    for i, ratio in enumerate(spread):
        strip.text(ratio * 1.08, i, f"{ratio:.0f}×" if ratio >= 10 else f"{ratio:.1f}×", va="center", fontsize=7.5)
    strip.set_xscale("log")
    strip.set_xlim(1, spread.max() * 4)
    strip.set_ylim(n - 0.5, -0.5)
    strip.set_yticks([])
    strip.minorticks_off()
    strip.set_xlabel("max / min over layers")
    strip.grid(axis="y", visible=False)


def _boxes(axis: Any, values: Values, operations: Sequence[str]) -> None:
    shown = np.maximum(values, values[values > 0].min())
    parts = axis.boxplot(
        list(shown.T), orientation="horizontal", widths=0.6, patch_artist=True, showfliers=True, tick_labels=operations
    )
    for box, name in zip(parts["boxes"], operations, strict=True):
        box.set(facecolor=style.ORANGE if name.startswith("keep") else style.SKY, alpha=0.75, lw=0.8)
    for line in (*parts["medians"], *parts["whiskers"], *parts["caps"]):
        line.set(color=style.BLACK, lw=0.9)
    for dots in parts["fliers"]:
        dots.set(marker=".", markersize=4, markeredgecolor=style.GREY)
    axis.set_xscale("log")
    axis.invert_yaxis()
    axis.set_xlabel("relative L2 error over layers (log)")
    axis.set_title("B  each operation over layers")
    axis.grid(axis="y", visible=False)


def _preferences(
    values: Values, operations: Sequence[str], equal: Mapping[str, npt.NDArray[Any]] | None
) -> list[tuple[str, Values]]:
    """Eviction's error less quantisation's, per layer, for pairs that cost about or exactly the same."""
    at = {name: i for i, name in enumerate(operations)}
    pairs = []
    if {"keep_50", "k4"} <= at.keys():
        pairs.append(("keep_50 - k4 (the paper's pair)", values[:, at["keep_50"]] - values[:, at["k4"]]))
    if equal is not None:
        both = np.asarray(equal["keep_50"], dtype=float) - np.asarray(equal["k8v8"], dtype=float)
        pairs.append(("keep_50 - k8v8 (equal bytes)", both))
    return pairs


def _bars(axis: Any, pairs: Sequence[tuple[str, Values]], layers: int) -> tuple[int, int]:
    """Draws the preferences; returns the two layers that differ most in the first."""
    width = 0.84 / max(len(pairs), 1)
    for i, ((name, difference), colour) in enumerate(zip(pairs, (style.BLUE, style.ORANGE), strict=False)):
        at = np.arange(layers) + (i - (len(pairs) - 1) / 2) * width
        axis.bar(at, difference, width=width, color=colour, label=name)
    axis.axhline(0, color=style.BLACK, lw=0.9)
    axis.set_xlabel("layer")
    axis.set_ylabel("error of keep_50 minus the other's")
    axis.set_title("C  above zero: prefers quantisation")
    axis.set_xticks(range(0, layers, 1 if layers <= 12 else 5))
    axis.set_xlim(-0.7, layers - 0.3)
    axis.grid(axis="x", visible=False)
    axis.margins(y=0.22)
    if pairs:
        axis.legend(loc="upper right", fontsize=7.5, ncols=2)
    if not pairs or layers < 2:
        return 0, max(layers - 1, 0)
    first = pairs[0][1]
    return int(first.argmin()), int(first.argmax())


def _head_to_head(axis: Any, values: Values, operations: Sequence[str], chosen: tuple[int, int]) -> None:
    shown = np.maximum(values, values[values > 0].min())
    at = np.arange(len(operations))
    for name in ("keep_50", "k4"):
        if name in operations:
            axis.axvspan(operations.index(name) - 0.45, operations.index(name) + 0.45, color="#EEEEEE", lw=0, zorder=0)
    for layer, colour, marker in zip(chosen, (style.RED, style.BLUE), "oD", strict=True):
        axis.plot(at, shown[layer], color=colour, marker=marker, label=f"layer {layer}")
    axis.set_yscale("log")
    axis.set_xticks(at, operations, rotation=40, ha="right", rotation_mode="anchor")
    axis.set_ylabel("relative L2 error (log)")
    axis.set_title("D  two layers head to head")
    axis.legend(loc="best")
