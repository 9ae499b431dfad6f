"""Seconds from a finished sweep to its report: `python -m perf.report --cells 500` prints one JSON object.

The cells are made up (scores, bytes and times drawn from a seeded generator, in the files of a real run): `write` makes
tables, figures and the page, `compared` the paired differences of all methods; `cpu` is this process's CPU time, which
other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moend.version import ENGINE_VERSION
from pipelines.planning import identity
from pipelines.reporting import report
from pipelines.results import aggregate as results
from pipelines.store.cells import Store
from pipelines.store.files import write_json

METHODS = ("full", "1d", "2d_uniform", "2d", "2d_hetero", "ripple_2d", "SnapKV", "H2O", "PyramidKV", "RippleKV")
BUDGETS = ("0.05r", "0.1r", "0.2r", "0.3r", "0.4r", "0.5r")
ARCH = {"layers": 28, "q_heads": 28, "kv_heads": 4, "head_dim": 128, "max_positions": 131072}
LAYERS = 28


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=500)
    parser.add_argument("--examples", type=int, default=50)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        build(store, cells(args.cells), examples=args.examples)
        clock, cpu = [time.perf_counter()], [time.process_time()]
        found = report.rows(store, store.read_manifest("latest"))
        differences = report.compared(store, found)
        clock.append(time.perf_counter())
        made = report.write(store, "latest", differences)
        clock.append(time.perf_counter())
        cpu.append(time.process_time())
        page = made[0].stat().st_size
    out = {"cells": len(found), "examples": args.examples, "differences": len(differences), "files": len(made)}
    seconds = {"compared": round(clock[1] - clock[0], 2), "write": round(clock[2] - clock[1], 2)}
    print(
        json.dumps({**out, **seconds, "cpu": round(cpu[1] - cpu[0], 2), "page_mib": round(page / 2**20, 2)}, indent=1)
    )


def cells(count: int) -> list[dict[str, Any]]:
    """So many cells: methods by budgets, over as many benchmarks as it takes."""
    out: list[dict[str, Any]] = []
    i = 0
    while len(out) < count:
        for method in METHODS:
            budgets = (None,) if method == "full" else BUDGETS
            out += [{"method": method, "budget": budget, "benchmark": f"text{i}"} for budget in budgets]
        i += 1
    return out[:count]


def build(
    store: Store,
    wanted: Sequence[dict[str, Any]],
    *,
    examples: int = 20,
    name: str = "made_up",
    model: str = "a_model",
    arch: dict[str, int] | None = None,
    tasks: Sequence[str] = ("one",),
) -> list[dict[str, Any]]:
    """A finished sweep of made-up cells in a store; returns the manifest's cells.

    wanted: method, budget (canonical, None for full) and benchmark of each, and where it differs from the defaults
    model, protocol, question_visible, state (not `done`: no result) with a reason, payload (more fields of the method),
    length, new_tokens, lower (is better), alone (decoded by itself), chance (of an example to be right).
    """
    listed = []
    for spec in wanted:
        payload = {
            "model": {"arch": arch or ARCH},
            "method": {"name": spec["method"], **spec.get("payload", {}).get("method", {})},
            "generation": {"max_new_tokens": spec.get("new_tokens"), "samples": 1},
            "budget": spec["budget"],
            "budget_protocol": None if spec["budget"] is None else spec.get("protocol", "matched"),
            "question_visible": spec.get("question_visible", True),
            "seed": 0,
            "facts": {
                "engine": ENGINE_VERSION,
                "benchmark": {"name": spec["benchmark"], "scorer_version": 1, "length": spec.get("length")},
            },
            "calibrations": {},
        }
        key = identity.key([payload, spec.get("model", model), name])
        info = {
            "model": spec.get("model", model),
            "method": spec["method"],
            "benchmark": spec["benchmark"],
            "label": f"{spec['method']} {spec['budget']} {spec['benchmark']}",
            "benchmark_config": {"name": spec["benchmark"], "type": "recall", "length": spec.get("length")},
            "metrics": dict.fromkeys(tasks, "exact_match"),
            "unit": "nats" if spec.get("lower") else "fraction",
            "higher_is_better": not spec.get("lower"),
            "n_expected": examples * len(tasks),
            "samples": 1,
        }
        cell = {
            "key": key,
            "group": "g",
            "state": spec.get("state", "done"),
            "reason": "",
            "payload": payload,
            "info": info,
        }
        listed.append(cell)
        folder = store.cell(key)
        folder.create(payload, info)
        records = [_record(spec, task, i, key) for task in tasks for i in range(examples)]
        if cell["state"] != "done":
            cell["reason"], records = spec.get("reason", ""), records[:1]
        lines = "".join(json.dumps(r) + "\n" for r in records)
        (folder.folder / "records" / "0-of-1.jsonl").write_text(lines, encoding="utf-8")
        if cell["state"] == "done":
            write_json(folder.folder / "result.json", results.aggregate(cell, records))
            if spec["method"] in ("2d_hetero", "ripple_2d"):
                write_json(folder.folder / "plan.json", _plan(key))
    store.sweep(name).mkdir(parents=True, exist_ok=True)
    manifest = {
        "schema": 1,
        "name": name,
        "created": "2026-11-30T12:00:00+0000",
        "command": f"python -m made.up {name}",
    }
    write_json(store.manifest(name), {**manifest, "cells": listed})
    return listed


def _record(spec: dict[str, Any], task: str, i: int, key: str) -> dict[str, Any]:
    rng = random.Random(f"{key} {task} {i}")
    keep = 1.0
    if (budget := spec["budget"]) is not None:
        keep = min(float(budget[:-1]) / (1 if budget[-1] == "r" else 8192), 1)
    held = int(1e8 * keep)
    score = 2 + rng.random() if spec.get("lower") else float(rng.random() < spec.get("chance", 0.2 + 0.7 * keep))
    prompt = spec.get("length") or 1000
    fused = 1 if spec.get("alone") else 8
    anchors = {"gamma": rng.random(), "anchors": 32, "replaced": rng.random()}
    return {
        "task": task, "id": f"{task}-{i}", "draw": 0, "score": score, "answer": "x", "text": "x",
        "prompt_tokens": prompt, "new_tokens": 8, "truncated": 0, "finish_reason": "eos", 
        "answer_nll": rng.random(), "token_accuracy": score,
        "compressed": keep < 1, "eq1_bytes": held, "resident_bytes": held, "resident_bytes_end": held + 1000,
        "resident_bytes_peak": held + 2000, "full_bytes": int(1e8), "requested": [1] * LAYERS, "entries": [1] * LAYERS,
        "effective_keep": [keep] * LAYERS, "k_bits": [16] * LAYERS, "v_bits": [16] * LAYERS, "peak_bytes": 1,
        "diagnostics": anchors if spec["method"] == "MoEZip" else {},
        "kept": _kept(rng, keep) if i == 0 else None,
        "timing": {
            "fused_rows": fused, "group_prefill_seconds": prompt / 1e4 * rng.uniform(0.9, 1.1), "select_seconds": 0.01,
            "pack_seconds": 0.0, "decode_seconds_share": (0.2 + 0.3 * keep) * rng.uniform(0.9, 1.1),
        },
    }  # fmt: skip


def _kept(rng: random.Random, keep: float) -> dict[str, Any]:
    layers = [bytes(255 * (rng.random() < keep) for _ in range(128)).hex() for _ in range(LAYERS)]
    return {"tokens": 1000, "layers": layers, "answer": 0.4}


def _plan(key: str) -> dict[str, Any]:
    rng = random.Random(key)
    bits = (16, 8, 4)
    layers = [
        {"keep": rng.choice((0.1, 0.25, 0.5)), "tokens": None, "k_bits": rng.choice(bits), "v_bits": rng.choice(bits)}
        for _ in range(LAYERS)
    ]
    return {"schema": 1, "t_ref": 1000, "layers": layers}


if __name__ == "__main__":
    main()
