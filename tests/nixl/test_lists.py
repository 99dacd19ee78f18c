"""Lists of descriptors for NIXL from plans."""

from __future__ import annotations

import pytest

import kvplan
from kvplan import KVLayout, KVPlanError, PathError
from kvplan.layout.dump import document_of


def spec(notation: str, address: int = 1 << 20, device: str = "cpu", **sizes: int) -> KVLayout:
    return KVLayout.from_spec(
        {"notation": notation, "dtype": "uint8", "address": address, "device": device, "sizes": sizes}
    )


@pytest.mark.slow
def test_flat_rows_are_address_length_device():
    mine = spec("layer block dim", 1000, layer=2, block=4, dim=8)
    theirs = spec("block layer dim", 5000, "cuda:3", layer=2, block=4, dim=8)
    plan = kvplan.compile(mine, theirs).plan([3, 0], [1, 2])
    # Block 3 of layer 0 lies at 1000 + 24, of layer 1 32 bytes further; blocks 1 and 2 of the peer are 16 bytes each.
    assert plan.nixl("src").rows.tolist() == [[1024, 8, 0], [1056, 8, 0], [1000, 8, 0], [1032, 8, 0]]
    assert plan.nixl("dst").rows.tolist() == [[5016, 8, 3], [5024, 8, 3], [5032, 8, 3], [5040, 8, 3]]
    assert (plan.nixl("src").memory, plan.nixl("dst").memory) == ("DRAM", "VRAM")


def test_strided_rows_add_stride_and_count():
    mine = spec("layer block dim", 1000, layer=2, block=4, dim=8)
    theirs = spec("block layer dim", 5000, "cuda:3", layer=2, block=4, dim=8)
    plan = kvplan.compile(mine, theirs).plan([3, 0], [1, 2])
    assert plan.nixl("src", strided=True).rows.tolist() == [[1024, 8, 0, 32, 2], [1000, 8, 0, 32, 2]]
    assert plan.nixl("dst", strided=True).rows.tolist() == [[5016, 8, 3, 8, 2], [5032, 8, 3, 8, 2]]
    assert plan.nixl("dst", strided=True).descriptors == 4


def test_blocks_that_touch_on_both_sides_are_one_row():
    mine, theirs = spec("block dim", 1000, block=8, dim=64), spec("block dim", 1 << 16, block=8, dim=64)
    plan = kvplan.compile(mine, theirs).plan([1, 2, 3, 6], [5, 6, 7, 0])
    assert plan.nixl("src").rows.tolist() == [[1384, 64, 0], [1064, 192, 0]]


def test_devices_of_joined_plans_are_each_rows_own():
    mine = spec("block dim", 1000, block=4, dim=8)
    first, second = (spec("block dim", 1 << at, f"cuda:{n}", block=4, dim=8) for at, n in ((20, 1), (21, 0)))
    plan = kvplan.join([kvplan.compile(mine, one).plan([k], [2]) for k, one in ((0, second), (1, first))])
    assert plan.nixl("dst").rows.tolist() == [[(1 << 20) + 16, 8, 1], [(1 << 21) + 16, 8, 0]]
    assert plan.nixl("src").rows.tolist() == [[1008, 8, 0], [1000, 8, 0]]


def test_a_plan_of_nothing_has_no_rows():
    mine, theirs = spec("block dim", 1000, block=4, dim=8), spec("block dim", 9000, block=4, dim=8)
    plan = kvplan.compile(mine, theirs).plan([], [])
    assert plan.nixl("src").rows.shape == (0, 3)
    assert plan.nixl("dst", strided=True).rows.shape == (0, 5)


@pytest.mark.parametrize("side", ["source", 0, None, "SRC"])
def test_a_side_that_is_none(side):
    one = spec("block dim", block=4, dim=8)
    with pytest.raises(KVPlanError, match="give 'src' or 'dst'"):
        kvplan.compile(one, one).plan([0], [1]).nixl(side)


def test_memory_that_nixl_does_not_take_here():
    one = spec("block dim", block=4, dim=8)
    dump = document_of(one.built) | {"virtual": False}
    dump["regions"][0] |= {"device": "hpu:0"}
    other = KVLayout.from_spec(dump)
    with pytest.raises(PathError, match="dst is on 'hpu:0'"):
        kvplan.compile(one, other).plan([0], [1]).nixl("src")
