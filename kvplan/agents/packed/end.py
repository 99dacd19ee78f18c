"""This process's end of packed transfers: its ring, the lines to its peers, and the thread that makes progress."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Self

from kvplan.agents.packed import line as messages
from kvplan.agents.packed.line import ENDED, GREETS, OPEN, OVER, Inbox, Line, Message, Offer
from kvplan.agents.packed.packed_transfer import PATIENCE, Moving, PackedTransfer
from kvplan.agents.packed.ring import Place, Ring, Slots
from kvplan.agents.packed.traffic import Clock, Traffic
from kvplan.agents.peer_transfer import LatchedTransfer, Order
from kvplan.base.process import check_process, generation
from kvplan.base.threads import Bell, Worker, error_of
from kvplan.cost.wire import WireProfile
from kvplan.cuda.device import Device
from kvplan.cuda.reach import ordinal_of
from kvplan.errors import KVPlanError, TransferError
from kvplan.execute.executor import Executor
from kvplan.execute.stats import Tally

SILENCE = 30.0  # seconds without a word, after which a peer of transfers in flight is given up
WORD_SECONDS = 0.5  # between two words while something is in flight
IDLE_WORD_SECONDS = 5.0  # the same otherwise, so that nothing is kept of peers that have died
ANSWER_SECONDS = 1.0  # that a close waits for the answers of peers
LOOK_SECONDS = 5e-3  # between two looks at times
WAIT_NAP = 1e-4  # seconds between two looks of a wait

SPIN_SECONDS = 50e-6  # after a look that found something: the next ones follow without a nap
BUSY_NAP = 1e-4  # seconds between two looks while transfers are in flight
IDLE_NAP = 2e-4  # the same when nothing is in flight: a peer's direct transfer over TCP moves on by these looks
REST_NAP = 2e-3  # the same after REST_SECONDS
REST_SECONDS = 10.0
TIMER_SLACK = 29  # PR_SET_TIMERSLACK of prctl
SLACK_NS = 1000  # the default is 50,000: a nap of 100 us then takes over 150

log = logging.getLogger("kvplan.agents")


class End:
    """This process's end of packed transfers. The first transfer, or greeting, opens it: then it has a ring.

    Progress is made by :meth:`poll`: a thread calls it, or an engine's step and every wait for a transfer. Any thread
    may call the methods; one of them polls at a time.

    A line ends by an error of the wire, silence, a restart of the peer, or a call. Its transfers fail then. The slots
    that the peer may write come back when it has said that it writes no more, or is known to be dead: a message is not
    sent, and neither after a new connection. Then the next line to it may begin.

    Args:
        name: name of the agent.
        transport: the transport.
        offer: returns the memory that peers may name.
        executor: returns the executor of a device.
        slots: its ring; None for one that fits its device.
        threaded: whether a thread makes progress; otherwise :meth:`kvplan.Agent.poll` does.
        tally: sums to which transfers are added.
        now: the clock.

    Attributes:
        name, transport, offer, executor, tally: as given.
        asked: the ring that was asked for, or None.
        profiles: profiles of the wire, by NIXL's name of the memory.
        ring: this process's slots; None until it is opened.
        traffic: the chunks of its transfers.
        inbox: notes of peers for the user.
        refusals: by peer, why it takes no packed transfer.
        closed: whether no transfer begins any more.
        polling: held within a poll.
    """

    device: Callable[[], str]  # of the ring that is not allocated yet
    slots: Callable[[], Slots]  # of that ring
    ring: Any = None
    closed = _looking = _stopped = False

    def __init__(
        self, name: str, transport: Any, offer: Callable[[], Offer], executor: Callable[[str], Executor],
        slots: Slots | None = None, *, threaded: bool = True, tally: Tally | None = None, now: Clock = time.monotonic,
    ) -> None:  # fmt: skip
        self.name, self.tally, self.asked, self._threaded = name, tally or Tally(), slots, threaded
        self.inbox, self.refusals = Inbox(), dict[str, str]()
        self.traffic = Traffic(offer, self.inbox, self._end_line, now)
        self.transport, self.offer, self.executor, self._now = transport, offer, executor, now
        self.profiles: dict[str, WireProfile] = {}
        self._lines: dict[str, Line] = {}
        self._received, self._calls = deque[tuple[str, bytes]](), deque[Callable[[], object]]()
        self._mine: set[PackedTransfer] = set()  # those that have not ended
        self._waiting: list[PackedTransfer] = []  # those that wait for a gate, or for a line
        self.polling, self._reading = threading.RLock(), threading.RLock()
        self._looked_at = 0.0
        self._generation = generation()
        self._bell = Bell()
        self.wake = self._bell.ring  # lets the thread look now, if there is one
        self._thread = Worker("kvplan-nixl", self._serve, "no thread makes progress for NIXL")

    # ---- any thread --------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether something is in flight."""
        if self.traffic.copies or self.traffic.writes or self._calls or self._received or self._waiting:
            return True
        return any(line.moving or line.state >= ENDED for line in list(self._lines.values()))

    @property
    def in_flight(self) -> int:
        """Number of transfers that this end has begun and that have not ended."""
        return len(self._mine)

    @property
    def begun(self) -> bool:
        """Whether one of those does not wait for its ``after=``."""
        return any(not transfer.waits for transfer in list(self._mine))

    @property
    def peers(self) -> set[str]:
        """Names of the peers of lines that have not ended for good."""
        return set(self._lines)

    def answered(self, peer: str) -> bool:
        """Return whether a peer has answered a greeting."""
        line = self._lines.get(peer)
        return line is not None and line.state == OPEN

    def later(self, call: Callable[[], object]) -> None:
        """Let the thread that polls call a function between two of its steps."""
        self._calls.append(call)
        self.wake()

    def give_up(self, transfer: PackedTransfer, why: str) -> None:
        """Let the thread that polls end a transfer."""
        self.later(partial(self.traffic.fail, transfer, why))

    def part(self, peer: str, why: str, *, over: bool = False) -> None:
        """End the line to a peer; ``over`` is whether nothing of it moves any more."""
        self.refusals.pop(peer, None)

        def end() -> None:
            if (line := self._lines.get(peer)) is not None:
                self._end_line(line, why, over=over)
            for transfer in self._waiting:
                if transfer.peer == peer:
                    self.traffic.fail(transfer, why)

        self.later(end)

    def withdraw(self, timeout: float) -> bool:
        """Wait until transfers of peers that have begun have ended, then end the rest: other memory is offered now.

        Args:
            timeout: seconds that each of both may take.

        Returns:
            Whether no transfer of before copies any more.
        """
        with self.polling:
            begun = [each for line in self._lines.values() for each in line.moving.values() if not each.mine]

        def over() -> bool:
            return not any(moving.copying or not moving.stopped for moving in begun)

        if not self.waits(over, timeout):
            with self.polling:
                for moving in begun:
                    self.traffic.fail(moving, "its memory was deregistered")
        return self.waits(over, timeout)

    def waits(self, over: Callable[[], object], timeout: float) -> bool:
        """Wait until something is over, and move everything on if no thread does; return whether it is over."""
        until = time.monotonic() + timeout
        while not over() and time.monotonic() < until:
            self.wake()
            if self.threaded() or not self.poll():
                time.sleep(WAIT_NAP)
        return bool(over())

    def submit(self, order: Order, patience: float = PATIENCE) -> PackedTransfer:
        """Begin a transfer, and return at once.

        Args:
            order: a plan between layouts of this process and layouts of the peer, and more.
            patience: see :class:`.packed_transfer.PackedTransfer`.

        Raises:
            KVPlanError: an argument is wrong.
            TransferError: this end is closed.
        """
        check_process(self._generation)
        self._check_open()
        transfer = PackedTransfer(self, order, patience)
        self._mine.add(transfer)
        LatchedTransfer.add_done_callback(transfer, partial(self._mine.discard, transfer))
        self.later(partial(self._wait, transfer))
        if not self.threaded():
            self.poll()
        return transfer

    def _wait(self, transfer: PackedTransfer) -> None:
        line, alone = self._lines.get(transfer.peer), all(one.peer != transfer.peer for one in self._waiting)
        if line is not None and alone and not line.moving:  # nobody may have looked while nothing was in flight
            line.heard_at = self._now()
        self._waiting.append(transfer)

    def _check_open(self) -> None:
        if self.closed:
            raise TransferError(f"the agent {self.name!r} is closed")

    def poll(self) -> bool:
        """Move everything on that can move now; return whether anything did. One thread polls at a time."""
        if self._looking:
            return False
        with self.polling:
            try:
                self._looking = True
                return self._look()
            finally:
                self._looking = False

    def close(self, timeout: float = 5.0) -> None:
        """Part from all peers, wait until nothing moves in the ring, end the thread, and free the ring.

        Raises:
            TransferError: a peer has not said in time that its writes have ended, so that they may still move; or a
                chunk still moves here. Another call waits again.
        """
        if self._generation != generation():
            return
        self.closed = True
        for peer in list(self._lines):
            self.part(peer, "this agent was closed")
        begun = time.monotonic()

        def gone() -> bool:
            lines = list(self._lines.values())
            holds = self._calls or any(line.state < ENDED or line.moving or line.taken[0] for line in lines)
            return not holds and (not lines or time.monotonic() - begun > min(timeout, ANSWER_SECONDS))

        if not self.waits(gone, timeout):
            left = ", ".join(sorted(map(repr, self.peers)))
            raise TransferError(f"the packed transfers close, and writes of {left} may still move in the ring")
        self.stop(timeout)
        while self._lines:
            self._lines.popitem()[1].wire.close()
        if self.ring is not None:
            self.transport.drop_ring()
            self.ring = None

    # ---- the ring ----------------------------------------------------------------------------------------------------

    def end(self) -> Self:
        """Return this end, opened; raise KVPlanError if it is closed, or the ring cannot be allocated or registered."""
        self._check_open()
        with self.polling:
            if self.ring is None:
                device = self.device()
                ring = Ring(device, self.slots())
                self.transport.add_ring(ring.memory.data_ptr(), ring.memory.shape[1], device)
                self.traffic.open(ring, self.executor(device))
                self.ring = ring
                if self._threaded and device != "cpu":  # each submit of the thread finds it current: 10 to 20 us less
                    self.later(Device(ordinal_of(device)).enter)
        return self

    # ---- the thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread that makes progress, if a thread makes it."""
        if self._threaded and not self._thread.started and not self._stopped:
            self._thread.start()

    def stop(self, timeout: float) -> None:
        """End the thread; nothing moves any more, and the ring stays."""
        self.closed = self._stopped = True
        self.wake()
        self._thread.join(timeout)

    def threaded(self) -> bool:
        """Return whether the thread runs, so that waits sleep."""
        return self._thread.started and not self._stopped

    def _serve(self) -> None:
        """Look again and again, with naps, until the close. NIXL's own thread for this takes a whole core."""
        ctypes.CDLL(None).prctl(TIMER_SLACK, ctypes.c_ulong(SLACK_NS), 0, 0, 0)
        moved_at, failed = time.monotonic(), ""  # the error of the last look, which is logged once
        while not self._stopped:
            try:
                moved, error = self.poll(), ""
            except Exception as problem:
                moved, error = False, f"{type(problem).__name__}: {problem}"
                if error != failed:
                    log.exception("the thread that makes progress for NIXL met an error")
            failed, now = error, time.monotonic()
            if moved:
                moved_at = now
            if now - moved_at < SPIN_SECONDS:
                os.sched_yield()  # lets the threads run that gather, scatter, or wait for the interpreter
                continue
            rests = failed or (not self.busy and now - moved_at > REST_SECONDS)
            if self._bell.wait(REST_NAP if rests else BUSY_NAP if self.busy else IDLE_NAP):
                moved_at = time.monotonic()

    # ---- what a poll does --------------------------------------------------------------------------------------------

    def _look(self) -> bool:
        self._read()
        moved = bool(self._calls or self._received)
        while self._calls:
            self._calls.popleft()()
        while self._received:
            self._hear(*self._received.popleft())
        moved |= self._begin_waiting()
        now = self._now()
        timely = now > self._looked_at + LOOK_SECONDS
        for line in list(self._lines.values()):
            if timely or line.state != OPEN:
                self._keep(line, now)
        if timely:
            self._looked_at = now
            for transfer in list(self._mine):
                if (why := transfer.late(now)) is not None:
                    self.traffic.fail(transfer, why)
        return self.traffic.step(shared=len(self._lines) > 1) or moved

    def notes(self) -> list[tuple[str, bytes]]:
        """Return the users' notes that have come since the last call."""
        if self.threaded():
            self._read()
        else:
            self.poll()  # a note comes with the end of its transfer
        return self.inbox.take()

    def _read(self) -> None:
        """Take what has come: notes of the protocol for the next poll, and the users'."""
        with self._reading:
            for peer, note in self.transport.notes():
                (self._received if note.startswith(messages.MAGIC) else self.inbox).append((peer, note))

    def _begin_waiting(self) -> bool:
        """Begin transfers, or send more of them, once their lines are open and their gates are."""
        moved = False
        for transfer in list(self._waiting):
            try:
                if not transfer.stopped:
                    line = self.end()._lines.get(transfer.peer) or self._new_line(transfer.peer)
                    opened = transfer.pass_gates(self._now())
                    if transfer.opened and line.state == OPEN and (opened or not transfer.number):
                        self.traffic.order(line, transfer)
                    moved |= opened
            except Exception as error:  # it is the transfer's
                self.traffic.fail(transfer, str(error))
            if transfer.stopped or (transfer.number and not transfer.gated):
                self._waiting.remove(transfer)
        return moved

    # ---- lines -------------------------------------------------------------------------------------------------------

    def _new_line(self, peer: str) -> Line:
        line = self._lines[peer] = Line(peer, self.transport.wire(peer), self._now())
        return line

    def _keep(self, line: Line, now: float) -> None:
        """Do what is due for the sake of a line: greet, exchange words, or tell its end, and forget it."""
        active = bool(line.moving) or any(transfer.peer == line.name for transfer in self._waiting)
        due = now > line.said_at + (WORD_SECONDS if active else IDLE_WORD_SECONDS)
        if line.state < ENDED:
            if active and now > line.heard_at + SILENCE:
                self._end_line(line, f"it has said nothing for {SILENCE:g} seconds")
            elif due and line.state == OPEN:
                self._say(line, messages.WORD)
            elif due and active:
                self._greet(line)
        elif not line.taken[0]:  # an end, as a greeting, says that nothing is written here any more
            if due or not line.reported:
                self._tell_end(line)
            if line.reported and not line.moving and (line.state == OVER or not line.chunk_nbytes):
                del self._lines[line.name]
                line.wire.close()

    def _say(self, line: Line, kind: int, body: Callable[[], bytes] = bytes) -> None:
        line.said_at = self._now()
        if (error := error_of(lambda: line.say(kind, body(), transfer=line.theirs))) is not None:
            self._end_line(line, str(error))

    def _greet(self, line: Line) -> None:
        """Tell a peer where the ring is."""
        self._say(line, messages.HELLO, lambda: messages.body_of(self.ring.place, line.wire.metadata()))

    def _hear(self, peer: str, note: bytes) -> None:
        line = self._lines.get(peer)
        try:
            message = Message.of(note)
            if message.kind == messages.HELLO:
                self._hear_greeting(peer, message)
            elif message.kind == messages.END:
                self._hear_end(peer, message)
            elif line is None or line.theirs != message.life:
                self._refuse(peer, message)
            elif line.state == OPEN:
                line.heard_at = self._now()
                if not line.follows(message):
                    self._end_line(line, "one of its messages was lost, or came twice")
                elif message.kind != messages.WORD:
                    self.traffic.hear(line, message)
        except Exception as error:  # whatever a peer sends, the other peers go on
            log.warning("a message of %s: %s: %s", peer, type(error).__name__, error)
            if line is not None:
                self._end_line(line, f"a message of it cannot be right: {error}")

    def _hear_greeting(self, peer: str, message: Message) -> None:
        """Take a greeting: of a new end of the peer, or an answer."""
        line, answers = self._lines.get(peer), message.transfer
        if line is not None and line.theirs == message.life:
            if line.state == OPEN and not answers:  # the answer was lost
                self._greet(line)
        elif answers and (line is None or line.mine != answers):
            pass  # it answers an end that is over, and will hear of that
        elif line is not None and line.state != GREETS:  # it greets again, when nothing is written of this line
            self._end_line(line, "it has begun anew", over=True)
        else:
            self._open_line(line or self._new_line(peer), message)

    def _open_line(self, line: Line, hello: Message) -> None:
        place, metadata = messages.fields_of(hello.body)
        line.theirs, line.heard_at, line.place = hello.life, self._now(), Place(*place)
        try:
            line.wire.join(metadata, line.place)
            ring = self.end().ring
        except KVPlanError as error:
            self._end_line(line, str(error), over=True)
            return
        line.state, line.chunk_nbytes = OPEN, min(line.place.slot_nbytes, ring.place.slot_nbytes)
        if not hello.transfer:
            self._greet(line)

    def _refuse(self, peer: str, message: Message) -> None:
        """Tell the sender of a message that its line has ended, and that nothing of it moves here."""
        note = Message(messages.END, 0, transfer=message.life, chunk=1, body=b"it has ended").note()
        error_of(partial(self.transport.tell, peer, note))

    def _hear_end(self, peer: str, message: Message) -> None:
        """Take it that a peer has ended a line, and that nothing of it moves there.

        A peer that ends a line before it has heard of this end names its own.
        """
        line, mine = self._lines.get(peer), message.transfer
        if line is not None and (line.mine == mine if mine else line.theirs == message.life):
            why = message.body.decode(errors="replace")
            if line.state == GREETS:
                self.refusals[peer] = f"it takes no packed transfer: {why}"
            self._end_line(line, f"{peer!r} said: {why}", over=True)
        elif not message.chunk:
            self._refuse(peer, message)

    def _end_line(self, line: Line, why: str, *, over: bool = False) -> None:
        """End a line, if it has not ended: its transfers fail; ``over`` is whether nothing of the peer moves."""
        moving: list[Moving] = list(line.moving.values())
        if line.state < ENDED:
            line.state, line.why, line.said_at = ENDED, why, 0.0
            moving += [transfer for transfer in self._waiting if transfer.peer == line.name]
        if over:
            line.state = OVER
        for each in moving:
            self.traffic.fail(each, line.why)

    def _tell_end(self, line: Line) -> None:
        """Tell a peer that a line has ended, now that nothing of it is written here."""
        line.said_at = self._now()
        over, why = line.state == OVER, line.why[:1000].encode()
        message = Message(messages.END, line.mine, transfer=line.theirs, chunk=over, body=why)
        if (error := error_of(partial(line.wire.send, message.note()))) is None:
            line.reported = True
            return
        again, line.renewed = line.renewed, True
        dead = again or error_of(line.wire.renew) is not None
        line.reported |= dead
        self._end_line(line, str(error), over=dead)
