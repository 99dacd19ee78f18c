"""The ring of staged transfers: its bounds, its memory of programs, and the name of a copy that is refused."""

from __future__ import annotations

import weakref

import pytest

import kvplan
from kvplan.execute.gpu.resources import Limits
from kvplan.plan import staging
from kvplan.program.passes import compile_geometry
from tests.paged_caches import DEVICE_NOTATION, Paged
from tests.simulated import Device
from tests.simulated.executors import MOVE, POOL, OnDevice, both_ways, executor_on, pair_on
from tests.simulated.lifetime import wait_until_gone


@both_ways
def test_a_batch_of_the_ring_that_the_driver_refuses_is_named_by_its_copy(direction):
    device = Device(1)
    pair = pair_on(device, direction)
    with executor_on(device, "staged", limits=Limits(batch_nbytes=0)) as executor:
        device.fail("cuMemcpyBatchAsync")
        with pytest.raises(kvplan.TransferError, match=r": descriptor \d+ of \d+, \d+ bytes from 0x\w+ to 0x\w+"):
            executor.submit(pair.program.plan(MOVE.src, MOVE.dst))
        executor.submit(pair.plan(MOVE)).synchronize()
        pair.check()


def test_what_the_ring_knows_of_a_program_dies_with_it():
    device = Device(5)
    with executor_on(device, "staged") as executor:
        tables, references = executor._backend.resources.tables, []
        for k in range(4):
            dim = 32 * (k + 1)
            pair = pair_on(device, "load", OnDevice(DEVICE_NOTATION, dim=dim), Paged(POOL.notation, dim=dim))
            executor.submit(pair.plan(MOVE)).synchronize()
            references += [weakref.ref(group) for group in pair.program.program.groups]
        assert all(reference() in staging._known for reference in references)
        assert len(tables._known) == len(references) == 4
        del pair
        compile_geometry.cache_clear()
        wait_until_gone(references, device)
        assert not tables._known


@pytest.mark.parametrize(("most", "chunk", "slots"), [(11 << 19, None, 2), (5_500_000, 1_100_032, 4), (9 << 18, 9 << 16,
                         4)])  # fmt: skip
def test_a_ring_takes_no_byte_more_than_it_may(most, chunk, slots):
    device = Device(2)
    pair = pair_on(device, "load")
    with executor_on(device, "staged", staging_bytes=most, chunk_bytes=chunk) as executor:
        before = executor._backend.resources.memory.nbytes
        executor.submit(pair.plan(MOVE)).synchronize()
        ring = executor._backend.paths["staged"]._rings["load"]
        assert (ring.slots, ring.piece.nbytes) == (slots, slots * ring.slot_nbytes)
        assert most - ring.slot_nbytes < ring.piece.nbytes <= most
        assert executor._backend.resources.memory.nbytes - before == ring.piece.nbytes + (
            1 << 20
        )  # and a block of tables
        pair.check()
