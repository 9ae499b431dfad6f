"""The calibrations a cell uses, by identity: known before any of them is made."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipelines.planning import parts
from pipelines.planning.identity import canonical, key
from pipelines.planning.schema import RunConfig

if TYPE_CHECKING:
    from moend.budget import Arch
    from moend.calibration import AgreementSettings, Calibration, DamageSettings, RippleSettings
    from moend.methods.spec import Method
    from moend.models.load import ModelSpec


@dataclass(frozen=True)
class CalibrationNeed:
    """An artefact a cell uses: its kind, its key and the identity that the key is the hash of."""

    kind: str
    key: str
    identity: dict[str, Any] = field(compare=False, hash=False)


def needs(
    config: RunConfig, spec: ModelSpec, method: Method, arch: Arch, weights: dict[str, Any]
) -> tuple[CalibrationNeed, ...]:
    """The artefacts of a cell by identity, `queries` before the `sensitivity` that may use it."""
    from moend.calibration.artefact import artefact_key, identity

    calibration = parts.calibration(canonical(config.calibration))
    text = calibration.text or spec.calibration_text
    prompt = {"text": text, "chat_template": spec.chat_template}
    revision = str(weights.get("revision") or weights.get("weights_sha256"))
    made: dict[str, CalibrationNeed] = {}
    quantiser = ("agreement",) if method.quantises else ()
    agree = agreement_settings(calibration, spec)
    for kind in (*sorted(method.calibrations, key=lambda k: k != "queries"), *quantiser):
        texts = {
            "kl": lambda: {"text": kl_text(calibration)},
            "ripple": lambda: {"texts": example_texts(calibration.ripple, calibration.ripple.examples)},
            "damage": lambda: {"texts": example_texts(calibration.damage, damage_examples(calibration.damage))},
            "agreement": lambda: {"texts": example_texts(agree, agree.examples)},
        }
        data = key(texts.get(kind, lambda: prompt)())
        settings = {"dtype": spec.dtype, **calibration.settings(kind, method.settings["scorer"])}
        if kind == "ripple":  # what the method protects is left alone
            settings |= {"n_sink": method.n_sink, "recent": method.recent}
        if kind == "damage":  # and how it stores what it keeps
            held = ("n_sink", "recent", "group", "window", "channels")
            settings |= {"method": {name: getattr(method, name) for name in held}}
            settings |= {"heads": True} if method.make_allocator().divides_heads else {}
        if kind == "agreement":  # how it stores, not what it keeps
            settings |= {"store_dtype": spec.store_dtype}
            settings |= {name: getattr(method, name) for name in ("group", "channels", "window")}
        if "queries" in made and "scorer" in settings:
            settings["queries"] = made["queries"].key
        described = identity(str(weights["id"]), revision, arch, settings, data, _versions(kind))
        made[kind] = CalibrationNeed(kind, artefact_key(kind, described), described)
    return tuple(made.values())


def kl_text(calibration: Calibration) -> str:
    """The calibration part of the text that KL tables are measured on; no benchmark tests on it."""
    from moend.benchmarks import text

    return text.part("calibration", calibration.kl.text_file)


def damage_examples(s: DamageSettings) -> int:
    """Examples of all kinds."""
    return len(s.kinds) * s.examples


def agreement_settings(calibration: Calibration, spec: ModelSpec) -> AgreementSettings:
    """The settings of token agreement, with the text that the model knows."""
    s = calibration.agreement
    return s if s.text is not None else dataclasses.replace(s, text=spec.texts)


def example_texts(s: RippleSettings | DamageSettings | AgreementSettings, count: int) -> list[str]:
    """What profiles and damage are measured on, never tested on: one text to cut from, or (recall) one an example."""
    from moend.benchmarks import recall, text

    if s.text == "recall":
        return recall.calibration_texts(count, s.prefix, s.window)
    return [text.part("calibration", s.text_file)]


def _versions(kind: str) -> dict[str, int]:
    from moend.calibration import agreement, damage, kl, ripple, sensitivity
    from moend.calibration import trig as queries

    versions = {
        "sensitivity": sensitivity.VERSION,
        "queries": queries.VERSION,
        "kl": kl.VERSION,
        "ripple": ripple.VERSION,
        "damage": damage.VERSION,
        "agreement": agreement.VERSION,
    }
    return {kind: versions[kind]}
