"""A tensor that has other memory than when it was described: nothing is moved, and no freed memory is touched."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvplan
from kvplan import KVLayout
from kvplan.errors import LayoutError
from kvplan.execute.transfer import ASKED, check_layouts
from kvplan.layout.holding import SUBMITS, Holding, questions

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
def test_a_submit_refuses_it_before_anything_moves(way, side):
    tensor, other = new(7), np.full(SHAPE, 9, np.uint8)
    mine, theirs = described(tensor), described(other)
    plan = kvplan.compile(*((mine, theirs) if side == "src" else (theirs, mine))).plan([0, 1], [2, 3])
    with kvplan.Executor() as executor:
        WAYS[way](tensor)
        with pytest.raises(LayoutError, match=r"a tensor of KVLayout.* has other memory now") as caught:
            executor.submit(plan)
        assert executor.stats().transfers == 0
    assert len(str(caught.value)) < 500
    assert (other == 9).all()


@pytest.mark.parametrize("way", WAYS)
def test_compile_refuses_any_of_many_tensors(way):
    tensors = [new() for _ in range(5)]
    layout = described(*tensors)
    WAYS[way](tensors[3])
    with pytest.raises(LayoutError, match="has other memory now"):
        kvplan.compile(layout, described(*(new() for _ in range(5))))


@pytest.mark.parametrize("at", [0, 1, 4])
def test_submits_ask_every_tensor_in_its_turn(at):
    layout = described(*(new() for _ in range(5)))
    plan = kvplan.compile(layout, described(*np.zeros((5, *SHAPE), np.uint8))).plan([0], [0])
    layout.holdings[at].storage.resize_(0)
    for _ in range(at * SUBMITS):
        check_layouts(plan)  # what a submit looks at before anything else
    with kvplan.Executor() as executor, pytest.raises(LayoutError, match="has other memory now"):
        executor.submit(plan)


def test_of_joined_plans_each_is_asked_in_its_turn():
    tensors = [new() for _ in range(ASKED + 2)]
    programs = [kvplan.compile(described(tensor), described(np.zeros(SHAPE, np.uint8))) for tensor in tensors]
    plan = kvplan.join([program.plan([0], [0]) for program in programs])
    tensors[-1].untyped_storage().resize_(0)
    refused = 0
    for _ in range(2 * len(tensors)):
        try:
            check_layouts(plan)
        except LayoutError:
            refused += 1
    assert refused == 2


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


def test_tensors_that_share_a_storage_are_asked_once():
    whole = torch.zeros(4, *SHAPE, dtype=torch.uint8)
    assert len(described(*whole).holdings) == 1


def test_memory_of_its_own_size_again_is_refused_where_it_shrank():
    """The same address says nothing where an allocator gives it again, to fewer bytes."""
    tensor = new()
    held = Holding.of(tensor, tensor.data_ptr(), tensor.untyped_storage())
    assert held._replace(nbytes=held.nbytes + 1).moved()
    assert not next(questions([held._replace(nbytes=held.nbytes + 1)], []))()
    assert not next(questions([held], [held._replace(nbytes=held.nbytes + 1)]))()
    assert not next(questions([held], [held._replace(address=held.address + 1)]))()
    assert not held.moved()
    assert next(questions([held], [held]))()


def test_arrays_have_nothing_to_be_asked_and_cannot_be_resized():
    array = np.zeros(SHAPE, np.uint8)
    layout = described(array)
    assert not layout.holdings
    assert kvplan.compile(layout, described(np.zeros(SHAPE, np.uint8))).questions is None
    with pytest.raises(ValueError, match="cannot resize"):
        array.resize((1 << 12, 1 << 12), refcheck=False)
    view = array[:, :16]
    part = described(view)
    del layout
    gc.collect()
    with pytest.raises(ValueError, match="cannot resize"):
        array.resize((1 << 12, 1 << 12), refcheck=False)
    del part


def test_slices_and_merged_layouts_ask_the_same_tensors():
    one, other = new(), new()
    layout = described(one, other)
    merged = KVLayout.merge([layout.slice(layers=[0]), layout.slice(layers=[1])])
    assert sorted(held.address for held in merged.holdings) == sorted([one.data_ptr(), other.data_ptr()])


def test_of_a_tensor_without_a_storage_the_address_alone_is_asked():
    address = [4096]
    stand_in = SimpleNamespace(data_ptr=lambda: address[0])
    for storage in (None, object()):  # neither has a length
        held = Holding.of(stand_in, 4096, storage)
        assert (held.storage, held.nbytes, held.moved()) == ((), 0, False)
    address[0] = 8192
    assert held.moved()
