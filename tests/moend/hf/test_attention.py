"""Attention of a prefill against attention written out, under every rule: window, chunk, soft cap, sinks."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from moend.hf.attention import AttentionRule, _blocks, _fused, accumulated_attention, causal, causal_and_accumulated

HEADS, GROUP, DIM, LENGTH = 2, 2, 16, 96
RULES = [
    AttentionRule(0.25, window, softcap, torch.tensor([2.0, -1.0, 0.5, 3.0]) if sinks else None, chunk)
    for window, chunk, softcap, sinks in itertools.product((None, 24), (None, 16), (None, 1.5), (False, True))
]


def written_out(query: Tensor, key: Tensor, rule: AttentionRule, padding: Tensor | None) -> Tensor:
    """Shares (B, H_q, q, T) of a whole softmax over what each query sees and its sink."""
    q, t = query.shape[2], key.shape[2]
    logits = query @ key.repeat_interleave(GROUP, 1).mT * rule.scaling
    if rule.softcap is not None:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    left = torch.zeros(len(query), 1, 1, 1, dtype=torch.long)
    if padding is not None:
        left = (~padding).sum(1)[:, None, None, None]
    at, me = torch.arange(t), torch.arange(t - q, t)[:, None]
    hidden = (at > me) | (at < left)
    if rule.window is not None:
        hidden = hidden | (at <= me - rule.window)
    if rule.chunk is not None:
        hidden = hidden | ((at - left) // rule.chunk != (me - left) // rule.chunk)
    logits = logits.masked_fill(hidden, -torch.inf)
    if rule.sinks is not None:
        logits = torch.cat([logits, rule.sinks[None, :, None, None].expand(*logits.shape[:3], 1)], dim=-1)
    return logits.softmax(-1)[..., :t].nan_to_num(0)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("new", [1, 60, LENGTH])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_attention_is_what_the_rule_says(rule: AttentionRule, new: int, padded: bool) -> None:
    torch.manual_seed(0)
    query = 2 * torch.randn(2, HEADS * GROUP, new, DIM)
    key, value = 2 * torch.randn(2, HEADS, LENGTH, DIM), torch.randn(2, HEADS, LENGTH, DIM)
    padding = torch.ones(2, LENGTH, dtype=torch.bool)
    if padded:
        padding[1, :21] = False
    real = padding[:, None, LENGTH - new :, None]  # what padding queries see does not matter
    shares = written_out(query, key, rule, padding if padded else None)
    whole = shares @ value.repeat_interleave(GROUP, 1)
    ways = [causal(query, key, value, padding, rule), _blocks(query, key, value, padding, rule, accumulated=False)[0]]
    if rule.softcap is None:
        ways.append(_fused(query, key, value, padding if padded else None, rule))
    for out in ways:
        assert ((out - whole) * real).abs().max() < 1e-5
    received = (shares * real).sum(2).unflatten(1, (HEADS, GROUP)).sum(2)
    out, accumulated = causal_and_accumulated(query, key, value, padding, rule)
    assert ((out - whole) * real).abs().max() < 1e-5
    torch.testing.assert_close(accumulated, received, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(accumulated_attention(query, key, padding, rule), accumulated)


def test_what_a_query_sees_first() -> None:
    rule = AttentionRule(1.0, window=5, chunk=8)
    assert [rule.oldest(p) for p in (0, 3, 6, 8, 11, 15)] == [0, 0, 2, 8, 8, 11]
    assert rule.reach == 5 and AttentionRule(1.0).reach is None and AttentionRule(1.0).oldest(9) == 0
