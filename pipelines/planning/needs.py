"""The calibrations a cell uses, by identity: known before any of them is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipelines.planning import parts
from pipelines.planning.identity import canonical, key
from pipelines.planning.schema import RunConfig

if TYPE_CHECKING:
    from moend.budget import Arch
    from moend.calibration import Target


@dataclass(frozen=True)
class CalibrationNeed:
    """An artefact a cell uses: its kind, its key and the identity that the key is the hash of."""

    kind: str
    key: str
    identity: dict[str, Any] = field(compare=False, hash=False)


def target(config: RunConfig) -> Target:
    """What a cell's calibrations are made for."""
    from moend.calibration import Target

    spec, method, _ = parts.parts(config)
    return Target(parts.calibration(canonical(config.calibration)), method, spec)


def needs(config: RunConfig, arch: Arch, weights: dict[str, Any]) -> tuple[CalibrationNeed, ...]:
    """The artefacts of a cell by identity, the scorer's own statistics before those that use them."""
    from moend.calibration import kind, kinds
    from moend.calibration.artefact import artefact_key, identity

    asked = target(config)
    method, spec = asked.method, asked.model
    scorer = method.make_scorer()
    statistics = None if scorer is None else scorer.statistics
    wanted = sorted(method.calibrations, key=lambda name: name != statistics)
    wanted += [name for name in kinds() if name not in wanted and kind(name).concerns(method)]
    revision = str(weights.get("revision") or weights.get("weights_sha256"))
    made: dict[str, CalibrationNeed] = {}
    for name in wanted:
        this = kind(name)
        settings = {"dtype": spec.dtype, **this.identity(asked)}
        if statistics in made and "scorer" in settings:
            settings[str(statistics)] = made[str(statistics)].key
        described = identity(str(weights["id"]), revision, arch, settings, key(this.texts(asked)), {name: this.version})
        made[name] = CalibrationNeed(name, artefact_key(name, described), described)
    return tuple(made.values())


def texts_read(config: RunConfig, name: str) -> tuple[str, ...]:
    """The texts that a kind of calibration is measured on for a cell."""
    from moend.calibration import kind

    found: list[str] = []
    for value in kind(name).texts(target(config)).values():
        listed = value if isinstance(value, list | tuple) else [value]
        found += [x for x in listed if isinstance(x, str)]
    return tuple(found)
