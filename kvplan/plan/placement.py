"""Compute the addresses of units from the block ids of an engine.

A unit is the largest stretch of tokens of which whole blocks of both sides consist; a block holds one or several units.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np

from kvplan.base.values import integer, quoted
from kvplan.errors import BlockIndexError, OverlapError
from kvplan.layout.address_ranges import check_places
from kvplan.layout.strides import Int64Array
from kvplan.plan.loops import PLACED, SRC_OUTSIDE, TWICE, loops_for, place_side
from kvplan.program.program import BlockAxis, Program

_INT64 = np.dtype(np.int64)


class Side(NamedTuple):
    """One side of a program as arrays, for the loop that places units.

    Attributes:
        axes: (groups, 3 + units per block) int64: base address, block stride, row of ``tables`` or -1, unit offsets.
        tables: (tables, blocks) int64: bytes from block 0 to each block, if the blocks have no constant stride.
        units: units per block.
        num_blocks: number of blocks.
    """

    axes: Int64Array
    tables: Int64Array
    units: int
    num_blocks: int


def sides(program: Program) -> tuple[Side, Side]:
    """Return both sides of a program as arrays."""
    return (
        _side([(g.src, g.src_base) for g in program.groups], program.src_units),
        _side([(g.dst, g.dst_base) for g in program.groups], program.dst_units),
    )


def _side(groups: list[tuple[BlockAxis, int]], units: int) -> Side:
    axes = np.zeros((len(groups), 3 + units), dtype=np.int64)
    tables: list[Int64Array] = []
    check_places(sum(axis.num_blocks for axis, _ in groups if axis.stride is None))
    for row, (axis, base) in enumerate(groups):
        stride = axis.stride
        axes[row, :3] = (base, stride or 0, -1 if stride is not None else len(tables))
        axes[row, 3:] = axis.units
        if stride is None:
            tables.append(axis.block_offsets())
    stacked = np.array(tables, dtype=np.int64).reshape(len(tables), groups[0][0].num_blocks if tables else 0)
    return Side(axes, stacked, units, groups[0][0].num_blocks)


def own_block_ids(ids: Any, name: str) -> Int64Array:
    """Return a copy of block ids as a C-contiguous int64 array, so that no other thread changes them after a check.

    Args:
        ids: a sequence of int, a numpy array of any integer type (also read-only or strided), or a torch CPU tensor.
        name: name of the caller's argument, for messages.

    Raises:
        BlockIndexError: the ids are not one-dimensional, not integers, ragged, or larger than int64 allows.

    >>> own_block_ids([3, 1, 2], "src_blocks")
    array([3, 1, 2])
    """
    if type(ids) is np.ndarray and ids.dtype is _INT64 and ids.ndim == 1:
        return ids.copy()
    if hasattr(ids, "data_ptr") and str(ids.device) != "cpu":
        raise BlockIndexError(f"{name} is on {ids.device}; block ids are planned on the CPU: pass ids.cpu()")
    try:
        array = np.array(ids.numpy() if hasattr(ids, "data_ptr") else ids, order="C")
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise BlockIndexError(f"{name} is ragged or holds no integers: {error}") from None
    if array.ndim != 1:
        raise BlockIndexError(f"{name} has shape {array.shape}; block ids are one-dimensional")
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise BlockIndexError(f"{name} holds {array.dtype}; block ids are integers")
    if array.dtype.kind == "u" and int(array.max()) > np.iinfo(np.int64).max:
        raise BlockIndexError(f"{name}[{int(array.argmax())}] is {int(array.max())}, past the largest int64")
    return array.astype(np.int64, copy=False)


def skipped_units(src_skip: Any, dst_skip: Any) -> tuple[int, int]:
    """Return both skips as Python ints. With numpy integers, bytes and counts could wrap around.

    Raises:
        BlockIndexError: a skip is not an integer.

    >>> skipped_units(np.uint8(0), 3)
    (0, 3)
    """
    right = "it counts units and is an integer"
    return (
        integer("src_skip", src_skip, right=right, error=BlockIndexError),
        integer("dst_skip", dst_skip, right=right, error=BlockIndexError),
    )


def count_units(
    src: Int64Array,
    dst: Int64Array,
    src_skip: int,
    dst_skip: int,
    units: tuple[int, int],
    program: Program | None = None,
) -> int:
    """Count the units that both id lists cover.

    A list may begin ``skip`` units inside its first block, and end inside its last block. Otherwise both lists must
    cover the same number of units. A unit may be smaller than the blocks of both sides.

    Args:
        src, dst: block ids.
        src_skip, dst_skip: units to skip at the front of the first block.
        units: units per block, of each side.
        program: the program, if messages should name the size of a unit.

    Raises:
        BlockIndexError: a skip is a block or more, or the lists cover different numbers of units.

    >>> import numpy as np
    >>> count_units(np.arange(11), np.array([0, 1, 3]), 0, 1, (1, 4))
    11
    """
    if src_skip or dst_skip:  # most plans skip nothing
        for skip, side_units, name in ((src_skip, units[0], "src"), (dst_skip, units[1], "dst")):
            if not 0 <= skip < side_units:
                raise BlockIndexError(
                    f"{name}_skip is {quoted(skip)}; a {name} block holds {side_units} unit{'s' * (side_units > 1)}, "
                    f"so it is 0{f' to {side_units - 1}' * (side_units > 1)}{_unit(program)}"
                )
    if not len(src) and not len(dst):
        return 0
    src_covers, dst_covers = len(src) * units[0] - src_skip, len(dst) * units[1] - dst_skip
    count = min(src_covers, dst_covers)
    if src_covers - count >= units[0] or dst_covers - count >= units[1] or count <= 0:
        fit = -(-(src_covers + dst_skip) // units[1]) if src_covers > 0 else 0
        right = f"; give {fit} dst block{'s' * (fit > 1)} for these src blocks" * (fit > 0)
        raise BlockIndexError(
            f"{len(src)} src blocks cover {max(src_covers, 0)} units, {len(dst)} dst blocks cover "
            f"{max(dst_covers, 0)}; only the last larger block may be partly used{right}{_unit(program)}"
        )
    return count


def _unit(program: Program | None) -> str:
    """Return the words for the size of a unit, for the end of a message."""
    return "" if program is None else f" (skips count units; a unit is {program.unit_words})"


class _Scratch(threading.local):
    """One bit per destination unit, all zero between calls. Each thread has its own array of bits."""

    def __init__(self) -> None:
        self.words = np.zeros(64, dtype=np.uint64)

    def of(self, bits: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        if self.words.size * 64 < bits:
            self.words = np.zeros(-(-bits // 64), dtype=np.uint64)
        return self.words


_scratch = _Scratch()


def place(
    src: Side, dst: Side, src_ids: Int64Array, dst_ids: Int64Array, src_skip: int, dst_skip: int, count: int
) -> Int64Array:
    """Return the source and destination addresses of ``count`` units, as (groups, 2, units) int64.

    Raises:
        BlockIndexError: an id is negative or larger than the last block id.
        OverlapError: a destination unit is named twice.
    """
    out = np.empty((src.axes.shape[0], 2, count), dtype=np.int64)
    seen = _scratch.of(dst.num_blocks * dst.units)
    kind, at = loops_for(count).place_units(
        src_ids, dst_ids, src_skip, dst_skip, src.axes, dst.axes, src.tables, dst.tables,
        src.num_blocks, dst.num_blocks, seen, out,
    )  # fmt: skip
    if kind == PLACED:
        return out
    if kind == TWICE:
        block, unit = divmod(at, dst.units)
        where = f" (unit {unit} of it)" if dst.units > 1 else ""
        named = np.flatnonzero(dst_ids == block)[:2].tolist()  # fewer if the caller changes its ids meanwhile
        places = f", as {' and '.join(f'dst_blocks[{k}]' for k in named)}" if len(named) > 1 else ""
        raise OverlapError(
            f"dst_blocks name block {block}{where} more than once{places}; each destination is written once"
        )
    checked, side, name = (out[0, 0], src, "src") if kind == SRC_OUTSIDE else (out[0, 1], dst, "dst")
    raise outside(name, checked, at, side.num_blocks)


def unit_addresses(side: Side, group: int, ids: Int64Array, skip: int, count: int, name: str) -> Int64Array:
    """Return the addresses of units of one side, in one run group.

    Args:
        side: the side.
        group: number of the run group.
        ids: ids of the blocks that hold the units, in order.
        skip: units to skip in the first block.
        count: number of units.
        name: ``"src"`` or ``"dst"``, for messages.

    Raises:
        BlockIndexError: an id is negative or larger than the last block id.

    >>> side = Side(np.array([[4096, 64, -1, 0, 32]]), np.empty((0, 0), np.int64), 2, 8)
    >>> unit_addresses(side, 0, np.array([5, 1]), 1, 2, "src").tolist()
    [4448, 4160]
    """
    if int(ids.min()) < 0 or int(ids.max()) >= side.num_blocks:
        raise outside(name, ids, int(((ids < 0) | (ids >= side.num_blocks)).argmax()), side.num_blocks)
    made = np.empty(count, dtype=np.int64)
    place_side(ids, skip, side.axes[group : group + 1], side.tables, made[None])
    return made


def outside(name: str, ids: Int64Array, at: int, num_blocks: int) -> BlockIndexError:
    """Return the error for an id that is out of range.

    >>> outside("src", np.array([0, 8]), 1, 8)
    BlockIndexError('src_blocks[1] is 8; src blocks are 0 to 7')
    """
    return BlockIndexError(f"{name}_blocks[{at}] is {int(ids[at])}; {name} blocks are 0 to {num_blocks - 1}")
