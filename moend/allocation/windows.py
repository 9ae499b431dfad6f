"""Models with sliding layers: a window that fits is held whole, and its layer's other bytes go to those that grow."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

from moend.allocation.base import Allocation, Allocator, Task
from moend.calibration.artefact import Artefact
from moend.errors import Infeasible
from moend.plan import LayerPlan

LAYERS = {"table": 0, "heads": 0, "response": 1, "local": 1}  # which dimension of an artefact's tensors counts layers


def allocate(allocator: Allocator, task: Task) -> Allocation:
    """The allocator's plan, in which a sliding layer with the bytes for its whole window holds it and no more.

    A layer that was given at least what its window costs at 16 bit, or else at its own bits, holds the window at these
    bits. The allocator then divides what is left among the other layers, until no layer changes. No byte is spent
    that the first plan would not spend, so what was feasible stays so. Methods whose heads differ, and budgets that
    count codes or fix entries, are planned as if all layers grew.
    """
    cost, windows = task.cost, task.cost.arch.windows
    if windows is None or allocator.divides_heads or cost.cost == "eq1" or task.fixed is not None:
        return allocator.plan(task)
    slide = {i: w for i, w in enumerate(windows) if w is not None and w < cost.reference}
    whole: dict[int, tuple[int, int]] = {}  # K and V bits of layers that hold their windows
    if allocator.keeps_all:
        for bits in sorted(itertools.product(*task.bits), key=lambda b: (sum(b), b), reverse=True):
            whole = dict.fromkeys(slide, bits)
            with contextlib.suppress(Infeasible):
                return _plan(allocator, task, whole)
        return _plan(allocator, task, whole)
    while True:
        made = _plan(allocator, task, whole)
        more = {}
        for i in slide.keys() - whole.keys():
            plan = made.layers[i]
            own = plan.k_bits, plan.v_bits
            price = cost.layer_cost(plan.tokens or 1, *own)
            choices = [(16, 16), own] if (plan.tokens or 1) >= slide[i] else [(16, 16)]
            fits = [b for b in choices if cost.window_cost(slide[i], *b) <= price]
            if fits:
                more[i] = fits[0]
        if not more:
            return made
        whole |= more


def _plan(allocator: Allocator, task: Task, whole: dict[int, tuple[int, int]]) -> Allocation:
    """The allocator's plan of all layers but those that hold their windows, and these."""
    cost, windows = task.cost, task.cost.arch.windows or ()
    rest = [i for i in range(cost.arch.layers) if i not in whole]
    spent = sum(cost.window_cost(windows[i] or 0, *bits) for i, bits in whole.items())
    layers = {i: LayerPlan(1.0, cost.reference, *bits) for i, bits in whole.items()}
    if spent > cost.total:
        raise Infeasible(f"the windows of {len(whole)} layers do not fit", f"{spent}B")
    if not rest:
        return Allocation([layers[i] for i in sorted(layers)])
    left = replace(cost.arch, layers=len(rest), windows=tuple(windows[i] for i in rest))

    def artefact(kind: str) -> Artefact:
        found = task.artefact(kind)
        tensors = {
            k: t.index_select(LAYERS[k], t.new_tensor(rest).long()) for k, t in found.tensors.items() if k in LAYERS
        }
        return replace(found, tensors={**found.tensors, **tensors})

    try:
        made = allocator.plan(replace(task, cost=replace(cost, arch=left, total=cost.total - spent), artefact=artefact))
    except Infeasible as e:
        raise Infeasible(str(e), f"{int(e.smallest.removesuffix('B')) + spent}B") from None
    layers |= dict(zip(rest, made.layers, strict=True))
    return replace(made, layers=[layers[i] for i in sorted(layers)])
