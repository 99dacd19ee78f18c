"""Wrong plans, and what an executor refuses: one clear error, before anything moves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvplan
from kvplan import (
    BlockIndexError,
    KVLayout,
    KVPlanError,
    LayoutError,
    OverlapError,
    PathError,
    TransferError,
)
from tests.execute.small_caches import cache, paged
from tests.simulated.objects import Tensor


@pytest.fixture
def untouched():
    """A program whose destination must stay as it is."""
    src, dst = cache(8, 4, 2, 8), np.full((8, 12, 2, 8), 7, np.uint8)
    notation = "block token head dim"
    program = kvplan.compile(KVLayout.from_tensors(notation, src), KVLayout.from_tensors(notation, dst))
    yield program
    assert (dst == 7).all()


@pytest.mark.parametrize(
    ("src_ids", "dst_ids", "skips", "error", "says"),
    [
        ([0, 1, -1], [0], (0, 0), BlockIndexError, "src_blocks[2] is -1; src blocks are 0 to 7"),
        ([0, 1, 8], [0], (0, 0), BlockIndexError, "src_blocks[2] is 8"),
        ([0, 1, 2], [9], (0, 0), BlockIndexError, "dst_blocks[0] is 9; dst blocks are 0 to 7"),
        ([0, 1, 2, 3, 4, 5], [1, 1], (0, 0), OverlapError, "name block 1 (unit 0 of it) more than once"),
        ([0.0, 1.0, 2.0], [0], (0, 0), BlockIndexError, "src_blocks holds float64"),
        (np.array([True, False, True]), [0], (0, 0), BlockIndexError, "holds bool"),
        ([[0, 1], [2]], [0], (0, 0), BlockIndexError, "ragged"),
        ([[0, 1, 2]], [0], (0, 0), BlockIndexError, "shape (1, 3)"),
        (3, [0], (0, 0), BlockIndexError, "shape ()"),
        (None, [0], (0, 0), BlockIndexError, "src_blocks"),
        (["0", "1", "2"], [0], (0, 0), BlockIndexError, "holds <U1"),
        ([2**70, 1, 2], [0], (0, 0), BlockIndexError, "holds object"),
        (np.array([2**63, 1, 2], np.uint64), [0], (0, 0), BlockIndexError, "past the largest int64"),
        (torch.zeros(3, device="meta", dtype=torch.int64), [0], (0, 0), BlockIndexError, "pass ids.cpu()"),
        ([0, 1, 2, 3], [0], (0, 0), BlockIndexError, "4 src blocks cover 4 units, 1 dst blocks cover 3"),
        ([0, 1, 2], [0, 1], (0, 0), BlockIndexError, "may be partly used"),
        ([], [0], (0, 0), BlockIndexError, "cover 0 units"),
        ([0], [], (0, 0), BlockIndexError, "cover 0"),
        ([0, 1], [0], (0, 3), BlockIndexError, "dst_skip is 3; a dst block holds 3 units, so it is 0 to 2"),
        ([0, 1], [0], (0, -1), BlockIndexError, "dst_skip is -1"),
        ([0, 1], [0], (1, 0), BlockIndexError, "src_skip is 1; a src block holds 1 unit, so it is 0"),
        ([0, 1], [0], (0, 1.0), BlockIndexError, "an integer"),
        ([0, 1], [0], (0, True), BlockIndexError, "an integer"),
    ],
)
def test_ids_and_skips_that_fit_nothing(untouched, src_ids, dst_ids, skips, error, says):
    with pytest.raises(error) as caught:
        untouched.plan(src_ids, dst_ids, *skips)
    assert says in str(caught.value)
    untouched.plan([0, 1, 2], [0])  # a failed plan leaves nothing behind


def test_an_empty_plan_moves_nothing(untouched, executor):
    plan = untouched.plan([], [])
    assert (plan.units, plan.nbytes, len(plan.strided())) == (0, 0, 0)
    assert [column.size for column in plan.descriptors()] == [0, 0, 0]
    assert executor.submit(plan).result()[::2] == (0, "host", 0)


def test_a_plan_that_reads_what_it_writes():
    layout = paged()
    program = kvplan.compile(layout, layout)
    program.plan([0, 1], [2, 3])
    with pytest.raises(OverlapError, match="both reads and writes"):
        program.plan([0, 1], [1, 2])


def test_joined_plans_that_write_the_same_byte():
    program = kvplan.compile(paged(), paged())
    with pytest.raises(OverlapError, match="two of the joined plans write"):
        kvplan.join([program.plan([0, 1], [2, 3]), program.plan([5], [3])])
    with pytest.raises(KVPlanError, match="join got no plans"):
        kvplan.join([])


def test_joined_plans_of_different_directions():
    spec = {"notation": "block dim", "sizes": {"block": 4, "dim": 8}}
    gpu, cpu = (KVLayout.from_spec(spec | {"device": device}) for device in ("cuda:0", "cpu"))
    load, store = kvplan.compile(cpu, gpu).plan([0], [1]), kvplan.compile(gpu, cpu).plan([0], [1])
    with pytest.raises(PathError, match=r"\['load', 'store'\]"):
        kvplan.join([load, store])


@pytest.mark.parametrize("cap", [0, -1, 1.5, True])
def test_a_cap_that_is_none(untouched, cap):
    with pytest.raises(KVPlanError, match="at least one byte"):
        untouched.plan([0], [0]).descriptors(max_nbytes=cap)


def test_what_an_executor_refuses(untouched):
    plan = untouched.plan([0], [0])
    with pytest.raises(PathError, match="no path serves device 'cuda:0'"):
        kvplan.Executor(device="cuda:0")
    with pytest.raises(PathError, match="path 'kernel' cannot serve device 'cpu'"):
        kvplan.Executor(policy=kvplan.Policy(path="kernel"))
    with pytest.raises(PathError, match="unknown path 'dma'"):
        kvplan.Policy(path="dma")
    with pytest.raises(PathError, match="threads is 0"):
        kvplan.Policy(threads=0)
    with kvplan.Executor() as executor:
        with pytest.raises(KVPlanError, match="plan is a list"):
            executor.submit([plan])
        with pytest.raises(KVPlanError, match=r"after is a builtins\.int"):
            executor.submit(plan, after=3)
    with pytest.raises(TransferError, match="closed"):
        executor.submit(plan)


def test_memory_that_cannot_be_written(executor):
    frozen = cache(8, 4, 2, 8)
    frozen.setflags(write=False)
    dst = KVLayout.from_tensors("block token head dim", frozen)
    with pytest.raises(LayoutError, match="read-only"):
        executor.submit(kvplan.compile(paged(), dst).plan([0], [0]))


def test_memory_that_is_not_there_or_not_the_cpu_s(executor):
    spec = {"notation": "block dim", "sizes": {"block": 4, "dim": 8}, "dtype": "int8"}
    real = KVLayout.from_tensors("block dim", cache(4, 8))
    with pytest.raises(LayoutError, match="virtual"):
        executor.submit(kvplan.compile(real, KVLayout.from_spec(spec)).plan([0], [0]))


def test_the_host_path_takes_no_device_memory(executor):
    device = KVLayout.from_tensors("block dim", Tensor(cache(4, 8)))
    plan = kvplan.compile(device, KVLayout.from_tensors("block dim", cache(4, 8))).plan([0], [0])
    assert plan.direction == "store"
    with pytest.raises(PathError, match="this plan is a 'store'"):
        executor.submit(plan)
    with pytest.raises(LayoutError, match="lives on one device"):
        KVLayout.from_tensors("layer: block dim", [Tensor(cache(4, 8)), cache(4, 8)])
