"""The owner's side of meetings: it listens, greets visitors, and keeps what each was given until it has gone."""

from __future__ import annotations

import hmac
import json
import logging
import socket
import threading
import time
from contextlib import suppress

from kvplan.agents.board import BOARD_NBYTES, ENDED, LANES, NoteReader, OwnerOrder
from kvplan.agents.connection import ANSWER_SECONDS, NOW, PACKET, REFUSED, Connection, Loop, Watcher, hand_over
from kvplan.agents.local_memory import Offers, Table
from kvplan.agents.sockets import BACKLOG, Life, Listener, peer_of, this_process
from kvplan.cuda.shared_words import RELEASED, SharedWords
from kvplan.errors import KVPlanError, TransferError

STRANGERS = BACKLOG  # most connections that have not shown the key of the card; the oldest gives way
PAUSE_SECONDS = 0.1  # after the system had no descriptor for a visitor
KEPT_NBYTES = 64 << 20  # most bytes of the notes of visitors that have gone; later ones are lost

log = logging.getLogger("kvplan.agents")


class Visitors(Watcher):
    """The listening socket of an agent, what it offers, and its visitors.

    Args:
        name: name of the agent.
        key: key of its card.
        offers: what it offers.
        users: users whose processes may visit.
        loop: the service thread.

    Attributes:
        name, key, offers, loop: as given.
        offering: held while the offers change, and while a visitor is given some.
        listener: its listening socket.
        order: the order of this process's work and that of visitors, on its GPUs.
        here: visitors that hold descriptors or handles of this process's memory.
        strangers: those that have not shown the key, in the order in which they came.
        closing: whether it accepts no more visitors.
    """

    def __init__(self, name: str, key: str, offers: Offers, users: frozenset[int], loop: Loop) -> None:
        self.name, self.key, self.offers, self.loop = name, key, offers, loop
        self.offering, self.order, self.closing = threading.RLock(), OwnerOrder(), False
        self.here: dict[int, Visitor] = {}
        self.strangers: dict[int, Visitor] = {}
        self._users = users
        self._last_notes: list[tuple[str, bytes]] = []  # of visitors that have gone
        self._parting = threading.RLock()  # held while a visitor's last notes are kept, and while notes are taken
        self.listener = Listener(name, others=users != {this_process().uid})
        loop.add(self)

    def files(self) -> tuple[int, ...]:
        """Return the listening socket."""
        return (self.listener.sock.fileno(),)

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
            _, uid = peer_of(sock)
            if uid in self._users:
                if len(self.strangers) >= STRANGERS:
                    next(iter(self.strangers.values())).end("too many others wait at the door")
                visitor = Visitor(self, sock)
                self.strangers[id(visitor)] = visitor
                self.loop.add(visitor)
            else:
                _refuse(sock, f"{self.name!r} does not allow user {uid}; it would by users=[{uid}]")

    def admit(self, visitor: Visitor, wish: Table) -> None:
        """Give a visitor what it asks for; raise TransferError if it must have none."""
        if not hmac.compare_digest(wish["key"].encode(), self.key.encode()):
            raise TransferError("the visitor does not hold the key of the card")
        with self.offering:
            if self.closing:
                raise TransferError(f"{self.name!r} closes its agent")
            if wish["offer"] != self.offers.number:
                raise TransferError("other memory is offered by now; ask for a new card")
            files = [file for name in wish["transports"] for file in self.offers.offers[name].descriptors]
            visitor.enter(wish["name"], self.offers)
            self.order.enter(visitor.words)
            hand_over(visitor.sock, [visitor.words.descriptor, *files])

    def leave(self, visitor: Visitor) -> None:
        """Give back what a visitor was given, which has gone, and keep its last notes."""
        with self._parting:
            notes = [(visitor.name, note) for note in visitor.notes.arrived()]
            if sum(len(note) for _, note in [*self._last_notes, *notes]) <= KEPT_NBYTES:
                self._last_notes += notes
            else:
                log.error("%s lost %d notes of %s, which has gone", self.name, len(notes), visitor.name)
            self.here.pop(id(visitor), None)
        for lane in range(LANES):  # streams that wait for a visitor that died go on
            visitor.words.store(ENDED + lane, RELEASED)
        self.order.leave(visitor.words)

    def notes(self) -> list[tuple[str, bytes]]:
        """Return all notes of visitors, each once."""
        with self._parting:
            last, self._last_notes = self._last_notes, []
            return last + [(one.name, note) for one in list(self.here.values()) for note in one.notes.arrived()]

    def begin_to_close(self) -> None:
        """Accept no more visitors, and ask those that are here to part."""
        with self.offering:
            self.closing = True
            for stranger in list(self.strangers.values()):
                stranger.end(f"{self.name!r} closes its agent")
        self.loop.remove(self)
        self.listener.close()
        for visitor in list(self.here.values()):
            visitor.say_farewell()


class Visitor(Connection):
    """Another process that has come to meet this one. Until it has shown the key of the card, it has nothing.

    Args:
        door: the other visitors.
        sock: the connection.

    Attributes:
        words: the board, which both share.
        notes: its notes.
        gave: what it was given.
    """

    words: SharedWords
    notes: NoteReader
    gave: Offers
    _admitted = False

    def __init__(self, door: Visitors, sock: socket.socket) -> None:
        super().__init__(sock, Life(sock), "a visitor", door.loop)
        self._door, self._until = door, time.monotonic() + ANSWER_SECONDS

    def due(self) -> float | None:
        """Return when the visitor must have said what it wants."""
        return None if self._admitted else self._until

    def serve(self) -> None:
        """Hear what the visitor wants, or let it go if it has gone."""
        try:
            if not self._admitted:
                self._hear()
        except BlockingIOError:
            if time.monotonic() > self._until:
                self.end("no answer in time")
        except Exception as error:
            self.end(str(error) if isinstance(error, KVPlanError) else f"its packet cannot be read ({error})")
        if self._admitted and self.gone is None and self.look() is not None:
            self.end()

    def enter(self, name: str, offers: Offers) -> None:
        """Be one of those who are here."""
        self.words = SharedWords(BOARD_NBYTES)
        self.name, self.gave, self.notes, self._admitted = name, offers, NoteReader(self.words), True
        self._door.here[id(self)] = self
        self._door.strangers.pop(id(self), None)

    def _hear(self) -> None:
        if packet := self.sock.recv(PACKET):
            self._door.admit(self, json.loads(packet))
        else:
            self.end()

    def end(self, why: str = "") -> None:
        """Let it go, and tell it why."""
        if why:
            log.info("%s refused a visitor: %s", self._door.name, why)
            _refuse(self.sock, why)
        self.loop.remove(self)
        self._door.strangers.pop(id(self), None)
        self.hang_up(f"{self.name!r} has gone")
        if self._admitted:
            self._door.leave(self)


def _refuse(sock: socket.socket, why: str) -> None:
    with suppress(OSError):
        sock.send(REFUSED + why.encode()[:400], NOW)
    sock.close()
