"""Lists of driver calls: a path writes the calls of a transfer down, and a compiled loop makes them.

A list is played by the thread that submits, or by a thread of its own that needs no interpreter
(:mod:`kvplan.cuda.issuer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvplan.layout.strides import Int64Array

# The kinds of rows, as in kvplan.cuda.calls. That module imports numba, which a process of few transfers need not load.
RECORD, WAIT, LAUNCH, COPY, BATCH, COPY_2D, SYNC, AWAIT, APART = range(9)
NAMES = (
    "cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernelEx", "cuMemcpyAsync", "cuMemcpyBatchAsync",
    "cuMemcpy2DAsync", "cuEventQuery",
)  # fmt: skip
PLAYED, FAILED, FAILED_ROW, FAILED_COPY, ENDED, ADDED, HURRIED, STATE_WORDS = 0, 1, 2, 3, 4, 5, 6, 8
LAST_ROW = 1 << 62  # more rows than any list has: its end
NO_COLUMNS = np.empty((3, 0), dtype=np.int64)
NO_LAUNCHES = np.empty((0, 8), dtype=np.int64)
NO_BOXES = np.empty((0, 16), dtype=np.int64)

Row = tuple[int, int, int, int]
Kernel = tuple[int, int, int]  # function, threads of a program, bytes of shared memory


class Segment(NamedTuple):
    """Calls, with the data that their rows refer to by index.

    Attributes:
        rows: (n, 4) int64: kind, two operands, stream; see :mod:`kvplan.cuda.calls`.
        columns: (3, m) int64: source, destination and bytes of descriptors.
        launches: (k, 8) int64: function and CUlaunchConfig of each launch, from :func:`launch_words`.
        boxes: (b, 16) int64: a CUDA_MEMCPY2D for each 2-D copy.
    """

    rows: Int64Array
    columns: Int64Array = NO_COLUMNS
    launches: Int64Array = NO_LAUNCHES
    boxes: Int64Array = NO_BOXES


def launch_words(kernel: Kernel, programs: int) -> Int64Array:
    """Return the eight words of a launch: the function, and a CUlaunchConfig without its stream.

    >>> launch_words((0x78, 512, 64), 132).tolist()
    [120, 4294967428, 2199023255553, 4294967297, 64, 0, 0, 0]
    """
    function, threads, shared = kernel
    upper = 1 << 32  # the second of the two 32-bit numbers in a word
    return np.array([function, programs + upper, 1 + threads * upper, 1 + upper, shared, 0, 0, 0], dtype=np.int64)


def new_state() -> Int64Array:
    """Return the state of a list of which no call has been made; see :mod:`kvplan.cuda.calls`."""
    return np.zeros(STATE_WORDS, dtype=np.int64)


class CallList:
    """The calls of one transfer, in the order in which they are made.

    Attributes:
        count: number of rows so far.
        effort: number of calls, and of copies in batches, so far: about a microsecond of CPU time each.
        segments: the segments; complete after :meth:`close`.
    """

    def __init__(self) -> None:
        self.count = self.effort = 0
        self.segments: list[Segment] = []
        self._rows: list[Row] = []
        self._launches: list[Int64Array] = []
        self._copies: list[tuple[int, int, int]] = []

    def record(self, event: int, stream: int) -> None:
        """Record an event on a stream."""
        self._put((RECORD, event, 0, stream))

    def wait(self, stream: int, event: int) -> None:
        """Let a stream wait for an event."""
        self._put((WAIT, event, 0, stream))

    def synchronize(self, event: int) -> None:
        """Let the thread that plays the list wait until an event has passed."""
        self._put((SYNC, event, 0, 0))

    def await_list(self, state: Int64Array, *, checked: bool = False) -> None:
        """Let the thread that plays the list wait until another list has ended.

        Args:
            state: (8,) int64: the state of the other list. It must exist until this list has ended.
            checked: whether this list fails if the other list has failed.
        """
        self._put((AWAIT, state.ctypes.data, LAST_ROW + checked, 0))

    def launch(self, kernel: Kernel, programs: int, header: int, stream: int) -> None:
        """Launch a kernel with the address of a header."""
        self._put((LAUNCH, header, len(self._launches), stream))
        self._launches.append(launch_words(kernel, programs))

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Copy bytes."""
        self._put((COPY, len(self._copies), 0, stream))
        self._copies.append((src, dst, nbytes))

    def boxes(self, parameters: Int64Array, stream: int) -> None:
        """Make 2-D copies; ``parameters`` is (b, 16) int64, a CUDA_MEMCPY2D each."""
        if len(parameters):
            self.extend(Segment(rows_of(COPY_2D, np.arange(len(parameters)), stream), boxes=parameters))

    def copies(self, columns: Int64Array, stream: int, *, least: int, most: int) -> None:
        """Copy the descriptors of (3, m) columns: in batches, and small ones by a call each.

        Args:
            columns: source, destination and bytes.
            stream: handle of the stream.
            least: bytes of the smallest copy that may be in a batch; a copy of fewer bytes has a call of its own.
            most: most copies per batch.
        """
        if columns.size:
            self.extend(Segment(copy_rows(columns, 0, columns.shape[1], stream, least, most), columns))

    def extend(self, segment: Segment) -> None:
        """Append a segment."""
        self.close()
        self.segments.append(segment)
        rows = segment.rows
        self.count += len(rows)
        self.effort += len(rows) + int(((rows[:, 2] - rows[:, 1]) * (rows[:, 0] == BATCH)).sum())

    def close(self) -> None:
        """Make a segment of the calls that were added one by one."""
        if self._rows:
            columns = np.array(self._copies, dtype=np.int64).T.copy() if self._copies else NO_COLUMNS
            launches = np.array(self._launches) if self._launches else NO_LAUNCHES
            self.segments.append(Segment(np.array(self._rows, dtype=np.int64), columns, launches))
            self._rows, self._launches, self._copies = [], [], []

    def _put(self, row: Row) -> None:
        self._rows.append(row)
        self.count += 1
        self.effort += 1


def rows_of(kind: int, one: Int64Array, stream: int) -> Int64Array:
    """Return (n, 4) rows of one kind, with one operand each.

    >>> rows_of(COPY, np.array([5, 6]), 80).tolist()
    [[3, 5, 0, 80], [3, 6, 0, 80]]
    """
    rows = np.zeros((len(one), 4), dtype=np.int64)
    rows[:, 0], rows[:, 1], rows[:, 3] = kind, one, stream
    return rows


def copy_rows(columns: Int64Array, first: int, last: int, stream: int, least: int, most: int) -> Int64Array:
    """Return the rows that copy descriptors ``first`` to ``last - 1``; see :meth:`CallList.copies`.

    Copies of at least ``least`` bytes that follow one another go in one batch, of at most ``most`` copies.

    >>> columns = np.array([[0] * 6, [0] * 6, [9, 9, 9, 2, 9, 2]])
    >>> copy_rows(columns, 0, 6, 80, least=4, most=2).tolist()
    [[4, 0, 2, 80], [4, 2, 3, 80], [3, 3, 0, 80], [4, 4, 5, 80], [3, 5, 0, 80]]
    """
    single = columns[2, first:last] < least
    if not single.any():
        return _batches(first, last, stream, most)
    if single.all():
        return rows_of(COPY, np.arange(first, last), stream)
    edges = np.flatnonzero(np.diff(single)) + 1
    bounds = [0, *edges.tolist(), last - first]
    return np.concatenate([
        rows_of(COPY, np.arange(first + a, first + b), stream)
        if single[a]
        else _batches(first + a, first + b, stream, most)
        for a, b in pairwise(bounds)
    ])  # fmt: skip


def _batches(first: int, last: int, stream: int, most: int) -> Int64Array:
    starts = np.arange(first, last, most)
    rows = rows_of(BATCH, starts, stream)
    rows[:, 2] = np.minimum(starts + most, last)
    return rows


def paced(
    segments: Sequence[Segment], every: int, events: Sequence[int]
) -> tuple[list[Segment], list[int]]:  # fmt: skip
    """Let the player of a list wait for the GPU, so that at most ``2 * every`` calls fill the driver's queue.

    After every ``every`` calls an event is recorded on the stream of the last call that has a stream. Then the player
    waits for the event before. The stream of the last row, which records the end, waits for both events: otherwise the
    end could pass before them.

    Args:
        segments: the list.
        every: number of calls between two events.
        events: two events, which are used in turn.

    Returns:
        The segments; and the numbers of rows in the given list in front of which two rows were inserted.

    >>> (made,), inserted = paced([Segment(rows_of(COPY, np.arange(5), 80))], 2, (7, 8))
    >>> made.rows[2:6].tolist(), inserted
    ([[0, 7, 0, 80], [6, 8, 0, 0], [3, 2, 0, 80], [3, 3, 0, 80]], [2, 4])
    >>> made.rows[6:].tolist()
    [[0, 8, 0, 80], [6, 7, 0, 0], [1, 7, 0, 80], [1, 8, 0, 80], [3, 4, 0, 80]]
    """
    made, inserted, left, base = list[Segment](), list[int](), every, 0
    stream = next((int(one) for segment in segments for one in segment.rows[:, 3] if one), 0)  # 0 is the default stream
    for segment in segments:
        rows, pieces = segment.rows, list[Int64Array]()
        while len(rows) > left:
            turn, stream = len(inserted) % 2, _last_stream(rows[:left], stream)
            marks = [(RECORD, events[turn], 0, stream), (SYNC, events[1 - turn], 0, 0)]
            pieces += [rows[:left], np.array(marks, dtype=np.int64)]
            base += left
            inserted.append(base)
            rows, left = rows[left:], every
        stream = _last_stream(rows, stream)
        left -= len(rows)
        base += len(rows)
        made.append(segment._replace(rows=np.concatenate([*pieces, rows])) if pieces else segment)
    if inserted:
        rows = made[-1].rows
        joins = np.array([(WAIT, event, 0, rows[-1, 3]) for event in events], dtype=np.int64)
        made[-1] = made[-1]._replace(rows=np.concatenate([rows[:-1], joins, rows[-1:]]))
    return made, inserted


def _last_stream(rows: Int64Array, otherwise: int) -> int:
    streams = rows[:, 3]
    used = np.flatnonzero(streams)
    return int(streams[used[-1]]) if used.size else otherwise
