"""What a file of conf/method says: a method is scorer x allocator x precision x schedule, and no class of its own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from moend import paths
from moend.allocation import Allocator, allocator
from moend.errors import UserError, unknown
from moend.layer_bytes import BITS, Storage
from moend.scoring import Scorer, scorer

METHOD_FOLDERS = (paths.folder("conf", "method"),)

# Keys that settings had before each part had its own -> where they are now.
MOVED = {
    "heads": "method.allocator.unit=head",
    **{k: f"method.allocator.{k}" for k in ("table", "keeps", "bits", "solver", "cost", "t_ref", "extend_lattice")},
    **{k: f"method.allocator.{k}" for k in ("r", "gamma", "signal")},
    **{k: f"method.scorer.{k}" for k in ("mode", "anchor_min", "reindex")},
    "overshoot": "budget_at=prompt (was paper) or budget_at=peak (was counted)",
}
RENAMED = {"routed": "joint", "threshold": "global_topk"}  # allocators


@dataclass(frozen=True)
class Method:
    """A composition of parts that fit each other; see docs/methods.md for what each part means."""

    name: str  # what tables call it
    version: int = 1  # raised when the same file means something else
    scorer: Mapping[str, Any] | None = None  # {name, its settings}; None keeps all tokens
    allocator: Mapping[str, Any] = field(default_factory=lambda: {"name": "uniform"})  # {name, its settings}
    precision: Mapping[str, int | str] = field(default_factory=lambda: {"k_bits": 16, "v_bits": 16})  # or joint
    # prompt: compress once. every: again every `beta` new tokens. full: when a layer is full, drop `beta` at once.
    schedule: Literal["prompt", "every", "full"] = "prompt"
    beta: int | float = 128  # tokens; a share in (0, 1): of a layer's cap
    n_sink: int = 4  # first tokens that always stay
    recent: int | float = 32  # newest entries that always stay; a share in (0, 1): of what a layer keeps
    group: int = 64  # tokens that share a K scale
    channels: int = 64  # channels that share a V scale
    window: int | None = None  # newest entries at 16 bit (residual window); None: one group, at most cap / 8
    always_quantise: bool = False  # also where prompt and output fit the budget at 16 bit

    def __post_init__(self) -> None:
        for part in ("scorer", "allocator"):
            object.__setattr__(self, part, as_part(part, getattr(self, part)))
        self._check_fields()
        self._check_parts()

    def _check_fields(self) -> None:
        if self.schedule not in (allowed := ("prompt", "every", "full")):
            raise unknown("method.schedule", str(self.schedule), allowed)
        for key, least in {"n_sink": 0, "group": 1, "channels": 1}.items():
            value = getattr(self, key)
            if not isinstance(value, int) or value < least:
                raise UserError(f"method.{key} must be a whole number >= {least}, got {value!r}")
        for key, least, of in (("recent", 0, "what is kept"), ("beta", 1, "a layer's cap")):
            value = getattr(self, key)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not (value >= least if whole else 0 < value < 1):
                raise UserError(
                    f"method.{key} must be a whole number >= {least} or a share in (0, 1) of {of}, got {value!r}"
                )
        if self.window is not None and self.window < 0:
            raise UserError(f"method.window must be >= 0 or null, got {self.window}")
        if set(self.precision) != {"k_bits", "v_bits"}:
            raise UserError(f"method.precision has the keys k_bits and v_bits, got {sorted(self.precision)}")
        for side, bits in self.precision.items():
            if bits == "routed":
                raise UserError(f"method.precision.{side}=routed is called joint now: method.precision.{side}=joint")
            if bits != "joint" and bits not in BITS:
                raise UserError(f"method.precision.{side} must be one of {BITS} or joint, got {bits!r}")

    def _check_parts(self) -> None:
        """What cannot be combined, for reasons that no code can remove."""
        made, divides = self.make_scorer(), self.make_allocator()
        if self.joint_bits and not divides.chooses_bits:
            raise UserError(
                f"method.precision=joint needs a table of what fewer bits do, and allocator {divides.name} reads none: "
                "set method.allocator.name=joint (common_keep: true gives every layer the same share)"
            )
        if made is None or divides.keeps_all:
            if made is None and not divides.keeps_all:
                raise UserError(
                    f"allocator {divides.name} drops entries, and method.scorer=null ranks none: name a scorer, or "
                    "keep everything (method.allocator=all)"
                )
            if made is not None:
                raise UserError(
                    f"allocator {divides.name} keeps every entry here, so scorer {made.name} has nothing to rank: set "
                    "method.scorer=null"
                )
            return
        if divides.divides_heads:
            self._check_heads(made, divides)
        if self.evicts and not made.at_decode:
            raise UserError(
                f"scorer {made.name} goes by what only the prompt's pass shows, so it cannot rank again while "
                "decoding: method.schedule must be prompt"
            )
        if made.reindex and (not self.evicts or self.quantises):
            raise UserError(
                "method.scorer.reindex counts positions inside a cache that evicts at 16 bit: set "
                "method.schedule=every and 16 bit"
            )

    def _check_heads(self, made: Scorer, divides: Allocator) -> None:
        if not made.per_head:
            raise UserError(
                f"scorer {made.name} gives all heads of a layer the same scores, so allocator {divides.name} has "
                "nothing to divide heads by: take a scorer per head"
            )
        if divides.compares_layers and not made.comparable:
            raise UserError(
                f"allocator {divides.name} compares the scores of different heads, and those of scorer {made.name} are "
                "places in each head's own order: set method.allocator.name=uniform"
            )

    @property
    def label(self) -> str:
        """Its name in tables: a variant that is another method says so."""
        own = next((_read(p) for f in METHOD_FOLDERS if (p := f / f"{self.name}.yaml").is_file()), {})
        decodes = own.get("schedule") == "prompt" and self.evicts
        return self.name + ("+decode" if decodes else "") + (" (reindexed)" if self.reindexes else "")

    @property
    def reindexes(self) -> bool:
        """Whether positions count inside the cache, as in StreamingLLM's original."""
        made = self.make_scorer()
        return made is not None and made.reindex

    @property
    def evicts(self) -> bool:
        """Whether it evicts while decoding, too."""
        return self.schedule != "prompt"

    @property
    def keeps_all(self) -> bool:
        """Whether no entry is ever evicted."""
        return self.make_allocator().keeps_all

    @property
    def quantises(self) -> bool:
        """Whether it may store anything at fewer than 16 bits."""
        return set(self.precision.values()) != {16}

    @property
    def joint_bits(self) -> bool:
        """Whether the allocator chooses bits."""
        return "joint" in self.precision.values()

    @property
    def calibrations(self) -> tuple[str, ...]:
        """Kinds of calibration that it needs."""
        made = self.make_scorer()
        kinds = {self.make_allocator().calibration, made.statistics if made is not None else None}
        return tuple(sorted(k for k in kinds if k is not None))

    @property
    def settings(self) -> dict[str, Any]:
        """All fields as plain values, the settings of parts complete: equal methods have equal settings."""
        made = self.make_scorer()
        parts = {"scorer": None if made is None else _settings(made, self.scorer or {})}
        parts["allocator"] = _settings(self.make_allocator(), self.allocator)
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return own | {"precision": dict(self.precision)} | parts

    def make_scorer(self) -> Scorer | None:
        """The scorer, or None where all tokens are kept."""
        return self._made[0]

    def make_allocator(self) -> Allocator:
        """The allocator."""
        return self._made[1]

    @functools.cached_property
    def _made(self) -> tuple[Scorer | None, Allocator]:
        ranks, divides = dict(self.scorer or {}), dict(self.allocator)
        made = scorer(ranks.pop("name"), **ranks) if self.scorer is not None else None
        return made, allocator(divides.pop("name"), **divides)

    def bit_choices(self) -> tuple[Sequence[int], Sequence[int]]:
        """Bits that K and V may have: one each, or those of the allocator where they are joint."""
        joint: Sequence[int] = getattr(self.make_allocator(), "bits", ())
        k, v = (self.precision[side] for side in ("k_bits", "v_bits"))
        return (joint if k == "joint" else (int(k),), joint if v == "joint" else (int(v),))

    def storage(self, cap: int, k_bits: int, v_bits: int) -> Storage:
        """How a layer with this cap is stored: K groups of 32 tokens where the cap is below 256.

        The 16-bit window is one group, but at most an eighth of the cap: it is paid for in tokens.
        """
        group = min(self.group, 32) if cap < 256 else self.group
        window = min(group, cap // 8) if self.window is None else self.window
        form: Literal["none", "shared", "per_head"] = "none"
        accumulated = False
        if (made := self.make_scorer()) is not None:
            form = "per_head" if made.per_head else "shared"
            accumulated = self.evicts and "accumulated" in made.observes
        stored = Storage(k_bits, v_bits, group, window, form, accumulated, channels=self.channels)
        return stored.evicting(cap) if self.evicts else stored


def as_part(part: str, given: object) -> Mapping[str, Any] | None:
    """A scorer or an allocator as {name, settings}; a name alone stands for its defaults.

    part: `scorer` or `allocator`. Raises UserError for what is neither.
    """
    if given is None and part == "scorer":
        return None
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, Mapping):
        raise UserError(f"method.{part} must be a name or {{name: ..., its settings}}, got {given!r}")
    if not isinstance(name := given.get("name"), str):
        raise UserError(f"method.{part} needs a name, got {dict(given)!r}")
    if part == "allocator" and (new := RENAMED.get(name)):
        raise UserError(f"allocator {name} is called {new} now: method.allocator.name={new}")
    return dict(given)


def _settings(made: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Name and settings of a part; one that was added `LATER` is left out at its default, so that older keys stay."""
    fields = [f for f in dataclasses.fields(made) if f.init]
    own = {f.name: x for f in fields if (x := getattr(made, f.name)) != f.default or not f.metadata.get("later")}
    plain = {k: list(v) if isinstance(v, tuple) else dict(v) if isinstance(v, Mapping) else v for k, v in own.items()}
    return {"name": given["name"], **plain}


def method_names() -> list[str]:
    """Names of the packaged methods."""
    return sorted(p.stem for folder in METHOD_FOLDERS for p in folder.glob("*.yaml"))


def from_fields(fields: Mapping[str, Any]) -> Method:
    """A Method from a file's or a config's fields.

    A field that has moved is refused with its new place, an unknown one with the nearest.
    """
    known = {f.name for f in dataclasses.fields(Method)}
    for key in fields:
        if key in MOVED:
            raise UserError(f"method.{key} has another place now: {MOVED[key]}")
        if key not in known:
            raise unknown("method field", str(key), known)
    return Method(**fields)


@functools.cache
def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def method(name: str, **overrides: Any) -> Method:
    """The packaged method of that name, `moend.method("SnapKV")`, with fields overridden.

    A part that is overridden by settings of the same name, or by settings alone, keeps its others:
    `method("RippleKV", allocator={"r": 1.25})`. Another name replaces the whole part.
    """
    for folder in METHOD_FOLDERS:
        path = folder / f"{name}.yaml"
        if path.is_file() and path.stem in method_names():
            fields = dict(_read(path))
            for key, value in overrides.items():
                fields[key] = with_part(fields.get(key), value) if key in ("scorer", "allocator") else value
            return from_fields(fields)
    raise unknown("method", name, method_names())


def with_part(old: Any, new: Any) -> Any:
    """A scorer or an allocator with settings changed; one of another name replaces the old one with its settings."""
    before, after = ({"name": x} if isinstance(x, str) else x for x in (old, new))
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return after
    return {**before, **after} if after.get("name", before.get("name")) == before.get("name") else after
