"""The owner's side of meetings: it listens, greets visitors, and keeps what each was given until it has gone."""

from __future__ import annotations

import hmac
import json
import logging
import select
import socket
import threading
import time
from itertools import accumulate

from kvplan.agents.channel import CLOSING, HELD, HELD_NBYTES, MESSAGE, PACKET, Channel
from kvplan.agents.greeting import ANSWER_SECONDS, PROOF_NBYTES, REFUSED, challenge, welcome
from kvplan.agents.identity import Life, peer_of, this_process
from kvplan.agents.loop import Loop, Watcher
from kvplan.agents.sockets import BACKLOG, Listener
from kvplan.agents.way import Served
from kvplan.agents.ways import Offers
from kvplan.errors import KVPlanError, TransferError

PAUSE_SECONDS = 0.1  # after the system had no descriptor for a visitor
STRANGERS = 2 * BACKLOG  # most connections that have not proved that they hold the card; the oldest gives way

log = logging.getLogger("kvplan.agents")


class Door(Watcher):
    """The listening socket of an agent, its greetings and its visitors.

    Args:
        name: name of the agent.
        agent: identity of the agent.
        key: key of its card.
        offers: what it offers.
        users: users whose processes may visit.
        loop: the service thread.

    Attributes:
        listener: its listening socket.
        visitors: visitors that hold descriptors or handles of this process's memory.
        late: notes of visitors that have gone, with the visitor's name.
    """

    def __init__(self, name: str, agent: bytes, key: bytes, offers: Offers, users: frozenset[int], loop: Loop) -> None:
        self.name, self.agent, self.key, self.offers, self.users, self.loop = name, agent, key, offers, users, loop
        self.visitors: dict[int, Visitor] = {}
        self.late: list[tuple[str, bytes]] = []
        self.parting = threading.RLock()  # held while a visitor's notes go to ``late``, and while notes are taken
        self.closing = False
        self._greetings: dict[int, Greeting] = {}
        self.listener = Listener(name, others=users != {this_process().uid})
        loop.add(self)

    # The service thread calls these methods.

    def files(self) -> dict[int, int]:
        """Return the listening socket."""
        return {self.listener.sock.fileno(): select.POLLIN}

    def serve(self) -> None:
        """Accept those who wait, and greet those of users who may visit."""
        for _ in range(BACKLOG):
            try:
                sock, _ = self.listener.sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if not self.closing:
                    log.warning("%s cannot accept a visitor: %s", self.name, error)
                    time.sleep(PAUSE_SECONDS)  # it would try again at once, as long as somebody waits
                return
            self._greet(sock)

    def _greet(self, sock: socket.socket) -> None:
        _, uid = peer_of(sock)
        greeting = Greeting(self, sock)
        if uid not in self.users:
            greeting.end(f"{self.name!r} does not allow user {uid}; it would by users=[{uid}]")
            return
        if len(self._greetings) >= STRANGERS:
            next(iter(self._greetings.values())).end("too many others wait at the door")
        self._greetings[id(greeting)] = greeting
        self.loop.add(greeting)
        greeting.serve()

    def forget(self, greeting: Greeting) -> None:
        """Remove a greeting that has ended."""
        self._greetings.pop(id(greeting), None)
        self.loop.remove(greeting)

    def admit(self, visitor: Visitor) -> None:
        """Add a visitor whose greeting has succeeded."""
        self.visitors[id(visitor)] = visitor
        self.loop.add(visitor)
        if self.closing:  # since its greeting
            visitor.tell(CLOSING)

    def leave(self, visitor: Visitor) -> None:
        """Remove a visitor that has gone."""
        notes = visitor.notes()
        room = HELD_NBYTES - sum(len(note) for _, note in self.late)
        kept = sum(nbytes <= room for nbytes in accumulate(map(len, notes[: max(HELD - len(self.late), 0)])))
        self.late += [(visitor.name, note) for note in notes[:kept]]
        if lost := len(notes) - kept:
            log.error("%s lost %d notes of %s, which has gone: nobody takes its notes", self.name, lost, visitor.name)
        self.visitors.pop(id(visitor), None)
        self.loop.remove(visitor)

    # The agent calls these methods.

    def notes(self) -> list[tuple[str, bytes]]:
        """Return all notes of visitors, each once."""
        with self.parting:
            late, self.late = self.late, []
            return late + [(visitor.name, note) for visitor in list(self.visitors.values()) for note in visitor.notes()]

    def read(self) -> None:
        """Take the messages of visitors that have come; never block."""
        for visitor in list(self.visitors.values()):
            visitor.channel.read()

    def begin_to_close(self) -> None:
        """Accept no more visitors, and tell those that are here."""
        self.closing = True
        self.listener.close()
        for greeting in list(self._greetings.values()):
            greeting.end(f"{self.name!r} closes its agent")
        for visitor in list(self.visitors.values()):
            visitor.tell(CLOSING)
        self.loop.wake()

    def drop(self) -> None:
        """Close all descriptors in a forked child."""
        self.listener.sock.close()
        for greeting in self._greetings.values():
            greeting.sock.close()
        for visitor in self.visitors.values():
            visitor.channel.drop()


class Greeting(Watcher):
    """A connection that has not yet proved that it holds the card."""

    def __init__(self, door: Door, sock: socket.socket) -> None:
        sock.settimeout(0)
        self.sock = sock
        self._door = door
        self._until = time.monotonic() + ANSWER_SECONDS
        self._name: str | None = None
        self._proof = b""  # that the visitor must give

    def files(self) -> dict[int, int]:
        """Return the socket."""
        return {self.sock.fileno(): select.POLLIN}

    def due(self) -> float | None:
        """Return when the visitor must have answered."""
        return self._until

    def serve(self) -> None:
        """Read the visitor's next packet, and answer it."""
        if self.sock.fileno() < 0:
            self.end()
            return
        if time.monotonic() > self._until:
            self.end("no answer in time")
            return
        try:
            packet = self.sock.recv(PACKET + 1)
            if not packet:
                self.end()
            elif self._name is None:
                self._challenge(packet)
            else:
                self._admit(packet, self._name)
        except BlockingIOError:
            return
        except KVPlanError as error:
            self.end(str(error))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.end(f"its packet cannot be read ({error})")
        except OSError as error:
            log.debug("a greeting with %s broke off: %s", self._door.name, error)
            self.end()

    def end(self, why: str | None = None) -> None:
        """End the greeting; tell the visitor why."""
        if self.sock.fileno() >= 0:
            if why is not None:
                log.info("%s refused a visitor: %s", self._door.name, why)
                try:
                    self.sock.send(REFUSED + why.encode()[:400], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                except OSError as error:
                    log.debug("the visitor does not read why: %s", error)
            self.sock.close()
        self._door.forget(self)

    def _challenge(self, hello: bytes) -> None:
        self._name = json.loads(hello)["name"]
        packet, self._proof = challenge(self._door.key, hello)
        self.sock.send(packet)

    def _admit(self, packet: bytes, name: str) -> None:
        door = self._door
        if not hmac.compare_digest(packet[:PROOF_NBYTES], self._proof):
            raise TransferError("the visitor does not hold the key of the card")
        offers = json.loads(packet[PROOF_NBYTES:])
        life = Life(self.sock)
        visitor = Visitor(door, self.sock, life, name)
        try:
            for transport, number in offers.items():
                visitor.served[transport] = door.offers.serve(transport, number)
            for part, descriptors in welcome(visitor.served):
                visitor.channel.send(part, descriptors)
        except BaseException:
            visitor.release()
            life.close()
            raise
        door.forget(self)
        door.admit(visitor)


class Visitor(Watcher):
    """Another process that has met this one.

    Attributes:
        name: name of its agent.
        channel: the connection.
        served: what it was given, by transport.
    """

    def __init__(self, door: Door, sock: socket.socket, life: Life, name: str) -> None:
        self.name = name
        self.served: dict[str, Served] = {}
        self._door = door
        self._left = False
        self._last: list[bytes] = []  # notes that transports had when it left
        self.channel = Channel(sock, life, name, self._hear, self._told, door.loop.wake)

    def files(self) -> dict[int, int]:
        """Return the socket and the process."""
        return {self.channel.sock.fileno(): self.channel.wanted(), self.channel.life.fd: select.POLLIN}

    def serve(self) -> None:
        """Read and write what can be, and let the visitor go if it has gone."""
        self.channel.read()
        self.channel.flush()
        if self._left or self.channel.death() is not None:
            with self._door.parting:
                self.channel.close(f"{self.name!r} has gone")
                self.release()
                self._door.leave(self)

    def notes(self) -> list[bytes]:
        """Return its notes, each once."""
        last, self._last = self._last, []
        found = self.channel.notes() + last
        return found + [note for one in list(self.served.values()) for note in one.notes()]

    def tell(self, packet: bytes) -> None:
        """Send a packet; a visitor that has gone needs none."""
        try:
            self.channel.send(packet)
        except TransferError as error:
            log.debug("%s was not told: %s", self.name, error)

    def release(self) -> None:
        """Give back what it was given."""
        served, self.served = self.served, {}
        for one in served.values():
            self._last += one.notes()
            one.close()

    def _hear(self, transport: str, message: bytes) -> None:
        self.served[transport].heard(message)

    def _told(self, packet: bytes) -> None:
        del packet  # it says goodbye
        self._left = True
        self._door.loop.wake()


def message_of(transport: str, message: bytes) -> bytes:
    """Return the packet of a transport's message."""
    return MESSAGE + transport.encode() + b"\0" + message
