"""What every layer was given: kept share of the context, K bits and V bits, layer by layer (MoE-nD's routing)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.reporting.figures import Picture, safe, style

if TYPE_CHECKING:
    from pipelines.results.sweep import Sweep

ORDER = 40
PLANS = 4  # in one figure
BITS = (2, 4, 8, 16)
SHADES = {2: "#F1E4EE", 4: "#F6D9B8", 8: "#79B7DE", 16: "#0B4F7D"}  # light to dark in grey print as well


def pictures(sweep: Sweep) -> Iterator[Picture]:
    """One figure per model, of plans that give layers different things: of each method the one that differs most."""
    plans: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for row in sweep.done:
        plan = sweep.plan(row) or {}
        if len({str(x) for x in plan.get("layers", ())}) > 1:
            benchmark, asked, _, given = row.columns
            mode = "" if asked == "-" else f", question {asked}"
            seen = plans.setdefault(row.info["model"], [])
            if all(p["layers"] != plan["layers"] for *_, p in seen):
                whole = sweep.whole_layers(row)
                kept = "" if whole is None else f": {whole[0]:.0%} of layers keep all by plan, {whole[1]:.0%} by record"
                seen.append((row.info["method"], f"{row.method} at {given}, {benchmark}{mode}{kept}", plan))
    for model, found in plans.items():
        found.sort(key=lambda x: -len({layer["keep"] for layer in x[2]["layers"]}))
        firsts = [next(x for x in found if x[0] == m) for m in dict.fromkeys(m for m, *_ in found)]
        rest = [x for x in found if all(x is not y for y in firsts)]
        shown = [(title, plan) for _, title, plan in (firsts + rest)[:PLANS]]
        more = f" {len(shown)} of {len(found)} plans are shown." if len(found) > len(shown) else ""
        yield Picture(
            safe("routing_map", model),
            f"Routing: {model}",
            "What each layer was given: the share of the context it keeps, and the bits of its keys and values." + more,
            partial(draw, shown),
        )


def of_plan(plan: dict[str, Any], found: Mapping[str, Any], title: str, model: str) -> Iterator[Picture]:
    """What each layer was given."""
    yield Picture("routing_map", f"Routing: {model}", "", partial(draw, [(title, plan)]))


def draw(plans: Sequence[tuple[str, dict[str, Any]]], path: Path) -> bool:
    """Draw (title, RoutingPlan as JSON) pairs, three rows each: bars of kept share, cells of K and V bits."""
    from matplotlib.patches import Patch

    plans = [(title, plan) for title, plan in plans if plan["layers"]]
    if not plans:
        return False
    layers = max(len(plan["layers"]) for _, plan in plans)
    used = sorted({b for _, plan in plans for x in plan["layers"] for b in (x["k_bits"], x["v_bits"])}, reverse=True)
    ratios = [2.4, 0.5, 0.5] * len(plans)
    width, height = max(5.2, 0.21 * layers + 1.5), 1.9 * len(plans) + 0.5
    grid = {"nrows": 3 * len(plans), "height_ratios": ratios, "sharex": True}
    with style.figure(path, width, height, **grid) as (fig, axes):
        for i, (title, plan) in enumerate(plans):
            keep, k, v = (axes[3 * i + j][0] for j in range(3))
            _keeps(keep, plan, title)
            _bits(k, [x["k_bits"] for x in plan["layers"]], "K")
            _bits(v, [x["v_bits"] for x in plan["layers"]], "V")
        axes[-1][0].set_xlabel("layer")
        legend = [Patch(facecolor=SHADES[b], edgecolor="#555555", label=f"{b} bit") for b in used]
        fig.legend(handles=legend, loc="outside lower center", ncols=len(legend))
    return True


def _keeps(axis: Any, plan: dict[str, Any], title: str) -> None:
    n = len(plan["layers"])
    tokens = [x["tokens"] for x in plan["layers"]]
    counted = all(t is not None for t in tokens)
    values = [min(t / plan["t_ref"], 1) for t in tokens] if counted else [x["keep"] for x in plan["layers"]]
    axis.bar(range(n), values, color=style.BLUE, width=0.82)
    mean = sum(values) / n
    axis.axhline(mean, color=style.BLACK, lw=0.9, ls=(0, (4, 2)))
    axis.text(n - 0.4, mean, f" mean {mean:.2f}", va="center", ha="left", fontsize=7.5)
    axis.set_ylim(0, max(1.0, max(values)))
    axis.set_xlim(-0.6, n - 0.4)
    axis.set_ylabel("kept")
    axis.set_title(title)
    axis.tick_params(bottom=False, labelbottom=False)
    axis.grid(axis="x", visible=False)


def _bits(axis: Any, bits: Sequence[int], name: str) -> None:
    for i, b in enumerate(bits):
        axis.add_patch(_cell(i, SHADES[b]))
        axis.text(i, 0.5, str(b), ha="center", va="center", fontsize=6.5, color="white" if b == 16 else "black")
    axis.set_ylim(0, 1)
    axis.set_yticks([0.5], [name])
    axis.tick_params(left=False, bottom=False, labelbottom=True)
    axis.grid(visible=False)
    for side in axis.spines.values():
        side.set_visible(False)
    axis.set_xticks(range(0, len(bits), 1 if len(bits) <= 8 else 5 if len(bits) > 20 else 2))
    if name == "K":
        axis.tick_params(labelbottom=False)


def _cell(x: int, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.41, 0.05), 0.82, 0.9, facecolor=colour, edgecolor="#555555", lw=0.4)
