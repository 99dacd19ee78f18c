"""The driver's calls in compiled loops, without the interpreter between them: copies, or calls written down as rows."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvplan.jit import compiled as _compiled

WORD, CODE = ir.IntType(64), ir.IntType(32)

# A call as a row: which, one operand or two, its stream. A launch has its header's address; a record and a wait their
# event; a copy its column of the descriptors; a batch its first, and the one behind its last. APART stands for a batch
# that cannot be one call: whoever issues the rows sees to it.
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
        The index of the call that failed, and what it returned; n and 0 where none did.
    """
    for k in range(size.size):
        code = _call(entry, (dst[k], src[k], size[k], stream))
        if code:
            return k, code
    return size.size, 0


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
        The row that failed, what it returned, and the descriptor of its batch that the driver names, or -1; n, 0 and -1
        where none did.
    """
    config = config.copy()
    cell = np.zeros(6, dtype=np.int64)  # three arguments, and where they are
    cell[3:] = cell.ctypes.data + 8 * np.arange(3)
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
