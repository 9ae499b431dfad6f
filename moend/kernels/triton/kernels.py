"""The kernels of `moend.kernels.triton.launch`, which explains them and is the only module that imports this one."""

# Triton reads parameters marked as constexpr from annotations: they must not become strings.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _side(x, step, zero, slots, channels, live, x_row, s_row, dim, BITS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr):  # noqa: E501  # fmt: skip
    """Entries (slots, channels) of one strand as float32: zero + code * step, 0 where not live."""
    if BITS == 16:
        return tl.load(x + slots[:, None] * x_row + channels[None, :], mask=live, other=0.0).to(tl.float32)
    width = dim * BITS // 8  # bytes of an entry: byte j holds channels j, j + width ... in its bit fields
    packed = tl.load(x + slots[:, None] * x_row + (channels % width)[None, :], mask=live, other=0).to(tl.int32)
    codes = (packed >> (BITS * (channels // width))[None, :]) & ((1 << BITS) - 1)
    if KEYS:  # one scale per channel and GROUP tokens
        at = (slots // GROUP)[:, None] * s_row + channels[None, :]
    else:  # one per token and GROUP channels
        at = slots[:, None] * s_row + (channels // GROUP)[None, :]
    steps = tl.load(step + at, mask=live, other=0.0).to(tl.float32)
    zeros = tl.load(zero + at, mask=live, other=0.0).to(tl.float32)
    return zeros + codes.to(tl.float32) * steps


@triton.jit
def partial(
    Q, KX, KS, KZ, VX, VS, VZ, AT, K_ROWS, V_ROWS, LENGTHS, HIDDEN, ACC, TOP, TOTAL,
    kx_strand, kx_row, ks_strand, ks_row, vx_strand, vx_row, vs_strand, vs_row,
    hidden_strand, first, splits, rows, dim,
    K_BITS: tl.constexpr, K_GROUP: tl.constexpr, V_BITS: tl.constexpr, V_GROUP: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Softmax over SPLIT slots of one strand, not yet normalised; program (strand of the run, split)."""
    i = tl.program_id(0)
    split = tl.program_id(1)
    length = tl.load(LENGTHS + i)
    low = split * SPLIT
    if low < length:
        strand = tl.load(AT + i).to(tl.int64)
        k_row = tl.load(K_ROWS + i).to(tl.int64)
        v_row = tl.load(V_ROWS + i).to(tl.int64)
        r = tl.arange(0, R)
        c = tl.arange(0, D)
        inside = (r < rows)[:, None] & (c < dim)[None, :]
        q = tl.load(Q + (strand * rows + r)[:, None] * dim + c[None, :], mask=inside, other=0.0).to(tl.float32)
        top = tl.full([R], float("-inf"), tl.float32)
        total = tl.zeros([R], tl.float32)
        acc = tl.zeros([R, D], tl.float32)
        high = tl.minimum(low + SPLIT, length)
        for start in range(low, high, BLOCK):
            slots = start + tl.arange(0, BLOCK)
            seen = slots < high
            gone = tl.load(HIDDEN + strand * hidden_strand + slots, mask=seen, other=1)
            seen = seen & (gone == 0)
            live = seen[:, None] & (c < dim)[None, :]
            keys = _side(KX + k_row * kx_strand, KS + k_row * ks_strand, KZ + k_row * ks_strand,
                         slots, c, live, kx_row, ks_row, dim, K_BITS, K_GROUP, True)  # fmt: skip
            logits = tl.dot(q, tl.trans(keys), input_precision="ieee")
            logits = tl.where(seen[None, :], logits, float("-inf"))
            best = tl.maximum(top, tl.max(logits, 1))
            safe = tl.where(best == float("-inf"), 0.0, best)  # nothing seen yet
            p = tl.exp(logits - safe[:, None])
            fade = tl.exp(top - safe)
            values = _side(VX + v_row * vx_strand, VS + v_row * vs_strand, VZ + v_row * vs_strand,
                           slots, c, live, vx_row, vs_row, dim, V_BITS, V_GROUP, False)  # fmt: skip
            acc = acc * fade[:, None] + tl.dot(p, values, input_precision="ieee")
            total = total * fade + tl.sum(p, 1)
            top = best
        at = (strand * splits + first + split) * rows + r
        tl.store(TOP + at, top, mask=r < rows)
        tl.store(TOTAL + at, total, mask=r < rows)
        tl.store(ACC + at[:, None] * dim + c[None, :], acc, mask=inside)


@triton.jit
def combine(ACC, TOP, TOTAL, OUT, splits, rows, dim, R: tl.constexpr, D: tl.constexpr):
    """The parts of one strand put together; parts whose maximum is -inf were never written."""
    strand = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, R)
    c = tl.arange(0, D)
    inside = (r < rows)[:, None] & (c < dim)[None, :]
    top = tl.full([R], float("-inf"), tl.float32)
    total = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, D], tl.float32)
    for split in range(splits):
        at = (strand * splits + split) * rows + r
        mine = tl.load(TOP + at, mask=r < rows, other=float("-inf"))
        there = mine > float("-inf")
        best = tl.maximum(top, mine)
        safe = tl.where(best == float("-inf"), 0.0, best)
        fade, gain = tl.exp(top - safe), tl.exp(mine - safe)
        total = total * fade + tl.load(TOTAL + at, mask=there, other=0.0) * gain
        part = tl.load(ACC + at[:, None] * dim + c[None, :], mask=inside & there[:, None], other=0.0)
        acc = acc * fade[:, None] + part * gain[:, None]
        top = best
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(OUT + (strand * rows + r)[:, None] * dim + c[None, :], out.to(OUT.dtype.element_ty), mask=inside)
