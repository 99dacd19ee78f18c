"""A tensor that has other memory than when it was described: compile and prepare refuse it."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

import kvplan
from kvplan import KVLayout
from kvplan.errors import LayoutError

SHAPE = (8, 4096)


def new(value=1):
    return torch.full(SHAPE, value, dtype=torch.uint8)


def described(*tensors):
    return KVLayout.from_tensors("layer: block dim", list(tensors))


# Ways to give a tensor other memory; those below also free what it had, though its storage is kept.
LETS_GO = {
    "set_": lambda tensor: tensor.set_(new()),
    "data": lambda tensor: setattr(tensor, "data", new()),
    "swap_tensors": lambda tensor: torch.utils.swap_tensors(tensor, new()),
}
IN_PLACE = {
    "resize_": lambda tensor: tensor.resize_(16, 1 << 16),
    "storage resized to nothing": lambda tensor: tensor.untyped_storage().resize_(0),
    "storage resized": lambda tensor: tensor.untyped_storage().resize_(4096),
    "share_memory_": lambda tensor: tensor.share_memory_(),
}
WAYS = LETS_GO | IN_PLACE


@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("way", WAYS)
def test_prepare_and_compile_refuse_any_of_many_tensors(way, side):
    tensors = [new(7) for _ in range(3)]
    mine, theirs = described(*tensors), described(*np.full((3, *SHAPE), 9, np.uint8))
    pair = (mine, theirs) if side == "src" else (theirs, mine)
    plan = kvplan.compile(*pair).plan([0, 1], [2, 3])
    with kvplan.Executor() as executor:
        executor.prepare(plan)
        WAYS[way](tensors[1])
        some = [side.slice(layers=[0, 1]) for side in pair]  # another pair than the one that was compiled
        for call in (lambda: executor.prepare(plan), lambda: kvplan.compile(*some)):
            with pytest.raises(LayoutError, match=r"a tensor of KVLayout.* has other memory now"):
                call()


@pytest.mark.slow
def test_the_memory_that_a_tensor_lets_go_of_stays():
    """What a plan in flight still touches is not given to anybody else."""
    for way in LETS_GO.values():
        tensor = new(7)
        layout = described(tensor)
        held = layout.regions[0].held
        way(tensor)
        gc.collect()
        assert held.storage.data_ptr() == layout.regions[0].address
        assert set(held.storage.tolist()) == {7}


def test_the_memory_goes_with_the_layout():
    tensor = new()
    storage = weakref.ref(tensor.untyped_storage())
    layout = described(tensor)
    del tensor
    assert layout.holdings
    del layout
    gc.collect()
    assert storage() is None
