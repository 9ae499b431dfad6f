"""Calibrations: measured once per model, kept as artefacts, checked field by field before they are used."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from moend.errors import UserError, unknown

__all__ = ["AgreementSettings", "Calibration", "DamageSettings", "KLSettings", "RippleSettings"]


@dataclass(frozen=True)
class KLSettings:
    """`calibration.kl`: `sequences` windows of `tokens` tokens, KL over the last `positions` (None: all) of each."""

    sequences: int = 4
    tokens: int = 512
    positions: int | None = 64
    configs: str = "coarse"
    text_file: str | None = None

    def __post_init__(self) -> None:
        for name, low in (("sequences", 1), ("tokens", 2), ("positions", 1)):
            value = getattr(self, name)
            if name == "positions" and value is None:
                continue
            if not _whole(value) or value < low:
                raise UserError(f"calibration.kl.{name} must be a whole number >= {low}, got {value!r}")
        if self.positions is not None and self.positions > self.tokens:
            raise UserError(f"calibration.kl.positions ({self.positions}) is more than its tokens ({self.tokens})")
        if self.configs not in ("all", "paper", "coarse"):
            raise unknown("calibration.kl.configs", str(self.configs), ("all", "paper", "coarse"))


@dataclass(frozen=True)
class RippleSettings:
    """`calibration.ripple`: RippleKV's profile on `examples` examples of `prefix` and `window` tokens.

    relative_noise: alpha sqrt(d), with `draws` of noise from `seed`. stability: also under a third, half, double and
    four times the noise and another seed. damage: shares of the prefix at which D is measured.
    """

    relative_noise: float = 0.3
    examples: int = 16
    prefix: int = 1024
    window: int = 128
    draws: int = 1
    seed: int = 0
    stability: bool = False
    damage: tuple[float, ...] = ()
    text: Literal["text", "recall", "file"] = "text"
    text_file: str | None = None

    def __post_init__(self) -> None:
        for name, low in (("examples", 1), ("prefix", 2), ("window", 1), ("draws", 1), ("seed", 0)):
            if not _whole(value := getattr(self, name)) or value < low:
                raise UserError(f"calibration.ripple.{name} must be a whole number >= {low}, got {value!r}")
        noise = self.relative_noise
        if isinstance(noise, bool) or not isinstance(noise, int | float) or not 0 < noise < float("inf"):
            raise UserError(f"calibration.ripple.relative_noise must be a number > 0, got {noise!r}")
        if not isinstance(self.stability, bool):
            raise UserError(f"calibration.ripple.stability must be true or false, got {self.stability!r}")
        if not all(isinstance(k, int | float) and 0 < k < 1 for k in self.damage):
            raise UserError(f"calibration.ripple.damage must be shares in (0, 1), got {list(self.damage)}")
        if self.text not in ("text", "recall", "file"):
            raise unknown("calibration.ripple.text", str(self.text), ("text", "recall", "file"))
        if (self.text == "file") != (self.text_file is not None):
            raise UserError(
                "calibration.ripple.text_file must be given exactly where calibration.ripple.text is 'file'"
            )


@dataclass(frozen=True)
class DamageSettings:
    """`calibration.damage`: the table of `ripple_2d` on `examples` examples of each of `kinds`.

    KL at every `every`-th of the `window` tokens after `prefix` tokens; `cue`: how many tokens announce a repeated
    passage. keeps x bits are the configurations, bits being (K, V), or (K, V, the least share they are measured at);
    the uncompressed one costs nothing and need not be among them.
    """

    kinds: tuple[str, ...] = ("text", "recall")
    examples: int = 4
    prefix: int = 1024
    window: int = 24
    every: int = 3
    cue: int = 16
    keeps: tuple[float, ...] = (0.025, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0)
    bits: tuple[tuple[float, ...], ...] = ((8, 4, 0.35), (4, 4))
    text: Literal["text", "recall", "file"] = "text"
    text_file: str | None = None

    def __post_init__(self) -> None:
        for name, low in (("examples", 1), ("prefix", 2), ("window", 1), ("every", 1), ("cue", 1)):
            if not _whole(value := getattr(self, name)) or value < low:
                raise UserError(f"calibration.damage.{name} must be a whole number >= {low}, got {value!r}")
        if not self.kinds or len(set(self.kinds)) < len(self.kinds):
            raise UserError(f"calibration.damage.kinds must be different kinds, at least one, got {list(self.kinds)}")
        for kind in self.kinds:
            if kind not in ("text", "recall"):
                raise unknown("calibration.damage.kinds", str(kind), ("text", "recall"))
        if not self.keeps or not all(isinstance(k, int | float) and 0 < k <= 1 for k in self.keeps):
            raise UserError(f"calibration.damage.keeps must be shares in (0, 1], at least one, got {list(self.keeps)}")
        if not self.bits or not all(
            len(b) in (2, 3) and set(b[:2]) <= {16, 8, 4, 2} and all(0 < k <= 1 for k in b[2:]) for b in self.bits
        ):
            raise UserError(
                "calibration.damage.bits must be [K, V] or [K, V, least share] with bits of 16, 8, 4 and 2, at least "
                f"one, got {[list(b) for b in self.bits]}"
            )
        if not self.configs:
            raise UserError("calibration.damage.keeps has no share that any of calibration.damage.bits is measured at")
        if self.text not in ("text", "recall", "file"):
            raise unknown("calibration.damage.text", str(self.text), ("text", "recall", "file"))
        if (self.text == "file") != (self.text_file is not None):
            raise UserError(
                "calibration.damage.text_file must be given exactly where calibration.damage.text is 'file'"
            )

    @property
    def configs(self) -> tuple[tuple[float, int, int], ...]:
        """(keep, K bits, V bits) that are measured, each once, from the dearest to the cheapest."""
        found = {(float(k), int(b[0]), int(b[1])) for k in self.keeps for b in self.bits if all(k >= x for x in b[2:])}
        return tuple(sorted(found, reverse=True))


@dataclass(frozen=True)
class AgreementSettings:
    """`calibration.agreement`: token agreement with full over the last `window` of `prefix + window` tokens.

    text null: the bundled one that the model knows (model.texts).
    """

    examples: int = 20
    prefix: int = 256
    window: int = 64
    text: Literal["text", "recall", "file"] | None = None
    text_file: str | None = None

    def __post_init__(self) -> None:
        for name, low in (("examples", 1), ("prefix", 1), ("window", 1)):
            if not _whole(value := getattr(self, name)) or value < low:
                raise UserError(f"calibration.agreement.{name} must be a whole number >= {low}, got {value!r}")
        if self.text not in (None, "text", "recall", "file"):
            raise unknown("calibration.agreement.text", str(self.text), ("text", "recall", "file"))
        if (self.text == "file") != (self.text_file is not None):
            raise UserError(
                "calibration.agreement.text_file must be given exactly where calibration.agreement.text is 'file'"
            )


@dataclass(frozen=True)
class Calibration:
    """The fields of a conf/calibration file, documented there."""

    text: str | None = None
    eviction: Literal["scorer", "random"] = "scorer"
    seeds: tuple[int, ...] = (0, 1, 2)
    keeps: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 0.05, 0.025, 0.0125)
    bits: tuple[int, ...] = (16, 8, 4)
    kl: KLSettings = field(default_factory=KLSettings)
    ripple: RippleSettings = field(default_factory=RippleSettings)
    damage: DamageSettings = field(default_factory=DamageSettings)
    agreement: AgreementSettings = field(default_factory=AgreementSettings)

    def __post_init__(self) -> None:
        if self.text is not None and not str(self.text).strip():
            raise UserError("calibration.text must be a text, or null for the model's own")
        if self.eviction not in ("scorer", "random"):
            raise unknown("calibration.eviction", str(self.eviction), ("scorer", "random"))
        if not self.seeds or not all(_whole(s) and s >= 0 for s in self.seeds):
            raise UserError(f"calibration.seeds must be whole numbers >= 0, at least one, got {list(self.seeds)}")
        if not self.keeps or not all(isinstance(k, int | float) and 0 < k <= 1 for k in self.keeps):
            raise UserError(f"calibration.keeps must be shares in (0, 1], at least one, got {list(self.keeps)}")
        if not self.bits or not set(self.bits) <= {16, 8, 4, 2}:
            raise UserError(f"calibration.bits must be among 16, 8, 4 and 2, at least one, got {list(self.bits)}")

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Calibration:
        """From a file's or a config's fields; an unknown one is refused with the nearest."""
        values = dict(_known(cls, fields, "calibration"))
        for name in ("seeds", "keeps", "bits"):
            if name in values:
                if not isinstance(values[name], Sequence) or isinstance(values[name], str):
                    raise UserError(f"calibration.{name} must be a list, got {values[name]!r}")
                values[name] = tuple(float(x) if name == "keeps" and _whole(x) else x for x in values[name])
        if "kl" in values:
            if not isinstance(values["kl"], Mapping):
                raise UserError(f"calibration.kl must hold fields of its own, got {values['kl']!r}")
            values["kl"] = KLSettings(**_known(KLSettings, values["kl"], "calibration.kl"))
        if "ripple" in values:
            if not isinstance(values["ripple"], Mapping):
                raise UserError(f"calibration.ripple must hold fields of its own, got {values['ripple']!r}")
            ripple = dict(_known(RippleSettings, values["ripple"], "calibration.ripple"))
            if "damage" in ripple:
                if not isinstance(ripple["damage"], Sequence) or isinstance(ripple["damage"], str):
                    raise UserError(f"calibration.ripple.damage must be a list of shares, got {ripple['damage']!r}")
                ripple["damage"] = tuple(ripple["damage"])
            values["ripple"] = RippleSettings(**ripple)
        if "damage" in values:
            if not isinstance(values["damage"], Mapping):
                raise UserError(f"calibration.damage must hold fields of its own, got {values['damage']!r}")
            damage = dict(_known(DamageSettings, values["damage"], "calibration.damage"))
            for name in {"kinds", "keeps", "bits"} & set(damage):
                if not _listed(damage[name]) or (name == "bits" and not all(_listed(x) for x in damage[name])):
                    raise UserError(f"calibration.damage.{name} must be a list, got {damage[name]!r}")
                damage[name] = tuple(tuple(x) if name == "bits" else x for x in damage[name])
            values["damage"] = DamageSettings(**damage)
        if "agreement" in values:
            if not isinstance(values["agreement"], Mapping):
                raise UserError(f"calibration.agreement must hold fields of its own, got {values['agreement']!r}")
            values["agreement"] = AgreementSettings(
                **_known(AgreementSettings, values["agreement"], "calibration.agreement")
            )
        return cls(**values)

    def measured_eviction(self, scorer: Mapping[str, Any] | None) -> Literal["scorer", "random"]:
        """How entries go while measuring: a method without a scorer keeps all, and columns that evict are random."""
        return self.eviction if scorer is not None else "random"

    def settings(self, kind: str, scorer: Mapping[str, Any] | None) -> dict[str, Any]:
        """The part of an artefact's identity that is settings: only what the numbers of this kind depend on.

        scorer: name and parameters of the method's scorer (`damage`; `sensitivity` and `kl` with eviction `scorer`).
        """
        if kind == "queries":
            return {}
        if kind == "agreement":
            return {name: getattr(self.agreement, name) for name in ("examples", "prefix", "window")}
        if kind == "ripple":
            ripple = dataclasses.asdict(self.ripple)
            del ripple["text"], ripple["text_file"]  # the text enters by its hash
            ripple["damage"] = sorted(set(self.ripple.damage))
            return ripple | ({"scorer": dict(scorer)} if scorer is not None and self.ripple.damage else {})
        if kind == "damage":
            if scorer is None:
                raise UserError("a damage calibration needs a method with a scorer")
            d = self.damage
            measured = {name: getattr(d, name) for name in ("examples", "prefix", "window", "every")}
            if "recall" in d.kinds:
                measured["cue"] = d.cue
            return {"kinds": list(d.kinds), "configs": [list(c) for c in d.configs], "scorer": dict(scorer)} | measured
        chosen: dict[str, Any] = {"eviction": self.measured_eviction(scorer)}
        if scorer is None or self.eviction == "random":
            chosen["seeds"] = list(self.seeds)
        else:
            chosen["scorer"] = dict(scorer)
        if kind == "sensitivity":
            # The order of a lattice does not change its columns.
            return chosen | {
                "keeps": sorted(set(self.keeps), reverse=True),
                "bits": sorted(set(self.bits), reverse=True),
            }
        if kind == "kl":
            kl = dataclasses.asdict(self.kl)
            del kl["text_file"]  # the text enters by its hash
            return chosen | kl
        raise ValueError(f"unknown kind of calibration {kind!r}")


def _known(cls: type, fields: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    names = [f.name for f in dataclasses.fields(cls)]
    for name in fields:
        if name not in names:
            raise unknown(f"{where} field", str(name), names)
    return fields


def _listed(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
