"""Two real processes and NIXL itself (UCX between them, CPU memory): reading, writing, and a peer that is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout, TransferError
from kvplan.nixl import NixlAgent
from tests.nixl.workers import BLOCKS, LAYERS, NAME, NBYTES, content, serve
from tests.patience import PATIENCE, until

pytest.importorskip("nixl", reason="NIXL is not installed: pip install nixl")

pytestmark = pytest.mark.slow
spawn = multiprocessing.get_context("spawn")
TRANSPORTS = "tcp,self"  # what goes between machines without RDMA; shared memory would end before anybody is killed


class Pool:
    """The other process."""

    def __init__(self) -> None:
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(TRANSPORTS, theirs), daemon=True)
        self.process.start()
        self.card = self.answer()

    def answer(self):
        assert self.pipe.poll(PATIENCE), "the other process does not answer"
        return self.pipe.recv()

    def ask(self, what):
        self.pipe.send(what)
        return self.answer()

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(PATIENCE)

    def end(self):
        if self.process.is_alive():
            assert self.ask(None) == "closed"
        self.process.join(PATIENCE)


@pytest.fixture
def pool():
    made = Pool()
    yield made
    made.end()


@pytest.fixture
def cache(monkeypatch):
    monkeypatch.setenv("UCX_TLS", TRANSPORTS)
    memory = np.zeros((LAYERS, BLOCKS, NBYTES), np.uint8)
    with NixlAgent("cache", {"kv": KVLayout.from_tensors("layer block dim", memory)}) as agent:
        agent.memory = memory
        yield agent


def test_blocks_go_both_ways(pool, cache):
    peer = cache.meet(pool.card)
    mine, theirs = cache.layouts["kv"], peer.layouts["kv"]
    peer.submit(kvplan.compile(theirs, mine).plan(range(BLOCKS), range(BLOCKS)[::-1])).synchronize(PATIENCE)
    np.testing.assert_array_equal(cache.memory, content().transpose(1, 0, 2)[:, ::-1])
    cache.memory[:, 5] = 99
    peer.submit(kvplan.compile(mine, theirs).plan([5], [9]), note=b"stored 9").synchronize(PATIENCE)
    notes = []
    until(lambda: notes.extend(pool.ask("notes")) or notes)
    assert notes == [("cache", b"stored 9")]
    assert (pool.ask(9) == 99).all()
    np.testing.assert_array_equal(pool.ask(8), content()[8])


def test_a_peer_that_is_killed_in_the_middle(pool, cache):
    peer = cache.meet(pool.card)
    plan = kvplan.compile(peer.layouts["kv"], cache.layouts["kv"]).plan(range(BLOCKS), range(BLOCKS))
    peer.submit(plan).synchronize(PATIENCE)
    os.kill(pool.process.pid, signal.SIGSTOP)  # so that the transfer cannot end before the kill
    cache.memory[:] = 0
    transfer = peer.submit(plan, attempts=2, deadline=PATIENCE)
    assert not transfer.done()
    pool.kill()
    with pytest.raises(TransferError, match=rf"reading from '{NAME}' failed"):
        transfer.synchronize(PATIENCE)
    with pytest.raises(TransferError, match=rf"reading from '{NAME}' failed"):
        peer.submit(plan, deadline=PATIENCE).synchronize(PATIENCE)
    # It comes back, elsewhere in memory.
    reborn = Pool()
    peer = cache.meet(reborn.card)
    program = kvplan.compile(peer.layouts["kv"], cache.layouts["kv"])
    peer.submit(program.plan(range(BLOCKS), range(BLOCKS))).synchronize(PATIENCE)
    np.testing.assert_array_equal(cache.memory, content().transpose(1, 0, 2))
    assert (cache.stats().transfers, cache.stats().failed) == (2, 2)
    reborn.end()


def test_a_connection_that_broke_is_made_anew(pool, cache):
    peer = cache.meet(pool.card)
    plan = kvplan.compile(peer.layouts["kv"], cache.layouts["kv"]).plan([3], [4])
    peer.submit(plan).synchronize(PATIENCE)
    with peer.connection.end.lock:
        peer.connection.leave()
    transfer = peer.submit(plan, attempts=2)
    transfer.synchronize(PATIENCE)
    assert transfer.attempt == 2
    np.testing.assert_array_equal(cache.memory[:, 4], content()[3])
