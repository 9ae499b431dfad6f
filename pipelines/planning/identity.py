"""What makes a cell the same cell: canonical JSON, keys by opting out, and differences told field by field.

A key is the hash of every field of the resolved configuration except those declared run-only below, joined by what
the configuration cannot see (weights, data, calibrations, versions of prompts, scoring and method). A field that is
added later counts by default: forgetting to think about it costs a recomputation, never a wrong result.
"""

from __future__ import annotations

from typing import Any

from pipelines.store.payload import canonical, differences, key, refuse_difference

__all__ = ["canonical", "cell_payload", "differences", "group_payload", "key", "refuse_difference", "semantic"]

SCHEMA = 1
# Fields that change where, how fast or how visibly a cell runs, but not what it is.
RUN_ONLY = frozenset(
    {
        "paths",
        "cluster",
        "tracking",
        "dry_run",
        "engine.chunk",
        "engine.max_bytes",
        "model.device",
        "model.device_map",
        # What follows counts in another form, as a fact: a path or a name may stand for anything.
        "benchmark",  # by the benchmark's own identity: its fields, versions and the fingerprint of its samples
        "calibration",  # by the keys of the artefacts a cell uses,
        "model.calibration_text",  # and so does their text
        *(
            "model.id",
            "model.source",
            "model.revision",
            "model.sha256",
            "model.wheel",
        ),  # by the weights' hash or commit
    }
)


# Fields of conf/method that say how a cache is cut: none of them means anything where nothing is ever cut or rounded.
# What is not named here counts, for such a method too.
CUTTING = (*("schedule", "beta", "n_sink", "recent", "group", "channels", "window", "always_quantise"),)


def semantic(config: dict[str, Any], run_only: frozenset[str] = RUN_ONLY) -> dict[str, Any]:
    """The configuration without its run-only fields."""

    def strip(node: dict[str, Any], prefix: str) -> dict[str, Any]:
        return {
            k: strip(v, f"{prefix}{k}.") if isinstance(v, dict) else v
            for k, v in node.items()
            if f"{prefix}{k}" not in run_only
        }

    return strip(config, "")


def cell_payload(
    config: dict[str, Any], facts: dict[str, Any], calibrations: dict[str, str], *, is_full: bool, is_nll: bool
) -> dict[str, Any]:
    """Everything that makes the cell what it is. Fields that mean nothing to it are null, so that equals coincide.

    is_full: the method keeps everything: no budget, no protocol, nothing of how it would cut. is_nll: nothing is
    generated and there is no question: no generation settings, no question mode.
    """
    payload = {"schema": SCHEMA, **semantic(config), "facts": facts, "calibrations": calibrations}
    if is_full:
        method = {k: None if k in CUTTING else v for k, v in payload["method"].items()}
        payload |= {"budget": None, "budget_protocol": None, "budget_at": None, "method": method}
    if is_nll:
        payload |= {"question_visible": None, "generation": None}
    return payload


def group_payload(payload: dict[str, Any]) -> dict[str, Any]:
    """What cells must have in common to share one prefill per example: all but the method and its budget."""
    apart = ("method", "budget", "budget_protocol", "budget_at", "calibrations")
    shared = {k: v for k, v in payload.items() if k not in apart}
    return {**shared, "facts": {k: v for k, v in payload["facts"].items() if k not in ("method", "scorer")}}
