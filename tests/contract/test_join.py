"""Joined plans write each byte once: `join` raises OverlapError exactly when two plans write one byte."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout
from tests.profiles import examples

NBYTES = 288
# Ways to see the same bytes: notation, first byte, shape as numpy has it, and which of it is described.
VIEWS = {
    "layers first": ("layer block dim", 0, (3, 9, 8), np.s_[:]),
    "blocks first": ("block layer dim", 0, (9, 3, 8), np.s_[:]),
    "padded": ("block dim", 0, (9, 24), np.s_[:, :8]),
    "one layer": ("layer block dim", 0, (3, 9, 8), np.s_[1:2]),
    "larger blocks": ("block token dim", 0, (3, 3, 24), np.s_[:]),
    "later": ("block layer dim", 72, (9, 3, 8), np.s_[:]),
    "token rows": ("block token dim", 0, (4, 9, 8), np.s_[:]),
}


def seen(memory: np.ndarray, name: str) -> np.ndarray:
    _, start, shape, some = VIEWS[name]
    return memory[start : start + np.prod(shape)].reshape(shape)[some]


def blocks_of(view: np.ndarray, name: str) -> np.ndarray:
    """The view with its blocks first."""
    return np.moveaxis(view, VIEWS[name][0].split().index("block"), 0)


@st.composite
def writes(draw):
    """One plan: how it sees the destination, and blocks of the source and of the destination."""
    name = draw(st.sampled_from(list(VIEWS)))
    ids = st.integers(0, len(blocks_of(seen(np.empty(NBYTES, np.uint8), name), name)) - 1)
    to = draw(st.lists(ids, min_size=1, max_size=4, unique=True))
    return name, draw(st.lists(ids, min_size=len(to), max_size=len(to))), to


@examples(400)
@given(asked=st.lists(writes(), min_size=2, max_size=4))
def test_join_refuses_just_what_writes_a_byte_twice(asked, executor):
    numbers, memory, source = np.arange(NBYTES), np.zeros(NBYTES, np.uint8), np.arange(NBYTES, dtype=np.uint16)
    source = (source % 251 + 1).astype(np.uint8)
    plans, expected = [], np.zeros(NBYTES, np.uint8)
    for name, come, to in asked:
        sides = (KVLayout.from_tensors(VIEWS[name][0], seen(bytes_, name)) for bytes_ in (source, memory))
        plans.append(kvplan.compile(*sides).plan(come, to))
        blocks_of(seen(expected, name), name)[to] = blocks_of(seen(source, name), name)[come]
    written = [set(blocks_of(seen(numbers, name), name)[to].ravel().tolist()) for name, _, to in asked]
    if any(one & other for one, other in combinations(written, 2)):
        with pytest.raises(kvplan.OverlapError, match="each destination is written once"):
            kvplan.join(plans)
        return
    joined = kvplan.join(plans)
    assert executor.submit(joined).result().nbytes == joined.nbytes == int(joined.descriptors().size.sum())
    np.testing.assert_array_equal(memory, expected)


@examples(400)
@given(read=writes(), write=writes())
def test_a_plan_refuses_just_what_it_both_reads_and_writes(read, write, executor):
    numbers, memory = np.arange(NBYTES), (np.arange(NBYTES) % 251).astype(np.uint8)
    (name, come, _), (other, _, to) = read, write
    come, to = come[: len(to)], to[: len(come)]
    if VIEWS[name][0] != VIEWS[other][0] or seen(memory, name).shape != seen(memory, other).shape:
        other, to = name, list(range(len(come)))
    plan = kvplan.compile(*(KVLayout.from_tensors(VIEWS[one][0], seen(memory, one)) for one in (name, other))).plan
    blocks = blocks_of(seen(numbers, name), name)[come], blocks_of(seen(numbers, other), other)[to]
    expected = memory.copy()
    blocks_of(seen(expected, other), other)[to] = blocks_of(seen(memory, name), name)[come]
    if set(blocks[0].ravel().tolist()) & set(blocks[1].ravel().tolist()):
        with pytest.raises(kvplan.OverlapError, match="both reads and writes"):
            plan(come, to)
        return
    executor.submit(plan(come, to)).synchronize()
    np.testing.assert_array_equal(memory, expected)


def test_a_block_that_touches_its_neighbour_on_both_sides_is_not_lost():
    source, pool = (KVLayout.from_tensors("block dim", np.zeros((9, 64), np.uint8)) for _ in range(2))
    program = kvplan.compile(source, pool)
    plans = [program.plan([0], [8]), program.plan([3], [5]), program.plan([5, 6], [4, 5])]
    with pytest.raises(kvplan.OverlapError) as refused:
        kvplan.join(plans)
    words = ("plans 1 and 2", "block 5", "block dim | block=9", hex(pool.address(layer=0, part="kv", block=5)))
    assert all(word in str(refused.value) for word in words)


def test_joined_plans_may_be_joined_again():
    source, pool = (KVLayout.from_tensors("block dim", np.zeros((9, 64), np.uint8)) for _ in range(2))
    program = kvplan.compile(source, pool)
    pair = kvplan.join([program.plan([0], [0]), program.plan([1], [1])])
    assert kvplan.join([pair, program.plan([2], [2])]).units == 3
    with pytest.raises(kvplan.OverlapError, match="plans 0 and 1 both write block 1"):
        kvplan.join([pair, program.plan([2], [1])])
    with pytest.raises(kvplan.OverlapError, match="plans 0 and 1"):
        kvplan.join([pair, pair])
