"""The parts of the comparison with kvpress that need no kvpress: handing over, counting, comparing, the page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from perf import against_kvpress as program
from perf.against_kvpress import PAIRS, Pair, Peer, PeerError, counts, hand_over, merged, overlap, ratios, with_floor
from perf.kvpress_page import page

STUB = Path(__file__).parent / "stub_peer.py"


def test_requests_reach_the_peer_and_answers_come_back() -> None:
    with Peer(sys.executable, 1, STUB) as peer:
        assert peer("answer", ids="a", cut=3) == {"did": "answer", "ids": "a", "cut": 3}
        assert peer("threads") == {"threads": "1", "offline": "1"}
        with pytest.raises(PeerError, match="cannot 'fail': ValueError: no such press"):
            peer("fail")
        assert peer("answer") == {"did": "answer"}, "a refused request ends nothing"
        with pytest.raises(PeerError, match="ended with exit code 3 at 'die'"):
            peer("die")
    assert peer.process.returncode == 3


def test_a_peer_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="the peer's python 'no-such-python' does not start"):
        Peer("no-such-python", 1)


def test_the_peer_ends_with_its_input() -> None:
    with Peer(sys.executable, 1, STUB) as peer:
        pass
    assert peer.process.returncode == 0


def test_token_ids_are_handed_over_as_they_are(tmp_path: Path) -> None:
    path = hand_over(tmp_path, {"one": (5, 0, 49151), "two": [7]})
    found = load_file(path)
    assert {name: ids.tolist() for name, ids in found.items()} == {"one": [5, 0, 49151], "two": [7]}


def test_overlap_of_a_case_made_by_hand() -> None:
    """Two heads: one keeps 0, 1 on both sides; the other 0, 1 here and 0, 2, 3 there: 1 of 3."""
    ours = torch.tensor([[[1, 1, 0, 0], [1, 1, 0, 0]]]).bool()
    theirs = torch.tensor([[[1, 1, 0, 0], [1, 0, 1, 1]]]).bool()
    scores = torch.tensor([[[0.4, 0.3, 0.2, 0.1], [4.0, 2.0, 1.5, 1.0]]])
    got = overlap(ours, theirs, scores)
    assert got["mean"] == pytest.approx((1 + 1 / 3) / 2)
    assert got["least"] == pytest.approx(1 / 3)
    assert got["identical"] == 0.5
    assert (got["ours"], got["theirs"], got["different"]) == (4, 5, 3)
    assert got["gap"] == pytest.approx(0.5), "the entry 3 lies (2 - 1) / 2 below the lowest score kept, 2"
    assert overlap(ours, ours, scores)["gap"] == 0


@given(st.integers(0, 2**24 - 1), st.integers(0, 2**24 - 1))
@settings(max_examples=40, deadline=None)
def test_overlap_is_symmetric_and_whole_only_for_equal_masks(a: int, b: int) -> None:
    one, other = (torch.tensor([x >> i & 1 for i in range(24)]).bool().view(2, 3, 4) for x in (a, b))
    there, back = overlap(one, other), overlap(other, one)
    assert (there["mean"], there["least"]) == (back["mean"], back["least"])
    assert 0 <= there["least"] <= there["mean"] <= 1
    nonempty = bool((one.any(-1) | other.any(-1)).all())
    if nonempty:
        assert (there["mean"] == 1) == (a == b) == (there["different"] == 0)


def test_number_of_entries_of_uniform_presses() -> None:
    assert counts(PAIRS["SnapKV"], 2047, 0.25, 3) == [511, 511, 511]
    assert counts(PAIRS["SnapKV"], 3, 0.1, 2) == [1, 1], "never none"


def test_number_of_entries_of_the_pyramid_by_hand() -> None:
    """b = 100 of 400: the last of 3 layers has 100 / 20 = 5, the first 195; at window 8 that is too few: 100 each."""
    narrow = Pair("PyramidKV", "PyramidKVPress", {"window_size": 4}, counts="pyramid")
    assert counts(narrow, 400, 0.25, 3) == [195, 100, 5]
    wide = Pair("PyramidKV", "PyramidKVPress", {"window_size": 8}, counts="pyramid")
    assert counts(wide, 400, 0.25, 3) == [100, 100, 100]
    # b = 300 of 400: the first would get 585, gets 400 - 8, and the last what is left of twice the mean
    assert counts(wide, 400, 0.75, 3) == [392, 300, 208]


@given(st.integers(100, 4000), st.floats(0.05, 0.95), st.integers(2, 40))
@settings(max_examples=60, deadline=None)
def test_the_pyramid_spends_the_mean(tokens: int, keep: float, layers: int) -> None:
    made = counts(PAIRS["PyramidKV"], tokens, keep, layers)
    assert sum(made) == pytest.approx(layers * tokens * keep, abs=layers * 0.5 + 1e-6)
    assert made == sorted(made, reverse=True)


def floored(scores: Tensor, keep: int, floor: float) -> Tensor:
    """kvpress' AdaKV, entry by entry: the floor of each head is safe, then the worst of the rest go."""
    heads, n = scores.shape
    mask = torch.ones(heads, n, dtype=torch.bool)
    safe = {(h, int(i)) for h in range(heads) for i in scores[h].argsort(descending=True)[: max(1, int(keep * floor))]}
    rest = sorted((float(scores[h, i]), h, i) for h in range(heads) for i in range(n) if (h, i) not in safe)
    for _, h, i in rest[: heads * (n - keep)]:
        mask[h, i] = False
    return mask


@given(st.integers(0, 1000), st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_the_floor_rule_against_a_naive_version(seed: int, keep: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(2, 3, 12, generator=generator)
    scores[:, 1] *= 4
    got = with_floor(scores, keep, 0.5)
    assert torch.equal(got, torch.stack([floored(s, keep, 0.5) for s in scores]))
    assert got.sum((1, 2)).tolist() == [3 * keep] * 2


def test_examples_are_merged() -> None:
    row = {"mean": 1.0, "least": 0.9, "identical": 0.5, "ours": 10, "theirs": 11, "different": 1, "gap": 0.1}
    other = {"mean": 0.5, "least": 0.4, "identical": 0.0, "ours": 20, "theirs": 20, "different": 8, "gap": 0.05}
    assert merged([row, other]) == {
        "mean": 0.75,
        "least": 0.4,
        "identical": 0.25,
        "ours": 30,
        "theirs": 31,
        "different": 9,
        "gap": 0.1,
    }


def test_ratios_are_of_all_turns_and_of_each() -> None:
    spent = [{"ours": [1.0, 2.0], "kvpress": [10.0, 10.0]}, {"ours": [2.0, 1.0], "kvpress": [16.0, 9.0]}]
    spent.append({"ours": [1.0, 1.0], "kvpress": [30.0, 7.0]})
    got = ratios(spent)
    assert got["ratios"] == {"wall": [10, 8, 30], "cpu": [5, 9, 7]} and got["ratio"] == {"wall": 10, "cpu": 7}
    assert got["total"] == {"wall": 14, "cpu": 6.5}


def test_every_pair_is_a_method_of_ours_and_says_how_it_is_set() -> None:
    for name, pair in PAIRS.items():
        made = pair.method()
        assert made.name == pair.ours, name
        spec = pair.spec(0.25)
        inner = spec["settings"].get("press", spec)
        assert inner["settings"]["compression_ratio"] == 0.75
    h2o = PAIRS["H2O"]
    assert h2o.method().scorer == {"name": "h2o", "average": True}
    assert h2o.command() == "method=H2O method.scorer.average=True method.schedule=prompt method.recent=0"
    assert PAIRS["AdaKV"].spec(0.5)["settings"]["press"]["press"] == "SnapKVPress"


def test_results_of_other_parts_stay(tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    program.update(path, {"kept": 1, "sweep": 2})
    assert program.update(path, {"sweep": 3}) == {"kept": 1, "sweep": 3} == json.loads(path.read_text())


def report() -> dict[str, object]:
    overlaps = {"mean": 0.9981, "least": 0.9512, "identical": 0.5, "ours": 5, "theirs": 5, "different": 2, "gap": 2e-6}
    kept = [{"pair": "SnapKV", "variant": "as they are", "keep": keep, **overlaps} for keep in (0.5, 0.1)]
    kept.append({"pair": "AdaKV", "variant": "one rule", "keep": 0.1, **overlaps})
    kept.append({"pair": "AdaKV", "variant": "one rule", "keep": 0.5, **overlaps})
    cell = {
        "method": "SnapKV",
        "keep": 0.1,
        "n": 20,
        "ours": [0.5, 0.3, 0.7],
        "kvpress": [0.45, 0.26, 0.66],
        "difference": [0.05, -0.1, 0.2],
        "p": 1.0,
        "same_text": 0.95,
    }
    return {
        "setting": {
            "date": "2026-11-30",
            "machine": "two x86 cores",
            "threads": 1,
            "model": "smollm2_135m",
            "ours": {"torch": "2.13.0", "transformers": "5.24.0"},
            "peer": {"kvpress": "0.5.5", "torch": "2.13.0", "transformers": "5.2.0"},
        },
        "kept": {
            "examples": 2,
            "length": 2048,
            "rows": kept,
            "commands": {n: p.command() for n, p in PAIRS.items()},
            "presses": {n: [p.press, dict(p.settings)] for n, p in PAIRS.items()},
        },
        "sweep": {
            "examples": 20,
            "repeats": 2,
            "length": 2048,
            "question": "visible",
            "new_tokens": 16,
            "store": "half",
            "dtype": "float32",
            "peer_dtype": "float32",
            "seconds": [
                {"ours": [10.0, 9.0], "kvpress": [100.0, 99.0]},
                {"ours": [10.0, 9.0], "kvpress": [80.0, 99.0]},
            ],
            "ratios": {"wall": [10.0, 8.0], "cpu": [11.0, 11.0]},
            "ratio": {"wall": 9.0, "cpu": 11.0},
            "total": {"wall": 9.0, "cpu": 11.0},
            "cpu_by_method": {"SnapKV": 198.0},
            "rows": [cell],
        },
        "memory": {
            "max_mib": 512,
            "dtype": "bfloat16",
            "peer_dtype": "float32",
            "peaks": {"all": {"ours": 2**28, "kvpress": {"peak": 2**29, "by_method": {"H2O": 2**29}}}},
        },
        "settings": {"length": 2048, "rows": [{"dtype": "float32", "attention": "sdpa", "wall": 7.2, "cpu": 7.1}]},
        "quantised": {
            "examples": 4,
            "tokens": 1024,
            "followed": 128,
            "full_bytes": 1000,
            "rows": [
                {
                    "cache": "moend",
                    "bits": 4,
                    "error_k": 0.05,
                    "error_v": 0.06,
                    "codes": 250,
                    "scales": 31,
                    "agree": 0.9,
                    "nll": [2.0, 2.1],
                }
            ],
        },
    }


def test_the_page_says_what_was_measured() -> None:
    text = page(report())
    for line in (
        "| method | ours | kvpress | 10 % | 50 % |",
        "| SnapKV | `method=SnapKV method.scorer.window=64 method.recent=64` | SnapKVPress, window_size=64 "
        "| 0.998 (0.951) | 0.998 (0.951) |",
        "| AdaKV, one rule |",
        "Single entries elsewhere differ where scores lie within 2e-06 of the cut.",
        "| SnapKV | 10 % | 0.50 [0.30, 0.70] | 0.45 [0.26, 0.66] | +0.05 [-0.10, +0.20] | 95 % |",
        "| 1 cells, visible, float32 | wall | 2 | 20 | 180 | **9.0** | 9.0 (8.0 to 10.0) |",
        "| 1 cells, visible, float32 | cpu | 2 | 18 | 198 | **11.0** | 11.0 (11.0 to 11.0) |",
        "CPU seconds of kvpress for one cell and example (float32): SnapKV 5.0",
        "| all | 256 MiB | 512 MiB | H2O 512 MiB |",
        "at most 512 MiB of caches decoding at once. Arithmetic: bfloat16 (kvpress: float32).",
        "| float32 | sdpa | 7.2 | 7.1 |",
        "| moend | 4 | 0.0500 | 0.0600 | 28.1 % | 3.1 % | 0.900 | +0.100 |",
    ):
        assert line in text, line
    assert "{" not in text, "everything is filled in"


def test_sweeps_of_other_modes_stand_beside_the_first() -> None:
    arguments = program.parser().parse_args
    assert program.titled("kept", arguments(["--question", "unseen"])) == "kept"
    assert program.titled("sweep", arguments([])) == "sweep"
    assert (
        program.titled("sweep", arguments(["--question", "unseen", "--dtype", "bfloat16"])) == "sweep unseen bfloat16"
    )
    whole = report()
    other = {**whole["sweep"], "question": "unseen"}  # type: ignore[dict-item]
    text = page({**whole, "sweep unseen": other})
    assert text.count("## Scores") == 2 and text.count("## Seconds") == 1
    assert "| 1 cells, unseen, float32 | wall | 2 |" in text


def test_the_page_leaves_out_what_was_not_run() -> None:
    whole = report()
    text = page({"setting": whole["setting"], "quantised": whole["quantised"]})
    assert "## Quantised" in text
    assert "## Seconds" not in text and "## Which" not in text


def test_the_page_is_written_without_a_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, out = tmp_path / "all.json", tmp_path / "page.md"
    results.write_text(json.dumps(report()))
    monkeypatch.setattr(sys, "argv", ["against", "--json", str(results), "--page", str(out)])
    assert program.main() == 0
    assert out.read_text() == page(report())
    monkeypatch.setattr(sys, "argv", ["against", "--json", str(results)])
    assert program.main() == 2
    assert "--peer is needed" in capsys.readouterr().err


@pytest.fixture(scope="module")
def ours() -> program.Ours:
    return program.Ours("recall_moe", "float32", 1)


def naive(pair: Pair, attention: Tensor, keys: Tensor, kept: int) -> Tensor:
    """What kvpress' formulas keep of one layer, written out: attention (H_q, T, T), keys (H, T, d) -> (H, T) bool."""
    heads, tokens, _ = keys.shape
    groups = attention.unflatten(0, (heads, -1))
    scores = torch.full((heads, tokens), torch.inf)  # what is always kept
    if pair.press in ("SnapKVPress", "PyramidKVPress", "AdaKVPress"):
        w = pair.settings["window_size"]
        mean = groups[:, :, -w:, :-w].mean((1, 2))
        for i in range(tokens - w):
            scores[:, i] = sum(mean[:, j] for j in range(max(i - 2, 0), min(i + 3, tokens - w))) / 5
    elif pair.press == "TOVAPress":
        scores[:, :-1] = attention[:, -1, :-1].mean(0)
    elif pair.press == "ObservedAttentionPress":
        for i in range(tokens):
            scores[:, i] = groups[:, :, i:, i].mean((1, 2))
    elif pair.press == "KnormPress":
        scores = -keys.norm(dim=-1)
    else:
        scores[:, 4:] = torch.arange(4, tokens).float()
    if pair.counts == "heads":
        return floored(scores, kept, 0.2)
    mask = torch.zeros(heads, tokens, dtype=torch.bool)
    return mask.scatter(1, scores.topk(kept, 1).indices, True)


def test_ours_set_to_their_formulas_keeps_what_they_say(ours: program.Ours) -> None:
    """Every pair but KVZip against the naive formulas, through the comparison itself."""
    from transformers import DynamicCache

    from moend.benchmarks import benchmark

    bench = benchmark({"name": "recall", "type": "recall", "length": 256, "limit": 1})
    rendered = bench.render(bench.samples()[0], ours.loaded.tokenizer, ours.arch, chat=False)
    model, ids = ours.loaded.model, torch.tensor([rendered.ids[:-1]])
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    full = DynamicCache()
    with torch.no_grad():
        attentions = model(input_ids=ids, past_key_values=full, output_attentions=True).attentions
    model.set_attn_implementation(before)

    def theirs(pair: Pair, keep: float, cut: int) -> Tensor:
        assert cut == ids.shape[1]
        numbers = counts(pair, cut, keep, ours.arch.layers)
        layers = zip(attentions, full.layers, numbers, strict=True)
        return torch.stack([naive(pair, a[0], layer.keys[0], n) for a, layer, n in layers])

    pairs = {name: pair for name, pair in PAIRS.items() if name != "KVZip"}
    found = dict(program.compare(ours, pairs, (0.3, 0.6), rendered, theirs, 0))
    assert len(found) == 2 * (len(pairs) + 1)
    for (name, variant, keep), result in found.items():
        if name == "AdaKV" and variant == program.PLAIN:
            assert result["ours"] == result["theirs"]
            continue
        near = result["gap"] < 1e-4  # rounding may swap entries that score the same
        assert result["mean"] > 0.99 and near, (name, variant, keep, result)

    def other(pair: Pair, keep: float, cut: int) -> Tensor:
        return theirs(pair, keep, cut).roll(1, -1)

    wrong = next(program.compare(ours, {"Knorm": PAIRS["Knorm"]}, (0.3,), rendered, other, 0))[1]
    assert wrong["mean"] < 0.99, "a shifted choice is seen"
