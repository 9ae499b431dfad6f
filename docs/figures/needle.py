"""python docs/figures/needle.py: draws needle.png, the README's picture, from the table in docs/findings_log.md."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

N = 50  # examples
SHARES = (5, 10, 25)  # per cent of the full cache's bytes
FULL = 1.00
SCORES = {  # exact match; docs/findings_log.md, "the needle in twelve wordings"
    "ripple_2d_head (ours)": (0.90, 0.98, 1.00),
    "ripple_2d (ours)": (0.58, 0.92, 1.00),
    "MoE-nD 2d_hetero": (0.00, 0.00, 0.80),
    "2d_uniform (K8/V4)": (0.00, 0.00, 0.18),
    "RippleKV": (0.00, 0.02, 0.26),
    "SnapKV": (0.00, 0.00, 0.12),
}
COLOURS = ("#0b6e4f", "#6fb98f", "#3d5a98", "#b07d2b", "#a03a52", "#7a7a7a")


def wilson(p: float, n: int = N, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share, as the distances below and above it."""
    centre, half = (
        (p + z * z / (2 * n)) / (1 + z * z / n),
        z / (1 + z * z / n) * (p * (1 - p) / n + (z / (2 * n)) ** 2) ** 0.5,
    )
    return max(p - (centre - half), 0.0), max(centre + half - p, 0.0)


def main() -> None:
    """Draw the picture beside this file."""
    figure, axes = plt.subplots(figsize=(7.2, 3.6), dpi=160)
    axes.axhline(FULL, color="black", lw=1, ls=":")
    axes.text(26, FULL + 0.015, "full cache", ha="right", va="bottom", fontsize=8)
    for i, (name, scores) in enumerate(SCORES.items()):
        at = [x * 1.03 ** (i - 2.5) for x in SHARES]
        error = list(zip(*(wilson(p) for p in scores), strict=True))
        axes.errorbar(at, scores, yerr=error, color=COLOURS[i], marker="o", ms=4, lw=1.6, elinewidth=0.8, label=name)
    axes.set_xscale("log")
    axes.set_xticks(SHARES, [f"{x} %" for x in SHARES])
    axes.minorticks_off()
    axes.set_xlabel("bytes held, of the full cache's")
    axes.set_ylabel("needles found")
    axes.set_ylim(-0.03, 1.08)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("needle.png"))


if __name__ == "__main__":
    main()
