"""The owner's side of meetings: it listens, greets visitors, and keeps what each was given until it has gone."""

from __future__ import annotations

import hmac
import json
import logging
import select
import socket
import threading
import time

from kvplan.agents.board import BOARD_NBYTES, ENDED, LANES, NoteReader
from kvplan.agents.connection import Connection
from kvplan.agents.gpu_order import OwnerOrder
from kvplan.agents.greeting import ANSWER_SECONDS, PACKET, PROOF_NBYTES, REFUSED, challenge, welcome
from kvplan.agents.identity import Life, peer_of, this_process
from kvplan.agents.loop import Loop, Watcher
from kvplan.agents.offers import Offered, Offers
from kvplan.agents.sockets import BACKLOG, Listener
from kvplan.cuda.shared_words import RELEASED, SharedWords
from kvplan.errors import KVPlanError, TransferError

PAUSE_SECONDS = 0.1  # after the system had no descriptor for a visitor
STRANGERS = 2 * BACKLOG  # most connections that have not proved that they hold the card; the oldest gives way
KEPT_NBYTES = 64 << 20  # most bytes of the notes of visitors that have gone; later ones are lost

log = logging.getLogger("kvplan.agents")


class Visitors(Watcher):
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
        order: the order of this process's work and that of visitors, on its GPUs.
        here: visitors that hold descriptors or handles of this process's memory.
        closing: whether it accepts no more visitors.
    """

    def __init__(self, name: str, agent: bytes, key: bytes, offers: Offers, users: frozenset[int], loop: Loop) -> None:
        self.name, self.agent, self.key, self.offers, self.users, self.loop = name, agent, key, offers, users, loop
        self.order = OwnerOrder()
        self.here: dict[int, Visitor] = {}
        self.closing = False
        self._last_notes: list[tuple[str, bytes]] = []  # of visitors that have gone
        self._parting = threading.RLock()  # held while a visitor's last notes are kept, and while notes are taken
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
        self.here[id(visitor)] = visitor
        self.loop.add(visitor)
        if self.closing:  # since its greeting
            visitor.connection.say_farewell()

    def leave(self, visitor: Visitor) -> None:
        """Give back what a visitor was given, which has gone, and keep its last notes."""
        with self._parting:
            notes = [(visitor.name, note) for note in visitor.notes.arrived()]
            if sum(len(note) for _, note in [*self._last_notes, *notes]) <= KEPT_NBYTES:
                self._last_notes += notes
            else:
                log.error("%s lost %d notes of %s, which has gone", self.name, len(notes), visitor.name)
            self.here.pop(id(visitor), None)
        visitor.close()
        self.loop.remove(visitor)

    # The agent calls these methods.

    def notes(self) -> list[tuple[str, bytes]]:
        """Return all notes of visitors, each once."""
        with self._parting:
            last, self._last_notes = self._last_notes, []
            return last + [(one.name, note) for one in list(self.here.values()) for note in one.notes.arrived()]

    def begin_to_close(self) -> None:
        """Accept no more visitors, and ask those that are here to part."""
        self.closing = True
        self.listener.close()
        for greeting in list(self._greetings.values()):
            greeting.end(f"{self.name!r} closes its agent")
        for visitor in list(self.here.values()):
            visitor.connection.say_farewell()
        self.loop.wake()

    def drop(self) -> None:
        """Close all descriptors in a forked child."""
        self.listener.sock.close()
        for greeting in self._greetings.values():
            greeting.sock.close()
        for visitor in self.here.values():
            visitor.connection.close("")


class Greeting(Watcher):
    """A connection that has not yet proved that it holds the card."""

    def __init__(self, door: Visitors, sock: socket.socket) -> None:
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
            packet = self.sock.recv(PACKET)
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
        wish = json.loads(packet[PROOF_NBYTES:])
        with door.offers.entered(wish["offer"]) as offered:
            files = [file for one in wish["transports"] for file in offered.offers[one].descriptors]
            words = SharedWords(BOARD_NBYTES)
            try:
                door.order.enter(words)
            except BaseException:
                door.order.leave(words)
                raise
            door.admit(Visitor(door, self.sock, name, words, offered))  # first: nobody is to have memory unseen
            welcome(self.sock, [words.descriptor, *files])
        door.forget(self)


class Visitor(Watcher):
    """Another process that has met this one.

    Args:
        door: the other visitors.
        sock: the connection.
        name: name of its agent.
        words: the board, which both share.
        offered: what it was given.

    Attributes:
        name, offered: as given.
        connection: the connection.
        notes: its notes.
    """

    def __init__(self, door: Visitors, sock: socket.socket, name: str, words: SharedWords, offered: Offered) -> None:
        self.name, self.offered = name, offered
        self._door, self._words = door, words
        self.notes = NoteReader(words)
        self.connection = Connection(sock, Life(sock), name, door.loop.wake)

    def files(self) -> dict[int, int]:
        """Return the descriptors that tell of its end."""
        return self.connection.files()

    def serve(self) -> None:
        """Let the visitor go if it has gone."""
        if self.connection.look() is not None or self.connection.parts:
            self._door.leave(self)

    def close(self) -> None:
        """Close the connection, and give the board back. Streams that wait for a visitor that died go on."""
        self.connection.close(f"{self.name!r} has gone")
        for lane in range(LANES):
            self._words.store(ENDED + lane, RELEASED)
        self._door.order.leave(self._words)
