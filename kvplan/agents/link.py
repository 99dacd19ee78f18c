"""The visitor's side of a meeting: the connection to an owner, its opened memory, and the transfers in flight."""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable
from typing import Protocol

from kvplan.agents.channel import GOODBYE, NOTE, NOTE_NBYTES, Channel
from kvplan.agents.door import message_of
from kvplan.agents.greeting import Met
from kvplan.agents.loop import Loop, Watcher, guarded
from kvplan.agents.way import Opened, Tell
from kvplan.base.threads import Latch
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
        channel: the connection.
        opened: the owner's memory, by transport.
        leaving: whether this process leaves.
        ended: set at its end, when no transfer is in flight. Then it holds nothing but, if the owner ended it, mapped
            host memory, which executors may still read: that goes with its last layout, or when this process leaves.
        why: why no transfer is accepted any more; None while the link is open.
    """

    def __init__(self, name: str, agent: bytes, met: Met, loop: Loop, parted: Callable[[Link], None]) -> None:
        self.name, self.agent = name, agent
        self._parted = parted
        self.opened: dict[str, Opened] = {}
        self.ended = Latch()
        self.why: str | None = None
        self._loop = loop
        self._lock = threading.RLock()
        self._flying: dict[int, Flying] = {}
        self.leaving = self._lost = False
        self.channel = Channel(met.sock, met.life, name, self._hear, self._told, loop.wake)

    # ---- transfers ---------------------------------------------------------------------------------------------------

    def enter(self, transfer: Flying) -> None:
        """Count a transfer as in flight; raise TransferError if the link is not open.

        It is counted first, without a lock. A link that is closed meanwhile then finds it, or is found closed here.
        """
        self._flying[id(transfer)] = transfer
        if self.why is not None or self.channel.gone is not None:
            self.leave_flight(transfer)
            self.check_open()

    def leave_flight(self, transfer: Flying) -> None:
        """Count a transfer as ended; any thread may call it, also twice."""
        self._flying.pop(id(transfer), None)
        if self.why is not None:
            self._loop.wake()

    def check_open(self) -> None:
        """Raise TransferError if the link is not open."""
        why = self.why or self.channel.gone  # noted first by the thread that asked, and then by the service thread
        if why is not None:
            raise TransferError(f"no transfer with {self.name!r}: {why}")

    def lives(self) -> bool:
        """Return whether transfers are accepted, and the owner is there as of now."""
        return self.why is None and self.channel.death() is None

    @property
    def in_flight(self) -> int:
        """Number of transfers in flight."""
        return len(self._flying)

    def waits(self) -> str:
        """Return what must end before the link can, for a message."""
        unread = self.channel.unsent()
        return f"{len(self._flying)} transfers with {self.name!r} are in flight" + unread * (
            f", and {self.name!r} does not read its notes"
        )

    def lost(self) -> str | None:
        """Return why bytes that have just moved are nobody's word, or None."""
        return self.channel.death()

    def send_note(self, note: bytes) -> None:
        """Send a note; raise TransferError if the owner is gone or does not read."""
        self.channel.send(NOTE + note)

    def teller(self, transport: str) -> Tell:
        """Return a function that sends messages of a transport."""
        return lambda message: self.channel.send(message_of(transport, message))

    # ---- the service thread ------------------------------------------------------------------------------------------

    def files(self) -> dict[int, int]:
        """Return the socket and the owner's process."""
        if self.channel.gone is not None:  # it would be ready all the time; the last transfer's end wakes the thread
            return {}
        return {self.channel.sock.fileno(): self.channel.wanted(), self.channel.life.fd: select.POLLIN}

    def serve(self) -> None:
        """Read and write what can be; notice the owner's end; close what is no longer used."""
        channel = self.channel
        if channel.sock.fileno() >= 0:
            channel.read()
            channel.flush()
            if (death := channel.death()) is not None:
                self._shut(death)
                self._cancel_pending()
        if self.why is None or self._flying or (channel.unsent() and channel.gone is None):
            return
        for one in self.opened.values():  # before the goodbye: then the owner may free the memory
            guarded(one.close if self.leaving else one.release)
        if channel.gone is None:
            self._say_goodbye()
        channel.close(self.why)
        self._loop.remove(self)
        self._parted(self)
        self.ended.set()

    def leave(self) -> None:
        """Accept no more transfers, and close everything once those in flight have ended."""
        self.leaving = True
        self._shut("the peer was forgotten, or this agent was closed")
        for one in self.opened.values() if self.ended.happened else ():
            guarded(one.close)
        self._loop.wake()

    def drop(self) -> None:
        """Close the descriptors in a forked child."""
        self.channel.drop()

    def _shut(self, why: str) -> None:
        with self._lock:
            self.why = self.why or why

    def _cancel_pending(self) -> None:
        """Cancel transfers that have not begun, and let those go on that wait for the owner on the GPU."""
        if not self._lost:
            self._lost = True
            for transfer in list(self._flying.values()):
                guarded(transfer.cancel)
            for one in list(self.opened.values()):
                guarded(one.owner_gone)

    def _say_goodbye(self) -> None:
        try:
            self.channel.send(GOODBYE)
            self.channel.flush()
        except KVPlanError as error:
            log.debug("%s did not hear the goodbye: %s", self.name, error)

    def _hear(self, transport: str, message: bytes) -> None:
        raise TransferError(f"an owner sends no messages, and {len(message)} bytes of {transport!r} came")

    def _told(self, packet: bytes) -> None:
        del packet  # the owner closes
        self._shut("its agent closes, or withdraws memory")
        self._loop.wake()


def checked_note(note: object) -> bytes:
    """Return a note; raise KVPlanError if it is not bytes, or is too long."""
    if not isinstance(note, bytes):
        raise KVPlanError(f"note is a {type(note).__name__}; give bytes")
    if len(note) > NOTE_NBYTES:
        raise KVPlanError(f"note has {len(note):,} bytes; a note has at most {NOTE_NBYTES:,}")
    return note
