"""KVZip's scores against a softmax written out."""

from __future__ import annotations

import pytest
import torch

from moend.scoring import LayerView, kvzip, scorer
from moend.scoring.kvzip import attention_received


@pytest.mark.req(5)
@pytest.mark.parametrize("window", [None, 9])
def test_attention_received_is_a_restricted_softmax_and_two_maxima(window, monkeypatch):
    monkeypatch.setattr(kvzip, "QUERY_BLOCK", 3)
    torch.manual_seed(0)
    sinks, chunk, own = (torch.randn(2, n, 8) for n in (2, 7, 10))
    query = torch.randn(4, 8, 8)  # the newest 8 of 10
    first, behind = 5, 20
    where = None if window is None else (window, first, behind)
    found = attention_received(query, sinks, chunk, own, 0.4, where)
    at = [0, 1, *range(first, first + 7), *range(behind, behind + 10)]
    for head in range(2):
        best = torch.zeros(7)
        for q in range(4):
            if q // 2 != head:
                continue
            for t in range(8):
                me = behind + 2 + t
                keys = torch.cat([sinks[head], chunk[head], own[head]])
                logits = (keys @ query[q, t]) * 0.4
                for j, p in enumerate(at):
                    if p > me or (window is not None and me - p >= window):
                        logits[j] = -torch.inf
                best = torch.maximum(best, logits.softmax(-1)[2:9])
        torch.testing.assert_close(found[head], best)


def test_scores_are_the_observation():
    keys, observed = torch.zeros(2, 4, 8), {"reconstruction": torch.rand(2, 4)}
    score = scorer("kvzip")(LayerView(0, keys, keys, torch.arange(4), 4, observed=observed))
    assert torch.equal(score, observed["reconstruction"])
