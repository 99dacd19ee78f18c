"""This process's end of packed transfers: its ring, its peers, and their greetings, lives and ends."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from kvplan.agents.latched_transfer import LatchedTransfer
from kvplan.agents.packed.line import (
    ANSWER_SECONDS,
    Clock,
    Line,
    Moving,
    Wire,
)
from kvplan.agents.packed.messages import CHUNK, FAIL, HELLO, WORD, Hello, Inbox, Message, read_end, refusal
from kvplan.agents.packed.packed_transfer import PackedTransfer, Wish
from kvplan.agents.packed.programs import Offer
from kvplan.agents.packed.readiness import gates_of
from kvplan.agents.packed.ring import Place, Ring
from kvplan.agents.packed.traffic import Traffic
from kvplan.base.process import check_process, generation
from kvplan.errors import KVPlanError, TransferError
from kvplan.execute.executor import Executor
from kvplan.execute.stats import Tally
from kvplan.plan.chunks import by_layer as layers_of
from kvplan.plan.chunks import outlines_of, sources_of
from kvplan.plan.plan import Plan

GROUPS = 8  # most groups of layers of a transfer by layer; as many as layers if each waits for an object of its own
PATIENCE = 30.0  # seconds without a chunk that moves, after which a transfer fails if nothing else was asked for
SILENCE = 30.0  # seconds without a word, after which a peer of transfers in flight is given up
WORD_SECONDS = 0.5  # between two words while something is in flight
IDLE_WORD_SECONDS = 5.0  # the same otherwise, so that nothing is kept of peers that have died
LOOK_SECONDS = 5e-3  # between two looks at deadlines
CLOSE_NAP = 1e-4  # seconds between two looks of a close

log = logging.getLogger("kvplan.agents")


class Reach(Protocol):
    """What an end needs of the transport."""

    def metadata(self) -> bytes:
        """Return what a peer needs to write to the ring."""

    def join(self, peer: str, metadata: bytes) -> None:
        """Take a peer's metadata; raise KVPlanError if it cannot be used."""

    def wire(self, peer: str, lost: Callable[[str], object]) -> Wire:
        """Return a wire to a peer; it calls ``lost``, in any thread, with the reason if the peer is gone."""

    def tell(self, peer: str, note: bytes) -> None:
        """Send a note to a peer without a line; raise KVPlanError if it is not sent."""

    def renew(self, peer: str) -> None:
        """Connect anew to a peer that the wire has lost; raise KVPlanError if that is refused."""

    def leave(self, peer: str) -> None:
        """Take it that nothing moves to or from a peer any more."""


def _no() -> bool:
    return False


class End:
    """This process's end of packed transfers.

    Progress is made by :meth:`poll`: the owner's thread or an engine's step calls it, and so does every wait for a
    transfer, unless a thread polls. Any thread may call the methods; one of them polls at a time.

    Args:
        ring: this process's slots.
        mover: gathers and scatters.
        reach: the transport.
        offer: returns the memory that peers may name.
        arrivals: called at every poll; it gives the notes that have come to :meth:`take`.
        notes: gets the notes of peers' transfers that have ended, each with the peer.
        threaded: returns whether a thread of the owner polls, so that waits sleep.
        wake: called when there is something to do, so that the thread polls now.
        tally: sums to which transfers are added.
        now: the clock.

    Attributes:
        ring, tally, wake, notes, threaded: as given.
        refusals: by peer, why it takes no packed transfer.
    """

    def __init__(
        self, ring: Ring, mover: Executor, reach: Reach, offer: Callable[[], Offer], arrivals: Callable[[], object], *,
        notes: Inbox | None = None, threaded: Callable[[], bool] = _no,
        wake: Callable[[], object] = _no, tally: Tally | None = None, now: Clock = time.monotonic,
    ) -> None:  # fmt: skip
        self.ring, self.wake = ring, wake
        self.tally = Tally() if tally is None else tally
        self.refusals: dict[str, str] = {}
        self._reach, self._arrivals, self.threaded, self._now = reach, arrivals, threaded, now
        self.notes = Inbox() if notes is None else notes
        self._traffic = Traffic(ring, mover, offer, self.notes, now)
        self._lines: dict[str, Line] = {}
        self._knocks: dict[str, Message] = {}  # greetings that wait until nothing of an earlier line moves
        self._inbox: deque[tuple[str, bytes]] = deque()
        self._calls: deque[Callable[[], object]] = deque()
        self._mine: set[PackedTransfer] = set()  # those that have not ended
        self._polling, self._looking = threading.RLock(), False
        self._closed = False
        self._looked_at = self._said_at = self._asked_at = 0.0
        self._generation = generation()

    # ---- any thread --------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether something is in flight."""
        waits = self._calls or self._inbox or self._knocks
        return bool(waits or self._traffic.moves or any(line.moving for line in list(self._lines.values())))

    @property
    def in_flight(self) -> int:
        """Number of transfers that this end has begun and that have not ended."""
        return len(self._mine)

    @property
    def begun(self) -> int:
        """Number of those that do not wait for their ``after=``."""
        return self.in_flight - sum(not moving.opened for moving in list(self._traffic.pending.values()))

    @property
    def peers(self) -> set[str]:
        """Names of the peers of lines that have not ended for good."""
        return {line.name for line in [*self._lines.values(), *self._traffic.leaving]}

    def answered(self, peer: str) -> bool:
        """Return whether a peer has answered a greeting."""
        line = self._lines.get(peer)
        return line is not None and line.theirs != 0

    def take(self, peer: str, note: bytes) -> None:
        """Take a message of a peer, a note that begins with ``MAGIC``. Any thread may call it, also within a poll."""
        self._inbox.append((peer, note))

    def later(self, call: Callable[[], object]) -> None:
        """Let the thread that polls call a function between two of its steps."""
        self._calls.append(call)
        self.wake()

    def give_up(self, transfer: PackedTransfer, why: str) -> None:
        """Let the thread that polls end a transfer."""

        def end() -> None:
            if (moving := self._traffic.pending.get(transfer)) is not None:
                self._traffic.fail(moving, why)

        self.later(end)

    def lost(self, peer: str, why: str, *, dead: bool = False) -> None:
        """End the line to a peer: its transfers fail. If it is ``dead``, nothing of it moves any more."""
        self.refusals.pop(peer, None)
        self.later(lambda: self._lose_all(peer, why, dead=dead))

    def served(self) -> frozenset[Moving]:
        """Return the transfers of peers that have not ended, or that still copy; call it by :meth:`later`."""
        lines = [*self._lines.values(), *self._traffic.leaving]
        return frozenset(
            one
            for line in lines
            for one in list(line.moving.values())
            if not one.mine and (one.error is None or one.copying)
        )

    def refuse(self, served: Iterable[Moving], why: str) -> None:
        """End some of the transfers that :meth:`served` returned; call it by :meth:`later`."""
        for moving in served:
            self._traffic.fail(moving, why)

    @property
    def copying(self) -> bool:
        """Whether something is gathered or scattered now."""
        return self._traffic.copying

    def submit(
        self, peer: str, plan: Plan, *, reading: bool, note: bytes = b"", after: Any = None,
        until: float | None = None, patience: float | None = PATIENCE, by_layer: bool = False, priority: str = "normal",
    ) -> PackedTransfer:  # fmt: skip
        """Begin a transfer, and return at once.

        Args:
            peer: name of the peer.
            plan: a plan between layouts of this process and layouts of the peer, of at most 64 programs.
            reading: whether it reads from the peer; otherwise it writes.
            note: note for the peer, which gets it after the last byte.
            after: a stream, an event, a Transfer, or None: the transfer begins when this has completed. For a push by
                layer, also a mapping from numbers of layers to such objects.
            until: when it is given up, as the clock counts; None for never, or as ``patience`` says.
            patience: seconds without a chunk that moves, after it could have begun, until it is given up.
            by_layer: whether layers arrive in their order; see :meth:`kvplan.Transfer.wait_layer`.
            priority: ``"high"`` or ``"normal"``; chunks of high priority come first.

        Raises:
            KVPlanError: an argument is wrong.
            TransferError: this end is closed.
        """
        check_process(self._generation)
        if self._closed:
            raise TransferError("the packed transfers of this agent are closed")
        mapping = isinstance(after, Mapping)
        if mapping and (reading or not by_layer):
            raise KVPlanError("after is a mapping of layers; give it with by_layer=True, and to write")
        outlines = outlines_of(plan)
        groups = (len(plan.layers) if mapping else GROUPS) if by_layer else 1
        layers, _ = layers_of(outlines, groups)
        wish = Wish(plan, peer, reading, note, until, patience, priority == "high")
        transfer = PackedTransfer(wish, self, layers, gates_of(plan, layers, after))

        self._mine.add(transfer)
        LatchedTransfer.add_done_callback(transfer, partial(self._mine.discard, transfer))

        def queue() -> None:
            try:
                line = self._line(peer)
            except KVPlanError as error:
                transfer.fail(str(error), "nothing was moved")
                return
            own = tuple(dict.fromkeys(pair[reading] for pair in plan.layouts))
            moving = Moving(
                line, outlines, groups, sends=not reading, urgent=wish.urgent, own=own, device=own[0].device,
                transfer=transfer, sources=sources_of(plan),
            )  # fmt: skip
            self._traffic.queue(transfer, moving)

        self.later(queue)
        if not self.threaded():
            self.poll()
        return transfer

    def poll(self) -> bool:
        """Move everything on that can move now; return whether anything did. One thread polls at a time."""
        if self._looking:
            return False
        with self._polling:
            try:
                self._looking = True
                return self._look()
            finally:
                self._looking = False

    def close(self, timeout: float = 5.0) -> None:
        """Part from all peers, and wait until nothing moves in the ring.

        Raises:
            TransferError: a peer has not said in time that its writes have ended, so that they may still move; or a
                chunk still moves here. Another call waits again.
        """
        if self._generation != generation():
            return
        self._closed = True
        for peer in list(self._lines):
            self.lost(peer, "this agent was closed")
        begun = time.monotonic()
        while (holds := self._calls or self._lines or self._traffic.unsettled) or self._traffic.leaving:
            seconds = time.monotonic() - begun
            if not holds and seconds > min(timeout, ANSWER_SECONDS):
                break  # a peer does not say that it has heard of it, and writes nothing
            if seconds > timeout:
                left = ", ".join(sorted(map(repr, self.peers)))
                raise TransferError(f"the packed transfers close, and writes of {left} may still move in the ring")
            if self.threaded():
                self.wake()
                time.sleep(CLOSE_NAP)
            elif not self.poll():
                time.sleep(CLOSE_NAP)
        self.later(self._leave_all)
        if not self.threaded():
            self.poll()

    def _leave_all(self) -> None:
        for line in self._traffic.leaving:
            line.wire.close()
            self._reach.leave(line.name)
        self._traffic.leaving.clear()

    # ---- the thread that polls ---------------------------------------------------------------------------------------

    def _look(self) -> bool:
        self._arrivals()
        moved = bool(self._calls or self._inbox or self._traffic.lost)
        gone = dict[Line, str]()  # several errors of a connection are one
        while self._traffic.lost:
            gone.update([self._traffic.lost.popleft()])
        for line, why in gone.items():
            self._doubt(line, why)
        while self._calls:
            self._calls.popleft()()
        while self._inbox:
            self._hear(*self._inbox.popleft())
        for peer in list(self._knocks):
            moved |= self._open(peer)
        self._traffic.shared = len(self._lines) > 1
        leaving = {line.name for line in self._traffic.leaving}
        moved |= self._traffic.step()
        for peer in leaving - self.peers:
            self._reach.leave(peer)
        now = self._now()
        if now - self._looked_at > LOOK_SECONDS:
            self._looked_at = now
            self._look_at_times(now)
        return moved

    def _doubt(self, line: Line, why: str) -> None:
        """Take it that the wire has lost a peer. It is dead if a new connection, by which it is asked, is lost, too."""
        self._lose(line, why, dead=line.doubted)
        if not line.doubted:
            line.doubted, line.parted = True, False  # so that it is told of the end, and answers
            try:
                self._reach.renew(line.name)
            except KVPlanError as error:
                self._lose(line, str(error), dead=True)

    def _line(self, peer: str) -> Line:
        """Return the line to a peer; greet it if there is none."""
        line = self._lines.get(peer)
        if line is None or line.why is not None:
            if self._closed:
                raise TransferError("this agent was closed")
            line = self._lines[peer] = self._begin(peer)
            if self._quiet(peer):
                self._greet(line)
            else:
                self._knocks.setdefault(peer, Message(HELLO, 0))
        return line

    def _begin(self, peer: str) -> Line:
        line = Line(peer, secrets.randbits(63) | 1, self._now())
        line.wire = self._reach.wire(peer, lambda why: self._traffic.lost.append((line, why)))
        return line

    def _quiet(self, peer: str) -> bool:
        """Return whether nothing of this end's earlier lines to a peer is written any more."""
        return not any(line.name == peer and not line.parted for line in self._traffic.leaving)

    def _greet(self, line: Line) -> None:
        """Tell a peer where the ring is, and so that nothing of earlier lines is written any more."""
        try:
            line.say(HELLO, Hello(line.theirs, self.ring.place, self._reach.metadata()).body())
        except KVPlanError as error:
            self._lose(line, str(error))

    def _hear(self, peer: str, note: bytes) -> None:
        line = self._lines.get(peer)
        try:
            message = Message.of(note)
            if message.kind == HELLO:
                self._greeted(peer, message)
            elif message.kind == FAIL and not message.transfer:
                self._parted(peer, message)
            elif line is None or line.theirs != message.life:
                self._unknown(peer, message)
            elif not line.hear(message, self._now()):
                self._lose(line, "one of its messages was lost, or came twice")
            elif message.kind != WORD:
                self._traffic.hear(line, message)
        except Exception as error:  # noqa: BLE001  # whatever a peer sends, the other peers go on
            log.warning("a message of %s: %s: %s", peer, type(error).__name__, error)
            if line is not None:
                self._lose(line, f"a message of it cannot be right: {error}")

    def _unknown(self, peer: str, message: Message) -> None:
        """Answer a message of a line that is not known here: nothing of it moves."""
        if message.kind not in (WORD, CHUNK) and all(line.theirs != message.life for line in self._traffic.leaving):
            self._refuse(peer, message.life, "it has ended")

    def _refuse(self, peer: str, life: int, why: str) -> None:
        with suppress(KVPlanError):
            self._reach.tell(peer, refusal(life, why))

    def _greeted(self, peer: str, message: Message) -> None:
        """Take a greeting: a new end of the peer, or an answer."""
        hello, line = Hello.of(message.body), self._lines.get(peer)
        answers, leaving = hello.answers, [one for one in self._traffic.leaving if one.name == peer]
        if line is not None and line.theirs == message.life:
            if not answers:  # the answer was lost
                self._greet(line)
            return
        if answers and (line is None or line.mine != answers):
            with suppress(KVPlanError):  # it answers an end that is over
                self._reach.join(peer, hello.metadata)
                self._refuse(peer, message.life, "it has ended")
            return
        if any(one.theirs == message.life for one in leaving):
            return  # it greeted more than once
        for old in leaving:
            self._lose(old, "it has begun anew", dead=True)
        if line is not None and line.theirs:
            self._lose(line, "it has begun anew", dead=True)
        if self._closed:
            self._refuse(peer, message.life, "it is closed")
        else:
            self._knocks[peer] = message
            self._open(peer)

    def _open(self, peer: str) -> bool:
        """Open the line to a peer that has greeted, or greet it, once nothing of earlier lines is written any more."""
        if not self._quiet(peer):
            return False
        message = self._knocks.pop(peer)
        line = self._lines.get(peer)
        if not message.life:  # this end greets
            if line is not None and not line.theirs:
                self._greet(line)
            return True
        if line is None:
            line = self._lines[peer] = self._begin(peer)
        hello = Hello.of(message.body)
        try:
            self._reach.join(peer, hello.metadata)
            line.place = Place(*hello.place)  # type: ignore[arg-type]  # a peer of the same version
            line.wire.ring(line.place.address, line.place.slots * line.place.slot_nbytes, line.place.device)
        except (KVPlanError, ValueError, TypeError) as error:
            line.theirs = message.life
            self._lose(line, str(error))
            return True
        line.theirs, line.heard_at = message.life, self._now()
        line.chunk_nbytes = min(line.place.slot_nbytes, self.ring.place.slot_nbytes)
        if not hello.answers:
            self._greet(line)
        return True

    def _parted(self, peer: str, message: Message) -> None:
        """Take it that a peer has ended a line, and that nothing of it moves there.

        A peer that ends a line before it has heard of this end names its own.
        """
        mine, why = read_end(message.body)
        if (knock := self._knocks.get(peer)) is not None and knock.life and knock.life == message.life:
            del self._knocks[peer]
        for line in [*self._lines.values(), *self._traffic.leaving]:
            if line.name == peer and (line.mine == mine if mine else line.theirs == message.life):
                if not line.theirs:
                    self.refusals[peer] = f"it takes no packed transfer: {why}"
                self._lose(line, f"{peer!r} said: {why}", dead=True)

    def _lose(self, line: Line, why: str, *, dead: bool = False) -> None:
        if self._lines.get(line.name) is line:
            del self._lines[line.name]
        self._traffic.lose(line, why, dead=dead)

    def _lose_all(self, peer: str, why: str, *, dead: bool) -> None:
        self._knocks.pop(peer, None)
        for line in [*self._lines.values(), *self._traffic.leaving]:
            if line.name == peer:
                self._lose(line, why, dead=dead)

    def _look_at_times(self, now: float) -> None:
        """Give up what is too late, and exchange words with the peers of what is in flight."""
        for transfer, moving in list(self._traffic.pending.items()):
            wish = transfer.wish
            if wish.until is not None and now > wish.until:
                self._traffic.fail(moving, "its deadline has passed")
            elif wish.patience is not None and now > moving.waits_since(now) + wish.patience:
                self._traffic.fail(moving, f"nothing of it has moved for {wish.patience:g} seconds")
        words, asks = now - self._said_at > WORD_SECONDS, now - self._asked_at > IDLE_WORD_SECONDS
        if words:
            self._said_at = now
        if asks:
            self._asked_at = now
        waited = {moving.line for moving in self._traffic.pending.values()}
        for line in [*self._lines.values(), *self._traffic.leaving]:
            waits = line in waited
            if line.why is None and (line.moving or waits) and now - line.heard_at > SILENCE:
                self._lose(line, f"it has said nothing for {SILENCE:g} seconds")
            elif words and waits and not line.theirs and line.name not in self._knocks:
                self._greet(line)
            elif asks or (words and (line.moving or waits or (line.why is not None and not line.parted))):
                try:
                    line.say(WORD)
                except KVPlanError as error:
                    self._lose(line, str(error))
