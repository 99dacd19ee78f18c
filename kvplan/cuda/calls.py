"""Compiled loops that call the driver without the Python interpreter: they make calls that are listed as rows."""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import carray, typeof  # type: ignore[attr-defined]  # the stubs lack carray

from kvplan.cuda import short_calls
from kvplan.cuda.intrinsics import call_c, observe, pointer, publish
from kvplan.plan.jit import brief as _brief
from kvplan.plan.jit import compiled as _compiled

# A row has four words: the kind of call, two operands, the stream. The operands: for a record, a wait, or a
# synchronization, the event; for a launch, the address of the header and the index of the launch; for a copy, the index
# of the descriptor; for a batch, the index of its first descriptor and the index after its last; for a 2-D copy, the
# index of its parameters; for an await, the address of another list's state, and the rows that must have been played.
# APART is a batch that cannot be one call: a CallList replaces it. schedule() must be in this file: numba keeps
# compiled code, with these numbers, until the file changes.
RECORD: Final = 0
WAIT: Final = 1
LAUNCH: Final = 2
COPY: Final = 3
BATCH: Final = 4
COPY_2D: Final = 5
SYNC: Final = 6
AWAIT: Final = 7
APART: Final = 8
NAMES = (
    "cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernelEx", "cuMemcpyAsync", "cuMemcpyBatchAsync",
    "cuMemcpy2DAsync_v2", "cuEventQuery",
)  # fmt: skip
NAP: Final = 7  # index of usleep, behind the entry points of NAMES
STREAM_WORD: Final = 4  # index of the stream in a CUlaunchConfig
INVALID: Final = 1  # CUDA_ERROR_INVALID_VALUE: of a 2-D copy, rows of several allocations
NOT_READY: Final = 600  # CUDA_ERROR_NOT_READY: the event has not passed
NAP_MICROSECONDS: Final = 20

# The state of a list of calls, one word each. Another thread reads it while the calls are made.
PLAYED: Final = 0  # rows whose calls have been made
FAILED: Final = 1  # the driver's code of the call that failed; 0 if no call has failed
FAILED_ROW: Final = 2  # the row of that call
FAILED_COPY: Final = 3  # the descriptor that the failed batch names; -1 if it names no descriptor
# 1 after the last row. After a row that failed, Python sets it, once it has recorded the transfer's end behind the
# calls that were made. Until then no later list of the queue is played.
ENDED: Final = 4
ADDED: Final = 5  # calls made beyond the rows: a 2-D copy may need a call for each of its rows
# Rows that somebody waits for. A synchronization before them that names a stream does not nap: the stream waits.
HURRIED: Final = 6
STATE_WORDS: Final = 8

# More rows than any list has. An await of LAST_ROW waits for the end of the other list. An await of one row more also
# fails if that list has failed.
LAST_ROW: Final = 1 << 62

# A slot of an issuer's queue: the address and the length of a table of segments, and the address of the list's state. A
# slot whose table is at address 0 ends the thread. A row of the table: addresses and numbers of rows, columns, launches
# and boxes.
TABLE: Final = 0
SEGMENTS: Final = 1
STATE: Final = 2
SLOT_WORDS: Final = 4
ROWS: Final = 0
COLUMNS: Final = 2
LAUNCHES: Final = 4
BOXES: Final = 6
SEGMENT_WORDS: Final = 8


@_compiled
def _put(rows, at, call, one, end, stream):
    rows[at, 0], rows[at, 1], rows[at, 2], rows[at, 3] = call, one, end, stream
    return at + 1


@_brief
def schedule(load, edges, most, first_slot, busy, filled, freed, copy, kernel, other, fork, header, step, late, rows):
    """List the calls that move chunks through the ring: one stream fills a slot, and another stream empties it.

    Args:
        load: whether the host is the source; then the first chunk also copies headers and unit addresses to the GPU.
        edges: (chunks + 1,) index of the first extent of each chunk.
        most: most extents per batch; 0 if they cannot be batches: then each chunk becomes an :data:`APART` row.
        first_slot: slot of the first chunk.
        busy: (slots,) whether a transfer in flight still uses the slot; from ``first_slot`` on, in the chunks' order.
        filled, freed: (slots,) for each slot, the event after its last write, and after its last read.
        copy, kernel, other: streams: for copies, for kernels, and for the kernels of every second chunk.
        fork: event after which ``other`` begins, recorded on ``kernel``; 0 if ``other`` need not wait.
        header, step: address of the first chunk's launch header, and bytes from one header to the next.
        late: whether the player of the list waits for slots in place of the streams of kernels, so that no kernel is in
            the GPU's queue before it can run. The copies of two more chunks are ahead of a load's kernel.
        rows: (n, 4) int64, written. Room for 7 rows for each chunk, one for each ``most`` extents and 4 more is enough.

    Returns:
        The number of rows, and of those that copy extents.
    """
    slots, chunks, at, copies = filled.size, edges.size - 1, 0, 0
    wait, behind = SYNC if late else WAIT, min(2, slots - 1) if late and load else 0
    for turn in range(chunks + behind):
        for filling in (True, False):
            chunk = turn if filling else turn - behind
            if not 0 <= chunk < chunks:
                continue
            slot, copying = (first_slot + chunk) % slots, filling == load
            before, after = (freed[slot], filled[slot]) if filling else (filled[slot], freed[slot])
            stream = copy if copying else other if chunk % 2 else kernel
            if not copying and chunk == 0 and fork:
                at = _put(rows, at, RECORD, fork, 0, kernel)
                at = _put(rows, at, WAIT, fork, 0, other)
            if not filling or chunk >= slots or busy[chunk]:
                at = _put(rows, at, WAIT if copying else wait, before, 0, stream)
            if copying:
                first, last = edges[chunk], edges[chunk + 1]
                size = most or last - first
                for begin in range(first, last, size):
                    at = _put(rows, at, BATCH if most else APART, begin, min(begin + size, last), copy)
                    copies += 1
                if load and chunk == 0:  # after the extents, so that their copies begin sooner
                    at = _put(rows, at, COPY, 0, 0, copy)
            else:
                at = _put(rows, at, LAUNCH, header + step * chunk, 0, stream)
            at = _put(rows, at, RECORD, after, 0, stream)
    if other != kernel:  # behind the last chunk of the other stream
        last = chunks - 1 if chunks % 2 == 0 else chunks - 2
        at = _put(rows, at, WAIT, freed[(first_slot + last) % slots], 0, kernel)
    return at, copies


@_compiled
def _play(entries, rows, columns, launches, boxes, attributes, first, state, base):
    """Make the calls of the rows; see :func:`play`."""
    cell = np.zeros(13, dtype=np.int64)  # three arguments, their addresses, and a CUlaunchConfig
    arguments = cell.ctypes.data + 24
    config = cell.ctypes.data + 48
    for k in range(3):  # an array expression would take numba two seconds to compile
        cell[3 + k] = cell.ctypes.data + 8 * k
    failed = np.zeros(1, dtype=np.int64)
    src, dst, size = columns[0].ctypes.data, columns[1].ctypes.data, columns[2].ctypes.data
    for k in range(rows.shape[0]):
        which, one, end, stream = rows[k, 0], rows[k, 1], rows[k, 2], rows[k, 3]
        failed[0] = -1
        code = 0
        if which == RECORD:
            code = call_c(entries[RECORD], (one, stream))
        elif which == WAIT:
            code = call_c(entries[WAIT], (stream, one, 0))
        elif which == LAUNCH:
            cell[0] = one
            for word in range(7):
                cell[6 + word] = launches[end, 1 + word]
            cell[6 + STREAM_WORD] = stream
            code = call_c(entries[LAUNCH], (config, launches[end, 0], arguments, 0))
        elif which == COPY:
            code = call_c(entries[COPY], (columns[1, one], columns[0, one], columns[2, one], stream))
        elif which == BATCH:
            at, count = 8 * one, end - one
            code = call_c(
                entries[BATCH],
                (dst + at, src + at, size + at, count, attributes, first, 1, failed.ctypes.data, stream),
            )
            if failed[0] >= count:
                failed[0] = -1
        elif which == COPY_2D:
            code = call_c(entries[COPY_2D], (boxes.ctypes.data + 128 * one, stream))
            if code == INVALID:  # nothing was issued, so each row gets a copy
                code, height = 0, boxes[one, 15]
                for line in range(height):
                    if not code:
                        there, here = boxes[one, 11] + line * boxes[one, 13], boxes[one, 4] + line * boxes[one, 6]
                        code = call_c(entries[COPY], (there, here, boxes[one, 14], stream))
                publish(state + 8 * ADDED, observe(state + 8 * ADDED) + height - 1)
        elif which == SYNC:  # cuEventSynchronize would keep a core busy for as long as the copies take
            code = call_c(entries[SYNC], (one,))
            while code == NOT_READY:
                if stream and observe(state + 8 * HURRIED) > base + k:
                    code = call_c(entries[WAIT], (stream, one, 0))
                else:
                    call_c(entries[NAP], (NAP_MICROSECONDS,))
                    code = call_c(entries[SYNC], (one,))
        else:
            while observe(one + 8 * PLAYED) < end and not observe(one + 8 * ENDED):
                if observe(one + 8 * HURRIED) < end:
                    publish(one + 8 * HURRIED, end)
                call_c(entries[NAP], (NAP_MICROSECONDS,))
            if end > LAST_ROW:
                code = observe(one + 8 * FAILED)
        if code:
            publish(state + 8 * FAILED_ROW, base + k)
            publish(state + 8 * FAILED_COPY, one + failed[0] if failed[0] >= 0 else -1)
            publish(state + 8 * FAILED, code)
            return False
        publish(state + 8 * PLAYED, base + k + 1)
    return True


@_brief
def play(entries, rows, columns, launches, boxes, attributes, first, state, base):
    """Make the calls of a few rows in order, until a call fails, and tell the progress in ``state``.

    The calling thread keeps the interpreter.

    Args:
        entries: (9,) int64: addresses of the functions :data:`NAMES`, of usleep, and of cuStreamWriteValue64.
        rows: (n, 4) int64: the calls.
        columns: (3, m) int64: source, destination and bytes of the descriptors that the calls copy.
        launches: (k, 8) int64: function and CUlaunchConfig of each launch; the loop fills in the stream. A kernel gets
            the address of a header and two null pointers.
        boxes: (b, 16) int64: a CUDA_MEMCPY2D for each 2-D copy.
        attributes, first: address of a CUmemcpyAttributes, and of the index of the first copy that it is for: 0.
        state: address of the list's state, :data:`STATE_WORDS` words.
        base: rows of the list that are before these rows.

    Returns:
        Whether all calls have succeeded. If not, the state has the code, the row, and a batch's descriptor.
    """
    return _play(entries, rows, columns, launches, boxes, attributes, first, state, base)


@_compiled
def serve(entries, attributes, first, queue, taken, semaphore, wait):
    """Play the lists of a queue in order, until the slot that ends the thread.

    Args:
        entries, attributes, first: see :func:`play`.
        queue: (slots, 4) int64: the lists, one per slot; slots are used in turn.
        taken: address of the number of lists that have been played.
        semaphore: address of a semaphore that counts the lists in the queue.
        wait: address of sem_wait.
    """
    number = 0
    while True:
        if call_c(wait, (semaphore,)):
            continue  # a signal
        slot = queue[number % queue.shape[0]]
        if not slot[TABLE]:
            return
        state, base, played = slot[STATE], 0, True
        table = carray(pointer(slot[TABLE]), (slot[SEGMENTS], SEGMENT_WORDS), np.int64)
        for k in range(slot[SEGMENTS]):
            if played:
                at = table[k]
                rows = carray(pointer(at[ROWS]), (at[ROWS + 1], 4), np.int64)
                columns = carray(pointer(at[COLUMNS]), (3, at[COLUMNS + 1]), np.int64)
                launches = carray(pointer(at[LAUNCHES]), (at[LAUNCHES + 1], 8), np.int64)
                boxes = carray(pointer(at[BOXES]), (at[BOXES + 1], 16), np.int64)
                played = _play(entries, rows, columns, launches, boxes, attributes, first, state, base)
                base += at[ROWS + 1]
        if played:
            publish(state + 8 * ENDED, 1)
        while not observe(state + 8 * ENDED):
            call_c(entries[NAP], (NAP_MICROSECONDS,))
        number += 1
        publish(taken, number)


@_compiled
def watch(state, rows, hurry, nap, naps):
    """Wait until rows of a list have been played, or it has ended or failed, for at most ``naps`` naps.

    Args:
        state: address of the list's state.
        rows: the number of rows.
        hurry: whether these rows are played without waiting for the GPU.
        nap: address of usleep.
        naps: number of naps.

    Returns:
        Whether the wait is over.
    """
    for _ in range(naps):
        if observe(state + 8 * PLAYED) >= rows or observe(state + 8 * ENDED) or observe(state + 8 * FAILED):
            return True
        if hurry and observe(state + 8 * HURRIED) < rows:
            publish(state + 8 * HURRIED, rows)
        call_c(nap, (NAP_MICROSECONDS,))
    return False


def load() -> None:
    """Compile all loops for the types of their arguments, or load them from numba's cache; make no driver call."""
    slot = np.zeros(1, np.int64)
    rows, columns = np.empty((4, 4), np.int64), np.empty((3, 0), np.int64)
    schedule(True, slot, 1, 0, np.zeros(1, np.bool_), slot, slot, 0, 0, 0, 0, 0, 0, False, rows)  # noqa: FBT003  # of no chunks
    state = np.zeros(STATE_WORDS, np.int64)
    launches, boxes = np.empty((0, 8), np.int64), np.empty((0, 16), np.int64)
    play(np.zeros(9, np.int64), rows[:0], columns, launches, boxes, 0, 0, state.ctypes.data, 0)
    state[ENDED] = 1
    watch(state.ctypes.data, 1, True, 0, 1)  # noqa: FBT003
    serve.compile(tuple(typeof(one) for one in (state, 0, 0, np.zeros((1, SLOT_WORDS), np.int64), 0, 0, 0)))
    short_calls.load()
