"""Power: the formula against simulation, and its two directions against each other."""

from __future__ import annotations

import numpy as np
import pytest

from moend.statistics.power import deviation, examples_needed, smallest_difference


def test_a_simulated_comparison_has_the_power_that_was_asked() -> None:
    rng, d, q = np.random.default_rng(0), 0.1, 0.3
    n = examples_needed(d, discordant=q)
    seen = 0
    for _ in range(2000):
        x = rng.choice([1.0, -1.0, 0.0], size=n, p=[(q + d) / 2, (q - d) / 2, 1 - q])
        seen += abs(x.mean()) > 1.96 * x.std(ddof=1) / np.sqrt(n)
    assert seen / 2000 == pytest.approx(0.8, abs=0.04)


@pytest.mark.parametrize("s", [None, 0.3, 0.7])
@pytest.mark.parametrize("d", [0.01, 0.02, 0.05, 0.2])
def test_the_two_directions_agree(s: float | None, d: float) -> None:
    n = examples_needed(d, s)
    if n > 2:
        assert smallest_difference(n, s) <= d + 1e-12 < smallest_difference(n - 1, s) + 1e-9


def test_by_hand() -> None:
    # (1.959964 + 0.841621)^2 = 7.848879; with s = 0.5 and d = 0.05: 7.848879 * 0.25 / 0.0025 = 784.9
    assert examples_needed(0.05, 0.5) == 785
    assert deviation([0.0, 1.0, 0.0, 1.0]) == pytest.approx(0.57735, abs=1e-5)
    assert deviation([0.2]) is None and deviation([0.1, 0.1]) is None
    assert smallest_difference(20) == pytest.approx(np.sqrt(7.848879 / 20 * 0.5 / (1 + 7.848879 / 20)), rel=1e-4)
    with pytest.raises(ValueError):
        examples_needed(0.0)
    with pytest.raises(ValueError):
        smallest_difference(1)
