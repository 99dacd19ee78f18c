"""Transfers between two agents of one process: what they move, what they tell, and what they refuse."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout, LayoutError, TransferError
from kvplan.base.threads import error_of
from tests.agents.workers import BLOCKS, DIM, LAYERS, content, pool
from tests.patience import PATIENCE, until


def test_a_chain_of_transfers_does_not_stay_alive(both):
    first = last = both.peer.submit(both.load.plan([4], [0]))
    gone = weakref.ref(first)
    for _ in range(20):
        last = both.peer.submit(both.load.plan([4], [0]), after=last)
    last.synchronize(PATIENCE)
    del first
    until(lambda: gone() is None)


def test_a_plain_executor_takes_a_peers_layouts(both):
    with kvplan.Executor() as executor:
        transfer = executor.submit(both.load.plan([2], [2]))
        after = both.peer.submit(both.store.plan([2], [3]), after=transfer)
        executor.submit(both.load.plan([3], [5]), after=after).synchronize(PATIENCE)
    np.testing.assert_array_equal(both.mine[:, 5], content()[2])


def test_host_memory_stays_after_its_owner_closed(both):
    """No transfer with it begins, but an executor may be reading it."""
    plan = both.load.plan([2], [7])
    both.owner.close(timeout=PATIENCE)
    with kvplan.Executor() as executor:
        executor.submit(plan).synchronize(PATIENCE)
    np.testing.assert_array_equal(both.mine[:, 7], content()[2])


def test_other_layouts_are_offered_and_those_before_withdrawn(both, agents):
    """A peer that uses memory keeps it, until it is withdrawn; then its transfers in flight end first."""
    old, kept, event = both.owner.card(), both.owner.layouts["kv"], threading.Event()
    both.owner.offer({"kv": kept, "more": pool(seed=3)})
    with pytest.raises(TransferError, match="ask for a new card"):
        agents("late", layouts={}).meet(old)
    assert set(agents("new", layouts={}).meet(both.owner.card()).layouts) == {"kv", "more"}
    both.owner.withdraw(timeout=PATIENCE)  # nothing was left out
    transfer = both.peer.submit(both.load.plan([1], [2]), after=event)
    both.owner.offer({})
    with pytest.raises(TransferError, match="peers still use memory of 'owner'"):
        both.owner.withdraw(timeout=0.05)
    until(lambda: isinstance(error_of(lambda: both.peer.submit(both.load.plan([1], [2]))), TransferError))
    event.set()
    both.owner.withdraw(timeout=PATIENCE)
    transfer.synchronize()
    np.testing.assert_array_equal(both.mine[:, 2], content()[1])


def test_memory_that_another_file_has_by_now_is_offered_as_it_is(agents):
    """An offer that was refused has looked where files are mapped; the next one looks again."""
    files, nbytes, fixed = [os.memfd_create("kv") for _ in range(2)], BLOCKS * mmap.PAGESIZE, 0x10
    for value, file in enumerate(files):
        os.write(file, bytes([value + 1]) * nbytes)
    held = np.frombuffer(mmap.mmap(files[0], nbytes), np.uint8).reshape(BLOCKS, -1)
    layout, private = (KVLayout.from_tensors("block dim", one) for one in (held, np.zeros_like(held)))
    owner = agents("owner", layouts={"private": private}, transports=("shm",))
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | fixed
    place, size, start = ctypes.c_void_p(held.ctypes.data), ctypes.c_size_t(nbytes), ctypes.c_long(0)
    ctypes.CDLL(None).mmap(place, size, protection, flags, files[1], start)
    assert owner.offer({"kv": layout}) == {}
    peer = agents("visitor", layouts={}).meet(owner.card())
    peer.submit(kvplan.compile(peer.layouts["kv"], private).plan([3], [3])).synchronize(PATIENCE)
    np.testing.assert_array_equal(private.tensors[3], 2)
    for file in files:
        os.close(file)


def test_read_only_pools_are_offered_read_only(agents):
    held = pool()
    locked = np.array(held.tensors, copy=False)
    locked.flags.writeable = False
    owner = agents("owner", layouts={"kv": KVLayout.from_tensors("block layer dim", locked)})
    peer = agents("visitor", layouts={}).meet(owner.card())
    mine = KVLayout.from_tensors("block layer dim", np.zeros((BLOCKS, LAYERS, DIM), np.uint8))
    peer.submit(kvplan.compile(peer.layouts["kv"], mine).plan([3], [3])).synchronize(PATIENCE)
    np.testing.assert_array_equal(mine.tensors[3], content()[3])
    with pytest.raises(LayoutError, match="is read-only"):
        peer.submit(kvplan.compile(mine, peer.layouts["kv"]).plan([3], [3]))


def test_torch_tensors_that_are_shared(agents):
    torch = pytest.importorskip("torch")
    tensors = [torch.zeros(BLOCKS, DIM, dtype=torch.uint8).share_memory_() for _ in range(LAYERS)]
    owner = agents("owner", layouts={"kv": KVLayout.from_tensors("layer: block dim", tensors)})
    peer = agents("visitor", layouts={}).meet(owner.card())
    mine = KVLayout.from_tensors("block layer dim", content())
    peer.submit(kvplan.compile(mine, peer.layouts["kv"]).plan([3], [4])).synchronize(PATIENCE)
    for layer in range(LAYERS):
        np.testing.assert_array_equal(tensors[layer][4].numpy(), content()[3, layer])
