"""Scissorhands against its paper: counts in a window of queries, half of a full layer dropped at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moend.budget import Arch, Budget
from moend.methods.bind import bind, method
from moend.scoring import LayerView, scorer
from tests.moend.scoring.decoding import Pass, check
from tests.moend.scoring.views import row, view
from tests.tiny import tiny

ARCH = Arch(3, 4, 2, 16, 4096)


@pytest.mark.req(20)
def test_by_hand() -> None:
    """Two queries over four tokens, keys 0, ln 5, 0 and ln 2.

    The query at 2 sees three: attention 1/7, 5/7, 1/7 against 1/3: the first and third are below. The one at 3 sees
    four: 1/9, 5/9, 1/9, 2/9 against 1/4: all but the second are below. Not below: 0, 2, 0 and (the query before it
    included) 1 times.
    """
    keys = torch.tensor([1.0, 5.0, 1.0, 2.0]).log()[None, None, :, None]
    v = LayerView(
        0, keys, keys, torch.arange(4)[None], torch.tensor([4]), torch.ones(1, 1, 2, 1), torch.tensor([[2, 3]])
    )
    got = scorer("scissorhands", window=2)(v)[0, 0]
    assert got.floor().tolist() == [0, 2, 0, 1]
    assert got[2] > got[0]  # ties go to the newer
    m = method("Scissorhands")
    assert (m.n_sink, m.recent, m.schedule, m.beta, m.overshoot) == (0, 10, "every", 0.5, "counted")


def counts(attention: torch.Tensor, queries: list[int], keys: list[int]) -> list[int]:
    """attention (G, len(queries), len(keys)): how often each key, by position, is not below the average."""
    out = []
    for j, key in enumerate(keys):
        below = 0
        for i, q in enumerate(queries):
            t = sum(k <= q for k in keys)
            below += sum(key <= q and float(a[i, j]) < 1 / t for a in attention)
        out.append(len(attention) * len(queries) - below)
    return out


@pytest.mark.req(20)
@settings(deadline=None, max_examples=15)
@given(st.integers(3, 14), st.integers(0, 5), st.integers(0, 99), st.integers(1, 5))
def test_formula(n: int, padding: int, seed: int, window: int) -> None:
    padding, window = min(padding, n - 1), min(window, n)
    v = view(n, padding=padding, seed=seed, window=window)
    got = scorer("scissorhands", window=window)(v)
    assert v.queries is not None and v.query_positions is not None
    for b in range(2):
        first = padding if b == 0 else 0
        keys = list(range(n - first))
        rows = [i for i in range(window) if v.query_positions[b, i] >= 0]
        at = [int(v.query_positions[b, i]) for i in rows]
        for h in range(2):
            logits = v.queries[b, 3 * h : 3 * h + 3][:, rows] @ v.keys[b, h, first:].T * v.scaling
            logits = logits.masked_fill(torch.tensor(keys) > torch.tensor(at)[:, None], -torch.inf)
            assert got[b, h, first:].floor().tolist() == counts(logits.softmax(-1), at, keys)
    torch.testing.assert_close(scorer("scissorhands", window=window)(row(v, 0, padding)), got[:1, :, padding:])


def unimportant_go(run: Pass, layer: int, h: int, held: list[int], keep: int) -> list[int]:
    """The paper: the newest stay, then the highest counts over the last 8 queries (8: the tests' window)."""
    total = run.keys[layer].shape[1]
    at = list(range(max(total - 8, 0), total))
    logits = run.queries[layer][2 * h : 2 * h + 2, at] @ run.keys[layer][h, held].T * 0.25
    logits = logits.masked_fill(torch.tensor(held) > torch.tensor(at)[:, None], -torch.inf)
    score = dict(zip(held, counts(logits.softmax(-1), at, held), strict=True))
    newest = held[-min(4, keep) :]
    rest = sorted(held[: -len(newest)], key=lambda p: (-score[p], -p))
    return [*rest[: keep - len(newest)], *newest]


@pytest.mark.req(20)
@pytest.mark.req(13)
@pytest.mark.parametrize("feeds", [[1] * 22, [9, 1, 12]])
@pytest.mark.parametrize("cut", [40, 17])  # compressed after the prompt; or reaching its cap by growing
def test_whole_method(feeds: list[int], cut: int) -> None:
    model = tiny("llama")
    ids = torch.randint(3, 97, (1, cut + 22), generator=torch.Generator().manual_seed(cut))
    made = method("Scissorhands", scorer={"name": "scissorhands", "window": 8}, recent=4)
    bound = bind(made, Budget.parse(30), "matched", ARCH, t_ref=None, store_dtype=torch.float32)
    spec = bound.specs(cut, 22)[0]
    assert spec.schedule.reserve == (spec.schedule.cap or 0) // 2  # half of what a layer may hold goes at once
    check(model, bound, ids, cut, feeds, unimportant_go)


def test_mistakes() -> None:
    from moend.errors import UserError

    with pytest.raises(UserError, match="window >= 1"):
        scorer("scissorhands", window=0)
