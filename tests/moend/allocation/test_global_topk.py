"""One threshold over all heads, against a naive division one entry at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moend.allocation.global_topk import head_tokens


@pytest.mark.req(5)
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_head_tokens_is_one_threshold_with_a_floor(data):
    layers, heads, n = (data.draw(st.integers(1, top)) for top in (4, 3, 12))
    floor = data.draw(st.integers(0, 3))
    least = layers * heads * min(floor, n)
    entries = data.draw(st.integers(least, layers * heads * n + 5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    scores = [
        (torch.rand(heads, n, generator=generator) * data.draw(st.sampled_from([3, 1000]))).round()
        for _ in range(layers)
    ]
    counts = head_tokens(scores, entries, floor)
    # naive: give every head its floor, then the best of what is left, one by one
    flat = [
        (layer, head, i, scores[layer][head, i].item())
        for layer in range(layers)
        for head in range(heads)
        for i in range(n)
    ]
    mine = {(layer, head): 0 for layer in range(layers) for head in range(heads)}
    left = []
    for layer, head in mine:
        own = sorted((e for e in flat if e[:2] == (layer, head)), key=lambda e: (-e[3], e[2]))
        mine[layer, head] = min(floor, n)
        left += own[min(floor, n) :]
    for layer, head, _, _ in sorted(left, key=lambda e: (-e[3], *e[:3]))[: entries - least]:
        mine[layer, head] += 1
    assert counts == [[mine[layer, head] for head in range(heads)] for layer in range(layers)]
    assert sum(map(sum, counts)) == min(entries, layers * heads * n)


def test_head_tokens_toy():
    scores = [torch.tensor([[0.9, 0.8, 0.1], [0.2, 0.1, 0.0]]), torch.tensor([[0.7, 0.6, 0.5], [0.0, 0.0, 0.0]])]
    assert head_tokens(scores, 5, 0) == [[2, 0], [3, 0]]
    assert head_tokens(scores, 6, 1) == [[2, 1], [2, 1]]
    with pytest.raises(ValueError, match="cannot give 4 heads 2 each"):
        head_tokens(scores, 7, 2)
    with pytest.raises(ValueError, match="NaN"):
        head_tokens([torch.tensor([[float("nan")]])], 1, 0)
