"""A layout is refused exactly where two of its coordinates share a byte, or one lies outside its memory."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from kvplan import KVLayout, LayoutError
from tests.profiles import examples

NBYTES = 400
AXES = st.tuples(*[st.tuples(st.integers(1, 4), st.integers(0, 40))] * 3, st.tuples(st.integers(1, 6), st.just(1)))


def seen(memory: np.ndarray, first: int, axes: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Blocks, tokens, heads and bytes of a cache in a memory of bytes; or of their numbers."""
    shape, strides = zip(*axes, strict=True)
    return as_strided(memory[first:], shape, [stride * memory.itemsize for stride in strides])


def shared(*views: np.ndarray) -> bool:
    every = np.concatenate([view.ravel() for view in views])
    return np.unique(every).size < every.size


def refused_if(overlaps: bool, words: str = ""):
    return pytest.raises(LayoutError, match=f"overlap.*share bytes|{words}") if overlaps else nullcontext()


@examples(250)
@given(axes=AXES)
@example(axes=((1, 0), (2, 7), (1, 0), (8, 1)))  # the last byte of a token is the first one of the next
@example(axes=((1, 0), (2, 8), (1, 0), (8, 1)))
@example(axes=((4, 4), (4, 9), (2, 21), (1, 1)))  # strides that do not nest
@example(axes=((3, 23), (4, 21), (4, 29), (1, 1)))
def test_two_coordinates_of_one_tensor(axes):
    with refused_if(shared(seen(np.arange(NBYTES), 0, axes)), "overlaps itself"):
        KVLayout.from_tensors("block token head dim", seen(np.zeros(NBYTES, np.uint8), 0, axes))


@examples(100)
@given(axes=AXES, less=st.integers(-2, 2))
def test_bytes_outside_the_allocation(axes, less):
    numbers = seen(np.arange(NBYTES), 0, axes)
    if shared(numbers):
        return
    memory = np.zeros(max(int(numbers.max()) + 1 - less, 1), np.uint8)  # a byte or two too short, or long enough
    with refused_if(memory.size <= numbers.max(), "outside its allocation"):
        KVLayout.from_tensors("block token head dim", seen(memory, 0, axes))


@examples(250)
@given(block=st.integers(12, 40), cuts=st.tuples(*[st.integers(0, 30)] * 2), sizes=st.tuples(*[st.integers(1, 12)] * 2))
@example(block=20, cuts=(0, 7), sizes=(8, 4))
@example(block=20, cuts=(0, 8), sizes=(8, 4))
@example(block=20, cuts=(0, 19), sizes=(8, 2))  # with the next block
def test_two_parts_of_one_memory(block, cuts, sizes):
    axes = [((4, block), (1, 0), (1, 0), (size, 1)) for size in sizes]
    apart = [seen(np.arange(NBYTES), cut, one) for cut, one in zip(cuts, axes, strict=True)]
    memory = np.zeros(NBYTES, np.uint8)
    parts = [
        KVLayout.from_tensors("block token head dim", seen(memory, cut, one), part=name)
        for cut, one, name in zip(cuts, axes, "ab", strict=True)
    ]
    with refused_if(shared(*apart)):
        KVLayout.merge(parts)


@examples(100)
@given(starts=st.lists(st.integers(0, 99), min_size=2, max_size=4))
@example(starts=[0, 11])
@example(starts=[0, 12])
@example(starts=[0, 12, 40])
@example(starts=[40, 12, 0])
def test_blocks_that_are_tensors_of_their_own(starts):
    memory, numbers = np.zeros(NBYTES, np.uint8), np.arange(NBYTES)
    views = [[one[start : start + 12].reshape(3, 4) for start in starts] for one in (memory, numbers)]
    with refused_if(shared(*views[1])):
        layout = KVLayout.from_tensors("block: token dim", views[0])
        found = [layout.address(layer=0, part="kv", block=block) for block in range(len(starts))]
        assert found == [view.ctypes.data for view in views[0]]
