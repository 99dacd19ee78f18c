"""Opaque blocks inside larger blocks, and heads in allocations of their own: literal numbers."""

from __future__ import annotations

import numpy as np

import kvplan
from kvplan import KVLayout


def device(layers=2, pages=6, nbytes=8):
    """One opaque page a block, one tensor a layer; page ``p`` of layer ``l`` holds ``100 l + p``."""
    return [np.arange(pages, dtype=np.uint8).repeat(nbytes).reshape(pages, nbytes) + 100 * k for k in range(layers)]


def moved(executor, src, dst, *ids):
    program = kvplan.compile(src, dst)
    return executor.submit(program.plan(*ids)).result()


def test_opaque_blocks_lie_one_after_another_in_a_larger_block(executor):
    caches, pool = device(), np.zeros((2, 2, 4, 8), np.uint8)  # two blocks of two layers of four pages
    gpu = KVLayout.from_tensors("layer: block dim", caches)
    host = KVLayout.from_tensors("block layer subblock dim", pool)
    assert (host.opaque, host.block_tokens, host.num_blocks, host.block_nbytes) == (True, 4, 2, 64)
    program = kvplan.compile(gpu, host)
    assert (program.unit_tokens, program.unit_nbytes, program.runs, program.run_nbytes) == (1, 16, 2, (8, 8))
    assert (program.program.src_units, program.program.dst_units) == (1, 4)
    # Pages 5, 0, 3 go behind the first page of block 1; the page after them stays as it is.
    assert moved(executor, gpu, host, [5, 0, 3], [1], 0, 1).nbytes == 48
    assert pool[0].max() == 0
    assert pool[1, :, :, 0].tolist() == [[0, 5, 0, 3], [0, 105, 100, 103]]
    # And back, into other pages.
    moved(executor, host, gpu, [1], [2, 1, 4], 1)
    assert [cache[:, 7].tolist() for cache in caches] == [[0, 0, 5, 3, 3, 5], [100, 100, 105, 103, 103, 105]]


def merged(blocks, tokens, pages):
    """Rows of 2 bytes a token, and opaque pages of 8 bytes beside them."""
    rows = np.zeros((blocks, tokens, 2), np.uint8)
    index = np.zeros((blocks, pages, 8), np.uint8)
    layout = KVLayout.merge([
        KVLayout.from_tensors("block token dim", rows),
        KVLayout.from_tensors("block subblock dim", index, part="index"),
    ])  # fmt: skip
    return layout, rows, index


def test_rows_and_opaque_pages_share_their_ids(executor):
    """Blocks of 4 tokens and one page; host blocks of 12 tokens and three pages."""
    gpu, rows, index = merged(5, 4, 1)
    host, host_rows, host_index = merged(2, 12, 3)
    rows[:] = np.arange(20).reshape(5, 4, 1)
    index[:] = np.arange(5).reshape(5, 1, 1)
    program = kvplan.compile(gpu, host)
    assert (program.unit_tokens, program.unit_nbytes) == (4, 16)
    moved(executor, gpu, host, [4, 2], [1], 0, 1)
    assert host_rows[1, :, 0].tolist() == [0, 0, 0, 0, 16, 17, 18, 19, 8, 9, 10, 11]
    assert host_index[1, :, 0].tolist() == [0, 4, 2]
    assert host_rows[0].max() == host_index[0].max() == 0


def test_a_pool_for_opaque_blocks(executor):
    gpu = KVLayout.from_tensors("layer: block dim", device())
    pool = kvplan.allocate("block subblock layer dim", like=gpu, num_blocks=2, sizes={"subblock": 3})
    assert (pool.num_blocks, pool.block_tokens, pool.block_nbytes) == (2, 3, 48)
    moved(executor, gpu, pool, range(6), [1, 0])
    assert pool.tensors[:, :, 1, 0].tolist() == [[103, 104, 105], [100, 101, 102]]
    assert kvplan.allocate("block subblock layer dim", like=pool).block_tokens == 3


# ---- heads in allocations of their own -------------------------------------------------------------------------


def heads_apart(layers=2, heads=3):
    return [[np.full((4, 2, 8), 10 * k + h, np.uint8) for h in range(heads)] for k in range(layers)]


def test_heads_in_separate_allocations(executor):
    caches = heads_apart()
    layout = KVLayout.from_tensors("layer head: block token dim", caches, head_start=5)
    assert (layout.heads, layout.layers, layout.block_nbytes) == (range(5, 8), (0, 1), 2 * 3 * 2 * 8)
    at = layout.address(layer=1, part="kv", block=3, token=1, head=6)
    assert at == caches[1][1].ctypes.data + 3 * 16 + 8
    pool = np.zeros((4, 2, 2, 4, 8), np.uint8)  # heads 4 to 7
    host = KVLayout.from_tensors("block layer token head dim", pool, head_start=4)
    program = kvplan.compile(layout, host)
    assert (program.unit_tokens, program.runs, program.run_nbytes) == (2, 2 * 3 * 2, (8, 8))
    moved(executor, layout, host, [3, 0], [1, 2])
    assert pool[1, :, 0, :, 0].tolist() == [[0, 0, 1, 2], [0, 10, 11, 12]]
    assert pool[0].max() == pool[3].max() == 0
    assert "heads 5-7 of 5-7 in the source, 4-7 in the destination" in program.explain()


def test_heads_that_are_views_of_one_tensor_are_a_stride():
    cache = np.zeros((4, 3, 2, 8), np.uint8)  # block head token dim
    apart = KVLayout.from_tensors("head: block token dim", [cache[:, head] for head in range(3)])
    assert apart == KVLayout.from_tensors("block head token dim", cache)
    assert len(apart.components) == 1
