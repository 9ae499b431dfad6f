"""The Triton kernel against attention written out, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")  # tests/__init__.py has it interpret

from moend.cache.decode.attend import path
from moend.cache.decode.eviction import DecodingLayer
from moend.cache.layer_kv import LayerKV
from moend.hf.attention import AttentionRule
from moend.kernels import Held, cpu, reference
from moend.kernels import path as path_of
from moend.kernels.triton import launch as kernel
from moend.layer_bytes import Storage
from tests.moend.kernels.test_kernels import layers, store

INTERPRETED = [8, 4, 2, torch.float32, torch.float16]  # the interpreter knows no bfloat16 products
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def row(n: int, heads: int, dim: int, storage: Storage) -> LayerKV:
    """A row of n random entries."""
    keys, values = torch.randn(2, heads, n, dim, device=DEVICE)
    return LayerKV(keys, values, None, storage, tokens_seen=n, dtype=torch.float32)


def naive(held: tuple[LayerKV, ...], query: torch.Tensor, group: int) -> torch.Tensor:
    """softmax(q K^T) V head by head: query (H_q, d) -> (H_q, d)."""
    out, head = torch.empty_like(query), 0
    for part in held:
        keys, values = part.dense(torch.float32)
        for h in range(part.heads):
            for g in range(group):
                i = (head + h) * group + g
                out[i] = (keys[h] @ query[i]).softmax(0) @ values[h]
        head += part.heads
    return out


STORAGES = st.builds(
    lambda k, v, form: Storage(k, v, *form),
    st.sampled_from([16, 8, 4, 2]),
    st.sampled_from([16, 8, 4, 2]),
    st.sampled_from([(32, 32), (16, 0), (24, 5), (64, 64)]),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=6)  # the interpreter takes a second for each
@example(
    held=[(Storage(4, 8, 24, 5), 150, 70, True), (Storage(16, 2, 16, 0), 1, 1, False)], dim=40, group=3, new=2, split=64
)
@given(
    held=st.lists(st.tuples(STORAGES, st.integers(1, 150), st.integers(1, 150), st.booleans()), min_size=1, max_size=2),
    dim=st.sampled_from([16, 64, 40, 128]),
    group=st.integers(1, 5),
    new=st.integers(1, 3),
    split=st.sampled_from([64, 128]),
)
def test_equals_attention_written_out(held, dim, group, new, split):
    """Any bits, empty windows, one token, rows and heads of unequal length, several splits: 1e-3 of the reference."""
    torch.manual_seed(0)
    heads = 2
    rows = [
        (row(n, 1, dim, s), row(m, 1, dim, s)) if ragged else (row(n, heads, dim, s),)
        for s, n, m, ragged in held
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "SPLIT", split)
        layer = DecodingLayer(rows)
        for _ in range(new):
            query = torch.randn(len(rows), heads * group, 1, dim, device=DEVICE)
            for _ in layer.feed(*torch.randn(2, len(rows), heads, 1, dim, device=DEVICE)):
                flat = (query * dim**-0.5).reshape(len(rows) * heads, group, dim)
                ours = kernel.decode(flat, layer.entries()).view(len(rows), heads * group, dim)
                for i, parts in enumerate(layer.at_rest()):
                    reference = naive(parts, query[i, :, 0] * dim**-0.5, group)
                    assert (ours[i] - reference).abs().max() < 1e-3


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    layer=st.one_of(layers(INTERPRETED), layers(INTERPRETED, offset=100.0)),
    split=st.sampled_from([64, 128]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_random_layers_to_a_thousandth_of_float64(layer, split, dtype):
    """Any bits, scales moved, holes, unequal lengths, stores that differ on both sides, K channels of mean 100."""
    query, held = layer
    query = query.to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "SPLIT", split)
        ours = kernel.decode(query, held)
    right, _ = reference.attention(query, held)
    assert (ours - right).abs().max() < 1e-3 + (right.abs().max() * 2**-10 if dtype is torch.float16 else 0)


def test_entries_the_kernels_cannot_read_take_another_path(monkeypatch):
    """K groups below what a tensor core instruction takes, V in too many pieces: the reason is said."""
    monkeypatch.setattr(kernel, "CPU", True)
    newest = tuple(store(torch.float32, side, 1, torch.randn(1, 8, 64), 0, [0]) for side in "kv")
    hidden, lengths = torch.zeros(1, 40, dtype=torch.bool), torch.tensor([32])
    for side, group, said in (("k", 8, "no multiple of 16"), ("v", 8, "more than 4 pieces")):
        odd = store(8, side, group, torch.randn(1, 32, 64), 0, [0])
        held = Held([odd] if side == "k" else [], [odd] if side == "v" else [], newest, hidden, lengths, 32, 0)
        assert said in kernel.unreadable(held)
        assert path_of(torch.device("cpu"), held=held) != "triton"
    assert path_of(torch.device("cpu"), held=Held([], [], newest, hidden, lengths, 0, 0)) == "triton"


@pytest.mark.process
def test_compiles_for_gpus_that_are_not_here():
    """A few cases of `python -m perf.kernels`: shared memory, registers, tensor cores, loads."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "perf.kernels", "--first", "4", "--json"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(done.stdout)) == 4


@pytest.mark.slow
def test_compiles_for_every_pair_of_what_it_may_meet():
    """The pairwise cases of `python -m perf.kernels`."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "perf.kernels"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_token_is_its_own_value():
    """Nothing but the new token: its value comes back."""
    layer = DecodingLayer([(row(1, 2, 16, Storage()),)])
    ((one,),) = layer.at_rest()
    out = kernel.decode(torch.randn(2, 3, 16, device=DEVICE), layer.entries())
    assert torch.allclose(out, one.v_window.expand(2, 3, 16))


@pytest.mark.parametrize("mine", ["triton", "cpu"])
def test_a_step_takes_the_kernel_where_it_may(mine, monkeypatch):
    """`path` says which way a step goes, and both ways agree."""
    monkeypatch.setattr(kernel, "CPU", mine == "triton")
    torch.manual_seed(1)
    layer = DecodingLayer([(row(90, 2, 64, Storage(8, 4, 32, 32)),), (row(40, 2, 64, Storage()),)])
    if mine == "cpu" and not cpu.installed():
        mine = "torch"
    assert path(layer) == ("triton" if DEVICE.type == "cuda" else mine)
    query, new = torch.randn(2, 6, 1, 64, device=DEVICE), torch.randn(2, 2, 2, 1, 64, device=DEVICE)
    twin = layer.fork()
    ours = layer.attend(query, *new, AttentionRule(0.125))
    for _ in twin.feed(*new):
        for i, parts in enumerate(twin.at_rest()):
            assert (ours[i, :, 0] - naive(parts, query[i, :, 0] * 0.125, 3)).abs().max() < 1e-3
