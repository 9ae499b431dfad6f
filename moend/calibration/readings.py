"""What tables and figures read of calibration artefacts: one function per kind, plain arrays and texts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moend.calibration import kl
from moend.calibration.agreement import LEAST
from moend.calibration.artefact import Artefact
from moend.calibration.sensitivity import Config, decode, table
from moend.errors import Blocked


def ripple_profile(folder: Path) -> dict[str, Any]:
    """A ripple artefact for tables and figures: (N, L) response and local, damage {keep: (N, L)}, its info."""
    artefact = Artefact.load(folder, kind="ripple")
    t = artefact.tensors
    damage = {keep: d.numpy() for keep, d in zip(artefact.info["keeps"], t["damage"], strict=True)}
    return {"response": t["response"].numpy(), "local": t["local"].numpy(), "damage": damage, "info": artefact.info}


def damage(folder: Path) -> dict[str, Any]:
    """A damage artefact for tables and figures: table (L, C), kinds {name: (L, C)}, heads (L, H, C) or None, configs,
    examples of a kind, planned(layer, its plan): what that cut of the layer does by each kind of window, nats;
    hardest {kind: (L, H)}: the cheapest configuration, by head, or H = 1 for whole layers."""
    artefact = Artefact.load(folder, kind="damage")
    t = artefact.tensors
    configs = decode(t["configs"])
    columns = {c: i for i, c in enumerate(configs)}
    names, each = list(artefact.info["kinds"]), t["per_example"].mean(1).numpy()  # (K, L, (H,) C)

    def planned(layer: int, plan: Mapping[str, Any]) -> dict[str, float]:
        parts = plan.get("heads") or [plan]
        found = [columns.get(Config(x["keep"], x["k_bits"], x["v_bits"])) for x in parts]  # None: all is kept
        own = each[:, layer] if plan.get("heads") else t["per_kind"].numpy()[:, layer, None]  # (K, parts, C)
        return {
            name: sum(float(own[k, h, c]) for h, c in enumerate(found) if c is not None) for k, name in enumerate(names)
        }

    return {
        "table": t["table"].numpy(),
        "kinds": dict(zip(names, t["per_kind"].numpy(), strict=True)),
        "heads": t["heads"].numpy() if "heads" in t else None,
        "configs": configs,
        "examples": t["per_example"].shape[1],
        "planned": planned,
        "hardest": {n: x[..., -1] if x.ndim == 3 else x[:, -1:] for n, x in zip(names, each, strict=True)},
    }


def agreement(sensitivity: Path, truth: Path) -> dict[str, Any]:
    """How well the proxy ranks what the KL table measures, over what both hold (MoE-nD, appendix B)."""
    proxy, measured = Artefact.load(sensitivity), Artefact.load(truth)
    both = [c for c in decode(measured.tensors["configs"]) if c in set(decode(proxy.tensors["configs"]))]
    return kl.agreement(table(proxy, both), table(measured, both), both)


def broken_quantiser(folder: Path) -> str | None:
    """Why what a quantiser stores is not to be believed, in a line, from its agreement artefact; None where it is."""
    try:
        info = Artefact.load(folder, kind="agreement").info
    except Blocked:
        return f"its token agreement with full is not in the store ({folder}): run it again"
    for bits, share in info["agreement"].items():
        if share < LEAST:
            return (
                f"with every token kept at {bits} bit, {share:.3f} of {info['tokens']} next tokens are full's, less "
                f"than {LEAST}: its quantiser does not work on this model"
            )
    return None


def single_operations(folder: Path) -> tuple[Any, list[str]]:
    """The nine single-axis operations of a sensitivity artefact: (layers, operations) and their names."""
    artefact = Artefact.load(folder, kind="sensitivity")
    names = [c.name for c in decode(artefact.tensors["single_configs"])]
    return artefact.tensors["singles"].numpy(), names


def sensitivity(folder: Path) -> dict[str, Any]:
    """A sensitivity artefact for its landscape: singles (L, 9), operations (names), pair: the errors of keep_50 and of
    k8v8, whose bytes are equal (None where the lattice lacks one), how: the eviction and the prompt in a few words."""
    artefact = Artefact.load(folder, kind="sensitivity")
    singles, operations = single_operations(folder)
    equal = {"keep_50": Config(0.5, 16, 16), "k8v8": Config(1.0, 8, 8)}
    pair = None
    if set(equal.values()) <= set(decode(artefact.tensors["configs"])):
        pair = dict(zip(equal, table(artefact, list(equal.values())).T, strict=True))
    settings = artefact.identity["settings"]
    signal = "its own scores" if settings["eviction"] == "scorer" else "random permutations"
    how = f"eviction by {signal}, a prompt of {artefact.info['tokens']} tokens"
    return {"singles": singles, "operations": operations, "pair": pair, "how": how}
