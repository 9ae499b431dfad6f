"""A few words to write functions over memory and vectors in Python, which LLVM compiles for the CPU at hand.

    def double(a):                          # x float32 (n,), n a multiple of 8
        with loop(0, a.n, 8) as i:
            a.x.at(i).put(a.x.at(i).get(8) * 2.0)

    compiled(double, x="float32*", n="int64")(tensor.data_ptr(), 64)

Python runs once, while the function is written: its `for` repeats instructions, `loop` is a loop of the function.
Values are numbers or vectors of them, of any number of lanes: LLVM cuts them to what the CPU has. Sums and products may
be contracted (a * b + c rounds once); infinities and NaN mean what they mean.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from llvmlite import binding, ir

TYPES = {
    "float32": ir.FloatType(),
    "int64": ir.IntType(64),
    "int32": ir.IntType(32),
    "uint16": ir.IntType(16),
    "uint8": ir.IntType(8),
}
BYTES = {"float32": 4, "int64": 8, "int32": 4, "uint16": 2, "uint8": 1}
FLAGS = ("contract", "nsz")
_writing = threading.local()


def _builder() -> ir.IRBuilder:
    builder: ir.IRBuilder = _writing.builder
    return builder


def _typed(kind: str, lanes: int) -> ir.Type:
    return TYPES[kind] if lanes == 1 else ir.VectorType(TYPES[kind], lanes)


class Value:
    """Numbers of one kind, `lanes` of them side by side."""

    def __init__(self, value: ir.Value, kind: str, lanes: int):
        self.value, self.kind, self.lanes = value, kind, lanes

    def _with(self, other: Value | float, name: str) -> Value:
        other = other if isinstance(other, Value) else constant(other, self.kind, self.lanes)
        if (other.kind, other.lanes) != (self.kind, self.lanes):
            raise TypeError(f"{self.lanes} x {self.kind} and {other.lanes} x {other.kind}")
        real = self.kind == "float32"
        make = getattr(_builder(), ("f" + name) if real else name)
        return Value(make(self.value, other.value, **({"flags": FLAGS} if real else {})), self.kind, self.lanes)

    def __add__(self, other: Value | float) -> Value:
        return self._with(other, "add")

    def __sub__(self, other: Value | float) -> Value:
        return self._with(other, "sub")

    def __mul__(self, other: Value | float) -> Value:
        return self._with(other, "mul")

    def __floordiv__(self, other: Value | int) -> Value:
        return self._with(other, "sdiv")

    def __truediv__(self, other: Value | float) -> Value:
        return self._with(other, "div")

    def __and__(self, other: Value | int) -> Value:
        return self._with(other, "and_")

    def __or__(self, other: Value | int) -> Value:
        return self._with(other, "or_")

    def __lshift__(self, other: Value | int) -> Value:
        return self._with(other, "shl")

    def __rshift__(self, other: Value | int) -> Value:
        return self._with(other, "lshr")

    def less(self, other: Value | float) -> ir.Value:
        """self < other, lane by lane; false where either is NaN."""
        other = other if isinstance(other, Value) else constant(other, self.kind, self.lanes)
        compare = _builder().fcmp_ordered if self.kind == "float32" else _builder().icmp_signed
        return compare("<", self.value, other.value)

    def nonzero(self) -> ir.Value:
        """Where integers are not 0."""
        return _builder().icmp_unsigned("!=", self.value, constant(0, self.kind, self.lanes).value)

    def unless(self, condition: ir.Value, other: Value | float) -> Value:
        """self, but `other` where the condition holds."""
        other = other if isinstance(other, Value) else constant(other, self.kind, self.lanes)
        return Value(_builder().select(condition, other.value, self.value), self.kind, self.lanes)

    def to(self, kind: str) -> Value:
        """The same numbers as another kind; floats are cut, no integer is negative."""
        make, target = _builder(), _typed(kind, self.lanes)
        if kind == "float32":
            made = make.uitofp(self.value, target)
        elif self.kind == "float32":
            made = make.fptosi(self.value, target)
        else:
            made = make.zext(self.value, target)
        return Value(made, kind, self.lanes)

    def as_(self, kind: str) -> Value:
        """The same bits as another kind."""
        return Value(_builder().bitcast(self.value, _typed(kind, self.lanes)), kind, self.lanes)

    def spread(self, lanes: int) -> Value:
        """A number in all of `lanes`."""
        if lanes == 1:
            return self
        many = ir.Constant(ir.VectorType(TYPES[self.kind], lanes), ir.Undefined)
        one = _builder().insert_element(many, self.value, ir.Constant(ir.IntType(32), 0))
        return Value(_shuffle(one, one, [0] * lanes), self.kind, lanes)

    def every(self, begin: int, step: int, lanes: int) -> Value:
        """Lanes begin, begin + step, ..."""
        if lanes == self.lanes:
            return self
        picked = [begin + step * i for i in range(lanes)]
        if lanes == 1:
            index = ir.Constant(ir.IntType(32), begin)
            return Value(_builder().extract_element(self.value, index), self.kind, 1)
        return Value(_shuffle(self.value, self.value, picked), self.kind, lanes)

    def sum(self) -> Value:
        """Over the lanes: neighbours, then neighbours of these, as `sums` does."""
        return sums([self])

    def most(self) -> Value:
        """The largest lane."""
        x = self
        while x.lanes > 1:
            x, other = x.every(0, 2, x.lanes // 2), x.every(1, 2, x.lanes // 2)
            x = larger(x, other)
        return x


def _shuffle(a: ir.Value, b: ir.Value, lanes: Sequence[int]) -> ir.Value:
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))
    return _builder().shuffle_vector(a, b, mask)


def constant(number: float, kind: str, lanes: int = 1) -> Value:
    """A number known while the function is written."""
    plain = float(number) if kind == "float32" else int(number)
    value = ir.Constant(_typed(kind, lanes), plain if lanes == 1 else [plain] * lanes)
    return Value(value, kind, lanes)


def larger(a: Value, b: Value) -> Value:
    """The larger of two, lane by lane; b where either is NaN."""
    return b.unless(b.less(a), a)


def floor(x: Value) -> Value:
    """The largest whole number that is no larger."""
    module, name = _builder().module, "llvm.floor." + ("f32" if x.lanes == 1 else f"v{x.lanes}f32")
    kind = ir.FunctionType(x.value.type, [x.value.type])
    function = module.globals.get(name) or ir.Function(module, kind, name=name)
    return Value(_builder().call(function, [x.value]), x.kind, x.lanes)


def sums(vectors: Sequence[Value]) -> Value:
    """The sum of each vector, as one vector of sums; a power of two of them, of at least as many lanes.

    Neighbours are added until one is left of each: whatever the number of vectors, a sum is formed in the same order,
    and no addition is contracted with the product before it.
    """
    add = _builder().fadd
    level = list(vectors)
    while len(level) > 1:
        both = [(a, b, [start + 2 * i for i in range(a.lanes)]) for start in (0, 1) for a, b in _pairs(level)]
        halves = [Value(_shuffle(a.value, b.value, at), a.kind, a.lanes) for a, b, at in both]
        rest = len(halves) // 2
        level = [
            Value(add(a.value, b.value), a.kind, a.lanes) for a, b in zip(halves[:rest], halves[rest:], strict=True)
        ]
    x = level[0]
    while x.lanes > len(vectors):
        even, odd = (x.every(start, 2, x.lanes // 2) for start in (0, 1))
        x = Value(add(even.value, odd.value), x.kind, even.lanes)
    return x


def _pairs(values: Sequence[Value]) -> list[tuple[Value, Value]]:
    return list(zip(values[::2], values[1::2], strict=True))


class Pointer:
    """Memory that holds numbers of one kind."""

    def __init__(self, value: ir.Value, kind: str):
        self.value, self.kind = value, kind

    def at(self, index: Value | int) -> Pointer:
        """From its index-th number on."""
        index = index if isinstance(index, Value) else constant(index, "int64")
        return Pointer(_builder().gep(self.value, [index.value], source_etype=TYPES[self.kind]), self.kind)

    def get(self, lanes: int = 1) -> Value:
        """Its first numbers."""
        loaded = _builder().load(self.value, align=BYTES[self.kind], typ=_typed(self.kind, lanes))
        return Value(loaded, self.kind, lanes)

    def put(self, value: Value) -> None:
        """Write them."""
        _builder().store(value.value, self.value, align=BYTES[self.kind])


class Variable:
    """What changes as the function goes on; the compiler keeps it in registers."""

    def __init__(self, begin: Value):
        with _builder().goto_entry_block():
            self._place = _builder().alloca(begin.value.type)
        self._like = begin
        self.value = begin

    @property
    def value(self) -> Value:
        """As it is now."""
        x = self._like
        return Value(_builder().load(self._place, typ=x.value.type), x.kind, x.lanes)

    @value.setter
    def value(self, value: Value) -> None:
        _builder().store(value.value, self._place)


def room(kind: str, size: int) -> Pointer:
    """Memory of `size` numbers that lasts as long as the function runs."""
    with _builder().goto_entry_block():
        made = _builder().alloca(ir.ArrayType(TYPES[kind], size))
        made.type = ir.PointerType()  # llvmlite would let only whole arrays be written to it
        return Pointer(made, kind)


@contextmanager
def loop(begin: Value | int, end: Value | int, step: int = 1) -> Iterator[Value]:
    """What is written inside is done for begin, begin + step, ... < end."""
    begin, end = (x if isinstance(x, Value) else constant(x, "int64") for x in (begin, end))
    make = _builder()
    head, body, after = (make.append_basic_block() for _ in range(3))
    before = make.block
    make.branch(head)
    make.position_at_end(head)
    index = make.phi(TYPES["int64"])
    index.add_incoming(begin.value, before)
    make.cbranch(make.icmp_signed("<", index, end.value), body, after)
    make.position_at_end(body)
    yield Value(index, "int64", 1)
    index.add_incoming(make.add(index, constant(step, "int64").value), make.block)
    make.branch(head)
    make.position_at_end(after)


def whole(begin: Value | int, end: Value | int, step: int) -> Value:
    """Where the last whole step from begin on ends."""
    begin, end = (x if isinstance(x, Value) else constant(x, "int64") for x in (begin, end))
    return begin + (end - begin) // step * step


@functools.cache
def _machine() -> tuple[Any, Any]:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    host = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    machine = binding.Target.from_default_triple().create_target_machine(cpu=host[0], features=host[1], opt=3)
    return machine, binding.create_mcjit_compiler(binding.parse_assembly(""), machine)


@functools.cache
def lanes() -> int:
    """float32 numbers in the CPU's vectors, at least 4."""
    features = binding.get_host_cpu_features()
    return 16 if features.get("avx512f") else 8 if features.get("avx2") else 4


_compiling = threading.Lock()
# A process that forks while another of its threads compiles would leave the child waiting for ever
os.register_at_fork(before=_compiling.acquire, after_in_parent=_compiling.release, after_in_child=_compiling.release)
_kept: list[Any] = []  # modules live as long as their functions: for ever


def compiled(write: Callable[[Any], None], **arguments: str) -> Callable[..., None]:
    """The function that write(a) writes, a.<name> being its arguments: a number ("int64") or what an address is of.

    The result takes integers (addresses as `Tensor.data_ptr` gives them) and does not hold Python's lock while it runs.
    Memory behind different addresses must not overlap.
    """
    with _compiling:
        machine, engine = _machine()
        module = ir.Module()
        module.triple = machine.triple
        kinds = [ir.PointerType() if kind.endswith("*") else TYPES[kind] for kind in arguments.values()]
        name = f"moend_{len(_kept)}"
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name=name)
        given = SimpleNamespace()
        for x, (key, kind) in zip(function.args, arguments.items(), strict=True):
            if kind.endswith("*"):
                x.add_attribute("noalias")
            setattr(given, key, Pointer(x, kind[:-1]) if kind.endswith("*") else Value(x, kind, 1))
        _writing.builder = make = ir.IRBuilder(function.append_basic_block())
        body = make.append_basic_block()  # apart from the entry, where variables are made
        make.branch(body)
        make.position_at_end(body)
        try:
            write(given)
            make.ret_void()
        finally:
            del _writing.builder
        parsed = binding.parse_assembly(str(module))
        parsed.verify()
        passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
        passes.getModulePassManager().run(parsed, passes)
        engine.add_module(parsed)
        engine.finalize_object()
        _kept.append(parsed)
        return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(engine.get_function_address(name))
