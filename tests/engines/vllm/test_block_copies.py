"""Copies of blocks for vLLM's simple connector: every byte, gaps, regions of several sizes, errors, failed copies."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kvplan.engines.vllm.block_copies import BlockCopies, Ending
from kvplan.errors import KVPlanError, LayoutError, TransferError

torch = pytest.importorskip("torch", reason="vLLM's regions are torch tensors")

BLOCKS, HOST = 12, 5


def regions_of(sizes, gap=0):
    """Regions with random bytes, and rows ``gap`` bytes apart, which no copy may touch."""
    made = []
    for number, size in enumerate(sizes):
        raw = np.random.default_rng(number).integers(-128, 128, (BLOCKS, size + gap), dtype=np.int8)
        made.append(torch.from_numpy(raw)[:, :size])
    return made


@pytest.fixture
def copies_of():
    made = []

    def make(regions, host=HOST):
        made.append(BlockCopies(regions, host))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


@pytest.mark.parametrize(("sizes", "gap"), [((64, 64, 64), 0), ((64, 64), 32), ((64, 192, 64, 8), 16), ((7,), 3)])
def test_blocks_go_to_the_pool_and_back(copies_of, sizes, gap):
    regions = regions_of(sizes, gap)
    before = [region.clone() for region in regions]
    copies, events = copies_of(regions), []
    copies.launch_copy([3, 11, 0], [4, 0, 2], is_store=True, event_idx=7, events_list=events)
    events[0][1].synchronize()
    assert [(number, end.query()) for number, end in events] == [(7, True)]
    for region, rows in zip(regions, copies.host_rows, strict=True):
        assert torch.equal(rows[[4, 0, 2]], region[[3, 11, 0]])
    copies.launch_copy([2, 4], [5, 6], is_store=False, event_idx=8, events_list=events)
    events[1][1].synchronize()
    for region, old in zip(regions, before, strict=True):
        assert torch.equal(region[[5, 6]], old[[0, 3]])
        kept = [block for block in range(BLOCKS) if block not in {5, 6}]
        assert torch.equal(region[kept], old[kept])


def test_a_block_of_the_pool_is_one_piece(copies_of):
    copies = copies_of(regions_of((64, 192, 64)))
    first = copies.host_rows[0]
    assert [rows.data_ptr() - first.data_ptr() for rows in copies.host_rows] == [0, 64, 256]
    assert {rows.stride(0) for rows in copies.host_rows} == {320}
    store, load = copies.programs
    assert store.unit_nbytes == load.unit_nbytes == 320


def test_numbers_of_blocks_that_do_not_fit_are_refused_before_anything_moves(copies_of):
    regions = regions_of((64,))
    copies, events = copies_of(regions), []
    copies.host_rows[0].zero_()
    for src, dst in (([0, 1], [0]), ([BLOCKS], [0]), ([0], [HOST]), ([-1], [0]), ([1, 2], [3, 3])):
        with pytest.raises(KVPlanError):
            copies.launch_copy(src, dst, is_store=True, event_idx=0, events_list=events)
    assert events == []
    assert not copies.host_rows[0].any()


@pytest.mark.parametrize("wrong", ["flat", "wide", "turned"])
def test_a_region_of_another_form_is_refused(wrong):
    region = torch.zeros((4, 8), dtype=torch.int8)
    given = {"flat": region.reshape(-1), "wide": region.to(torch.float16), "turned": region.T}[wrong]
    with pytest.raises(LayoutError, match=r"region 1 has shape .*; give single bytes"):
        BlockCopies([region, given], 2)
    with pytest.raises(LayoutError, match="no regions"):
        BlockCopies([], 2)


def test_a_failed_copy_is_told_and_never_called_done():
    def result():
        raise TransferError("the bytes are lost")

    failed = Ending(SimpleNamespace(done=lambda: True, result=result, synchronize=result))
    for ask in (failed.query, failed.synchronize):
        with pytest.raises(TransferError, match="lost"):
            ask()
    assert Ending(SimpleNamespace(done=lambda: False)).query() is False


def test_copies_that_are_shut_down_are_refused():
    copies = BlockCopies(regions_of((64,)), HOST)
    copies.shutdown()
    with pytest.raises(TransferError):
        copies.launch_copy([0], [0], is_store=True, event_idx=0, events_list=[])
