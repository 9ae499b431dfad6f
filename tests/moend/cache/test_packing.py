"""Quantisation against a naive one, and its bounds."""

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moend.cache.packing import fake_quant_k, fake_quant_v, pack, quantise_k, quantise_v, unpack
from moend.errors import UserError


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_pack_round_trip_and_size(bits):
    codes = torch.randint(0, 2**bits, (3, 5, 64), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (3, 5, 64 * bits // 8)
    assert torch.equal(unpack(packed, bits), codes)


@settings(deadline=None, max_examples=60)
@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 70), st.just(8)), elements=st.floats(-300, 300, width=32)),
    st.sampled_from([8, 4, 2]),
    st.sampled_from([4, 32]),
)
def test_error_is_at_most_half_a_step(x, bits, group):
    x = torch.from_numpy(x)[None]
    for packed in (quantise_k(x, bits, group), quantise_v(x, bits)):
        step = packed.step.float()
        step = step.repeat_interleave(group, 1)[:, : x.shape[1]] if packed.per == "channel" else step
        # a float32 ulp of the value itself comes on top
        assert bool(((x - packed.dequantise()).abs() <= step / 2 * 1.001 + x.abs() * 2e-7).all())


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 100])
def test_close_to_naive(bits, tokens):
    torch.manual_seed(tokens)
    x = torch.randn(2, tokens, 16) * 3 + 1
    ours = fake_quant_k(x, bits, 32)
    for h in range(2):
        for c in range(16):
            for start in range(0, tokens, 32):
                part = x[h, start : start + 32, c]
                step = (part.max() - part.min()) / (2**bits - 1)
                naive = part.min() + ((part - part.min()) / step.clamp_min(1e-9)).round() * step
                # scales and zero points are float16: a code near a rounding boundary may differ by one step
                assert (naive - ours[h, start : start + 32, c]).abs().max() <= step * 1.1 + 0.02
    values = fake_quant_v(x, bits)
    step = (x.amax(-1) - x.amin(-1)) / (2**bits - 1)
    assert bool(((x - values).abs() <= step[..., None] * 0.6 + 0.02).all())


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("value", [7e4, -7e4, 1e6])
def test_beyond_float16_is_clipped_never_nan(bits, value):
    x = torch.full((1, 40, 16), value)
    x[0, 3, 5] = 1.0
    for packed in (quantise_k(x, bits, 32), quantise_v(x, bits)):
        out = packed.dequantise()
        assert bool(out.isfinite().all())
        assert bool((out.sign() == x.sign())[x.abs() > 1].all())


def test_heads_that_do_not_fill_bytes_are_refused():
    with pytest.raises(UserError, match="multiple of 4 dimensions, got 10"):
        quantise_v(torch.randn(1, 8, 10), 2)


def test_bytes_by_hand():
    k, v = quantise_k(torch.randn(3, 70, 64), 4, 32), quantise_v(torch.randn(3, 70, 64), 2)
    assert sum(t.nbytes for t in k.tensors()) == 3 * (70 * 32 + 3 * 64 * 4)
    assert sum(t.nbytes for t in v.tensors()) == 3 * (70 * 16 + 70 * 4)


def test_16_bits_is_untouched():
    x = torch.randn(2, 3, 4)
    assert fake_quant_k(x, 16, 32) is x
    assert fake_quant_v(x, 16) is x


def test_values_share_a_scale_over_as_many_channels_as_they_are_told() -> None:
    values = torch.randn(2, 5, 64)
    for channels, groups in ((64, 1), (32, 2), (48, 2), (7, 16)):
        packed = quantise_v(values, 4, channels)
        assert packed.step.shape == (2, 5, groups)
        for g in range(groups):  # each group is what it would be alone
            part = slice(g * 64 // groups, (g + 1) * 64 // groups)
            alone = quantise_v(values[..., part], 4)
            assert torch.equal(packed.dequantise()[..., part], alone.dequantise())
