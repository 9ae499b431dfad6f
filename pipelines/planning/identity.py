"""What makes a cell the same cell: canonical JSON, keys by opting out, and differences told field by field.

A key is the hash of every field of the resolved configuration except those declared run-only below, joined by what
the configuration cannot see (weights, data, calibrations, versions of prompts, scoring and method). A field that is
added later counts by default: forgetting to think about it costs a recomputation, never a wrong result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moend import version
from pipelines.store.payload import canonical, differences, key, refuse_difference

__all__ = [
    "canonical",
    "cell_payload",
    "differences",
    "former",
    "group_payload",
    "key",
    "refuse_difference",
    "semantic",
    "upgrade",
]

SCHEMA = 2
FIRST_ENGINE = 3  # payloads of earlier engines have other fields (no `budget_at`): no cell of today's is among them
# Fields that change where, how fast or how visibly a cell runs, but not what it is.
RUN_ONLY = frozenset(
    {
        "paths",
        "cluster",
        "tracking",
        "dry_run",
        "engine.chunk",
        "engine.max_bytes",
        "engine.save_every_s",
        "engine.kept",
        "model.device",
        "model.device_map",
        "model.thinks",  # told of the template, which counts with the weights
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
    if not payload["engine"].get("timed"):  # came later: its default means what there was before
        payload["engine"] = {k: v for k, v in payload["engine"].items() if k != "timed"}
    if payload["generation"]["thinking"] == "auto":  # nothing is said to the template
        payload["generation"] = {**payload["generation"], "thinking": None}
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


def _added(payload: dict[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
    """The fields that schema 2 added to a payload: where each stands, and the value that schema 1 implied."""
    added: list[tuple[tuple[str, ...], Any]] = [
        (("facts", "benchmark", "questions_per_context"), 1),
        (("facts", "benchmark", "turns"), False),
    ]
    if payload["facts"]["benchmark"].get("type") in ("niah", "niah_grid"):
        added.append((("facts", "benchmark", "phrasing"), 0))
    if payload["generation"] is not None:
        added.append((("generation", "thinking"), None))
    return added


def upgrade(payload: dict[str, Any]) -> dict[str, Any]:
    """A payload as this version writes it, for comparisons: what schema 1 implied is written out."""
    if payload.get("schema") != 1:
        return payload
    for path, implied in _added(payload):
        payload = _with(payload, path, implied)
    return {**payload, "schema": SCHEMA}


def former(payload: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """How the same cell was written before, the newest first: by engines whose numbers stand, and in schema 1.

    A finished cell under the key of one of them is this cell, and is not computed again.
    """
    before: dict[str, Any] | None = {**payload, "schema": 1}
    for path, implied in _added(payload):
        before = None if before is None else _without(before, path, implied)
    for engine in range(version.ENGINE_VERSION, FIRST_ENGINE - 1, -1):
        if not version.numbers_stand(engine, payload["method"], payload):
            return
        for written in (payload, before):
            if written is not None and (written is not payload or engine != payload["facts"]["engine"]):
                yield {**written, "facts": {**written["facts"], "engine": engine}}


def _with(node: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *rest = path
    return {**node, first: _with(node[first], tuple(rest), value) if rest else value}


def _without(node: dict[str, Any], path: tuple[str, ...], implied: Any) -> dict[str, Any] | None:
    """The mapping without a field; None where the field has another value than the implied one."""
    first, *rest = path
    if rest:
        inner = _without(node[first], tuple(rest), implied)
        return None if inner is None else {**node, first: inner}
    if first not in node or node[first] != implied or type(node[first]) is not type(implied):
        return None
    return {k: v for k, v in node.items() if k != first}
