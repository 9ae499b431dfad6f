"""H2O: heavy hitters by attention received, against explicit T x T softmaxes, over prompt and decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moend.cache import CompressedCache, attention_of, cache_argument, prefill
from moend.methods import bind, method
from moend.plan import Arch, Budget, layer_bytes
from moend.scoring import scorer
from tests.moend.scoring.views import view
from tests.tiny import tiny

ARCH = Arch(3, 4, 2, 16, 4096)


def test_score_is_the_mass() -> None:
    mass = torch.rand(2, 2, 23)
    got = scorer("h2o")(view(23, padding=3, observed={"mass": mass}))
    assert torch.equal(got[0, :, :3], torch.full((2, 3), -torch.inf))
    assert torch.equal(got[0, :, 3:], mass[0, :, 3:])
    assert torch.equal(got[1], mass[1])
    with pytest.raises(ValueError, match="received"):
        scorer("h2o")(view(23, observed={}))


def masked_run(model: Any, ids: Tensor, visible: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Logits of a plain model and its attention (H_q, T, T) per layer; visible[l] (H, T, T) bool."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    shares: dict[int, Tensor] = {}

    def naive(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        seen = visible[module.layer_idx].repeat_interleave(groups, 0)[None]
        logits = (query @ key.repeat_interleave(groups, 1).mT * scaling).masked_fill(~seen, -torch.inf)
        shares[module.layer_idx] = logits.softmax(-1)[0]
        return (logits.softmax(-1) @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("naive_h2o", naive)
    before = model.config._attn_implementation
    model.set_attn_implementation("naive_h2o")
    try:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits, [shares[i] for i in range(len(visible))]
    finally:
        model.set_attn_implementation(before)


def step(model: Any, cache: CompressedCache, ids: Tensor) -> Tensor:
    seen = cache.get_seq_length()
    at = torch.arange(seen, seen + ids.shape[1])[None]
    with torch.no_grad(), attention_of(model):
        out: Tensor = model(input_ids=ids, position_ids=at, use_cache=True, **{cache_argument(model): cache}).logits
    return out


def heavy(mass: Tensor, held: list[int], keep: int) -> list[int]:
    """Half of `keep` the newest, the rest those with most mass."""
    recent = held[len(held) - keep // 2 :]
    old = sorted((p for p in held if p not in recent), key=lambda p: -float(mass[p]))
    return sorted([*old[: keep - len(recent)], *recent])


@pytest.mark.req(20)
@pytest.mark.req(13)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("feeds", [[1] * 30, [9, 1, 1, 1, 7, 11]])
@pytest.mark.parametrize("cut", [40, 12])  # compressed after the prompt; or reaching its cap by growing
def test_whole_method_against_explicit_softmaxes(name: str, feeds: list[int], cut: int) -> None:
    """Prompt, question fed in pieces, decoding: what each step sees, which entries stay, and the bytes."""
    model, total = tiny(name), cut + 30
    ids = torch.randint(3, 97, (1, total), generator=torch.Generator().manual_seed(cut))
    bound = bind(method("H2O"), Budget.parse(21), "matched", ARCH, t_ref=None, store_dtype=torch.float32)
    cap = round(bound.plan(cut, 30).layers[0].keep * total)
    entry = 2 * (16 * 4 + 4 + 4)  # both heads: K and V at 16 bit, a position, the mass
    assert cap == 21 * 2 * 16 * 4 // entry

    # one token at a time: full model, everything evicted masked out
    held = [[list(range(cut)) for _ in range(2)] for _ in range(3)]
    visible = [torch.ones(2, total, total).tril().bool() for _ in range(3)]
    start = [v[:, :cut, :cut] for v in visible]
    shares = masked_run(model, ids[:, :cut], start)[1]
    mass = [s.sum(1).unflatten(0, (2, 2)).sum(1) for s in shares]
    for t in range(cut, total):
        for layer in range(3):
            for h in range(2):
                if len(held[layer][h]) >= cap:
                    held[layer][h] = heavy(mass[layer][h], held[layer][h], cap - 1)
                held[layer][h].append(t)
                visible[layer][h, t] = False
                visible[layer][h, t, held[layer][h]] = True
        logits, shares = masked_run(model, ids[:, : t + 1], [v[:, : t + 1, : t + 1] for v in visible])
        mass = [
            torch.nn.functional.pad(m, (0, 1)) + s[:, -1].unflatten(0, (2, 2)).sum(1)
            for m, s in zip(mass, shares, strict=True)
        ]

    prefilled = prefill(model, ids[:, :cut], observe=("mass",), chunk=17)
    cache = bound.fork(prefilled, 30, rotary=None, scaling=[0.25] * 3)
    ours, at = [], cut
    for n in feeds:
        ours.append(step(model, cache, ids[:, at : at + n]))
        at += n
    for layer, (row,) in enumerate(cache.rows):
        positions = row.true_positions().expand(2, -1)
        assert [positions[h].tolist() for h in range(2)] == held[layer]
        assert row.mass is not None
        torch.testing.assert_close(row.mass, mass[layer].gather(1, positions.long()), atol=1e-4, rtol=1e-4)
        assert row.n == cap
        half = bound.method.storage(cap, 16, 16)
        assert row.bytes == row.nbytes() == layer_bytes(cap, half, 2, 16) + cap * 2 * 2 * 16 * 2  # stored at 32 bit
    assert (torch.cat(ours, 1) - logits[:, cut:]).abs().max() < 1e-4


def test_what_never_evicts_holds_no_mass() -> None:
    model, ids = tiny(), torch.randint(3, 97, (1, 30))
    bound = bind(method("H2O"), Budget.parse("1e6"), "matched", ARCH, t_ref=None)
    cache = bound.fork(prefill(model, ids, observe=("mass",)), 8, rotary=None, scaling=[0.25] * 3)
    assert all(row.mass is None for (row,) in cache.rows)
    assert cache.resident_bytes() == ARCH.full_bytes(30)
