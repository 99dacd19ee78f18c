"""Units by way of a ring: the same byte moves in two steps; and how they are dealt out to its slots."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout
from kvplan.execute.gpu.ring_loops import deal
from kvplan.plan.staging import stage


def layouts(host_tokens: int) -> tuple[kvplan.KVLayout, kvplan.KVLayout]:
    cache = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((2, 8, 4, 30), np.int8))
    return cache, kvplan.KVLayout.from_tensors("block layer token dim", np.zeros((3, 2, host_tokens, 30), np.int8))


def test_a_host_block_is_one_granule_of_one_extent():
    cache, host = layouts(8)
    made = stage(kvplan.compile(cache, host).program.groups[0], host_is_src=False)
    assert (made.granule_units, made.nbytes) == (2, 512)
    assert made.extents.tolist() == [[0], [0], [480]]  # two layers of 8 tokens of 30 bytes, padded to 512
    assert made.runs.tolist() == [[0, 240], [0, 8 * 4 * 30], [120, 120]]
    assert made.unit_hosts.tolist() == made.unit_rings.tolist() == [0, 120]
    # One unit alone: its two layers, where they lie in the whole block.
    assert made.part(1, 2).tolist() == [[120, 360], [120, 360], [120, 120]]
    assert made.part(0, 2) is made.extents
    assert made.part(1, 2) is made.part(1, 2)
    assert made.alignment == 8  # of 120, and addresses at least so round


def test_units_that_lie_apart_on_the_host_are_padded_apart_in_the_ring():
    cache = kvplan.KVLayout.from_tensors("block token dim", np.zeros((8, 4, 100), np.int8))
    host = kvplan.KVLayout.from_tensors("block token dim", np.zeros((3, 4, 128), np.int8)[:, :, :100])
    made = stage(kvplan.compile(host, cache).program.groups[0], host_is_src=True)
    assert made.extents.tolist() == [[0, 128, 256, 384], [0, 256, 512, 768], [100] * 4]
    assert made.nbytes == 1024


def test_a_load_is_laid_out_by_the_units_of_its_source():
    cache, host = layouts(8)
    made = stage(kvplan.compile(host, cache).program.groups[0], host_is_src=True)
    assert (made.granule_units, made.nbytes) == (2, 512)
    assert made.extents.tolist() == [[0], [0], [480]]
    assert made.runs.tolist() == [[0, 240], [0, 8 * 4 * 30], [120, 120]]
    assert made.unit_hosts.tolist() == made.unit_rings.tolist() == [0, 120]


def test_units_whose_runs_are_neighbours_of_other_units_runs_go_one_by_one():
    """Tokens every 16 bytes and heads every 24, of 8 bytes: at 0 and 24, and at 16 and 40; the middle ones touch.

    In the ring, the first unit's second row would lie 264 bytes behind its first, and the other's 256.
    """
    memory = np.zeros(2 * 48, np.uint8)
    host = KVLayout.from_tensors(
        "block token head dim", np.lib.stride_tricks.as_strided(memory, (2, 2, 2, 8), (48, 16, 24, 1))
    )
    cache = KVLayout.from_tensors("block token head dim", np.zeros((6, 1, 2, 8), np.uint8))
    for src, dst in ((host, cache), (cache, host)):
        made = stage(kvplan.compile(src, dst).program.groups[0], host_is_src=src is host)
        assert (made.granule_units, made.nbytes) == (1, 512)
        assert made.unit_hosts.tolist() == made.unit_rings.tolist() == [0]
        assert made.extents.tolist() == [[0, 24], [0, 256], [8, 8]]
        assert made.runs.tolist() == [[0, 256], [0, 8], [8, 8]]


@pytest.mark.parametrize("load", [True, False])
@pytest.mark.parametrize(("host_at", "cache_at", "alignment"), [(0, 0, 64), (8, 0, 64), (0, 8, 8), (0, 32, 32)])
def test_the_ring_s_kernel_is_aligned_as_the_cache_is_wherever_the_host_s_memory_lies(
    load, host_at, cache_at, alignment
):
    """Addresses of the ring are round; the host's side is copied by others."""
    sides = []
    for at in (host_at, cache_at):
        memory = np.zeros(1024, np.uint8)
        start = -memory.ctypes.data % 256 + at
        sides.append(KVLayout.from_tensors("block dim", memory[start : start + 4 * 64].reshape(4, 64)))
    host, cache = sides
    program = kvplan.compile(host, cache) if load else kvplan.compile(cache, host)
    assert stage(program.program.groups[0], host_is_src=load).alignment == alignment


@pytest.mark.parametrize("dealing", [deal, deal.py_func], ids=["compiled", "as written"])
@pytest.mark.parametrize("load", [True, False])
def test_dealing_by_hand(load, dealing):
    """Three units, two a granule, entered one late: granules of 1 and 2 units, one a chunk, two slots."""
    units = np.array([[120, 300, 420], [9000, 9500, 9100]], np.int64)[:: 1 if load else -1].copy()
    head, whole = np.array([[120], [120], [120]]), np.array([[0], [0], [240]])
    words, made, edges = np.zeros(16 + 6, np.int64), np.zeros((3, 2), np.int64), np.zeros(3, np.int64)
    dealing(units, load, 1, 2, np.array([0, 120]), np.array([0, 120]), head, whole, whole, 10_000, 2, 256, 1, 256, 1,
         np.array([0, 2, 1, 0, 0, 5, 6, 7]), 500, words, made, 0, edges)  # fmt: skip
    ring, cache = [10_000 + 256 + 120, 10_000, 10_000 + 120], [9000, 9500, 9100]
    assert words[16:].tolist() == (ring + cache if load else cache + ring)
    assert words[:8].tolist() == [1, 2, 1, 500 + 128, 500 + 128 + 24, 5, 6, 7]
    assert words[8:16].tolist() == [2, 2, 1, 500 + 136, 500 + 136 + 24, 5, 6, 7]
    host, place = [120, 300], [10_000 + 256 + 120, 10_000]
    assert made.tolist() == [*((host, place) if load else (place, host)), [120, 240]]
    assert edges.tolist() == [0, 1, 2]
