"""Loops that Numba compiles for attention on a CPU. `moend.kernels.cpu` explains them and is their only caller.

Every entry point has one signature and works on a range of KV heads, so threads and processes share one compiled
function, which Numba keeps on disk. Flat loops over contiguous memory become vector instructions; four slots share one
pass over the sums. Float16 numbers are looked up in a table, as CPUs without float16 vectors need.
"""

# mypy: ignore-errors

import numba
import numpy as np

F32 = np.float32
BLOCK = 64  # slots that become numbers at a time where no scale group says otherwise
BFLOAT16, FLOAT16, FLOAT32 = 16, 17, 32  # kinds of numbers; codes have their bits as kind
HALF = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)

# Sums may be taken in another order, but infinities and NaN keep their meaning
OPTIONS = {"fastmath": {"contract", "reassoc", "arcp", "nsz"}, "nogil": True, "error_model": "numpy"}
BYTES, HALVES, ROWS = numba.uint8[:, :, ::1], numba.uint16[:, :, ::1], numba.int64[::1]
FLOATS, BLOCKS, INT = numba.float32[:, :, ::1], numba.int32[:, ::1], numba.int64
ENTRIES = BYTES, INT, HALVES, HALVES, INT, BLOCKS, INT, INT, ROWS, ROWS, INT, INT


def helper(function):
    """A function that compiled functions call."""
    return numba.njit(function, **OPTIONS)


def compiled(*arguments):
    """A function compiled on import for these arguments; kept on disk where a folder for that can be written."""

    def compile_it(function):
        try:
            return numba.njit(numba.void(*arguments), cache=True, **OPTIONS)(function)
        except RuntimeError:  # no folder to keep it in
            return numba.njit(numba.void(*arguments), **OPTIONS)(function)

    return compile_it


@helper
def numbers(x, kind, out):
    """Bytes of some slots -> float32, by bit field (8 / bits, slots * w); one field for floats."""
    if kind < 8:
        for field in range(8 // kind):
            part, shift, mask = out[field], field * kind, (1 << kind) - 1
            for i in range(x.size):
                part[i] = F32(np.int32((x[i] >> shift) & mask))
    elif kind == 8:
        for i in range(x.size):
            out[0, i] = F32(x[i])
    elif kind == BFLOAT16:
        halves, bits = x.view(np.uint16), out[0].view(np.int32)
        for i in range(halves.size):
            bits[i] = np.int32(halves[i]) << 16
    elif kind == FLOAT16:
        halves = x.view(np.uint16)
        for i in range(halves.size):
            out[0, i] = HALF[halves[i]]
    else:
        out[0, : x.size // 4] = x.view(np.float32)


@helper
def dots(query, keys, base, out):
    """out (n,) = base + query (d,) . keys (fields, >= n * w), w = d / fields."""
    fields = keys.shape[0]
    w, n = query.size // fields, out.size
    for t in range(0, n, 4):  # the last pass may read slots that are there but not asked for
        s0, s1, s2, s3 = base, base, base, base
        for field in range(fields):
            q, a = query[field * w : field * w + w], keys[field, t * w : (t + 4) * w]
            for c in range(w):
                s0 += q[c] * a[c]
                s1 += q[c] * a[c + w]
                s2 += q[c] * a[c + 2 * w]
                s3 += q[c] * a[c + 3 * w]
        out[t] = s0
        if t + 3 < n:
            out[t + 1], out[t + 2], out[t + 3] = s1, s2, s3
        else:
            if t + 1 < n:
                out[t + 1] = s1
            if t + 2 < n:
                out[t + 2] = s2


@helper
def weigh(p, values, w, out):
    """Add sum_t p[t] values[t * w + c] to out[c]; p is 0 up to a multiple of four slots."""
    for t in range(0, p.size, 4):
        p0, p1, p2, p3 = p[t], p[t + 1], p[t + 2], p[t + 3]
        # a slice for each slot: the compiler sees that they do not overlap
        v0, v1, v2, v3 = values[t * w :], values[(t + 1) * w :], values[(t + 2) * w :], values[(t + 3) * w :]
        for c in range(out.size):
            out[c] += p0 * v0[c] + p1 * v1[c] + p2 * v2[c] + p3 * v3[c]


@compiled(FLOATS, *ENTRIES, FLOATS)
def score(query, x, kind, step, zero, group, scale_of, begin, to, lengths, at, first, last, logits):
    """Logits of the KV heads first ... last of keys x (s, M, bytes), into columns `to` and on."""
    rows, dim = query.shape[1:]
    codes = kind <= 8
    block = group if codes else BLOCK
    fields = 8 // kind if codes else 1
    w = dim // fields
    keys, base = np.zeros((fields, (block + 4) * w), F32), np.zeros(rows, F32)
    folded, steps, zeros = np.empty((rows, dim), F32), np.empty(dim, F32), np.empty(dim, F32)
    for i in range(first, last):
        head = at[i]
        if not codes:
            folded[:] = query[head]
        for start in range(begin, lengths[i], block):
            n = min(block, lengths[i] - start)
            numbers(x[i, start : start + n].reshape(-1), kind, keys)
            if codes:
                scale = scale_of[i, start // block] if scale_of.size else start // block
                numbers(step[i, scale].view(np.uint8), FLOAT16, steps.reshape(1, -1))
                numbers(zero[i, scale].view(np.uint8), FLOAT16, zeros.reshape(1, -1))
                for r in range(rows):
                    total = F32(0)
                    for c in range(dim):
                        total += query[head, r, c] * zeros[c]
                    base[r] = total
                    for c in range(dim):
                        folded[r, c] = query[head, r, c] * steps[c]
            for r in range(rows):
                dots(folded[r], keys, base[r], logits[head, r, to + start - begin : to + start - begin + n])


@compiled(FLOATS, *ENTRIES, FLOATS)
def mix(probs, x, kind, step, zero, group, scale_of, begin, to, lengths, at, first, last, out):
    """Add the values x (s, M, bytes) of the KV heads first ... last, weighted by columns `to` and on, to out."""
    rows, dim = out.shape[1:]
    codes = kind <= 8
    fields = 8 // kind if codes else 1
    w, groups = dim // fields, dim // group if codes else 1
    values, folded = np.zeros((fields, BLOCK * w), F32), np.zeros(BLOCK, F32)
    steps, zeros = np.ones((groups, BLOCK), F32), np.zeros((groups, BLOCK), F32)
    for i in range(first, last):
        head = at[i]
        for start in range(begin, lengths[i], BLOCK):
            n = min(BLOCK, lengths[i] - start)
            if n < BLOCK:
                values[:], folded[:] = 0, 0
            numbers(x[i, start : start + n].reshape(-1), kind, values)
            if codes:
                for t in range(n):
                    for g in range(groups):
                        steps[g, t], zeros[g, t] = HALF[step[i, start + t, g]], HALF[zero[i, start + t, g]]
            for r in range(rows):
                p = probs[head, r, to + start - begin : to + start - begin + n]
                for g in range(groups):
                    base = F32(0)
                    for t in range(n):
                        base += p[t] * zeros[g, t]
                    for t in range(n):
                        folded[t] = p[t] * steps[g, t]
                    low, end = g * dim // groups, (g + 1) * dim // groups
                    out[head, r, low:end] += base
                    while low < end:  # channels of one bit field and one group
                        field = low // w
                        high = min(end, (field + 1) * w)
                        weigh(folded[: (n + 3) // 4 * 4], values[field, low - field * w :], w, out[head, r, low:high])
                        low = high


@helper
def exponentials(x, top, power):
    """x becomes exp(x - top); returns the sum. power: as many int32 at least, for this function's use.

    exp(x) = 2^k 2^f with k whole and |f| <= 1/2: 2^f by the first eight terms of its series, 2^k by its exponent bits.
    """
    scale = power.view(F32)
    for j in range(x.size):
        y = max((x[j] - top) * F32(1.4426950408889634), F32(-127.0))
        k = np.floor(y + F32(0.5))
        f = (y - k) * F32(0.6931471805599453)
        p = F32(1 / 5040)
        p = p * f + F32(1 / 720)
        p = p * f + F32(1 / 120)
        p = p * f + F32(1 / 24)
        p = p * f + F32(1 / 6)
        p = p * f + F32(1 / 2)
        p = p * f + F32(1)
        x[j] = p * f + F32(1)
        power[j] = (np.int32(k) + 127) << 23  # 0 for k = -127, which does not count
    total = F32(0)
    for j in range(x.size):
        x[j] *= scale[j]
        total += x[j]
    return total


@compiled(FLOATS, numba.boolean[:, ::1], ROWS, INT, INT, numba.boolean, INT, INT)
def softmax(logits, hidden, lengths, used, gap, clear, first, last):
    """Softmax in place over logits (S, R, n): columns up to a KV head's length, and from `used` on.

    What is hidden (S, N) gets 0; column j >= used has its mask in column j + gap. clear: unused columns get 0 too.
    """
    rows, n = logits.shape[1:]
    power = np.empty(n, np.int32)
    for head in range(first, last):
        ends = (lengths[head], n)
        for r in range(rows):
            x = logits[head, r]
            top, total = F32(-np.inf), F32(0)
            for part in range(2):
                begin, end = used * part, ends[part]
                gone, mine = hidden[head, begin + gap * part : end + gap * part], x[begin:end]
                for j in range(mine.size):
                    mine[j] = -np.inf if gone[j] else mine[j]
                for j in range(mine.size):
                    top = max(top, mine[j])
            for part in range(2):
                total += exponentials(x[used * part : ends[part]], top, power)
            share = F32(1) / total
            for part in range(2):
                mine = x[used * part : ends[part]]
                for j in range(mine.size):
                    mine[j] *= share
            if clear:
                x[ends[0] : used] = 0
