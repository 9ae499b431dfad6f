"""The points of a sweep: grids expanded in Hydra's syntax, and many points composed for the price of a few.

Hydra's loader reads and merges every YAML file again for each point (60 to 130 ms). Points that choose the same options
differ in single values only, so each combination of options is composed once by Hydra and the values are set on a copy
of the result. Whatever is not plainly the same (appended keys, interpolations, typed or structured nodes, mistakes) is
left to Hydra's loader: its typing and its errors are the only ones there are.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.cli.hydra import PART, Point

_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_ENVIRONMENT = re.compile(r"\$\{oc\.env:[^${}]*\}")  # the same for every point, whatever its values
_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\}")  # the same while nobody touches that key


def expand(
    params: Mapping[str, Any], grids: Sequence[Mapping[str, Any]], arguments: Sequence[str], loader: Any = None
) -> list[list[str]]:
    """The union of `grids`, each joined to the axes of `params`; what was typed replaces an axis in all of them.

    Values are Hydra's: `a,b`, `range(3)`, `choice(...)`, one value. A point that several grids name is there once.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import ConfigCompositionException

    parser = OverridesParser.create(config_loader=loader)
    found: dict[tuple[str, ...], None] = {}
    for grid in grids or [{}]:
        axes = [f"{k}={'null' if v is None else v}" for k, v in {**params, **grid}.items()]
        overrides = parser.parse_overrides([*axes, *arguments])
        if any(o.is_delete() for o in overrides):
            raise ConfigCompositionException("deleting keys (~key) is not supported: every key of the config is needed")
        (points,) = BasicSweeper.split_arguments(overrides, max_batch_size=None)
        found |= dict.fromkeys(tuple(p) for p in points)
    return [list(p) for p in found]


def compose(loader: Any, master: Any, points: Sequence[Sequence[str]]) -> list[Point]:
    """Compose and resolve every point; nothing has run or been written before all of them are known to be sound."""
    composer = _Composer(loader, master)
    return [_with_parts(composer, i, overrides) for i, overrides in enumerate(points)]


def _with_parts(composer: _Composer, index: int, overrides: Sequence[str]) -> Point:
    """A point whose scorer and allocator are set after Hydra composed the rest.

    Another name replaces the part with its settings, whatever the method's file says of them.
    """
    parts = [o for o in overrides if PART.match(o)]
    point = composer.point(index, [o for o in overrides if o not in parts])
    if not parts:
        return point
    method = point.config.get("method")
    if not isinstance(method, dict):
        return composer.point(index, overrides)
    given = [(o.key_or_group.split(".")[1:], o.value()) for text in parts if (o := composer.parse(text))]
    for part in ("scorer", "allocator"):
        wholes = [v for path, v in given if path == [part]]
        own = [(path[1:], v) for path, v in given if path[0] == part and len(path) > 1]
        if wholes:
            method[part] = _replaced(method.get(part), wholes[-1])
        for path, value in sorted(own, key=lambda x: x[0] != ["name"]):  # the name first: it says what may be set
            if path == ["name"]:
                method[part] = _replaced(method.get(part), {"name": value})
                continue
            node = method[part] = dict(method.get(part) or {})
            for name in path[:-1]:
                node[name] = dict(node.get(name) or {})
                node = node[name]
            node[path[-1]] = value
    return Point(point.index, tuple(o.lstrip("+") if o in parts else o for o in overrides), point.choices, point.config)


def _replaced(old: Any, new: Any) -> Any:
    """A part with another's name and settings, or with the same name and more settings."""
    if isinstance(new, str):
        new = {"name": new}
    if not isinstance(new, dict) or not isinstance(old, dict):
        return new
    return {**old, **new} if new.get("name", old.get("name")) == old.get("name") else new


class _Composer:
    def __init__(self, loader: Any, master: Any):
        self.loader, self.master = loader, master
        self.parsed: dict[str, Any] = {}
        self.groups: dict[str, bool] = {}
        self.bases: dict[tuple[str, ...], _Base | None] = {}

    def point(self, index: int, overrides: Sequence[str]) -> Point:
        """One point: from the base of its options where that is provably the same, else by Hydra's loader."""
        split = self._split(overrides)
        if split is not None:
            options, values = split
            if options not in self.bases:
                self.bases[options] = self._base(options)
            base = self.bases[options]
            if base is not None and (config := base.having(values)) is not None:
                return Point(index, tuple(overrides), dict(base.choices), config)
        return by_hydra(self.loader, self.master, index, overrides)

    def _split(self, overrides: Sequence[str]) -> tuple[tuple[str, ...], list[tuple[str, Any]]] | None:
        """Chosen options and values set, or None where there is anything else."""
        from hydra.core.override_parser.types import OverrideType

        options, values = [], []
        for text in overrides:
            o = self.parse(text)
            key, value = o.key_or_group, o.value()
            if o.is_sweep_override() or o.package is not None or o.is_hydra_override():
                return None
            if self._is_group(key):
                if isinstance(value, dict) or o.type not in (OverrideType.CHANGE, OverrideType.ADD):
                    return None
                options.append(text)
            elif o.type is OverrideType.CHANGE and _KEY.fullmatch(key):
                values.append((key, value))
            else:
                return None
        return tuple(options), values

    def parse(self, text: str) -> Any:
        """An override as Hydra reads it."""
        from hydra.core.override_parser.overrides_parser import OverridesParser

        if text not in self.parsed:
            (self.parsed[text],) = OverridesParser.create().parse_overrides([text])
        return self.parsed[text]

    def _is_group(self, key: str) -> bool:
        if key not in self.groups:
            self.groups[key] = self.loader.repository.group_exists(key)
        return self.groups[key]

    def _base(self, options: tuple[str, ...]) -> _Base | None:
        """The options composed, or None where a value could be anything else than what is written there."""
        from hydra.errors import HydraException
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            config = self.loader.load_sweep_config(self.master, list(options))
            task = OmegaConf.masked_copy(config, [k for k in config if k != "hydra"])
            texts = list(_interpolations(task))
            if not all(_ENVIRONMENT.fullmatch(x) or _REFERENCE.fullmatch(x) for x in texts):
                return None
            references = frozenset(match[1] for x in texts if (match := _REFERENCE.fullmatch(x)))
            plain: Any = OmegaConf.to_container(task, resolve=True, throw_on_missing=True)
        except (HydraException, OmegaConfBaseException, ValueError):  # the loader tells it, of the point where it is
            return None
        return _Base(task, plain, _choices(config), references)


@dataclass(frozen=True)
class _Base:
    """Options composed: OmegaConf's nodes to judge a value by, the plain result to copy, keys that others refer to."""

    nodes: Any
    plain: dict[str, Any]
    choices: dict[str, str]
    references: frozenset[str]

    def having(self, values: Sequence[tuple[str, Any]]) -> dict[str, Any] | None:
        """A copy with values set, or None where Hydra might do anything else than set them."""
        from omegaconf import AnyNode, ListConfig

        config = copy.deepcopy(self.plain)
        for key, value in values:
            if any(f"{r}.".startswith(f"{key}.") or f"{key}.".startswith(f"{r}.") for r in self.references):
                return None
            *parents, last = key.split(".")
            nodes, plain = self.nodes, config
            for name in parents:
                nodes = nodes._get_node(name)
                if not _is_mapping(nodes):
                    return None
                plain = plain[name]
            node = nodes._get_node(last)
            if not (type(node) is AnyNode and _plain(value)) and not (type(node) is ListConfig and _plain_list(value)):
                return None
            plain[last] = list(value) if isinstance(value, list) else value
        return config


def by_hydra(loader: Any, master: Any, index: int, overrides: Sequence[str]) -> Point:
    """One point as Hydra composes it."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf, open_dict

    config = loader.load_sweep_config(master, list(overrides))
    with open_dict(config):
        config.hydra.job.num, config.hydra.job.id = index, str(index)
    HydraConfig.instance().set_config(config)  # makes ${hydra:...} resolvable
    task = OmegaConf.masked_copy(config, [k for k in config if k != "hydra"])
    plain: Any = OmegaConf.to_container(task, resolve=True, throw_on_missing=True)
    return Point(index, tuple(overrides), _choices(config), plain)


def _choices(config: Any) -> dict[str, str]:
    return {k: v for k, v in config.hydra.runtime.choices.items() if "/" not in k}


def _interpolations(node: Any) -> Iterator[str]:
    """The texts of all interpolations below a node."""
    from omegaconf import DictConfig, ListConfig

    if node._is_interpolation():
        yield str(node._value())
    elif isinstance(node, DictConfig | ListConfig) and not node._is_none() and not node._is_missing():
        keys: Any = range(len(node)) if isinstance(node, ListConfig) else node
        for key in keys:
            yield from _interpolations(node._get_node(key))


def _is_mapping(node: Any) -> bool:
    """A mapping that is written out, whose keys can be set."""
    from omegaconf import DictConfig

    return type(node) is DictConfig and not (node._is_none() or node._is_missing() or node._is_interpolation())


def _plain(value: Any) -> bool:
    """A value that OmegaConf keeps as it is: no interpolation, not the mark of a missing value."""
    if isinstance(value, str):
        return "${" not in value and value != "???"
    return value is None or isinstance(value, bool | int | float)


def _plain_list(value: Any) -> bool:
    return isinstance(value, list) and all(_plain(x) for x in value)
