"""Compiled loops that call the driver, without the interpreter between two calls: copies, or calls given as rows."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvplan.plan.jit import compiled as _compiled

WORD, CODE = ir.IntType(64), ir.IntType(32)

# A call as a row: which, one operand or two, its stream. A launch has its header's address; a record and a wait their
# event; a copy its column of the descriptors; a batch its first, and the one behind its last. APART stands for a batch
# that cannot be one call: the caller of issue() splits the rows there. The loop that writes rows is in this file, too:
# numba keeps compiled code, with these numbers in it, until the file changes.
RECORD: Final = 0
WAIT: Final = 1
LAUNCH: Final = 2
COPY: Final = 3
BATCH: Final = 4
APART: Final = 5
NAMES = ("cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernelEx", "cuMemcpyAsync", "cuMemcpyBatchAsync")
STREAM_WORD: Final = 4  # of a CUlaunchConfig


@intrinsic
def _call(typingctx: Any, entry: Any, arguments: Any) -> Any:
    """``entry(*arguments)`` of a C function at an address, which returns an int; a tuple of int64."""
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
    """One call for each descriptor, until one fails.

    Args:
        entry: address of ``int (*)(uint64 dst, uint64 src, size_t nbytes, void *stream)``, which is cuMemcpyAsync.
        dst, src, size: (n,) int64.
        stream: its handle.

    Returns:
        The index of the call that failed, and its code; n and 0 where all succeeded.
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
    """Write down the calls that send chunks through the ring: one stream fills a slot, another empties it.

    Args:
        load: whether the host is the source; its first chunk then brings along what the kernels read.
        edges: (chunks + 1,) where the extents of each chunk begin.
        most: extents of one batch; chunks of more are put down as :data:`APART`.
        first_slot: where the first chunk goes.
        busy: (slots,) whether something in flight still uses the slot; from ``first_slot`` on, in the chunks' order.
        filled, freed: (slots,) the events behind what was last put in a slot, and behind what last took it out.
        copy, kernel, other: streams of the copy engine, of the kernels, and of every other chunk's kernel.
        fork: an event, where ``other`` is to begin behind what ``kernel`` has been given; 0 where it need not.
        header, step: address of the first chunk's launch, and bytes to the next one's.
        rows: (7 * chunks + 4, 4) int64, written.

    Returns:
        How many rows there are, and how many of them are APART.
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
                if load and chunk == 0:  # behind the copies, so that they begin sooner
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
    """Calls one after another, until one fails.

    Args:
        entries: (5,) int64: addresses of the functions :data:`NAMES`.
        rows: (n, 4) int64: the calls.
        columns: (3, m) int64: source, destination and bytes of the descriptors that they copy.
        function: of the launches, which take the address of a header and two null pointers.
        config: (7,) int64: their CUlaunchConfig; the stream is filled in.
        attributes, first: addresses of a CUmemcpyAttributes, and of the number 0: it holds from the first copy on.

    Returns:
        The row that failed, its code, and the descriptor of its batch that the driver names, or -1; n, 0 and -1 where
        all succeeded.
    """
    config = config.copy()
    cell = np.zeros(6, dtype=np.int64)  # three arguments, and where they are
    for k in range(3):  # as one expression of arrays, it would take numba two seconds to compile
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


def load() -> None:
    """Compile all loops, or load them from numba's cache, for the arrays that they are given; calls nothing."""
    empty, slot = np.empty(0, np.int64), np.zeros(1, np.int64)
    rows, columns = np.empty((4, 4), np.int64), np.empty((3, 0), np.int64)
    copy_each(0, empty, empty, empty, 0)
    schedule(True, slot, 1, 0, np.zeros(1, np.bool_), slot, slot, 0, 0, 0, 0, 0, 0, rows)  # noqa: FBT003  # of no chunks
    issue(np.zeros(5, np.int64), rows[:0], columns, 0, np.zeros(7, np.int64), 0, 0)
