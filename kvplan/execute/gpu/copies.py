"""Descriptors to the driver: in batches where those are right, else a call each; no faster than its queue takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from kvplan.cuda.device import Device, DriverError, Uncaptured
from kvplan.errors import TransferError
from kvplan.layout.strides import Int64Array
from kvplan.plan.loops_numpy import Descriptors

if TYPE_CHECKING:
    from kvplan.execute.gpu.device_transfer import DeviceTransfer

# Copies of one call. The engine begins when the call returns, so large batches go in slices; and 52,000 copies in one
# call have crashed a driver (580).
SLICE = 4096
# Batches lose bytes of copies of up to 24 KiB from host memory, or end the context or the process, where such sizes
# differ within a call: the driver writes them into its queue of commands, and past its end. Seen of 580 on H100 and
# H200 (benchmarks/gpu/batch_bytes.py). The size from which on it does otherwise is the same on every GPU looked at.
INLINED = 28 << 10
# Calls of one transfer in flight on a stream, twice that at most. The driver's queue has an end, of about a thousand; a
# call that finds it full waits for the GPU with the driver's lock held, and all other threads' calls wait for it.
STEP = 256
SLOW_2D = 256  # 2-D copies and single copies, at 2 to 3 us each: more of them are issued by the lane's own thread


def pace(device: Device, transfer: DeviceTransfer, calls: int, stream: int) -> None:
    """Hold the lane's thread back where the calls of one transfer would fill the driver's queue.

    Each :data:`STEP` calls are followed by an event, and the event before that is waited for.

    Args:
        device: the GPU.
        transfer: whose calls they are.
        calls: how many were issued just now.
        stream: that they went to.
    """
    transfer._unmarked += calls
    if transfer._unmarked < STEP:
        return
    transfer._unmarked = 0
    before, transfer._mark = transfer._mark, transfer.event()
    device.record(transfer._mark, stream)
    if before and transfer._issued is not None:  # else a submit would wait for the GPU
        with Uncaptured(device):
            device.driver.cuEventSynchronize(before)


def alone(device: Device, direction: str, size: Int64Array) -> int:
    """How many of these copies may go in no batch: small ones from host memory; all if the driver has no such call."""
    if device.driver.cuMemcpyBatchAsync is None:
        return size.size
    return int(np.count_nonzero(size < INLINED)) if direction == "load" else 0


def long_to_issue(device: Device, direction: str, held: Sequence[tuple[int, Int64Array]], most: int) -> bool:
    """Whether copies are to be issued by the lane's own thread.

    Args:
        device: the GPU.
        direction: of their plan.
        held: units, and bytes of every copy of one, of each part.
        most: copies in batches that are not.
    """
    copies = sum([units * size.size for units, size in held])
    if not SLOW_2D < copies <= most:
        return copies > most
    return sum([units * alone(device, direction, size) for units, size in held]) > SLOW_2D


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
    count = alone(device, transfer.plan.direction, size)
    if not count:
        _batched(device, made, np.arange(first, last), stream)
        return
    single = size < INLINED if count < size.size else np.ones(count, np.bool_)
    _batched(device, made, first + np.flatnonzero(~single), stream)
    rows = first + np.flatnonzero(single)
    while rows.size:
        step = STEP - transfer._unmarked
        some, rows = rows[:step], rows[step:]
        try:
            device.copy_each(made.dst[some], made.src[some], made.size[some], stream)
        except DriverError as error:
            refuse(error, made, some)
        pace(device, transfer, some.size, stream)


def _batched(device: Device, made: Descriptors, rows: Int64Array, stream: int) -> None:
    src, dst, size = (column[rows] for column in made)
    for at in range(0, rows.size, SLICE):
        first, count = 8 * at, min(SLICE, rows.size - at)
        try:
            device.copy_batch(dst.ctypes.data + first, src.ctypes.data + first, size.ctypes.data + first, count, stream)
        except DriverError as error:
            refuse(error, made, rows[at:])


def refuse(error: DriverError, columns: Sequence[Int64Array], rows: Sequence[int] | Int64Array) -> NoReturn:
    """Raise the error of a batch, with the descriptor where the driver names it.

    Args:
        error: what the call raised.
        columns: source, destination and bytes of all descriptors.
        rows: those that the batch begins with.
    """
    if error.at is None:
        raise error
    k = int(rows[error.at])
    src, dst, nbytes = (int(column[k]) for column in columns)
    named = f"{error}: descriptor {k} of {columns[0].size}, {nbytes} bytes from {src:#x} to {dst:#x}"
    raise TransferError(named) from error
