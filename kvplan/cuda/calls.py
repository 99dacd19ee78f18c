"""Compiled loops that call the driver without the Python interpreter: for copies, and for calls listed as rows."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvplan.plan.jit import compiled as _compiled

WORD, CODE = ir.IntType(64), ir.IntType(32)

# A row has four words: the kind of call, two operands, the stream. The operands: for a record or a wait, the event; for
# a launch, the address of the header; for a copy, the index of the descriptor; for a batch, the index of its first
# descriptor and the index after its last. APART is a batch that cannot be one call: the caller of issue() splits the
# rows there. schedule() must be in this file: numba keeps compiled code, with these numbers, until the file changes.
RECORD: Final = 0
WAIT: Final = 1
LAUNCH: Final = 2
COPY: Final = 3
BATCH: Final = 4
APART: Final = 5
NAMES = ("cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernelEx", "cuMemcpyAsync", "cuMemcpyBatchAsync")
STREAM_WORD: Final = 4  # index of the stream in a CUlaunchConfig


@intrinsic
def _call(typingctx: Any, entry: Any, arguments: Any) -> Any:
    """Call the C function at the address ``entry``, which returns an int, with a tuple of int64 arguments."""
    del typingctx, entry
    count = len(arguments)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        del context, signature
        kind = ir.FunctionType(CODE, [WORD] * count)
        given = [builder.extract_value(values[1], k) for k in range(count)]
        return builder.call(builder.inttoptr(values[0], kind.as_pointer()), given)

    return types.int32(types.int64, types.UniTuple(types.int64, count)), generate


@_compiled
def copy_each(entry, dst, src, size, stream):
    """Make one call for each descriptor, until a call fails.

    Args:
        entry: address of cuMemcpyAsync: ``int (*)(uint64 dst, uint64 src, size_t nbytes, void *stream)``.
        dst, src, size: (n,) int64: destination, source and bytes of each descriptor.
        stream: handle of the stream.

    Returns:
        The index of the call that failed, and its code; n and 0 if all calls succeeded.
    """
    for k in range(size.size):
        code = _call(entry, (dst[k], src[k], size[k], stream))
        if code:
            return k, code
    return size.size, 0


@_compiled
def _put(rows, at, call, one, end, stream):
    rows[at, 0], rows[at, 1], rows[at, 2], rows[at, 3] = call, one, end, stream
    return at + 1


@_compiled
def schedule(load, edges, most, first_slot, busy, filled, freed, copy, kernel, other, fork, header, step, rows):
    """List the calls that move chunks through the ring: one stream fills a slot, and another stream empties it.

    Args:
        load: whether the host is the source; then the first chunk also copies headers and unit addresses to the GPU.
        edges: (chunks + 1,) index of the first extent of each chunk.
        most: most extents per batch; a chunk with more extents becomes an :data:`APART` row.
        first_slot: slot of the first chunk.
        busy: (slots,) whether a transfer in flight still uses the slot; from ``first_slot`` on, in the chunks' order.
        filled, freed: (slots,) for each slot, the event after its last write, and after its last read.
        copy, kernel, other: streams: for copies, for kernels, and for the kernels of every second chunk.
        fork: event after which ``other`` begins, recorded on ``kernel``; 0 if ``other`` need not wait.
        header, step: address of the first chunk's launch header, and bytes from one header to the next.
        rows: (7 * chunks + 4, 4) int64, written.

    Returns:
        The number of rows, and the number of rows that are APART.
    """
    slots, chunks, at, apart = filled.size, edges.size - 1, 0, 0
    for chunk in range(chunks):
        slot, launches = (first_slot + chunk) % slots, other if chunk % 2 else kernel
        if chunk >= slots or busy[chunk]:
            at = _put(rows, at, WAIT, freed[slot], 0, copy if load else launches)
        for copying in (load, not load):
            if copying:
                call = BATCH if edges[chunk + 1] - edges[chunk] <= most else APART
                apart += call == APART
                at = _put(rows, at, call, edges[chunk], edges[chunk + 1], copy)
                if load and chunk == 0:  # after the extents, so that their copies begin sooner
                    at = _put(rows, at, COPY, 0, 0, copy)
            else:
                if chunk == 0 and fork:
                    at = _put(rows, at, RECORD, fork, 0, kernel)
                    at = _put(rows, at, WAIT, fork, 0, other)
                at = _put(rows, at, LAUNCH, header + step * chunk, 0, launches)
            if copying == load:
                at = _put(rows, at, RECORD, filled[slot], 0, copy if load else launches)
                at = _put(rows, at, WAIT, filled[slot], 0, launches if load else copy)
        at = _put(rows, at, RECORD, freed[slot], 0, launches if load else copy)
    if other != kernel:  # behind the last chunk of the other stream
        last = chunks - 1 if chunks % 2 == 0 else chunks - 2
        at = _put(rows, at, WAIT, freed[(first_slot + last) % slots], 0, kernel)
    return at, apart


@_compiled
def issue(entries, rows, columns, function, config, attributes, first):
    """Make the calls of the rows in order, until a call fails.

    Args:
        entries: (5,) int64: addresses of the functions :data:`NAMES`.
        rows: (n, 4) int64: the calls.
        columns: (3, m) int64: source, destination and bytes of the descriptors that the calls copy.
        function: kernel that is launched, with the address of a header and two null pointers as arguments.
        config: (7,) int64: CUlaunchConfig of the launches; the loop fills in the stream.
        attributes, first: address of a CUmemcpyAttributes, and of the index of the first copy that it is for: 0.

    Returns:
        The row that failed, its code, and the descriptor that its batch names, or -1; n, 0 and -1 if all succeeded.
    """
    config = config.copy()
    cell = np.zeros(6, dtype=np.int64)  # three arguments, and their addresses
    for k in range(3):  # an array expression would take numba two seconds to compile
        cell[3 + k] = cell.ctypes.data + 8 * k
    failed = np.zeros(1, dtype=np.int64)
    src, dst, size = columns[0].ctypes.data, columns[1].ctypes.data, columns[2].ctypes.data
    for k in range(rows.shape[0]):
        which, one, end, stream = rows[k, 0], rows[k, 1], rows[k, 2], rows[k, 3]
        failed[0] = -1
        if which == RECORD:
            code = _call(entries[RECORD], (one, stream))
        elif which == WAIT:
            code = _call(entries[WAIT], (stream, one, 0))
        elif which == LAUNCH:
            cell[0], config[STREAM_WORD] = one, stream
            code = _call(entries[LAUNCH], (config.ctypes.data, function, cell.ctypes.data + 24, 0))
        elif which == COPY:
            code = _call(entries[COPY], (columns[1, one], columns[0, one], columns[2, one], stream))
        else:
            at, count = 8 * one, end - one
            code = _call(
                entries[BATCH],
                (dst + at, src + at, size + at, count, attributes, first, 1, failed.ctypes.data, stream),
            )
            if failed[0] >= count:
                failed[0] = -1
        if code:
            return k, code, one + failed[0] if failed[0] >= 0 else -1
    return rows.shape[0], 0, -1


@_compiled
def launch_recorded(entries, begin, end, function, programs, threads, shared, stream, argument, source, nbytes):
    """Record an event, make a copy if it has bytes, launch a kernel, record a second event; until a call fails.

    Args:
        entries: (5,) int64: addresses of the functions :data:`NAMES`.
        begin, end: the first and the second event.
        function: kernel that is launched, with ``argument`` and two null pointers as arguments.
        programs, threads, shared: number of programs; threads, and bytes of shared memory, of each program.
        stream: handle of the stream.
        argument: address of the header.
        source, nbytes: address and number of the bytes that are copied to ``argument``.

    Returns:
        The index in :data:`NAMES` of the last call that was made, and its code.
    """
    code = _call(entries[RECORD], (begin, stream))
    if code:
        return RECORD, code
    if nbytes:
        code = _call(entries[COPY], (argument, source, nbytes, stream))
        if code:
            return COPY, code
    words = np.empty(13, dtype=np.int64)  # a CUlaunchConfig, three arguments, and their addresses
    upper = 1 << 32  # the second of the two 32-bit numbers in a word
    words[0], words[1], words[2], words[3] = programs + upper, 1 + threads * upper, 1 + upper, shared
    words[STREAM_WORD], words[5], words[6] = stream, 0, 0
    words[7], words[8], words[9] = argument, 0, 0
    at = words.ctypes.data
    words[10], words[11], words[12] = at + 56, at + 64, at + 72
    code = _call(entries[LAUNCH], (at, function, at + 80, 0))
    if code:
        return LAUNCH, code
    return RECORD, _call(entries[RECORD], (end, stream))


def load() -> None:
    """Compile all loops for the types of their arguments, or load them from numba's cache; make no driver call."""
    empty, slot = np.empty(0, np.int64), np.zeros(1, np.int64)
    rows, columns = np.empty((4, 4), np.int64), np.empty((3, 0), np.int64)
    copy_each(0, empty, empty, empty, 0)
    schedule(True, slot, 1, 0, np.zeros(1, np.bool_), slot, slot, 0, 0, 0, 0, 0, 0, rows)  # noqa: FBT003  # of no chunks
    issue(np.zeros(5, np.int64), rows[:0], columns, 0, np.zeros(7, np.int64), 0, 0)
    launch_recorded.compile((types.int64[::1], *[types.int64] * 10))  # a call would call the driver
