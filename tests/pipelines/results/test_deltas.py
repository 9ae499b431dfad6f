"""Paired differences: which cells are paired, in which direction, and that Holm runs over the whole table."""

from __future__ import annotations

from typing import Any

import pytest

from moend.statistics import compare, holm
from pipelines.results.deltas import Scored, deltas


def cell(method: str, scores: list[float], budget: str = "10%", full: bool = False, own: str = "") -> Scored:
    records: list[dict[str, Any]] = [
        {"task": "t", "id": str(i), "draw": 0, "score": s, "answer_nll": 1 - s / 2} for i, s in enumerate(scores)
    ]
    return Scored(("m", "niah", "visible", "", "-" if full else budget), method, full, lambda: records, own)


BETTER, WORSE = [1.0] * 18 + [0.0] * 2, [0.0] * 15 + [1.0] * 5


def test_pairs_share_a_budget_and_full_joins_all():
    found = deltas(
        [
            cell("full", BETTER, full=True),
            cell("2d", WORSE),
            cell("2d_hetero", BETTER),
            cell("2d", WORSE, "25%"),
            cell("2d", WORSE, "10% (paper)"),
        ]
    )
    pairs = {(d.group[-1], d.method, d.other) for d in found}
    assert pairs == {
        ("10%", "2d_hetero", "2d"),
        ("10%", "2d", "full"),
        ("10%", "2d_hetero", "full"),
        ("25%", "2d", "full"),
        ("10% (paper)", "2d", "full"),
    }


def test_the_chain_is_named_and_its_direction_fixed():
    for cells in ([cell("2d_hetero", BETTER), cell("2d", WORSE)], [cell("2d", WORSE), cell("2d_hetero", BETTER)]):
        (d,) = deltas(cells)
        assert (d.method, d.other, d.name) == ("2d_hetero", "2d", "evict")
        assert d.score.value == pytest.approx(0.65)
        assert d.nll is not None and d.nll.value == pytest.approx(-0.325)


def test_holm_runs_over_all():
    cells = [cell("2d_uniform", WORSE), cell("2d", BETTER), cell("2d_hetero", BETTER)]
    found = deltas(cells)
    raw = [d.score.p for d in found]
    assert [d.p for d in found] == pytest.approx(holm(raw))
    assert raw[0] == compare(cells[1].records(), cells[0].records()).p


def test_other_examples_are_refused():
    with pytest.raises(ValueError, match="examples"):
        deltas([cell("2d", WORSE), cell("2d_hetero", BETTER[:-1])])


def test_variants_of_a_method_are_compared_with_each_other_and_with_what_was_not_varied():
    found = deltas([cell("SnapKV", WORSE), *(cell("RippleKV", BETTER, own=f"signal={s}") for s in ("output", "local"))])
    assert {(d.method, d.other) for d in found} == {
        ("SnapKV", "RippleKV (signal=output)"),
        ("SnapKV", "RippleKV (signal=local)"),
        ("RippleKV (signal=output)", "RippleKV (signal=local)"),
    }


def test_two_methods_varied_alike_are_compared_variant_by_variant():
    found = deltas([cell(m, BETTER, own=f"table={t}") for m in ("2d", "2d_hetero") for t in ("kl", "sensitivity")])
    assert {(d.method, d.other, d.name) for d in found} == {
        ("2d (table=kl)", "2d (table=sensitivity)", ""),
        ("2d_hetero (table=kl)", "2d_hetero (table=sensitivity)", ""),
        ("2d_hetero (table=kl)", "2d (table=kl)", "evict"),
        ("2d_hetero (table=sensitivity)", "2d (table=sensitivity)", "evict"),
    }
