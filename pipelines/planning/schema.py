"""The composed configuration as typed, frozen objects: what is misspelt or of the wrong kind ends here, in one line."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from moend import paths
from moend.budget import Budget
from moend.errors import UserError, unknown
from pipelines.cli.hydra import Point, leaves, unknown_key


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class GenerationConfig(_Strict):
    """How answers are drawn.

    max_new_tokens: null is the benchmark's own limit. reasoning: the protocol of models that think first.
    thinking: whether the prompt asks the model to think first; auto leaves the chat template's own default.
    """

    max_new_tokens: int | None = Field(ge=1)
    temperature: float = Field(ge=0, le=100)
    top_p: float = Field(gt=0, le=1)
    samples: int = Field(ge=1)
    reasoning: bool
    thinking: Literal["auto", "on", "off"]

    @field_validator("thinking", mode="before")
    @classmethod
    def _words(cls, value: object) -> object:
        """YAML reads `on` and `off` as true and false."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class EngineConfig(_Strict):
    """chunk and max_bytes change memory and speed only; fuse changes what the recorded speeds mean.

    save_every_s: seconds between two saved states of answers that take longer; 0 or null: none is saved.
    kept: what records say of the prompt's kept entries: their share per token over layers and heads (of the first
        example layer by layer), every KV head's, or nothing.
    """

    chunk: int = Field(ge=1)
    max_bytes: int | None = Field(ge=1)
    save_every_s: float | None = Field(ge=0, allow_inf_nan=False)
    kept: Literal["none", "tokens", "heads"]
    fuse: bool
    routing_flips: bool
    timed: bool = False  # each cell alone and warmed up, exactly the tokens asked for, no gold text fed


_RESERVED = frozenset({"array", "dependency", "job-name", "output", "error", "open-mode", "signal", "requeue", "wrap"})


class ClusterConfig(_Strict):
    """Where the work runs. What a cluster's file leaves out means nothing there; null: the cluster's own default."""

    name: Literal["inprocess", "local", "slurm"]
    wait: bool
    shards: int | None = Field(ge=1, le=10_000)
    workers: int | None = Field(default=None, ge=1, le=1024)
    partition: str | None = Field(default=None, min_length=1)
    account: str | None = Field(default=None, min_length=1)
    qos: str | None = Field(default=None, min_length=1)
    constraint: str | None = Field(default=None, min_length=1)
    gpus: int | None = Field(default=None, ge=0)
    cpus: int | None = Field(default=None, ge=1)
    memory: str | None = Field(default=None, pattern=r"^[1-9]\d*[KMGT]?$")
    time: int | str | None = None
    max_running: int | None = Field(default=None, ge=1)
    requeues: int | None = Field(default=None, ge=0)
    signal_delay: int = Field(default=120, ge=1, le=65_535)
    setup: list[str] | None = None
    extra: dict[str, str | int | float | bool] | None = None

    @field_validator("time", mode="after")
    @classmethod
    def _time(cls, value: int | str | None) -> int | str | None:
        if value is not None and minutes(value) is None:
            raise ValueError("is minutes (90), 'hours:minutes:seconds', 'days-hours' or 'days-hours:minutes:seconds'")
        return value

    @field_validator("extra", mode="after")
    @classmethod
    def _extra(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for key in value or {}:
            if key.replace("_", "-") in _RESERVED:
                raise ValueError(f"'{key}' is set by this program")
        return value


def minutes(time: int | str) -> int | None:
    """A time limit in Slurm's notation, as whole minutes, rounded up; None where it is none."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", str(time))
    if match is None:
        return None
    days, *parts = (int(x) if x is not None else None for x in match.groups())
    first, second, third = (x or 0 for x in parts)
    if days is not None:  # days-hours[:minutes[:seconds]]
        seconds = ((days * 24 + first) * 60 + second) * 60 + third
    elif parts[2] is not None:  # hours:minutes:seconds
        seconds = (first * 60 + second) * 60 + third
    else:  # minutes[:seconds]
        seconds = first * 60 + second
    return -(-seconds // 60) or None


class TrackingConfig(_Strict):
    """What shows the results besides the files."""

    mode: Literal["none", "offline", "online"]
    project: str = Field(min_length=1, pattern=r"^[^/\\#?%:]+$")
    entity: str | None = Field(default=None, min_length=1)
    timeout_s: float = Field(gt=0)


class PathsConfig(_Strict):
    """store: everything a run leaves behind. cache: models and data, shared by all stores."""

    store: str = Field(min_length=1)
    cache: str = Field(min_length=1)


class RunConfig(_Strict):
    """One cell as composed. model, method, benchmark and calibration belong to the library, which types them itself."""

    model: dict[str, Any]
    method: dict[str, Any]
    benchmark: dict[str, Any]
    calibration: dict[str, Any]
    generation: GenerationConfig
    engine: EngineConfig
    cluster: ClusterConfig
    tracking: TrackingConfig
    paths: PathsConfig
    budget: str
    budget_protocol: Literal["matched", "paper"]
    budget_at: Literal["prompt", "peak"]
    question_visible: bool
    seed: int = Field(ge=0, lt=2**32)
    dry_run: Literal[False, True, "full"]  # full: the plan and every cell as it was resolved

    @model_validator(mode="before")
    @classmethod
    def _moment(cls, values: Any) -> Any:
        """What a key holds is resolved: null is the moment that the protocol and the generation imply."""
        if not isinstance(values, dict) or values.get("budget_at") is not None:
            return values
        generation = values.get("generation")
        thinks = isinstance(generation, dict) and generation.get("reasoning") is True
        return values | {"budget_at": "peak" if thinks and values.get("budget_protocol") != "paper" else "prompt"}

    @field_validator("budget", mode="before")
    @classmethod
    def _budget(cls, value: object) -> str:
        return str(Budget.parse(value))

    @functools.cached_property
    def store(self) -> Path:
        """Absolute path of the store, wherever the program was started."""
        return Path(self.paths.store).expanduser().absolute()

    @functools.cached_property
    def cache(self) -> Path:
        """Absolute path of the cache."""
        return Path(self.paths.cache).expanduser().absolute()


_GROUPS = {
    name: RunConfig.model_fields[name].annotation for name in ("generation", "engine", "cluster", "tracking", "paths")
}


def _typed(config: dict[str, Any]) -> dict[str, Any]:
    """The groups that the points of a sweep have in common, typed once. A wrong one is left to the whole's error."""
    return {name: made for name in _GROUPS if (made := _group(name, repr(config.get(name)), config)) is not None}


_TYPED: dict[tuple[str, str], Any] = {}


def _group(name: str, text: str, config: dict[str, Any]) -> Any:
    if (name, text) not in _TYPED:
        try:
            made: Any = _GROUPS[name].model_validate(config.get(name))  # type: ignore[union-attr]
        except ValidationError:
            made = None
        if len(_TYPED) > 1000:
            _TYPED.clear()
        _TYPED[name, text] = made
    return _TYPED[name, text]


def validate(point: Point) -> RunConfig:
    """Type one composed point. Errors name the key, what was given and what is allowed."""
    if isinstance(leftover := point.config.get("sweep"), str):
        raise unknown("sweep", leftover, sweeps())
    try:
        return RunConfig.model_validate(point.config | _typed(point.config))
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(str(x) for x in first["loc"])
        if first["type"] == "extra_forbidden":
            known = [*leaves(dict.fromkeys(RunConfig.model_fields)), *leaves(point.config)]
            wrong = {x for x in known if x == key or x.startswith(key + ".")}
            raise UserError(unknown_key(key, [x for x in known if x not in wrong])) from None
        raise mistake(e) from None


def mistake(error: ValidationError, group: str = "") -> UserError:
    """The first thing pydantic found wrong as one line: the key, what was given, what is allowed."""
    found = error.errors()
    first = found[0]
    if first["loc"] and first["loc"][-1] == "int" and len(found) > 1:
        first = found[1]  # an integer or a share: what is neither is no number
    key = ".".join(str(x) for x in (group, *first["loc"]) if x not in ("", "int", "float"))
    if first["type"] == "literal_error":
        return unknown(key, str(first["input"]), re.findall(r"'([^']+)'", first["ctx"]["expected"]))
    return UserError(f"{key}: {first['msg'][0].lower()}{first['msg'][1:]}, got {first['input']!r}")


def sweeps() -> list[str]:
    """Names of the sweep files that come with the package."""
    return sorted(p.stem for p in paths.folder("sweeps", "sweep").glob("*.yaml"))
