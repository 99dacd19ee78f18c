"""The problems of the CPU's benchmarks: sizes of a run, and pairs of layouts with block ids."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import kvplan
from benchmarks.numpy_baselines import Int64Array, Stepped
from kvplan.measure.workload import Buffers

Ids = tuple[Int64Array, Int64Array]  # source and destination

TOKENS, HEADS, DIM = 16, 2, 32  # of 2 bytes each: 2 KiB a block of one (layer, part); planning asks for addresses only
BLOCK_NBYTES = TOKENS * HEADS * DIM * 2


@dataclass(frozen=True)
class Scale:
    """How large a run of the benchmarks is.

    Attributes:
        layers: of every cache.
        blocks: block counts of the planning benchmarks.
        pool: blocks of each pool they plan in.
        small, large: samples of a call below and above 1 ms; medians are taken.
        copy_nbytes: bytes that each host copy moves.
        run_nbytes: run lengths of the host copies.
        threads: thread counts of the host copies.
        imports: interpreters started to time imports.
    """

    layers: int
    blocks: tuple[int, ...]
    pool: int
    small: int
    large: int
    copy_nbytes: int
    run_nbytes: tuple[int, ...]
    threads: tuple[int, ...]
    imports: int


FULL = Scale(
    layers=80,
    blocks=(1, 16, 256, 4096),
    pool=8192,
    small=61,
    large=25,
    copy_nbytes=256 * 160 * 8192,
    run_nbytes=(512, 1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 64 << 10, 1 << 20),
    threads=(1, 2),
    imports=21,
)
SMOKE = Scale(
    layers=2,
    blocks=(1, 6),
    pool=8,
    small=2,
    large=1,
    copy_nbytes=1 << 18,
    run_nbytes=(512, 8 << 10),
    threads=(1, 2),
    imports=1,
)


@dataclass(frozen=True)
class Problem:
    """Two layouts to plan between, and the same for the numpy planner.

    Attributes:
        name: of the pair.
        src, dst: the layouts.
        program: compiled from them.
        stepped: base addresses and block strides, read off the arrays.
    """

    name: str
    src: kvplan.KVLayout
    dst: kvplan.KVLayout
    program: kvplan.CopyProgram
    stepped: Stepped


def layer_first(layers: int, blocks: int) -> list[NDArray[np.float16]]:
    """A (kv, block, token, head, dim) array a layer, never touched, so that it takes no memory."""
    return [np.empty((2, blocks, TOKENS, HEADS, DIM), np.float16) for _ in range(layers)]


def page_first(layers: int, blocks: int) -> NDArray[np.float16]:
    """One (block, layer, kv, token, head, dim) array, never touched."""
    return np.empty((blocks, layers, 2, TOKENS, HEADS, DIM), np.float16)


def layer_first_to_page_first(layers: int, pool: int) -> Problem:
    """A GPU cache to a host pool: no two blocks' bytes are adjacent on both sides, nothing merges."""
    tensors, target = layer_first(layers, pool), page_first(layers, pool)
    src = kvplan.KVLayout.from_tensors("layer: kv block token head dim", tensors)
    dst = kvplan.KVLayout.from_tensors("block layer kv token head dim", target)
    src_bases, src_stride = _planes(tensors)
    by_block, by_layer, by_part = target.strides[:3]
    dst_bases = [target.ctypes.data + layer * by_layer + part * by_part for layer in range(layers) for part in (0, 1)]
    stepped = Stepped(src_bases, np.array(dst_bases, dtype=np.int64), src_stride, by_block, BLOCK_NBYTES)
    return Problem("layer to page", src, dst, kvplan.compile(src, dst), stepped)


def layer_first_to_layer_first(layers: int, pool: int) -> Problem:
    """A GPU cache to a pool of its own order: consecutive blocks merge."""
    tensors, target = layer_first(layers, pool), layer_first(layers, pool)
    notation = "layer: kv block token head dim"
    src, dst = (kvplan.KVLayout.from_tensors(notation, side) for side in (tensors, target))
    (src_bases, src_stride), (dst_bases, dst_stride) = _planes(tensors), _planes(target)
    stepped = Stepped(src_bases, dst_bases, src_stride, dst_stride, BLOCK_NBYTES)
    return Problem("layer to layer", src, dst, kvplan.compile(src, dst), stepped)


def _planes(tensors: Sequence[NDArray[np.float16]]) -> tuple[Int64Array, int]:
    """Address of the K and of the V plane of each layer, and bytes between blocks."""
    bases = [tensor.ctypes.data + part * tensor.strides[0] for tensor in tensors for part in (0, 1)]
    return np.array(bases, dtype=np.int64), tensors[0].strides[1]


def head_first_to_token_first(layers: int, pool: int) -> tuple[kvplan.KVLayout, kvplan.KVLayout]:
    """HND to NHD: every (token, head) is a run, 32 for each (layer, part)."""
    src = [np.empty((2, pool, HEADS, TOKENS, DIM), np.float16) for _ in range(layers)]
    return (
        kvplan.KVLayout.from_tensors("layer: kv block head token dim", src),
        kvplan.KVLayout.from_tensors("block layer kv token head dim", page_first(layers, pool)),
    )


def front(buffers: Buffers, nbytes: int) -> Buffers:
    """Return the first bytes of both sides; caches in them have only the blocks that are moved."""
    part = copy(buffers)
    part.nbytes, part.host, part.other = nbytes, buffers.host[:nbytes], buffers.other[:nbytes]
    return part


def scattered(count: int, pool: int) -> Ids:
    """Source and destination ids in no order, none twice."""
    random = np.random.default_rng(count)
    src, dst = (random.permutation(pool)[:count].astype(np.int64) for _ in range(2))
    return src, dst


def consecutive(count: int) -> Ids:
    """Source and destination ids that follow one another, so that all of a layer's K (or V) is one run."""
    return np.arange(count, dtype=np.int64), np.arange(count, dtype=np.int64)
