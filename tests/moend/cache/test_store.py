"""Stores of packed entries: copies, growth, and which tensors they keep."""

from __future__ import annotations

import copy
import pickle
import weakref

import torch

from moend.cache import packed_store as store_module
from moend.cache.packed_store import PackedStore
from moend.cache.packing import quantise_k
from moend.kernels import cpu, torch_ops

score = (cpu if cpu.installed() else torch_ops).score


def test_a_copy_sees_its_own_memory():
    """deepcopy and pickle: what is written to the copy's tensors is what it computes with."""
    store = PackedStore([0], 8, 16, 1, "channel", torch.zeros(0), 16)
    out, one = torch.empty(1, 1, 8), torch.ones(1, 1, 16)
    score(one, store.entries(), out)
    for twin in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        twin.write(0, 3, torch.ones(1, 1, 16))
        score(one, twin.entries(), out)
        assert out[0, 0].tolist() == [0, 0, 0, 16, 0, 0, 0, 0]
    score(one, store.entries(), out)
    assert (out == 0).all()


def test_what_grown_stores_leave_behind_goes_back_to_the_system(monkeypatch):
    """Not at each time, which would cost more than it gives, but before it adds up; nor where malloc cannot."""
    calls = []
    monkeypatch.setattr(store_module, "_trim", lambda: calls.append)
    monkeypatch.setattr(store_module, "_behind", 0)
    monkeypatch.setattr(store_module, "BEHIND", 4000)
    store = PackedStore([0], 64, 16, 1, "channel", torch.zeros(0), 4)  # 1,024 bytes, then 1,152 and 1,296, 1,456
    for slots, so_far in ((65, 0), (73, 0), (82, 0), (92, 1), (104, 1)):
        store.reserve(slots)
        assert calls == [0] * so_far
    monkeypatch.setattr(store_module, "_trim", lambda: None)
    store.reserve(100_000)


def test_nothing_keeps_a_replaced_tensor():
    """Growing lets go of what was there, and a clone that a write makes of the shared one."""
    store = PackedStore([0], 64, 8, 32, "channel", torch.zeros(0), 16)
    query, out = torch.ones(1, 1, 16), torch.empty(1, 1, 200)
    piece = quantise_k(torch.randn(1, 32, 16), 8, 32)
    store.write(0, 0, piece)
    score(query, store.entries(), out)
    old = weakref.ref(store.x)
    store.reserve(96)
    assert old() is None
    score(query, store.entries(), out)
    twin = store.pick([0], [0], store.slots)
    score(query, twin.entries(), out)
    twin.write(0, 32, piece)
    old = weakref.ref(store.x)
    del store
    assert old() is None
