"""Make the calls of a list one by one in Python: for short processes, in which to load numba would take longer."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int64
from typing import Protocol

import numpy as np

from kvplan.cuda.call_list import (
    ADDED,
    BATCH,
    COPY,
    COPY_2D,
    ENDED,
    FAILED,
    FAILED_COPY,
    FAILED_ROW,
    HURRIED,
    LAST_ROW,
    LAUNCH,
    PLAYED,
    RECORD,
    STATE_WORDS,
    SYNC,
    WAIT,
    Segment,
)
from kvplan.cuda.driver import INVALID_VALUE, SUCCESS, DriverError
from kvplan.layout.strides import Int64Array


class HasCalls(Protocol):
    """The calls of a :class:`~kvplan.cuda.device.Device` that lists consist of."""

    def record(self, event: int, stream: int) -> None:
        """Record an event."""

    def wait(self, stream: int, event: int) -> None:
        """Let a stream wait for an event."""

    def await_event(self, event: int, hurried: Callable[[], bool]) -> bool:
        """Wait for an event, unless someone is in a hurry; return whether it has passed."""

    def launch(self, function: int, programs: int, threads: int, shared: int, stream: int, argument: int) -> None:
        """Launch a kernel."""

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Copy bytes."""

    def copy_batch(self, dst: int, src: int, size: int, count: int, stream: int) -> None:
        """Make independent copies."""

    def copy_2d(self, parameters: int, stream: int) -> int:
        """Make a 2-D copy, and return the driver's code."""

    def watch(self, state: Int64Array, rows: int, *, hurry: bool = True) -> bool:
        """Wait for rows of another list."""


def play_slowly(device: HasCalls, segment: Segment, state: Int64Array, base: int) -> None:
    """Do as the compiled loop :func:`kvplan.cuda.calls.play`, with one call of Python for each row.

    Args:
        device: the GPU.
        segment: the calls.
        state: (8,) int64: the list's state, written.
        base: rows of the list that are before these rows.
    """
    for k, (which, one, end, stream) in enumerate(segment.rows.tolist()):
        try:
            _make(device, segment, state, which, one, end, stream)
        except DriverError as error:
            state[FAILED_ROW], state[FAILED_COPY], state[FAILED] = base + k, -1, error.code
            if which == BATCH and error.at is not None:
                state[FAILED_COPY] = one + error.at
            return
        state[PLAYED] = base + k + 1


def _make(
    device: HasCalls, segment: Segment, state: Int64Array, which: int, one: int, end: int, stream: int
) -> None:  # fmt: skip
    if which == RECORD:
        device.record(one, stream)
    elif which == WAIT:
        device.wait(stream, one)
    elif which == LAUNCH:
        function, programs, threads, _, shared, *_ = segment.launches[end].tolist()
        device.launch(function, programs & 0xFFFFFFFF, threads >> 32, shared, stream, one)
    elif which == COPY:
        src, dst, nbytes = segment.columns[:, one].tolist()
        device.copy(dst, src, nbytes, stream)
    elif which == BATCH:
        src, dst, size = (column.ctypes.data + 8 * one for column in segment.columns)
        device.copy_batch(dst, src, size, end - one, stream)
    elif which == COPY_2D:
        _copy_2d(device, segment, state, one, stream)
    elif which == SYNC:
        if not device.await_event(one, lambda: bool(stream and state[HURRIED] > state[PLAYED])):
            device.wait(stream, one)
    else:
        other = np.frombuffer((c_int64 * STATE_WORDS).from_address(one), np.int64)
        while not (other[ENDED] or other[PLAYED] >= end):  # a list that has failed ends later
            device.watch(other, end)
        if end > LAST_ROW and other[FAILED]:
            raise DriverError("a list that this one awaits has failed", "", int(other[FAILED]))


def _copy_2d(device: HasCalls, segment: Segment, state: Int64Array, one: int, stream: int) -> None:
    code = device.copy_2d(segment.boxes.ctypes.data + 128 * one, stream)
    if code == INVALID_VALUE:  # rows of several allocations: nothing was issued, so each row gets a copy
        src, src_pitch, dst, dst_pitch, width, height = segment.boxes[one, (4, 6, 11, 13, 14, 15)].tolist()
        for line in range(height):
            device.copy(dst + line * dst_pitch, src + line * src_pitch, width, stream)
        state[ADDED] += height - 1
    elif code != SUCCESS:
        raise DriverError("cuMemcpy2DAsync failed", "cuMemcpy2DAsync", code)
