"""What holds for all scorers, and the two simple ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from moend.errors import UserError
from moend.hf.attention import AttentionRule
from moend.scoring import names, scorer
from moend.scoring.base import attention, mean_attention
from moend.scoring.random import _mix
from tests.moend.scoring.views import view


def test_names() -> None:
    assert {"random", "snapkv", "streaming", "trig"} <= set(names())


@pytest.mark.parametrize("name", names())
def test_contract(name: str) -> None:
    s = scorer(name)
    assert s.name == name
    v = view(40, window=32)
    got = s(v)
    assert got.shape == (2 if s.per_head else 1, 40) and got.dtype == torch.float32
    assert got.isfinite().all()
    if not s.last_queries:
        assert torch.equal(s(replace(v, queries=None)), got)
    # A short prompt, all of whose queries are at hand.
    assert s(view(5, window=32)).isfinite().all()
    # Scored again while decoding, entries have positions per head; where these agree, so do the scores.
    again = s(replace(v, positions=v.positions.expand(2, -1)))
    torch.testing.assert_close(again if s.per_head else again.mean(0, keepdim=True), got)


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the elements of the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            self.elements = max(self.elements, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


@pytest.mark.parametrize("name", names())
def test_memory_is_linear_in_length(name: str) -> None:
    sizes = []
    for n in (500, 2000):
        v = view(n, window=32)
        with _Largest() as largest:
            scorer(name)(v)
        sizes.append(largest.elements)
    assert sizes[1] <= 4 * sizes[0] and sizes[1] <= 6 * 32 * 2000


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("trigg", {}, "unknown scorer 'trigg'. Did you mean 'trig'?"),
        ("base", {}, "unknown scorer 'base'"),
        ("snapkv", {"windows": 3}, "unknown setting of scorer snapkv 'windows'. Did you mean 'window'?"),
        ("snapkv", {"pool": "mean"}, "unknown pool of scorer snapkv 'mean'"),
        ("snapkv", {"kernel": 4}, "odd kernel"),
        ("snapkv", {"window": 0}, "window >= 1"),
        ("trig", {"offsets": "maximum"}, "unknown offsets of scorer trig 'maximum'. Did you mean 'max'?"),
        ("trig", {"group": "sum"}, "unknown group of scorer trig"),
        ("trig", {"max_offset": 0}, "max_offset"),
        ("random", {"seed": 1}, "scorer random has no settings, got 'seed'"),
    ],
)
def test_mistakes(name: str, params: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as e:
        scorer(name, **params)
    assert words in str(e.value) and "\n" not in str(e.value)


def test_a_scorer_may_live_outside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is named by its dotted path; what it inherits of the base needs no line of its own."""
    lines = [
        "from dataclasses import dataclass",
        "from moend.scoring.base import Scorer",
        "@dataclass(frozen=True)",
        "class Oldest(Scorer):",
        "    shift: int = 0",
        "    per_head = False",
        "    def __call__(self, view):",
        "        return self.shift - view.at.float()",
        "SCORER = Oldest",
    ]
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "oldest.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    made = scorer("outside.oldest", shift=2)
    assert made(view(3)).tolist() == [[2.0, 1.0, 0.0]]
    assert (made.name, made.per_head, made.last_queries) == ("oldest", False, 0)
    assert (made.observes, made.at_decode, made.statistics) == ((), True, None)
    with pytest.raises(UserError, match=r"unknown setting of scorer outside\.oldest 'shfit'. Did you mean 'shift'"):
        scorer("outside.oldest", shfit=2)


@pytest.mark.req(20)
def test_streaming_by_hand() -> None:
    """The most recent come first, whatever the keys."""
    v = view(5, start=10)
    assert scorer("streaming")(v).tolist() == [[10.0, 11.0, 12.0, 13.0, 14.0]]


def test_random_mixes_as_splitmix64_does() -> None:
    def reference(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    xs = [0, 1, 2**63 - 1, -1, -(2**63), 123456789]
    got = _mix(torch.tensor(xs))
    assert [x % 2**64 for x in got.tolist()] == [reference(x % 2**64) for x in xs]
    # The published first output of splitmix64 from state 0 is the mix of the golden-ratio increment.
    assert reference(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


@given(seed=st.integers(-(2**70), 2**70), layer=st.integers(0, 99), n=st.integers(2, 40), drop=st.integers(0, 2**20))
def test_random_depends_on_identity_alone(seed: int, layer: int, n: int, drop: int) -> None:
    s = scorer("random")
    v = view(n, seed=1, layer=layer)
    v = replace(v, seed=seed)
    got = s(v)
    assert ((got >= 0) & (got < 1)).all()
    # An entry keeps its score when others leave, at whatever index it then lies.
    kept = torch.randperm(n, generator=torch.Generator().manual_seed(drop))[: n // 2 + 1]
    left = replace(v, keys=v.keys[:, kept] * 2, positions=v.positions[kept], now=v.now + 500)
    assert torch.equal(s(left), got[:, kept])


@pytest.mark.parametrize("change", ["seed", "layer", "head"])
def test_random_overlap_is_chance(change: str) -> None:
    """Two seeds, layers or heads share a quarter of their best quarter, not more; scores are uniform."""
    n, keep = 8000, 2000
    v = view(n)
    a = scorer("random")(v)
    other = v if change == "head" else replace(v, **{change: getattr(v, change) + 1})
    b = scorer("random")(other)
    first, second = a[0].topk(keep).indices, b[1 if change == "head" else 0].topk(keep).indices
    shared = len(set(first.tolist()) & set(second.tolist())) / keep
    assert abs(shared - 0.25) < 0.04  # about four deviations
    assert abs(float(a.mean()) - 0.5) < 0.01 and abs(float(a.var()) - 1 / 12) < 0.003
    assert len(set(a[0].tolist())) > n - 20


def test_mean_attention_is_the_mean_of_attention() -> None:
    """With sinks and a query that sees nothing, too."""
    logits = torch.randn(2, 3, 4, 9).masked_fill(torch.rand(2, 3, 4, 9) < 0.3, -torch.inf)
    logits[0, 1, 2] = -torch.inf
    for rule in (None, AttentionRule(1.0, sinks=torch.randn(6))):
        expected = attention(logits.clone(), rule).mean(2)
        torch.testing.assert_close(mean_attention(logits.clone(), rule), expected)
