"""The functions of `moend.cache.compiled`, which explains them and is the only module that imports this one.

Written for the compiler: flat loops over memory that lies in a row become vector instructions, and several slots share
one pass over the sums. Strands `first` ... `last` of a side are computed; its i-th is strand at[i] of queries, logits,
probs and out, all float32, and holds something in its first lengths[i] slots.
"""

# mypy: ignore-errors

import numba
import numpy as np

F32 = np.float32
BLOCK = 64  # slots that are numbers at a time
FLOAT16, BFLOAT16, FLOAT32 = 0, 1, 2

CODES, HALVES, WORDS = numba.uint8[:, :, ::1], numba.uint16[:, :, ::1], numba.int32[:, :, ::1]
FLOATS, NAMES, INT = numba.float32[:, :, ::1], numba.int64[::1], numba.int64


def jit(*signatures):
    """Compiled as soon as this module is imported, for these arguments and no others; without any: when called."""
    # Sums may be taken in another order, but infinities and NaN mean what they mean
    fast = {"contract", "reassoc", "arcp", "nsz"}
    return numba.njit(list(signatures) or None, fastmath=fast, nogil=True, error_model="numpy", cache=True)


@jit()
def fields_of(x, bits, out):
    """Bytes (m,) -> their bit fields as numbers (8 / bits, m)."""
    for field in range(8 // bits):
        part, shift, mask = out[field], field * bits, (1 << bits) - 1
        if bits == 8:
            for i in range(x.size):
                part[i] = F32(x[i])
        else:
            for i in range(x.size):
                part[i] = F32((x[i] >> shift) & mask)


@jit()
def floats(x, kind, ints, out):
    """Floats as they lie in memory (m,), read as integers -> float32 `out`, whose bits are `ints`."""
    if kind == FLOAT32:
        for i in range(x.size):
            ints[i] = x[i]
    elif kind == BFLOAT16:
        for i in range(x.size):
            ints[i] = np.int32(x[i]) << 16
    else:
        for i in range(x.size):
            ints[i] = (np.int32(x[i]) & 0x7FFF) << 13
        for i in range(x.size):
            out[i] *= F32(2.0**112)  # the difference of the exponents' offsets; exact, for subnormals too
        for i in range(x.size):
            if ints[i] >= 0x47800000:  # 2^16: the largest exponent of float16 is infinity or NaN
                ints[i] |= 0x7F800000
        for i in range(x.size):
            ints[i] |= (np.int32(x[i]) & 0x8000) << 16


@jit()
def dots(query, keys, n, out):
    """Add the products of query (d,) with n slots to out (n,); keys (fields, n * w), w = d / fields.

    Four slots at a time, and both fields of 4 bits in one loop: fewer sums across a vector.
    """
    fields = keys.shape[0]
    w = query.size // fields
    whole = n - n % 4
    for t in range(0, whole, 4):
        s0, s1, s2, s3 = F32(0), F32(0), F32(0), F32(0)
        if fields == 2:
            q0, q1 = query[:w], query[w:]
            a, b = keys[0, t * w : (t + 4) * w], keys[1, t * w : (t + 4) * w]
            for c in range(w):
                s0 += q0[c] * a[c] + q1[c] * b[c]
                s1 += q0[c] * a[c + w] + q1[c] * b[c + w]
                s2 += q0[c] * a[c + 2 * w] + q1[c] * b[c + 2 * w]
                s3 += q0[c] * a[c + 3 * w] + q1[c] * b[c + 3 * w]
        else:
            for field in range(fields):
                q0, a = query[field * w : field * w + w], keys[field, t * w : (t + 4) * w]
                for c in range(w):
                    s0 += q0[c] * a[c]
                    s1 += q0[c] * a[c + w]
                    s2 += q0[c] * a[c + 2 * w]
                    s3 += q0[c] * a[c + 3 * w]
        out[t] += s0
        out[t + 1] += s1
        out[t + 2] += s2
        out[t + 3] += s3
    for t in range(whole, n):
        s0 = F32(0)
        for field in range(fields):
            for c in range(w):
                s0 += query[field * w + c] * keys[field, t * w + c]
        out[t] += s0


@jit()
def weigh(p, values, n, begin, w, out):
    """Add sum_t p[t] values[t, begin : begin + size] to out (size,); values (n * w,)."""
    size = out.size
    whole = n - n % 8
    for t in range(0, whole, 8):
        a = t * w + begin
        v0, v1, v2, v3 = values[a:], values[a + w :], values[a + 2 * w :], values[a + 3 * w :]
        a += 4 * w
        v4, v5, v6, v7 = values[a:], values[a + w :], values[a + 2 * w :], values[a + 3 * w :]
        p0, p1, p2, p3, p4, p5, p6, p7 = p[t], p[t + 1], p[t + 2], p[t + 3], p[t + 4], p[t + 5], p[t + 6], p[t + 7]
        for c in range(size):
            out[c] += (
                p0 * v0[c] + p1 * v1[c] + p2 * v2[c] + p3 * v3[c] + p4 * v4[c] + p5 * v5[c] + p6 * v6[c] + p7 * v7[c]
            )
    for t in range(whole, n):
        v0 = values[t * w + begin :]
        for c in range(size):
            out[c] += p[t] * v0[c]


@jit(numba.void(FLOATS, CODES, HALVES, HALVES, INT, INT, NAMES, NAMES, INT, INT, FLOATS))
def score_codes(query, codes, step, zero, bits, group, lengths, at, first, last, logits):
    """K: codes (s, M, w), one scale per channel and `group` slots: step, zero (s, M / group, d) as float16's bits."""
    rows, dim = query.shape[1:]
    w = codes.shape[2]
    buffer, scaled = np.empty((8 // bits, group * w), F32), np.empty(dim, F32)
    steps, zeros = np.empty(dim, F32), np.empty(dim, F32)
    for i in range(first, last):
        strand = at[i]
        for g in range(lengths[i] // group):
            begin = g * group
            fields_of(codes[i, begin : begin + group].reshape(-1), bits, buffer)
            floats(step[i, g], FLOAT16, steps.view(np.int32), steps)
            floats(zero[i, g], FLOAT16, zeros.view(np.int32), zeros)
            for r in range(rows):
                mine, out = query[strand, r], logits[strand, r, begin : begin + group]
                base = F32(0)
                for c in range(dim):  # apart from the next loop: together they would be summed as memory happens to lie
                    base += mine[c] * zeros[c]
                for c in range(dim):
                    scaled[c] = mine[c] * steps[c]
                out[:] = base
                dots(scaled, buffer, group, out)


@jit(numba.void(FLOATS, CODES, HALVES, HALVES, INT, INT, NAMES, NAMES, INT, INT, FLOATS))
def mix_codes(probs, codes, step, zero, bits, group, lengths, at, first, last, out):
    """V: codes (s, M, w), one scale per slot and `group` channels: step, zero (s, M, d / group) as float16's bits."""
    rows, w, groups = probs.shape[1], codes.shape[2], step.shape[2]
    buffer, folded = np.empty((8 // bits, BLOCK * w), F32), np.empty((groups, BLOCK), F32)
    steps, zeros = np.empty(BLOCK * groups, F32), np.empty(BLOCK * groups, F32)
    for i in range(first, last):
        strand = at[i]
        for begin in range(0, lengths[i], BLOCK):
            n = min(BLOCK, lengths[i] - begin)
            fields_of(codes[i, begin : begin + n].reshape(-1), bits, buffer)
            floats(step[i, begin : begin + n].reshape(-1), FLOAT16, steps.view(np.int32), steps)
            floats(zero[i, begin : begin + n].reshape(-1), FLOAT16, zeros.view(np.int32), zeros)
            for r in range(rows):
                p, mine = probs[strand, r, begin : begin + n], out[strand, r]
                for g in range(groups):
                    base, weights = F32(0), folded[g]
                    if groups == 1:
                        for t in range(n):
                            base += p[t] * zeros[t]
                        for t in range(n):
                            weights[t] = p[t] * steps[t]
                    else:
                        for t in range(n):
                            base += p[t] * zeros[t * groups + g]
                        for t in range(n):
                            weights[t] = p[t] * steps[t * groups + g]
                    for c in range(g * group, (g + 1) * group):
                        mine[c] += base
                for field in range(8 // bits):
                    low = field * w
                    while low < (field + 1) * w:  # channels of one bit field and one group
                        g = low // group
                        high = min((field + 1) * w, (g + 1) * group)
                        weigh(folded[g], buffer[field], n, low - field * w, w, mine[low:high])
                        low = high


@jit(*(numba.void(FLOATS, x, INT, INT, INT, NAMES, NAMES, INT, INT, FLOATS) for x in (HALVES, WORDS)))
def score_floats(query, x, kind, begin, to, lengths, at, first, last, logits):
    """Slots begin ... lengths[i] of x (s, M, d), floats as integers, into columns `to` and on."""
    rows, dim = query.shape[1], x.shape[2]
    buffer = np.empty((1, BLOCK * dim), F32)
    for i in range(first, last):
        strand = at[i]
        for start in range(begin, lengths[i], BLOCK):
            n, there = min(BLOCK, lengths[i] - start), to + start - begin
            floats(x[i, start : start + n].reshape(-1), kind, buffer[0].view(np.int32), buffer[0])
            for r in range(rows):
                out = logits[strand, r, there : there + n]
                out[:] = 0
                dots(query[strand, r], buffer, n, out)


@jit(*(numba.void(FLOATS, x, INT, INT, INT, NAMES, NAMES, INT, INT, FLOATS) for x in (HALVES, WORDS)))
def mix_floats(probs, x, kind, begin, to, lengths, at, first, last, out):
    """Slots begin ... lengths[i] of x (s, M, d), weighted by the columns of probs from `to` on."""
    rows, dim = probs.shape[1], x.shape[2]
    buffer = np.empty(BLOCK * dim, F32)
    for i in range(first, last):
        strand = at[i]
        for start in range(begin, lengths[i], BLOCK):
            n, there = min(BLOCK, lengths[i] - start), to + start - begin
            floats(x[i, start : start + n].reshape(-1), kind, buffer.view(np.int32), buffer)
            for r in range(rows):
                weigh(probs[strand, r, there : there + n], buffer, n, 0, dim, out[strand, r])


@jit()
def exponentials(x, top, power):
    """x becomes exp(x - top); returns the sum. power: as many int32 at least, for this function's use.

    exp(x) = 2^k 2^f, k whole, |f| <= 1/2: 2^f by the first eight terms of its series, 2^k in the exponent's bits.
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
        power[j] = (np.int32(k) + 127) << 23  # k = -127, beyond what counts: 0
    total = F32(0)
    for j in range(x.size):
        x[j] *= scale[j]
        total += x[j]
    return total


@jit(numba.void(FLOATS, numba.boolean[:, ::1], NAMES, INT, INT, numba.boolean, INT, INT))
def softmax(logits, hidden, lengths, used, gap, clear, first, last):
    """In place over what strands hold of logits (S, R, n): columns up to their lengths, and from `used` on.

    0 where hidden (S, N), whose column j + gap is that of a column j >= used; clear: 0 also where nothing is held,
    which is arbitrary otherwise.
    """
    rows, n = logits.shape[1:]
    power = np.empty(n, np.int32)
    for strand in range(first, last):
        ends = (lengths[strand], n)
        for r in range(rows):
            x = logits[strand, r]
            top, total = F32(-np.inf), F32(0)
            for part in range(2):
                begin, end = used * part, ends[part]
                gone, mine = hidden[strand, begin + gap * part : end + gap * part], x[begin:end]
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
