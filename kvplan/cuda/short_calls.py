"""Compiled loops of a few microseconds, each for one submit: a launch with its events, and words behind a transfer.

They call the driver and keep the interpreter.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]  # the stubs lack carray

from kvplan.cuda.intrinsics import call_c, pointer
from kvplan.plan.jit import brief as _brief

# Indexes of the addresses in Device.entries, as in kvplan.cuda.calls. They must be in this file: numba keeps compiled
# code, with these numbers, until the file changes.
RECORD: Final = 0
WAIT: Final = 1
LAUNCH: Final = 2
COPY: Final = 3
WRITE: Final = 8  # index of cuStreamWriteValue64
STREAM_WORD: Final = 4  # index of the stream in a CUlaunchConfig


@_brief
def write_units(words, base, at, first, units, table):
    """Write the header of a launch, and its units.

    Args:
        words: memory of the slot, int64.
        base: address at which the kernel reads the first byte of the slot.
        at: index of the header's first word in the slot.
        first: index of the units' first word in the slot.
        units: (2, n) int64: source and destination addresses.
        table: header words of the run table; the number of units and their addresses replace three of them.
    """
    count = units.shape[1]
    for k in range(table.size):
        words[at + k] = table[k]
    words[at], words[at + 3], words[at + 4] = count, base + 8 * first, base + 8 * (first + count)
    for side in range(2):
        for k in range(count):
            words[first + side * count + k] = units[side, k]


@_brief
def launch_recorded(entries, begin, end, function, programs, threads, shared, stream, argument, source, nbytes):
    """Record an event, make a copy if it has bytes, launch a kernel, record a second event; until a call fails.

    Args:
        entries: (9,) int64: addresses of the functions :data:`kvplan.cuda.calls.NAMES`, of usleep, and of
            cuStreamWriteValue64.
        begin, end: the first and the second event.
        function: kernel that is launched, with ``argument`` and two null pointers as arguments.
        programs, threads, shared: number of programs; threads, and bytes of shared memory, of each program.
        stream: handle of the stream.
        argument: address of the header.
        source, nbytes: address and number of the bytes that are copied to ``argument``.

    Returns:
        The index in :data:`kvplan.cuda.calls.NAMES` of the last call that was made, and its code.
    """
    code = call_c(entries[RECORD], (begin, stream))
    if code:
        return RECORD, code
    if nbytes:
        code = call_c(entries[COPY], (argument, source, nbytes, stream))
        if code:
            return COPY, code
    words = np.empty(13, dtype=np.int64)  # a CUlaunchConfig, three arguments, and their addresses
    upper = 1 << 32  # the second of the two 32-bit numbers in a word
    words[0], words[1], words[2], words[3] = programs + upper, 1 + threads * upper, 1 + upper, shared
    words[STREAM_WORD], words[5], words[6] = stream, 0, 0
    words[7], words[8], words[9] = argument, 0, 0
    at = words.ctypes.data
    words[10], words[11], words[12] = at + 56, at + 64, at + 72
    code = call_c(entries[LAUNCH], (at, function, at + 80, 0))
    words[0] = code  # numba may free an array after its last use, and the call has only its address
    if code:
        return LAUNCH, code
    return RECORD, call_c(entries[RECORD], (end, stream))


@_brief
def write_behind(entries, event, stream, addresses, values):
    """Let a stream wait for an event, then write words; until a call fails.

    Args:
        entries: (9,) int64: addresses of the functions :data:`kvplan.cuda.calls.NAMES`, of usleep, and of
            cuStreamWriteValue64.
        event: the event; 0 for none.
        stream: handle of the stream.
        addresses, values: tuples of one length: the address and the new value of each word.

    Returns:
        The index in ``entries`` of the last call that was made, and its code.
    """
    if event:
        code = call_c(entries[WAIT], (stream, event, 0))
        if code:
            return WAIT, code
    for k in range(len(addresses)):
        code = call_c(entries[WRITE], (stream, addresses[k], values[k], 0))
        if code:
            return WRITE, code
    return WRITE, 0


@_brief
def launch_units(
    entries, begin, end, function, programs, threads, shared, stream, argument, source, nbytes, units, table
):  # fmt: skip
    """Write the header of a launch and its units to ``source``, then do as :func:`launch_recorded`.

    Args:
        source: address of pinned memory; the kernel reads it in place if ``argument`` is the same address.
        units, table: as in :func:`write_units`.
    """
    words = carray(pointer(source), table.size + 2 * units.shape[1], np.int64)
    write_units(words, argument, 0, table.size, units, table)
    return launch_recorded(entries, begin, end, function, programs, threads, shared, stream, argument, source, nbytes)


def load() -> None:
    """Compile the loops for the types of their arguments, or load them from numba's cache; make no driver call."""
    row, table, number = types.int64[::1], types.int64[:, ::1], types.int64
    write_units.compile((row, *[number] * 3, table, row))
    launch_recorded.compile((row, *[number] * 10))
    launch_units.compile((row, *[number] * 10, table, row))
    for count in (1, 2):
        pairs = types.UniTuple(number, count)
        write_behind.compile((row, number, number, pairs, pairs))
