"""The socket between a visitor and an owner, once they have greeted: it tells when the other side parts or dies."""

from __future__ import annotations

import logging
import select
import socket

from kvplan.agents.identity import Life
from kvplan.base.threads import Call

FAREWELL = b"G"  # an owner asks the visitor to part; a visitor has parted

log = logging.getLogger("kvplan.agents")


class Connection:
    """A connection to another process.

    Args:
        sock: the connected socket, of packets.
        life: the other process.
        name: name of the other agent, for messages.
        wake: called when this process has noticed the other side's end, so that the agent's thread closes the rest.

    Attributes:
        name: as given.
        gone: why the other side is gone; None while it is there.
        parts: whether the other side has said farewell.
    """

    def __init__(self, sock: socket.socket, life: Life, name: str, wake: Call) -> None:
        sock.settimeout(0)
        self.sock, self.life, self.name, self._wake = sock, life, name, wake
        self.gone: str | None = None
        self.parts = False

    def files(self) -> dict[int, int]:
        """Return the descriptors that tell when the other side parts or dies; none once it is gone."""
        return {} if self.gone is not None else {self.sock.fileno(): select.POLLIN, self.life.fd: select.POLLIN}

    def look(self) -> str | None:
        """Read what has come; return why the other side is gone, or None. It never blocks."""
        try:
            while self.gone is None:
                if self.sock.recv(len(FAREWELL), socket.MSG_DONTWAIT):
                    self.parts = True
                else:
                    self._end()
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(f"the connection to {self.name!r} broke: {error.strerror or error}")
        return self.death()

    def death(self) -> str | None:
        """Return why the other side is gone as of now, or None if its process lives and its agent is open."""
        if self.gone is None:
            if self.life.over():
                self._lose(f"the process of {self.name!r} has ended")
            elif self._hung_up():
                self._end()
        return self.gone

    def say_farewell(self) -> None:
        """Say farewell; a side that is gone need not hear it."""
        try:
            self.sock.send(FAREWELL, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as error:
            log.debug("%s was not told: %s", self.name, error)

    def close(self, why: str) -> None:
        """Close this process's descriptors, also in a forked child; then the other side is gone."""
        self.gone = self.gone or why
        self.sock.close()
        self.life.close()

    def _hung_up(self) -> bool:
        poll = select.poll()
        try:
            poll.register(self.sock, select.POLLRDHUP)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True

    def _end(self) -> None:
        self._lose(f"{self.name!r} has closed its agent, or its process has ended")

    def _lose(self, why: str) -> None:
        if self.gone is None:
            self.gone = why
            log.info("%s", why)
            self._wake()
