"""The trig scorer against its formula, written out."""

from __future__ import annotations

import cmath
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moend.errors import UserError
from moend.hf.rope import Rotary, pairs, unrotate
from moend.scoring import LayerView, scorer
from tests.moend.scoring.views import roped, view


def naive(v: LayerView, offsets: str, group: str, most: int) -> Tensor:
    """METHODS: un-rotate every key by its own position, sum over pairs for each offset, z-score, reduce."""
    assert v.rotary is not None and v.statistics is not None
    rot, d = v.rotary, v.keys.shape[-1]
    heads, n, _ = v.keys.shape
    real, imag = pairs(unrotate(v.keys[None], v.positions[None], rot)[0].double(), rot)
    q = torch.complex(v.statistics["mean_real"].double(), v.statistics["mean_imag"].double())
    q_abs = v.statistics["mean_abs"].double()
    per = q.shape[0] // heads
    freq, scale = rot.frequencies(d).tolist(), rot.scales(d).tolist()
    steps = [2**j for j in range(most.bit_length())]
    out = torch.empty(heads, n, dtype=torch.float64)
    for h in range(heads):
        z = []
        for i in range(per):
            scores = []
            for c in range(n):
                ages = [v.now - int(v.positions[c]) + o for o in steps]
                each = [0.0] * len(ages)
                for f in range(d // 2):
                    k = complex(float(real[h, c, f]), float(imag[h, c, f]))
                    e = complex(q[h * per + i, f])
                    phase = cmath.phase(e * k.conjugate())
                    rest = (float(q_abs[h * per + i, f]) - abs(e)) * abs(k)
                    for j, age in enumerate(ages):
                        each[j] += scale[f] ** 2 * (abs(e) * abs(k) * math.cos(freq[f] * age + phase) + rest)
                scores.append(sum(each) / len(each) if offsets == "mean" else max(each))
            s = torch.tensor(scores, dtype=torch.float64)
            z.append((s - s.mean()) / max(float(s.std(correction=0)), 1e-6))
        both = torch.stack(z)
        out[h] = both.amax(0) if group == "max" else both.mean(0)
    return out.float()


@pytest.mark.parametrize("still", [0, 2])
@pytest.mark.parametrize("offsets", ["mean", "max"])
@pytest.mark.parametrize("group", ["mean", "max"])
def test_formula(offsets: str, group: str, still: int) -> None:
    v = view(9, start=40, still=still)
    got = scorer("trig", offsets=offsets, group=group)(v)
    assert got.shape == (2, 9) and got.dtype == torch.float32
    torch.testing.assert_close(got, naive(v, offsets, group, 2**16), atol=1e-3, rtol=1e-4)


def test_by_hand() -> None:
    """One pair of frequency pi, offset 1 only: a key's score is +1 where now - p is odd, -1 where it is even."""
    rot = Rotary(torch.tensor([math.pi]), 1.0, 2)
    positions = torch.arange(4)
    keys = roped(torch.tensor([1.0, 0.0]).expand(1, 4, 2), positions, rot)
    stats = {"mean_real": torch.ones(1, 1), "mean_imag": torch.zeros(1, 1), "mean_abs": torch.ones(1, 1)}
    v = LayerView(0, keys, keys, positions, 4, rotary=rot, statistics=stats)
    got = scorer("trig", max_offset=1)(v)
    assert torch.allclose(got, torch.tensor([[-1.0, 1.0, -1.0, 1.0]]), atol=1e-5)
    # With E|q| = 2 a key twice as long scores by its length too: -2 + 2, 1 + 1, -1 + 1, 1 + 1 before the z-score.
    twice = {**stats, "mean_abs": stats["mean_abs"] * 2}
    longer = replace(v, keys=keys * torch.tensor([2.0, 1, 1, 1])[:, None], statistics=twice)
    assert torch.allclose(scorer("trig", max_offset=1)(longer), torch.tensor([[-1.0, 1.0, -1.0, 1.0]]), atol=1e-5)


def test_equal_scores_are_zero_not_nan() -> None:
    v = view(5)
    same = replace(v, keys=torch.zeros_like(v.keys))
    assert torch.equal(scorer("trig")(same), torch.zeros(2, 5))


def test_a_key_the_mean_query_points_at_wins() -> None:
    """No turning (frequency 0): the score is the expected product, so the key along E q is the best."""
    rot = Rotary(torch.zeros(2), 1.0, 4)
    keys = torch.randn(1, 20, 4, generator=torch.Generator().manual_seed(0))
    q = torch.tensor([1.0, -2.0, 0.5, 3.0])
    keys[0, 13] = 2 * q
    stats = {"mean_real": q[None, :2], "mean_imag": q[None, 2:], "mean_abs": torch.hypot(q[:2], q[2:])[None]}
    v = LayerView(0, keys, keys, torch.arange(20), 20, rotary=rot, statistics=stats)
    assert scorer("trig")(v).argmax() == 13


@given(
    shift=st.integers(1, 5000),
    still=st.integers(0, 1),
    seed=st.integers(0, 99),
    offsets=st.sampled_from(["mean", "max"]),
)
def test_invariants(shift: int, still: int, seed: int, offsets: str) -> None:
    trig = scorer("trig", offsets=offsets)
    v = view(12, still=still, seed=seed)
    before = v.keys.clone()
    got = trig(v)
    assert torch.equal(trig(v), got) and torch.equal(v.keys, before)
    # Only distances count: the same keys before RoPE at shifted positions score the same.
    later = view(12, still=still, seed=seed, start=shift)
    torch.testing.assert_close(trig(later), got, atol=5e-3, rtol=1e-3)
    # Entries may come in any order, and positions may be given per head.
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    mixed = replace(v, keys=v.keys[:, order], positions=v.positions[order].expand(2, -1))
    torch.testing.assert_close(trig(mixed), got[:, order], atol=1e-4, rtol=1e-4)


def test_half_precision_keys_score_in_float32() -> None:
    v = view(30)
    got = scorer("trig")(replace(v, keys=v.keys.bfloat16()))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, scorer("trig")(v), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("statistics", [None, {"mean_real": torch.ones(6, 3)}])
def test_missing_statistics_name_the_command(statistics: dict[str, Tensor] | None) -> None:
    with pytest.raises(UserError, match=r"python -m pipelines\.calibrate"):
        scorer("trig")(view(statistics=statistics))


def test_foreign_statistics_are_refused() -> None:
    with pytest.raises(UserError, match=r"do not fit layer 1 with 2 KV heads of 8 dimensions"):
        scorer("trig")(view(still=1, statistics=view().statistics))
