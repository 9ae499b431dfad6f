"""Random calibrations and methods bound to them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from moend.budget import Arch, Budget
from moend.calibration.artefact import Artefact
from moend.calibration.damage import DamageSettings
from moend.calibration.sensitivity import encode
from moend.layer_bytes import peak_layer_bytes
from moend.methods.bind import BoundMethod, bind
from moend.methods.spec import Method, method, method_names
from moend.plan import SINGLES, Config, extend_lattice, lattice

ARCH = Arch(layers=6, q_heads=4, kv_heads=2, head_dim=64, max_positions=4096)
KEEPS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
ROUTED = ["2d", "2d_hetero"]
COMPRESSING = [n for n in method_names() if n != "full"]


def sensitivity(arch: Arch = ARCH, seed: int = 0) -> Artefact:
    """A random table that grows with what is taken away."""
    configs = lattice(extend_lattice(KEEPS))
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(arch.layers, 3, generator=generator) + 0.1
    loss = torch.tensor([[1 - c.keep, 16 / c.k_bits - 1, 16 / c.v_bits - 1] for c in configs])
    tensors = {"table": scale @ loss.T, "configs": encode(configs)}
    tensors |= {"singles": torch.zeros(arch.layers, len(SINGLES)), "single_configs": encode(SINGLES)}
    return Artefact("sensitivity", {"model_id": "m"}, tensors, {})


def queries(arch: Arch = ARCH) -> Artefact:
    shape = (arch.layers, arch.q_heads, arch.head_dim // 2)
    return Artefact("queries", {}, {k: torch.ones(shape) for k in ("mean_real", "mean_imag", "mean_abs")}, {})


def ripple(arch: Arch = ARCH, seed: int = 0) -> Artefact:
    """Random responses of three examples."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {k: torch.rand(3, arch.layers, generator=generator) for k in ("response", "local")}
    return Artefact("ripple", {}, tensors, {})


def damage(arch: Arch = ARCH, seed: int = 0) -> Artefact:
    """A random table of the configurations that a calibration measures by default."""
    configs = [Config(*c) for c in DamageSettings().configs]
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(arch.layers, 2, generator=generator, dtype=torch.float64) + 0.1
    loss = torch.tensor([[1 - c.keep, 8 / c.k_bits / 8] for c in configs], dtype=torch.float64)
    own = scale[:, None] * torch.rand(arch.layers, arch.kv_heads, 1, generator=generator, dtype=torch.float64)
    tensors = {"table": scale @ loss.T, "heads": own @ loss.T, "configs": encode(configs)}
    return Artefact("damage", {}, tensors, {})


def calibrations(arch: Arch = ARCH) -> dict[str, Artefact]:
    """One of each kind that a packaged method needs."""
    return {"sensitivity": sensitivity(arch), "queries": queries(arch), "ripple": ripple(arch)} | {
        "damage": damage(arch)
    }


def bound(name: str, budget: object, protocol: str = "matched", arch: Arch = ARCH, **rest: Any) -> BoundMethod:
    fields = {k: rest.pop(k) for k in list(rest) if k in {f.name for f in dataclasses.fields(Method)}}
    rest.setdefault("t_ref", 1024)
    artefacts = calibrations(arch)
    return bind(method(name, **fields), Budget.parse(budget), protocol, arch, artefacts=artefacts, **rest)


def peak(b: BoundMethod, tokens: int, new: int) -> int:
    """The most bytes the layers can hold together, from what the plan says."""
    total = 0
    for spec in b.specs(tokens, new):
        cap, storage, start = spec.schedule.cap, spec.storage, min(spec.tokens, tokens)
        reserve = spec.schedule.reserve
        if cap is None:  # keeps all and grows by all that is new
            cap, storage, reserve = tokens + new, dataclasses.replace(storage, positions="none"), new
        total += peak_layer_bytes(cap, reserve, storage, b.arch.kv_heads, b.arch.head_dim, start=start, new=new)
    return total
