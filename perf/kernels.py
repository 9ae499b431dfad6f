"""Compile the Triton kernels for GPUs that need not be there, and say what would keep them from running well.

    python -m perf.kernels [--all] [--json]

A row per case: shared memory, registers and stack of a program, how many programs a multiprocessor holds, tensor core
instructions, and the widest load of codes. Without --all the cases are about 40 that together show every pair of
capability, head dimension, query heads per KV head, bits of K, bits of V and dtype. Exit code 1 where a case does not
fit its device, spills registers, holds fewer than two programs at head_dim 128 or uses no tensor cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

AXES: dict[str, tuple[Any, ...]] = {
    "capability": (80, 86, 89, 90, 100),
    "head_dim": (64, 80, 96, 128, 256),
    "rows": (1, 2, 4, 5, 8, 16),
    "k_bits": (16, 8, 4, 2),
    "v_bits": (16, 8, 4, 2),
    "dtype": ("bfloat16", "float16"),
}
PER_BLOCK = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227}  # KiB of shared memory that one program may take
REGISTERS = 65536  # of a multiprocessor


@dataclass(frozen=True)
class Case:
    """What a kernel is compiled for."""

    capability: int  # 80 for compute capability 8.0
    head_dim: int
    rows: int  # query heads per KV head
    k_bits: int
    v_bits: int
    dtype: str  # of queries and of 16-bit entries


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a case."""

    shared: int  # bytes a program
    registers: int  # a thread
    stack: int  # bytes a thread: registers that were spilled to local memory
    programs: int  # that fit into a multiprocessor
    tensor_core: int  # instructions
    widest: int  # bytes of the widest load from global memory

    def complaints(self, case: Case) -> list[str]:
        """What would keep it from running, or from running well."""
        said = []
        if self.shared > PER_BLOCK[case.capability] * 1024:
            said.append(f"{self.shared} bytes of shared memory, the device has {PER_BLOCK[case.capability]} KiB")
        if self.stack:
            said.append(f"{self.stack} bytes spilled")
        if self.programs < 2:
            said.append(f"{self.programs} program a multiprocessor")
        if not self.tensor_core:
            said.append("no tensor core instruction")
        if self.widest < 4:  # a block of 2-bit codes is 4 to 8 bytes a thread
            said.append(f"loads of {self.widest} bytes at most")
        return said


def pairwise(axes: dict[str, tuple[Any, ...]] = AXES, seed: int = 0) -> list[Case]:
    """Cases in which every pair of values of two axes occurs: greedily, the best of many random ones each time."""
    names, draw = list(axes), random.Random(seed)
    pairs = list(itertools.combinations(range(len(names)), 2))
    left = {(i, a, j, b) for i, j in pairs for a in axes[names[i]] for b in axes[names[j]]}
    made: list[Case] = []
    while left:
        i, a, j, b = min(left, key=repr)
        tries = []
        for _ in range(60):
            values = [draw.choice(axes[name]) for name in names]
            values[i], values[j] = a, b
            tries.append((sum((x, values[x], y, values[y]) in left for x, y in pairs), values))
        best = max(tries, key=lambda t: t[0])[1]
        left -= {(x, best[x], y, best[y]) for x, y in pairs}
        made.append(Case(**dict(zip(names, best, strict=True))))
    return made


def compile_case(case: Case, group: int = 64) -> Compiled:
    """Compile the attention kernel for one case."""
    import torch
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from moend.kernels import Entries
    from moend.kernels.triton import kernels, launch
    from moend.layer_bytes import v_group

    dtype, d, slots = getattr(torch, case.dtype), case.head_dim, 2 * group

    def side(name: str, bits: int) -> Entries:
        none, one = torch.zeros(0), torch.tensor([slots])
        if bits == 16:
            return Entries(name, torch.zeros(1, slots, d, dtype=dtype), none, none, 16, 1, [0], one)
        shared = group if name == "k" else v_group(d, 64)
        shape = (1, slots // group, d) if name == "k" else (1, slots, d // shared)
        scales = torch.zeros(shape, dtype=torch.float16)
        codes = torch.zeros(1, slots, d * bits // 8, dtype=torch.uint8)
        return Entries(name, codes, scales, scales.clone(), bits, shared, [0], one)

    k, v = side("k", case.k_bits), side("v", case.v_bits)
    meta = launch.constants(k, v, case.rows, case.capability)
    options = {name: meta.pop(name) for name in ("num_warps", "num_stages", "maxnreg")}
    constants = meta | {"EVEN": False, "SPLIT": launch.SPLIT}
    number = {"bfloat16": "*bf16", "float16": "*fp16"}[case.dtype]
    stored = [("*u8", "*fp16") if e.quantised else (number, number) for e in (k, v)]
    pointers = {
        "Q": number, "KX": stored[0][0], "KS": stored[0][1], "KZ": stored[0][1], "VX": stored[1][0],
        "VS": stored[1][1], "VZ": stored[1][1], "HIDDEN": "*i1", "ACC": "*fp32", "TOP": "*fp32", "TOTAL": "*fp32",
        **dict.fromkeys(("K_SCALE", "AT", "K_ROWS", "LENGTHS", "V_ROWS"), "*i32"),
    }  # fmt: skip
    names = list(kernels.partial.arg_names)
    signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
    strides = {"kx_row": k.x.shape[2], "vx_row": v.x.shape[2], "dim": d, "ks_head": d}
    strides |= {"kx_head": slots * k.x.shape[2], "vx_head": slots * v.x.shape[2]}
    even = [n for n in names if n in pointers or strides.get(n, 1) % 16 == 0]
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in even}
    source = ASTSource(fn=kernels.partial, signature=signature, constexprs=constants, attrs=attributes)
    made = compile_kernel(source, target=GPUTarget("cuda", case.capability, 32), options=options)
    return _read(made, case.capability, options["num_warps"], launch.SHARED[case.capability])


def _read(made: Any, capability: int, warps: int, kib: int) -> Compiled:
    ptx, use = made.asm["ptx"], _resources(made.asm["cubin"])
    registers, stack = (int(re.search(rf"{word}:(\d+)", use)[1]) for word in ("REG", "STACK"))  # type: ignore[index]
    loads = [int(n) * int(bits) // 8 for n, bits in re.findall(r"ld\.global[.\w:]*\.v([24])\.b(\d+)", ptx)]
    loads += [int(n, 0) for n in re.findall(r"cp\.async\.c[ag]\.shared\.global [^,]+,[^,]+, (0x\w+|\d+)", ptx)]
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    return Compiled(
        shared=made.metadata.shared,
        registers=registers,
        stack=stack,
        programs=min(by_registers, kib * 1024 // (made.metadata.shared + 1024)),
        tensor_core=len(re.findall(r"mma\.sync|wgmma\.mma|tcgen05\.mma", ptx)),
        widest=max(loads, default=0),
    )


def _resources(cubin: bytes) -> str:
    """What triton's own cuobjdump says of a compiled kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout


def every() -> Iterator[Case]:
    """All cases."""
    return (Case(*values) for values in itertools.product(*AXES.values()))


def main() -> int:
    """Compile, print, complain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="all combinations, an hour")
    parser.add_argument("--first", type=int, help="only so many cases")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 makes triton interpret its kernels instead of compiling them: unset it")
    cases = list(every()) if args.all else pairwise()
    rows, wrong = [], 0
    for case in cases[: args.first]:
        made = compile_case(case)
        complaints = made.complaints(case)
        wrong += bool(complaints)
        rows.append(asdict(case) | asdict(made) | {"complaints": complaints})
        if not args.json:
            print(
                f"sm_{case.capability} head_dim {case.head_dim} rows {case.rows} K{case.k_bits}/V{case.v_bits} "
                f"{case.dtype}: {made.shared} bytes shared, {made.registers} registers, {made.programs} programs, "
                f"{made.tensor_core} tensor core instructions, loads of {made.widest} bytes; "
                f"{', '.join(complaints) or 'fits'}",
                flush=True,
            )
    if args.json:
        print(json.dumps(rows))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
