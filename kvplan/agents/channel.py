"""The connection between a visitor and an owner, after they have greeted each other: packets, notes, and its end."""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvplan.agents.identity import Life
from kvplan.errors import TransferError

PACKET = 1 << 16  # most bytes of a packet, with its first byte
NOTE_NBYTES = 60_000  # most bytes of a note
HELD = 1 << 16  # most notes that wait here to be read, and most packets that wait here to be sent
BATCH = 1024  # most packets that are received at once
HELD_NBYTES = 64 << 20  # most bytes of either

# The first byte of a packet.
NOTE, MESSAGE, CLOSING, GOODBYE = b"N", b"M", b"C", b"G"

log = logging.getLogger("kvplan.agents")


class Channel:
    """An authenticated connection to another process.

    Args:
        sock: the connected socket, of packets.
        life: the other process.
        name: name of the other agent, for messages.
        hear: called with the name of a transport and its message.
        told: called with :data:`CLOSING` or :data:`GOODBYE` when the other side says it.
        wake: called when packets wait to be sent, so that the service thread looks at the socket.

    Attributes:
        name: as given.
        gone: why the other side is gone; None while it is there.
        inbox: notes that nobody has read.
    """

    def __init__(
        self, sock: socket.socket, life: Life, name: str, hear: Callable[[str, bytes], None],
        told: Callable[[bytes], None], wake: Callable[[], None],
    ) -> None:  # fmt: skip
        sock.settimeout(0)
        self.sock, self.life, self.name = sock, life, name
        self.gone: str | None = None
        self.inbox: list[bytes] = []
        self._hear, self._told, self._wake = hear, told, wake
        self._reading = threading.RLock()
        self._writing = threading.RLock()
        self._outbox: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._outbox_nbytes = 0
        self._inbox_nbytes = 0

    # ---- writing -----------------------------------------------------------------------------------------------------

    def send(self, packet: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a packet, or queue it if the other side is slow; never block.

        Raises:
            TransferError: the other side is gone, or too many packets wait for it.
        """
        with self._writing:
            if self.gone is not None:
                raise TransferError(self.gone)
            if not self._outbox:
                try:
                    self._put(packet, descriptors)
                except BlockingIOError:
                    pass
                except OSError as error:
                    self.lose(f"the connection to {self.name!r} broke: {error.strerror or error}")
                    raise TransferError(self.gone) from error
                else:
                    return
            if len(self._outbox) >= HELD or self._outbox_nbytes > HELD_NBYTES:
                raise TransferError(f"{len(self._outbox)} notes wait for {self.name!r}, which does not read them")
            self._outbox.append((packet, tuple(descriptors)))
            self._outbox_nbytes += len(packet)
        self._wake()

    def flush(self) -> bool:
        """Send packets that wait; return whether none waits any more."""
        with self._writing:
            while self._outbox and self.gone is None:
                packet, descriptors = self._outbox[0]
                try:
                    self._put(packet, descriptors)
                except BlockingIOError:
                    return False
                except OSError as error:
                    self.lose(f"the connection to {self.name!r} broke: {error.strerror or error}")
                    break
                self._outbox.popleft()
                self._outbox_nbytes -= len(packet)
            return True

    def _put(self, packet: bytes, descriptors: Sequence[int]) -> None:
        if descriptors:
            socket.send_fds(self.sock, [packet], list(descriptors), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        else:
            self.sock.send(packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def read(self, *, whole: bool = False) -> None:
        """Read the packets that have come: notes into the inbox, the rest to its receiver; never block.

        Args:
            whole: whether to read also if many notes wait in the inbox.
        """
        with self._reading:
            for _ in range(HELD if whole else BATCH):
                packet = None if self.full() and not whole else self._receive()
                if packet is None:
                    break
                if packet[:1] == NOTE:
                    self.inbox.append(packet[1:])
                    self._inbox_nbytes += len(packet)
                else:
                    self._dispatch(packet)

    def _receive(self) -> bytes | None:
        """Receive a packet; return None if none has come."""
        if self.sock.fileno() < 0:
            return None
        try:
            packet = self.sock.recv(PACKET + 1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionResetError:  # it left packets unread; its own are still here
            return self._receive()
        except OSError as error:
            self.lose(f"the connection to {self.name!r} broke: {error.strerror or error}")
            return None
        if not packet:
            self.lose(f"{self.name!r} has closed its agent, or its process has ended")
        return packet or None

    def _dispatch(self, packet: bytes) -> None:
        if packet in (CLOSING, GOODBYE):
            self._told(packet)
        else:
            transport, _, message = packet[1:].partition(b"\0")
            self._hear(transport.decode(), message)

    def full(self) -> bool:
        """Return whether so many notes wait in the inbox that no more are read."""
        return len(self.inbox) >= HELD or self._inbox_nbytes > HELD_NBYTES

    def notes(self) -> list[bytes]:
        """Read what has come, and return the notes, each once and in order."""
        with self._reading:
            if self.gone is None:
                self.read()
            if not self.inbox:
                return []
            found, self.inbox, self._inbox_nbytes = self.inbox, [], 0
            return found

    # ---- its end -----------------------------------------------------------------------------------------------------

    def lose(self, why: str) -> None:
        """Note why the other side is gone; the first reason stays. The service thread then closes the connection."""
        if self.gone is None:
            self.gone = why
            log.info("%s", why)
            self._wake()

    def death(self) -> str | None:
        """Return why the other side is gone as of now, or None if its process lives and its agent is open."""
        if self.gone is None:
            if self.life.over():
                self.lose(f"the process of {self.name!r} has ended")
            elif self.hung_up():
                self.lose(f"{self.name!r} has closed its agent, or its process has ended")
        return self.gone

    def hung_up(self) -> bool:
        """Return whether the other side has closed the connection."""
        poll = select.poll()
        try:
            poll.register(self.sock, select.POLLRDHUP)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True

    def wanted(self) -> int:
        """Return the events of the socket that the service thread must wait for."""
        reading = 0 if self.full() else select.POLLIN
        return reading | (select.POLLOUT if self._outbox else 0)

    def unsent(self) -> bool:
        """Return whether packets wait to be sent."""
        return bool(self._outbox) and self.gone is None

    def close(self, why: str) -> None:
        """Close the connection. Notes that have come can still be read."""
        with self._reading, self._writing:
            if self.sock.fileno() >= 0:
                self.read(whole=True)
                self.lose(why)
                self.sock.close()
                self._outbox.clear()
                self.life.close()
                self._hear = self._told = self._wake = _nothing  # otherwise they would keep their owner in a circle

    def drop(self) -> None:
        """Close this process's descriptors, in a forked child. The parent's connection stays as it is."""
        self.gone = "agents do not survive a fork, and this one is the parent's; make one in the child"
        self.sock.close()
        self.life.close()


def _nothing(*_: object) -> None:
    """Do nothing: the connection is closed."""
