"""Transfers to measure by: what they are, and that a byte that did not arrive is seen."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvplan import KVPlanError
from kvplan.cost.policy import HOST_ROUTES
from kvplan.cost.statistics import statistics_of
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
@pytest.mark.parametrize("blocks", [1, 2, 8])
def test_a_work_has_the_runs_that_its_geometry_says(direction, host, blocks, buffers):
    made = statistics_of(work(buffers, Geometry(direction, host, 512, 16 * blocks, 16)).plan)
    assert (made.nbytes, made.runs) == (8192 * blocks, 16 * blocks)


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


def test_the_seed_tells_which_blocks(buffers):
    one, same, other = (work(buffers, Geometry("load", "contiguous", 512, 512, 16), seed) for seed in (1, 1, 2))
    assert one.src_ids.tolist() == same.src_ids.tolist() != other.src_ids.tolist()
    assert one.src.layout.num_blocks == (3 << 20) // 8192 > one.dst.layout.num_blocks == 32


@pytest.mark.parametrize(
    ("geometry", "said"),
    [
        (Geometry("load", "contiguous", 1 << 19, 4, 2), "2097152 bytes do not fit into buffers of 1048576"),
        (Geometry("sideways", "contiguous", 512, 4, 2), "direction 'sideways', host 'contiguous'; expected of"),
        (Geometry("load", "upright", 512, 4, 2), "direction 'load', host 'upright'; expected of"),
        (Geometry("load", "contiguous", 12, 4, 2), "runs of 12 bytes; give a multiple of 8"),
        (Geometry("load", "contiguous", 0, 4, 2), "runs of 0 bytes"),
        (Geometry("load", "contiguous", 512, 5, 2), "5 runs, 2 a block"),
        (Geometry("load", "contiguous", 512, 6, 3), "6 runs, 3 a block"),
        (Geometry("load", "contiguous", 512, 0, 2), "0 runs, 2 a block"),
        (Geometry("load", "contiguous", 512, 4, 0), "4 runs, 0 a block"),
    ],
)
def test_what_cannot_be_built_is_refused(geometry, said, buffers):
    with pytest.raises(KVPlanError, match=said):
        work(buffers, geometry)
