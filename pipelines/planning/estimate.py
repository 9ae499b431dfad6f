"""How long a plan will take on one worker: by the speed of earlier records in the store, else by arithmetic.

An upper bound where answers end early: every answer is taken to be as long as allowed, every prompt as long as the
longest. Good for minutes against days, not for comparing methods.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moend import paths
from moend.budget import Arch
from pipelines.cli.terminal import duration
from pipelines.planning.facts import on_gpu
from pipelines.planning.needs import target
from pipelines.store.cells import Store, parse_records

if TYPE_CHECKING:
    from pipelines.planning.planner import Cell, Plan

LOOKED_AT = 200  # finished cells, the newest first: a store may hold thousands
USED = 8  # of one model, the newest first
# Rough: what current hardware reaches on such models, not its peak.
GPU = (1e14, 1.5e12)  # FLOP/s, bytes/s
CPU = (6e10, 1e10)  # FLOP/s of one thread


@dataclass(frozen=True)
class Speed:
    """Seconds per prompt token, per decoding step of a batch and per token and row of it, and where they are from."""

    prompt: float
    step: float
    token: float
    source: str


def estimate(plan: Plan) -> str:
    """The line of a plan: how long its waiting cells take, and what that is worth."""
    total, sources = 0.0, {}
    known: dict[str, Speed | None] = {}

    def speed_of(cell: Cell) -> Speed | None:
        name = cell.facts.model
        if name not in known:
            known[name] = measured(plan.store, name, cell.facts.identity.get("model"))
        return known[name] or rough(cell)

    for group in plan.waiting:
        facts, speed = group[0].facts, speed_of(group[0])
        if speed is None:
            return f"not known: the shape of {facts.model} is read when it is here"
        total += seconds(group, speed)
        sources[facts.model] = speed.source
    lines = dict.fromkeys(sources.values())
    measuring, unknown = calibrating(plan, speed_of)
    also = f", of it {duration(measuring)} for calibrations" if measuring >= 1 else ""
    apart = ", ".join(["loading", *unknown])
    return f"at most about {duration(total + measuring)} on one worker{also}; {apart} not counted ({'; '.join(lines)})"


def calibrating(plan: Plan, speed_of: Callable[[Cell], Speed | None]) -> tuple[float, list[str]]:
    """Seconds for the calibrations that must be measured, and the kinds that give no estimate.

    Calibrations in the store or in the package take no time.
    """
    from moend.calibration import kind

    total, unknown = 0.0, []
    cells = [c for group in plan.waiting for c in group]
    for need, cell in {n.key: (n, c) for c in cells for n in c.facts.calibrations}.values():
        there = (plan.store.calibration(need.key) / "artefact.json").exists()
        if there or paths.calibration(need.key) is not None or (arch := cell.facts.arch) is None:
            continue
        work = kind(need.kind).work(target(cell.config), arch)
        speed = speed_of(cell)
        if work is None or speed is None:
            unknown.append(f"{need.kind} calibration")
        else:
            total += work * speed.prompt
    return total, unknown


def seconds(group: list[Cell], speed: Speed) -> float:
    """One prefill per example for all cells, then a row per record that is missing: one batch, or each alone."""
    facts = group[0].facts
    rows: dict[tuple[str, str], int] = {}
    for cell in group:
        for task, id, _ in cell.missing:
            rows[task, id] = rows.get((task, id), 0) + 1
    contexts = sum(any(example in rows for example in context) for context in facts.contexts)
    new = 0 if facts.is_nll else facts.new_tokens  # a likelihood is read in one step, like a prompt
    if group[0].config.benchmark.get("turns"):  # the tokens are those of all turns
        new //= max(map(len, facts.contexts))
    read = facts.prompt_tokens * max(c.facts.reads for c in group) + (facts.new_tokens if facts.is_nll else 0)
    fused = group[0].config.engine.fuse
    answers = sum(new * (speed.step * (1 if fused else n) + n * speed.token) for n in rows.values())
    return contexts * read * speed.prompt + answers


def measured(store: Store, model: str, identity: Any) -> Speed | None:
    """Speed of the newest finished cells of a model, or None where there are none."""
    prompt = new = 0
    prefill = decode = 0.0
    cells = 0
    for folder in newest(store):
        try:
            described = json.loads((folder / "payload.json").read_text(encoding="utf-8"))
            mine = described["payload"]["facts"]["model"] == identity
            records = _records(folder) if mine else []
        except (OSError, ValueError, KeyError, TypeError):  # damaged: the cell's own plan tells it where it matters
            continue
        for r in records:
            prompt += r["prompt_tokens"]
            prefill += r["timing"]["group_prefill_seconds"]
            if r["new_tokens"]:  # a likelihood is read like a prompt: it says nothing of steps
                new += r["new_tokens"]
                decode += r["timing"]["decode_seconds_share"] + r["timing"]["select_seconds"]
        cells += bool(records)
        if cells == USED:
            break
    if not prompt:
        return None
    source = f"{model}: as in {cells} finished cell{'s' if cells > 1 else ''} of this store"
    return Speed(prefill / prompt, 0.0, decode / max(new, 1), source)


def newest(store: Store) -> Iterable[Any]:
    results = ((p.stat().st_mtime_ns, p.parent) for p in (store.root / "cells").glob("*/result.json"))
    return [folder for _, folder in sorted(results, reverse=True)[:LOOKED_AT]]


def _records(folder: Any) -> list[dict[str, Any]]:
    paths = sorted((folder / "records").glob("*-of-*.jsonl"))
    return [r for p in paths[:1] for r in parse_records(p.read_bytes(), p)]


def rough(cell: Cell) -> Speed | None:
    """From the model's shape: 14 h^2 weights a layer (h: width of its heads), two FLOPs each per token, attention.

    A decoding step reads all weights once for all rows.
    """
    arch = cell.facts.arch
    if arch is None:
        return None
    size = weights(arch)
    if on_gpu(cell.config):
        name, (flops, bandwidth), width = "a GPU of 100 TFLOP/s and 1.5 TB/s", GPU, 2
    else:
        threads = os.cpu_count() or 1
        name = f"{threads} CPU threads of 60 GFLOP/s and 10 GB/s"
        flops, bandwidth, width = CPU[0] * threads, CPU[1], 4
    token = 2 * size / flops
    attention = 2 * arch.layers * arch.q_heads * arch.head_dim * cell.facts.prompt_tokens / flops
    step = size * width / bandwidth
    source = f"{cell.facts.model}: rough, {size / 1e6:,.0f}M weights by its shape on {name}, no finished cells here yet"
    return Speed(token + attention, step, token, source)


def weights(arch: Arch) -> float:
    """Parameters of the layers, roughly; a mixture of experts has more but uses about as many for a token."""
    return 14.0 * arch.layers * (arch.q_heads * arch.head_dim) ** 2
