"""The player: compiled loops that make the driver calls of rows (:mod:`kvplan.cuda.rows`) without the interpreter.

The plain functions behind them, such as ``play.py_func``, do the same in Python.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]  # the stubs lack carray
from numba.extending import intrinsic, overload

from kvplan.cuda.rows import BATCH, BOX, COPY, LAST_ROW, LAUNCH, RECORD, SYNC, WAIT, WORDS
from kvplan.plan.jit import brief as _brief
from kvplan.plan.jit import compiled as _compiled

# Words of a list's state (kvplan.cuda.rows), as offsets in bytes.
PLAYED: Final = 0
FAILED: Final = 8
FAILED_COPY: Final = 16
ENDED: Final = 24
ADDED: Final = 32
HURRIED: Final = 40
# Behind the functions of the kinds of rows: usleep, sem_wait, a CUmemcpyAttributes, and a 0, the first copy it is for.
NAP: Final = 7
SLEEP: Final = 8
ATTRIBUTES: Final = 9
FIRST: Final = 10
INVALID: Final = 1  # CUDA_ERROR_INVALID_VALUE: of a 2-D copy, rows of several allocations
NOT_READY: Final = 600  # CUDA_ERROR_NOT_READY: the event has not passed
NAP_MICROSECONDS: Final = 20
# The driver's queue of a stream holds about 1,000 calls. If it is full, a call waits for the GPU and holds the driver's
# lock, so the calls of all other threads wait, too. Between two events of an issuer are so many calls.
PACE: Final = 256


# ---- what numba has no function for: calls of C functions by address, and words that two threads share ----

WORD, CODE = ir.IntType(64), ir.IntType(32)


def call_c(entry: int, arguments: tuple[int, ...]) -> int:
    """Call the C function at the address ``entry``, which returns an int, with int64 arguments."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * len(arguments))
    return int(kind(int(entry))(*map(int, arguments)))


def observe(address: int) -> int:
    """Read a word that another thread writes: before all later reads."""
    return ctypes.c_int64.from_address(int(address)).value


def publish(address: int, value: int) -> None:
    """Write a word that another thread reads: after all earlier writes."""
    ctypes.c_int64.from_address(int(address)).value = int(value)


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """Make a pointer of an address, for ``numba.carray``."""
    del typingctx, address

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        del context, signature
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def _call_c(typingctx: Any, entry: Any, arguments: Any) -> Any:
    del typingctx, entry
    count = len(arguments)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        del context, signature
        kind = ir.FunctionType(CODE, [WORD] * count)
        given = [builder.extract_value(values[1], k) for k in range(count)]
        return builder.call(builder.inttoptr(values[0], kind.as_pointer()), given)

    return types.int32(types.int64, types.UniTuple(types.int64, count)), generate


@intrinsic
def _observe(typingctx: Any, address: Any) -> Any:
    del typingctx, address

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        del context, signature
        return builder.load_atomic(builder.inttoptr(values[0], WORD.as_pointer()), ordering="acquire", align=8)

    return types.int64(types.int64), generate


@intrinsic
def _publish(typingctx: Any, address: Any, value: Any) -> Any:
    del typingctx, address, value

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        del context, signature
        builder.store_atomic(values[1], builder.inttoptr(values[0], WORD.as_pointer()), ordering="release", align=8)

    return types.void(types.int64, types.int64), generate


@overload(call_c)
def _compiled_call_c(entry: Any, arguments: Any) -> Any:
    del entry, arguments

    def call(entry: Any, arguments: Any) -> Any:
        return _call_c(entry, arguments)

    return call


@overload(observe)
def _compiled_observe(address: Any) -> Any:
    del address

    def read(address: Any) -> Any:
        return _observe(address)

    return read


@overload(publish)
def _compiled_publish(address: Any, value: Any) -> Any:
    del address, value

    def write(address: Any, value: Any) -> Any:
        return _publish(address, value)

    return write


# ---- loops ----


@_compiled
def _step(entries, rows, k, state, cell):
    """Make the call of one row; return its code. NOT_READY: it is to be made again later."""
    kind, stream, one = rows[k, 0], rows[k, 1], rows[k, 2]
    if kind == RECORD:
        return call_c(entries[RECORD], (one, stream))
    if kind == WAIT:
        return call_c(entries[WAIT], (stream, one, 0))
    if kind == LAUNCH:  # three arguments, their addresses, and a CUlaunchConfig
        at, upper = cell.ctypes.data, 1 << 32
        cell[0], cell[1], cell[2] = one, 0, 0
        cell[3], cell[4], cell[5] = at, at + 8, at + 16
        cell[6], cell[7], cell[8] = rows[k, 4] + upper, 1 + rows[k, 5] * upper, 1 + upper
        cell[9], cell[10], cell[11], cell[12] = rows[k, 6], stream, 0, 0
        return call_c(entries[LAUNCH], (at + 48, rows[k, 3], at + 24, 0))
    if kind == COPY:
        return call_c(entries[COPY], (one, rows[k, 3], rows[k, 4], stream))
    if kind == BATCH:
        return _batch(entries, rows, k, state, cell)
    if kind == BOX:
        return _box(entries, one, stream, state)
    if kind == SYNC:  # cuEventSynchronize would keep a core busy for as long as the copies take
        code = call_c(entries[SYNC], (one,))
        if code == NOT_READY and stream and observe(state + HURRIED) > k:
            code = call_c(entries[WAIT], (stream, one, 0))
        return code
    if not observe(one + ENDED):
        publish(one + HURRIED, LAST_ROW)
        return np.int32(NOT_READY)
    return np.int32(observe(one + FAILED) if rows[k, 3] else 0)


@_compiled
def _batch(entries, rows, k, state, cell):
    count, failed = rows[k, 5], cell.ctypes.data + 8 * 13
    cell[13] = -1
    arguments = (rows[k, 2], rows[k, 3], rows[k, 4], count, entries[ATTRIBUTES], entries[FIRST], 1, failed, rows[k, 1])
    code = call_c(entries[BATCH], arguments)
    if code:
        at = observe(failed)
        publish(state + FAILED_COPY, at if 0 <= at < count else -1)
    return code


@_compiled
def _box(entries, parameters, stream, state):
    code = call_c(entries[BOX], (parameters, stream))
    if code != INVALID:
        return code
    src, dst, width = observe(parameters + 32), observe(parameters + 88), observe(parameters + 112)
    src_pitch, dst_pitch, height = observe(parameters + 48), observe(parameters + 104), observe(parameters + 120)
    for row in range(height):  # nothing was issued, so each row gets a copy
        code = call_c(entries[COPY], (dst + row * dst_pitch, src + row * src_pitch, width, stream))
        if code:
            return code
    publish(state + ADDED, observe(state + ADDED) + height - 1)
    return code


@_brief
def play(entries, rows, state):
    """Make the calls of a few rows in order, until a call fails. The calling thread keeps the interpreter.

    Args:
        entries: (11,) int64: addresses of the functions of :data:`kvplan.cuda.rows.NAMES`, of usleep and of sem_wait,
            and of the attributes of batched copies, and of a 0.
        rows: (n, 8) int64: the calls.
        state: (6,) int64: the list's state, written.
    """
    cell, at = np.empty(14, dtype=np.int64), state.ctypes.data
    for k in range(rows.shape[0]):
        code = _step(entries, rows, k, at, cell)
        while code == NOT_READY:
            call_c(entries[NAP], (NAP_MICROSECONDS,))
            code = _step(entries, rows, k, at, cell)
        if code:
            publish(at + FAILED, code)
            return
        publish(at + PLAYED, k + 1)
    publish(at + ENDED, 1)


@_compiled
def serve(entries, queue, paces, control, semaphore):
    """Play the lists of two queues, each in order; those of queue 1 first. Return when told to stop and none is left.

    If a call of a list fails, no later list of its queue is played before Python has set ENDED in the list's state.

    Args:
        entries: see :func:`play`.
        queue: (2, slots, 3) int64: address and number of rows, and address of the state, of each list. Slots are used
            in turn; the loop writes address 0 when a list has ended.
        paces: (2, 2) int64: two events for each queue.
        control: (1,) int64: 1 when the thread shall stop.
        semaphore: address of a semaphore that is posted for each list, and for the stop.
    """
    cell, slots = np.empty(14, dtype=np.int64), queue.shape[1]
    row, number = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64)
    calls, recorded = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64)
    while True:
        busy = moved = False
        for turn in range(2):
            which = 1 - turn
            slot = queue[which, number[which] % slots]
            at = slot.ctypes.data
            if not observe(at):
                continue
            busy, state, count = True, slot[2], slot[1]
            if observe(state + FAILED):
                if not observe(state + ENDED):
                    continue
            else:
                # Of the two events, the one recorded first must have passed before more calls are made.
                if (
                    calls[which] == 0
                    and recorded[which] > 1
                    and (call_c(entries[SYNC], (paces[which, recorded[which] % 2],)) == NOT_READY)
                ):
                    continue
                rows = carray(pointer(observe(at)), (count, WORDS), np.int64)
                code = _step(entries, rows, row[which], state, cell)
                if code == NOT_READY:
                    continue
                moved = True
                if code:
                    publish(state + FAILED, code)
                    continue
                calls[which] += 1
                last = row[which] + 1 == count  # nothing is to be pending behind a transfer's end
                if calls[which] >= PACE and rows[row[which], 1] and not last:
                    call_c(entries[RECORD], (paces[which, recorded[which] % 2], rows[row[which], 1]))
                    recorded[which] += 1
                    calls[which] = 0
                row[which] += 1
                publish(state + PLAYED, row[which])
                if row[which] < count:
                    break
                publish(state + ENDED, 1)
            publish(at, 0)
            number[which] += 1
            row[which], moved = 0, True
            break
        if not busy:
            if observe(control.ctypes.data):
                return
            call_c(entries[SLEEP], (semaphore,))
        elif not moved:
            call_c(entries[NAP], (NAP_MICROSECONDS,))


@_compiled
def watch(entries, state, rows, naps, hurry):
    """Wait until rows of a list have been played, or it has ended or failed; return whether that is so.

    Args:
        entries: see :func:`play`.
        state: (6,) int64: the list's state.
        rows: the number of rows.
        naps: most naps of 20 us.
        hurry: whether these rows shall be played without waiting for the GPU.
    """
    at = state.ctypes.data
    for _ in range(naps):
        if observe(at + PLAYED) >= rows or observe(at + ENDED) or observe(at + FAILED):
            return True
        if hurry and observe(at + HURRIED) < rows:
            publish(at + HURRIED, rows)
        call_c(entries[NAP], (NAP_MICROSECONDS,))
    return False


def load() -> None:
    """Compile all loops for the types of their arguments, or load them from numba's cache; make no driver call."""
    number = types.int64
    row, rows, queue = (types.Array(number, count, "C") for count in (1, 2, 3))
    play.compile((row, rows, row))
    serve.compile((row, queue, rows, row, number))
    watch.compile((row, row, number, number, types.boolean))
