"""Launches that are prepared ahead: the units of a plan are in GPU memory before its submit, which then only launches.

A caller borrows room for the units, writes them there, makes the plan of them, and uploads. The plan keeps the room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from sys import is_finalizing
from typing import Any
from weakref import ref

import numpy as np

from kvplan.base.process import generation
from kvplan.cuda.device import NOT_READY, Uncaptured
from kvplan.errors import TransferError
from kvplan.execute.gpu.arena import Arena, Held, Piece
from kvplan.execute.gpu.device_transfer import DeviceTransfer
from kvplan.execute.gpu.launches.headers import HEADER
from kvplan.execute.gpu.launches.recipes import Ready
from kvplan.execute.gpu.resources import Loans, Resources, allocated
from kvplan.execute.gpu.tables import Table
from kvplan.layout.strides import Int64Array

MOST_NBYTES = 128 << 20  # of all rooms of an executor


class Room(Loans):
    """Pinned memory and GPU memory for the header and the units of a launch, and an event behind the upload.

    Attributes:
        nbytes: bytes of either memory.
        uploading: whether an upload was issued that is not known to have ended.
        marked: whether the event was recorded behind this upload.
    """

    def __init__(self, resources: Resources, pinned: Arena, nbytes: int) -> None:
        self.resources = resources
        self.nbytes = nbytes
        self.uploading = self.marked = False
        self._pinned = pinned
        self._pieces: list[Held] = []
        self._borrowed: list[int] = []

    def borrow(self) -> tuple[Piece, Piece, int]:
        """Borrow the memory of both kinds, and the event."""
        return self._pinned.take(self.nbytes, self._pieces), self.scratch(self.nbytes), self.event()

    def ended(self) -> bool:
        """Return whether the upload has ended. The device is current."""
        device = self.resources.device
        if self.uploading and self.marked:
            with Uncaptured(device):
                self.uploading = device.driver.cuEventQuery(self._borrowed[0]) == NOT_READY
        return not self.uploading

    def finish(self, stream: int) -> None:
        """Wait for the end of the upload."""
        device = self.resources.device
        for event in self._borrowed if self.uploading else ():
            with suppress(TransferError):
                if not self.marked:
                    device.record(event, stream)
                device.driver.cuEventSynchronize(event)

    def give_back(self) -> None:
        """Give all back; no transfer uses it."""
        self._return_loans()


class Lent:
    """The units of a room, as memory of an array. Views of the array, as in parts of a plan, keep this object.

    When it is deleted, the room is left. It may outlive the executor, whose other memory is then freed.
    """

    def show(self, units: Int64Array) -> Int64Array:
        """Return units in pinned memory as an array that keeps this object."""
        self.__array_interface__ = units.__array_interface__
        shown: Int64Array = np.asarray(self)
        return shown


class Left(ref[Lent]):
    """A weak reference to the units of a room.

    Attributes:
        room: the room.
    """

    room: Room


class Ahead:
    """The units of a plan and the header of its launch, in a room. The room is left when nothing refers to the units.

    Attributes:
        units: (2, n) int64: source and destination address of each unit, for the caller to write.
        table: run table of the uploaded plan; None before the upload.
        programs: number of programs of the launch.
        copies: number of contiguous copies of a unit.
        choice: the executor's choice of the kernel path for the plan; None if it is not uploaded.
        header: address of the header on the GPU.
        stream: the stream of the upload.
    """

    def __init__(self, room: Room, lent: Lent, count: int, stream: int) -> None:
        self._room, self.stream = room, stream
        self._slot, held, self._event = self._room.borrow()
        self.header = held.address
        self.units = lent.show(self._slot.words[HEADER : HEADER + 2 * count].reshape(2, count))
        self.table: Table | None = None
        self.programs = self.copies = 0
        self.choice: Any = None

    def upload(self, table: Table, programs: int, copies: int) -> None:
        """Write the header beside the units, and copy both to the GPU. The device is current.

        Raises:
            TransferError: a driver call failed.
        """
        words, count, at = self._slot.words, self.units.shape[1], self.header + 8 * HEADER
        words[:HEADER] = table.header
        words[0], words[3], words[4] = count, at, at + 8 * count
        self.send()
        self.table, self.programs, self.copies = table, programs, copies

    def send(self) -> None:
        """Copy the room to the GPU. The device is current.

        Raises:
            TransferError: a driver call failed.
        """
        room = self._room
        device = room.resources.device
        room.uploading = True
        device.copy(self.header, self._slot.address, room.nbytes, self.stream)
        device.record(self._event, self.stream)
        room.marked = True

    def of(self, resources: Resources) -> bool:
        """Return whether an executor has lent the room."""
        return self._room.resources is resources

    def ready(self, transfer: DeviceTransfer, stream: int) -> Ready | None:
        """Return the launch for a transfer; None if it has to be prepared from the plan. The device is current."""
        table = self.table
        if table is None or table.fresh:
            return None
        self.precede(stream)
        transfer.count(self.units.shape[1] * self.copies, 1)
        return Ready(table.kernel, self.programs, self.header, (0, 0))

    def precede(self, stream: int) -> None:
        """Let a stream wait for the upload, unless it is known to have ended. The device is current."""
        if self._room.uploading:  # to ask the driver first would take as long as the wait
            self._room.resources.device.wait(stream, self._event)


class Rooms:
    """The rooms of one executor.

    Args:
        resources: resources of the executor.
        least: fewer units need no room, since a launch reads them from host memory.
        reap: takes back the loans of ended transfers, which hold their plans; the device is current.
    """

    def __init__(self, resources: Resources, least: int, reap: Callable[[], object]) -> None:
        self._resources, self._reap = resources, reap
        self._least = least
        self._rooms: dict[Room, Left] = {}
        self._left: deque[Left] = deque()  # rooms that nobody holds any more; one C call appends
        self._last: set[ref[Lent] | None] = set()  # after the close, what is still held
        self._nbytes = 0
        self._stream = 0
        self._closed = False
        # An arena of its own, because plans outlive the executor, and the CPU reads their units.
        device = resources.device
        self._pinned = Arena(partial(allocated, device, device.allocate_host), device.free_host, visible=True)

    def room(self, count: int) -> Ahead | None:
        """Return room for a number of units; None if there are too few or too many. The device is current."""
        nbytes = 8 * (HEADER + 2 * count)
        if count <= self._least or nbytes > MOST_NBYTES:
            return None
        self._sweep()
        if self._nbytes + nbytes > MOST_NBYTES:
            self._reap()
            self._sweep()
        if self._closed or self._nbytes + nbytes > MOST_NBYTES:
            return None
        if not self._stream:
            with self._resources.lock:
                self._stream = self._stream or self._resources.handles.stream(urgent=True)
        room, lent = Room(self._resources, self._pinned, nbytes), Lent()
        left = Left(lent, self._left.append)
        left.room = room
        self._nbytes += nbytes
        self._rooms[room] = left
        return Ahead(room, lent, count, self._stream)

    def _sweep(self) -> None:
        """Give back rooms that nobody holds, in order, while their uploads have ended."""
        if not self._left:
            return
        with self._resources.lock:
            while self._left:
                room = self._left[0].room
                if room.uploading and room.marked and not room.ended():
                    return
                self._left.popleft()
                if not room.uploading:  # otherwise the end of its upload is unknown, and it is kept
                    room.give_back()
                    self._nbytes -= room.nbytes
                    del self._rooms[room]

    def close(self) -> None:
        """Wait for all uploads. No transfer is in flight, and no room is being made.

        The executor then frees the GPU memory. The pinned memory is freed when nobody holds a room any more.
        """
        self._closed = True
        for room in list(self._rooms):
            room.finish(self._stream)
        self._last.add(None)
        for left in self._rooms.values():
            lent = left()
            if lent is not None:
                self._last.add(ref(lent, self._free))
            del lent
        self._rooms.clear()
        self._left.clear()
        self._free(None)

    def _free(self, gone: ref[Lent] | None) -> None:
        """Free the pinned memory of a closed executor, once nobody holds a room any more."""
        self._last.discard(gone)
        if self._last or self._resources.generation != generation() or is_finalizing():
            return
        device = self._resources.device
        with device.current(), Uncaptured(device):
            self._pinned.close()
