"""What a calibration kind is: its settings, its identity, its measurement, and what tables and figures read of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from moend import registry
from moend.budget import Arch
from moend.cache.compressed import OBSERVATIONS
from moend.calibration.artefact import Artefact
from moend.calibration.saved import Saved
from moend.errors import UserError, unknown

PACKAGE, GROUP = "moend.calibration", "moend.calibrations"

Values = Mapping[str, Any]
Progress = Callable[[int, int], None]  # (done, all)


def _silent(done: int, total: int) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class Calibration:
    """The fields of a conf/calibration file, documented there."""

    text: str | None = None  # what sensitivities and query statistics are measured on; None: the model's own
    template: Literal["model", "none"] = "model"  # whether `text` stands in the chat template that the model has
    eviction: Literal["scorer", "random"] = "scorer"  # which tokens go while measuring
    seeds: tuple[int, ...] = (0, 1, 2)  # of the permutations of `random`
    keeps: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 0.05, 0.025, 0.0125)  # shares of tokens in the lattice
    bits: tuple[int, ...] = (16, 8, 4)  # of K and of V in the lattice
    own: Mapping[str, Any] = field(default_factory=dict)  # settings of kinds by name; those left out have the defaults

    def __post_init__(self) -> None:
        if self.text is not None and not str(self.text).strip():
            raise UserError("calibration.text must be a text, or null for the model's own")
        choice("calibration.template", self.template, ("model", "none"))
        choice("calibration.eviction", self.eviction, ("scorer", "random"))
        if not self.seeds or not all(is_whole(s) and s >= 0 for s in self.seeds):
            raise UserError(f"calibration.seeds must be whole numbers >= 0, at least one, got {list(self.seeds)}")
        if not self.keeps or not all(isinstance(k, int | float) and 0 < k <= 1 for k in self.keeps):
            raise UserError(f"calibration.keeps must be shares in (0, 1], at least one, got {list(self.keeps)}")
        if not self.bits or not set(self.bits) <= {16, 8, 4, 2}:
            raise UserError(f"calibration.bits must be among 16, 8, 4 and 2, at least one, got {list(self.bits)}")
        # complete, so that equal settings are equal
        made = {name: k.settings() for name in kinds() if (k := kind(name)).settings is not None}
        object.__setattr__(self, "own", made | dict(self.own))

    @classmethod
    def from_fields(cls, fields: Values) -> Calibration:
        """From a file's or a config's fields; an unknown one is refused with the nearest."""
        shared = [f.name for f in dataclasses.fields(cls) if f.name != "own"]
        mine = [name for name in kinds() if kind(name).settings is not None]
        own = {}
        for name in fields:
            if name in shared:
                continue
            if name not in mine and "." not in name:
                raise unknown("calibration field", str(name), [*shared, *mine])
            settings = kind(name).settings
            if settings is None:
                raise UserError(f"calibration kind {name} has no settings")
            own[name] = settings_of(settings, fields[name], f"calibration.{name}")
        made = _tuples(cls, {k: v for k, v in fields.items() if k in shared}, "calibration")
        if "keeps" in made:
            made["keeps"] = tuple(float(x) if is_whole(x) else x for x in made["keeps"])
        return cls(**made, own=own)

    def of(self, name: str) -> Any:
        """The settings of a kind."""
        return self.own[name] if name in self.own else kind(name).settings()

    def measured_eviction(self, scorer: Values | None) -> Literal["scorer", "random"]:
        """How entries go while measuring: a method without a scorer keeps all, and columns that evict are random."""
        return self.eviction if scorer is not None else "random"


@dataclass(frozen=True)
class Target:
    """What a calibration is made for. Known before any weights are loaded."""

    calibration: Calibration
    method: Any  # moend.methods: Method
    model: Any  # moend.models.spec: ModelSpec

    @property
    def scorer(self) -> dict[str, Any]:
        """Name and all settings of the method's scorer; UserError where it has none."""
        if self.method.scorer is None:
            raise UserError(f"{self.method.name} has no scorer: nothing could be evicted")
        return dict(self.method.settings["scorer"])

    @property
    def replays(self) -> bool:
        """Whether the scorer replays the prompt."""
        made = self.method.make_scorer()
        return made is not None and bool(set(made.observes) - set(OBSERVATIONS))

    @property
    def heads(self) -> bool:
        """Whether the method gives each KV head entries of its own."""
        return bool(self.method.make_allocator().divides_heads)

    def examples(self, name: str) -> Any:
        """The settings of a kind that is measured on examples (`Examples`), as they are for this model.

        Without a text they name the bundled one whose words the model knows. A prefix that nobody has set is shortened
        where the model has fewer positions.
        """
        s: Examples = self.calibration.of(name)
        longest, default = (self.model.arch or {}).get("max_positions"), type(s)().prefix
        prefix = default if longest is None else max(min(default, longest - s.window), s.least_prefix)
        return dataclasses.replace(
            s, text=s.text or self.model.texts, prefix=prefix if s.prefix == default else s.prefix
        )

    def held(self, *names: str) -> dict[str, Any]:
        """These fields of the method, for an identity."""
        return {name: getattr(self.method, name) for name in names}


@dataclass(frozen=True)
class Bench:
    """What a measurement works with: the model and what is known of it."""

    loaded: Any  # moend.models.load: LoadedModel
    prompt: Tensor  # (1, T) ids of calibration.text
    statistics: Mapping[str, Tensor] | None = None  # of the scorer's own calibration, where it needs one
    observe: Any = None  # moend.replay: Replay.observe, for scorers that replay a prompt
    progress: Callable[[str], AbstractContextManager[Progress]] = lambda _: nullcontext(
        _silent
    )  # shows what is measured
    saved: Saved = field(default_factory=Saved)  # what an earlier, interrupted measurement has left

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self.loaded.model

    def on(self, ids: Tensor) -> Tensor:
        """ids on the model's device."""
        return ids.to(self.loaded.device)


@dataclass(frozen=True)
class Report:
    """A table of text and the lines below it."""

    columns: tuple[str, ...] = ()  # headings
    rows: Sequence[Sequence[str]] = ()  # cells of each row, as many as headings
    lines: Sequence[str] = ()
    title: str | None = None  # what stands above the table


class Kind:
    """A kind of calibration. Its module assigns an instance to KIND and is found by its file's name."""

    version = 1  # raised when the numbers change
    settings: Any = None  # a frozen dataclass of what can be set at calibration.<name>; None: nothing
    makes_plans = False  # a table (L, C) that plans are solved from: a given plan replaces it
    vouches = False  # whether a cell that lacks it, or that it speaks against, gets no place in a table

    @property
    def name(self) -> str:
        """That of its file."""
        return type(self).__module__.rpartition(".")[2]

    def concerns(self, method: Any) -> bool:
        """Whether it is made for this method though neither scorer nor allocator asks for it."""
        return False

    def identity(self, target: Target) -> dict[str, Any]:
        """All settings that the numbers depend on, but for the model and the texts: JSON-able."""
        return {}

    def texts(self, target: Target) -> dict[str, Any]:
        """The texts that it is measured on, JSON-able: their hash enters the identity."""
        text = target.calibration.text or target.model.calibration_text
        template = target.calibration.template == "model" and target.model.chat_template
        return {"text": text, "chat_template": template}

    def work(self, target: Target, arch: Arch) -> float | None:
        """How many tokens a model reads in the time that measuring takes, roughly: for estimates. None: not known."""
        return None

    def measure(self, target: Target, bench: Bench) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and info of the artefact."""
        raise NotImplementedError

    def zeros(self, target: Target, arch: Arch) -> dict[str, Tensor]:
        """Tensors as of a model that does not mind anything: enough to know whether a budget can be met."""
        return {}

    def figure(self, artefact: Artefact) -> dict[str, Any]:
        """What tables and figures read of an artefact."""
        return {}

    def report(self, artefact: Artefact, plan: Values) -> Report | None:
        """What is said of an artefact beside the plan that was solved from it."""
        return None

    def compare(self, artefact: Artefact, others: Mapping[str, Artefact]) -> Report | None:
        """What is said of an artefact beside those of other kinds of the same model."""
        return None

    def doubt(self, artefact: Artefact) -> str | None:
        """Why cells that use the artefact are not to be believed, in one line; None where they are."""
        return None


def kinds() -> tuple[str, ...]:
    """Names of the kinds that are found."""
    return registry.names(PACKAGE, GROUP, "KIND")


def kind(name: str) -> Kind:
    """The kind of that name; a UserError names the nearest."""
    found = registry.find(PACKAGE, "KIND", name, GROUP)
    assert isinstance(found, Kind), f"{name} must assign an instance of Kind to KIND"
    return found


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Settings of a kind that is measured on examples: windows of text, each a prefix and a window after it."""

    examples: int = 16
    prefix: int = 1024  # tokens
    window: int = 128  # tokens after the prefix
    # text (the bundled one's calibration part) | recall (recall_moe's words) | file | None: what the model knows
    text: str | None = None
    text_file: str | None = None  # a UTF-8 text, with text: file

    where: ClassVar[str] = "calibration"  # what messages call the settings
    least_prefix: ClassVar[int] = 2

    def __post_init__(self) -> None:
        whole(self, self.where, examples=1, prefix=self.least_prefix, window=1)
        if self.text is not None:
            choice(f"{self.where}.text", self.text, ("text", "recall", "file"))
        if (self.text == "file") != (self.text_file is not None):
            raise UserError(f"{self.where}.text_file must be given exactly where {self.where}.text is 'file'")

    @property
    def count(self) -> int:
        """Examples of all kinds."""
        return self.examples

    def texts(self) -> list[str]:
        """One text to cut examples from, or (recall) one an example. No benchmark tests on them."""
        from moend.benchmarks import recall, text

        if self.text == "recall":
            return recall.calibration_texts(self.count, self.prefix, self.window)
        return [text.part("calibration", self.text_file)]

    def ids(self, loaded: Any) -> Tensor:
        """(count, prefix + window) ids, the BOS included: disjoint windows."""
        from moend.benchmarks.prompts import added_bos

        bos, limit = list(added_bos(loaded.tokenizer)), loaded.arch.max_positions
        if self.prefix + self.window > limit:
            raise UserError(
                f"{self.where}: {self.prefix} + {self.window} tokens are more than the {limit} positions of "
                f"{loaded.spec.label}"
            )
        tokens = self.prefix + self.window - len(bos)
        remedy = f"set {self.where}.text (calibration=recall for recall_moe)"
        found = [token_ids(loaded, text, remedy) for text in self.texts()]
        cut = torch.tensor(found)[:, :tokens] if self.text == "recall" else windows(found[0], self.count, tokens)
        return torch.cat([torch.tensor([bos] * self.count, dtype=torch.long).view(self.count, -1), cut], dim=1)

    def said(self, ids: Tensor) -> dict[str, Any]:
        """What an artefact's info says of the examples."""
        return {"tokens": ids.numel(), "text": self.text, "text_file": self.text_file}


def token_ids(loaded: Any, text: str, remedy: str) -> list[int]:
    """The ids of a text as it stands; UserError with the remedy where a tenth of its words are unknown."""
    ids: list[int] = loaded.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    unknown_id = loaded.tokenizer.unk_token_id
    if unknown_id is not None and ids.count(unknown_id) > len(ids) // 10:
        raise UserError(f"{loaded.spec.label} does not know the words of the text: {remedy}")
    return ids


def windows(ids: Sequence[int], count: int, tokens: int) -> Tensor:
    """(count, tokens) disjoint windows of a text's ids, spread evenly over it."""
    if count * tokens > len(ids):
        raise UserError(f"{count} sequences of {tokens} tokens are more than the {len(ids)} tokens of the text")
    step = len(ids) // count
    return torch.tensor([list(ids[i * step : i * step + tokens]) for i in range(count)])


def settings_of(cls: Any, values: Any, where: str) -> Any:
    """An instance of a settings dataclass from a config's fields; an unknown or misshapen one is a UserError."""
    if not isinstance(values, Mapping):
        raise UserError(f"{where} must hold fields of its own, got {values!r}")
    return cls(**_tuples(cls, values, where))


def _tuples(cls: Any, values: Values, where: str) -> dict[str, Any]:
    """Fields whose default is a tuple take lists."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    made = {}
    for name, value in values.items():
        if name not in fields:
            raise unknown(f"{where} field", str(name), fields)
        made[name] = value
        if isinstance(default := fields[name].default, tuple):
            nested = bool(default) and isinstance(default[0], tuple)
            if not _listed(value) or (nested and not all(map(_listed, value))):
                raise UserError(f"{where}.{name} must be a list{' of lists' * nested}, got {value!r}")
            made[name] = tuple(tuple(x) for x in value) if nested else tuple(value)
    return made


def _listed(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def is_whole(value: object) -> bool:
    """Whether it is a whole number, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def whole(settings: Any, where: str, **least: int) -> None:
    """UserError where a field is no whole number of at least so much."""
    for name, low in least.items():
        if not is_whole(value := getattr(settings, name)) or value < low:
            raise UserError(f"{where}.{name} must be a whole number >= {low}, got {value!r}")


def choice(where: str, value: object, allowed: Sequence[str]) -> None:
    """UserError where a value is not among the choices."""
    if value not in allowed:
        raise unknown(where, str(value), allowed)
