"""Which configuration each layer gets: the multiple-choice knapsack of MoE-nD section 4, solved greedily or exactly.

Minimise sum_l S[l, c_l] subject to sum_l m[l, c_l] <= M (eq. 1 for m, or resident bytes). Three solvers:

- `greedy_paper`: start from the cheapest configuration of every layer; repeat: of all layers whose next-best
  configuration still fits, step the one with the largest dS/dm. "Next-best" is the next entry of that layer's Pareto
  chain (its configurations by rising cost, without those that a cheaper or equally cheap one matches in S).
- `greedy`: the same, but a step may go to any costlier configuration of the layer.
- `exact`: dynamic programming over the reachable (cost, S) pairs, layer by layer. A pair is dropped when a cheaper pair
  is at least as good, or when even the LP relaxation of the layers that follow cannot bring it below the best solution
  known (greedy, to begin with). Costs are never rounded, so any integers will do: eq. (1) lattices and resident bytes
  alike. Only where more than `STATES` pairs survive are the least promising dropped; their bound then becomes the
  certificate and `gap` says how far the answer can be from the optimum.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moend.errors import Infeasible, unknown

SOLVERS = ("exact", "greedy", "greedy_paper")
STATES = 4096
_NEVER = 2**62  # a step that fits no budget
_REL = 1e-12  # differences of objectives below this share are rounding

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Solution:
    """One configuration per layer.

    objective: sum of S. cost: sum of costs, in the costs' unit, never above the budget. bound: the LP relaxation's
    optimum, which no choice can beat. gap: (objective - certificate) / objective, where the certificate is the best
    proven lower bound: 0 means proven optimal; for the greedy solvers the certificate is `bound`.
    """

    choice: tuple[int, ...]
    objective: float
    cost: int
    bound: float
    gap: float
    solver: str  # which solver chose: exact, greedy or greedy_paper


@dataclass(frozen=True)
class _Layer:
    """A layer's Pareto chain: cost rises, value (S) falls strictly; `index` is the original column."""

    cost: Ints
    value: Floats
    index: Ints

    def hull(self) -> tuple[Ints, Floats]:
        """Cost and value of each step along the lower convex hull, in the order of falling slope."""
        points = [0]
        for i in range(1, len(self.cost)):
            while len(points) > 1:
                a, b = points[-2], points[-1]
                turn = (self.value[b] - self.value[a]) * (self.cost[i] - self.cost[a])
                if turn < (self.value[i] - self.value[a]) * (self.cost[b] - self.cost[a]):
                    break
                points.pop()
            points.append(i)
        return np.diff(self.cost[points]), np.diff(self.value[points])


class _Relaxation:
    """The LP optimum of a set of layers as a function of the bytes above their cheapest choice (convex, decreasing)."""

    def __init__(self, layers: list[_Layer]):
        steps = [layer.hull() for layer in layers]
        cost = np.concatenate([np.zeros(0, dtype=np.int64), *(c for c, _ in steps)])
        gain = np.concatenate([np.zeros(0), *(g for _, g in steps)])
        order = np.argsort(gain / cost, kind="stable")
        self._cost = np.concatenate([[0.0], np.cumsum(cost[order])])
        self._value = math.fsum(layer.value[0] for layer in layers) + np.concatenate([[0.0], np.cumsum(gain[order])])

    def __call__(self, room: Ints) -> Floats:
        return np.interp(room, self._cost, self._value)


def solve(sensitivity: npt.ArrayLike, cost: npt.ArrayLike, budget: int, solver: str = "exact") -> Solution:
    """The choice of one configuration per layer with the least total S whose cost fits the budget.

    sensitivity: (L, C), S[l, c], finite. cost: (L, C) whole numbers >= 0, bytes. Ties: the cheaper choice, then the
    lower column. Raises Infeasible (smallest = the sum of the cheapest costs) where nothing fits.
    """
    if solver not in SOLVERS:
        raise unknown("solver", solver, SOLVERS)
    s, m = _checked(sensitivity, cost)
    smallest = int(m.min(axis=1).sum())
    if smallest > budget:
        raise Infeasible(
            f"the cheapest configuration of every layer needs {smallest} bytes, the budget is {budget}",
            smallest=f"{smallest}B",
        )
    layers = [_pareto(s[i], m[i]) for i in range(len(s))]
    room = budget - smallest
    bound = float(_Relaxation(layers)(np.array(room)))
    if solver == "greedy_paper":
        picks = _greedy_chain(layers, room)
        certificate = bound
    elif solver == "greedy":
        picks = _greedy_any(layers, room)
        certificate = bound
    else:
        picks, certificate = _exact(layers, room)
    choice = tuple(int(layer.index[p]) for layer, p in zip(layers, picks, strict=True))
    rows = np.arange(len(s))
    objective = math.fsum(s[rows, choice])
    gap = objective - certificate
    return Solution(
        choice=choice,
        objective=objective,
        cost=int(m[rows, choice].sum()),
        bound=min(bound, objective),
        gap=gap / abs(objective) if gap > _REL * (1 + abs(objective)) else 0.0,
        solver=solver,
    )


def solve_common(
    sensitivity: npt.ArrayLike, cost: npt.ArrayLike, budget: int, groups: npt.ArrayLike, solver: str = "exact"
) -> Solution:
    """As `solve`, where every layer must choose from one common group of columns: MoE-nD's `2d`, one keep for all.

    groups: (C,) labels, e.g. the rank of each configuration's keep. The group with the least total S that fits wins;
    ties go to the lower cost. Raises Infeasible with the smallest budget of any group.
    """
    s, m = _checked(sensitivity, cost)
    label = np.asarray(groups)
    if label.shape != (s.shape[1],):
        raise ValueError(f"groups must have one label per configuration ({s.shape[1]}), got shape {label.shape}")
    found: list[Solution] = []
    smallest: list[int] = []
    for group in np.unique(label):
        columns = np.flatnonzero(label == group)
        smallest.append(int(m[:, columns].min(axis=1).sum()))
        if smallest[-1] <= budget:
            part = solve(s[:, columns], m[:, columns], budget, solver)
            found.append(dataclasses.replace(part, choice=tuple(int(columns[c]) for c in part.choice)))
    if not found:
        raise Infeasible(
            f"the cheapest common configuration needs {min(smallest)} bytes, the budget is {budget}",
            smallest=f"{min(smallest)}B",
        )
    best = min(found, key=lambda x: (x.objective, x.cost))
    lower = min(x.objective * (1 - x.gap) for x in found)
    gap = best.objective - lower
    return dataclasses.replace(
        best,
        bound=min(x.bound for x in found),
        gap=gap / abs(best.objective) if gap > _REL * (1 + abs(best.objective)) else 0.0,
    )


def _checked(sensitivity: npt.ArrayLike, cost: npt.ArrayLike) -> tuple[Floats, Ints]:
    s = np.asarray(sensitivity, dtype=np.float64)
    raw = np.asarray(cost)
    if s.ndim != 2 or s.shape != raw.shape or s.size == 0:
        raise ValueError(f"sensitivity and cost must both be (layers, configurations), got {s.shape} and {raw.shape}")
    if not np.isfinite(s).all():
        layer, column = np.argwhere(~np.isfinite(s))[0]
        raise ValueError(f"sensitivity of layer {layer}, configuration {column} is {s[layer, column]}")
    if not np.issubdtype(raw.dtype, np.integer) or raw.min() < 0:
        raise ValueError(f"costs must be whole numbers >= 0, got {raw.dtype} with minimum {raw.min()}")
    return s, raw.astype(np.int64)


def _pareto(s: Floats, m: Ints) -> _Layer:
    order = np.lexsort((np.arange(len(s)), s, m))
    best = np.minimum.accumulate(s[order])
    keep = order[np.concatenate([[True], s[order][1:] < best[:-1]])]
    return _Layer(m[keep], s[keep], keep)


def _greedy_chain(layers: list[_Layer], room: int) -> list[int]:
    steps = [[*np.diff(layer.cost).tolist(), _NEVER] for layer in layers]
    rates = [[*(-np.diff(layer.value) / np.diff(layer.cost)).tolist(), 0.0] for layer in layers]
    at = [0] * len(layers)
    step = np.array([x[0] for x in steps])
    rate = np.array([x[0] for x in rates])
    while True:
        best = int(np.where(step <= room, rate, -1.0).argmax())
        if step[best] > room:
            return at
        room -= int(step[best])
        at[best] += 1
        step[best], rate[best] = steps[best][at[best]], rates[best][at[best]]


def _greedy_any(layers: list[_Layer], room: int) -> list[int]:
    # Dominated configurations never win a step: their dominator costs no more and gains at least as much.
    width = max(len(layer.cost) for layer in layers)
    cost = np.full((len(layers), width), _NEVER)
    value = np.zeros((len(layers), width))
    for row, layer in enumerate(layers):
        cost[row, : len(layer.cost)] = layer.cost
        value[row, : len(layer.cost)] = layer.value
    extra = cost - cost[:, :1]
    gain = value[:, :1] - value
    at = [0] * len(layers)
    while True:
        fits = (extra > 0) & (extra <= room)
        rate = np.where(fits, gain, -1.0) / np.maximum(extra, 1)
        row, column = divmod(int(rate.argmax()), width)
        if not fits[row, column]:
            return at
        room -= int(extra[row, column])
        at[row] = column
        extra[row] -= extra[row, column]
        gain[row] -= gain[row, column]


def _exact(layers: list[_Layer], room: int) -> tuple[list[int], float]:
    """Positions on the Pareto chains and a proven lower bound (the optimum itself unless states had to be dropped)."""
    best = min((_greedy_any(layers, room), _greedy_chain(layers, room)), key=lambda p: _total(layers, p))
    top = _total(layers, best)
    dropped = math.inf
    cost, value = np.zeros(1, dtype=np.int64), np.zeros(1)
    trail: list[tuple[Ints, Ints]] = []
    for i, layer in enumerate(layers):
        rest = _Relaxation(layers[i + 1 :])
        all_cost = (cost[:, None] + (layer.cost - layer.cost[0])).ravel()
        all_value = (value[:, None] + layer.value).ravel()
        alive = np.flatnonzero(all_cost <= room)
        lower = all_value[alive] + rest(room - all_cost[alive])
        promising = lower < top - _REL * (1 + abs(top))
        alive, lower = alive[promising], lower[promising]
        order = np.lexsort((all_value[alive], all_cost[alive]))
        alive, lower = alive[order], lower[order]
        if len(alive) == 0:
            return best, min(top, dropped)
        running = np.minimum.accumulate(all_value[alive])
        useful = np.concatenate([[True], all_value[alive][1:] < running[:-1]])
        alive, lower = alive[useful], lower[useful]
        if len(alive) > STATES:
            ranked = np.argsort(lower, kind="stable")
            dropped = min(dropped, float(lower[ranked[STATES]]))
            alive = alive[np.sort(ranked[:STATES])]
        trail.append((alive // len(layer.cost), alive % len(layer.cost)))
        cost, value = all_cost[alive], all_value[alive]
    end = int(value.argmin())
    picks: list[int] = []
    for parent, option in reversed(trail):
        picks.append(int(option[end]))
        end = int(parent[end])
    picks.reverse()
    return picks, min(_total(layers, picks), dropped)


def _total(layers: list[_Layer], picks: list[int]) -> float:
    return math.fsum(layer.value[p] for layer, p in zip(layers, picks, strict=True))
