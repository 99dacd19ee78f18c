"""The visitor's side of a meeting, the thread that serves connections, and who parts or dies.

Each side looks at the user of the other one by the kernel's credentials. Then the visitor sends its name, the key of
the card, which offer it has the card of, and the transports by which it takes it. The owner answers with descriptors:
of the board, and of each transport.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Protocol

from kvplan.agents.board import BOARD_NBYTES, LANES, NoteWriter, VisitorOrder
from kvplan.agents.card import AgentCard, Choice
from kvplan.agents.local_memory import Opened, Transport, close_all
from kvplan.agents.sockets import Life, peer_of
from kvplan.base.threads import Latch, Worker
from kvplan.cuda.device import Device
from kvplan.cuda.shared_words import SharedWords
from kvplan.errors import PathError, TransferError

ANSWER_SECONDS = 5.0  # an owner drops a visitor that says nothing in this time
PACKET = 1 << 16  # most bytes of a packet
BATCH = 250  # most descriptors of one packet; Linux takes 253
RETRY_SECONDS = 2e-3  # between two tries to connect to an owner at whose door too many wait
REFUSED, FILES, DONE = b"R", b"F", b"D"  # the first byte of the owner's packets
FAREWELL = b"G"  # an owner asks the visitor to part
NOW = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL

log = logging.getLogger("kvplan.agents")


class Watcher(ABC):
    """An object that the service thread serves. All its methods are called in that thread, and none may block."""

    def files(self) -> tuple[int, ...]:
        """Return the descriptors to wait for, until they can be read; -1 stands for none."""
        return ()

    def due(self) -> float | None:
        """Return when to call :meth:`serve` at the latest, as ``time.monotonic`` counts; None if only for events."""
        return None

    @abstractmethod
    def serve(self) -> None:
        """Do what can be done now: an event has come, the time is due, or :meth:`Loop.wake` was called."""


class Loop:
    """The service thread. It starts with :meth:`start`, and ends after :meth:`stop`."""

    def __init__(self) -> None:
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._watchers: dict[int, Watcher] = {}
        self._stopped = False
        self._closing = threading.RLock()
        self.thread = Worker("kvplan-agent", self._serve, "no thread serves the peers of an agent")

    def start(self) -> None:
        """Start the thread, if it does not run; raise TransferError if the system cannot."""
        if not self.thread.started:
            self.thread.start()

    def add(self, watcher: Watcher) -> None:
        """Serve a watcher until :meth:`remove`."""
        self._watchers[id(watcher)] = watcher
        self.wake()

    def remove(self, watcher: Watcher) -> None:
        """Serve a watcher no more."""
        self._watchers.pop(id(watcher), None)
        self.wake()

    def wake(self) -> None:
        """Let the thread look at all watchers again; any thread may call it."""
        with self._closing, contextlib.suppress(BlockingIOError):  # once closed, the number may be another file's
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End the thread, and return at once."""
        self._stopped = True
        self.wake()
        if not self.thread.started:
            self._close()

    def _close(self) -> None:
        with self._closing:
            fd, self._wake = self._wake, -1
            if fd >= 0:
                os.close(fd)

    def _serve(self) -> None:
        try:
            while not self._stopped:
                for watcher in self._wait():
                    guarded(watcher.serve)
        finally:
            self._close()

    def _wait(self) -> list[Watcher]:
        """Wait, and return the watchers to serve: those that have an event or are due, or all after a wake."""
        poll, watchers, dues = select.poll(), dict(self._watchers), dict[int, float]()
        files = {self._wake: 0}
        for number, watcher in watchers.items():
            files |= {fd: number for fd in watcher.files() if fd >= 0}
            if (at := watcher.due()) is not None:
                dues[number] = at
        for fd in files:
            poll.register(fd, select.POLLIN)
        timeout = max(0.0, min(dues.values()) - time.monotonic()) * 1000 if dues else None
        ready = {files[fd] for fd, _ in poll.poll(timeout)}
        if 0 in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            return list(self._watchers.values())
        now = time.monotonic()
        return [watcher for number, watcher in watchers.items() if number in ready or dues.get(number, now + 1) <= now]


def guarded(call: Callable[[], object]) -> None:
    """Call a function of a watcher; an error must not end the service of the others."""
    try:
        call()
    except Exception:
        log.exception("the service thread of an agent met an error")


class Greeted(NamedTuple):
    """The end of a greeting, in the visitor.

    Attributes:
        sock: the connected socket.
        life: the owner's process.
        uid: number of its user, as this process counts users.
        descriptors: the owner's, in order: the board's, then those of each transport; the caller closes them.
    """

    sock: socket.socket
    life: Life
    uid: int
    descriptors: list[int]


def greet(card: AgentCard, name: str, wanted: Mapping[str, int], users: Collection[int], until: float) -> Greeted:
    """Connect to the owner of a card, and greet it.

    Args:
        card: the card.
        name: name of the visitor's agent.
        wanted: for each transport that the visitor takes, the number of descriptors that it needs.
        users: users whose cards are accepted.
        until: when to give up, as ``time.monotonic`` counts.

    Raises:
        PathError: the owner is of another user.
        TransferError: the owner is gone, does not answer in time, or refuses.
    """
    descriptors: list[int] = []
    wish = {"name": name, "key": card.key, "offer": card.offer, "transports": list(wanted)}
    with ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        undo.callback(close_all, descriptors)
        try:
            _connect(sock, card, until)
            _, uid = peer_of(sock)
            if uid not in users:
                raise PathError(f"{card.name!r} runs as user {uid}; to accept its card, give users=[{uid}]")
            life = Life(sock)
            undo.callback(life.close)
            with contextlib.suppress(ConnectionError):  # it refused this user at once; its reason can still be read
                sock.send(json.dumps(wish).encode())
            _receive(sock, card, 1 + sum(wanted.values()), descriptors, until)
        except TimeoutError:
            raise TransferError(f"{card.name!r} did not answer in time; is its process stopped or very busy?") from None
        except OSError as error:
            raise TransferError(f"the greeting with {card.name!r} broke off: {error.strerror or error}") from error
        undo.pop_all()
    return Greeted(sock, life, uid, descriptors)


def _connect(sock: socket.socket, card: AgentCard, until: float) -> None:
    while True:
        _limit(sock, until)
        try:
            return sock.connect(card.address)
        except BlockingIOError:  # others wait there, too
            time.sleep(RETRY_SECONDS)
        except (ConnectionRefusedError, FileNotFoundError):
            raise TransferError(
                f"nobody answers the card of {card.name!r}: its process {card.pid} has ended or closed its agent; a "
                "process that was started again has another card"
            ) from None
        except PermissionError:
            raise TransferError(
                f"{card.name!r} does not allow user {os.geteuid()}; it would by users=[{os.geteuid()}]"
            ) from None


def _receive(sock: socket.socket, card: AgentCard, wanted: int, descriptors: list[int], until: float) -> None:
    packet = b""
    while packet[:1] != DONE:
        _limit(sock, until)
        try:
            packet, received, _, _ = socket.recv_fds(sock, PACKET, BATCH, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:  # it left a packet unread; its own are still here
            continue
        descriptors.extend(received)
        if not packet:
            raise TransferError(f"{card.name!r} closed the connection in the greeting; is the card still the newest?")
        if packet[:1] == REFUSED:
            raise TransferError(f"{card.name!r} refused: {packet[1:].decode(errors='replace')}")
    if len(descriptors) != wanted:  # those beyond the limit of this process are not received
        raise TransferError(
            f"{len(descriptors)} descriptors came from {card.name!r}, and not {wanted}; is this process at its limit "
            "(ulimit -n)?"
        )


def _limit(sock: socket.socket, until: float) -> None:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(left)


def hand_over(sock: socket.socket, files: Sequence[int]) -> None:
    """Send an owner's descriptors."""
    for k in range(0, len(files), BATCH):
        socket.send_fds(sock, [FILES], list(files[k : k + BATCH]), NOW)
    sock.send(DONE, NOW)


class Connection(Watcher):
    """A connection to another process.

    Args:
        sock: the connected socket, of packets.
        life: the other process.
        name: name of the other agent, for messages.
        loop: the service thread, which closes the rest when this process has noticed the other side's end.

    Attributes:
        sock, life, name, loop: as given.
        gone: why the other side is gone; None while it is there.
        parts: whether the other side has asked this one to part.
    """

    def __init__(self, sock: socket.socket, life: Life, name: str, loop: Loop) -> None:
        sock.settimeout(0)
        self.sock, self.life, self.name, self.loop = sock, life, name, loop
        self.gone: str | None = None
        self.parts = False

    def files(self) -> tuple[int, ...]:
        """Return the descriptors that tell when the other side parts or dies; none once it is gone."""
        return () if self.gone is not None else (self.sock.fileno(), self.life.fd)

    def look(self) -> str | None:
        """Read what has come; return why the other side is gone, or None. It never blocks."""
        with contextlib.suppress(OSError):  # nothing has come, or the connection broke
            while self.gone is None and self.sock.recv(len(FAREWELL), socket.MSG_DONTWAIT):
                self.parts = True
        return self.death()

    def death(self) -> str | None:
        """Return why the other side is gone as of now, or None if its process lives and its agent is open."""
        if self.gone is None:
            if self.life.over():
                self.gone = f"the process of {self.name!r} has ended"
            elif self._hung_up():
                self.gone = f"{self.name!r} has closed its agent, or its process has ended"
            if self.gone is not None:
                log.info("%s", self.gone)
                self.loop.wake()
        return self.gone

    def say_farewell(self) -> None:
        """Ask the other side to part; one that is gone need not hear it."""
        with contextlib.suppress(OSError):
            self.sock.send(FAREWELL, NOW)

    def hang_up(self, why: str) -> None:
        """End the connection, also for a forked child that holds it; then the other side is gone."""
        self.gone = self.gone or why
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        self.life.close()

    def _hung_up(self) -> bool:
        poll = select.poll()
        try:
            poll.register(self.sock, select.POLLRDHUP)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True


class Flying(Protocol):
    """The method of a transfer in flight that its link calls."""

    def cancel(self) -> bool:
        """Cancel it if it has not begun."""


class Link(Connection):
    """The connection to an owner. It ends when the owner dies or closes, or when this process leaves.

    Args:
        card: the owner's card.
        greeted: the greeting with it.
        loop: the service thread.
        parted: called at its end.

    Attributes:
        agent: identity of the owner's agent.
        opened: the owner's memory, by transport.
        order: the order of transfers on this process's GPU, if the owner's memory is of GPUs.
        notes: what sends notes to the owner.
        ended: set at its end, when no transfer is in flight. Then it holds nothing but, if the owner ended it, mapped
            host memory, which executors may still read: that goes with its last layout, or when this process leaves.
        why: why no transfer is accepted any more; None while the link is open.
    """

    def __init__(self, card: AgentCard, greeted: Greeted, loop: Loop, parted: Callable[[Link], None]) -> None:
        super().__init__(greeted.sock, greeted.life, card.name, loop)
        self.agent, self._parted = card.agent, parted
        self.opened: dict[str, Opened] = {}
        self.order: VisitorOrder | None = None
        self.why: str | None = None
        self.ended = Latch()
        self._lock = threading.RLock()  # the board stays while it is held
        self._flying: dict[int, Flying] = {}
        self._counted = [0] * LANES  # the last transfer of each lane that has ended, as its GPU counts
        self._leaving = self._lost = False
        self._board = SharedWords.opened(greeted.descriptors[0], BOARD_NBYTES)
        self.notes = NoteWriter(self._board, card.name)

    def open(self, transports: Mapping[str, Transport], choice: Choice, greeted: Greeted) -> None:
        """Open the owner's memory, by the descriptors that came behind the board's.

        Raises:
            LayoutError: what the descriptors map is not what the card says.
            PathError, TransferError: the system refuses.
        """
        descriptors = greeted.descriptors[1:]
        for name, number in choice.wanted.items():
            mine, descriptors = descriptors[:number], descriptors[number:]
            opened = self.opened[name] = transports[name].open(choice.data[name], mine, self.name, greeted.uid)
            if opened.gpu is not None:
                self.order = VisitorOrder(Device(opened.gpu), self._board, opened.gpus)

    # ---- transfers ---------------------------------------------------------------------------------------------------

    def enter(self, transfer: Flying) -> None:
        """Count a transfer as in flight; raise TransferError if the link is not open.

        It is counted first, without a lock. A link that is closed meanwhile then finds it, or is found closed here.
        """
        self._flying[id(transfer)] = transfer
        if self.why is not None or self.gone is not None:
            self.leave_flight(transfer)
            self.check_open()

    def leave_flight(self, transfer: Flying) -> None:
        """Count a transfer as ended; any thread may call it, also twice."""
        self._flying.pop(id(transfer), None)
        if self.why is not None:
            self.loop.wake()

    def check_open(self) -> None:
        """Raise TransferError if the link is not open."""
        why = self.why or self.gone  # noted first by the thread that asked, and then by the service thread
        if why is not None:
            raise TransferError(f"no transfer with {self.name!r}: {why}")

    @property
    def in_flight(self) -> int:
        """Number of transfers in flight."""
        return len(self._flying)

    def waits(self) -> str:
        """Return what must end before the link can, for a message."""
        return f"{len(self._flying)} transfers with {self.name!r} are in flight"

    def ended_as(self, lane: int, number: int) -> None:
        """Take it that the transfer of a number has ended; notes that are sent alone come behind its note."""
        self._counted[lane] = max(self._counted[lane], number)

    def send(self, note: bytes) -> None:
        """Send a note now; raise TransferError if the owner is gone or does not read."""
        with self._lock:
            self.check_open()
            self.notes.write(note, needs=self._counted)

    # ---- the service thread ------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Notice the owner's end; close what is no longer used."""
        if self.ended.happened:
            return
        if (death := self.look()) is not None:
            self._shut(death)
            self._cancel_pending()
        elif self.parts:
            self._shut("its agent closes, or withdraws memory")
        if self.why is not None and not self._flying:
            self._end(self.why)

    def _end(self, why: str) -> None:
        if self.order is not None:
            guarded(self.order.close)
        for name, opened in self.opened.items():
            if self._leaving or name != "shm":
                _close(opened)
        with self._lock:
            self._board.close()
        self.hang_up(why)  # from now on the owner may free the memory
        self.loop.remove(self)
        self._parted(self)
        self.ended.set()

    def leave(self) -> None:
        """Accept no more transfers, and close everything once those in flight have ended."""
        self._leaving = True
        self._shut("the peer was forgotten, or this agent was closed")
        for opened in self.opened.values() if self.ended.happened else ():
            _close(opened)
        self.loop.wake()

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
