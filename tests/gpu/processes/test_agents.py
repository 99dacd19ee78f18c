"""Agents of two processes with GPU memory: on one GPU, and where there are two, on two."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import kvplan
from tests.agents.processes import PATIENCE
from tests.gpu.processes.agent_worker import BLOCKS, PAGED, content, other
from tests.gpu.processes.mappings import mappings
from tests.gpu.processes.visitor import Visitor, closed_gate, each_owner, every_block, memories, until

pytestmark = [pytest.mark.gpu, each_owner]
every_path = pytest.mark.parametrize("path", ["kernel", "copy_engine", "copy_engine_2d", "auto"])


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


@memories
def test_markers_pass_through_the_live_pools_of_both(owner, memory):
    with other(owner, **memory) as them, Visitor(them) as me:
        assert kvplan.verify(me.there, me.here, executor=me.executor).ok
        assert them.holds(1)
        assert kvplan.verify(me.here, me.there, executor=me.executor).ok


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


def test_the_owner_s_stream_waits_for_the_visitor(owner):
    with other(owner) as them, Visitor(them) as me:
        me.warm_up()
        for seed in (41, 42, 43):
            with closed_gate() as gate:
                load = me.peer.submit(me.load.plan(every_block(), every_block()), after=gate.stream)
                them.overwrite_behind_visitors(seed)
                assert them.busy()
                gate.open()
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
