"""At one budget every method holds the same bytes: what real rows hold, and why some hold less."""

from __future__ import annotations

import functools

import pytest
import torch

from moend.budget import Arch, Budget
from moend.cache import LayerCapture, Prefilled
from moend.errors import Infeasible
from moend.hf.rope import Rotary
from moend.methods.bind import BoundMethod, bind
from moend.methods.spec import method, method_names
from tests.moend.methods.made import calibrations

# Layers as SmolLM2 and recall_moe have them; how many there are does not change a share.
SHAPES = {"smollm2": (Arch(2, 9, 3, 64, 8192), 1024), "recall_moe": (Arch(2, 4, 2, 32, 1024), 256)}
BUDGETS = ("10%", "20%", "35%", "60%", "75%")
NEW = 3
LATTICE = [n for n in method_names() if method(n).joint_bits]
REST = [n for n in method_names() if n not in LATTICE and n != "full"]


@functools.cache
def prefilled(shape: str) -> Prefilled:
    """A prompt of random entries with all that a scorer may ask for."""
    arch, tokens = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    h, d = arch.kv_heads, arch.head_dim
    one = [
        LayerCapture(draw(1, h, tokens, d), draw(1, h, tokens, d), draw(1, arch.q_heads, 32, d))
        for _ in range(arch.layers)
    ]
    rows = {"reconstruction": h, "routing_query": 2, "routing_recon": 2, "accumulated": h}
    observed = {k: [draw(1, n, tokens).abs()] * arch.layers for k, n in rows.items()}
    return Prefilled(one, torch.arange(tokens)[None], None, None, observed)


def bound(name: str, shape: str, budget: str) -> BoundMethod:
    arch = SHAPES[shape][0]
    made = method(name)
    at = "peak" if made.evicts else "prompt"  # `test_budget_at` compares all of them at both moments, as predicted
    return bind(made, Budget.parse(budget), "matched", arch, t_ref=None, at=at, artefacts=calibrations(arch))


@functools.cache
def most_held(name: str, shape: str, budget: str) -> int | None:
    """Bytes after the prompt, or (evicting while decoding) the most until NEW tokens have come; None: infeasible."""
    arch, tokens = SHAPES[shape]
    b = bound(name, shape, budget)
    try:
        b.specs(tokens, NEW)
    except Infeasible as e:
        assert Budget.parse(e.smallest).value > b.budget.to_bytes(arch, tokens)
        return None
    rotary = [Rotary(torch.rand(arch.head_dim // 2), 1.0, arch.head_dim)] * arch.layers
    cache = b.fork(prefilled(shape), NEW, rotary=rotary, scaling=[0.1] * arch.layers)
    parts = cache.parts()
    most = cache.resident_bytes()
    assert most == sum(row.nbytes() for layer in parts for row in layer)
    if b.method.evicts:
        for _ in range(NEW):
            for layer in cache.layers:
                for _ in layer.decoding.feed(*torch.zeros(2, 1, arch.kv_heads, 1, arch.head_dim)):
                    pass
            most = max(most, cache.resident_bytes())
    return most


def everything(name: str, shape: str) -> int:
    """Bytes of a method at fixed bits that keeps every token of the prompt."""
    arch, tokens = SHAPES[shape]
    b = bound(name, shape, "100%")
    k_bits, v_bits = (int(b.method.precision[x]) for x in ("k_bits", "v_bits"))
    from moend.layer_bytes import layer_bytes

    storage = b.storage(tokens + NEW, k_bits, v_bits).whole
    return arch.layers * int(layer_bytes(tokens, storage, arch.kv_heads, arch.head_dim))


@pytest.mark.req(4)
@pytest.mark.req(19)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", REST)
@pytest.mark.parametrize("shape", SHAPES)
def test_fixed_bits_leave_less_than_an_entry_a_layer(shape: str, name: str, budget: str) -> None:
    """Never more than the budget; what is left would not buy every layer one entry more, or there is none to buy."""
    arch, tokens = SHAPES[shape]
    held, total = most_held(name, shape, budget), Budget.parse(budget).to_bytes(arch, tokens)
    if held is None:
        assert method(name).keeps_all or (shape, name) == ("recall_moe", "Scissorhands")
        return
    assert held <= total
    if method(name).keeps_all:  # all tokens at one precision cost what they cost
        assert held == everything(name, shape)
        return
    b = bound(name, shape, budget)
    if min(s.tokens for s in b.specs(tokens, NEW)) >= tokens - NEW and b.method.quantises:  # its ceiling
        assert held >= 0.97 * everything(name, shape)
        return
    # An entry at 16 bit on both sides, its position and its accumulated attention; where K is packed, a new group's
    # scales as well.
    entry = arch.kv_heads * (4 * arch.head_dim + 8) + (arch.kv_heads * arch.head_dim * 4 if b.method.quantises else 0)
    # A layer that keeps all (PyramidKV's first) stores no positions; the entries of all layers stay SnapKV's.
    whole = sum(s.tokens >= tokens for s in b.specs(tokens, NEW))
    assert total - held < arch.layers * entry + whole * 4 * arch.kv_heads * tokens
    if shape == "smollm2" and not whole:  # fine enough for 1 %
        assert held >= 0.99 * total


@pytest.mark.req(4)
@pytest.mark.req(19)
@pytest.mark.parametrize("name", LATTICE)
@pytest.mark.parametrize("shape", SHAPES)
def test_lattices_never_pass_the_budget(shape: str, name: str) -> None:
    """Routed methods choose from a lattice: at least half of any budget is used, and more budget never holds less."""
    arch, tokens = SHAPES[shape]
    before = 0
    for budget in BUDGETS:
        held, total = most_held(name, shape, budget), Budget.parse(budget).to_bytes(arch, tokens)
        if held is None:
            assert name == "KVTuner"
            continue
        assert total / 2 <= held <= total
        assert name == "2d" or held >= before
        before = held


@pytest.mark.req(2)
@pytest.mark.parametrize(("name", "smallest"), [("KIVI", 0.398), ("KIVI_2bit", 0.289), ("KVTuner", 0.326)])
def test_keeping_all_names_its_smallest_budget(name: str, smallest: float) -> None:
    """The figures of docs/methods.md, and that the budget which is named can be met."""
    arch, tokens = SHAPES["smollm2"]
    with pytest.raises(Infeasible, match=rf"^{name} cannot meet the budget 0\.1r") as e:
        bound(name, "smollm2", "10%").specs(tokens, 16)
    assert Budget.parse(e.value.smallest).value / arch.full_bytes(tokens) == pytest.approx(smallest, abs=0.001)
    specs = bound(name, "smollm2", e.value.smallest).specs(tokens, 16)
    assert all(s.tokens > tokens and s.storage.quantised for s in specs)
