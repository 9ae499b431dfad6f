"""The version of what the engine computes, and the versions of other libraries that it was tested with."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

# Goes up by one whenever a golden record changes (tests/golden): it is a part of every cell's key, so that numbers of
# two versions never stand in one table. CHANGELOG.md says what each version changed.
ENGINE_VERSION = 5


def _quantises(method: Mapping[str, Any]) -> bool:
    return any(bits != 16 for bits in method["precision"].values())


def _evicts(method: Mapping[str, Any]) -> bool:
    """Whether it evicts while decoding; `full` has no schedule in a key."""
    return method.get("schedule") not in (None, "prompt")


def _moment_or_steps(method: Mapping[str, Any]) -> bool:
    """Whether `budget_at` or what a budget buys below 16 bit changed a method's numbers.

    It did for methods that evict while decoding (their budget binds after the prompt now), for joint bits (entries
    between the lattice's shares), and for those that drop entries of the prompt and quantise the rest: PyramidKV and
    RippleKV spend more of the budget, and no layer stores positions whose cap reaches the prompt. A method does not
    say how long the prompt was, so all of the last kind count. `full`, 16-bit methods that compress the prompt only,
    and KIVI (every entry at fixed bits) are as they were.
    """
    joint = not {"joint", "routed"}.isdisjoint(method["precision"].values())  # routed: its name before
    return _evicts(method) or joint or (_quantises(method) and method.get("scorer") is not None)


def _anchors_or_paper(method: Mapping[str, Any]) -> bool:
    """MoEZip's anchors lie in the context only. Under the papers' protocol (`budget_protocol`, beside the method's own
    fields) bits that are neither routed nor K8/V4 get the bytes of the budget, and a layer whose share of 1 was chosen
    never evicts; shares of a sample are shares of its prompt.
    """
    if (method.get("scorer") or {}).get("name") == "moezip":
        return True
    bits, allocator = method["precision"], method.get("allocator") or {}
    fixed = not {"joint", "routed"} & set(map(str, bits.values()))
    other = fixed and _quantises(method) and dict(bits) != {"k_bits": 8, "v_bits": 4}
    return method.get("budget_protocol") == "paper" and (other or allocator.get("name") in ("joint", "routed"))


def _short_prompts_at_the_peak(method: Mapping[str, Any]) -> bool:
    """Where the budget binds at the peak, caps were too small for prompts shorter than what an eviction leaves.

    A method does not say how long the prompt was, so all that quantise and evict while decoding count.
    """
    return _evicts(method) and _quantises(method) and method.get("budget_at") == "peak"


# Which methods (by the fields of conf/method) have other numbers since a version; its line in CHANGELOG.md says why.
CHANGED: Mapping[int, Callable[[Mapping[str, Any]], bool]] = {
    2: lambda method: _evicts(method) and _quantises(method),
    3: _moment_or_steps,
    4: _anchors_or_paper,
    5: _short_prompts_at_the_peak,
}


def numbers_stand(made: int, method: Mapping[str, Any], cell: Mapping[str, Any]) -> bool:
    """Whether the numbers of a method's cell by engine version `made` are still those of this version.

    cell: where its `budget_protocol` and `budget_at` stand, if it has them.
    """
    method = {**method, **{name: cell.get(name) for name in ("budget_protocol", "budget_at")}}
    later = range(made + 1, ENGINE_VERSION + 1)
    return not any(CHANGED.get(version, lambda method: True)(method) for version in later)


@functools.cache
def warn_untested(library: str) -> None:
    """Say in one line where `library` has a version that moend was not tested with; say it once a process.

    The range is the one that moend's metadata declares: its ends are tested (constraints-oldest.txt, constraints.txt).
    The parts that read private parts of a library ask this when they are imported. A checkout that was never installed
    declares nothing.
    """
    from importlib.metadata import PackageNotFoundError, requires, version

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    try:
        declared, here = requires("moend") or [], version(library)
    except PackageNotFoundError:
        return
    for need in map(Requirement, declared):
        if canonicalize_name(need.name) == library and not need.specifier.contains(here, prereleases=True):
            print(
                f"warning: moend is not tested with {library} {here}: pip install '{library}{need.specifier}'",
                file=sys.stderr,
            )
