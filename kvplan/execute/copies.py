"""Descriptors to the driver: in batches where those are right, else a call each; no faster than its queue takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvplan.errors import TransferError
from kvplan.execute.cuda import Device, DriverError
from kvplan.program import Int64Array
from kvplan.twin import Descriptors

if TYPE_CHECKING:
    from kvplan.execute.flight import DeviceTransfer

# Copies of one call. The engine begins when the call returns, so large batches go in slices; and 52,000 copies in one
# call have crashed a driver (580).
SLICE = 4096
# Batches lose bytes of copies of up to 24 KiB from host memory, or end the context or the process, where such sizes
# differ within a call: the driver writes them into its queue of commands, and past its end. Seen of 580 on H100 and
# H200 (benchmarks/gpu/batch_bytes.py). The size from which on it does otherwise is the same on every GPU looked at.
INLINED = 28 << 10
# Calls of one transfer in flight, twice that at most. The driver's queue has an end, of about a thousand; a call that
# finds it full waits for the GPU with the driver's lock held, and all other threads' calls wait for it.
STEP = 256


class Pace:
    """Holds the thread that issues one transfer back where its calls would fill the driver's queue.

    Args:
        device: the GPU.
        transfer: whose events it takes.
        stream: that all calls go to.
    """

    def __init__(self, device: Device, transfer: DeviceTransfer, stream: int) -> None:
        self._device, self._transfer, self._stream = device, transfer, stream
        self._calls = 0
        self._mark = 0

    def count(self, calls: int) -> None:
        """So many were issued. Each :data:`STEP` are followed by an event, and the event before that is waited for."""
        self._calls += calls
        if self._calls < STEP:
            return
        self._calls = 0
        before, self._mark = self._mark, self._transfer.event()
        self._device.record(self._mark, self._stream)
        if before:
            self._device.driver.cuEventSynchronize(before)


def batches(device: Device, transfer: DeviceTransfer, size: Int64Array) -> bool:
    """Whether copies may go in batches: not small ones from host memory, and only if the driver has the call."""
    from_host = transfer.plan.direction == "load"
    return device.driver.cuMemcpyBatchAsync is not None and not (from_host and bool((size < INLINED).any()))


def copy_all(device: Device, transfer: DeviceTransfer, made: Descriptors, first: int, last: int, stream: int) -> None:
    """Issue descriptors ``first`` to ``last``: in batches, or by a call each where they may not.

    Args:
        device: the GPU.
        transfer: that they are of.
        made: descriptors.
        first, last: which.
        stream: its handle.

    Raises:
        TransferError: with the first that the driver refuses, where it says which.
    """
    size = made.size[first:last]
    if batches(device, transfer, size):
        _batched(device, made, np.arange(first, last), stream)
        return
    single = size < INLINED if device.driver.cuMemcpyBatchAsync is not None else np.ones(size.size, np.bool_)
    _batched(device, made, first + np.flatnonzero(~single), stream)
    rows = first + np.flatnonzero(single)
    pace = Pace(device, transfer, stream)
    for at in range(0, rows.size, STEP):
        some = rows[at : at + STEP]
        try:
            device.copy_each(made.dst[some], made.src[some], made.size[some], stream)
        except DriverError as error:
            raise offending(error, made, some) from error
        pace.count(some.size)


def _batched(device: Device, made: Descriptors, rows: Int64Array, stream: int) -> None:
    src, dst, size = (column[rows] for column in made)
    for at in range(0, rows.size, SLICE):
        first, count = 8 * at, min(SLICE, rows.size - at)
        try:
            device.copy_batch(dst.ctypes.data + first, src.ctypes.data + first, size.ctypes.data + first, count, stream)
        except DriverError as error:
            raise offending(error, made, rows[at:]) from error


def offending(error: DriverError, columns: Sequence[Int64Array], rows: Sequence[int] | Int64Array) -> TransferError:
    """The error of a batch, with the descriptor that the driver names.

    Args:
        error: what the call raised.
        columns: source, destination and bytes of all descriptors.
        rows: those that the batch begins with.
    """
    if error.at is None:
        return error
    k = int(rows[error.at])
    src, dst, nbytes = (int(column[k]) for column in columns)
    return TransferError(f"{error}: descriptor {k} of {columns[0].size}, {nbytes} bytes from {src:#x} to {dst:#x}")
