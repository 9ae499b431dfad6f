"""Parts are found by file name, entry point or dotted path; near misses, duplicates and empty modules are refused."""

from __future__ import annotations

import dataclasses
import sys
from importlib.metadata import EntryPoint

import pytest

from moend import registry
from moend.errors import UserError

PART = """from dataclasses import dataclass

@dataclass(frozen=True)
class Part:
    size: int = 3
    shares: tuple[float, ...] = ()

PART = Part
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `garage` with the parts wheel and brake, a helper, and what never counts."""
    folder = tmp_path / "garage"
    folder.mkdir()
    for name in ("wheel", "brake"):
        (folder / f"{name}.py").write_text(PART)
    for name in ("__init__", "base", "_private", "helper"):
        (folder / f"{name}.py").write_text("x = 1\n")
    (tmp_path / "elsewhere_part.py").write_text(PART)
    (folder / "broken.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))  # forgets what the import system has cached, too
    for name in [m for m in sys.modules if m.partition(".")[0] in ("garage", "elsewhere_part")]:
        monkeypatch.delitem(sys.modules, name)
    return "garage"


def installed(monkeypatch, *entries):
    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint(n, v, group) for n, v in entries])
    registry._installed.cache_clear()


@pytest.fixture(autouse=True)
def clean():
    yield
    registry._installed.cache_clear()


def test_a_file_is_a_part_where_it_assigns_the_name(package):
    assert registry.names(package, "cars.parts", "PART") == ("brake", "wheel")
    assert registry.names(package, "cars.parts") == ("brake", "broken", "helper", "wheel")
    assert registry.find(package, "PART", "wheel", "cars.parts")().size == 3


def test_a_near_miss_names_the_nearest(package):
    with pytest.raises(UserError, match=r"unknown part 'whel'\. Did you mean 'wheel'\? Choices: brake, wheel"):
        registry.find(package, "PART", "whel", "cars.parts")
    with pytest.raises(UserError, match="unknown part 'helper'"):
        registry.find(package, "PART", "helper", "cars.parts")


def test_entry_points_name_a_module_or_an_object(package, monkeypatch):
    installed(monkeypatch, ("far", "elsewhere_part"), ("near", "elsewhere_part:Part"), ("gone", "nowhere_at_all"))
    assert registry.names(package, "cars.parts", "PART") == ("brake", "far", "gone", "near", "wheel")
    assert registry.find(package, "PART", "far", "cars.parts") is registry.find(package, "PART", "near", "cars.parts")
    with pytest.raises(UserError, match="part 'gone' is installed as nowhere_at_all, which cannot be imported"):
        registry.find(package, "PART", "gone", "cars.parts")


def test_a_name_that_two_parts_claim_is_refused(package, monkeypatch):
    installed(monkeypatch, ("wheel", "elsewhere_part"))
    with pytest.raises(UserError, match=r"two parts are called 'wheel': garage\.wheel and elsewhere_part"):
        registry.find(package, "PART", "wheel", "cars.parts")
    installed(monkeypatch, ("far", "elsewhere_part"), ("far", "another_part"))
    with pytest.raises(UserError, match="two parts are called 'far': elsewhere_part and another_part"):
        registry.names(package, "cars.parts")


def test_the_same_entry_point_seen_twice_is_one(package, monkeypatch):
    installed(monkeypatch, ("far", "elsewhere_part"), ("far", "elsewhere_part"))
    assert "far" in registry.names(package, "cars.parts")


def test_a_dotted_path_is_imported(package):
    assert registry.find(package, "PART", "garage.brake", "cars.parts")().size == 3
    with pytest.raises(UserError, match=r"part 'garage\.nothing' is not a module that Python finds"):
        registry.find(package, "PART", "garage.nothing", "cars.parts")
    with pytest.raises(UserError, match=r"part 'garage\.helper': .*helper\.py must assign its class to PART"):
        registry.find(package, "PART", "garage.helper", "cars.parts")


def test_what_a_part_imports_and_lacks_is_not_hidden(package):
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        registry.find(package, "PART", "garage.broken", "cars.parts")


def test_settings_are_checked_by_name(package):
    part = registry.find(package, "PART", "wheel", "cars.parts")
    assert registry.build(part, "part wheel", {"size": 4, "shares": [0.5]}) == part(4, (0.5,))
    with pytest.raises(UserError, match=r"unknown setting of part wheel 'sise'\. Did you mean 'size'\?"):
        registry.build(part, "part wheel", {"sise": 4})

    @dataclasses.dataclass(frozen=True)
    class Plain:
        pass

    with pytest.raises(UserError, match="part plain has no settings, got 'size'"):
        registry.build(Plain, "part plain", {"size": 4})
