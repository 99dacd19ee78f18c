"""The visitor's side of a meeting: the connection to an owner, its opened memory, and the transfers in flight."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kvplan.agents.board import BOARD_NBYTES, LANES, NOTE_NBYTES, NoteWriter
from kvplan.agents.connection import Connection
from kvplan.agents.gpu_order import VisitorOrder
from kvplan.agents.greeting import Met
from kvplan.agents.loop import Loop, Watcher, guarded
from kvplan.agents.transport import Opened, Owner, Transport
from kvplan.base.threads import Latch
from kvplan.cuda.device import Device
from kvplan.cuda.shared_words import SharedWords
from kvplan.errors import KVPlanError, TransferError

log = logging.getLogger("kvplan.agents")


class Flying(Protocol):
    """The method of a transfer in flight that its link calls."""

    def cancel(self) -> bool:
        """Cancel it if it has not begun."""


class Link(Watcher):
    """The connection to an owner. It ends when the owner dies or closes, or when this process leaves.

    Args:
        name: name of the owner's agent.
        agent: identity of the owner's agent.
        met: the greeting with it.
        loop: the service thread.
        parted: called at its end.

    Attributes:
        name, agent: as given.
        connection: the connection.
        opened: the owner's memory, by transport.
        order: the order of transfers on this process's GPU, if the owner's memory is of GPUs.
        leaving: whether this process leaves.
        ended: set at its end, when no transfer is in flight. Then it holds nothing but, if the owner ended it, mapped
            host memory, which executors may still read: that goes with its last layout, or when this process leaves.
        why: why no transfer is accepted any more; None while the link is open.
    """

    def __init__(self, name: str, agent: bytes, met: Met, loop: Loop, parted: Callable[[Link], None]) -> None:
        self.name, self.agent = name, agent
        self._parted = parted
        self.opened: dict[str, Opened] = {}
        self.order: VisitorOrder | None = None
        self.ended = Latch()
        self.why: str | None = None
        self._loop = loop
        self._lock = threading.RLock()
        self._flying: dict[int, Flying] = {}
        self._counted = [0] * LANES  # the last transfer of each lane that has ended, as its GPU counts
        self.leaving = self._lost = False
        self.connection = Connection(met.sock, met.life, name, loop.wake)
        self._board = SharedWords.opened(met.descriptors[0], BOARD_NBYTES)
        self._notes = NoteWriter(self._board, name)

    def open(
        self, transports: Mapping[str, Transport], data: Mapping[str, Any], wanted: Mapping[str, int],
        descriptors: Sequence[int], owner: Owner,
    ) -> None:  # fmt: skip
        """Open the owner's memory.

        Args:
            transports: the transports by name.
            data: what each has read of the card.
            wanted: number of descriptors of each.
            descriptors: the owner's, behind the board's.
            owner: the owner.

        Raises:
            LayoutError: what the descriptors map is not what the card says.
            PathError, TransferError: the system refuses.
        """
        for name, number in wanted.items():
            mine, descriptors = descriptors[:number], descriptors[number:]
            opened = self.opened[name] = transports[name].open(data[name], mine, owner)
            if opened.gpu is not None:
                self.order = VisitorOrder(Device(opened.gpu), self._board, opened.gpus)

    # ---- transfers ---------------------------------------------------------------------------------------------------

    def enter(self, transfer: Flying) -> None:
        """Count a transfer as in flight; raise TransferError if the link is not open.

        It is counted first, without a lock. A link that is closed meanwhile then finds it, or is found closed here.
        """
        self._flying[id(transfer)] = transfer
        if self.why is not None or self.connection.gone is not None:
            self.leave_flight(transfer)
            self.check_open()

    def leave_flight(self, transfer: Flying) -> None:
        """Count a transfer as ended; any thread may call it, also twice."""
        self._flying.pop(id(transfer), None)
        if self.why is not None:
            self._loop.wake()

    def check_open(self) -> None:
        """Raise TransferError if the link is not open."""
        why = self.why or self.connection.gone  # noted first by the thread that asked, and then by the service thread
        if why is not None:
            raise TransferError(f"no transfer with {self.name!r}: {why}")

    def lives(self) -> bool:
        """Return whether transfers are accepted, and the owner is there as of now."""
        return self.why is None and self.connection.death() is None

    @property
    def in_flight(self) -> int:
        """Number of transfers in flight."""
        return len(self._flying)

    def waits(self) -> str:
        """Return what must end before the link can, for a message."""
        return f"{len(self._flying)} transfers with {self.name!r} are in flight"

    def lost(self) -> str | None:
        """Return why bytes that have just moved are nobody's word, or None."""
        return self.connection.death()

    # ---- notes -------------------------------------------------------------------------------------------------------

    def check_room(self) -> None:
        """Raise TransferError if the link is not open, or the owner does not read its notes."""
        with self._lock:  # the board stays while it is held
            self.check_open()
            self._notes.check_room()

    def note(self, note: bytes, sequence: int, lane: int, number: int = 0) -> None:
        """Write the note of a transfer: it is read when the lane's GPU has counted to a number."""
        self._notes.write(note, sequence, [number * (k == lane) for k in range(LANES)])

    def ended_as(self, lane: int, number: int) -> None:
        """Take it that the transfer of a number has ended; notes that are sent alone come behind its note."""
        self._counted[lane] = max(self._counted[lane], number)

    def send(self, note: bytes) -> None:
        """Send a note now; raise TransferError if the owner is gone or does not read."""
        with self._lock:
            self.check_open()
            self._notes.write(note, needs=self._counted)

    # ---- the service thread ------------------------------------------------------------------------------------------

    def files(self) -> dict[int, int]:
        """Return the descriptors that tell of the owner's end."""
        return self.connection.files()

    def serve(self) -> None:
        """Notice the owner's end; close what is no longer used."""
        if not self.ended.happened:
            if (death := self.connection.look()) is not None:
                self._shut(death)
                self._cancel_pending()
            elif self.connection.parts:
                self._shut("its agent closes, or withdraws memory")
            if self.why is not None and not self._flying:
                self._end(self.why)

    def _end(self, why: str) -> None:
        if self.order is not None:
            guarded(self.order.close)
        for name, opened in self.opened.items():
            if self.leaving or name != "shm":
                _close(opened)
        with self._lock:
            self._board.close()
        if self.connection.gone is None:
            self.connection.say_farewell()  # from now on the owner may free the memory
        self.connection.close(why)
        self._loop.remove(self)
        self._parted(self)
        self.ended.set()

    def leave(self) -> None:
        """Accept no more transfers, and close everything once those in flight have ended."""
        self.leaving = True
        self._shut("the peer was forgotten, or this agent was closed")
        for opened in self.opened.values() if self.ended.happened else ():
            _close(opened)
        self._loop.wake()

    def drop(self) -> None:
        """Close the descriptors in a forked child."""
        self.connection.close("agents do not survive a fork, and this one is the parent's; make one in the child")

    def _shut(self, why: str) -> None:
        with self._lock:
            self.why = self.why or why

    def _cancel_pending(self) -> None:
        """Cancel transfers that have not begun, and let those go on that wait for the owner on the GPU."""
        if not self._lost:
            self._lost = True
            for transfer in list(self._flying.values()):
                guarded(transfer.cancel)
            if self.order is not None:
                guarded(self.order.release)


def _close(opened: Opened) -> None:
    for place in opened.mapped:
        guarded(place.owner.close)


def checked_note(note: object) -> bytes:
    """Return a note; raise KVPlanError if it is not bytes, or is too long."""
    if not isinstance(note, bytes):
        raise KVPlanError(f"note is a {type(note).__name__}; give bytes")
    if len(note) > NOTE_NBYTES:
        raise KVPlanError(f"note has {len(note):,} bytes; a note has at most {NOTE_NBYTES:,}")
    return note
