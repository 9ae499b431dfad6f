"""What records say of the prompt's kept entries and of bytes over long answers, written and read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moend.decoding import POINTS, Outcome, note
from moend.errors import UserError
from pipelines import run
from pipelines.execution.records import kept_shares
from pipelines.results import load
from pipelines.results.kept import by_layer, segments, shares
from pipelines.store.cells import Store


def naive(positions: list[list[list[int]]], tokens: int) -> np.ndarray[Any, Any]:
    """(layers, heads, tokens) 0 or 1, entry by entry."""
    out = np.zeros((len(positions), len(positions[0]), tokens))
    for layer, heads in enumerate(positions):
        for head, kept in enumerate(heads):
            for p in kept:
                out[layer, head, p] = 1
    return out


def test_shares_are_those_of_the_positions() -> None:
    positions = [[[0, 7], [7], [1, 2, 7]], [[], list(range(8)), [7]]]
    tensors = [[torch.tensor(p, dtype=torch.int32) for p in heads] for heads in positions]
    wanted = naive(positions, 8)
    by_head = kept_shares(tensors, 8, "abcdEFGh", "EFG", "heads")
    assert (shares(by_head) == wanted).all() and by_head["answer"] == 5.5 / 8
    layers, tokens = (kept_shares(tensors, 8, "EFG EFG", "EFG", by) for by in ("layers", "tokens"))
    assert shares(layers) == pytest.approx(wanted.mean(1), abs=1 / 510)
    assert shares(tokens) == pytest.approx(wanted.mean((0, 1))[None], abs=1 / 510)
    assert layers["answer"] is None
    for kept in (by_head, layers, tokens):
        assert segments(kept) is None
        for start, stop in ((2, 7), (0, 7), (2, 8)):
            parts = {"before": range(start), "context": range(start, stop), "after": range(stop, 8)}
            naively = {
                name: [wanted[x, h, i] for i in at for x in range(2) for h in range(3)] for name, at in parts.items()
            }
            told = {name: sum(v) / len(v) for name, v in naively.items() if v}
            assert segments(kept | {"context": [start, stop]}) == pytest.approx(told, abs=1 / 510)
    assert kept_shares(tensors, 8, "EFG", "", "layers")["answer"] is None
    assert by_layer(by_head) == pytest.approx(wanted.mean(1)) and by_layer(tokens).shape == (1, 8)
    assert (
        by_layer(layers, 3)
        == pytest.approx(  # pieces of tokens 0-2, 3-5, 6-7
            np.stack([shares(layers)[:, a:b].mean(1) for a, b in ((0, 3), (3, 6), (6, 8))], axis=1)
        )
    )


def test_records_of_before_are_read() -> None:
    old = {"tokens": 8, "layers": ["80" + "00" * 6 + "ff"], "answer": 5.5 / 8}
    assert shares(old)[0] == pytest.approx([128 / 255, 0, 0, 0, 0, 0, 0, 1])
    assert by_layer(old).shape == (1, 8)


def test_long_prompts_stay_small() -> None:
    torch.manual_seed(0)
    layer = [torch.randperm(16_000)[:1600].sort().values for _ in range(8)]
    assert len(kept_shares([layer] * 32, 16_000, "", "", "tokens")["shares"]) < 22_000
    assert len(kept_shares([layer] * 32, 16_000, "", "", "heads")["shares"]) < 32 * 8 * 16_000 / 6
    whole = kept_shares([[torch.arange(16_000)] * 8] * 32, 16_000, "", "", "tokens")
    assert len(whole["shares"]) < 100


def test_points_of_bytes_are_thinned() -> None:
    """Of 1,000 tokens: every 16th, and of few tokens all."""
    for tokens in (1, 5, POINTS, POINTS + 1, 1000):
        out = Outcome()
        for i in range(tokens):
            out.token_ids.append(3)
            note(out, 10 * i)
        assert len(out.held_bytes) <= POINTS
        assert out.held_bytes == [10 * i for i in range(0, tokens, out.held_every)]
        assert len(out.held_bytes) > min(tokens, POINTS) / 2 - 1


COMMAND = [
    *("model=recall_moe", "benchmark=recall", "benchmark.tasks=[num]", "benchmark.length=96", "benchmark.limit=2"),
    *("budget=50%", "tracking=none", "method=full,H2O,AdaKV", "-m"),
]


@pytest.mark.slow
def test_records_tell_what_was_kept_and_how_bytes_grew(tmp_path: Path, undrawn: None) -> None:
    how = ["generation.temperature=40", "generation.max_new_tokens=300", "generation.samples=2", "engine.kept=heads"]
    assert run.main([f"paths.store={tmp_path}", *COMMAND, *how]) == 0
    found = load(tmp_path)
    cells = found.cells.reset_index().set_index("method").key
    records = {name: Store(tmp_path).cell(key).records() for name, key in cells.items()}
    for name, mine in records.items():
        assert [r["kept"] is not None for r in mine] == [r["draw"] == 0 for r in mine]  # draws share a compression
        kept = found.kept(cells[name])
        assert len(kept) == 2 and list(kept.by) == ["heads"] * 2
        for values, r in zip(kept.shares, (r for r in mine if r["draw"] == 0), strict=True):
            assert values.shape == (4, 2, r["compressed_tokens"])
            assert values.sum(2).mean(1) == pytest.approx(r["entries"], abs=0.5)
            start, stop = r["kept"]["context"]
            told = segments(r["kept"]) or {}
            assert 0 <= start < stop <= r["compressed_tokens"] and set(told) <= {"before", "context", "after"}
            assert (set(told.values()) == {1.0}) == (name == "full")
        long = [r for r in mine if r["new_tokens"] >= 64]
        growth = found.growth(cells[name])
        assert set(zip(growth.id, growth.draw, strict=True)) == {(r["id"], r["draw"]) for r in long} and long
        for r in long:
            told = r["bytes_over_tokens"]
            assert (r["new_tokens"] - 1) // told["every"] <= len(told["bytes"]) <= POINTS
            assert max(told["bytes"]) <= r["resident_bytes_peak"] and r["max_new_tokens"] == 300
            if name == "full":
                rises = {b - a for a, b in zip(told["bytes"], told["bytes"][1:], strict=False)}
                assert rises == {told["every"] * r["full_bytes"] // r["compressed_tokens"]}
    with pytest.raises(UserError, match="unknown complete cell"):
        found.kept("nothing")


@pytest.mark.parametrize(("asked", "forms"), [("tokens", ["layers", "tokens"]), ("none", [])])
def test_the_setting_says_how_much_is_recorded_and_is_no_part_of_a_cell(
    asked: str, forms: list[str], tmp_path: Path, undrawn: None
) -> None:
    assert run.main([f"paths.store={tmp_path}", *COMMAND, f"engine.kept={asked}"]) == 0
    found = load(tmp_path)
    for key in found.cells.index:
        kept = found.kept(key)
        assert ([] if kept.empty else list(kept.by)) == forms
    assert len(found.cells) == 3
    assert run.main([f"paths.store={tmp_path}", *COMMAND, "engine.kept=heads"]) == 0
    assert len(load(tmp_path).cells) == 3
