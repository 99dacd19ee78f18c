"""Lists of descriptors for NIXL from plans."""

from __future__ import annotations

import pytest

import kvplan
from kvplan import KVLayout, PathError
from kvplan.layout.spec import document_of


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


def test_devices_of_joined_plans_are_each_rows_own():
    mine = spec("block dim", 1000, block=4, dim=8)
    first, second = (spec("block dim", 1 << at, f"cuda:{n}", block=4, dim=8) for at, n in ((20, 1), (21, 0)))
    plan = kvplan.join([kvplan.compile(mine, one).plan([k], [2]) for k, one in ((0, second), (1, first))])
    assert plan.nixl("dst").rows.tolist() == [[(1 << 20) + 16, 8, 1], [(1 << 21) + 16, 8, 0]]
    assert plan.nixl("src").rows.tolist() == [[1008, 8, 0], [1000, 8, 0]]


def test_memory_that_nixl_does_not_take_here():
    one = spec("block dim", block=4, dim=8)
    dump = document_of(one.built) | {"virtual": False}
    dump["regions"][0] |= {"device": "hpu:0"}
    other = KVLayout.from_spec(dump)
    with pytest.raises(PathError, match="dst is on 'hpu:0'"):
        kvplan.compile(one, other).plan([0], [1]).nixl("src")
