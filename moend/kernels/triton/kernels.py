"""The kernels of `moend.kernels.triton.launch`, which explains them and is the only module that imports this one."""

# Triton reads parameters marked as constexpr from annotations: they must not become strings.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _codes(packed, BITS: tl.constexpr, FIELD: tl.constexpr):
    """The codes of one bit field less 2^(bits - 1), exact in float16."""
    fields = (packed >> (BITS * FIELD)) & ((1 << BITS) - 1)
    return (fields.to(tl.int16) - (1 << (BITS - 1))).to(tl.float16)


@triton.jit
def _peak(x, axis: tl.constexpr):
    """max |x| along an axis, 1 where that is 0: what float16 numbers are divided by so that they lose nothing."""
    peak = tl.max(tl.abs(x), axis)
    return tl.where(peak > 0, peak, 1.0)


@triton.jit
def _logits_of_codes(
    Q, X, S, Z, q_row, slots, live, x_row, rows, dim,
    BITS: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(R, BLOCK): (q * step) . code + q . zero over one block of K, whose scales S, Z (d,) are shared by its slots."""
    half: tl.constexpr = 1 << (BITS - 1)
    r = tl.arange(0, R)
    c = tl.arange(0, W_PAD)
    inside = c < W
    packed = tl.load(X + slots[:, None] * x_row + c[None, :], mask=live[:, None] & inside[None, :], other=0)
    logits = tl.zeros([R, BLOCK], tl.float32)
    base = tl.zeros([R], tl.float32)
    for field in tl.static_range(8 // BITS):
        at = field * W + c
        q = tl.load(Q + (q_row + r)[:, None] * dim + at[None, :], mask=(r < rows)[:, None] & inside[None, :], other=0.0)
        q = q.to(tl.float32)
        step = tl.load(S + at, mask=inside, other=0.0).to(tl.float32)
        zero = tl.load(Z + at, mask=inside, other=0.0).to(tl.float32)
        base += tl.sum(q * (zero + step * half)[None, :], 1)
        folded = q * step[None, :]
        peak = _peak(folded, 1)[:, None]
        logits += tl.dot((folded / peak).to(tl.float16), tl.trans(_codes(packed, BITS, field))) * peak
    return logits + base[:, None]


@triton.jit
def partial(
    Q, KX, KS, KZ, K_SCALE, VX, VS, VZ, AT, K_ROWS, V_ROWS, LENGTHS, HIDDEN, ACC, TOP, TOTAL,
    kx_head, kx_row, ks_head, vx_head, vx_row, vs_head, vs_row, k_scale_head, hidden_head, first, splits, rows, dim,
    extent,
    K_BITS: tl.constexpr, K_GROUP: tl.constexpr, K_W: tl.constexpr, K_PAD: tl.constexpr, MOVED: tl.constexpr,
    V_BITS: tl.constexpr, V_GROUP: tl.constexpr, V_W: tl.constexpr, V_PIECE: tl.constexpr, V_PAD: tl.constexpr,
    EVEN: tl.constexpr, R: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Softmax over SPLIT slots of one KV head, not yet normalised; program (KV head of the run, split).

    An entry is K_W or V_W stored numbers or bytes; V is computed by pieces of V_PIECE channels, each of one bit field
    and one scale. *_PAD: the powers of two above. EVEN: all KV heads use `extent` slots, otherwise LENGTHS.
    """
    i = tl.program_id(0)
    split = tl.program_id(1)
    length = extent if EVEN else tl.load(LENGTHS + i)
    low = split * SPLIT
    if low < length:
        head = tl.load(AT + i).to(tl.int64)
        k_row = tl.load(K_ROWS + i).to(tl.int64)
        v_row = tl.load(V_ROWS + i).to(tl.int64)
        KX += k_row * kx_head
        VX += v_row * vx_head
        VS += v_row * vs_head
        VZ += v_row * vs_head
        r = tl.arange(0, R)
        c = tl.arange(0, V_PAD)
        inside = c < V_PIECE
        fields: tl.constexpr = 8 // V_BITS if V_BITS < 16 else 1
        pieces: tl.constexpr = V_W // V_PIECE * fields
        half: tl.constexpr = 1 << (V_BITS - 1) if V_BITS < 16 else 0
        top = tl.full([R], float("-inf"), tl.float32)
        total = tl.zeros([R], tl.float32)
        acc0 = tl.zeros([R, V_PAD], tl.float32)
        acc1 = tl.zeros([R, V_PAD if pieces > 1 else 1], tl.float32)
        acc2 = tl.zeros([R, V_PAD if pieces > 2 else 1], tl.float32)
        acc3 = tl.zeros([R, V_PAD if pieces > 2 else 1], tl.float32)
        if K_BITS == 16:
            kc = tl.arange(0, K_PAD)
            q_mask = (r < rows)[:, None] & (kc < dim)[None, :]
            q = tl.load(Q + (head * rows + r)[:, None] * dim + kc[None, :], mask=q_mask, other=0.0)
        high = tl.minimum(low + SPLIT, length)
        for start in range(low, high, BLOCK):
            slots = start + tl.arange(0, BLOCK)
            live = slots < high
            if K_BITS == 16:
                k_mask = live[:, None] & (kc < dim)[None, :]
                keys = tl.load(KX + slots[:, None] * kx_row + kc[None, :], mask=k_mask, other=0.0)
                if KX.dtype.element_ty == tl.float32:
                    logits = tl.dot(q.to(tl.float32), tl.trans(keys), input_precision="ieee")
                elif Q.dtype.element_ty == tl.float32:  # a query of 24 bits as two numbers of the entries' precision
                    upper = q.to(KX.dtype.element_ty)
                    lower = (q - upper.to(tl.float32)).to(KX.dtype.element_ty)
                    logits = tl.dot(lower, tl.trans(keys), tl.dot(upper, tl.trans(keys)))
                else:
                    logits = tl.dot(q.to(KX.dtype.element_ty), tl.trans(keys))
            else:
                block = start // K_GROUP
                if MOVED:
                    block = tl.load(K_SCALE + k_row * k_scale_head + block)
                scales = k_row * ks_head + block.to(tl.int64) * dim
                logits = _logits_of_codes(
                    Q, KX, KS + scales, KZ + scales, head * rows, slots, live, kx_row, rows, dim,
                    K_BITS, K_W, K_PAD, R, BLOCK,
                )  # fmt: skip
            gone = tl.load(HIDDEN + head * hidden_head + slots, mask=live, other=1)
            logits = tl.where((live & (gone == 0))[None, :], logits, float("-inf"))
            best = tl.maximum(top, tl.max(logits, 1))
            safe = tl.where(best == float("-inf"), 0.0, best)  # nothing seen yet
            p = tl.exp(logits - safe[:, None])
            fade = tl.exp(top - safe)
            total = total * fade + tl.sum(p, 1)
            top = best
            for chunk in tl.static_range(V_W // V_PIECE):
                v_mask = live[:, None] & inside[None, :]
                stored = tl.load(VX + slots[:, None] * vx_row + (chunk * V_PIECE + c)[None, :], mask=v_mask, other=0)
                for field in tl.static_range(fields):
                    if V_BITS == 16:
                        if VX.dtype.element_ty == tl.float32:
                            part = tl.dot(p, stored, input_precision="ieee")
                        else:
                            part = tl.dot(p.to(VX.dtype.element_ty), stored)
                    else:
                        at = slots * vs_row + (field * V_W + chunk * V_PIECE) // V_GROUP
                        step = tl.load(VS + at, mask=live, other=0.0).to(tl.float32)
                        zero = tl.load(VZ + at, mask=live, other=0.0).to(tl.float32)
                        peak = _peak(step, 0)
                        weights = (p * (step / peak)[None, :]).to(tl.float16)
                        part = tl.dot(weights, _codes(stored, V_BITS, field)) * peak
                        part += tl.sum(p * (zero + step * half)[None, :], 1)[:, None]
                    if chunk * fields + field == 0:
                        acc0 = acc0 * fade[:, None] + part
                    elif chunk * fields + field == 1:
                        acc1 = acc1 * fade[:, None] + part
                    elif chunk * fields + field == 2:
                        acc2 = acc2 * fade[:, None] + part
                    else:
                        acc3 = acc3 * fade[:, None] + part
        at = (head * splits + first + split) * rows + r
        tl.store(TOP + at, top, mask=r < rows)
        tl.store(TOTAL + at, total, mask=r < rows)
        out = ACC + at[:, None] * dim + c[None, :]
        mask = (r < rows)[:, None] & inside[None, :]
        for chunk in tl.static_range(V_W // V_PIECE):
            for field in tl.static_range(fields):
                to = out + field * V_W + chunk * V_PIECE
                if chunk * fields + field == 0:
                    tl.store(to, acc0, mask=mask)
                elif chunk * fields + field == 1:
                    tl.store(to, acc1, mask=mask)
                elif chunk * fields + field == 2:
                    tl.store(to, acc2, mask=mask)
                else:
                    tl.store(to, acc3, mask=mask)


@triton.jit
def combine(ACC, TOP, TOTAL, OLDER, OUT, splits, newest, rows, dim, R: tl.constexpr, D: tl.constexpr):
    """Put the parts of one KV head together: its own OLDER[head] splits, then the `newest` last ones of all."""
    head = tl.program_id(0).to(tl.int64)
    older = tl.load(OLDER + head)
    r = tl.arange(0, R)
    c = tl.arange(0, D)
    inside = (r < rows)[:, None] & (c < dim)[None, :]
    top = tl.full([R], float("-inf"), tl.float32)
    total = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, D], tl.float32)
    for part in range(older + newest):
        split = tl.where(part < older, part, splits - newest + part - older)
        at = (head * splits + split) * rows + r
        mine = tl.load(TOP + at, mask=r < rows, other=float("-inf"))
        best = tl.maximum(top, mine)
        safe = tl.where(best == float("-inf"), 0.0, best)
        fade, gain = tl.exp(top - safe), tl.exp(mine - safe)
        total = total * fade + tl.load(TOTAL + at, mask=r < rows, other=0.0) * gain
        acc = (
            acc * fade[:, None] + tl.load(ACC + at[:, None] * dim + c[None, :], mask=inside, other=0.0) * gain[:, None]
        )
        top = best
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(OUT + (head * rows + r)[:, None] * dim + c[None, :], out.to(OUT.dtype.element_ty), mask=inside)
