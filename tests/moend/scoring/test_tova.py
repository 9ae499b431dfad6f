"""TOVA against its paper: one query, all heads together, one token at every step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moend.budget import Arch, Budget
from moend.methods.bind import bind
from moend.methods.spec import method
from moend.scoring import LayerView, scorer
from tests.moend.scoring.decoding import Pass, check
from tests.moend.scoring.views import view
from tests.tiny import tiny

ARCH = Arch(3, 4, 2, 16, 4096)


@pytest.mark.req(20)
def test_by_hand() -> None:
    """Two heads: attention 1/4 1/4 1/2 and 1/2 1/3 1/6 have the mean 9/24 7/24 8/24, so the second token goes."""
    keys = torch.tensor([[1.0, 1.0, 2.0], [3.0, 2.0, 1.0]]).log()[:, :, None]
    got = scorer("tova")(LayerView(0, keys, keys, torch.arange(3), 3, torch.ones(2, 1, 1)))
    assert got.shape == (1, 3)
    torch.testing.assert_close(got[0], torch.tensor([9.0, 7.0, 8.0]) / 24)
    m = method("TOVA")
    assert (m.n_sink, m.recent, m.schedule, m.beta) == (0, 0, "every", 1)


@pytest.mark.req(20)
@settings(deadline=None, max_examples=25)
@given(st.integers(2, 20), st.integers(0, 99))
def test_formula(n: int, seed: int) -> None:
    v = view(n, seed=seed, window=1)
    got = scorer("tova")(v)
    assert v.queries is not None
    mean = torch.zeros(n)
    for head in range(6):
        logits = [float(v.queries[head, 0] @ v.keys[head // 3, i]) * v.scaling for i in range(n)]
        mean += torch.tensor(logits).softmax(0) / 6
    torch.testing.assert_close(got[0], mean, atol=1e-6, rtol=1e-5)
    assert math.isclose(float(got.sum()), 1, rel_tol=1e-5)
    more = replace(v, queries=torch.cat((torch.randn_like(v.queries), v.queries), 1))
    torch.testing.assert_close(scorer("tova")(more), got)


def least_attended(run: Pass, layer: int, _: int, held: list[int], keep: int) -> list[int]:
    """The paper: by the newest query's attention, mean over heads."""
    last = run.shares[layer][:, -1].mean(0)
    return sorted(held, key=lambda p: -float(last[p]))[:keep]


@pytest.mark.req(20)
@pytest.mark.req(13)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("feeds", [[1] * 12, [9, 1, 2]])
@pytest.mark.parametrize("cut", [40, 15])  # compressed after the prompt; or reaching its cap by growing
def test_whole_method(name: str, feeds: list[int], cut: int) -> None:
    model = tiny(name)
    ids = torch.randint(3, 97, (1, cut + 12), generator=torch.Generator().manual_seed(cut))
    bound = bind(method("TOVA"), Budget.parse(21), "matched", ARCH, t_ref=None, at="peak", store_dtype=torch.float32)
    cache, _ = check(model, bound, ids, cut, feeds, least_attended)
    for (held,) in cache.layer_kv:
        assert held.n == 19  # 21 x 128 bytes less a query of 4 heads (128 bytes) hold 19 entries of 128 + 4
        assert held.positions is not None and held.positions.ndim == 1
        assert held.queries is not None and held.queries.shape == (2, 2, 1, 16)
        assert held.bytes == 19 * (2 * 2 * 16 * 4 + 4) + 4 * 16 * 4  # stored at 32 bit here
