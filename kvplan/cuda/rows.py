"""Rows of driver calls: a path writes the calls of a transfer as the rows of one array, and the player makes them.

A row has eight words: the kind of call, the stream, and up to six operands:

=======  ===================================================================================================
RECORD   event
WAIT     event: the stream waits for it
LAUNCH   address of the header, function, programs, threads, bytes of shared memory
COPY     destination, source, bytes; for errors, as the last two: number of the descriptor, of all descriptors
BATCH    addresses of the destinations, sources and sizes; number of copies; for errors as well, of the first copy
BOX      address of a CUDA_MEMCPY2D
SYNC     event: the player waits for it; if somebody waits for later rows, the stream does, unless it is 0
AWAIT    address of another list's state, whether its failure is one of this list
=======  ===================================================================================================

What rows name by address must exist until they are played.
"""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import c_int64
from itertools import pairwise

import numpy as np

from kvplan.cuda.driver import Driver
from kvplan.errors import TransferError
from kvplan.layout.strides import Int64Array

# Compiled loops hold these numbers, and numba keeps a loop on disk until the file of the loop changes: after an edit of
# a number, edit player.py and row_loops.py, too.
RECORD, WAIT, LAUNCH, COPY, BATCH, BOX, SYNC, AWAIT = range(8)
WORDS = 8
UNIFIED = 4  # CUmemorytype: the driver finds the kind of memory by the address
NAMES = (
    "cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernelEx", "cuMemcpyAsync", "cuMemcpyBatchAsync",
    "cuMemcpy2DAsync_v2", "cuEventQuery",
)  # fmt: skip
# The words of a list's state, which another thread reads while the calls are made: rows played; the driver's code of
# the row that failed; the copy that a failed batch names, or -1; whether the list has ended (after a failure, Python
# sets it); calls beyond the rows, since a 2-D copy may need a call for each of its rows; and rows that somebody waits
# for, so that the player shall not wait for the GPU in front of them.
PLAYED, FAILED, FAILED_COPY, ENDED, ADDED, HURRIED = range(6)
STATE_WORDS = 6
LAST_ROW = 1 << 62  # more rows than any list has: its end


def new_state() -> Int64Array:
    """Return the state of a list of which no call has been made."""
    return np.zeros(STATE_WORDS, dtype=np.int64)


def rows_of(calls: Iterable[tuple[int, ...]]) -> Int64Array:
    """Return rows of calls that are written as tuples.

    >>> rows_of([(RECORD, 80, 7), (COPY, 80, 1, 2, 3)]).tolist()
    [[0, 80, 7, 0, 0, 0, 0, 0], [3, 80, 1, 2, 3, 0, 0, 0]]
    """
    return np.array([call + (0,) * (WORDS - len(call)) for call in calls], dtype=np.int64).reshape(-1, WORDS)


def copy_rows(columns: Int64Array, stream: int, *, least: int, most: int) -> Int64Array:
    """Return rows that copy descriptors: in batches, and small ones by a call each.

    Args:
        columns: (3, m) int64, C-contiguous: source, destination and bytes. It must exist until the rows are played.
        stream: handle of the stream.
        least: bytes of the smallest copy that may be in a batch.
        most: most copies of a batch.

    >>> columns = np.array([[1, 2, 3], [4, 5, 6], [9, 2, 9]])
    >>> copy_rows(columns, 80, least=4, most=2)[:, [0, 5]].tolist()
    [[4, 1], [3, 0], [4, 1]]
    """
    count = columns.shape[1]
    single = columns[2] < least
    edges = np.flatnonzero(np.diff(single)) + 1
    made = []
    for first, last in pairwise([0, *edges.tolist(), count]):
        if count and single[first]:
            rows = np.zeros((last - first, WORDS), dtype=np.int64)
            rows[:, 0], rows[:, 1] = COPY, stream
            rows[:, 2:5] = columns[[1, 0, 2], first:last].T
            rows[:, 6] = np.arange(first, last)
        else:
            starts = np.arange(first, last, most)
            rows = np.zeros((starts.size, WORDS), dtype=np.int64)
            rows[:, 0], rows[:, 1] = BATCH, stream
            rows[:, 2:5] = columns.ctypes.data + 8 * (np.array([1, 0, 2]) * count + starts[:, None])
            rows[:, 5] = np.minimum(starts + most, last) - starts
            rows[:, 6] = starts
        rows[:, 7] = count
        made.append(rows)
    return np.concatenate(made)


def boxes(rows: Int64Array) -> Int64Array:
    """Return the CUDA_MEMCPY2D of every row, as (n, 16) int64: the words of the structure.

    >>> boxes(np.array([[1, 2, 3, 4, 5, 6]])).tolist()
    [[0, 0, 4, 0, 1, 0, 5, 0, 0, 4, 0, 2, 0, 6, 3, 4]]
    """
    made = np.zeros((len(rows), 16), dtype=np.int64)
    made[:, (2, 9)] = UNIFIED
    made[:, (4, 11, 14, 15, 6, 13)] = rows
    return made


def error_of(driver: Driver, rows: Int64Array, state: Int64Array) -> TransferError:
    """Return the error of the call that failed, with the copy that the driver refuses.

    Args:
        driver: the driver.
        rows: the list.
        state: its state.
    """
    kind, _, one, two, three, count, number, total = rows[int(state[PLAYED])].tolist()
    code, at = int(state[FAILED]), int(state[FAILED_COPY])
    if kind == AWAIT:
        return TransferError(f"the transfer given as after= failed: {driver.name(code)}")
    what = ""
    if kind == COPY:
        what = f"{_descriptor(number, total)}{three} bytes from {two:#x} to {one:#x}"
    elif kind == BATCH and at < 0:
        what = f"of {count} copies"
    elif kind == BATCH:
        dst, src, nbytes = (c_int64.from_address(column + 8 * at).value for column in (one, two, three))
        what = f"{_descriptor(number + at, total)}{nbytes} bytes from {src:#x} to {dst:#x}"
    elif kind == BOX:
        words = (c_int64 * 16).from_address(one)
        what = f"2-D copy of {words[15]} rows of {words[14]} bytes from {words[4]:#x} to {words[11]:#x}"
    name = NAMES[kind].removesuffix("_v2")
    return TransferError(f"{name} returned {driver.name(code)}{what and ': '}{what}")


def _descriptor(number: int, total: int) -> str:
    return f"descriptor {number} of {total}, " if total else ""
