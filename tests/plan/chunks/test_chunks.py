"""Plans in chunks, with numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvplan import BlockIndexError, KVLayout, KVPlanError
from kvplan.plan.chunks import Chunks, outlines_of
from tests.plan.chunks.rings import Half, Ring, halves, through

LAYERS, BLOCKS, DIM = 3, 4, 16


def two_layouts(*, seed: int = 0):
    """A pool whose blocks are whole, and a cache by layers: a block of 48 bytes is 3 runs of 16."""
    pool = np.random.default_rng(seed).integers(0, 256, (BLOCKS, LAYERS, DIM), dtype=np.uint8)
    cache = np.zeros((LAYERS, BLOCKS, DIM), np.uint8)
    return pool, cache, KVLayout.from_tensors("block layer dim", pool), KVLayout.from_tensors("layer block dim", cache)


def sizes(cut: Chunks):
    return [(chunk.nbytes, [span.units for span in chunk.spans]) for chunk in cut.chunks]


def test_a_chunk_holds_blocks_one_after_another(executor):
    pool, cache, src, dst = two_layouts()
    plan = kvplan.compile(src, dst).plan([3, 0, 2], [1, 3, 0])
    near, _ = halves(plan, 512)
    assert sizes(near.cut) == [(144, [3])]
    assert near.ids(0, 0).tolist(), near.ids(0, 1).tolist() == ([3, 0, 2], [1, 3, 0])
    ring = Ring(1, 512)
    executor.submit(near.plan(0, near.ids(0, 0), ring.layout, ring.slots[0])).synchronize()
    np.testing.assert_array_equal(ring.bytes_of(ring.slots[0], 144), pool[[3, 0, 2]].ravel())
    through(executor, plan, 512)
    for here, there in ((3, 1), (0, 3), (2, 0)):
        np.testing.assert_array_equal(cache[:, there], pool[here])
    assert not cache[:, 2].any()


def test_a_unit_that_is_larger_than_a_slot_is_cut(executor):
    src = np.arange(2 * 4096, dtype=np.uint8).reshape(2, 4096)
    dst = np.zeros_like(src)
    layouts = [KVLayout.from_tensors("block dim", one) for one in (src, dst)]
    plan = kvplan.compile(*layouts).plan([0, 1], [1, 0])
    assert [nbytes for nbytes, _ in sizes(Half(plan, 0, 1024).cut)] == [1024] * 8
    through(executor, plan, 1024)
    np.testing.assert_array_equal(dst, src[::-1])


def test_units_of_several_sizes_share_chunks(executor):
    """A hybrid: pages of 96 bytes and states of 40 bytes, as one joined plan."""
    rng = np.random.default_rng(1)
    pages, states = rng.integers(0, 256, (4, 96), dtype=np.uint8), rng.integers(0, 256, (3, 40), dtype=np.uint8)
    to_pages, to_states = np.zeros_like(pages), np.zeros_like(states)
    plan = kvplan.join([
        kvplan.compile(*(KVLayout.from_tensors("block dim", one) for one in pair)).plan(*ids)
        for pair, ids in (((pages, to_pages), ([2, 0], [1, 3])), ((states, to_states), ([1], [2])))
    ])  # fmt: skip
    assert sizes(Half(plan, 0, 256).cut) == [(232, [2, 1])]
    through(executor, plan, 256)
    np.testing.assert_array_equal(to_pages[[1, 3]], pages[[2, 0]])
    np.testing.assert_array_equal(to_states[2], states[1])


def test_units_that_one_side_copies_in_bytes_stay_aligned_for_the_other(executor):
    """A unit of 4 bytes, copied whole from its source and byte by byte to its destination, comes before one of 2."""
    rows, pairs = np.arange(12, dtype=np.uint8).reshape(3, 4), np.arange(50, 56, dtype=np.uint8).reshape(3, 2)
    to_rows, to_pairs = np.zeros((3, 4, 5), np.uint8), np.zeros_like(pairs)
    plans = [
        kvplan.compile(*(KVLayout.from_tensors("block token dim", one) for one in pair)).plan([2, 0, 1], [0, 1, 2])
        for pair in ((rows[:, :, None], to_rows[:, :, :1]), (pairs[:, :, None], to_pairs[:, :, None]))
    ]
    through(executor, kvplan.join(plans[::-1]), 256)
    np.testing.assert_array_equal(to_rows[:, :, 0], rows[[2, 0, 1]])
    np.testing.assert_array_equal(to_pairs, pairs[[2, 0, 1]])
    assert not to_rows[:, :, 1:].any()


def test_layers_come_in_their_order():
    _, _, src, dst = two_layouts(seed=2)
    cut = Half(kvplan.compile(dst, src).plan([1, 2], [0, 3]), 0, 256, 3).cut
    assert [sorted(layers) for layers in cut.layers] == [[0], [1], [2]]
    assert [(chunk.group, chunk.nbytes) for chunk in cut.chunks] == [(0, 32), (1, 32), (2, 32)]


def test_nothing_to_move_has_no_chunks():
    _, _, src, dst = two_layouts()
    assert not Chunks(outlines_of(kvplan.compile(src, dst).plan([], [])), 256).chunks


@pytest.mark.parametrize(("ids", "error"), [([0, 4], BlockIndexError), ([-1, 0], BlockIndexError), ([1], KVPlanError)])
def test_ids_of_another_process_are_checked(ids, error):
    _, _, src, dst = two_layouts()
    _, far = halves(kvplan.compile(src, dst).plan([0, 1], [1, 2]), 256)
    ring = Ring(1, 256)
    with pytest.raises(error):
        far.plan(0, np.array(ids), ring.layout, ring.slots[0])
