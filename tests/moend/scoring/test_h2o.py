"""H2O: heavy hitters by attention received, against explicit T x T softmaxes, over prompt and decoding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moend.budget import Arch, Budget
from moend.cache import prefill
from moend.layer_bytes import layer_bytes
from moend.methods.bind import bind
from moend.methods.spec import method
from moend.scoring import scorer
from tests.moend.scoring.decoding import Pass, check
from tests.moend.scoring.views import view
from tests.tiny import tiny

ARCH = Arch(3, 4, 2, 16, 4096)


def test_score_is_the_mass() -> None:
    accumulated = torch.rand(2, 23)
    assert torch.equal(scorer("h2o")(view(23, observed={"accumulated": accumulated})), accumulated)
    with pytest.raises(ValueError, match="received"):
        scorer("h2o")(view(23, observed={}))


def test_average_divides_by_the_queries_that_saw_an_entry() -> None:
    """Three tokens that share their attention evenly: 1 + 1/2 + 1/3, 1/2 + 1/3 and 1/3 over 3, 2 and 1 queries."""
    v = view(3, heads=1, observed={"accumulated": torch.tensor([[11 / 6, 5 / 6, 1 / 3]])})
    torch.testing.assert_close(scorer("h2o", average=True)(v), torch.tensor([[11 / 18, 5 / 12, 1 / 3]]))
    # by hand for single entries of a sequence whose first tokens have gone
    accumulated = torch.rand(2, 23)
    v = view(23, start=7, observed={"accumulated": accumulated})
    got = scorer("h2o", average=True)(v)
    for h, i in [(0, 0), (0, 3), (1, 22), (1, 11)]:
        seen_by = v.now - int(v.positions[i])
        assert float(got[h, i]) == pytest.approx(float(accumulated[h, i]) / seen_by)


def heavy(accumulated: Tensor, held: list[int], keep: int) -> list[int]:
    """Half of `keep` the newest, the rest those with most accumulated attention."""
    recent = held[len(held) - keep // 2 :]
    old = sorted((p for p in held if p not in recent), key=lambda p: -float(accumulated[p]))
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
    bound = bind(method("H2O"), Budget.parse(21), "matched", ARCH, t_ref=None, at="peak", store_dtype=torch.float32)
    cap = round(bound.plan(cut, 30).layers[0].keep * total)
    entry = 2 * (16 * 4 + 4 + 4)  # both heads: K and V at 16 bit, a position, the accumulated attention
    assert cap == 21 * 2 * 16 * 4 // entry

    def received(run: Pass, layer: int) -> Tensor:
        return run.shares[layer].sum(1).unflatten(0, (2, 2)).sum(1)  # (H, T), by all queries so far

    cache, run = check(
        model, bound, ids, cut, feeds, lambda run, layer, h, held, keep: heavy(received(run, layer)[h], held, keep)
    )
    for layer, (row,) in enumerate(cache.layer_kv):
        assert row.accumulated is not None
        accumulated = received(run, layer).gather(1, row.true_positions().long().expand(2, -1))
        torch.testing.assert_close(row.accumulated, accumulated, atol=1e-4, rtol=1e-4)
        assert row.n == cap
        half = bound.method.storage(cap, 16, 16)
        assert row.bytes == layer_bytes(cap, half, 2, 16) + cap * 2 * 2 * 16 * 2  # stored at 32 bit


def test_what_never_evicts_holds_no_mass() -> None:
    model, ids = tiny(), torch.randint(3, 97, (1, 30))
    bound = bind(method("H2O"), Budget.parse("1e6"), "matched", ARCH, t_ref=None, at="peak")
    cache = bound.fork(prefill(model, ids, observe=("accumulated",)), 8, rotary=None, scaling=[0.25] * 3)
    assert all(row.accumulated is None for (row,) in cache.layer_kv)
    assert cache.resident_bytes() == ARCH.full_bytes(30)
