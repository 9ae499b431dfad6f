"""From records to a result: scores with intervals, bytes, speeds. Reads only files, so scores can be made again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from moend import statistics
from moend.errors import UserError
from pipelines.store.provenance import commit, machine, mixed, versions

Records = Sequence[dict[str, Any]]


def aggregate(cell: dict[str, Any], records: Records) -> dict[str, Any]:
    """The content of result.json from a cell's {key, payload, info} and all of its records.

    UserError where there are fewer or more than the cell has: a part of a cell is never averaged.
    """
    payload, info = cell["payload"], cell["info"]
    if len(records) != info["n_expected"]:
        raise UserError(
            f"cell {cell['key']} has {len(records)} of {info['n_expected']} records: no result is made of a part"
        )
    scored = statistics.summarise(records)
    tasks = {t: {**_interval(v), "n": v["n"], "metric": info["metrics"][t]} for t, v in scored["tasks"].items()}
    fused = max(r["timing"]["fused_rows"] for r in records)
    answered = [r["answer"] is not None for r in records]
    new_tokens = sum(r["new_tokens"] for r in records)
    decode = sum(r["timing"]["decode_seconds_share"] for r in records)
    nll = [r["answer_nll"] for r in records if r["answer_nll"] is not None]
    accuracy = [r["token_accuracy"] for r in records if r["token_accuracy"] is not None]
    full, resident = fmean(r["full_bytes"] for r in records), fmean(r["resident_bytes"] for r in records)
    return {
        "key": cell["key"],
        "status": "done",
        "model": info["model"],
        "method": info["method"],
        "settings": payload["method"],  # scorer with its window and pooling, sinks, schedule: what the name stands for
        "budget": payload["budget"],
        "budget_protocol": payload["budget_protocol"],
        "budget_at": payload.get("budget_at"),
        "benchmark": info["benchmark"],
        "question_visible": payload["question_visible"],
        "seed": payload["seed"],
        "n": scored["n"],
        "n_records": len(records),
        "n_expected": info["n_expected"],
        "samples": info["samples"],
        **_interval(scored),
        "metric": next(iter(info["metrics"].values())) if len(set(info["metrics"].values())) == 1 else "mean of tasks",
        "higher_is_better": info["higher_is_better"],
        "unit": info["unit"],
        "scorer_version": payload["facts"]["benchmark"]["scorer_version"],
        "tasks": tasks,
        "official": _official(cell, records),
        "grid": _grid(records),
        "turns": _turns(records),
        "answer_nll": fmean(nll) if nll else None,
        "token_accuracy": fmean(accuracy) if accuracy else None,
        "eq1_bytes": fmean(r["eq1_bytes"] for r in records),
        "resident_bytes": resident,
        "resident_bytes_end": fmean(r["resident_bytes_end"] for r in records),
        "resident_bytes_peak": max(r["resident_bytes_peak"] for r in records),
        "resident_bytes_peak_mean": fmean(r["resident_bytes_peak"] for r in records),
        "full_bytes": full,
        "compression": full / resident if resident else None,
        "compressed": sum(r["compressed"] for r in records),
        "entries_per_head": {
            "requested": records[0]["requested"],
            "held": [fmean(column) for column in zip(*(r["entries"] for r in records), strict=True)],
            "effective_keep": [fmean(column) for column in zip(*(r["effective_keep"] for r in records), strict=True)],
        },
        "diagnostics": _diagnostics(records),
        "k_bits": records[0]["k_bits"],
        "v_bits": records[0]["v_bits"],
        "prefill_seconds": sum(r["timing"]["group_prefill_seconds"] / r["timing"]["fused_rows"] for r in records),
        "decode_seconds": decode,
        "tokens_per_second": new_tokens / decode if decode > 0 and new_tokens else None,
        "fused": fused > 1,
        "timing": {
            "fused_rows": fused,
            "group_prefill_seconds": sum(r["timing"]["group_prefill_seconds"] for r in records),
            "select_seconds": sum(r["timing"]["select_seconds"] for r in records),
            "pack_seconds": sum(r["timing"]["pack_seconds"] for r in records),
            "decode_seconds_share": decode,
        },
        "peak_bytes": max(r["peak_bytes"] for r in records),
        "device_peak_bytes": max((x for r in records if (x := r.get("device_peak_bytes"))), default=None),
        "timed": bool(payload.get("engine", {}).get("timed")),
        "extraction_rate": sum(answered) / len(answered) if new_tokens else None,
        "truncated": sum(r["truncated"] > 0 for r in records),
        "finish_reasons": dict(Counter(r["finish_reason"] for r in records)),
        "mixed": mixed(records),
        "versions": versions(),
        "commit": commit(),
        "machine": machine(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _diagnostics(records: Records) -> dict[str, Any]:
    """Means over the records of what methods say they did, head_tokens head by head; {} where no record says anything.

    notes: how many records bear each.
    """
    said = [r.get("diagnostics") or {} for r in records]
    found: dict[str, Any] = {}
    for name in sorted({k for d in said for k in d} - {"note"}):
        values = [d[name] for d in said if name in d]
        if isinstance(values[0], list):
            found[name] = [[fmean(x) for x in zip(*heads, strict=True)] for heads in zip(*values, strict=True)]
        else:
            found[name] = fmean(values)
    if notes := Counter(d["note"] for d in said if "note" in d):
        found["notes"] = dict(notes)
    return found


def _official(cell: dict[str, Any], records: Records) -> dict[str, dict[str, float]] | None:
    """Metrics by task as the benchmark's own code computes them from all records; None where it has no such code."""
    from moend.benchmarks import benchmark

    if not all("metrics" in r for r in records):
        return None
    fields = cell["info"]["benchmark_config"]
    reasoning = bool((cell["payload"].get("generation") or {}).get("reasoning"))
    return benchmark(fields, reasoning=reasoning).aggregated(records)


def _turns(records: Records) -> list[dict[str, Any]] | None:
    """Score with interval of each turn, where the questions of a context are turns of one chat."""
    numbers = sorted({r["turn"] for r in records if r.get("turn") is not None})
    found = []
    for turn in numbers:
        scored = statistics.summarise([r for r in records if r.get("turn") == turn])
        found.append({"turn": turn, **_interval(scored), "n": scored["n"]})
    return found or None


def _grid(records: Records) -> list[dict[str, Any]] | None:
    """Mean score at each length and depth, where the benchmark is a grid of them."""
    places: dict[tuple[int, float], list[float]] = {}
    for r in records:
        if (axes := r.get("axes")) is not None:
            places.setdefault((axes["length"], axes["depth"]), []).append(r["score"])
    cells = [{"length": n, "depth": d, "score": fmean(x), "n": len(x)} for (n, d), x in sorted(places.items())]
    return cells or None


def _interval(scored: dict[str, Any]) -> dict[str, float | None]:
    """Null bounds: the examples say nothing about the spread."""
    return {"score": scored["score"], "score_low": scored["low"], "score_high": scored["high"]}
