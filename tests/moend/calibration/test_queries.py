"""Query statistics against hooks on the model's own query projections."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moend.calibration.queries import TrigStatistics
from moend.errors import UserError
from tests.moend.hf.test_rope import BASE, ROPES
from tests.tiny import ARCHITECTURES, tiny


def hooked(model: Any, ids: Tensor) -> list[Tensor]:
    """Every layer's queries before RoPE, (Hq, T, d), of one sequence through the stock model."""
    seen: list[Tensor] = []
    hooks = []
    for layer in model.model.layers:
        attention = layer.self_attn
        last = getattr(attention, "q_norm", None) or attention.q_proj
        hooks.append(last.register_forward_hook(lambda _m, _i, out: seen.append(out.reshape(ids.shape[1], -1, 16))))
    with torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [x.transpose(0, 1) for x in seen]


def naive(queries: list[list[Tensor]]) -> dict[str, Tensor]:
    """The means over all positions of several sequences, each (L, Hq, 8)."""
    layers = [torch.cat([q[i] for q in queries], 1).double() for i in range(len(queries[0]))]
    real = torch.stack([q[..., :8].mean(1) for q in layers])
    imag = torch.stack([q[..., 8:].mean(1) for q in layers])
    size = torch.stack([torch.complex(q[..., :8], q[..., 8:]).abs().mean(1) for q in layers])
    return {"mean_real": real.float(), "mean_imag": imag.float(), "mean_abs": size.float()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(name: str) -> None:
    model = tiny(name)
    ids = torch.randint(3, 97, (1, 37), generator=torch.Generator().manual_seed(1))
    got = TrigStatistics.measure(model, ids).tensors()
    for key, want in naive([hooked(model, ids)]).items():
        assert got[key].shape == (3, 4, 8) and got[key].dtype == torch.float32
        torch.testing.assert_close(got[key], want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ROPES)
def test_every_rope_type(name: str) -> None:
    """Shorter than the trained length: there and beyond, one pass uses one set of frequencies."""
    model = tiny("llama", positions=64, rope_parameters=BASE | ROPES[name])
    for length in (12, 90):
        ids = torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(1))
        want = naive([hooked(model, ids)])
        got = TrigStatistics.measure(model, ids).tensors()
        for key in want:
            torch.testing.assert_close(got[key], want[key], atol=1e-5, rtol=1e-4)


def test_padding_does_not_count() -> None:
    model = tiny()
    g = torch.Generator().manual_seed(1)
    long, short = torch.randint(3, 97, (1, 20), generator=g), torch.randint(3, 97, (1, 13), generator=g)
    ids = torch.cat((long, torch.cat((torch.zeros(1, 7, dtype=torch.long), short), 1)))
    mask = (ids != 0).long()
    got = TrigStatistics.measure(model, ids, mask)
    want = naive([hooked(model, long), hooked(model, short)])
    for key in want:
        torch.testing.assert_close(got.tensors()[key], want[key], atol=1e-5, rtol=1e-4)
    assert torch.equal(got.layer(1)["mean_abs"], got.mean_abs[1])


def test_chunks_do_not_matter() -> None:
    model = tiny()
    ids = torch.randint(3, 97, (1, 50), generator=torch.Generator().manual_seed(1))
    one, many = TrigStatistics.measure(model, ids), TrigStatistics.measure(model, ids, chunk=7)
    for key in one.tensors():
        torch.testing.assert_close(one.tensors()[key], many.tensors()[key], atol=1e-5, rtol=1e-4)


def test_no_text_is_refused() -> None:
    with pytest.raises(UserError, match="at least one token"):
        TrigStatistics.measure(tiny(), torch.zeros(1, 0, dtype=torch.long))
