"""Pickles and copies: a pickle has facts and no memory, and says so; a copy is the same object."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

import kvplan
from kvplan import KVLayout
from kvplan.errors import LayoutError

SPEC = {"notation": "block dim", "dtype": "uint8", "sizes": {"block": 8, "dim": 64}}


def filled(value, blocks=8):
    array = np.full((blocks, 64), value, np.uint8)
    return array, KVLayout.from_tensors("block dim", array)


def again(value):
    return pickle.loads(pickle.dumps(value))


def test_a_pickled_layout_says_that_its_addresses_are_not_of_this_memory():
    _, layout = filled(7)
    loaded = again(layout)
    assert loaded == layout
    assert (layout.addresses, loaded.addresses, loaded.virtual) == ("memory", "dump", False)
    assert loaded.tensors is None
    assert [region.owner for region in loaded.regions] == [None]
    assert (str(loaded), loaded.sizes, loaded.seams) == (str(layout), layout.sizes, layout.seams)
    assert again(loaded).addresses == "dump"


def test_a_pickled_spec_stays_made_up():
    assert again(KVLayout.from_spec(SPEC)).addresses == "spec"


def test_no_byte_of_a_cache_is_in_a_pickle():
    array = np.zeros((8, 1 << 20), np.uint8)
    tensors = [torch.zeros(8, 1 << 20, dtype=torch.uint8) for _ in range(2)]
    for notation, given in (("block dim", array), ("layer: block dim", tensors)):
        layout = KVLayout.from_tensors(notation, given)
        assert len(pickle.dumps(layout)) < 4096
        assert len(pickle.dumps(kvplan.compile(layout, layout).plan([0], [1]))) < 16384


@pytest.mark.parametrize("what", ["plan", "program", "layouts", "joined", "rank", "groups"])
def test_nothing_is_moved_through_what_was_pickled(what):
    (a, src), (b, dst) = filled(7), filled(9)
    program = kvplan.compile(src, dst)
    loaded = {
        "plan": lambda: again(program.plan([0], [1])),
        "program": lambda: again(program).plan([0], [1]),
        "layouts": lambda: kvplan.compile(*again((src, dst))).plan([0], [1]),
        "joined": lambda: kvplan.join([again(program.plan([0], [1])), program.plan([2], [3])]),
        "rank": lambda: again(kvplan.reshard(src, dst))[0, 0].plan([0], [1]),
        "groups": lambda: again(kvplan.Groups([program, program])).plan([[0], [2]], [[1], [3]]),
    }[what]()
    with kvplan.Executor() as executor:
        with pytest.raises(LayoutError, match="those of the process that saved the dump, or pickled the layout"):
            executor.submit(loaded)
        assert executor.stats().transfers == 0
    assert (a == 7).all()
    assert (b == 9).all()


def test_a_copy_moves_the_bytes_of_the_memory_that_it_keeps():
    (_, src), (array, dst) = filled(7), filled(9)
    copied = copy.deepcopy(dst)
    del dst
    with kvplan.Executor() as executor:
        executor.submit(copy.deepcopy(kvplan.compile(src, copied).plan([0], [3]))).result()
    assert array[3].tolist() == [7] * 64
    assert copied.tensors is array


def test_the_error_of_a_notation_is_pickled():
    """An error that cannot be made again breaks a pool of processes, which then waits for its other results."""
    with pytest.raises(kvplan.NotationError) as caught:
        KVLayout.from_tensors("layer: block @", [])
    error = caught.value
    for other in (again(error), copy.copy(error)):
        assert (str(other), other.text, other.column) == (str(error), error.text, error.column)
