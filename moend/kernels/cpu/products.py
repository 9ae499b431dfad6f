"""The functions of `moend.kernels.cpu.compiled`, which explains them, in the words of `moend.kernels.cpu.vectors`.

Products go over strands first ... last of one side of a bank or of the tail: the i-th is strand at[i] of queries,
logits, probs and out, and holds something in the first lengths[i] of its `slots`. These four are float32, with `of`
rows per strand, `wide` columns for logits and probs. Some rows at a time: an entry becomes numbers once for all of
them, in registers, and is never written back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from moend.kernels.cpu.vectors import Pointer, Value, Variable, constant, floor, lanes, larger, loop, room, sums, whole

Kind = int | str  # bits of codes, or what floats are
Write = Callable[[Any], None]


def product_arguments(kind: Kind) -> dict[str, str]:
    """Arguments of score and mix: mine is queries or probs, x the entries, theirs logits or out."""
    entries = "uint8" if isinstance(kind, int) else kind if kind == "float32" else "uint16"
    pointers = {"mine": "float32", "x": entries, "step": "uint16", "zero": "uint16", "lengths": "int64", "at": "int64"}
    numbers = "first", "last", "slots", "begin", "to", "of", "wide"
    return {k: v + "*" for k, v in pointers.items()} | dict.fromkeys(numbers, "int64") | {"theirs": "float32*"}


@dataclass(frozen=True)
class Piece:
    """Some bytes of an entry as vectors of `lanes` numbers, one from each of `channels` on."""

    lanes: int
    channels: list[int]
    read: Callable[[Pointer], list[Value]]


def pieces(kind: Kind, dim: int, group: int) -> list[Piece]:
    """An entry of `dim` numbers; no vector crosses channels' groups.

    Byte j of codes holds channels j, j + w ..., w = dim bits / 8, lowest bits first.
    """
    width = _width(kind, dim)
    n = math.gcd(width, group, lanes())
    if isinstance(kind, str):
        return [Piece(n, [c], lambda x, c=c: [floats(x.at(c).get(n), kind)]) for c in range(0, dim, n)]  # type: ignore[misc]

    def fields(codes: Value) -> list[Value]:
        shifted = [codes >> at if at else codes for at in range(0, 8, kind)]
        parts = [x & (1 << kind) - 1 for x in shifted[:-1]] + shifted[-1:]
        return [x.to("float32") for x in parts]

    places = [[j + width * field for field in range(8 // kind)] for j in range(0, width, n)]
    return [Piece(n, channels, lambda x, j=channels[0]: fields(x.at(j).get(n))) for channels in places]  # type: ignore[misc]


def _width(kind: Kind, dim: int) -> int:
    """Stored numbers, bytes if codes, of an entry."""
    return dim * kind // 8 if isinstance(kind, int) else dim


def floats(x: Value, kind: str) -> Value:
    """Floats as they lie in memory -> float32; exact."""
    if kind == "float32":
        return x
    wide = x.to("int32")
    if kind == "bfloat16":
        return (wide << 16).as_("float32")
    # Exponents are 112 apart. Subnormals lack their first digit: they get one, and it is taken off as a number, which
    # no processor that takes subnormals for 0 can spoil. The largest exponent stands for infinity and NaN in both.
    bits = (wide & 0x7FFF) << 13
    small = ((bits + (113 << 23)).as_("float32") - 2.0**-14).as_("int32")
    made = (bits + (112 << 23)).unless(bits.less(1 << 23), small)
    made = made.unless(constant((31 << 23) - 1, "int32", x.lanes).less(bits), bits + (224 << 23))
    return (made | ((wide & 0x8000) << 16)).as_("float32")


def each(begin: Value | int, end: Value | int, step: int) -> Iterator[tuple[Value, int]]:
    """A loop over begin ... end `step` at a time and one over what is left, as (index, how many at a time)."""
    ready = whole(begin, end, step)
    with loop(begin, ready, step) as i:
        yield i, step
    if step > 1:
        with loop(ready, end) as i:
            yield i, 1


@dataclass(frozen=True)
class Strand:
    """The i-th of the strands a product goes over: where its entries lie, and its rows."""

    i: Value
    held: Value
    entries: Pointer
    mine: list[Pointer]
    theirs: list[Pointer]


def _strands(a: Any, width: int, rows: int, mine: Value | int, theirs: Value | int) -> Iterator[Strand]:
    """A loop over all; mine, theirs: numbers per row of these."""
    with loop(a.first, a.last) as i:
        row = a.at.at(i).get() * a.of
        pointers = ([x.at((row + r) * n) for r in range(rows)] for x, n in ((a.mine, mine), (a.theirs, theirs)))
        yield Strand(i, a.lengths.at(i).get(), a.x.at(i * a.slots * width), *pointers)


def score(kind: Kind, dim: int, group: int, rows: int) -> Write:
    """K: logits[to + t] = q . k_t for slots t from `begin` on; codes have a scale per channel and `group` slots."""
    parts, width, n = pieces(kind, dim, dim), _width(kind, dim), math.gcd(dim, lanes())
    tokens = min(8 if rows < 4 and lanes() == 16 else 4, parts[0].lanes)  # as many sums as there are registers

    def tile(entries: Pointer, count: int, queries: list[Pointer]) -> list[Value]:
        """The products of each query with `count` entries."""
        held: list[list[Value]] = [[] for _ in queries]
        for part in parts:
            read = [part.read(entries.at(t * width)) for t in range(count)]
            for number, channel in enumerate(part.channels):
                for r, query in enumerate(queries):
                    q = query.at(channel).get(part.lanes)
                    products = [q * entry[number] for entry in read]
                    held[r] = [s + p for s, p in zip(held[r], products, strict=True)] if held[r] else products
        return [sums(vectors) for vectors in held]

    def of_floats(a: Any) -> None:
        for strand in _strands(a, width, rows, dim, a.wide):
            for t, count in each(a.begin, strand.held, tokens):
                for logits, out in zip(
                    tile(strand.entries.at(t * width), count, strand.mine), strand.theirs, strict=True
                ):
                    out.at(a.to + t - a.begin).put(logits)

    def of_codes(a: Any) -> None:
        scaled = room("float32", rows * dim)
        folded = [scaled.at(r * dim) for r in range(rows)]
        for strand in _strands(a, width, rows, dim, a.wide):
            with loop(0, strand.held // group) as g:
                scales = (strand.i * (a.slots // group) + g) * dim
                base = [constant(0, "float32", n)] * rows
                for c in range(0, dim, n):
                    step, zero = (floats(x.at(scales + c).get(n), "float16") for x in (a.step, a.zero))
                    for r, query in enumerate(strand.mine):
                        q = query.at(c).get(n)
                        folded[r].at(c).put(q * step)
                        base[r] = base[r] + q * zero
                total = [x.sum() for x in base]
                for t, count in each(0, group, tokens):
                    slot = g * group + t
                    for r, logits in enumerate(tile(strand.entries.at(slot * width), count, folded)):
                        strand.theirs[r].at(a.to + slot).put(logits + total[r].spread(count))

    return of_codes if isinstance(kind, int) else of_floats


def mix(kind: Kind, dim: int, group: int, rows: int) -> Write:
    """V: add sum_t probs[to + t] v_t over slots t from `begin` on; codes have a scale per slot and `group` channels."""
    parts, width = pieces(kind, dim, group), _width(kind, dim)
    size = max((24 if lanes() == 16 else 12) // (rows * len(parts[0].channels)), 1)  # what fits in registers
    chunks = [parts[i : i + size] for i in range(0, len(parts), size)]
    n, groups, block = parts[0].lanes, dim // group, lanes()
    Sums = dict[tuple[int, int], Variable]

    def nothing(chosen: list[Piece]) -> Sums:
        zero = constant(0, "float32", n)
        return {(r, c): Variable(zero) for part in chosen for c in part.channels for r in range(rows)}

    def add(mixed: Sums, chosen: list[Piece], entry: Pointer, weight: Callable[[int, int], Value]) -> None:
        for part in chosen:
            for channel, numbers in zip(part.channels, part.read(entry), strict=True):
                for r in range(rows):
                    sum_ = mixed[r, channel]
                    sum_.value = sum_.value + weight(r, channel // group).spread(n) * numbers

    def put(mixed: Sums, strand: Strand) -> None:
        for (r, channel), sum_ in mixed.items():
            there = strand.theirs[r].at(channel)
            there.put(there.get(n) + sum_.value)

    def of_floats(a: Any) -> None:
        for strand in _strands(a, width, rows, a.wide, dim):
            for chosen in chunks:
                mixed = nothing(chosen)
                with loop(a.begin, strand.held) as t:
                    probs = [x.at(a.to + t - a.begin).get() for x in strand.mine]
                    add(mixed, chosen, strand.entries.at(t * width), lambda r, g, probs=probs: probs[r])  # type: ignore[misc]
                put(mixed, strand)

    def of_codes(a: Any) -> None:
        shares = room("float32", rows * groups * block)
        base = room("float32", rows * groups)
        for strand in _strands(a, width, rows, a.wide, dim):
            for chosen in chunks:
                mixed, asked = nothing(chosen), sorted({c // group for part in chosen for c in part.channels})
                zeros = {
                    (r, g, m): Variable(constant(0, "float32", m))
                    for r in range(rows)
                    for g in asked
                    for m in {block, 1}
                }
                for t, count in each(0, strand.held, block):
                    scales = (strand.i * a.slots + t) * groups
                    steps, offsets = (floats(x.at(scales).get(count * groups), "float16") for x in (a.step, a.zero))
                    for r in range(rows):
                        p = strand.mine[r].at(a.to + t).get(count)
                        for g in asked:
                            shares.at((r * groups + g) * block).put(p * steps.every(g, groups, count))
                            zeros[r, g, count].value = zeros[r, g, count].value + p * offsets.every(g, groups, count)
                    with loop(0, count) as u:
                        add(
                            mixed, chosen, strand.entries.at((t + u) * width),
                            lambda r, g, u=u: shares.at(u + (r * groups + g) * block).get(),  # type: ignore[misc]
                        )  # fmt: skip
                for r in range(rows):
                    for g in asked:
                        whole_blocks, rest = (zeros[r, g, m].value.sum() for m in (block, 1))
                        base.at(r * groups + g).put(whole_blocks + rest)
                for (r, channel), sum_ in mixed.items():
                    sum_.value = sum_.value + base.at(r * groups + channel // group).get().spread(n)
                put(mixed, strand)

    return of_codes if isinstance(kind, int) else of_floats


SOFTMAX = {
    "logits": "float32*", "hidden": "uint8*", "lengths": "int64*", "first": "int64", "last": "int64", "rows": "int64",
    "wide": "int64", "all": "int64", "used": "int64", "gap": "int64", "clear": "int64",
}  # fmt: skip


def softmax(a: Any) -> None:
    """In place over logits (S, rows, wide): columns up to a strand's lengths, and from `used` on.

    0 where hidden (S, all), whose column j + gap is that of a column j >= used; clear: 0 also where nothing is held,
    which is arbitrary otherwise.
    """
    n = lanes()
    with loop(a.first, a.last) as strand, loop(0, a.rows) as r:
        x, hidden, held = a.logits.at((strand * a.rows + r) * a.wide), a.hidden.at(strand * a.all), a.lengths.at(strand)
        parts = (constant(0, "int64"), held.get(), constant(0, "int64")), (a.used, a.wide, a.gap)
        top = {m: Variable(constant(-math.inf, "float32", m)) for m in (n, 1)}
        for begin, end, gap in parts:
            for j, m in each(begin, end, n):
                seen = x.at(j).get(m).unless(hidden.at(j + gap).get(m).nonzero(), -math.inf)
                x.at(j).put(seen)
                top[m].value = larger(seen, top[m].value)
        most = larger(top[n].value.most(), top[1].value)
        total = {m: Variable(constant(0, "float32", m)) for m in (n, 1)}
        for begin, end, _ in parts:
            for j, m in each(begin, end, n):
                power = exponential(x.at(j).get(m) - most.spread(m))
                x.at(j).put(power)
                total[m].value = total[m].value + power
        share = constant(1, "float32") / (total[n].value.sum() + total[1].value)
        for begin, end, _ in parts:
            for j, m in each(begin, end, n):
                x.at(j).put(x.at(j).get(m) * share.spread(m))
        with loop(held.get(), constant(0, "int64").unless(a.clear.nonzero(), a.used)) as j:
            x.at(j).put(constant(0, "float32"))


def exponential(x: Value) -> Value:
    """exp(x) for x <= 0, nothing below 2^-127.

    2^k 2^f, k whole, |f| <= 1/2: 2^f by the first eight terms of its series, 2^k in the exponent's bits.
    """
    y = x * 1.4426950408889634
    y = y.unless(y.less(-127.0), -127.0)
    k = floor(y + 0.5)
    f = (y - k) * 0.6931471805599453
    p = constant(1 / 5040, "float32", x.lanes)
    for n in (6, 5, 4, 3, 2, 1, 0):
        p = p * f + 1 / math.factorial(n)
    return p * ((k.to("int32") + 127) << 23).as_("float32")
