"""Agents of two processes with GPU memory: on one GPU, and where there are two, on two."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import kvplan
from kvplan import Agent, KVLayout, TransferError
from kvplan.cuda.ipc.openings import mappings
from tests.gpu.processes.agent_worker import BLOCKS, PAGED, PATIENCE, content, other
from tests.gpu.processes.visiting import EXPANDABLE

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize(
        "owner",
        [0, pytest.param(1, marks=pytest.mark.skipif(GPUS < 2, reason="fewer than two CUDA devices"))],
        ids=["same GPU", "other GPU"],
    ),
]
memories = pytest.mark.parametrize("memory", [{}, EXPANDABLE], ids=["handle", "pieces"])
every_path = pytest.mark.parametrize("path", ["kernel", "copy_engine", "copy_engine_2d", "auto"])


class Visitor:
    """This process: a cache under another order, an executor, an agent, and the peer that it has met."""

    def __init__(self, them, path="kernel"):
        self.cache = content(2, "cuda:0", PAGED)
        torch.cuda.synchronize()
        self.here = KVLayout.from_tensors(PAGED, self.cache)
        self.executor = kvplan.Executor("cuda:0", kvplan.Policy(path=path))
        self.agent = Agent("visitor", {}, transports=("cuda_ipc",), executor=self.executor)
        self.peer = self.agent.meet(them.card())
        self.there = self.peer.layouts["kv"]
        self.load = kvplan.compile(self.there, self.here)
        self.store = kvplan.compile(self.here, self.there)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.agent.close()
        self.executor.close()

    def holds(self, seed):
        torch.cuda.synchronize()
        return torch.equal(self.cache, content(seed, "cuda:0", PAGED))


def every_block():
    return list(range(BLOCKS))


@memories
@every_path
def test_blocks_are_pulled_and_pushed(owner, path, memory):
    ids = np.random.default_rng(5).permutation(BLOCKS)
    with other(owner, **memory) as them, Visitor(them, path) as me:
        assert me.peer.transport == "cuda_ipc"
        transfer = me.peer.submit(me.load.plan(ids, ids[::-1]))
        assert transfer.result().nbytes == me.cache.numel()
        expected = content(1, "cuda:0", PAGED)[torch.from_numpy(ids).cuda()]
        assert torch.equal(me.cache[torch.from_numpy(ids[::-1].copy()).cuda()], expected)
        me.cache.copy_(content(9, "cuda:0", PAGED))
        torch.cuda.synchronize()
        me.peer.submit(me.store.plan(every_block(), every_block()), note=b"all").synchronize(PATIENCE)
        until(lambda: them.notes() == [("visitor", b"all")])
        assert them.holds(9)
    assert mappings() == 0


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(1e-3)


@memories
def test_markers_pass_through_the_live_pools_of_both(owner, memory):
    with other(owner, **memory) as them, Visitor(them) as me:
        assert kvplan.verify(me.there, me.here, executor=me.executor).ok
        assert them.holds(1)
        assert kvplan.verify(me.here, me.there, executor=me.executor, markers=True).ok


def test_a_stream_waits_layer_by_layer(owner):
    with other(owner) as them, Visitor(them) as me:
        transfer = me.peer.submit(me.load.plan(every_block(), every_block()), by_layer=True)
        seen, stream = [], torch.cuda.Stream()
        for layer in range(4):
            transfer.wait_layer(layer, stream)
            with torch.cuda.stream(stream):
                seen.append(me.cache[:, layer].clone())
        stream.synchronize()
        transfer.synchronize(PATIENCE)
        assert torch.equal(torch.stack(seen, 1), content(1, "cuda:0", PAGED))


@memories
def test_a_transfer_waits_for_the_owner_s_stream(owner, memory):
    with other(owner, **memory) as them, Visitor(them) as me:
        for seed in (21, 22, 23):
            them.publish_late(seed)  # returns while its stream is busy
            me.peer.submit(me.load.plan(every_block(), every_block())).synchronize(PATIENCE)
            assert me.holds(seed)


def test_a_transfer_waits_for_both_processes_streams(owner):
    with other(owner) as them, Visitor(them) as me:
        stream, new = torch.cuda.Stream(), content(31, "cuda:0", PAGED)
        torch.cuda.synchronize()
        them.publish_late(22)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            me.cache.copy_(new)
        transfer = me.peer.submit(me.store.plan([3], [5]), after=stream)
        transfer.synchronize(PATIENCE)
        load = me.peer.submit(me.load.plan([5, 6], [0, 1]))
        load.synchronize(PATIENCE)
        assert torch.equal(me.cache[0], new[3])
        assert torch.equal(me.cache[1], content(22, "cuda:0", PAGED)[6])


def test_an_owner_s_stream_goes_on_when_a_visitor_has_died(owner):
    with other(0, "visited") as them, other(owner, "dying") as dying:
        dying.meet_and_pull_late(them.card())
        them.overwrite_behind_visitors(51)
        dying.kill()
        assert them.holds(51)


def test_the_owner_s_stream_waits_for_the_visitor(owner):
    with other(owner) as them, Visitor(them) as me:
        for seed in (41, 42, 43):
            gate = torch.cuda.Stream()
            with torch.cuda.stream(gate):
                torch.cuda._sleep(100_000_000)
            load = me.peer.submit(me.load.plan(every_block(), every_block()), after=gate)
            them.overwrite_behind_visitors(seed)
            load.synchronize(PATIENCE)
            assert me.holds(1 if seed == 41 else seed - 1)
            assert them.holds(seed)


def test_every_note_comes_behind_its_bytes_and_in_order(owner):
    with other(owner) as them, Visitor(them) as me:
        me.cache.copy_(torch.arange(BLOCKS, device="cuda:0", dtype=torch.uint8).view(-1, 1, 1, 1, 1) + 100)
        torch.cuda.synchronize()
        count = 10 * BLOCKS
        them.tell("blocks_behind_notes", count)
        for k in range(count):
            block = k % BLOCKS
            me.peer.submit(me.store.plan([block], [block]), note=b"%d" % block)
        found = them.answer()
        assert found == [(b"%d" % (k % BLOCKS), k % BLOCKS + 100) for k in range(count)]


def test_many_transfers_at_once_from_threads(owner):
    """Blocks go round: each thread moves its own blocks there and back."""
    with other(owner) as them, Visitor(them) as me:
        failures = []

        def work(first):
            try:
                mine = [first, first + 1]
                for _ in range(50):
                    me.peer.submit(me.load.plan(mine, mine)).synchronize(PATIENCE)
                    me.peer.submit(me.store.plan(mine, mine), note=b"back").synchronize(PATIENCE)
            except Exception as error:  # noqa: BLE001  # told below
                failures.append(error)

        threads = [threading.Thread(target=work, args=(first,)) for first in range(0, 16, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert them.holds(1)
        assert torch.equal(me.cache[:16], content(1, "cuda:0", PAGED)[:16])
        found = []
        until(lambda: len(found.extend(them.notes()) or found) == 400)


def test_an_owner_that_dies_is_told_by_every_transfer(owner):
    with other(owner) as them, Visitor(them) as me:
        gate = torch.cuda.Stream()
        with torch.cuda.stream(gate):
            torch.cuda._sleep(1_000_000_000)
        loads = [me.peer.submit(me.load.plan([k], [k]), after=gate) for k in range(20)]
        stores = [me.peer.submit(me.store.plan([k], [k]), after=gate) for k in range(20)]
        them.kill()
        for each in loads:
            with pytest.raises(TransferError, match="reading from 'other' failed"):
                each.synchronize(PATIENCE)
        for each in stores:
            with pytest.raises(TransferError, match="writing to 'other' failed"):
                each.synchronize(PATIENCE)
        with pytest.raises(TransferError, match="no transfer with 'other'"):
            me.peer.submit(me.load.plan([0], [0]))
        gc.collect()
    assert mappings() == 0
    assert float(torch.ones(4, device="cuda:0").sum()) == 4  # the context is whole


def test_an_owner_that_dies_before_the_work_that_it_published(owner):
    with other(owner) as them, Visitor(them) as me:
        them.publish_late(21, 20_000_000_000)
        load = me.peer.submit(me.load.plan([0], [0]))
        them.kill()
        with pytest.raises(TransferError, match="reading from 'other' failed"):
            load.synchronize(PATIENCE)


def test_an_owner_closes_once_its_visitors_have_gone_or_died(owner):
    with other(owner) as them, Visitor(them) as me:
        with pytest.raises(AssertionError, match=r"TransferError: .*visitor"):
            with_transfer_in_flight(me, lambda: them.close(0.2))
        them.close(30.0)
        with pytest.raises(TransferError, match="closes"):
            me.peer.submit(me.load.plan([0], [0]))
        assert mappings() == 0


def with_transfer_in_flight(me, action):
    gate = torch.cuda.Stream()
    with torch.cuda.stream(gate):
        torch.cuda._sleep(2_000_000_000)
    transfer = me.peer.submit(me.load.plan([0], [0]), after=gate)
    try:
        action()
    finally:
        transfer.synchronize(PATIENCE)


@memories
def test_meeting_again_and_again_leaves_nothing(owner, memory):
    def mine():
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), torch.cuda.mem_get_info()[0]

    with other(owner, **memory) as them, Visitor(them) as me:

        def round_trip():
            me.agent.forget(me.peer)
            me.peer = me.agent.meet(them.card())
            load = kvplan.compile(me.peer.layouts["kv"], me.here)
            me.peer.submit(load.plan([1], [1]), note=b"x").synchronize(PATIENCE)

        for _ in range(3):
            round_trip()
        them.notes()
        files, threads, free = mine()
        their_files, their_threads, their_free = them.left()
        for _ in range(20):
            round_trip()
        them.notes()
        until(lambda: mine()[:2] == (files, threads))
        until(lambda: them.left()[:2] == (their_files, their_threads))
        assert mine()[2] >= free - (4 << 20)
        assert them.left()[2] >= their_free - (4 << 20)
        assert torch.equal(me.cache[1], content(1, "cuda:0", PAGED)[1])


def test_a_plain_executor_takes_what_was_met(owner):
    with other(owner) as them, Visitor(them) as me:
        me.executor.submit(me.load.plan(every_block(), every_block())).synchronize()
        assert me.holds(1)
        assert me.there.device == f"cuda:{owner}"
        assert them.holds(1)
