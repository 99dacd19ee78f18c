"""Packed plans with numbers computed by hand; and recipes that lie."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout, LayoutError, TransferError
from kvplan.plan.packing.pack_recipe import half_of
from kvplan.plan.packing.packing import packing_of, packings_by_layer
from tests.plan.packing.rings import Ring, bounds_of, through

LAYERS, BLOCKS, DIM = 3, 4, 16


def two_layouts(*, seed: int = 0):
    """A pool whose blocks are whole, and a cache by layers: a block of 48 bytes is 3 runs of 16."""
    pool = np.random.default_rng(seed).integers(0, 256, (BLOCKS, LAYERS, DIM), dtype=np.uint8)
    cache = np.zeros((LAYERS, BLOCKS, DIM), np.uint8)
    return pool, cache, KVLayout.from_tensors("block layer dim", pool), KVLayout.from_tensors("layer block dim", cache)


def test_a_chunk_holds_blocks_one_after_another(executor):
    pool, cache, src, dst = two_layouts()
    packing = packing_of(kvplan.compile(src, dst).plan([3, 0, 2], [1, 3, 0]))
    assert (packing.units, packing.unit_nbytes, packing.nbytes) == (3, 48, 144)
    assert packing.cuts(100) == [0, 2, 3]
    assert (packing.chunk_nbytes(0, 2), packing.chunk_nbytes(2, 3)) == (96, 48)
    assert [packing.src.facts.copies, packing.dst.facts.copies] == [3, 9]  # whole blocks, and 3 layers of each
    ring = Ring(2, 96)
    executor.submit(packing.gather(0, 2, ring.slots[0])).synchronize()
    np.testing.assert_array_equal(ring.bytes_of(ring.slots[0], 96), np.concatenate([pool[3].ravel(), pool[0].ravel()]))
    through(executor, packing.src, packing.dst, ring, bounds_of(packing, 96))
    for here, there in ((3, 1), (0, 3), (2, 0)):
        np.testing.assert_array_equal(cache[:, there], pool[here])
    assert not cache[:, 2].any()


def test_each_side_can_keep_its_order():
    """Heads of 8 bytes by token on one side, by head on the other: whichever side keeps its order has one run."""
    tokens = KVLayout.from_tensors("block token head dim", np.zeros((4, 4, 2, 8), np.uint8))
    heads = KVLayout.from_tensors("block head token dim", np.zeros((4, 2, 4, 8), np.uint8))
    plan = kvplan.compile(tokens, heads).plan([1], [2])
    for order, copies in (("src", (1, 8)), ("dst", (8, 1))):
        packing = packing_of(plan, order)
        assert (packing.src.facts.copies, packing.dst.facts.copies) == copies


def test_a_unit_that_is_larger_than_a_slot_is_cut(executor):
    src = np.arange(2 * 4096, dtype=np.uint8).reshape(2, 4096)
    dst = np.zeros_like(src)
    layouts = [KVLayout.from_tensors("block dim", one) for one in (src, dst)]
    packing = packing_of(kvplan.compile(*layouts).plan([0, 1], [1, 0]), most=1024)
    assert packing.unit_nbytes <= 1024
    assert packing.nbytes == 8192
    bounds = bounds_of(packing, 1024)
    assert len(bounds) == 8
    through(executor, packing.src, packing.dst, Ring(2, 1024), bounds)
    np.testing.assert_array_equal(dst, src[::-1])


def test_units_of_several_sizes_share_chunks(executor):
    """A hybrid: pages of 96 bytes and states of 40 bytes, as one joined plan."""
    rng = np.random.default_rng(1)
    pages, states = rng.integers(0, 256, (4, 96), dtype=np.uint8), rng.integers(0, 256, (3, 40), dtype=np.uint8)
    to_pages, to_states = np.zeros_like(pages), np.zeros_like(states)
    plans = [
        kvplan.compile(*(KVLayout.from_tensors("block dim", one) for one in pair)).plan(*ids)
        for pair, ids in (((pages, to_pages), ([2, 0], [1, 3])), ((states, to_states), ([1], [2])))
    ]
    packing = packing_of(kvplan.join(plans))
    assert (packing.units, packing.nbytes) == (3, 232)
    assert packing.src.sizes == ((2, 96), (1, 40))
    through(executor, packing.src, packing.dst, Ring(2, 232), [(0, 3)])
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
    packing = packing_of(kvplan.join(plans[::-1]), "src")
    assert packing.src.sizes == ((3, 4), (3, 2))
    assert [section.group.alignment for section in packing.src.sections] == [4, 2]
    through(executor, packing.src, packing.dst, Ring(2, 18), [(0, 1), (1, 6)])
    np.testing.assert_array_equal(to_rows[:, :, 0], rows[[2, 0, 1]])
    np.testing.assert_array_equal(to_pairs, pairs[[2, 0, 1]])
    assert not to_rows[:, :, 1:].any()


def test_ranks_send_what_both_hold(executor):
    """A rank with heads 0 and 1, and one with heads 1 and 2: head 1 travels."""
    theirs = np.arange(4 * 2 * 2 * 4, dtype=np.uint8).reshape(4, 2, 2, 4)
    mine = np.zeros((4, 2, 2, 4), np.uint8)
    src = KVLayout.from_tensors("block token head dim", theirs, head_start=0)
    dst = KVLayout.from_tensors("block head token dim", mine, head_start=1)
    packing = packing_of(kvplan.compile(src, dst).plan([3], [0]))
    assert packing.nbytes == 2 * 4
    through(executor, packing.src, packing.dst, Ring(2, 256), [(0, 1)])
    np.testing.assert_array_equal(mine[0, 0], theirs[3, :, 1])
    assert mine.sum() == theirs[3, :, 1].sum()


def test_layers_come_in_their_order(executor):
    pool, cache, src, dst = two_layouts(seed=2)
    pieces = packings_by_layer(kvplan.compile(dst, src).plan([1, 2], [0, 3]), 3)
    assert [sorted(layers) for layers, _ in pieces] == [[0], [1], [2]]
    cache[:] = np.random.default_rng(3).integers(0, 256, cache.shape)
    kept = pool.copy()
    ring = Ring(2, 256)
    for done, (_, packing) in enumerate(pieces, 1):
        through(executor, packing.src, packing.dst, ring, [(0, 2)])
        np.testing.assert_array_equal(pool[[0, 3], :done], cache[:done, [1, 2]].swapaxes(0, 1))
        np.testing.assert_array_equal(pool[[0, 3], done:], kept[[0, 3], done:])


def test_nothing_to_move_has_no_chunks():
    _, _, src, dst = two_layouts()
    packing = packing_of(kvplan.compile(src, dst).plan([], []))
    assert (packing.units, packing.nbytes, packing.cuts(256)) == (0, 0, [0])
    assert half_of(packing.recipe("src"), [src], "src").units == 0


def test_the_other_process_plans_its_own_half():
    _, _, src, _ = two_layouts()
    peers = {"notation": "layer block dim", "dtype": "uint8", "address": 1 << 20,
             "sizes": {"layer": LAYERS, "block": BLOCKS, "dim": DIM}}  # fmt: skip
    packing = packing_of(kvplan.compile(src, KVLayout.from_spec(peers)).plan([0], [1]))
    assert packing.gather(0, 1, Ring(1, 64).slots[0]).nbytes == 48
    with pytest.raises(LayoutError, match="its own process plans this half, from the recipe"):
        packing.scatter(0, 1, Ring(1, 64).slots[0])


# ---- recipes of a process that lies ----


def recipe_and_layout():
    _, _, src, dst = two_layouts()
    return packing_of(kvplan.compile(src, dst).plan([3, 0, 2], [1, 3, 0])).recipe("dst"), dst


def test_a_recipe_reaches_nothing_but_offered_memory():
    recipe, dst = recipe_and_layout()
    other = KVLayout.from_tensors("layer block dim", np.zeros((LAYERS, BLOCKS, DIM), np.uint8))
    assert half_of(recipe, {"kv": dst}, "dst").nbytes == 144
    with pytest.raises(TransferError, match="from a peer"):
        half_of(recipe, [other], "dst")
    with pytest.raises(TransferError, match="from a peer"):
        half_of(recipe, [], "dst")
    with pytest.raises(TransferError, match="is for side 1; asked for is 'src'"):
        half_of(recipe, [dst], "src")


def test_a_half_has_one_of_several_layouts_that_share_its_memory():
    """An executor knows plans of one layout again. One that may not be written is not enough."""
    cache = np.zeros((LAYERS, BLOCKS, DIM), np.uint8)
    _, _, src, _ = two_layouts()
    dst, alike = (KVLayout.from_tensors("layer block dim", cache) for _ in range(2))
    fixed = cache.view()
    fixed.flags.writeable = False
    frozen = KVLayout.from_tensors("layer block dim", fixed)
    recipe = packing_of(kvplan.compile(src, dst).plan([0], [1])).recipe("dst")
    assert half_of(recipe, [frozen, alike, dst], "dst").layouts == (alike,)


def test_a_recipe_does_not_write_what_is_read_only():
    cache = np.zeros((LAYERS, BLOCKS, DIM), np.uint8)
    written = KVLayout.from_tensors("layer block dim", cache)
    _, _, src, _ = two_layouts()
    recipe = packing_of(kvplan.compile(src, written).plan([0], [1])).recipe("dst")
    cache.flags.writeable = False
    with pytest.raises(TransferError, match="from a peer"):
        half_of(recipe, [KVLayout.from_tensors("layer block dim", cache)], "dst")
