"""Launches that are prepared ahead: the units of a plan are in GPU memory before its submit, which then only launches.

A caller borrows room for the units, writes them there, makes the plan of them, and uploads. The plan keeps the room.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from kvplan.base.threads import aside
from kvplan.cuda.device import NOT_READY, Uncaptured
from kvplan.execute.gpu.arena import Held, Piece
from kvplan.execute.gpu.launches.headers import HEADER
from kvplan.execute.gpu.resources import Loans, Resources
from kvplan.execute.gpu.tables import Table
from kvplan.layout.strides import Int64Array

MOST_NBYTES = 128 << 20  # of all rooms of an executor


class Room(Loans):
    """Pinned memory and GPU memory for the header and the units of a launch, and an event behind the upload.

    Attributes:
        nbytes: bytes of either memory.
        uploading: whether an upload was issued that is not known to have ended.
    """

    def __init__(self, resources: Resources, nbytes: int) -> None:
        self.resources = resources
        self.nbytes = nbytes
        self.uploading = False
        self._pieces: list[Held] = []
        self._borrowed: list[int] = []

    def borrow(self) -> tuple[Piece, Piece, int]:
        """Borrow the memory of both kinds, and the event."""
        return self.slot(self.nbytes), self.scratch(self.nbytes), self.event()

    def ended(self) -> bool:
        """Return whether the upload has ended. The device is current."""
        device = self.resources.device
        if self.uploading:
            with Uncaptured(device):
                self.uploading = device.driver.cuEventQuery(self._borrowed[0]) == NOT_READY
        return not self.uploading

    def leave(self) -> list[int]:
        """Wait for the end of the upload, and return the event, which the room no longer has."""
        events, self._borrowed = self._borrowed, []
        if self.uploading:
            for event in events:
                self.resources.device.driver.cuEventSynchronize(event)
        return events

    def give_back(self) -> None:
        """Give all back; no transfer uses it."""
        self._return_loans()


class Ahead:
    """The units of a plan and the header of its launch, in a room. The room is given back when this object is deleted.

    Attributes:
        units: (2, n) int64: source and destination address of each unit, for the caller to write.
        table: run table of the uploaded plan; None before the upload.
        programs: number of programs of the launch.
        choice: the executor's choice of the kernel path for the plan; None if it is not uploaded.
        header: address of the header on the GPU.
        stream: the stream of the upload.
    """

    def __init__(self, room: Room, count: int, stream: int, left: deque[Room]) -> None:
        self._room, self._left, self.stream = room, left, stream
        self._slot, held, self._event = room.borrow()
        self.header = held.address
        self.units: Int64Array = self._slot.words[HEADER : HEADER + 2 * count].reshape(2, count)
        self.table: Table | None = None
        self.programs = 0
        self.choice: Any = None

    def upload(self, table: Table, programs: int) -> None:
        """Write the header beside the units, and copy both to the GPU. The device is current.

        Raises:
            TransferError: a driver call failed.
        """
        room, words, count, at = self._room, self._slot.words, self.units.shape[1], self.header + 8 * HEADER
        words[:HEADER] = table.header
        words[0], words[3], words[4] = count, at, at + 8 * count
        device = room.resources.device
        room.uploading = True
        device.copy(self.header, self._slot.address, room.nbytes, self.stream)
        device.record(self._event, self.stream)
        self.table, self.programs = table, programs

    def of(self, resources: Resources) -> bool:
        """Return whether an executor has lent the room."""
        return self._room.resources is resources

    def precede(self, stream: int) -> None:
        """Let a stream wait for the upload, unless it is known to have ended. The device is current."""
        if self._room.uploading:  # to ask the driver first would take as long as the wait
            self._room.resources.device.wait(stream, self._event)

    def __del__(self) -> None:
        room = getattr(self, "_room", None)
        if room is not None:
            self._left.append(room)


class Rooms:
    """The rooms of one executor.

    Args:
        resources: resources of the executor.
        least: fewer units need no room, since a launch reads them from host memory.
    """

    def __init__(self, resources: Resources, least: int) -> None:
        self._resources = resources
        self._least = least
        self._rooms: set[Room] = set()
        self._left: deque[Room] = deque()  # rooms that nobody holds any more
        self._nbytes = 0
        self._stream = 0
        self._closed = False

    def room(self, count: int) -> Ahead | None:
        """Return room for a number of units; None if there are too few or too many. The device is current."""
        nbytes = 8 * (HEADER + 2 * count)
        self._sweep()
        if self._closed or count <= self._least or self._nbytes + nbytes > MOST_NBYTES:
            return None
        if not self._stream:
            aside(self._make_stream)
        room = Room(self._resources, nbytes)
        self._rooms.add(room)
        self._nbytes += nbytes
        return Ahead(room, count, self._stream, self._left)

    def _make_stream(self) -> None:
        device = self._resources.device
        with device.current(), self._resources.lock:
            self._stream = self._stream or device.stream(urgent=True)

    def _sweep(self) -> None:
        """Give back rooms that nobody holds, in order, while their uploads have ended."""
        left = self._left
        while left:
            try:
                room = left.popleft()
            except IndexError:  # another thread has taken it
                return
            if not room.ended():
                left.appendleft(room)
                return
            self._rooms.discard(room)
            self._nbytes -= room.nbytes
            room.give_back()

    def close(self) -> None:
        """Give back the events and the stream. No transfer is in flight, and the executor then frees the memory."""
        self._closed = True
        device, stream, self._stream = self._resources.device, self._stream, 0
        for room in list(self._rooms):
            self._resources.events.extend(room.leave())
        self._rooms.clear()
        self._left.clear()
        if stream:
            device.driver.cuStreamDestroy_v2(stream)
