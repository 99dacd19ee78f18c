"""What the GPU tests are measured by, itself held against the host path: no GPU is needed here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

import kvplan
from tests.paged_caches import DEVICE_NOTATION, GUARD, HOST_NOTATIONS, Drawn, Move, Paged, Pair
from tests.strategies import Case, cases

CPU = ("cpu", "cpu")


@given(case=cases())
def test_drawn_layouts_rebuilt_on_torch_memory_are_the_same_layouts(case: Case, executor):
    drawn = Drawn(case, CPU)
    assert drawn.program.unit_tokens == case.unit_tokens
    assert executor.submit(drawn.plan).result().nbytes == case.units * drawn.program.unit_nbytes
    drawn.check()


@pytest.mark.parametrize("host", HOST_NOTATIONS)
@pytest.mark.parametrize("align", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("run", [1, 3, 8, 132, 584, 4096, 8200])
def test_shifted_views_have_the_alignment_asked_for(run, align, host, executor):
    device = Paged(DEVICE_NOTATION, dim=run, align=align, padded=True)
    pair = Pair(device, Paged(HOST_NOTATIONS[host], dim=run, align=align), CPU)
    assert pair.program.alignment == min(align, run & -run)
    assert pair.program.run_nbytes == (run, run)
    executor.submit(pair.plan(Move([7, 0, 3, 4, 8], [2, 5, 1, 0, 6]))).synchronize()
    pair.check()


@pytest.mark.parametrize("host", HOST_NOTATIONS)
def test_the_reference_knows_partial_blocks_slices_and_onward_moves(host, executor):
    device = Paged(DEVICE_NOTATION, layer=4, block=13, head=4, dim=146, align=2, padded=True)
    pair = Pair(device, Paged(HOST_NOTATIONS[host], layer=4, block=4, token=8, head=4, dim=146, align=2), CPU)
    executor.submit(pair.plan(Move(range(11), [0, 1, 3], 0, 1))).synchronize()
    executor.submit(pair.plan(Move([12], [2], 0, 3, layers=(1, 3), heads=range(1, 3)))).synchronize()
    pair.check()
    back = pair.onward(device, "cpu")
    executor.submit(back.plan(Move([3, 1], [5, 2, 0, 12, 1], 1, 0))).synchronize()
    back.check()
    fresh = pair.renew(3)
    for root, new in zip(pair.src_roots, fresh, strict=True):
        root.copy_(new)
    executor.submit(pair.plan(Move([3], [2]))).synchronize()
    pair.check()
    back.check()


@pytest.mark.parametrize("at", [0, GUARD - 1, GUARD + 16, -1])
@pytest.mark.parametrize("side", ["src_roots", "dst_roots"])
def test_one_wrong_byte_anywhere_is_seen(side, at, executor):
    pair = Pair(Paged(DEVICE_NOTATION), Paged(HOST_NOTATIONS["page-first"]), CPU)
    executor.submit(pair.plan(Move(range(9), range(9)))).synchronize()
    pair.check()
    getattr(pair, side)[0][at] ^= 1
    with pytest.raises(AssertionError, match="1 of"):
        pair.check()


def test_a_transfer_not_made_is_seen():
    pair = Pair(Paged(DEVICE_NOTATION), Paged(HOST_NOTATIONS["page-first"]), CPU)
    pair.plan(Move([1], [2]))  # 2 layers, K and V, 2 tokens of 64 bytes
    with pytest.raises(AssertionError, match="512 of 5136 bytes differ"):
        pair.check()


def test_layouts_on_torch_memory_are_where_they_say():
    pair = Pair(Paged(DEVICE_NOTATION), Paged(HOST_NOTATIONS["page-first"]), CPU)
    view = pair.src.view(pair.src_roots[1])
    assert isinstance(view, torch.Tensor)
    assert pair.layouts[0].address(layer=1, part="v", block=3) == view[1, 3].data_ptr()
    assert isinstance(pair.program, kvplan.CopyProgram)
