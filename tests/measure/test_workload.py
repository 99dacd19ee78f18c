"""Transfers to measure by: what they are, and that a byte that did not arrive is seen."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvplan.cost.policy import HOST_ROUTES
from kvplan.measure.workload import HOSTS, Buffers, Geometry, work

BOTH = [(direction, host) for direction in HOST_ROUTES for host in HOSTS]


@pytest.fixture(scope="module")
def buffers():
    return Buffers(1 << 20, "cpu", 3 << 20)


@pytest.mark.parametrize(("direction", "host"), BOTH)
@pytest.mark.parametrize(
    ("run_nbytes", "runs", "block_runs"), [(512, 64, 16), (8, 4, 2), (8192, 128, 4), (512, 64, 64)]
)
def test_a_work_is_moved_and_every_byte_compared(direction, host, run_nbytes, runs, block_runs, buffers):
    geometry = Geometry(direction, host, run_nbytes, runs, block_runs)
    moved = work(buffers, geometry, seed=3)
    assert moved.plan.nbytes == geometry.nbytes == moved.geometry.nbytes
    assert len(set(moved.src_ids.tolist())) == len(set(moved.dst_ids.tolist())) == geometry.blocks
    with kvplan.Executor() as executor:
        moved.verify("host", lambda: executor.submit(moved.plan).synchronize())


@pytest.mark.parametrize(("direction", "host"), BOTH)
def test_a_wrong_byte_is_found(direction, host):
    moved = work(Buffers(1 << 16, "cpu", 1 << 18), Geometry(direction, host, 512, 64, 16))
    address = int(moved.plan.descriptors().dst[7]) + 100
    with kvplan.Executor() as executor:

        def almost() -> None:
            executor.submit(moved.plan).synchronize()
            root = moved.dst.parts[0].view(-1).numpy().view(np.uint8)
            root[address - root.ctypes.data] ^= 1

        with pytest.raises(
            kvplan.TransferError,
            match=r"^almost: not every byte of Plan\(.*\) arrived: .* 1 runs of 1 of .* blocks are wrong",
        ):
            moved.verify("almost", almost)
        with pytest.raises(kvplan.TransferError, match="nothing: not every byte"):
            moved.verify("nothing", lambda: None)


@pytest.mark.parametrize(("direction", "host"), BOTH)
def test_what_was_compared_before_does_not_make_it_blind(direction, host):
    """Works of both directions share their buffers: what one has cleared, the next is not to take for data."""
    shared = Buffers(1 << 16, "cpu", 1 << 18)
    with kvplan.Executor() as executor:
        for k, (way, there) in enumerate(BOTH * 2):
            before = work(shared, Geometry(way, there, 512, 64, 16), k)
            before.verify("before", lambda plan=before.plan: executor.submit(plan).synchronize())
    with pytest.raises(kvplan.TransferError, match="nothing: not every byte"):
        work(shared, Geometry(direction, host, 512, 128, 16), 9).verify("nothing", lambda: None)
