"""ROUGE-L at summary level, as the package `rouge` 1.0.1 computes it, which made LongBench's published scores.

Without that package's recursion: it walks a longest common subsequence one call a step and dies at Python's recursion
limit, wherever the caller happens to stand, and the official scorer counts that as 0. Here the number of steps at which
that happens in the official script is a constant, so a score depends on the two texts alone.
"""

from __future__ import annotations

from collections.abc import Sequence

# Most steps that fit below CPython's limit of 1,000 frames under the official script's own: nine frames of script and
# package in English, ten in Chinese (one function more).
STEPS, STEPS_ZH = 990, 989


def rouge_l(prediction: str, reference: str, steps: int = STEPS) -> float:
    """F of ROUGE-L over sets of words: the union, over pairs of sentences, of the words of one LCS each.

    Sentences end at a full stop alone; a blank one holds one empty word. 0 where a text has no sentence (nothing, or
    full stops alone), or where a walk takes more than `steps`.
    """
    said, wanted = _sentences(prediction), _sentences(reference)
    if not said or not wanted:
        return 0.0
    shared: set[str] = set()
    for x in wanted:
        for y in said:
            words = _walk(x, y, steps)
            if words is None:
                return 0.0
            shared |= words
    precision = len(shared) / len({w for y in said for w in y})
    recall = len(shared) / len({w for x in wanted for w in x})
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def _sentences(text: str) -> list[tuple[str, ...]]:
    """Each distinct sentence once: a repeated one adds nothing to a union."""
    return list(dict.fromkeys(tuple(s.split()) or ("",) for s in text.split(".") if s))


def _walk(x: Sequence[str], y: Sequence[str], steps: int) -> set[str] | None:
    """Words of the LCS of x and y that is found from their ends, dropping y's last word where both drops are as good.

    The rows of the LCS table are bit vectors (Crochemore et al. 2001; Hyyrö 2004): bit j of row i is 0 where
    y[:j + 1] has a longer LCS with x[:i + 1] than y[:j] has. None where the walk takes more than `steps`.
    """
    shared = set(x).intersection(y)
    if not shared:  # all the way along y
        return None if len(y) > steps else set()
    if min(len(x), len(y)) > steps:  # a step uses up one word of each at most
        return None
    marks = {w: bytearray(len(y) // 8 + 1) for w in shared}
    for j, w in enumerate(y):
        if w in shared:
            marks[w][j // 8] |= 1 << j % 8
    places = {w: int.from_bytes(m, "little") for w, m in marks.items()}
    ones = row = (1 << len(y)) - 1
    rows = []
    for w in x:
        hits = row & places.get(w, 0)
        row = ((row + hits) | (row - hits)) & ones
        rows.append(row)
    i, j, found = len(x), len(y), set()
    while i and j:
        if not steps:
            return None
        steps -= 1
        if x[i - 1] == y[j - 1]:
            found.add(x[i - 1])
            i, j = i - 1, j - 1
        elif rows[i - 1] >> (j - 1) & 1:
            j -= 1
        else:
            i -= 1
    return found
