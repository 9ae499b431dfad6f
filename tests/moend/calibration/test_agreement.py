"""Token agreement with full: what it measures, and that it tells a quantiser that works from one that does not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from moend.budget import Arch, Budget
from moend.cache import layer_kv as row
from moend.cache import prefill
from moend.calibration.agreement import BITS, LEAST, token_agreement
from moend.methods.bind import bind
from moend.methods.spec import from_fields, method, method_names
from moend.models import load as models
from tests.moend.scoring.decoding import step
from tests.tiny import tiny

ARCH = Arch(3, 4, 2, 16, 4096)
QUANTISING = [n for n in method_names() if method(n).quantises]


def layouts() -> dict[tuple[Any, ...], str]:
    """One method for each way in which the packaged ones store what they quantise."""
    return {(m.group, m.channels, m.window): m.name for m in map(method, QUANTISING)}


@pytest.mark.req(22)
@pytest.mark.parametrize("bits", [16, 8, 2])
def test_against_one_token_after_the_other(bits: int) -> None:
    """The same share from the stock model's logits and a cache that is fed a token at a time."""
    model, window = tiny("qwen3"), 30
    ids = torch.randint(3, 97, (2, 120), generator=torch.Generator().manual_seed(0))
    fields = {"group": 16, "window": 20, "precision": {"k_bits": bits, "v_bits": bits}, "always_quantise": True}
    made = from_fields({"name": "q", "allocator": "all", **fields})
    got = token_agreement(model, ids, window, made.storage, dtype=torch.bfloat16, bits=(bits,))
    assert got.shape == (1, 2, window)
    bound = bind(made, Budget.parse("100%"), "matched", ARCH, t_ref=None)
    for i in range(2):
        with torch.no_grad():
            want = model(input_ids=ids[i : i + 1]).logits[0, 90:].argmax(-1)
        cache = bound.fork(prefill(model, ids[i : i + 1, :90]), window, rotary=None, scaling=[0.25] * 3)
        assert all(x.storage.k_bits == bits for (x,) in cache.layer_kv)
        said = [int(step(model, cache, ids[i : i + 1, 90 + t : 91 + t])[0, -1].argmax()) for t in range(window)]
        assert got[0, i].tolist() == [a == b for a, b in zip(said, want.tolist(), strict=True)]
    if bits == 16:
        exact = token_agreement(model, ids, window, made.storage, dtype=torch.float32, bits=(16,))
        assert exact.all()
    if bits == 2:
        assert float(got.float().mean()) < LEAST  # on a random model, whose logits are close together


@pytest.mark.req(22)
def test_a_broken_quantiser_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps twice as large as they should be: at 8 bit nothing is left of the agreement, at 16 bit it is whole."""
    model = tiny()
    ids = torch.randint(3, 97, (3, 120), generator=torch.Generator().manual_seed(0))
    storage = from_fields({"name": "q", "allocator": "all"}).storage
    good = token_agreement(model, ids, 40, storage, dtype=torch.float32)
    quantise = row.quantise_k

    def broken(*args: Any) -> Any:
        packed = quantise(*args)
        packed.step.mul_(2)
        return packed

    monkeypatch.setattr(row, "quantise_k", broken)
    bad = token_agreement(model, ids, 40, storage, dtype=torch.float32)
    share = {b: (float(g.float().mean()), float(h.float().mean())) for b, g, h in zip(BITS, good, bad, strict=True)}
    assert share[16] == (1.0, 1.0)
    assert share[8][0] > 0.9 and share[8][1] < share[8][0] - 0.2


def test_a_window_needs_a_prefix() -> None:
    with pytest.raises(ValueError, match="no window of 5"):
        token_agreement(tiny(), torch.ones(1, 5, dtype=torch.long), 5, method("KIVI").storage, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.req(22)
def test_embedded_model_agrees_in_every_layout() -> None:
    """20 x 64 tokens on SmolLM2: at 8 bit at least 0.98 of them are full's, in each layout that a method stores."""
    from moend.calibration.agreement import AgreementSettings

    cache = Path(os.environ.get("MOEND_CACHE", "~/.cache/moend")).expanduser()
    loaded = models.load(models.spec("smollm2_135m"), cache)
    s = AgreementSettings(text="text")
    ids = s.ids(loaded)
    assert ids.shape == (20, s.prefix + s.window) and s.window == 64
    # everything on one prefill of each example: at 16 bit, where all layouts are the same, and at 8 bit in each
    cells = [(16, QUANTISING[0]), *((8, name) for name in layouts().values())]
    hits = token_agreement(
        loaded.model,
        ids,
        s.window,
        lambda cap, i, _: method(cells[i][1]).storage(cap, cells[i][0], cells[i][0]),
        dtype=loaded.store_dtype,
        bits=range(len(cells)),
    )
    shares = dict(zip(cells, hits.float().mean((1, 2)).tolist(), strict=True))
    print({cell: round(x, 4) for cell, x in shares.items()})
    assert all(share >= (0.99 if bits == 16 else LEAST) for (bits, _), share in shares.items())
