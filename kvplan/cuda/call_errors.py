"""Errors of driver calls that were made from a list."""

from __future__ import annotations

from collections.abc import Sequence

from kvplan.cuda.call_list import AWAIT, BATCH, COPY, COPY_2D, FAILED, FAILED_COPY, FAILED_ROW, NAMES, Segment
from kvplan.cuda.driver import DriverError
from kvplan.cuda.scopes import HasDriver
from kvplan.errors import TransferError
from kvplan.layout.strides import Int64Array


def error_of(device: HasDriver, segments: Sequence[Segment], state: Int64Array) -> TransferError:
    """Return the error of the call that failed. Its text describes the copy that the driver refuses.

    Args:
        device: the GPU.
        segments: the list.
        state: (8,) int64: the list's state.
    """
    row = int(state[FAILED_ROW])
    segment = segments[0]
    for segment in segments:  # the loop ends at the segment of the row
        if row < len(segment.rows):
            break
        row -= len(segment.rows)
    which, one, end, _ = segment.rows[row].tolist()
    code, at, what = int(state[FAILED]), int(state[FAILED_COPY]), ""
    if which == AWAIT:
        return TransferError(f"the transfer given as after= failed: {device.driver.name(code)}")
    if which == BATCH:
        what = f"of {end - one} copies" if at < 0 else _copy(segment, at)
    elif which == COPY:
        what = _copy(segment, one)
    elif which == COPY_2D:
        src, dst, width, height = segment.boxes[one, (4, 11, 14, 15)].tolist()
        what = f"2-D copy {one} of {len(segment.boxes)}, {height} rows of {width} bytes from {src:#x} to {dst:#x}"
    try:
        device.driver.check(NAMES[which], code, what)
    except DriverError as error:
        return error
    return TransferError(f"{NAMES[which]} failed")


def _copy(segment: Segment, at: int) -> str:
    src, dst, nbytes = segment.columns[:, at].tolist()
    return f"descriptor {at} of {segment.columns.shape[1]}, {nbytes} bytes from {src:#x} to {dst:#x}"
